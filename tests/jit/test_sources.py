"""Finding kernels_src, and a digest that changes with everything included and with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit.errors import InputError
from kda_jit.jit import sources


def test_reads_the_file_and_every_header_under_it(kernels: Path) -> None:
    found = sources.read("sm80/add.cu")
    assert found.root == kernels
    assert found.path == kernels / "sm80/add.cu"
    assert [name for name, _ in found.files] == [
        "common/numerics.cuh",
        "common/types.cuh",
        "sm80/add.cu",
        "sm80/private.cuh",
    ]
    assert found.text == (kernels / "sm80/add.cu").read_text()


@pytest.mark.parametrize(
    "name", ["sm80/add.cu", "sm80/private.cuh", "common/numerics.cuh", "common/types.cuh"]
)
def test_editing_anything_included_changes_the_digest(kernels: Path, name: str) -> None:
    before = sources.read("sm80/add.cu").digest
    (kernels / name).write_text((kernels / name).read_text() + "// edited\n")
    assert sources.read("sm80/add.cu").digest != before


def test_editing_what_is_not_included_changes_nothing(kernels: Path) -> None:
    before = sources.read("sm80/add.cu").digest
    (kernels / "common/unused.cuh").write_text("#error never read\n")
    assert sources.read("sm80/add.cu").digest == before


def test_digest_does_not_depend_on_where_the_folder_lies(kernels: Path, tmp_path: Path) -> None:
    before = sources.read("sm80/add.cu").digest
    moved = tmp_path / "elsewhere"
    kernels.rename(moved)
    assert sources.read("sm80/add.cu", folder=moved).digest == before


def test_header_that_appears_in_a_searched_place_changes_the_digest(kernels: Path) -> None:
    before = sources.read("sm80/add.cu").digest
    (kernels / "sm80/types.cuh").write_text("using real = double;\n")
    assert sources.read("sm80/add.cu").digest != before


@pytest.mark.parametrize(
    "line",
    [
        '#include "extra.cuh"',
        "  #  include <extra.cuh>",
        '#define E "extra.cuh"\n#include E',
        '/* first */ #include "extra.cuh"',
        '/* two\nlines */ #include "extra.cuh"',
        '#inc\\\nlude "extra.cuh"',
        '%:include "extra.cuh"',
        '\f#include "extra.cuh"',
    ],
)
def test_every_form_of_include_counts(kernels: Path, line: str) -> None:
    text = f"{line}\nint x;\n"
    (kernels / "extra.cuh").write_text("int a;\n")
    before = sources.read("string.cu", text=text)
    assert "extra.cuh" in [name for name, _ in before.files]
    (kernels / "extra.cuh").write_text("int b;\n")
    assert sources.read("string.cu", text=text).digest != before.digest


def test_headers_that_include_each_other_end(kernels: Path) -> None:
    (kernels / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n')
    (kernels / "b.cuh").write_text('#pragma once\n#include "common/../a.cuh"\n')
    names = [name for name, _ in sources.read("s.cu", text='#include "a.cuh"\n').files]
    assert names == ["a.cuh", "b.cuh", "s.cu"]


def test_missing_kernel_and_missing_folder_say_which(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"sm80/nothing\.cu"):
        sources.read("sm80/nothing.cu")
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", str(kernels / "absent"))
    with pytest.raises(InputError, match=r"kernels_src: .*absent"):
        sources.root()


@pytest.mark.parametrize("folder", ["a" * 5000, "a\0b"])
def test_a_folder_that_no_system_has_is_missing_too(folder: str) -> None:
    missing = pytest.raises(InputError, match=r"expected a folder of CUDA sources, got a")
    with missing, sources.using(folder):
        sources.root()


def test_the_package_finds_its_own_sources_without_help() -> None:
    assert (sources.root() / "common").is_dir()


def test_using_wins_over_the_environment_and_ends(kernels: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with sources.using(other):
        assert sources.root() == other
        with sources.using(None):
            assert sources.root() == kernels
    assert sources.root() == kernels
