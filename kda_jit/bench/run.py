"""A run: every case checked, timed beside the peers, and tabled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from kda_jit import settings
from kda_jit.testing import Case

from . import machine, report
from .cases import TimedCase
from .lineup import Contest
from .rows import table_errors, time_case
from .timer import Clock, Timer
from .wall import WallTimer

#: Where saved runs are, in a checkout.
RESULTS = machine.ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Plan:
    """What a run does.

    speed, accuracy  the cases to time, and to table
    budget_ms        of one measurement
    command          how to ask for the same, and `commit` of what: both go into the run file
    """

    device: torch.device
    contest: Contest
    speed: Sequence[TimedCase]
    accuracy: Sequence[Case] = ()
    budget_ms: float = 150.0
    command: str = ""
    commit: str | None = None


class Progress(NamedTuple):
    """`done` of `total` cases are finished. `words`: what came of `case`; None: it begins."""

    done: int
    total: int
    case: str
    words: str | None


def run(
    plan: Plan, out: Path | None = None, progress: Callable[[Progress], None] = lambda _: None
) -> report.Run:
    """Measures. `out` is written after each case, so that a run which is cut short leaves what it
    has."""
    clock, device, contest = _clock(plan), plan.device, plan.contest
    bandwidth = clock.bandwidth()
    found: report.Run = machine.facts(device, plan.commit)
    found |= {"conditions": clock.conditions, "command": plan.command, "peers": contest.versions}
    found |= {"copy_tb_per_s": bandwidth / 1e12, "rows": [], "accuracy": [], "summary": {}}
    total = len(plan.speed) + len(plan.accuracy)
    with _schedule_kept():
        for done, case in enumerate(plan.speed):
            progress(Progress(done, total, case.name, None))
            row = time_case(case, contest.lineup(case), clock, bandwidth, device)
            found["rows"].append(row)
            found["summary"] = report.summary(found["rows"])
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if out:
                report.save(found, out)
            words = row.get("failed") or f"{row['us']:.1f} us"
            progress(Progress(done + 1, total, case.name, words))
        subjects = contest.tabled(device) if plan.accuracy else []
        for done, table in enumerate(plan.accuracy, len(plan.speed)):
            progress(Progress(done, total, table.regime, None))
            found["accuracy"].append(table_errors(table, subjects, device))
            progress(Progress(done + 1, total, table.regime, "tabled"))
    if out:
        report.save(found, out)
    return found


def _clock(plan: Plan) -> Clock:
    kind = Timer if plan.device.type == "cuda" else WallTimer
    return kind(budget_ms=plan.budget_ms)


@contextmanager
def _schedule_kept() -> Iterator[None]:
    """Subjects choose schedules by the environment; afterwards it says what it said before."""
    name = settings.SCHEDULE.name
    before = os.environ.get(name)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
