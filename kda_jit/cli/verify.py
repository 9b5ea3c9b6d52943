"""`kda-jit verify`: the laws of the operator, tried on a backend or on anybody's prefill."""

from __future__ import annotations

import enum
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import InputError, KdaError

if TYPE_CHECKING:
    from ..testing.cases import Case
    from ..testing.runner import Subject
    from ..testing.verify import Report


class Dtype(enum.StrEnum):
    """Dtypes of a function's inputs."""

    bf16 = "bf16"
    fp32 = "fp32"


def verify(
    backend: Annotated[
        str,
        typer.Option(
            help="auto, cuda, triton, torch, reference; peer:flashkda, peer:fla, peer:flash_kda "
            "or peer:cula; or module:function, a function with the arguments of kda_jit.prefill."
        ),
    ] = "auto",
    laws: Annotated[
        list[str] | None, typer.Option(help="Names, comma between; repeatable. Default: all.")
    ] = None,
    regimes: Annotated[
        list[str] | None, typer.Option(help="Kinds of numbers, likewise. Default: all.")
    ] = None,
    examples: Annotated[int, typer.Option(help="Cases of each law on each regime.")] = 3,
    each_law: Annotated[
        int, typer.Option(help="Cases of each law over all regimes, at least; 0: as may be.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the cases.")] = 0,
    case: Annotated[str, typer.Option(help="This one case instead, as a report prints it.")] = "",
    long: Annotated[
        bool, typer.Option("--long", help="Also one sequence of 16384 tokens, where it matters.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; empty: a GPU if there is one.")
    ] = "",
    report: Annotated[
        list[Path] | None, typer.Option(help="Write it here, .json or .md; repeatable.")
    ] = None,
    flashkda: Annotated[
        Path | None, typer.Option(help="FlashKDA's library, for peer:flashkda.")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of a function's inputs. Default: bf16 on a GPU, fp32 on the CPU."),
    ] = None,
    head_dim: Annotated[
        int, typer.Option(help="Of a function. 0: 128 on a GPU, 32 on the CPU.")
    ] = 0,
    bitwise: Annotated[
        bool, typer.Option("--bitwise", help="Hold a function to equal bits, as ours are.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Processes that share the work.")] = 1,
    commit: Annotated[str, typer.Option(help="For the report; empty: that of this checkout.")] = "",
    list_: Annotated[
        bool, typer.Option("--list", help="Print laws and regimes, and try nothing.")
    ] = False,
) -> None:
    """Tries every law of the operator on every kind of numbers, and says which ones break.

    A prefill cut in two is the whole one, a checkpoint is the state of the cut sequence, packed
    sequences do not touch each other, and so on; `--list` prints them all. Each cell of the table
    is a law on a regime and shows the worst error. What broke is shown as the smallest case that
    breaks it, with the command that runs it again.
    Exits with 0 when every law holds, with 1 when one is broken, and with 2 when nothing could be
    tried: an unknown name, or a backend that cannot run here.
    """
    from ..testing import verify as work

    console = Console()
    if list_:
        _list(console)
        return
    try:
        for path in report or ():
            if path.suffix not in (".json", ".md"):
                raise InputError(f"report: expected a name that ends in .json or .md, got {path}.")
            path.parent.mkdir(parents=True, exist_ok=True)
        one = _case(case)
        again = partial(_subject, backend, device, flashkda, dtype, head_dim, bitwise)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("verify", total=None)
            found = work.verify(
                again(),
                laws=_names(laws),
                regimes=_names(regimes),
                examples=examples,
                each_law=each_law,
                seed=seed,
                case=one,
                long=long,
                jobs=jobs,
                again=again,
                commit=commit,
                command=shlex.join(["kda-jit", *sys.argv[1:]]),
                progress=lambda done, total, words: bar.update(
                    task, completed=done, total=total, description=words or "done"
                ),
            )
        if not found.tried:
            reasons = dict.fromkeys(f"{cell.law}: {cell.words}" for cell in found.cells)
            raise InputError(f"laws: expected one that can be tried, got {'; '.join(reasons)}.")
        _show(console, found)
        for path in report or ():
            work.save(found, path)
            console.print(f"written: {escape(str(path))}", highlight=False, soft_wrap=True)
    except (KdaError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    if not found.passed:
        raise typer.Exit(1)


def _names(asked: list[str] | None) -> list[str]:
    return [name.strip() for text in asked or () for name in text.split(",") if name.strip()]


def _case(text: str) -> Case | None:
    from ..testing.cases import Case

    if not text:
        return None
    try:
        return Case.parse(text)
    except ValueError as error:
        raise InputError(str(error)) from None


def _subject(
    backend: str,
    device: str,
    flashkda: Path | None,
    dtype: Dtype | None,
    head_dim: int,
    bitwise: bool,
) -> Subject:
    import torch

    from ..testing.verify import find_subject

    try:
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise InputError(f"device: {str(error).partition(chr(10))[0]}") from None
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError(
                f"device: expected one that torch can use, got {place}, and torch finds no GPU "
                "here; kda-jit doctor says why."
            )
        if place.index is None:
            place = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(place)
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    if (dtype or head_dim or bitwise) and (":" not in backend or backend.startswith("peer:")):
        raise InputError(
            "dtype, head_dim, bitwise: expected a function (module:function), whose they are, got "
            f"{backend!r}, whose own are known."
        )
    known = {Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}
    return find_subject(
        backend,
        place,
        flashkda=flashkda,
        dtype=None if dtype is None else known[dtype],
        head_dim=head_dim or None,
        bitwise=bitwise,
    )


def _list(console: Console) -> None:
    from ..testing.cases import REGIMES
    from ..testing.laws import EVERY, LAWS

    for title, rows in (
        ("Laws", {name: law.about for name, law in LAWS.items()}),
        ("Regimes", {name: REGIMES[name].about for name in EVERY}),
    ):
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, about in rows.items():
            table.add_row(name, escape(about))
        console.print(table)


def _show(console: Console, report: Report) -> None:
    """Law x regime in as many tables as the width asks for, then what broke, then the verdict."""
    from ..testing.verify import BROKEN, HOLDS, LEGEND

    styles = {BROKEN: "bold red", HOLDS: "green"}
    name_width = max(map(len, report.laws), default=0) + 2
    for some in _fitting(report.regimes, console.width - name_width):
        table = Table(box=None, pad_edge=False)
        table.add_column("law", no_wrap=True)
        for regime in some:
            table.add_column(regime, justify="right", no_wrap=True)
        for law in report.laws:
            cells = [report.cell(law, regime) for regime in some]
            shown = [
                f"[{style}]{cell.shown}[/]" if (style := styles.get(cell.status)) else cell.shown
                for cell in cells
            ]
            table.add_row(law, *shown)
        console.print(table)
        console.print()
    console.print(LEGEND, highlight=False)
    for cell in report.broken:
        text = f"\n{cell.law} x {cell.regime}: {cell.words}\n  {report.command(cell)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print()
    for what in report.ran:
        console.print(f"ran {what}", markup=False, highlight=False, soft_wrap=True)
    verdict = "[green]every law holds[/]" if report.passed else "[red]not every law holds[/]"
    if not report.passed and not report.broken:
        verdict = "[yellow]not all was tried[/]"
    count = f"{len(report.broken)} of {report.tried} cells broken"
    console.print(f"{escape(report.headline())}: {verdict}, {count}", highlight=False)


def _fitting(names: list[str], width: int) -> list[list[str]]:
    """`names` in groups whose columns, two apart, stay within `width`."""
    groups: list[list[str]] = []
    left = 0
    for name in names:
        taken = max(len(name), 8) + 2
        if not groups or taken > left:
            groups.append([])
            left = width
        groups[-1].append(name)
        left -= taken
    return groups
