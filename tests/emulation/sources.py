"""Turns kernels_src into C++ for a CPU, line by line: the text stays, and so do the line numbers.

Three things are rewritten. A function with inline PTX becomes its declaration; ptx/<header> of the
same name defines it by the emulated machine, so that a new or changed one is a linker's error here
until it is emulated. Variables in shared memory are places in the CTA's own, and a file ends with a
table of its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUFFIXES = (".cu", ".cuh")

_FUNCTION = re.compile(r"^(?:template <[^\n]*>\n)?KDA_DEVICE\b", re.MULTILINE)
_PTX = re.compile(r"\basm\b")
#: What is no code: comments and string literals, whose braces do not count.
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|R"\((.*?)\)"', re.DOTALL)
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"(?<!extern )__shared__ ([\w ]+?) (\w+);")
_CLUSTER = r"__cluster_dims__\((\d+), *1, *1\)[^;{]*?\b%s\("


def translate(text: str, label: str, ptx: Sequence[str] = ()) -> str:
    """One file as C++. `label` names it in messages; `ptx` are stand-ins that follow it."""
    parts, done = [f'#line 1 "{label}"\n'], 0
    for begin, body, end in _functions_with_ptx(text):
        lines = "\n" * text.count("\n", body, end)
        parts += (text[done:begin], text[begin:body].rstrip(), ";", lines)
        done = end
    parts.append(text[done:])
    text = _DYNAMIC.sub(r"\1* const \2 = static_cast<\1*>(simt::dynamic_shared());", "".join(parts))
    text = _STATIC.sub(
        r"static const char \2_key = 0; \1& \2 = "
        r"*static_cast<\1*>(simt::static_shared(&\2_key, sizeof(\1), alignof(\1)));",
        text,
    )
    return text + "".join(f'\n#include "{name}"\n' for name in ptx)


def entry_table(text: str, entries: Sequence[str]) -> str:
    """C++ after a file of kernels: what the machine must know to launch each of them."""
    lines = ['#line 1 "entries"']
    for name in entries:
        found = re.search(_CLUSTER % name, text)
        ctas = found.group(1) if found else "1"
        lines.append(f"static void call_{name}(const void* args) {{ simt::call({name}, args); }}")
        entry = f'simt::entry("{name}", {name}, call_{name}, {ctas})'
        lines.append(f'extern "C" SIMT_EXPORT const simt::Entry simt_entry_{name} = {entry};')
    return "\n".join(lines) + "\n"


def write_tree(folder: Path, target: Path) -> None:
    """All of a kernels_src, translated."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in SUFFIXES:
            name = file.relative_to(folder)
            stand_in = HERE / "ptx" / file.name
            ptx = [f"ptx/{file.name}"] if name.parent.name == "common" and stand_in.exists() else []
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(translate(file.read_text(), f"{folder.name}/{name}", ptx))


def _functions_with_ptx(text: str) -> Iterator[tuple[int, int, int]]:
    """(begin, where the body begins, end) of each function in whose code there is `asm`."""
    code = _NO_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    for match in _FUNCTION.finditer(code):
        body = code.find("{", match.end())
        semicolon = code.find(";", match.end())
        if body < 0 or 0 <= semicolon < body:
            continue  # a declaration already
        depth, end = 0, body
        while True:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
            if depth == 0:
                break
        if _PTX.search(code, body, end):
            yield match.start(), body, end
