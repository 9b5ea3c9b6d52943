"""Patches: what fits, what is refused in which words, and where every line is from."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_jit.errors import InputError
from kda_jit.lab import patch

BASE = "int a;\nint b;\nint a;\n\n    int c;\n"


def block(old: str, new: str) -> str:
    return f"<<<<\n{old}====\n{new}>>>>\n"


def patched(cell: str, base: str = BASE, first: int = 2) -> patch.Patched:
    return patch.apply(base, patch.parse(cell, first), file="file.cu", cell="<cell>")


def origins(text: str) -> list[tuple[str, int, str]]:
    """(file, line, text) of each line, as a compiler that obeys #line sees it."""
    found, file, number = [], "", 0
    for line in text.splitlines():
        if directive := re.fullmatch(r'#line (\d+) "(.*)"', line):
            number, file = int(directive[1]), directive[2]
            continue
        found.append((file, number, line))
        number += 1
    return found


def test_old_lines_become_new_ones() -> None:
    done = patched(block("int b;\n", "int d;\nint e;\n"))
    assert done.text == "int a;\nint d;\nint e;\nint a;\n\n    int c;\n"
    assert origins(done.with_lines) == [
        ("file.cu", 1, "int a;"),
        ("<cell>", 5, "int d;"),
        ("<cell>", 6, "int e;"),
        ("file.cu", 3, "int a;"),
        ("file.cu", 4, ""),
        ("file.cu", 5, "    int c;"),
    ]


def test_blocks_are_found_in_the_file_and_not_in_each_others_result() -> None:
    cell = block("    int c;\n", "int b;\n") + "// why\n\n" + block("int b;\nint a;\n", "")
    assert patched(cell).text == "int a;\n\nint b;\n"


def test_marks_may_be_longer_and_blanks_at_ends_do_not_count() -> None:
    for end in (">>>>>", ">>>>  ", ">"):
        cell = f"<<<<<<<<  \nint b;   \n=======\nint d;\n{end}\n"
        assert patched(cell, BASE.replace("int b;", "int b; ")).text == BASE.replace("b", "d")


@pytest.mark.parametrize(
    "cell, words",
    [
        ("int d;\n", r"line 2: expected <<<< or a // comment, got 'int d;'.*--whole"),
        ("// nothing\n", r"got none.*--whole"),
        ("<<<<\nint b;\n>>>>\n", r"line 4: expected ====, got >>>>"),
        ("<<<<\nint b;\n====\n", r"line 2: .*end with >>>>"),
        ("<<<<\n\n====\nx\n>>>>\n", r"line 2: expected lines to find"),
        (block("int a;\n", ""), r"line 3: .*once in file\.cu, got them at lines 1, 3"),
        (block("int bb;\n", ""), r"no line 'int bb;'; nearest is line 2: 'int b;'"),
        (block("int b;\nint b;\n", ""), r"has each of them, but not one after the other"),
        (block("int c;\n", ""), r"no line 'int c;'; nearest is line 5: '    int c;'"),
        (block("char* name;\n", ""), r"no line 'char\* name;'\.$"),
        (block("int b;\n", "") + block("int b;\nint a;\n", ""), r"line 7: .*apart.*line 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(cell: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        patched(cell)


def test_no_directive_ends_a_macro_of_several_lines() -> None:
    base = "#define F(x) \\\n    g(x); \\\n    h(x)\nint a;\n"
    done = patched(block("    g(x); \\\n", "    k(x); \\\n"), base)
    lines = done.with_lines.splitlines()
    inside = lines[lines.index("#define F(x) \\") : lines.index("    h(x)")]
    assert not any(line.startswith("#line") for line in inside)


def test_lines_after_a_group_that_is_skipped_are_named_again() -> None:
    base = "#if 0\nint a;\nint b;\n# endif // 0\nint c;\n"
    done = patched(block("int a;\n", "int d;\nint e;\n"), base)
    lines = done.with_lines.splitlines()
    end = lines.index("# endif // 0")
    assert lines[end + 1 :] == ['#line 5 "file.cu"', "int c;"]


@given(data=st.data())
def test_every_line_keeps_its_origin(data: st.DataObject) -> None:
    """Whatever is replaced: a compiler finds each line where #line says it is."""
    size = data.draw(st.integers(1, 12))
    base = [f"line {i}" for i in range(size)]
    cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=6)))
    spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2])]
    news = [data.draw(st.lists(st.sampled_from("xyz"), max_size=3)) for _ in spans]
    blocks = [
        block("".join(f"{x}\n" for x in base[a:b]), "".join(f"{x}\n" for x in new))
        for (a, b), new in zip(spans, news)
    ]
    order = data.draw(st.permutations(range(len(blocks))))
    cell = "".join(blocks[i] for i in order)

    done = patched(cell, "".join(f"{x}\n" for x in base), first=2)
    want, at = [], 0
    for (a, b), new in zip(spans, news):
        want += base[at:a] + new
        at = b
    want += base[at:]
    assert done.text.splitlines() == want
    sources = {"file.cu": base, "<cell>": ["%%magic", *cell.splitlines()]}
    found = origins(done.with_lines)
    assert [line for _, _, line in found] == want
    assert all(sources[file][number - 1] == line for file, number, line in found)
