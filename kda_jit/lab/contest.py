"""Two variants against each other: correct first, then in turns, so that drift hits both alike."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kda_jit.bench.cases import BenchCase
from kda_jit.bench.gate import Gate, WrongResult, run_once
from kda_jit.bench.registry import SPEED
from kda_jit.bench.timer import Contender, Profile, Timer
from kda_jit.errors import InputError
from kda_jit.testing import Inputs

from .running import Contestant, binary, forced, need_gpu, schedules_here
from .shown import Shown
from .variants import Variant

#: What is timed where no cases are named: many sequences, and a single long one.
CASES = ("8x1024_h64", "1x8192_h64")


class Ratio(NamedTuple):
    """Of two times, round by round: the median, and the quartiles on both sides of it."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Ratio:
        """first[i] / second[i]."""
        ratios = [a / b for a, b in zip(first, second, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return cls(median, low, high, len(ratios))

    @property
    def verdict(self) -> str:
        """What may be said of the second: faster or slower where half of all rounds agree."""
        if self.low <= 1.0 <= self.high:
            return "as fast"
        return "faster" if self.low > 1.0 else "slower"


@dataclass(frozen=True)
class Row:
    """One case. Microseconds; pairs are (first, second).

    schedule  of the cuda backend that ran
    us        medians, L2 cold
    ratio     first over second: above 1 the second is faster
    error     worst block against float64, of the outputs and states
    kernels   by name, as the profiler saw them with a warm L2
    """

    case: str
    schedule: str
    us: tuple[float, float]
    ratio: Ratio
    error: tuple[float, float]
    kernels: dict[str, tuple[float, float]]


@dataclass(frozen=True, repr=False)
class Bench(Shown):
    """Rows of a comparison of two variants."""

    names: tuple[str, str]
    rows: tuple[Row, ...]

    def __rich__(self) -> RenderableType:
        a, b = self.names
        table = Table(box=None, pad_edge=False)
        for heading in ("case", "schedule", "kernel"):
            table.add_column(heading, no_wrap=True)
        for heading in (f"{a} us", f"{b} us", "ratio", "quartiles", "max error", ""):
            table.add_column(heading, justify="right")
        for row in self.rows:
            r = row.ratio
            table.add_row(
                row.case, row.schedule, "", _us(row.us[0]), _us(row.us[1]), f"{r.median:.3f}",
                f"{r.low:.3f} to {r.high:.3f}", f"{max(row.error):.1e}", r.verdict,
            )  # fmt: skip
            for kernel, (first, second) in row.kernels.items():
                table.add_row("", "", kernel, _us(first), _us(second), f"{first / second:.3f}")
        words = f"ratio: time of {a} over that of {b}, round by round; above 1, {b} is faster"
        return Group(table, Text(words))


def bench(
    a: Variant,
    b: Variant | None = None,
    cases: Sequence[str | BenchCase] = CASES,
    *,
    schedule: str | None = None,
    budget_ms: float = 150.0,
) -> Bench:
    """Time two variants in turns, or one against the shipped kernels. Needs a GPU.

    cases      names of `kda_jit.bench.registry`, or any BenchCase
    schedule   None: that of the variant, else what the backend chooses where that reads the change,
               else the first that does
    budget_ms  of GPU time a case, within 20 to 200 rounds

    Each result is compared with float64 first; before and after the rounds it is asserted that each
    variant's own binary is what runs, and the profiler must have seen its kernels. Raises
    WrongResult for what does not pass, DeviceError without a GPU, CompileError.
    """
    device = need_gpu("lab.bench")
    first, second = (a, b) if b is not None else (a.before(), a)
    found = [case if isinstance(case, BenchCase) else _named(case) for case in cases]
    timer = Timer(budget_ms=budget_ms)
    rows = tuple(_row(first, second, case, schedule, timer, device) for case in found)
    return Bench((first.name, second.name), rows)


def _row(
    first: Variant,
    second: Variant,
    case: BenchCase,
    schedule: str | None,
    timer: Timer,
    device: torch.device,
) -> Row:
    inputs = case.inputs(device)
    pair = Contestant(first, device), Contestant(second, device)
    chosen = _schedule(pair, inputs, schedule, device)
    with forced(chosen):
        gate = Gate(case, inputs)
        verdicts = [gate.check(one) for one in pair]
        calls = [Contender(label, one.bind(inputs)) for label, one in zip("ab", pair, strict=True)]
        times = timer.samples(calls)
        profiles = [timer.profile(call) for call in calls]
        for one, profile in zip(pair, profiles, strict=True):
            _seen(one, profile, run_once(one, inputs).record.kernels)
    launch = verdicts[1].record.launch
    keys = [binary(one.variant, v.record.launch, device) for one, v in zip(pair, verdicts)]
    if keys[0] == keys[1] and first.text != second.text:
        raise WrongResult(f"{first.name} and {second.name} differ, but both ran binary {keys[0]}")
    names = dict.fromkeys([*verdicts[0].record.kernels, *verdicts[1].record.kernels])
    return Row(
        case.name,
        launch.schedule,
        (statistics.median(times["a"]), statistics.median(times["b"])),
        Ratio.of(times["a"], times["b"]),
        tuple(max(v.out_error, v.state_error) for v in verdicts),  # type: ignore[arg-type]
        {name: (profiles[0].kernels[name], profiles[1].kernels[name]) for name in names},
    )


def _schedule(
    pair: tuple[Contestant, Contestant], inputs: Inputs, asked: str | None, device: torch.device
) -> str:
    """What to run both under."""
    for variant in (one.variant for one in pair):
        asked = asked or variant.schedule
    both = [schedules_here(one.variant, device, asked) for one in pair]
    common = [name for name in both[0] if name in both[1]]
    if not common:
        raise InputError(
            f"a, b: expected variants of which some schedule reads both, got "
            f"{pair[0].variant!r} ({', '.join(both[0])}) and {pair[1].variant!r} "
            f"({', '.join(both[1])}). Compare each with lab.shipped()."
        )
    if asked is not None:
        return asked
    with forced("auto"):
        call = pair[1].bind(inputs)
        call()
        launch = pair[1].record(call).launch
    return launch.schedule if launch and launch.schedule in common else common[0]


def _seen(one: Contestant, profile: Profile, kernels: Sequence[str]) -> None:
    if missing := [kernel for kernel in kernels if kernel not in profile.kernels]:
        seen = ", ".join(profile.kernels) or "none"
        raise WrongResult(
            f"{one.name}: expected {', '.join(missing)} on the GPU, the profiler saw {seen}"
        )


def _named(name: str) -> BenchCase:
    known: Mapping[str, BenchCase] = {case.name: case for case in SPEED}
    if name not in known:
        raise InputError(f"cases: expected some of {', '.join(known)}, got {name!r}.")
    return known[name]


def _us(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}"
