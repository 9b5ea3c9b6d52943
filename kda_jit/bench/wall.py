"""Time without a GPU: wall time of whole calls, in turns, whatever the caches hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .timer import Contender, summarise, turns

#: Rounds of one measurement, at least and at most.
ROUNDS = (5, 50)


class WallTimer:
    """Measures on the CPU.

    budget_ms  of one measurement, within the limits of ROUNDS
    """

    conditions = "wall time, medians"

    def __init__(self, *, budget_ms: float = 150.0) -> None:
        self.budget_ms = budget_ms

    def bandwidth(self, nbytes: int = 1 << 26, runs: int = 5) -> float:
        source = torch.ones(nbytes // 4, dtype=torch.int32)
        target = torch.empty_like(source)
        target.copy_(source)
        times = [_microseconds(lambda: target.copy_(source)) for _ in range(runs)]
        return 2e6 * nbytes / summarise(times).us

    def measure(self, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
        by_name = {contender.name: contender for contender in contenders}
        once_us = sum(_microseconds(contender.call) for contender in contenders)
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(1e3 * self.budget_ms / once_us)))
        samples: dict[str, list[float]] = {name: [] for name in by_name}
        for order in turns(list(by_name), rounds):
            for name in order:
                by_name[name].activate()
                samples[name].append(_microseconds(by_name[name].call))
        return {name: summarise(times)._asdict() for name, times in samples.items()}


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)
