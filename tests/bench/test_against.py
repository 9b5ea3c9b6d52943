"""A run against an earlier one: what is a regression, what noise, and what the machine."""

from __future__ import annotations

import pytest

from kda_jit.bench import against
from kda_jit.bench.against import compare
from kda_jit.errors import InputError
from tests.bench.runs import row, run, timing

OLD = run(row("a", [64], 2, 100.0, 300.0), row("b", [32, 32], 2, 50.0, 90.0))


def of(found: against.Comparison, case: str, subject: str = "cuda") -> against.Change:
    (change,) = [c for c in found.changes if (c.case, c.subject) == (case, subject)]
    return change


def test_the_same_run_is_no_regression() -> None:
    found = compare(OLD, OLD, limit=0.0)
    assert found.passed
    assert {c.ratio for c in found.changes} == {1.0}
    assert not any(c.beyond for c in found.changes)
    assert len(found.changes) == 4


@pytest.mark.parametrize(
    "us, beyond, regressed",
    [(101.5, False, False), (104.0, True, False), (106.0, True, True), (90.0, True, False)],
)
def test_slower_than_limit_and_spread_is_a_regression(
    us: float, beyond: bool, regressed: bool
) -> None:
    """The spread is 1 % of either time, the limit 5 %."""
    new = run(row("a", [64], 2, us, 300.0), OLD["rows"][1])
    found = compare(new, OLD)
    change = of(found, "a")
    assert (change.ratio, change.beyond) == (pytest.approx(us / 100.0), beyond)
    assert change.words == (("slower" if us > 100 else "faster") if beyond else "within the spread")
    assert found.regressions == ([change] if regressed else [])
    assert found.passed is not regressed


def test_a_wide_spread_excuses_a_slow_median() -> None:
    new = row("a", [64], 2, 150.0, 300.0)
    new["timings"]["cuda"] = timing(150.0, spread=0.4, backend="cuda")
    assert compare(run(new), OLD).passed
    old = row("a", [64], 2, 100.0, 300.0)
    old["timings"]["cuda"] = timing(100.0, spread=0.6, backend="cuda")
    assert compare(run(row("a", [64], 2, 150.0, 300.0)), run(old)).passed
    assert not compare(run(row("a", [64], 2, 150.0, 300.0)), OLD).passed


def test_a_peer_that_is_slower_is_the_machine() -> None:
    found = compare(run(row("a", [64], 2, 100.0, 900.0)), OLD)
    assert found.passed
    assert of(found, "a", "flashkda").ratio == 3.0
    assert "flashkda, a peer: geomean 3.000 of the old time" in against.text(found)


def test_a_case_that_is_wrong_now_is_lost() -> None:
    wrong = {"case": "a", "lengths": [64], "heads": 2, "floor_us": 1.0, "failed": "out: far off"}
    found = compare(run(wrong, OLD["rows"][1]), OLD)
    assert found.lost == {"a": "out: far off"}
    assert not found.passed
    assert "a: had a time, has none now: out: far off" in against.text(found)
    assert compare(OLD, run(wrong, OLD["rows"][1])).passed


def test_cases_of_one_run_and_of_another_shape_are_not_compared() -> None:
    new = run(row("a", [65], 2, 900.0, 300.0), row("b", [32, 32], 2, 50.0, 90.0))
    found = compare(new, OLD)
    assert {c.case for c in found.changes} == {"b"}
    assert found.missing == ("a", "a")
    assert "In one run alone, not compared: a, a" in against.text(found)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gpu": "A100"}, "against: expected a run with the gpu 'H200', got 'A100'"),
        ({"conditions": "L2 warm"}, "against: expected a run with the conditions"),
        ({"rows": []}, "against: expected a run with a case and a subject of this one, got none"),
    ],
)
def test_runs_that_say_nothing_of_each_other_are_refused(change: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        compare(OLD, OLD | change)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InputError, match=r"limit: expected a share of at least 0, got -0.1"):
        compare(OLD, OLD, limit=-0.1)


def test_text_marks_regressions() -> None:
    found = compare(run(row("a", [64], 2, 200.0, 300.0), row("b", [32, 32], 2, 25.0, 90.0)), OLD)
    lines = [line.split() for line in against.text(found).splitlines() if line]
    assert ["a", "cuda", "100", "200", "2.000", "regression"] in lines
    assert ["b", "cuda", "50.0", "25.0", "0.500", "faster"] in lines
    assert "cuda: geomean 1.000 of the old time" in against.text(found)
    ends = "1 of ours slower by more than 5 % and more than the spread"
    assert against.text(found).endswith(ends)
