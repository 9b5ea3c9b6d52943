"""A workbench for the kernels: change a line, and see at once what it costs and whether it holds.

    %load_ext kda_jit.lab

    %%kda_kernel tanh_sigmoid --base common/numerics.cuh --arch sm_80 sm_90a
    <<<<
    KDA_DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x)); }
    ====
    KDA_DEVICE float sigmoid(float x) { return fmaf(0.5f, tanhf(0.5f * x), 0.5f); }
    >>>>

or, without a notebook,

    from kda_jit import lab

    tanh_sigmoid = lab.variant("tanh_sigmoid", base="common/numerics.cuh", patch=...)
    print(lab.build(tanh_sigmoid, ["sm_80", "sm_90a"]))

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

A variant changes one file. How many threads a kernel gets, and how much dynamic shared memory, is
in kda_jit/backends/cuda.py, and an assertion in the source holds its structs to that. Another
number of stages changes both: the assertion in the patch, and the launch with it,

    lab.variant("five_stages", base="sm90/kda_prefill.cu", patch=...,
                launch={"kda_recurrence": (384, 180224)})

(of the magic: --launch kda_recurrence=384,180224).

Needs the extra `notebooks` (the magic: IPython; tables: rich), and `cuda12` or `cuda13` to compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import rich as _rich  # noqa: F401
except ModuleNotFoundError:
    from kda_jit.extras import install

    raise ModuleNotFoundError(
        f"kda_jit.lab needs the package rich: {install('cli')}", name="rich"
    ) from None

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
