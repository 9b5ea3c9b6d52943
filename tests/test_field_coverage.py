"""docs/field-coverage.md names, for each kind of fault, tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PAGE = (TESTS.parent / "docs" / "field-coverage.md").read_text()
ROWS = {
    found[1]: (found[2], found[3])
    for found in re.finditer(r"^\| ([A-Z]\d+) \| (.+?) \| (.+) \|$", PAGE, re.MULTILINE)
}
#: How many kinds of faults there are of each letter.
KINDS = {"N": 17, "V": 22, "S": 14}
#: Those that nothing covers: to be shortened, never to be forgotten.
NOT_COVERED = ["V21"]


@cache
def functions_in(file: str) -> set[str]:
    """Names of the test functions of tests/<file>.py, those in classes among them."""
    tree = ast.parse((TESTS / f"{file}.py").read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_every_kind_of_fault_has_one_row() -> None:
    wanted = [f"{letter}{i}" for letter, count in KINDS.items() for i in range(1, count + 1)]
    assert list(ROWS) == wanted
    assert len(re.findall(r"^\| [A-Z]\d", PAGE, re.MULTILINE)) == len(wanted)


@pytest.mark.parametrize("row", ROWS)
def test_tests_of_a_row_exist(row: str) -> None:
    named = re.findall(r"`([\w/]+)::(\w+)`", ROWS[row][1])
    assert [f"{file}::{test}" for file, test in named if test not in functions_in(file)] == []
    assert bool(named) != ROWS[row][1].startswith("not covered: ")
    assert ROWS[row][1].count("`") == 2 * len(named), "something else is quoted"


def test_what_is_not_covered_is_known() -> None:
    assert [row for row, (_, by) in ROWS.items() if by.startswith("not covered")] == NOT_COVERED
