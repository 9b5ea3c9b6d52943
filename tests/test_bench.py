"""The benchmarks without a GPU: cases, floors, the gate, the rows, the report. No time is real."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kda_jit.backends.base import LaunchRecord, last_launch, record_launch
from kda_jit.bench import gate, lineup, machine, peers, registry, report, rows, subject, timer, wall
from kda_jit.bench.cases import BenchCase
from kda_jit.bench.lineup import Lineup
from kda_jit.bench.registry import ACCURACY, SPEED
from kda_jit.bench.subject import Ours
from kda_jit.bench.timer import HostTiming, Profile, Timing
from kda_jit.errors import CompileError, InputError

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
SMALL = BenchCase("small", (40, 0, 17), 2)
OURS = Ours("torch")


def by_name(name):
    (case,) = [case for case in SPEED if case.name == name]
    return case


# --- registry ---------------------------------------------------------------------------------


def test_names_say_the_shape_and_are_unique():
    assert len(SPEED) == 17
    assert len({case.name for case in SPEED}) == 17
    for case in SPEED:
        shape, heads = re.fullmatch(r"(\w+)_h(\d+)", case.name).groups()
        assert case.heads == int(heads)
        if shape.startswith("mixed_"):
            assert case.tokens == int(shape.removeprefix("mixed_"))
        else:
            sequences, tokens = map(int, shape.split("x"))
            assert case.lengths == (tokens,) * sequences


# At 4.28 TB/s, as worked out by hand for these shapes.
@pytest.mark.parametrize(
    "name, floor",
    [
        ("8x2048_h16", 82),
        ("1x65536_h16", 315),
        ("1x8192_h96", 238),
        ("mixed_8192_h96", 253),
        ("8x1024_h64", 173),
        ("32x512_h12", 71),
        ("8x128_h12", 6.6),
        ("1x64_h16", 0.8),
    ],
)
def test_floor_is_the_bytes_over_the_bandwidth(name, floor):
    assert by_name(name).floor_us(4.28e12) == pytest.approx(floor, rel=0.02, abs=0.06)


def test_floor_counts_what_the_tensors_hold():
    x = SMALL.inputs(CPU)
    tensors = [
        *x.args,
        x.v,
        x.initial_state,
        x.initial_state,
    ]  # out is like v, states go in and out
    assert SMALL.floor_bytes == sum(t.nbytes for t in tensors)


def test_inputs_are_the_case_and_the_same_each_time():
    x, again = SMALL.inputs(CPU), SMALL.inputs(CPU)
    assert x.bounds == [0, 40, 40, 57]
    assert x.v.shape == (1, 57, 2, 128)
    assert x.q.dtype is torch.bfloat16
    assert x.initial_state.dtype is torch.float32
    assert torch.equal(x.q, again.q)
    assert not torch.equal(x.q, x.k)
    assert 1 <= x.A_log.exp().min() <= x.A_log.exp().max() <= 16


def test_shortened_keeps_sequences_and_heads_and_varies_lengths():
    for case in SPEED:
        short = case.shortened()
        assert (len(short.lengths), short.heads) == (len(case.lengths), case.heads)
        assert all(0 < a <= min(b, 160) for a, b in zip(short.lengths, case.lengths, strict=True))
    assert len(set(by_name("8x2048_h16").shortened().lengths)) == 8


def test_select_by_suite_and_pattern():
    assert registry.select(["flashkda"]) == (list(SPEED), [])
    assert registry.select(["accuracy"]) == ([], list(ACCURACY))
    speed, accuracy = registry.select(registry.FRONT, ["*_h96", "table_3*"])
    assert [case.name for case in speed] == ["1x8192_h96", "mixed_8192_h96", "8x1024_h96"]
    assert [case.regime for case in accuracy] == ["table_3_g_minus_8"]
    with pytest.raises(InputError, match=r"case: expected one of 8x2048_h16, .* got 'nine'"):
        registry.select(["flashkda"], ["1x64*", "nine"])


def test_suites_are_those_that_are_documented():
    assert registry.SUITE_NAMES == (
        "seed", "flashkda", "flashinfer-h12", "long", "ragged", "decode", "layer", "small",
        "accuracy",
    )  # fmt: skip
    assert [c.name for c in registry.SUITES["seed"]] == [
        "8x2048_h16", "4x8192_h16", "1x16384_h16",
    ]  # fmt: skip
    assert {c.heads for c in registry.SUITES["flashinfer-h12"]} == {12}
    assert len(registry.SUITES["flashinfer-h12"]) == 6
    assert min(max(c.lengths) for c in registry.SUITES["long"]) >= 4096
    assert all(len(set(c.lengths)) > 1 for c in registry.SUITES["ragged"])
    assert sum(c.tokens * c.heads for c in registry.SUITES["small"]) < 4000


def test_a_name_is_one_case_in_every_suite():
    by_name = {}
    for suite, cases in registry.SUITES.items():
        assert len({case.name for case in cases}) == len(cases), suite
        for case in cases:
            assert by_name.setdefault(case.name, case) == case
    speed, _ = registry.select(registry.SUITE_NAMES)
    assert speed == list(by_name.values())


@pytest.mark.parametrize(
    "text, name, lengths",
    [
        ("300,17,4096", "300+17+4096_h4", (300, 17, 4096)),
        ("64", "1x64_h4", (64,)),
        ("8, 8,8", "3x8_h4", (8, 8, 8)),
        ("0,5,5,0", "0+2x5+0_h4", (0, 5, 5, 0)),
    ],
)
def test_lengths_of_ones_own_are_a_case(text, name, lengths):
    assert registry.cases_of([text], 4) == [BenchCase(name, lengths, 4)]


@pytest.mark.parametrize(
    "text, heads, words",
    [
        ("300;17", 4, "lens: expected lengths such as 300,17,4096, got '300;17'"),
        ("3,,4", 4, "lens: expected lengths"),
        ("-3", 4, "lens: expected lengths"),
        ("0,0", 4, "lens: expected a token at least, got '0,0'"),
        ("3", 0, "heads: expected at least 1, got 0"),
    ],
)
def test_lengths_that_are_none_are_refused(text, heads, words):
    with pytest.raises(InputError, match=words):
        registry.cases_of([text], heads)


# --- timer ------------------------------------------------------------------------------------


def test_wall_time_of_calls_in_turns():
    called = []

    def contender(name, seconds):
        def call():
            called.append(name)
            time.sleep(seconds)

        return timer.Contender(name, call)

    found = wall.WallTimer(budget_ms=1.0).measure([contender("a", 0.002), contender("b", 0.006)])
    assert called == ["a", "b", *(["a", "b", "b", "a"] * 3)[: 2 * wall.ROUNDS[0]]]
    assert 2000 <= found["a"]["p10"] <= found["a"]["us"] <= found["a"]["p90"]
    assert found["b"]["us"] >= 6000
    assert found["a"].keys() == {"us", "p10", "p90", "runs"}
    assert found["a"]["runs"] == wall.ROUNDS[0]


def test_wall_bandwidth_counts_both_ways(monkeypatch):
    monkeypatch.setattr(wall, "_microseconds", lambda call: 2.0)
    assert wall.WallTimer().bandwidth(nbytes=4000) == pytest.approx(4e9)


def test_median_and_percentiles():
    assert timer.summarise([float(i) for i in range(10, -1, -1)]) == Timing(5.0, 1.0, 9.0, 11)
    assert timer.summarise([1.0, 2.0]).us == 1.5
    assert timer.summarise([7.0]) == Timing(7.0, 7.0, 7.0, 1)


def test_contenders_take_turns_in_both_orders():
    orders = list(timer.turns(["a", "b", "c"], 4))
    assert orders == [("a", "b", "c"), ("c", "b", "a")] * 2


def test_plain_names_of_kernels():
    assert timer.plain_name("kda_prepare") == "kda_prepare"
    assert timer.plain_name("void a::b::prepare<128, c::d>(e::f)") == "prepare"
    assert timer.plain_name("Memset (Device)") == "Memset"
    assert timer.plain_name("_Z7prepareIN4cute5tupleEEvT_") == "prepare"


# --- gate -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth():
    return gate.Gate(SMALL, SMALL.inputs(CPU))


def spoil(monkeypatch, change):
    """`change(out, final_state)` after each prefill of ours."""
    real = subject.prefill

    def prefill(*args, **kwargs):
        out, state = real(*args, **kwargs)
        change(out, state)
        return out, state

    monkeypatch.setattr(subject, "prefill", prefill)


def test_gate_passes_a_right_kernel(truth):
    verdict = truth.check(OURS, baseline=OURS)
    assert verdict.record.backend == "torch"
    assert 0 < verdict.out_error < 5e-3
    assert verdict.state_error < 1e-3


def one_row(out, state):
    out[0, 30, 1] *= 1.5


def unwritten(out, state):
    out[0, -1, 0, 5] = torch.nan


def states_swapped(out, state):
    state.copy_(state.flip(0))


def last_head_of_state(out, state):
    state[-1, -1] *= 1.2


@pytest.mark.parametrize("change", [one_row, unwritten, states_swapped, last_head_of_state])
def test_gate_refuses_a_wrong_result(truth, monkeypatch, change):
    spoil(monkeypatch, change)
    with pytest.raises(gate.WrongResult, match=r"torch, short: .* relative RMS error"):
        truth.check(OURS)


def test_gate_refuses_what_is_wrong_on_the_full_shape_only(truth, monkeypatch):
    full = BenchCase("full", (200,), 2)
    truth = gate.Gate(full, full.inputs(CPU))
    spoil(monkeypatch, lambda out, state: out[:, 160:].mul_(1.5))
    with pytest.raises(gate.WrongResult, match=r"torch, full: out: .* head \d, chunk"):
        truth.check(OURS)


def test_gate_compares_every_head_with_the_baseline(monkeypatch):
    """Head 1 of 4 is not among those that float64 sees on the full shape (0, 2, 3)."""
    case = BenchCase("four", (200,), 4)
    truth = gate.Gate(case, case.inputs(CPU))

    @dataclass(frozen=True)
    class Exact(Ours):
        def bind(self, inputs):
            want = inputs.reference()
            record_launch(LaunchRecord("torch", ("exact",)))
            return lambda: (want.out.bfloat16(), want.final_state.float())

    truth.check(OURS, baseline=Exact("torch"))
    spoil(monkeypatch, lambda out, state: out[:, 160:, 1].mul_(1.5))
    truth.check(OURS)
    with pytest.raises(gate.WrongResult, match=r"torch, full, against torch: out: .* head 1"):
        truth.check(OURS, baseline=Exact("torch"))


CUDA = LaunchRecord("cuda", ("kda_prepare", "kda_recurrence"), "portable", "sm_90a")


@pytest.mark.parametrize(
    "asked, ran, words",
    [
        (Ours("cuda"), CUDA, None),
        (Ours("cuda", "portable"), CUDA, None),
        (Ours("triton"), LaunchRecord("triton", ("kda_prepare",)), None),
        (Ours("cuda"), LaunchRecord("triton", ("kda_prepare",)), "asked for cuda, triton ran"),
        (Ours("cuda"), None, "asked for cuda, nothing ran"),
        (Ours("cuda"), CUDA._replace(kernels=()), "cuda launched no kernel"),
        (Ours("cuda", "else"), CUDA, "asked for schedule else, portable ran"),
        (Ours("cuda"), CUDA._replace(schedule="gone"), "asked for schedule auto, gone ran"),
        (
            Ours("cuda"),
            CUDA._replace(kernels=("kda_prepare", "memcpy")),
            "schedule portable has no kernel memcpy",
        ),
    ],
)
def test_launch_record_must_be_what_was_asked(asked, ran, words):
    assert asked.misnamed(ran) == words


def test_gate_refuses_another_backend(truth, monkeypatch):
    spoil(monkeypatch, lambda out, state: record_launch(LaunchRecord("triton", ("x",))))
    with pytest.raises(gate.WrongResult, match="asked for torch, triton ran"):
        truth.check(OURS)


# --- rows -------------------------------------------------------------------------------------


class FakeTimer:
    """Calls everything once; ours takes 10 us, a peer 30, and the profiler sees `seen`."""

    def __init__(self, seen=()):
        self.seen = seen

    def cold(self, contenders):
        for contender in contenders:
            contender.activate()
            contender.call()
        return {c.name: Timing(self.us(c), 9.0, 12.0, 20) for c in contenders}

    def replayed(self, contenders):
        return {c.name: Timing(8.0, 7.0, 9.0, 20) for c in contenders if c.name == OURS.name}

    def host(self, contender, gpu_us):
        return HostTiming(3.0, 11.0)

    measure = timer.Timer.measure

    def profile(self, contender):
        found = dict.fromkeys(self.seen or last_launch().kernels, 4.0)
        return Profile(found, len(found))

    @staticmethod
    def us(contender):
        return 10.0 if contender.name == OURS.name else 30.0


class FakePeer:
    """The float64 recurrence under FlashKDA's name; `factor` makes it wrong."""

    name, version = "flashkda", "1"

    def __init__(self, factor=1.0):
        self.factor = factor

    def activate(self):
        pass

    def bind(self, inputs):
        want = inputs.reference()
        return lambda: (want.out.bfloat16() * self.factor, want.final_state.float())


@pytest.fixture(autouse=True)
def _no_schedule(monkeypatch):
    """Subjects set the schedule's variable; no other test shall see that."""
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "auto")


def time_small(timer=None, peer=None, ours=OURS):
    found = Lineup([ours], [peer or FakePeer()])
    return rows.time_case(SMALL, found, timer or FakeTimer(), 4e12, CPU)


def test_row_has_times_floor_and_ratio():
    row = time_small()
    assert row["case"] == "small"
    assert (row["us"], row["p10_us"], row["p90_us"]) == (10.0, 9.0, 12.0)
    assert row["floor_us"] == pytest.approx(SMALL.floor_bytes / 4e6)
    assert row["of_peak"] == pytest.approx(row["floor_us"] / 10)
    assert row["tb_per_s"] == pytest.approx(SMALL.floor_bytes / 10 / 1e6)
    assert (row["flashkda_us"], row["vs_flashkda"]) == (30.0, 3.0)
    assert 0 < row["max_error"] < 5e-3
    ours, peer = row["timings"]["torch"], row["timings"]["flashkda"]
    assert (ours["graph_us"], ours["host_us"], ours["call_us"]) == (8.0, 3.0, 11.0)
    assert (ours["backend"], ours["kernels"]) == ("torch", {"torch_chunk16": 4.0})
    assert ours["launches"] == 1
    assert "graph_us" not in peer


def test_wrong_result_has_no_time(monkeypatch):
    spoil(monkeypatch, one_row)
    row = time_small()
    assert row["failed"].startswith("torch, short: out: relative RMS error")
    assert not row.keys() & {"us", "timings", "vs_flashkda"}


def test_failed_build_has_no_time(monkeypatch):
    def prefill(*args, **kwargs):
        raise CompileError("kda_prefill: unclosed brace")

    monkeypatch.setattr(subject, "prefill", prefill)
    assert time_small()["failed"] == "kda_prefill: unclosed brace"


def test_kernels_that_the_profiler_did_not_see_have_no_time():
    row = time_small(FakeTimer(seen=("aten_add",)))
    assert row["failed"] == "torch: expected torch_chunk16 on the GPU, the profiler saw aten_add"
    assert "us" not in row


@dataclass(frozen=True)
class Wrong(Ours):
    name = "wrong"

    def bind(self, inputs):
        call = super().bind(inputs)
        return lambda: tuple(2 * x for x in call())


def test_second_subject_that_is_wrong_leaves_the_first_its_time():
    row = rows.time_case(SMALL, Lineup([OURS, Wrong("torch")]), FakeTimer(), 4e12, CPU)
    assert row["us"] == 10.0
    assert list(row["timings"]) == ["torch"]
    assert [note.partition(",")[0] for note in row["notes"]] == ["wrong"]


def test_second_subject_does_not_stand_in_for_a_first_that_is_wrong():
    row = rows.time_case(SMALL, Lineup([Wrong("torch"), OURS]), FakeTimer(), 4e12, CPU)
    assert row["failed"].startswith("wrong, short: out")
    assert "us" not in row


def test_peer_that_computes_something_else_is_not_compared():
    row = time_small(peer=FakePeer(1.1))
    assert "flashkda: out differs from ours by 1.0e-01" in row["notes"][0]
    assert row["us"] == 10.0
    assert not row.keys() & {"flashkda_us", "vs_flashkda"}
    assert list(row["timings"]) == ["torch"]


def test_peer_that_breaks_leaves_ours_its_time():
    class Broken(FakePeer):
        def bind(self, inputs):
            raise RuntimeError("no such symbol")

    row = time_small(peer=Broken())
    assert row["notes"] == ["flashkda: RuntimeError: no such symbol"]
    assert row["us"] == 10.0


def test_error_table_compares_with_float64():
    row = rows.table_errors(
        registry.Case(seed=1, lengths=(80,), heads=1), [OURS, FakePeer(1.1)], CPU
    )
    assert row["rounding"] == pytest.approx(1.7e-3, rel=0.1)
    assert row["errors"]["flashkda"]["out"] == pytest.approx(0.1, rel=0.05)
    assert row["errors"]["flashkda"]["state"] < 1e-6
    assert row["errors"]["torch"]["out"] < 4e-3
    assert row["errors"]["torch"]["worst_out"] >= row["errors"]["torch"]["out"]


# --- peers ------------------------------------------------------------------------------------


def test_flashkda_says_why_it_is_not_here(monkeypatch, tmp_path):
    monkeypatch.delenv("KDA_JIT_FLASHKDA_SO", raising=False)
    assert peers.FlashKDA().why_not() == "KDA_JIT_FLASHKDA_SO is not set"
    assert peers.find_peers(None) == []
    monkeypatch.setenv("KDA_JIT_FLASHKDA_SO", str(tmp_path / "a.so"))
    assert peers.FlashKDA().why_not() == f"there is no {tmp_path / 'a.so'}"
    (tmp_path / "b.so").write_bytes(b"no library")
    assert "b.so does not load" in peers.FlashKDA(tmp_path / "b.so").why_not()
    with pytest.raises(InputError, match="peer: expected one that runs here, got 'flashkda'"):
        peers.find_peers(["flashkda"])


def test_flashkda_gets_its_arguments_in_order(monkeypatch, tmp_path):
    class Ops:
        @staticmethod
        def get_workspace_size(T, H, N):
            return T + 10 * H + 100 * N

        @staticmethod
        def fwd(*arguments):
            called.extend(arguments)

    called = []
    peer = peers.FlashKDA(tmp_path / "x.so")
    monkeypatch.setitem(peer.__dict__, "ops", Ops)
    x = SMALL.inputs(CPU)
    out, final = peer.bind(x)()
    assert [a is b for a, b in zip(called, x.args)] == [True] * 5
    scale, got, workspace, A_log, dt_bias, bound, initial, state, ends, *none = called[5:]
    assert (scale, bound, none) == (128**-0.5, -5.0, [None, None])
    assert got is out
    assert state is final
    assert workspace.numel() == 57 + 20 + 300
    assert (A_log.shape, dt_bias.shape) == ((2,), (2, 128))
    assert initial is x.initial_state
    assert ends is x.cu_seqlens
    assert out.isnan().all()
    assert final.isnan().all()


# --- report -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def a_run():
    fails = {"case": "other", "lengths": [9], "heads": 1, "floor_us": 1.0, "failed": "is wrong"}
    ours = Timing(123.4, 120.0, 130.0, 20)._asdict() | {"host_us": 5.0, "call_us": 125.0}
    kernels = {"graph_us": 121.0, "launches": 1.0, "kernels": {"kda_prepare": 40.0}}
    timings = {"cuda/portable": ours | kernels}
    row = {"case": "one", "lengths": [64, 64], "heads": 2, "floor_us": 61.7, "us": 123.4}
    row |= {"p10_us": 120.0, "p90_us": 130.0, "of_peak": 0.5, "tb_per_s": 2.123456789}
    row |= {"max_error": 3.1e-3, "flashkda_us": 246.8, "vs_flashkda": 2.0, "timings": timings}
    errors = {"cuda": {"out": 0.00171, "state": 0.00042, "worst_out": 0.003, "worst_state": 0.001}}
    accuracy = [{"case": "t", "about": "g = -8", "rounding": 0.00166, "errors": errors}]
    return {
        "gpu": "H200",
        "date": "2026-01-02",
        "commit": "1a2b3c4",
        "conditions": "L2 cold, medians",
        "device": {"driver": "580.1"},
        "versions": {"nvrtc": "13.0", "torch": "2.11"},
        "copy_tb_per_s": 4.28,
        "rows": [row, fails],
        "accuracy": accuracy,
        "summary": report.summary([row, fails]),
    }


def test_text_shows_times_and_what_failed(a_run):
    text = report.text(a_run)
    assert text.startswith(
        "H200, driver 580.1, NVRTC 13.0, torch 2.11, L2 cold, medians, copy 4.28"
    )
    (one,) = re.findall(r"^one +1.*$", text, re.M)
    assert " ".join(one.split()) == "one 123 120 130 61.7 50 % 2.12 247 2.00x 3.1e-03"
    assert "other: is wrong" in text
    assert "vs_flashkda: geomean 2.00x, least 2.00x" in text
    assert re.search(r"^one +cuda/portable +123 +121 +5.0 +125 +1 +kda_prepare 40.0$", text, re.M)
    assert re.search(r"^g = -8 +0.0017 / 0.0004 +0.0017$", text, re.M)


def test_markdown_leaves_out_columns_that_no_row_has(a_run):
    text = report.markdown(a_run)
    head = "| case | us | p10 | p90 | floor us | of peak | TB/s | FlashKDA us | vs FlashKDA |"
    assert head in text
    assert "fla us" not in text
    assert "| other |  |  |  | 1.0 |" in text
    assert "| g = -8 | 0.0017 / 0.0004 | 0.0017 |" in text


def test_a_run_without_a_gpu_has_no_table_of_host_times(a_run):
    text = report.text(a_run | {"gpu": "CPU", "conditions": "wall time, medians"})
    assert text.startswith("CPU, torch 2.11, wall time, medians, copy 4.28 TB/s, commit 1a2b3c4")
    assert "graph us" not in text


def test_summary_is_the_geometric_mean_and_the_least():
    rows = [{"vs_fla": 2.0}, {"vs_fla": 8.0}, {"failed": "x"}]
    found = report.summary(rows)["vs_fla"]
    assert found == {"geomean": pytest.approx(4.0), "least": 2.0, "cases": 2}
    assert report.summary([{"failed": "x"}]) == {}


def test_saved_run_is_what_the_readme_is_made_from(a_run, tmp_path):
    path = report.standard_path(a_run, ["flashkda"], tmp_path / "results")
    assert path.name == "h200-2026-01-02-flashkda.json"
    report.save(a_run, path)
    text = path.read_text()
    assert len([line for line in text.splitlines() if line.startswith('  {"case"')]) == 3
    loaded = report.load(path)
    assert loaded["rows"][0]["tb_per_s"] == 2.1235
    assert loaded["accuracy"] == a_run["accuracy"]

    pytest.importorskip("typer", reason="docs/generate.py describes the commands: needs typer")
    spec = importlib.util.spec_from_file_location("bench_docs", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    section = generate.bench_section(path.parent)
    assert "H200, L2 cold, medians; commit 1a2b3c4, 2026-01-02" in section
    assert "| `one` | 123 | 2.12 | 50 % | 2.00x | 3.1e-03 |" in section


# --- machine ----------------------------------------------------------------------------------


def test_schedules_are_those_of_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    names = [s.name for s in lineup.find_ours("cuda", ["all", "portable"], CPU)]
    assert names == ["cuda/portable"]
    assert [s.name for s in lineup.find_ours("cuda", None, CPU)] == ["cuda"]
    with pytest.raises(InputError, match="schedule: expected auto, all, portable, got 'no'"):
        lineup.find_ours("cuda", ["no"], CPU)
    assert "portable" in subject.schedules_for(9)


def test_facts_name_the_machine_and_the_code(monkeypatch):
    @dataclass
    class Properties:
        name = "NVIDIA H200"
        major, minor, multi_processor_count, L2_cache_size = 9, 0, 132, 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    facts = machine.facts(torch.device("cuda", 0), "1a2b3c4")
    assert (facts["gpu"], facts["commit"]) == ("H200", "1a2b3c4")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts["date"])
    assert facts["device"]["capability"] == "9.0"
    assert facts["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert {"kda_jit", "nvrtc"} <= facts["versions"].keys()
    assert re.fullmatch(r"[0-9a-f]{12}", facts["sources"]["portable"])
    json.dumps(facts)
    facts = machine.facts(CPU)
    assert facts["gpu"] == "CPU"
    assert facts["device"].keys() == {"name", "threads"}
