"""Adopting a variant: written once, shown first, and never over somebody's edit."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from kda_jit import lab
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.errors import InputError
from kda_jit.jit import module, use_sources

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
    before = module.generation()
    with mine.active():
        lab.adopt(mine)
    assert (kernels / HEADER).read_text() == WANT
    assert module.generation() is not before


def test_in_a_block_with_other_sources_it_is_used_there(kernels: Path) -> None:
    with use_sources(kernels):
        made = lab.variant("mine", base=HEADER, patch=PATCH)
        before = module.generation()
        lab.adopt(made)
        assert module.generation() is not before


def test_where_launches_change_the_backend_changes_first(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = {"kda_prepare": (96, 4096)}
    made = lab.variant("mine", base=HEADER, patch=PATCH, launch=launch)
    words = r'cuda.py to have Launch\("kda_prepare", 96, 4096\) of sm80/kda_prefill\.cu'
    with pytest.raises(InputError, match=words):
        lab.adopt(made)
    assert (kernels / HEADER).read_text() == HEADER_TEXT
    schedule = SCHEDULES["portable"]
    launches = tuple(x.changed(schedule.file, made.tree.launches) for x in schedule.launches)
    monkeypatch.setitem(SCHEDULES, "portable", replace(schedule, launches=launches))
    lab.adopt(made)
    assert (kernels / HEADER).read_text() == WANT


def test_it_is_written_once(mine: lab.Variant) -> None:
    lab.adopt(mine)
    with pytest.raises(InputError, match=rf"expected one to be written, got mine: .*{HEADER} is"):
        lab.adopt(mine)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_other_lines_keep_every_byte(kernels: Path, end: bytes) -> None:
    """Line ends of Windows, and what Python takes for the end of a line and a compiler does not."""
    odd = "// a form\x0cfeed, a next\x85line, a line\u2028separator\n"
    given = (odd + HEADER_TEXT).encode().replace(b"\n", end)
    (kernels / HEADER).write_bytes(given)
    made = lab.variant("mine", base=HEADER, patch=PATCH)
    assert (made.tree.folder / HEADER).read_text().splitlines()[
        0
    ] == f'#line 1 "kernels_src/{HEADER}"'
    lab.adopt(made)
    assert (kernels / HEADER).read_bytes() == given.replace(b"x + kStep", b"x * kStep")


def test_a_file_that_cannot_be_written_is_said_so(
    mine: lab.Variant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: bytes) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(InputError, match=r"variant: expected to be written .*Permission denied"):
        lab.adopt(mine)


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
