"""What `make demo` runs: a batch of mixed lengths on every backend that can, checked and drawn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

import kda_jit

from .backends.base import LaunchRecord, Query, device_capability
from .reference import RecurrentResult, recurrent_kda
from .resolver import Resolution, explain, resolve
from .testing import (
    Case,
    Inputs,
    Limit,
    Worst,
    error_along,
    plain_loss,
    worst_block_error,
    worst_state_error,
)

LENGTHS = (300, 17, 0, 1024, 64)
LONGEST = LENGTHS.index(max(LENGTHS))
HEAD_DIM = 128
PIECE = 64  # tokens between two points of the curve of the state's norm


@dataclass(frozen=True)
class Check:
    """The worst block of one result, and what it may be off by."""

    name: str
    worst: Worst
    limit: Limit

    @property
    def passed(self) -> bool:
        return self.worst.error <= self.limit.allowed


@dataclass(frozen=True)
class Run:
    """One backend over the batch. `milliseconds`: median of a few calls, after a first one."""

    launch: LaunchRecord
    out: Tensor
    checks: tuple[Check, ...]
    milliseconds: float


@dataclass(frozen=True)
class Report:
    """All runs, the chosen backend's first, with the inputs and the exact result (float64)."""

    resolution: Resolution
    inputs: Inputs
    want: RecurrentResult
    runs: tuple[Run, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for run in self.runs for check in run.checks)


def query(device: torch.device) -> Query:
    """The demo's batch, as the resolver sees it."""
    return Query(
        K=HEAD_DIM,
        V=HEAD_DIM,
        dtype=torch.bfloat16,
        lower_bound=-5.0,
        device=device,
        capability=device_capability(device),
    )


def run(device: torch.device, *, heads: int, seed: int = 0) -> Report:
    """The batch through the best backend on `device`, then through every other one that can."""
    resolution = resolve(query(device))
    case = Case(seed=seed, lengths=LENGTHS, heads=heads, regime="random")
    inputs = case.tensors(device, torch.bfloat16, HEAD_DIM)
    want = inputs.reference()
    loss = plain_loss(inputs, want)
    limits = Limit(loss.out), Limit(loss.state)
    others = [name for name, reasons in explain(query(device)).items() if not reasons]
    names = dict.fromkeys([resolution.backend, *others])
    runs = tuple(_run(name, inputs, want, limits) for name in names)
    return Report(resolution, inputs, want, runs)


def _run(name: str, x: Inputs, want: RecurrentResult, limits: tuple[Limit, Limit]) -> Run:
    def call() -> tuple[Tensor, Tensor]:
        return kda_jit.prefill(*x.args, **x.kwargs, backend=name)

    out, state = call()
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.backend == name
    checks = (
        Check("out", worst_block_error(out, want.out, x.cu_seqlens), limits[0]),
        Check("final state", worst_state_error(state, want.final_state), limits[1]),
    )
    return Run(launch, out, checks, _milliseconds(call, x.q.device))


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    with torch.cuda.device(device):
        for mark in marks:
            mark.record()
            call()
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def error_of(out: Tensor, report: Report) -> tuple[list[int], Tensor]:
    """`error_along` the longest sequence."""
    begin, end = report.inputs.bounds[LONGEST : LONGEST + 2]
    return error_along(out[0, begin:end], report.want.out[0, begin:end])


def state_norms(report: Report) -> tuple[list[int], Tensor, Tensor]:
    """(tokens, exact, got): the longest sequence's state norms [points, HV], piece by piece.

    Both the recurrence and the chosen backend run PIECE tokens at a time, from the state that their
    last piece left: what an engine does with a prompt that it prefills in parts.
    """
    start = report.inputs.sequence(LONGEST)
    assert start.initial_state is not None
    exact, got = start.initial_state.double(), start.initial_state
    points, exact_norms, got_norms = [0], [exact.norm(dim=(2, 3))], [got.norm(dim=(2, 3))]
    for begin in range(0, LENGTHS[LONGEST], PIECE):
        end = min(begin + PIECE, LENGTHS[LONGEST])
        piece = start.pack([(0, begin, end)])
        exact = recurrent_kda(*piece.args, **piece.kwargs | {"initial_state": exact}).final_state
        got = kda_jit.prefill(
            *piece.args,
            **piece.kwargs | {"initial_state": got},
            backend=report.resolution.backend,
        )[1]
        points.append(end)
        exact_norms.append(exact.norm(dim=(2, 3)))
        got_norms.append(got.norm(dim=(2, 3)))
    return points, torch.cat(exact_norms).cpu(), torch.cat(got_norms).cpu()


def draw(report: Report, path: Path) -> None:
    """A picture of two panels: the error along the longest sequence, and its state's norm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tokens = LENGTHS[LONGEST]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for run in report.runs:
        points, error = error_of(run.out, report)
        left.plot(points, 1e3 * error, linewidth=1.5, label=run.launch.backend)
    points, error = error_of(report.want.out.to(torch.bfloat16), report)
    left.plot(points, 1e3 * error, "k:", linewidth=1.2, label="the exact output, rounded to bf16")
    left.set(
        title=f"RMS error of out against float64, {tokens} tokens",
        xlabel="token",
        ylabel="1e-3 of the output's RMS",
        xlim=(0, tokens),
        ylim=(0, None),
    )
    left.legend(frameon=False)

    points, exact, got = state_norms(report)
    heads = min(exact.shape[1], 4)
    for head in range(heads):
        (line,) = right.plot(points, exact[:, head], linewidth=1.2, label=f"head {head}, float64")
        right.plot(points, got[:, head], "o", color=line.get_color(), markersize=3.5)
    right.set(
        title=f"norm of the state (dots: {report.resolution.backend}, {PIECE} tokens a call)",
        xlabel="token",
        ylabel="|S|",
        xlim=(0, tokens),
        ylim=(0, None),
    )
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
