"""A workbench for the kernels: change a line, and see at once what it costs and whether it holds.

    %load_ext kda_jit.lab

    %%kda_kernel fewer_stages --base sm80/kda_prefill.cu --arch sm_80 sm_90a
    <<<<
    constexpr int kStages = 3;
    ====
    constexpr int kStages = 2;
    >>>>

or, without a notebook,

    fewer_stages = lab.variant("fewer_stages", base="sm80/kda_prefill.cu", patch=...)

    variant    a file of kernels_src patched or replaced, or a file of its own
    shipped    the kernels as they are, to compare with
    build      registers, spills, shared memory, occupancy, seconds; errors at the cell's lines
    sass       machine code with source lines;  diff: the instruction mix of two variants
    check      the laws of the operator on a variant (GPU)
    bench      two variants in turns: the ratio and its spread (GPU)
    adopt      write a variant back to kernels_src

A variant is a copy of kernels_src with a change, and an object that one holds: calls run its
kernels inside `with variant.active():`, in that thread, and nowhere else. Its binaries are in the
same disk cache as all others, under keys of their own content.

Needs the extra `notebooks` (the magic: IPython; tables: rich).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .contest import Bench, bench
from .disassembler import DisassemblerError
from .listing import Mix, Sass, diff, sass
from .occupancy import Occupancy, occupancy
from .report import Report, build
from .trial import Check, check
from .variants import Variant, shipped, variant
from .writeback import adopt

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = [
    "Bench",
    "Check",
    "DisassemblerError",
    "Mix",
    "Occupancy",
    "Report",
    "Sass",
    "Variant",
    "adopt",
    "bench",
    "build",
    "check",
    "diff",
    "load_ipython_extension",
    "occupancy",
    "sass",
    "shipped",
    "variant",
]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """What `%load_ext kda_jit.lab` calls."""
    from .magic import KdaMagics

    shell.register_magics(KdaMagics)
