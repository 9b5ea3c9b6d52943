"""kda_jit.lab on a device: what laws and times say of variants, and that nobody else runs them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit import settings
from kda_jit.backends.cuda import PORTABLE
from kda_jit.jit import load
from kda_jit.testing import Case
from kda_jit.testing.runner import why_not

pytest.importorskip("rich", reason="kda_jit.lab needs the package rich")
from kda_jit import lab
from kda_jit.bench.cases import BenchCase
from kda_jit.bench.gate import WrongResult

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASE = BenchCase("small", (300, 17, 64), 2)
FEW = {"laws": ("recurrence", "split", "pool"), "regimes": ("random",)}


@pytest.fixture(autouse=True)
def cuda_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)
    if reason := why_not("cuda", torch.device("cuda")):
        pytest.skip(reason)


def variant(name: str, change: Callable[[str], str]) -> lab.Variant:
    """The portable file, changed by a function, for the portable schedule."""
    shipped = lab.shipped()  # its folder lives as long as it does
    text = (shipped.tree.folder / PORTABLE.file).read_text()
    changed = change(text)
    assert changed != text, "the anchor in the kernel is gone: take another"
    return lab.variant(name, changed, base=PORTABLE.file, schedule="portable")


@pytest.fixture(scope="module")
def same() -> lab.Variant:
    """Computes what the shipped one does."""
    return variant("same", lambda text: text + "// nothing more\n")


@pytest.fixture(scope="module")
def doubled() -> lab.Variant:
    """Its outputs are twice too large."""
    return variant("doubled", lambda text: re.sub(r"\bargs\.scale\b", "(2.0f * args.scale)", text))


def out(**more: object) -> Tensor:
    x = Case(seed=5, lengths=(70, 33), heads=1).tensors("cuda")
    return kda_jit.prefill(*x.args, **x.kwargs, backend="cuda", **more)[0].float()


def test_the_laws_hold_of_what_changes_nothing_and_not_of_what_does(
    same: lab.Variant, doubled: lab.Variant
) -> None:
    good = lab.check(same, **FEW)
    assert good.passed, str(good)
    assert list(good.reports) == ["portable"]
    bad = lab.check(doubled, **FEW)
    assert not bad.passed
    assert {cell.law for cell in bad.reports["portable"].broken} >= {"recurrence"}
    assert "doubled, portable: breaks" in str(bad)


def test_only_its_own_block_and_thread_run_it(
    doubled: lab.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SCHEDULE.name, "portable")
    usual = out()
    others: list[Tensor] = []
    with doubled.active():
        inside = out()
        thread = threading.Thread(target=lambda: others.append(out()))
        thread.start()
        thread.join()
        again = out()
    torch.testing.assert_close(inside, 2.0 * usual, rtol=1e-2, atol=1e-3)
    assert torch.equal(inside, again)
    assert torch.equal(others[0], usual)
    assert torch.equal(out(), usual)


def test_a_bench_has_a_ratio_and_every_kernel(same: lab.Variant) -> None:
    found = lab.bench(same, cases=[CASE], budget_ms=20.0)
    (row,) = found.rows
    assert row.schedule == "portable"
    assert set(row.kernels) == {launch.entry for launch in PORTABLE.launches}
    assert row.ratio.low <= row.ratio.median <= row.ratio.high
    assert 0.5 < row.ratio.median < 2.0
    assert "small" in str(found)


def test_a_wrong_result_has_no_time(doubled: lab.Variant) -> None:
    with pytest.raises(WrongResult, match=r"doubled, short: out"):
        lab.bench(doubled, cases=[CASE])


def test_a_variant_times_against_itself(same: lab.Variant) -> None:
    (row,) = lab.bench(lab.shipped(), lab.shipped(), [CASE], schedule="portable").rows
    assert 0.8 < row.ratio.median < 1.25


def test_occupancy_is_what_the_driver_says() -> None:
    report = lab.build(lab.shipped())
    assert report.rows
    for row in report.rows:
        kernel = load(row.build.spec).kernels[row.entry]
        there = kernel.max_active_blocks(row.threads, row.smem_dynamic)
        assert (row.entry, row.occupancy.blocks) == (row.entry, there)
        assert row.resources.registers == kernel.registers
