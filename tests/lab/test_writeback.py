"""Adopting a variant: written once, shown first, and never over somebody's edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit import lab
from kda_jit.errors import InputError
from kda_jit.jit import module

from .conftest import HEADER, HEADER_TEXT

PATCH = "<<<<\n    return x + kStep;\n====\n    return x * kStep;\n>>>>\n"
WANT = HEADER_TEXT.replace("x + kStep", "x * kStep")


@pytest.fixture
def mine(kernels: Path) -> lab.Variant:
    return lab.variant("mine", base=HEADER, patch=PATCH)


def test_the_file_is_written_and_used_from_then_on(mine: lab.Variant, kernels: Path) -> None:
    shown = lab.adopt(mine, write=False)
    assert (kernels / HEADER).read_text() == HEADER_TEXT
    assert "not written" in str(shown)
    before = module.generation()
    done = lab.adopt(mine)
    assert (kernels / HEADER).read_text() == WANT
    assert module.generation() is not before
    assert done.diff == shown.diff == mine.diff
    assert "-    return x + kStep;\n+    return x * kStep;\n" in str(done)


def test_it_is_written_where_it_came_from_even_inside_its_own_block(
    mine: lab.Variant, kernels: Path
) -> None:
    with mine.active():
        lab.adopt(mine)
    assert (kernels / HEADER).read_text() == WANT


def test_an_edit_meanwhile_is_not_lost(mine: lab.Variant, kernels: Path) -> None:
    edited = HEADER_TEXT.replace("2.0f", "4.0f")
    (kernels / HEADER).write_text(edited)
    with pytest.raises(InputError, match=r"has changed since") as caught:
        lab.adopt(mine)
    assert "+constexpr float kStep = 4.0f;" in str(caught.value)
    assert (kernels / HEADER).read_text() == edited
    (kernels / HEADER).unlink()
    with pytest.raises(InputError, match=r"has changed since"):
        lab.adopt(mine)


def test_what_changes_nothing_is_not_adopted(kernels: Path) -> None:
    for made in (lab.shipped(), lab.variant("toy", "// mine\n")):
        with pytest.raises(InputError, match=r"expected one with a base"):
            lab.adopt(made)
    with pytest.raises(InputError, match=r"got its equal"):
        lab.adopt(lab.variant("same", HEADER_TEXT, base=HEADER))
