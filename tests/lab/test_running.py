"""Checks and benchmarks, as far as they go without a GPU: a pretended one, and no kernel."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kda_jit import lab, settings
from kda_jit.backends.base import LaunchRecord
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.bench.cases import BenchCase
from kda_jit.bench.gate import WrongResult
from kda_jit.bench.timer import Profile
from kda_jit.errors import DeviceError, InputError
from kda_jit.jit import sources
from kda_jit.lab import contest, running, trial
from kda_jit.testing import Case, Inputs
from kda_jit.testing.faults import FAULTS
from kda_jit.testing.runner import Runner

from .conftest import HEADER, needs_nvrtc

DEVICE = torch.device("cuda", 0)
CASE = BenchCase("small", (64,), 1)
PORTABLE = SCHEDULES["portable"]
HOPPER = SCHEDULES["hopper"]


def record(schedule: str, target: str = "sm_90a", backend: str = "cuda") -> LaunchRecord:
    kernels = tuple(launch.entry for launch in SCHEDULES[schedule].launches)
    return LaunchRecord(backend, kernels, schedule, target)


@pytest.fixture
def mine(kernels: Path) -> lab.Variant:
    patch = "<<<<\n    return x + kStep;\n====\n    return x * kStep;\n>>>>\n"
    return lab.variant("mine", base=HEADER, patch=patch)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of capability 9.0, as far as one asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_that_is_what_is_said(mine: lab.Variant) -> None:
    for call in (lab.check, lab.bench):
        with pytest.raises(DeviceError, match=r"expected a CUDA GPU .* got none.*lab\.build"):
            call(mine)


def test_schedules_that_run_here_and_read_the_change(mine: lab.Variant, hopper: None) -> None:
    assert running.schedules_here(mine, DEVICE, None) == ["portable"]
    assert running.schedules_here(lab.shipped(), DEVICE, "hopper") == ["hopper"]
    with pytest.raises(InputError, match=rf"reads {HEADER} \(portable\), got 'hopper'"):
        running.schedules_here(mine, DEVICE, "hopper")
    with pytest.raises(InputError, match=r"a file of its own"):
        running.schedules_here(lab.variant("toy", ""), DEVICE, None)


def test_a_forced_schedule_ends_with_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    name = settings.SCHEDULE.name
    with running.forced("portable"):
        assert settings.schedule() == "portable"
    assert name not in os.environ
    monkeypatch.setenv(name, "hopper")
    with pytest.raises(ZeroDivisionError), running.forced("portable"):
        _ = 1 / 0
    assert os.environ[name] == "hopper"


def test_what_ran_is_the_variants_own_or_is_named(
    mine: lab.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(running, "is_loaded", lambda spec, index: (spec, sources.root()) in loaded)
    why = running.not_its_own
    assert "hopper ran, which does not read" in why(mine, record("hopper"), DEVICE)
    assert "the cuda backend" in why(mine, record("portable", backend="triton"), DEVICE)
    assert "the cuda backend" in why(mine, None, DEVICE)
    # Loaded from the shipped sources alone: then the shipped kernel ran.
    loaded.append((PORTABLE.spec("sm_90a"), sources.root()))
    assert "not loaded from the variant's sources" in why(mine, record("portable"), DEVICE)
    loaded.append((PORTABLE.spec("sm_90a"), mine.tree.folder.resolve()))
    assert why(mine, record("portable"), DEVICE) is None


def test_laws_see_the_variant_and_claim_no_other_schedule(
    mine: lab.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots, ran = [], record("portable")

    def prefill(self: Runner, inputs: object, **buffers: object) -> tuple[str, str]:
        roots.append(sources.root())
        return "out", "state"

    monkeypatch.setattr(Runner, "prefill", prefill)
    monkeypatch.setattr(running, "last_launch", lambda: ran)
    monkeypatch.setattr(running, "is_loaded", lambda spec, index: True)
    subject = running.VariantRunner("cuda", DEVICE, mine)
    x = Case().tensors()
    assert subject.prefill(x) == ("out", "state")
    assert roots == [mine.tree.folder.resolve()]
    ran = record("hopper")
    with pytest.raises(NotImplementedError, match=r"hopper ran"):
        subject.prefill(x)
    ran = LaunchRecord("none")
    subject.prefill(x)
    ran = record("portable")
    monkeypatch.setattr(running, "is_loaded", lambda spec, index: False)
    with pytest.raises(AssertionError, match=r"not loaded"):
        subject.prefill(x)


def test_a_ratio_is_taken_round_by_round() -> None:
    """Drift that both see alike does not widen it."""
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratio = contest.Ratio.of([1.1 * d for d in drift], drift)
    assert ratio.median == pytest.approx(1.1)
    assert (ratio.low, ratio.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert (ratio.verdict, ratio.rounds) == ("faster", 5)
    assert contest.Ratio.of([1, 1, 1, 2], [1, 1, 2, 1]).verdict == "as fast"
    assert contest.Ratio.of([1, 1, 1], [2, 2, 2]).verdict == "slower"


class Bench:
    """lab.bench with everything that needs a GPU pretended. Who ran is asked of `schedule`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Path]] = []
        self.schedule = "portable"
        self.binaries = {"shipped": "0", "mine": "1"}
        self.seen = ("kda_prepare", "kda_recurrence")
        self.after_gate = False
        patch.setattr(contest, "need_gpu", lambda caller: DEVICE)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(BenchCase, "inputs", lambda case, device: "inputs")
        patch.setattr(running.Ours, "bind", self.bind)
        patch.setattr(running, "last_launch", lambda: record(self.schedule))
        patch.setattr(running, "is_loaded", lambda spec, index: True)
        patch.setattr(
            contest, "binary", lambda variant, launch, device: self.binaries[variant.name]
        )
        patch.setattr(contest, "Gate", lambda case, inputs: SimpleNamespace(check=self.check))
        patch.setattr(contest, "Timer", lambda budget_ms: self)

    def bind(self, ours: object, inputs: object = None) -> object:
        def call() -> tuple[str, str]:
            self.calls.append((settings.schedule(), sources.root()))
            return "out", "state"

        return call

    def check(self, subject: running.Contestant) -> SimpleNamespace:
        ran = contest.run_once(subject, "inputs").record
        return SimpleNamespace(record=ran, out_error=1e-3, state_error=2e-3)

    def samples(self, contenders: list) -> dict[str, list[float]]:
        for one in contenders:
            one.call()
        if self.after_gate:
            self.schedule = "hopper"
        return {one.name: [t * k for k in (1, 2, 3)] for one, t in zip(contenders, (30.0, 20.0))}

    def profile(self, contender: object) -> Profile:
        return Profile(dict.fromkeys(self.seen, 10.0), 2.0)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    yield Bench(monkeypatch)
    assert settings.SCHEDULE.name not in os.environ


def test_a_bench_runs_each_in_its_own_sources_under_one_schedule(
    mine: lab.Variant, bench: Bench
) -> None:
    found = lab.bench(mine, cases=[CASE])
    (row,) = found.rows
    assert found.names == ("shipped", "mine")
    assert (row.case, row.schedule, row.us) == ("small", "portable", (60.0, 40.0))
    assert row.ratio.median == pytest.approx(1.5)
    assert row.kernels == dict.fromkeys(bench.seen, (10.0, 10.0))
    assert row.error == (2e-3, 2e-3)
    text = str(found)
    assert "faster" in text
    assert "1.500 to 1.500" in text
    first, *rest = bench.calls  # the first finds out what the backend chooses
    assert first == ("auto", mine.tree.folder.resolve())
    assert {schedule for schedule, _ in rest} == {"portable"}
    assert len({root for _, root in rest}) == 2
    assert sources.root() not in {root for _, root in bench.calls}


def test_where_the_backend_would_not_run_the_change_a_schedule_is_found_that_does(
    mine: lab.Variant, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = settings.schedule
    monkeypatch.setattr(
        running, "last_launch", lambda: record("hopper" if asked() == "auto" else asked())
    )
    (row,) = lab.bench(mine, cases=[CASE]).rows
    assert row.schedule == "portable"


@pytest.mark.parametrize(
    "spoil, words",
    [
        ({"schedule": "hopper"}, r"hopper ran, which does not read"),
        ({"after_gate": True}, r"hopper ran, which does not read"),
        ({"binaries": {"shipped": "0", "mine": "0"}}, r"differ, but both ran binary 0"),
        ({"seen": ("kda_prepare",)}, r"expected kda_recurrence on the GPU, the profiler saw kda_p"),
    ],
)
def test_a_bench_of_something_else_has_no_times(
    mine: lab.Variant, bench: Bench, spoil: dict, words: str
) -> None:
    vars(bench).update(spoil)
    with pytest.raises(WrongResult, match=words):
        lab.bench(mine, cases=[CASE])


def test_cases_are_named_as_in_the_registry(mine: lab.Variant, bench: Bench) -> None:
    with pytest.raises(InputError, match=r"cases: expected some of .*, got 'none_such'"):
        lab.bench(mine, cases=["none_such"])
    assert [row.case for row in lab.bench(mine).rows] == list(contest.CASES)


@needs_nvrtc
def test_other_threads_compile_the_shipped_kernels_meanwhile(mine: lab.Variant) -> None:
    from kda_jit.jit import compile_spec

    spec = PORTABLE.spec("sm_80")
    keys: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait(10)
        keys["other"] = compile_spec(spec).key
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with mine.active():
        inside.set()
        done.wait(60)
        keys["mine"] = compile_spec(spec).key
    thread.join()
    assert keys["other"] == compile_spec(spec).key != keys["mine"]


class Torch(Runner):
    """Stands in for the variant's runner: the torch backend on the CPU, and the schedule it saw."""

    seen: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, device: torch.device, variant: lab.Variant) -> None:
        super().__init__("torch", torch.device("cpu"))

    def prefill(self, inputs: Inputs, **buffers: object) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(settings.schedule())
        return super().prefill(inputs, **buffers)


def test_a_check_tries_the_laws_under_each_schedule(
    mine: lab.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "need_gpu", lambda caller: DEVICE)
    monkeypatch.setattr(trial, "schedules_here", lambda *asked: ["portable", "hopper"])
    monkeypatch.setattr(trial, "VariantRunner", Torch)
    monkeypatch.setattr(Torch, "seen", [])
    few = {"laws": ["recurrence", "scale"], "regimes": ["random"]}
    good = lab.check(mine, **few)
    assert good.passed
    assert list(dict.fromkeys(Torch.seen)) == ["portable", "hopper"]
    assert "mine, hopper: holds every law" in str(good)
    with FAULTS["dropped_beta"]():
        bad = lab.check(mine, **few)
    assert not bad.passed
    assert "mine, portable: breaks 1 of 2 cells" in str(bad)
    assert "recurrence x random: out: relative RMS error" in str(bad)
    none = lab.check(mine, laws=["graph"], regimes=["random"])
    assert not none.passed
    assert "was not tried: a CUDA graph needs a GPU" in str(none)
