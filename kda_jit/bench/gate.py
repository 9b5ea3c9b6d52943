"""What stands between a case and its time: the right result, from the kernels asked for.

Everything here raises WrongResult, whose message the run file keeps in place of a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_jit.reference import RecurrentResult, chunk_kda
from kda_jit.testing import (
    Inputs,
    Limit,
    assert_close,
    plain_loss,
    relative_rms,
)

from .cases import BenchCase
from .subject import Own, Subject

#: What a peer may differ from ours, relative RMS over everything: a wrong argument costs more.
PEER_LIMIT = 0.03


class WrongResult(Exception):
    """A subject computed something else than it should, or something else computed it."""


class Verdict(NamedTuple):
    """A passed gate.

    record       what ran on the full shape, as the subject records it
    out_error    worst block against float64, on the short shape; state_error likewise
    """

    record: Any
    out_error: float
    state_error: float


class Exact(NamedTuple):
    """Inputs, the exact (out, final_state) of them, and what those may be missed by."""

    inputs: Inputs
    results: tuple[Tensor, Tensor]
    limits: tuple[Limit, Limit]

    @classmethod
    def of(cls, inputs: Inputs, exact: RecurrentResult) -> Exact:
        loss = plain_loss(inputs, exact)
        return cls(inputs, (exact.out, exact.final_state), (Limit(loss.out), Limit(loss.state)))


class Gate:
    """A prefill's exact results, computed once for all subjects.

    Three comparisons, each by its worst block: all heads of a short version with the float64
    recurrence; first, middle and last head of the full shape with the float64 chunk form; and all
    of the full shape with a baseline, another schedule, whose errors are its own.
    """

    def __init__(self, case: BenchCase, inputs: Inputs) -> None:
        """inputs: those of the full shape."""
        self.full = inputs
        short = case.shortened().inputs(inputs.q.device)
        self._short = Exact.of(short, short.reference())
        self._heads = sorted({0, case.heads // 2, case.heads - 1})
        some = take_heads(inputs, self._heads)
        exact = chunk_kda(*some.args, **some.kwargs, dtype=torch.float64)
        self._some = Exact.of(some, exact)

    def check(self, subject: Own, baseline: Own | None = None) -> Verdict:
        """Raises WrongResult where `subject` fails one of the three."""
        short, some, heads = self._short, self._some, self._heads
        out, state, _ = run_once(subject, short.inputs)
        errors = compare(f"{subject.name}, short", (out, state), short)

        out, state, record = run_once(subject, self.full)
        compare(f"{subject.name}, full", (out[:, :, heads], state[:, heads]), some)
        if baseline is not None:
            # Two errors, each of up to twice the plain one but unlikely to add up in one block.
            wide = (replace(some.limits[0], factor=3.0), replace(some.limits[1], factor=3.0))
            other = Exact(self.full, run_once(baseline, self.full)[:2], wide)
            compare(f"{subject.name}, full, against {baseline.name}", (out, state), other)
        return Verdict(record, *errors)


def check_peer(peer: Subject, inputs: Any, ours: tuple[Tensor, Tensor]) -> None:
    """A peer that is called wrongly may be fast; it must agree with `ours`, (out, states)."""
    peer.activate()
    for name, got, want in zip(("out", "state"), peer.bind(inputs)(), ours, strict=True):
        error = relative_rms(got, want)
        if not error <= PEER_LIMIT:
            raise WrongResult(
                f"{peer.name}: {name} differs from ours by {error:.1e} (relative RMS); allowed "
                f"{PEER_LIMIT:.0e}"
            )


class Ran(NamedTuple):
    """What one call returned, and the subject's record of it."""

    out: Tensor
    state: Tensor
    record: Any


def run_once(subject: Own, inputs: Any) -> Ran:
    """One call in fresh buffers, made of the kernels that `subject` names."""
    subject.activate()
    call = subject.bind(inputs)
    out, state = call()
    record = subject.record(call)
    if reason := subject.misnamed(record):
        raise WrongResult(reason)
    return Ran(out, state, record)


def take_heads(inputs: Inputs, heads: list[int]) -> Inputs:
    """These heads alone (HV = H)."""
    x, state = inputs, inputs.initial_state
    return x.replace(
        q=x.q[:, :, heads],
        k=x.k[:, :, heads],
        v=x.v[:, :, heads],
        g=x.g[:, :, heads],
        beta=x.beta[:, :, heads],
        A_log=x.A_log[heads],
        dt_bias=x.dt_bias[heads],
        initial_state=None if state is None else state[:, heads],
    )


def compare(name: str, got: tuple[Tensor, Tensor], want: Exact) -> tuple[float, float]:
    """got: (out, final_state). Returns the errors of the worst blocks of both."""
    cu_seqlens = want.inputs.cu_seqlens
    try:
        out = assert_close(
            f"{name}: out", got[0], want.results[0], want.limits[0], cu_seqlens=cu_seqlens
        )
        state = assert_close(f"{name}: final_state", got[1], want.results[1], want.limits[1])
    except AssertionError as error:
        raise WrongResult(str(error)) from None
    return out.error, state.error
