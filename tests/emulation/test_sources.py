"""Translated sources are the sources: every line where it was, and nothing else changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kda_jit.jit import sources
from tests.emulation.sources import HERE, SUFFIXES, entry_table, translate

FILES = [p for p in sorted(sources.root().rglob("*")) if p.suffix in SUFFIXES]
SHARED = re.compile(r"__shared__")
#: The headers that may name instructions.
WITH_PTX = {path.name for path in (HERE / "ptx").iterdir()}
_DECLARED = re.compile(r"^KDA_DEVICE[^;{]*?(\w+)\(([^{;]*)\)( \{|;)", re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_all_but_ptx_and_shared_variables_is_as_it_is(path: Path) -> None:
    text = path.read_text()
    head, *lines = translate(text, "label").split("\n")
    assert head == '#line 1 "label"'
    before = text.split("\n")
    assert len(lines) == len(before)
    changed = [old for old, new in zip(before, lines, strict=True) if old != new]
    if path.name not in WITH_PTX:
        assert all(SHARED.search(line) for line in changed), changed
    assert not any(re.search(r"\basm\b", line) for line in lines if not line.startswith("//"))


def functions(text: str, end: str) -> list[tuple[str, int]]:
    """Names and commas of those that are declared, or defined."""
    return sorted((m[1], m[2].count(",")) for m in _DECLARED.finditer(text) if m[3] == end)


@pytest.mark.parametrize("name", sorted(WITH_PTX))
def test_what_has_ptx_is_emulated_and_nothing_else(name: str) -> None:
    """The linker sees just what some kernel calls."""
    declared = functions(translate((sources.root() / "common" / name).read_text(), name), ";")
    defined = functions((HERE / "ptx" / name).read_text(), " {")
    assert declared
    assert defined == declared


def test_a_function_with_ptx_becomes_its_declaration() -> None:
    text = """
template <int kPending>
KDA_DEVICE void wait() {
    asm volatile("wait %0; }" ::"n"(kPending));  // a brace in a string {
}
KDA_DEVICE int twice(int x) { return 2 * x; }  // asm
KDA_DEVICE int rank() { int r; asm("mov %0, 1;" : "=r"(r)); return r; }
"""
    assert (
        translate(text, "x.cuh", ["ptx/x.cuh"])
        == """#line 1 "x.cuh"

template <int kPending>
KDA_DEVICE void wait();


KDA_DEVICE int twice(int x) { return 2 * x; }  // asm
KDA_DEVICE int rank();

#include "ptx/x.cuh"
"""
    )


def test_shared_variables_are_the_ctas() -> None:
    got = translate("extern __shared__ __align__(1024) u8 bytes[];", "x.cu")
    assert got.endswith("u8* const bytes = static_cast<u8*>(simt::dynamic_shared());")
    got = translate("    __shared__ int ticket;", "x.cu")
    assert "int& ticket = *static_cast<int*>(simt::static_shared(&ticket_key, sizeof(int)" in got


def test_the_table_of_kernels_knows_clusters() -> None:
    text = "__global__ void __cluster_dims__(2, 1, 1) pair(A a) {}\n__global__ void one(A a) {}"
    table = entry_table(text, ("pair", "one"))
    assert 'simt::entry("pair", pair, call_pair, 2)' in table
    assert 'simt::entry("one", one, call_one, 1)' in table
