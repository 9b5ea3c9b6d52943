"""`kda-jit bench`, as a person would call it: on the CPU, or on a saved run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("rich", reason="the command needs rich")

from typer.testing import CliRunner

from kda_jit.bench import lineup, registry, report, timer
from kda_jit.bench import run as run_
from kda_jit.bench.cases import BenchCase
from kda_jit.bench.steps import StepCase
from kda_jit.bench.subject import Ours
from kda_jit.cli import app, describe
from kda_jit.cli import bench as command
from tests.bench.runs import row, run

CPU = torch.device("cpu")
Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """call(*words) -> what was printed; asserts the exit code, 0 unless `code` says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("KDA_JIT_FLASHKDA_SO", raising=False)
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)
    monkeypatch.setattr(command, "_device", lambda: CPU)

    def run(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["bench", *map(str, words)], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved.json"
    report.save(run(row("a", [64], 2, 100.0, 300.0), row("b", [128], 2, 50.0, 90.0)), path)
    return path


# --- on the CPU -------------------------------------------------------------------------------


def test_lengths_of_ones_own_on_the_cpu(call: Call, tmp_path: Path) -> None:
    text = call("--lens", "30,0,17", "--lens", 20, "--heads", 1, "--out", "run.json")
    assert re.search(r"^30\+0\+17_h1 +\d", text, re.M)
    found = report.load(tmp_path / "run.json")
    assert (found["gpu"], found["conditions"]) == ("CPU", "wall time, medians")
    assert [r["lengths"] for r in found["rows"]] == [[30, 0, 17], [20]]
    for r in found["rows"]:
        (ours,) = r["timings"].values()
        assert ours["backend"] == "torch"
        assert 0 < ours["p10"] <= r["us"] <= ours["p90"]
        assert r["of_peak"] == pytest.approx(r["floor_us"] / r["us"], rel=1e-3)
        assert 0 < r["max_error"] < 5e-3


def test_without_a_gpu_the_small_suite_is_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = BenchCase("tiny", (9,), 1)
    monkeypatch.setitem(registry.SUITES, "small", (tiny,))
    assert re.search(r"^tiny +\d", call("--budget", 1), re.M)


def test_steps_run_on_the_cpu_by_torch(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepCase("mixed", 1, decodes=1, prefills=(17,), verified=2, drafts=1)
    monkeypatch.setitem(registry.SUITES, "decode", (StepCase("two", 1, "decode", decodes=2),))
    monkeypatch.setitem(registry.SUITES, "layer", (step,))
    call("--suite", "decode", "--suite", "layer", "--budget", 1, "--out", "run.json")
    rows = report.load(Path("run.json"))["rows"]
    assert [(r["case"], next(iter(r["timings"]))) for r in rows] == [
        ("two", "torch"), ("mixed", "torch"),
    ]  # fmt: skip
    assert {t["backend"] for r in rows for t in r["timings"].values()} == {"torch"}


def test_each_case_is_kept_and_told_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [BenchCase("one", (3,), 1), BenchCase("two", (4,), 1)]
    written, told = [], []
    monkeypatch.setattr(report, "save", lambda found, path: written.append(len(found["rows"])))
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "portable")
    plan = run_.Plan(CPU, lineup.Contest([Ours("torch")], []), cases, budget_ms=1.0)
    found = run_.run(plan, Path("x.json"), told.append)
    assert written == [1, 2, 2]
    assert [(p.done, p.total, p.case) for p in told] == [
        (0, 2, "one"), (1, 2, "one"), (1, 2, "two"), (2, 2, "two"),
    ]  # fmt: skip
    assert [p.words for p in told[::2]] == [None, None]
    assert told[1].words == f"{found['rows'][0]['us']:.1f} us"
    assert run_.os.environ["KDA_JIT_SCHEDULE"] == "portable"


def test_a_wrong_result_has_no_time_and_exit_status_1(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kda_jit.bench import subject

    real = subject.prefill

    def prefill(*args: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = real(*args, **options)
        out[0, 3] *= 1.5
        return out, state

    monkeypatch.setattr(subject, "prefill", prefill)
    text = call("--lens", 20, "--heads", 1, code=1)
    assert "1x20_h1: torch, short: out: relative RMS error" in text
    assert not re.search(r"^1x20_h1 +\d+ +\d+ +\d+", text, re.M)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--case", "nine"], "InputError: case: expected one of 8x2048_h16"),
        (["--suite", "nine"], "InputError: suite: expected one of seed, flashkda"),
        (["--lens", "x"], "InputError: lens: expected lengths such as 300,17,4096, got 'x'"),
        (["--backend", "cuda"], "NoBackendError: backend='cuda': expected a call that"),
        (["--backend", "cud"], "BackendNameError: backend: expected one of auto"),
        (["--peer", "flashkda"], "InputError: peer: expected one that runs here, got 'flashkda'"),
        (["--save"], "InputError: save: expected whole suites on a GPU, got a machine without"),
        (["--from", "no.json"], "InputError: run file: expected a run saved as json, got no.json"),
        (
            ["--from", "other.json"],
            "InputError: run file: expected a run, got other.json, which lac",
        ),
        (["--against", "no.json"], "InputError: run file: expected a run saved as json"),
        (["--from", "saved.json", "--lens", "3"], "InputError: from: expected a saved run to look"),
        (["--from", "saved.json", "--plot", "saved.json"], "InputError: plot: expected a folder"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_exit_status_2(
    call: Call, saved: Path, words: list[str], message: str
) -> None:
    saved.with_name("other.json").write_text('{"gpu": "H200", "date": "2026-01-02"}')
    assert message in call(*words, code=2)


def test_pictures_need_matplotlib(call: Call, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = call("--from", saved, "--plot", "pictures", code=2)
    assert "plot: expected matplotlib to draw with, got none: pip install" in text


def test_help_names_every_suite_and_peer() -> None:
    (found,) = [c for c in describe() if c.usage.startswith("bench")]
    helps = {option.names: option.help for option in found.options}
    for option, names in (
        ("--suite", registry.SUITE_NAMES),
        ("--peer", (*lineup.PEERS, *lineup.STEP_PEERS)),
    ):
        assert set(names) <= set(re.findall(r"[\w-]+", helps[option]))


def test_list_searches_every_suite(call: Call) -> None:
    assert call("--list", "--suite", "decode", "--suite", "layer", "--case", "*k7*").split() == [
        "verify_64_k7_h16", "step_verify_64_k7_h16", "step_2x1024_and_verify_64_k7_h16",
        "step_verify_64_k7_h12", "step_2x1024_and_verify_64_k7_h12",
    ]  # fmt: skip
    assert call("--list", "--case", "decode_16_*", "--case", "*table_3*").split() == [
        "decode_16_h16", "table_3_g_minus_8",
    ]  # fmt: skip
    assert len(call("--list").split()) > 60


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kda_jit.bench", "--list", "--suite", "seed"],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["8x2048_h16", "4x8192_h16", "1x16384_h16"]


# --- where there is a GPU, pretended ----------------------------------------------------------


class FakeTimer(timer.Timer):
    def __init__(self, budget_ms: float) -> None:
        pass

    def bandwidth(self) -> float:
        return 4e12

    def measure(self, contenders: list) -> dict:
        return {c.name: {"us": 10.0, "p10": 9.0, "p90": 11.0, "runs": 20} for c in contenders}


@pytest.mark.parametrize(
    "suite, folder, name",
    [("flashkda", ".", "g-2026-01-02-flashkda"), ("long", "suites", "g-2026-01-02-long")],
)
def test_save_keeps_readmes_suites_apart_from_the_others(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, suite: str, folder: str, name: str
) -> None:
    facts = {"gpu": "G", "date": "2026-01-02", "commit": "c", "versions": {}}
    monkeypatch.setitem(registry.SUITES, suite, (BenchCase("tiny", (5,), 1),))
    monkeypatch.setattr(command, "_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(command, "_backend", lambda asked, device: "torch")
    monkeypatch.setattr(sys, "argv", ["kda-jit", "bench", "--suite", suite, "--save"])
    real = BenchCase.inputs
    monkeypatch.setattr(BenchCase, "inputs", lambda self, device, seed=0: real(self, CPU, seed))
    monkeypatch.setattr(run_, "Timer", FakeTimer)
    monkeypatch.setattr(run_.machine, "facts", lambda *_: facts | {"device": {"driver": ""}})
    monkeypatch.setattr(run_, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    text = call("--suite", suite, "--save")
    path = tmp_path / "results" / folder / f"{name}.json"
    assert f"written: {path}" in text.replace("\n", "")
    found = json.loads(path.read_text())
    assert [(r["case"], r["us"]) for r in found["rows"]] == [("tiny", 10.0)]
    assert found["conditions"] == "L2 cold, medians"
    assert found["command"] == f"kda-jit bench --suite {suite} --save"
    refused = call("--suite", suite, "--case", "tiny", "--save", code=2)
    assert "save: expected whole suites on a GPU, got single cases" in refused


# --- on a saved run ---------------------------------------------------------------------------


def test_a_saved_run_is_shown_as_table_markdown_and_pictures(
    call: Call, saved: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    text = call("--from", saved, "--plot", "pictures")
    assert re.search(r"^a +100 ", text, re.M)
    pictures = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    assert pictures == ["floor.png", "length.png", "roofline.png"]
    assert f"written: {Path('pictures') / 'length.png'}" in text
    assert "| a | 100 |" in call("--from", saved, "--markdown")


def test_against_an_earlier_run(call: Call, saved: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    report.save(run(row("a", [64], 2, 108.0, 300.0), row("b", [128], 2, 50.0, 90.0)), new)
    text = call("--from", new, "--against", saved, code=1)
    assert re.search(r"^a +cuda +100 +108 +1.080 +regression$", text, re.M)
    assert "Against H200, driver 1" in text
    assert "slower" in call("--from", new, "--against", saved, "--limit", 10)
    assert "faster" in call("--from", saved, "--against", new)


@pytest.mark.parametrize("path", sorted(run_.RESULTS.glob("h200-*.json")), ids=lambda p: p.stem)
def test_committed_runs_can_be_looked_at(call: Call, path: Path) -> None:
    assert "geomean" in call("--from", path, "--against", path)
