"""Schedules on the emulated machine. A test with the argument `emulated` runs once for each way.

Warps take another order in each run: a failure prints the emulator that shows it again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.emulation import build
from tests.emulation.emulator import Emulator

#: KDA_EMULATION_RUNS=20 runs every test that draws its cases with so many times as many.
RUNS = int(os.environ.get("KDA_EMULATION_RUNS", "1"))

#: By its name: a schedule, and an emulator's options. `fused` shares units out where there are more
#: of them than clusters, `fused_whole` has a cluster for each.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "portable_sm80": ("portable", {"target": "sm_80"}),
    "portable_sm90": ("portable", {}),
    "hopper": ("hopper", {}),
    "hopper_single": ("hopper_single", {}),
    "fused": ("fused", {"sm_count": 4}),
    "fused_whole": ("fused", {"sm_count": 32}),
    "pipeline": ("pipeline", {"sm_count": 12, "any_plan": True}),
}
#: Those that compute alike, to the bit: all with wgmma.
HOPPER = tuple(name for name in WAYS if not name.startswith("portable"))


@dataclass(frozen=True)
class Way:
    """One way, whose emulators begin at seeds of this run's own."""

    name: str

    def __call__(self, seed: int | None = None, **options: Any) -> Emulator:
        schedule, usual = WAYS[self.name]
        options = usual | options
        seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        shown = "".join(f", {name}={value!r}" for name, value in options.items())
        print(f"Emulator({schedule!r}, seed={seed}{shown})")
        return Emulator(schedule, seed=seed, **options)


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    reason = build.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Way:
    return Way(request.param)


@pytest.fixture
def emulated(way: Way) -> Iterator[Emulator]:
    with way() as emulator:
        yield emulator
