"""`kda-jit verify`: who is tried, what is reported, and that a broken prefill is told apart."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kda_jit
from kda_jit.bench.peers import LACKED
from kda_jit.errors import InputError, NoBackendError
from kda_jit.reference import recurrent_kda
from kda_jit.testing import REGIMES, Case, verify
from kda_jit.testing.faults import FAULTS
from kda_jit.testing.laws import EVERY, LAWS, _rms_log_decay
from kda_jit.testing.runner import FEATURES, Function, Runner

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"regimes": ["random"], "examples": 2}


def anybodys(q, k, v, g, beta, *, A_log, dt_bias, lower_bound, scale, initial_state, cu_seqlens):
    """A prefill that somebody else might have: no buffers, no pool, no checkpoints."""
    if v.shape[2] != q.shape[2]:
        raise NotImplementedError("one value head per key head")
    done = recurrent_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        initial_state=initial_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return done.out.to(v), done.final_state.float()


def transposed(*args, **kwargs):
    """Somebody else's state is [K, V]."""
    out, state = kda_jit.prefill(*args, **kwargs, backend="torch")
    return out, state.mT.contiguous()


@pytest.mark.parametrize("name", ["reference", "torch"])
def test_every_law_holds_on_every_regime(name: str) -> None:
    report = verify.verify(verify.find_subject(name, CPU), examples=1)
    assert report.passed, report.text()
    assert report.laws == list(LAWS)
    assert report.regimes == list(EVERY)
    assert report.tried > 200
    tried = {cell.law for cell in report.cells if cell.status == verify.HOLDS}
    assert LAWS.keys() - tried == {"graph"}
    assert report.ran == (("torch: torch_chunk16",) if name == "torch" else ())


def test_a_state_with_a_zero_in_it_decays_as_others_do() -> None:
    """Where beta is all but zero, something is written there that was no part of the state."""
    initial = torch.ones(1, 1, 2, 2)
    final = 0.5 * initial.double()
    initial[..., 0, 0], final[..., 0, 0] = 0.0, 1e-90
    assert _rms_log_decay(initial, final) == pytest.approx(math.log(2.0))


def test_a_broken_law_is_reported_by_the_smallest_case_found() -> None:
    with FAULTS["missing_tail_mask"]():
        report = verify.verify(Runner("torch", CPU), laws=["company", "scale", "repeat"], **QUICK)
        cell = report.cell("company", "random")
        case = Case.parse(cell.case)
        assert cell.status == verify.BROKEN
        assert not report.passed
        assert sum(case.lengths) <= 4
        assert case.heads == 1
        assert "equal bits are promised" in cell.words
        assert cell.words.endswith("the float64 reference holds it")
        assert f'--laws company --case "{case}"' in report.text()
        again = verify.verify(Runner("torch", CPU), laws=["company"], case=case)
        assert again.cell("company", "random").status == verify.BROKEN
    assert verify.verify(Runner("torch", CPU), laws=["company"], case=case).passed


def test_a_law_that_the_reference_breaks_is_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(trial: Any) -> None:
        trial.fail("no prefill is good enough")

    law = LAWS["split"]
    wrong = type(law)("split", "A wrong law.", one, sequences=1, packed=True)
    monkeypatch.setitem(LAWS, "split", wrong)
    cell = verify.verify(Runner("torch", CPU), laws=["split"], **QUICK).cells[0]
    assert "the float64 reference breaks it, too" in cell.words
    assert "holds it" not in cell.words


def test_an_exception_is_a_broken_law_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a launch failed")

    subject = Function("mine", prefill, CPU, torch.float32, 32)
    report = verify.verify(subject, laws=["empty", "scale"], **QUICK)
    assert [cell.status for cell in report.cells] == [verify.BROKEN] * 2
    assert report.cells[0].words.startswith("RuntimeError: a launch failed")


def test_what_a_function_does_not_claim_is_not_tried() -> None:
    subject = Function("anybodys", anybodys, CPU, torch.float32, 16)
    assert set(subject.lacks) == {"buffers", "pool", "checkpoint", "graph"}
    assert set(subject.lacks) <= FEATURES.keys()
    report = verify.verify(subject, **QUICK)
    assert report.passed, report.text()
    skipped = {c.law: c.words for c in report.cells if c.status == verify.SKIPPED}
    assert skipped["checkpoint"].startswith("anybodys has no argument checkpoint_state")
    assert skipped["grouped"] == "one value head per key head"
    assert {"split", "company", "poison", "padded", "repeat"} <= {
        c.law for c in report.cells if c.status == verify.HOLDS
    }


def test_a_function_with_another_layout_is_found_out() -> None:
    report = verify.verify(Function("transposed", transposed, CPU, torch.float32, 32), **QUICK)
    broken = {cell.law for cell in report.broken}
    assert {"recurrence", "layout", "split", "checkpoint", "empty"} & broken >= {
        "recurrence", "layout",
    }  # fmt: skip


def test_a_function_that_promises_bits_is_held_to_them() -> None:
    def prefill(*args: Any, **kwargs: Any) -> Any:
        out, state = kda_jit.prefill(*args, **kwargs, backend="torch")
        return out, state * (1 + 1e-7 * (kwargs["cu_seqlens"] is None))

    laws = ["dense"]
    lax = Function("nearly", prefill, CPU, torch.float32, 32)
    strict = Function("nearly", prefill, CPU, torch.float32, 32, bitwise=True)
    assert verify.verify(lax, laws=laws, **QUICK).passed
    assert not verify.verify(strict, laws=laws, **QUICK).passed


def test_the_same_seed_draws_the_same_cases() -> None:
    subject = Runner("torch", CPU)
    law = LAWS["company"]

    def cases(seed: int) -> list[Case]:
        return [law.draw(random.Random(seed), subject, "mixed", i) for i in range(9)]

    assert cases(1) == cases(1) != cases(2)
    one, two = (verify.verify(subject, laws=["split"], seed=7, **QUICK) for _ in range(2))
    assert one.cells == two.cells


def test_shares_of_processes_make_the_whole() -> None:
    again = partial(verify.find_subject, "torch", CPU)
    kwargs: dict[str, Any] = {"laws": ["split", "empty", "graph"], "regimes": ["random", "slow"]}
    seen: list[tuple[int, int, str]] = []
    alone = verify.verify(again(), **kwargs, examples=2)
    report = verify.verify(
        again(), **kwargs, examples=2, jobs=2, again=again, progress=lambda *x: seen.append(x)
    )
    assert report.cells == alone.cells
    assert report.ran == alone.ran == ("torch: torch_chunk16",)
    assert [x[:2] for x in seen] == [*((i, 6) for i in range(1, 7)), (6, 6)]
    with pytest.raises(InputError, match="jobs"):
        verify.verify(again(), jobs=2)


def dies(*args: Any, **kwargs: Any) -> Any:
    """As a GPU's driver might: no exception, no process."""
    os._exit(3)


def test_a_process_that_dies_leaves_its_cells_untried() -> None:
    name = f"{__name__}:dies"
    again = partial(verify.find_subject, name, CPU)
    report = verify.verify(
        again(), laws=["split"], regimes=["random", "slow"], examples=1, jobs=2, again=again
    )
    assert not report.passed
    assert {cell.status for cell in report.cells} == {verify.UNTRIED}
    assert all(cell.words for cell in report.cells)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_run_reports_what_it_has(jobs: int) -> None:
    """The process that is interrupted, and with it those that work for it."""
    again = partial(verify.find_subject, "torch", CPU)

    def interrupt(done: int, total: int, words: str) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    report = verify.verify(
        again(), laws=["split", "scale", "unit"], examples=4, jobs=jobs, again=again,
        progress=interrupt,
    )  # fmt: skip
    assert not report.passed
    found = {cell.status for cell in report.cells}
    assert {verify.HOLDS, verify.UNTRIED} <= found
    assert {c.words for c in report.cells if c.status == verify.UNTRIED} == {verify.INTERRUPTED}


def test_each_law_gets_as_many_cases_as_asked_for() -> None:
    report = verify.verify(Runner("torch", CPU), laws=["closed", "empty"], each_law=40)
    for law in report.laws:
        tried = [c for c in report.cells if c.law == law and c.status == verify.HOLDS]
        assert sum(cell.examples for cell in tried) >= 40, law
        assert len({cell.examples for cell in tried}) == 1


def test_long_adds_a_long_sequence() -> None:
    seen: list[Case] = []

    class Spy(Runner):
        def prefill(self, inputs: Any, **buffers: Any) -> Any:
            if inputs.case is not None:
                seen.append(inputs.case)
            return super().prefill(inputs, **buffers)

    verify.verify(Spy("torch", CPU), laws=["recurrence"], regimes=["slow"], examples=1, long=True)
    assert [sum(case.lengths) for case in seen].count(verify.LONG_TOKENS) == 1
    assert len(seen) == 2


@pytest.mark.parametrize(
    "name, error, words",
    [
        ("cuda", NoBackendError, "expected a CUDA GPU for 'cuda', got cpu"),
        ("tritn", InputError, "backend: expected auto, reference, cuda, triton, torch, peer:"),
        ("peer:fla", InputError, "device: expected a CUDA GPU for 'peer:fla', got cpu"),
        ("peer:other", InputError, "expected peer:flashkda, peer:fla, peer:flash_kda, peer:cula"),
        ("nowhere:prefill", InputError, "expected module:function, got 'nowhere:prefill'"),
        ("kda_jit:nothing", InputError, "expected module:function"),
        ("kda_jit:__version__", InputError, "expected a function"),
    ],
)
def test_who_cannot_be_tried_is_refused_with_the_reason(name: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        verify.find_subject(name, CPU)


def test_auto_is_what_the_resolver_says() -> None:
    assert verify.find_subject("auto", CPU).name == "torch"


def test_a_peer_that_turns_out_to_be_ours_is_found_out() -> None:
    class Peer:
        name, version, lacks = "fla", "0", LACKED

        def activate(self) -> None: ...

        def bind(self, x: Any) -> Any:
            return lambda: kda_jit.prefill(*x.args, **x.kwargs, backend="torch")

    peer = verify.PeerRunner(Peer(), CPU)
    report = verify.verify(peer, laws=["recurrence"], **QUICK)
    assert "asked for fla, kda_jit ran" in report.cells[0].words
    assert peer.lacks["pool"] == "the adapter of fla has no such call"
    with pytest.raises(NotImplementedError):
        peer.prefill(Case().tensors(), out=torch.empty(1))


def test_report_survives_the_file(tmp_path: Path) -> None:
    with FAULTS["padding_is_zeroed"]():
        report = verify.verify(
            Runner("torch", CPU),
            laws=["padded", "graph", "split"],
            command="kda-jit verify --laws padded",
            **QUICK,
        )
    verify.save(report, tmp_path / "a" / "run.json")
    run = json.loads((tmp_path / "a" / "run.json").read_text())
    again = verify.from_json(run)
    assert again.head == report.head
    assert [c[:3] for c in again.cells] == [c[:3] for c in report.cells]
    assert verify.markdown(again).replace(f"{again.seconds:.0f} s", "") == (
        verify.markdown(report).replace(f"{report.seconds:.0f} s", "")
    )
    verify.save(report, tmp_path / "run.md")
    page = (tmp_path / "run.md").read_text()
    assert "# torch on CPU: 1 cells broken" in page
    assert "Not tried: `graph`: a CUDA graph needs a GPU." in page
    assert "padded rows were written" in page
    assert "`kda-jit verify --laws padded`" in page
    with pytest.raises(InputError, match="report: expected one of kda-jit verify"):
        verify.from_json({})


@pytest.mark.parametrize(
    "text", ["Case(", "case()", "Case(3)", "Case(regime='x')", "Case(seed=f())", "Case(size=1)"]
)
def test_a_text_that_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="case: expected one as it is printed"):
        Case.parse(text)


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """call(*words) -> output; asserts the exit code, 0 unless `code` says otherwise."""
    pytest.importorskip("typer", reason="the command needs typer")
    pytest.importorskip("rich", reason="the command needs rich")
    from typer.testing import CliRunner

    from kda_jit.cli import app

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        words = ("verify", "--device", "cpu", *words)
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    return run


def test_command_holds_and_writes_reports(call: Any, tmp_path: Path) -> None:
    text = call(
        "--backend", "torch", "--laws", "split,checkpoint", "--laws", "repeat",
        "--regimes", "slow,mixed", "--examples", "1", "--report", "r.json", "--report", "r.md",
    )  # fmt: skip
    assert "every law holds" in text
    assert "ran torch: torch_chunk16" in text
    assert re.findall(r"^(\w+)  ", text, re.MULTILINE) == ["law", "split", "checkpoint", "repeat"]
    assert json.loads((tmp_path / "r.json").read_text())["passed"]
    assert (tmp_path / "r.md").read_text().startswith("# torch on CPU: every law holds")


def test_command_shows_what_broke_and_its_own_command_shows_it_again(call: Any) -> None:
    with FAULTS["checkpoint_one_chunk_early"]():
        text = call("--backend", "torch", "--laws", "checkpoint", "--regimes", "slow", code=1)
        assert "not every law holds" in text
        again = re.search(r"^  kda-jit verify (.*)$", text, re.MULTILINE)
        assert again is not None
        assert "broken" in call(*shlex.split(again[1]), code=1)
    call(*shlex.split(again[1]))


def test_command_takes_anybodys_function(call: Any, tmp_path: Path) -> None:
    (tmp_path / "their_prefill.py").write_text(
        "import kda_jit\n\n\ndef run(*args, **kwargs):\n"
        "    out, state = kda_jit.prefill(*args, **kwargs, backend='torch')\n"
        "    return out * 1.01, state\n"
    )
    try:
        words = ("--backend", "their_prefill:run", "--laws", "recurrence,repeat", "--regimes")
        text = call(*words, "random", "--examples", "1", code=1)
    finally:
        sys.modules.pop("their_prefill", None)
        sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]
    assert "recurrence x random: out: relative RMS error 1.0e-02" in text
    assert "1 of 2 cells broken" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (("--backend", "cuda"), "NoBackendError: device: expected a CUDA GPU for 'cuda', got cpu"),
        (("--backend", "torch", "--laws", "spilt"), "law: expected one of recurrence, split"),
        (("--backend", "torch", "--regimes", "odd"), "regime: expected one of random"),
        (("--backend", "torch", "--laws", "graph"), "graph: a CUDA graph needs a GPU"),
        (("--backend", "torch", "--case", "Case("), "case: expected one as it is printed"),
        (("--backend", "torch", "--examples", "0"), "examples: expected at least 1"),
        (("--device", "gpu"), "device: "),
        (("--backend", "torch", "--head-dim", "64"), "dtype, head_dim, bitwise: expected a funct"),
        (("--report", "a.txt"), "report: expected a name that ends in .json or .md, got a.txt"),
    ],
)
def test_command_that_can_try_nothing_exits_with_2(call: Any, words: Any, message: str) -> None:
    assert message in call(*words, code=2)


def test_command_lists_laws_and_regimes(call: Any) -> None:
    text = call("--list")
    for name in LAWS.keys() | set(EVERY):
        assert name in text
    assert set(EVERY) <= REGIMES.keys()
