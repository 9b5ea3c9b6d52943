"""`%%kda_kernel`: a cell of CUDA as a variant, under its name in the notebook."""

from __future__ import annotations

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from kda_jit.errors import KdaError

from .report import Report, build
from .variants import variant

_BODY = 2  # the magic itself is line 1 of its cell


class CellError(KdaError, RuntimeError):
    """A cell does not compile, or its patch does not fit. Shown without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def _launch(
    by_entry: list[str] | None, threads: int | None, smem: int
) -> tuple[int, int] | dict[str, tuple[int, int]] | None:
    if by_entry is None:
        return None if threads is None else (threads, smem)
    if threads is not None:
        raise UsageError("--threads: expected none beside --launch, got both.")
    found: dict[str, tuple[int, int]] = {}
    for words in by_entry:
        entry, _, numbers = words.partition("=")
        block, _, memory = numbers.partition(",")
        if not (block.isdecimal() and memory.isdecimal()):
            raise UsageError(f"--launch: expected ENTRY=THREADS,SMEM, got {words!r}.")
        if entry in found:
            raise UsageError(f"--launch: expected {entry} once, got it twice.")
        found[entry] = int(block), int(memory)
    return found


@magics_class
class KdaMagics(Magics):
    """The magics of `%load_ext kda_jit.lab`."""

    @magic_arguments()
    @argument("name", help="the variable that holds the variant")
    @argument("--base", metavar="FILE", help="of kernels_src: the cell is blocks that patch it")
    @argument("--whole", action="store_true", help="the cell is the whole of FILE instead")
    @argument(
        "--arch",
        nargs="+",
        metavar="TARGET",
        help="such as sm_90a, or all; default: KDA_JIT_ARCH, the GPU's, the first that fits",
    )
    @argument("--schedule", help="build this one alone of those that read FILE")
    @argument(
        "--launch",
        nargs="+",
        action="extend",
        metavar="ENTRY=THREADS,SMEM",
        help="with --base: how kernels are launched where that changes, too",
    )
    @argument("--threads", type=int, help="a block has, without --base: for the occupancy")
    @argument("--smem", type=int, default=0, help="bytes of dynamic shared memory, likewise")
    @cell_magic
    def kda_kernel(self, line: str, cell: str) -> Report:
        """Compile the cell as a variant of the kernels, and show what it takes.

        Without --base the cell is a file of its own. With it, the cell holds blocks of

            <<<<
            lines of FILE, found exactly once
            ====
            lines to put in their place
            >>>>

        NAME is then a `kda_jit.lab.Variant`. Nothing else in the process changes.
        """
        try:
            asked = parse_argstring(self.kda_kernel, line)
        except ValueError as error:  # a quotation without its end
            raise UsageError(str(error)) from None
        patched = asked.base is not None and not asked.whole
        try:
            made = variant(
                asked.name,
                None if patched else cell,
                base=asked.base,
                patch=cell if patched else None,
                schedule=asked.schedule,
                launch=_launch(asked.launch, asked.threads, asked.smem),
                first_line=_BODY,
            )
            arch = "all" if asked.arch == ["all"] else asked.arch
            report = build(made, arch)
        except KdaError as error:
            raise CellError(f"{type(error).__name__}: {error}") from None
        shell = self.shell
        assert isinstance(shell, InteractiveShell)
        shell.push({asked.name: made})
        if not report.ok:
            raise CellError(str(report))
        return report
