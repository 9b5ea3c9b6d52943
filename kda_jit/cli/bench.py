"""`kda-jit bench`: check every case, time it beside the peers; or look at a saved run."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from ..errors import InputError, KdaError
from ..extras import install

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ..bench.cases import TimedCase
    from ..bench.report import Run
    from ..bench.run import Plan, Progress
    from ..testing import Case


def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="seed, flashkda, flashinfer-h12, long, ragged, decode, layer, small or accuracy; "
            "repeatable. Default: flashkda and accuracy; without a GPU, small."
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="A case, or a pattern such as '*_h96', of any suite; repeatable."),
    ] = None,
    lens: Annotated[
        list[str] | None,
        typer.Option(help="A case of your own, such as 300,17,4096: tokens of each sequence."),
    ] = None,
    heads: Annotated[int, typer.Option(help="Of such a case.")] = 16,
    list_: Annotated[bool, typer.Option("--list", help="Print the cases, and time none.")] = False,
    backend: Annotated[
        str, typer.Option(help="auto, cuda, triton or torch; auto: what a call would get.")
    ] = "auto",
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="Of the cuda backend, or auto, or all; repeatable, the table shows the first. "
            "Default: what KDA_JIT_SCHEDULE says."
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="flashkda, fla, flash_kda, cula, vllm_kimi_k3, vllm_glm5next or vllm_layer; "
            "repeatable. Default: those of flashkda and vLLM's that are here."
        ),
    ] = None,
    no_peer: Annotated[bool, typer.Option("--no-peer", help="Measure ours alone.")] = False,
    flashkda: Annotated[Path | None, typer.Option(help="FlashKDA's library.")] = None,
    vllm_sources: Annotated[
        Path | None,
        typer.Option(help="vLLM's Triton sources, as kda_jit/bench/vllm_sources.py says."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Milliseconds of a measurement.")] = 150.0,
    out: Annotated[
        Path | None, typer.Option(help="Write the run there as json, after each case.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write it into benchmarks/results/ of the checkout.")
    ] = False,
    from_: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: take this saved run.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Folder for pictures of the run; needs matplotlib.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="An earlier run: compare with it, exit 1 if slower.")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Percent that --against allows ours to be slower.")
    ] = 5.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print markdown tables.")] = False,
    commit: Annotated[
        str | None, typer.Option(help="To note in the run, where this is not a checkout.")
    ] = None,
) -> None:
    """Checks every case against float64, then times it beside the peers that are here.

    A case whose result is wrong, or that other kernels ran than those asked for, gets no time.
    Times are medians, on a GPU with a cold L2, else of wall time; the floor is what a copy of the
    bytes that must move takes. Exits with 1 for a wrong result, and where a case of ours is slower
    than in the run of --against by more than --limit and more than the spread of both; with 2 when
    nothing could be measured.
    """
    from ..bench import lineup, registry, report
    from ..bench.run import Plan

    try:
        if list_:
            speed, tabled = _cases(suite or registry.SUITE_NAMES, case, lens, heads)
            typer.echo("\n".join([*(c.name for c in speed), *(c.regime for c in tabled)]))
            return
        earlier = report.load(against) if against else None
        if plot is not None:
            _check_plot(plot)
        if from_ is not None:
            _refuse_to_measure(suite=suite, case=case, lens=lens, out=out, save=save)
            found = report.load(from_)
        else:
            device = _device()
            suites = suite or _default_suites(device, case, lens)
            speed, tabled = _cases(suites, case, lens, heads)
            folder = _folder(device, suites, case, lens) if save else None
            ours = lineup.find_ours(_backend(backend, device), schedule, device)
            peers = lineup.find_all_peers([] if no_peer else peer, flashkda, vllm_sources)
            plan = Plan(
                device, lineup.Contest(ours, *peers), speed, tabled, budget,
                command=shlex.join(["kda-jit", *sys.argv[1:]]), commit=commit,
            )  # fmt: skip
            found = _measure(plan, out)
            if folder is not None:
                path = report.standard_path(found, suites[:1], folder)
                report.save(found, path)
                _written(path)
        typer.echo(report.markdown(found) if markdown else report.text(found))
        if plot is not None:
            _plot(found, plot)
        passed = earlier is None or _compare(found, earlier, limit / 100)
    except (KdaError, OSError) as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(2) from None
    if not passed or any(row.keys() & {"failed", "notes"} for row in found["rows"]):
        raise typer.Exit(1)


def _cases(
    suites: Sequence[str], patterns: list[str] | None, lens: list[str] | None, heads: int
) -> tuple[list[TimedCase], list[Case]]:
    from ..bench import registry

    speed, tabled = registry.select(suites, patterns or ())
    return [*speed, *registry.cases_of(lens or (), heads)], tabled


def _default_suites(
    device: torch.device, patterns: list[str] | None, lens: list[str] | None
) -> Sequence[str]:
    """Where none is named: all that a pattern could mean, none beside lengths of one's own."""
    from ..bench import registry

    if patterns:
        return registry.SUITE_NAMES
    if lens:
        return ()
    return registry.FRONT if device.type == "cuda" else ("small",)


def _device() -> torch.device:
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _backend(asked: str, device: torch.device) -> str:
    """The backend that a call gets here; raises NoBackendError, with the reasons, if none."""
    import torch

    from ..bench.cases import HEAD_DIM
    from ..resolver import resolve_backend

    return resolve_backend(
        asked, head_dim=HEAD_DIM, dtype=torch.bfloat16, lower_bound=-5.0, device=device
    ).backend


def _refuse_to_measure(**asked: object) -> None:
    if given := [name for name, value in asked.items() if value]:
        raise InputError(
            f"from: expected a saved run to look at, got {', '.join(given)} as well, which measure."
        )


def _folder(
    device: torch.device,
    suites: Sequence[str],
    patterns: list[str] | None,
    lens: list[str] | None,
) -> Path:
    """Where --save writes; README's table is made from the files in RESULTS itself."""
    from ..bench.registry import FRONT
    from ..bench.run import RESULTS

    if device.type != "cuda" or patterns or lens:
        got = "a machine without a GPU" if device.type != "cuda" else "single cases"
        raise InputError(f"save: expected whole suites on a GPU, got {got}; --out writes anywhere.")
    return RESULTS if set(suites) <= set(FRONT) else RESULTS / "suites"


def _measure(plan: Plan, out: Path | None) -> Run:
    from ..bench.run import run

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("bench", total=None)

        def progress(now: Progress) -> None:
            bar.update(task, completed=now.done, total=now.total, description=now.case)
            if now.words is not None:
                line = f"{now.case}: {now.words}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        found = run(plan, out, progress)
    if out is not None:
        _written(out)
    return found


def _check_plot(folder: Path) -> None:
    """Before minutes of measuring."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"plot: expected a folder, got the file {folder}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"plot: expected matplotlib to draw with, got none: {install('demo')}")


def _plot(found: Run, folder: Path) -> None:
    from ..bench.plot import draw

    for path in draw(found, folder).values():
        _written(path)


def _compare(found: Run, earlier: Run, limit: float) -> bool:
    from ..bench import against, report

    compared = against.compare(found, earlier, limit)
    typer.echo(f"\nAgainst {report.headline(earlier)}:\n\n{against.text(compared)}")
    return compared.passed


def _written(path: Path) -> None:
    typer.echo(f"written: {path}")
