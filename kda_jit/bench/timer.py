"""Time on a GPU: medians over rounds in which every contender runs once, each from a cold L2.

Machines, clocks and neighbours differ from day to day and drift within a minute; so contenders take
turns, in both orders, and only ratios of one run count.

Before each timed call a buffer several times the L2's size is written. It leaves the L2 full of its
own modified lines, whose write-back the call then pays for, at most some 10 microseconds; that is
how `triton.testing.do_bench` does it, too. Writing it also takes longer than the host code of any
call here (a quarter of a millisecond on an H200), so that the queue never runs dry and event times
are the GPU's, unless a call waits for the GPU itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

#: Rounds of one measurement, at least and at most.
ROUNDS = (20, 200)


class Timing(NamedTuple):
    """Microseconds: the median of `runs`, and the 10th and 90th percentile."""

    us: float
    p10: float
    p90: float
    runs: int


class HostTiming(NamedTuple):
    """Microseconds of one eager call.

    host_us  until it returns
    call_us  of wall time, host or GPU, whichever is longer, when calls follow each other, L2 warm
    """

    host_us: float
    call_us: float


class Profile(NamedTuple):
    """One call as CUPTI saw it run, L2 warm.

    kernels   microseconds by plain name
    launches  how many kernels, copies and fills it was
    """

    kernels: Mapping[str, float]
    launches: float


@dataclass(frozen=True)
class Contender:
    """`call` is timed; `activate` runs before it, untimed."""

    name: str
    call: Callable[[], object]
    activate: Callable[[], None] = lambda: None


def summarise(samples: Sequence[float]) -> Timing:
    """Samples in microseconds; percentiles are interpolated between neighbours."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Timing(at(0.5), at(0.1), at(0.9), len(ordered))


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[str, ...]]:
    """The order of each round: there and back, so that nobody always follows the same one."""
    for i in range(rounds):
        yield tuple(names) if i % 2 == 0 else tuple(reversed(names))


def plain_name(kernel: str) -> str:
    """A kernel's name without its return type, namespaces, template and other arguments.

    "void a::b::prepare<128, true>(Args)" -> "prepare"; "Memset (Device)" -> "Memset"; and of a
    mangled one, which CUPTI leaves so where it is long, "_Z7prepareIi..." -> "prepare".
    """
    if mangled := re.match(r"_Z(\d+)", kernel):
        return kernel[mangled.end() :][: int(mangled[1])]
    head = kernel.removeprefix("void ").partition("(")[0].partition("<")[0]
    return head.rpartition("::")[2].strip() or kernel


class Clock(Protocol):
    """Something that times contenders: a GPU's `Timer`, or `wall.WallTimer` without one."""

    #: What every time is, in words.
    conditions: str

    def bandwidth(self) -> float:
        """Bytes per second, read plus written, of a large copy."""
        ...

    def measure(self, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
        """By contender: us, p10, p90, runs, and what else this clock can see (see report)."""
        ...


class Timer:
    """Measures on the current CUDA device.

    warmup_ms  of each contender before its first measurement, so that clocks rise
    budget_ms  of GPU time for one measurement, within the limits of ROUNDS
    """

    conditions = "L2 cold, medians"

    def __init__(self, *, warmup_ms: float = 30.0, budget_ms: float = 150.0) -> None:
        self.warmup_ms, self.budget_ms = warmup_ms, budget_ms
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flood = torch.empty(max(1 << 30, 8 * l2), dtype=torch.uint8, device="cuda")

    def bandwidth(self) -> float:
        return copy_bandwidth()

    def measure(self, contenders: Sequence[Contender]) -> dict[str, dict[str, Any]]:
        cold, replayed = self.cold(contenders), self.replayed(contenders)
        timings: dict[str, dict[str, Any]] = {}
        for contender in contenders:
            timing = cold[contender.name]
            found = timing._asdict() | self.host(contender, timing.us)._asdict()
            if contender.name in replayed:
                found["graph_us"] = replayed[contender.name].us
            profile = self.profile(contender)
            found |= {"launches": profile.launches, "kernels": dict(profile.kernels)}
            timings[contender.name] = found
        return timings

    def cold(self, contenders: Sequence[Contender]) -> dict[str, Timing]:
        """Event times of eager calls, L2 cold, by name."""
        return {name: summarise(times) for name, times in self.samples(contenders).items()}

    def samples(self, contenders: Sequence[Contender]) -> dict[str, list[float]]:
        """Microseconds of each round behind `cold`, by name; all have the same rounds."""
        by_name = {contender.name: contender for contender in contenders}
        once_ms = sum(self._warm_up(contender) + 0.3 for contender in contenders)
        rounds = max(ROUNDS[0], min(ROUNDS[1], int(self.budget_ms / once_ms)))
        marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
            name: [] for name in by_name
        }
        for order in turns(list(by_name), rounds):
            for name in order:
                contender = by_name[name]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                contender.activate()
                self._flood.zero_()
                begin.record()
                contender.call()
                end.record()
                marks[name].append((begin, end))
        torch.cuda.synchronize()
        return {
            name: [1e3 * begin.elapsed_time(end) for begin, end in pairs]
            for name, pairs in marks.items()
        }

    def replayed(self, contenders: Sequence[Contender]) -> dict[str, Timing]:
        """The same for replays of CUDA graphs; without those that cannot be captured."""
        graphs: list[Contender] = []
        for contender in contenders:
            contender.activate()
            contender.call()  # whatever a first call on this shape does
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    contender.call()
            except RuntimeError:
                torch.cuda.synchronize()
                continue
            graphs.append(Contender(contender.name, graph.replay))
        return self.cold(graphs) if graphs else {}

    def host(self, contender: Contender, gpu_us: float) -> HostTiming:
        """`gpu_us`: about how long a call keeps the GPU busy."""
        calls = max(5, min(50, int(20e3 / gpu_us)))
        returned, finished = [], []
        contender.activate()
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                contender.call()
            returned.append(1e6 * (time.perf_counter() - start) / calls)
            torch.cuda.synchronize()
            finished.append(1e6 * (time.perf_counter() - start) / calls)
        return HostTiming(summarise(returned).us, summarise(finished).us)

    def profile(self, contender: Contender, calls: int = 3) -> Profile:
        """What runs on the GPU in a call."""
        contender.activate()
        contender.call()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            for _ in range(calls):
                contender.call()
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        launches = 0
        for event in profile.key_averages():
            if event.device_time_total > 0:
                name = plain_name(event.key)
                found[name] = found.get(name, 0.0) + event.device_time_total / calls
                launches += event.count
        return Profile(found, launches / calls)

    def _warm_up(self, contender: Contender) -> float:
        """Milliseconds of one call."""
        contender.activate()
        contender.call()
        torch.cuda.synchronize()
        start, calls = time.perf_counter(), 0
        while (passed := 1e3 * (time.perf_counter() - start)) < self.warmup_ms:
            contender.call()
            torch.cuda.synchronize()
            calls += 1
        return passed / max(1, calls)


def copy_bandwidth(nbytes: int = 1 << 30, runs: int = 20) -> float:
    """Bytes per second, read plus written, of copying `nbytes` of noise on the current device."""
    source = torch.empty(nbytes // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
    target.copy_(source)
    for mark in marks[:-1]:
        mark.record()
        target.copy_(source)
    marks[-1].record()
    torch.cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])]
    return 2e6 * nbytes / summarise(times).us
