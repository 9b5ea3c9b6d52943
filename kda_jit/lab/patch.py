"""A patch as one types it into a cell: blocks of lines to find, each with the lines to put there.

    <<<<
    constexpr int kStages = 3;
    ====
    constexpr int kStages = 2;
    >>>>

A mark is four or more of its character, alone on a line; of > one is enough, since IPython takes
the first three of a line for a prompt, and away. The old lines must occur exactly once in
the file, whole, and equal but for blanks at their ends. No new lines: the old ones are deleted.
Between blocks only blank lines and `//` comments may stand. Blocks never see each other's result.

Every line of the outcome keeps its origin, so that a compiler that reads `with_lines` names the
line of the cell, or of the shipped file, that is to blame.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kda_jit.errors import InputError

_END_OF_GROUP = re.compile(r"\s*#\s*(endif|else|elif)\b")
_MARK = re.compile(r"(<{4,}|={4,}|>+)\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """`old` is replaced by `new`; they begin on these lines of the cell, which counts from 1."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    old_line: int
    new_line: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Lines that follow each other in `origin`, from its line `first` on."""

    lines: tuple[str, ...]
    origin: str
    first: int


@dataclass(frozen=True, slots=True)
class Patched:
    """A file made of pieces of the shipped one and of a cell."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The file as one would write it."""
        return "".join(f"{line}\n" for piece in self.pieces for line in piece.lines)

    @property
    def with_lines(self) -> str:
        """The same for a compiler: a #line directive says where each piece is from.

        Once more after each end of a group of `#if`: in one that is skipped, directives are, too.
        Not inside a macro of several lines, which a directive would end; what follows such a place
        is named wrongly as far as the next directive.
        """
        written: list[str] = []
        for piece in self.pieces:
            due = True
            for number, line in enumerate(piece.lines, piece.first):
                if due and not (written and written[-1].rstrip().endswith("\\")):
                    written.append(f'#line {number} "{piece.origin}"')
                written.append(line)
                due = _END_OF_GROUP.match(line) is not None
        return "".join(f"{line}\n" for line in written)


def lines_of(text: str) -> list[str]:
    """Lines as a compiler counts them, without their ends. (Others end at a form feed, too.)"""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def whole(text: str, origin: str, first: int = 1) -> Patched:
    """A file that is all of one origin. Its first line is the origin's line `first`."""
    return Patched((Piece(tuple(lines_of(text)), origin, first),))


def parse(cell: str, first: int = 1) -> list[Block]:
    """The blocks of a patch, whose first line is the cell's line `first`.

    Raises InputError, with the line, for anything that is no block.
    """
    blocks: list[Block] = []
    mark, start = "", 0
    old: list[str] = []
    new: list[str] = []
    for number, line in enumerate(lines_of(cell), first):
        found = _MARK.match(line)
        expected = {"": "<", "<": "=", "=": ">"}[mark]
        if found is None:
            if mark:
                (old if mark == "<" else new).append(line)
            elif line.strip() and not line.lstrip().startswith("//"):
                raise InputError(
                    f"patch, line {number}: expected <<<< or a // comment, got {line.strip()!r}. "
                    "To give the whole file, say whole (--whole)."
                )
            continue
        if found[1][0] != expected:
            raise InputError(f"patch, line {number}: expected {4 * expected}, got {found[1]}.")
        if expected == "<":
            mark, start, old, new = "<", number, [], []
        elif expected == "=":
            mark = "="
            if not any(text.strip() for text in old):
                raise InputError(f"patch, line {start}: expected lines to find, got none.")
        else:
            mark = ""
            place = start + len(old) + 2
            blocks.append(Block(tuple(old), tuple(new), start + 1, place))
    if mark:
        raise InputError(
            f"patch, line {start}: expected the block to end with >>>>, got the end of the cell."
        )
    if not blocks:
        raise InputError(
            "patch: expected blocks of <<<<, old lines, ====, new lines, >>>>; got none. To give "
            "the whole file, say whole (--whole)."
        )
    return blocks


def apply(base: str, blocks: Sequence[Block], *, file: str, cell: str) -> Patched:
    """`base` with every block replaced.

    file, cell   what lines of the base and of the patch are to be called

    Raises InputError where old lines are not in the base exactly once, or where blocks overlap.
    """
    lines = lines_of(base)
    bare = [line.rstrip() for line in lines]
    places = sorted((_find(bare, block, file), block.old_line, block) for block in blocks)
    pieces: list[Piece] = []
    done = 0
    for at, number, block in places:
        if at < done:
            raise InputError(
                f"patch, line {number}: expected blocks that are apart, got old lines that another "
                f"block replaces, too ({file}, line {at + 1})."
            )
        pieces.append(Piece(tuple(lines[done:at]), file, done + 1))
        pieces.append(Piece(block.new, cell, block.new_line))
        done = at + len(block.old)
    pieces.append(Piece(tuple(lines[done:]), file, done + 1))
    return Patched(tuple(pieces))


def _find(lines: Sequence[str], block: Block, file: str) -> int:
    """Index of the line where the block's old lines begin."""
    old = [line.rstrip() for line in block.old]
    size = len(old)
    found = [i for i in range(len(lines) - size + 1) if lines[i : i + size] == old]
    if len(found) == 1:
        return found[0]
    where = f"patch, line {block.old_line}: expected the old lines once in {file}"
    if found:
        at = ", ".join(str(i + 1) for i in found)
        raise InputError(f"{where}, got them at lines {at}. Take in a neighbouring line.")
    raise InputError(f"{where}, got none.{_nearest(lines, old)}")


def _nearest(lines: Sequence[str], old: Sequence[str]) -> str:
    """A hint: the first old line that is nowhere in the file, and what comes near it."""
    for line in old:
        if line in lines:
            continue
        # By as many characters as were given: a comment at the end is often left out.
        starts = [other.strip()[: len(line.strip())] for other in lines]
        close = difflib.get_close_matches(line.strip(), starts, n=1)
        at = starts.index(close[0]) if close else 0
        near = f"; nearest is line {at + 1}: {lines[at]!r}" if close else ""
        return f" It has no line {line!r}{near}."
    return " It has each of them, but not one after the other."
