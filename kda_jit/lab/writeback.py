"""Writing a variant back to kernels_src."""

from __future__ import annotations

import difflib
from contextvars import Context

from rich.console import RenderableType
from rich.text import Text

from kda_jit.backends.cuda import SCHEDULES
from kda_jit.errors import InputError
from kda_jit.jit import reload

from .patch import lines_of
from .shown import Shown
from .variants import Variant


class Adopted(Shown):
    """What `adopt` wrote, or would write: a unified diff."""

    def __init__(self, diff: str, written: str) -> None:
        self.diff = diff
        self.written = written

    def __rich__(self) -> RenderableType:
        return Text(f"{self.diff}{self.written}")


def adopt(variant: Variant, *, write: bool = True) -> Adopted:
    """Put a variant's file in the place of the shipped one; from the next call on it is used.

    write  False: only show the diff

    Raises InputError where the variant changes nothing, and where the shipped file is no longer
    what the variant was made from: that change would be lost. Make the variant again then. And
    where the backend launches kernels otherwise than the variant: that is to be changed first.
    """
    if variant.file is None or variant.base is None:
        raise InputError(f"variant: expected one with a base in kernels_src, got {variant!r}.")
    if variant.text == variant.base:
        raise InputError(f"variant: expected one that differs from {variant.file}, got its equal.")
    _check_launches(variant)
    path = variant.origin / variant.file
    kept = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    now = kept.replace("\r\n", "\n")
    if now == variant.text:
        raise InputError(f"variant: expected one to be written, got {variant.name}: {path} is it.")
    if now != variant.base:
        since = difflib.unified_diff(
            [f"{line}\n" for line in lines_of(variant.base)],
            [f"{line}\n" for line in lines_of(now)],
            f"{variant.file} (as {variant.name} took it)",
            f"{variant.file} (now)",
        )
        raise InputError(
            f"variant: expected {path} as it was when {variant.name} was made, got a file that "
            f"has changed since. Make the variant again.\n{''.join(since)}"
        )
    if not write:
        return Adopted(variant.diff, f"not written: {path}")
    text = variant.text if kept == now else variant.text.replace("\n", "\r\n")
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise InputError(
            f"variant: expected to be written to {path}, which cannot be ({error.strerror})."
        ) from None
    reload()
    Context().run(reload)  # and the usual modules, where this is in a block with others
    return Adopted(variant.diff, f"written: {path}")


def _check_launches(variant: Variant) -> None:
    there = {(s.file, x.entry): (x.block, x.smem) for s in SCHEDULES.values() for x in s.launches}
    for (file, entry), (threads, smem) in variant.tree.launches.items():
        if there[file, entry] != (threads, smem):
            threads_now, smem_now = there[file, entry]
            raise InputError(
                f'variant: expected kda_jit/backends/cuda.py to have Launch("{entry}", {threads}, '
                f"{smem}) of {file}, as {variant.name} does, got {threads_now}, {smem_now}. "
                "Change it, start anew, make the variant without launch, and adopt it."
            )
