"""Machine code of a variant: listings with source lines, and the instruction mix of two of them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kda_jit.errors import InputError
from kda_jit.jit import KernelSpec, arch_named

from .disassembler import disassemble
from .report import compiled, targets
from .shown import Shown
from .variants import Variant

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)")
_LINE = re.compile(r'//## File "([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;")
_EQUAL_SHOWN = 8
_OPCODE = re.compile(r"^(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `where` is "kernels_src/sm80/kda_prefill.cu:57" or "<cell name>:5"."""

    address: int
    text: str
    where: str

    @property
    def opcode(self) -> str:
        """Without modifiers: LDG for LDG.E.128."""
        found = _OPCODE.match(self.text)
        return found[1] if found else self.text


@dataclass(frozen=True, repr=False)
class Sass(Shown):
    """Instructions of kernels, by entry."""

    name: str
    target: str
    entries: dict[str, tuple[Instruction, ...]]

    def grep(self, pattern: str) -> Sass:
        """The instructions whose text or source line has a match of a regular expression."""
        wanted = re.compile(pattern)
        kept = {
            entry: tuple(i for i in code if wanted.search(i.text) or wanted.search(i.where))
            for entry, code in self.entries.items()
        }
        return replace(self, entries=kept)

    def mix(self) -> Counter[str]:
        """How often each opcode stands in the code, all entries together."""
        return Counter(i.opcode for code in self.entries.values() for i in code)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for entry, code in self.entries.items():
            parts.append(Text(f"{self.name}, {entry} for {self.target}: {len(code)} instructions"))
            table = Table(box=None, show_header=False, pad_edge=False)
            for one in code:
                table.add_row(f"{one.address:05x}", Text(one.text), Text(one.where, style="dim"))
            parts.append(table)
        return Group(*parts)


@dataclass(frozen=True, repr=False)
class Mix(Shown):
    """Instruction counts of two variants; counts of the code as it stands, not as often as it runs.

    counts  opcode -> (of the first, of the second), largest change first
    """

    names: tuple[str, str]
    target: str
    entries: tuple[str, ...]
    counts: dict[str, tuple[int, int]]

    @property
    def total(self) -> tuple[int, int]:
        """Instructions of both."""
        a, b = (sum(pair[i] for pair in self.counts.values()) for i in (0, 1))
        return a, b

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        table.add_column("opcode")
        for heading in (*self.names, "change"):
            table.add_column(heading, justify="right")
        equal = [opcode for opcode, (a, b) in self.counts.items() if a == b]
        hidden = set(equal[_EQUAL_SHOWN:])
        for opcode, (a, b) in {"all": self.total, **self.counts}.items():
            if opcode not in hidden:
                table.add_row(opcode, str(a), str(b), f"{b - a:+d}" if a != b else "")
        parts: list[RenderableType] = [Text(f"{', '.join(self.entries)} for {self.target}"), table]
        if hidden:
            parts.append(Text(f"and {len(hidden)} more opcodes, as often in both"))
        return Group(*parts)


def sass(
    variant: Variant, entry: str | None = None, *, arch: str | None = None, grep: str | None = None
) -> Sass:
    """The machine code of a variant's kernels. Needs nvdisasm, and no GPU.

    entry  one kernel; None: all of the first file that the variant builds
    arch   target; None: as `build` takes it
    grep   only instructions whose text or source line has a match: "HMMA", "<cell", "LDS|STS"

    Raises CompileError; DisassemblerError where there is no nvdisasm; InputError for an entry that
    is not there.
    """
    target = _one_target(variant, arch)
    listing = _listing(variant, variant.specs(target), entry)
    return listing if grep is None else listing.grep(grep)


def diff(
    a: Variant, b: Variant | None = None, *, entry: str | None = None, arch: str | None = None
) -> Mix:
    """The instruction mix of two variants, side by side; of one, beside the shipped kernels.

    entry, arch  as for `sass`
    """
    pair = (a, b) if b is not None else (a.before(), a)
    target = _one_target(a if b is None or a.file is not None else b, arch)
    specs = [each.specs(target) for each in pair]
    # The same file of both. Two files of their own have none in common.
    common = [spec for spec in specs[0] if spec in specs[1]]
    codes = [_listing(v, common or own, entry) for v, own in zip(pair, specs, strict=True)]
    mixes = [code.mix() for code in codes]
    counts = {op: (mixes[0][op], mixes[1][op]) for op in mixes[0] | mixes[1]}
    order = sorted(counts, key=lambda op: (-abs(counts[op][1] - counts[op][0]), -counts[op][0], op))
    entries = tuple(dict.fromkeys(e for code in codes for e in code.entries))
    names = (pair[0].name, pair[1].name)
    return Mix(names, target, entries, {op: counts[op] for op in order})


def parse(listing: str, name: Callable[[str], str] = str) -> dict[str, tuple[Instruction, ...]]:
    """nvdisasm's output, kernel by kernel. `name`: what a source file is called."""
    found: dict[str, list[Instruction]] = {}
    names = functools.cache(name)
    entry, where = "", ""
    for line in listing.splitlines():
        if match := _SECTION.match(line):
            entry, where = match[1], ""
            found[entry] = []
        elif match := _LINE.search(line):
            where = f"{names(match[1])}:{match[2]}"
        elif entry and (match := _INSTRUCTION.match(line)):
            found[entry].append(Instruction(int(match[1], 16), match[2], where))
    return {entry: tuple(code) for entry, code in found.items()}


def _listing(variant: Variant, specs: Sequence[KernelSpec], entry: str | None) -> Sass:
    """The first of the files that has the entry."""
    known: list[str] = []
    for spec in specs:
        if entry is not None and spec.entries and entry not in spec.entries:
            known += spec.entries
            continue
        built = compiled(variant, spec)
        if entry in (None, *built.entries):
            code = parse(disassemble(built.path), variant.called)
            wanted = built.entries if entry is None else (entry,)
            return Sass(variant.name, spec.target, {name: code[name] for name in wanted})
        known += built.entries
    names = ", ".join(dict.fromkeys(known))
    raise InputError(f"entry: expected one of {names}, got {entry!r}.")


def _one_target(variant: Variant, arch: str | None) -> str:
    (target,) = targets(variant, None if arch is None else [arch])
    if arch_named(target).is_ptx:
        raise InputError(f"arch: expected a target of machine code, got {target!r}, which is PTX.")
    return target
