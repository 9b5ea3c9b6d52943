"""`kda-jit demo`: what the package does, on this machine, in a minute."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..extras import install
from . import kernels

if TYPE_CHECKING:
    from ..demo import Report
    from ..resolver import Resolution


def demo(
    picture: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("out/demo.png"),
    heads: Annotated[int, typer.Option(help="Heads; 0: 2 on a CPU, 16 on a GPU.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    skip_compile: Annotated[
        bool, typer.Option("--skip-compile", help="Leave the kernels of other GPUs uncompiled.")
    ] = False,
) -> None:
    """Runs a batch of mixed lengths on the best backend found and checks it against float64.

    Shows which backend was taken and why the others were not, compiles the kernels for every target
    (no GPU needed), compares each backend that runs here with the recurrence, and draws a picture.
    Exits with 1 when a result is further off than rounding explains, or a kernel does not compile.
    """
    import torch

    from .. import demo as work
    from ..resolver import resolve

    console = Console()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    heads = heads or (16 if on_gpu else 2)
    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    _show_choice(console, resolve(work.query(device)), name)
    compiled = skip_compile or _show_compiled(console)
    tokens = ", ".join(map(str, work.LENGTHS))
    with console.status(f"running {tokens} tokens ..."):
        report = work.run(device, heads=heads, seed=seed)
    _show_checks(console, report, f"{tokens} tokens, {heads} heads of {work.HEAD_DIM}, bf16")
    if importlib.util.find_spec("matplotlib") is None:
        console.print(f"\nno picture: it needs matplotlib ({install('demo')})", markup=False)
    else:
        with console.status("drawing ..."):
            work.draw(report, picture)
        console.print(f"\npicture: {picture}", highlight=False)
    if not (report.passed and compiled):
        raise typer.Exit(1)


def _show_choice(console: Console, resolution: Resolution, device: str) -> None:
    table = Table(title=f"Backends on this machine ({device})", title_justify="left", box=None)
    table.add_column("backend")
    table.add_column("taken")
    table.add_column("because", overflow="fold")
    for name, reasons in {resolution.backend: (), **resolution.reasons}.items():
        if name == resolution.backend:
            table.add_row(name, "yes", "the first that can run this", style="green")
        else:
            table.add_row(name, "no", "; ".join(reasons))
    console.print(table)


def _show_compiled(console: Console) -> bool:
    """Compiles for every target. False where a kernel does not compile; having no NVRTC is fine."""
    from ..jit.compiler import unavailable_reason

    console.print()
    if reason := unavailable_reason("sm_80"):
        console.print(f"kernels not compiled: {reason}", markup=False, highlight=False)
        return True
    start = time.perf_counter()
    failures = kernels.build(
        console,
        kernels.specs_for(["all"]),
        title="Kernels, compiled for every target (no GPU needed)",
    )
    console.print(f"{time.perf_counter() - start:.1f} s in all", highlight=False)
    kernels.show_failures(console, failures)
    return not failures


def _show_checks(console: Console, report: Report, what: str) -> None:
    table = Table(title=f"Against float64: {what}", title_justify="left", box=None)
    for heading in ("backend", "result", "error", "allowed", "", "worst at"):
        table.add_column(heading, no_wrap=True)
    for run in report.runs:
        shown = run.launch.backend
        for check in run.checks:
            verdict = "[green]ok[/green]" if check.passed else "[red]wrong[/red]"
            error, allowed = f"{check.worst.error:.1e}", f"{check.limit.allowed:.1e}"
            table.add_row(shown, check.name, error, allowed, verdict, check.worst.place)
            shown = ""
    console.print()
    console.print(table)
    for run in report.runs:
        ms = run.milliseconds
        facts = [f"{ms:.0f} ms" if ms >= 100 else f"{ms:.3g} ms"]
        facts += [f"schedule {run.launch.schedule}"] if run.launch.schedule else []
        facts += [f"target {run.launch.target}"] if run.launch.target else []
        facts += [f"kernels {', '.join(run.launch.kernels)}"] if run.launch.kernels else []
        console.print(f"{run.launch.backend}: {', '.join(facts)}", highlight=False)
