"""`kda-jit compile` and `kda-jit cache`: source to machine code, and where that is kept. No GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import CompileError, InputError

if TYPE_CHECKING:
    from ..jit.compiler import Compiled
    from ..jit.spec import KernelSpec

cache = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)


def compile(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Target such as sm_90a, or all; repeatable. Default: all."),
    ] = None,
    key: Annotated[
        str, typer.Option(help="Build again what failed under this key; errors name it.")
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Compile even what is cached.")] = False,
) -> None:
    """Compiles the kernels for one target or for all, and prints what each entry takes.

    Registers per thread, bytes spilt, static shared memory per block, seconds. Needs NVRTC, no GPU.
    Exits with 1 when something does not compile.
    """
    from ..jit.compiler import failed_spec

    console = Console()
    specs = [failed_spec(key)] if key else specs_for(arch or ["all"])
    if failures := build(console, specs, fresh=fresh or bool(key)):
        show_failures(console, failures)
        raise typer.Exit(1)


@cache.command("info")
def cache_info() -> None:
    """Prints where compiled kernels are kept, how many there are and how many bytes they take."""
    from ..jit import cache as store

    found = store.info()
    for folder in found.folders:
        typer.echo(f"folder    {folder}")
    typer.echo(f"entries   {found.entries}")
    typer.echo(f"failed    {found.failed}")
    typer.echo(f"bytes     {found.bytes}")


@cache.command("clear")
def cache_clear() -> None:
    """Deletes every compiled kernel and every failed build; the next call compiles again."""
    from ..jit import cache as store

    typer.echo(f"deleted   {store.clear()}")


def specs_for(targets: Iterable[str]) -> list[KernelSpec]:
    """What the CUDA backend builds for each target; "all" stands for every one, PTX included."""
    from ..backends.cuda import compile_specs
    from ..jit.arch import PTX_TARGETS, TARGETS, arch_named

    names: list[str] = []
    for target in targets:
        if target == "all":
            names += [*TARGETS, *PTX_TARGETS]
        elif compile_specs(name := arch_named(target).target):
            names.append(name)
        else:
            raise InputError(f"arch: expected one that there are kernels for, got {name!r}.")
    return [spec for name in dict.fromkeys(names) for spec in compile_specs(name)]


def build(
    console: Console, specs: Sequence[KernelSpec], *, fresh: bool = False, title: str | None = None
) -> list[CompileError]:
    """Compiles one spec after the other, prints a table of all, and returns what failed.

    One after the other, because NVRTC holds a lock of its own: threads take as long in sum, and the
    seconds in the table would count the waiting.
    """
    from ..jit.compiler import compile_spec

    # One blank between columns, so that no name is folded in a terminal of 80.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("target")
    table.add_column("file", overflow="fold")
    table.add_column("kernel", overflow="fold")
    for heading in ("regs", "spill\nbytes", "static\nsmem", "seconds"):
        table.add_column(heading, justify="right")
    failures = []
    with console.status("compiling ...") as status:
        for spec in specs:
            status.update(f"compiling {spec.label()} ...")
            try:
                _add_rows(table, compile_spec(spec, fresh=fresh))
            except CompileError as error:
                table.add_row(spec.target, spec.file, spec.name, "failed", style="red")
                failures.append(error)
    console.print(table)
    return failures


def show_failures(console: Console, failures: Iterable[CompileError]) -> None:
    """Each error in its own words: which kernel, the compiler's lines, how to build it again."""
    for words in dict.fromkeys(map(str, failures)):  # without NVRTC all say the same
        text = f"\nCompileError: {words}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _add_rows(table: Table, result: Compiled) -> None:
    """A line per entry; what is the file's stands on the first."""
    file = result.spec.file
    seconds = "cached" if result.from_cache else f"{result.seconds:.2f}"
    for name in result.entries:
        numbers = ("", "", "")  # PTX: only the driver knows
        if taken := result.resources.get(name):
            spilt = taken.spill_stores + taken.spill_loads
            numbers = (
                str(taken.registers),
                f"[red]{spilt}[/red]" if spilt else "0",
                str(taken.smem_static),
            )
        table.add_row(result.spec.target, file, name, *numbers, seconds)
        file = seconds = ""
