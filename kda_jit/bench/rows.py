"""Rows of a run file: who is right on a case, and how long they take; how far they are off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from kda_jit.errors import KdaError
from kda_jit.testing import (
    REGIMES,
    Case,
    relative_rms,
    worst_block_error,
    worst_state_error,
)

from . import gate
from .cases import TimedCase
from .lineup import BASELINE, AnyPeer, Lineup, gate_of
from .step_gate import StepGate
from .subject import Ours, Own, Subject
from .timer import Clock, Contender


def time_case(
    case: TimedCase, lineup: Lineup, clock: Clock, bandwidth: float, device: torch.device
) -> dict[str, Any]:
    """A row of the run file (see report). A wrong result of the first leaves it without times.

    bandwidth  bytes per second of a copy
    """
    row = case.head() | {"floor_us": case.floor_us(bandwidth)}
    ours, first = lineup.ours, lineup.ours[0]
    inputs, parts = case.inputs(device), [(part, part.inputs(device)) for part in case.parts]
    verdicts, wrong = _pass_gates([gate_of(*bound) for bound in ((case, inputs), *parts)], ours)
    if first.name in wrong:
        return row | {"failed": wrong[first.name]}
    right = [subject for subject in ours if subject.name in verdicts]
    agreeing: list[AnyPeer] = []
    for peer in lineup.peers:
        try:
            gate.check_peer(peer, inputs, gate.run_once(first, inputs)[:2])
            agreeing.append(peer)
        except Exception as error:  # it is their code: anything may happen
            wrong[peer.name] = _words(peer, error)
    if wrong:
        row["notes"] = list(wrong.values())

    contenders = [Contender(s.name, s.bind(inputs), s.activate) for s in (*right, *agreeing)]
    alone = {
        s.name: [Contender(f"{s.name}, {p.name}", s.bind(x), s.activate) for p, x in parts]
        for s in right
        if s == first or s in lineup.beside
    }
    timings = clock.measure([*contenders, *chain.from_iterable(alone.values())])
    for subject in right:
        verdict, timing = verdicts[subject.name], timings[subject.name]
        kernels = timing.get("kernels", verdict.record.kernels)  # a clock on the CPU sees none
        if missing := [kernel for kernel in verdict.record.kernels if kernel not in kernels]:
            seen = ", ".join(kernels) or "none"
            words = f"{subject.name}: expected {', '.join(missing)} on the GPU, the profiler saw"
            return row | {"failed": f"{words} {seen}"}
        timing |= subject.facts(verdict.record)
        timing["max_error"] = max(verdict.out_error, verdict.state_error)
        if parts and subject.name in alone:
            parts_us = sum(timings[part.name]["us"] for part in alone[subject.name])
            timing["of_parts"] = timing["us"] / parts_us
        timing |= {f"vs_{peer.name}": timings[peer.name]["us"] / timing["us"] for peer in agreeing}

    shown = timings[first.name]
    us = shown["us"]
    row |= {
        "us": us,
        "p10_us": shown["p10"],
        "p90_us": shown["p90"],
        "of_peak": row["floor_us"] / us,
        "tb_per_s": 1e-6 * case.floor_bytes / us,
    }
    row |= {
        key: shown[key] for key in ("host_us", "launches", "of_parts", "max_error") if key in shown
    }
    for name in (*(s.name for s in right if s in lineup.beside), *(p.name for p in agreeing)):
        row |= {f"{name}_us": timings[name]["us"], f"vs_{name}": timings[name]["us"] / us}
    return row | {"timings": timings}


def _pass_gates(
    gates: Sequence[gate.Gate | StepGate], ours: Sequence[Own]
) -> tuple[dict[str, gate.Verdict], dict[str, str]]:
    """By subject: the verdicts of those that passed, and what is wrong with those that did not.

    gates  that of the case, from which verdicts are, and those of its parts
    """
    verdicts, wrong = {}, {}
    for subject in ours:
        other = isinstance(subject, Ours) and subject.backend == "cuda"
        baseline = BASELINE if other and subject.name != BASELINE.name else None
        try:
            found = [truth.check(subject, baseline) for truth in gates]
            verdicts[subject.name] = found[0]
        except Exception as error:  # a compiler's, too: the other subjects still have their times
            wrong[subject.name] = _words(subject, error)
    return verdicts, wrong


def _words(subject: Subject, error: Exception) -> str:
    if isinstance(error, gate.WrongResult | KdaError):
        return str(error)
    return f"{subject.name}: {type(error).__name__}: {error}"


def table_errors(case: Case, subjects: Sequence[Subject], device: torch.device) -> dict[str, Any]:
    """A row of the accuracy table: every subject against the float64 recurrence."""
    inputs = case.tensors(device)
    want = inputs.reference()
    errors = {}
    for subject in subjects:
        if isinstance(subject, Ours):
            out, state, _ = gate.run_once(subject, inputs)
        else:
            subject.activate()
            out, state = subject.bind(inputs)()
        errors[subject.name] = {
            "out": relative_rms(out, want.out),
            "state": relative_rms(state, want.final_state),
            "worst_out": worst_block_error(out, want.out, inputs.cu_seqlens).error,
            "worst_state": worst_state_error(state, want.final_state).error,
        }
    return {
        "case": case.regime,
        "about": REGIMES[case.regime].about,
        "rounding": relative_rms(want.out.bfloat16(), want.out),
        "errors": errors,
    }
