"""`kda-jit compare`: two backends on one captured call."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import BackendNameError, InputError
from .plain import as_json

if TYPE_CHECKING:
    from ..compare import Comparison, Output, Side

_BACKEND = "auto, cuda, triton, torch; captured: what the live call wrote."


def compare(
    a: Annotated[str, typer.Argument(help=_BACKEND)],
    b: Annotated[str, typer.Argument(help=_BACKEND)],
    inputs: Annotated[Path, typer.Argument(help="A safetensors file, as `kda-jit run` reads it.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for compare.png and compare.json.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; empty: a GPU if there is one.")
    ] = "",
) -> None:
    """Makes one call by two backends, and says who is nearer to float64, and where they part.

    A and B are backends, or the word captured for what the live call wrote into the file. For each
    result it shows the worst block of either against the recurrence in float64, and of B against A;
    a block is a sequence, a head and 64 tokens, of a state a sequence (or slot) and a head. The
    picture shows the error along the sequence with the worst block, and by head and chunk.
    Exits with 1 when a prefill's result is further from float64 than rounding explains.
    """
    import torch

    from .. import compare as work
    from ..callfile import read_call
    from ..jit.cache import why_not_writable
    from ..picture import draw

    if output is not None and (why_not := why_not_writable(output)) is not None:
        raise InputError(f"output: expected a folder to write to, got {output} ({why_not}).")
    console = Console()
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    call = read_call(inputs, place)
    try:
        with Console(stderr=True).status("comparing ..."):
            found = work.compare(call, a, b)
    except BackendNameError as error:
        raise BackendNameError(f"{error} Or captured: what the live call wrote.") from None
    _show(console, found)
    if output is not None:
        written = [output / "compare.json"]
        written[0].write_text(as_json(work.as_json(found)) + "\n")
        if importlib.util.find_spec("matplotlib") is None:
            console.print(
                "no picture: it needs matplotlib (pip install 'kda_jit[demo]')", markup=False
            )
        elif found.along is not None:
            written.append(output / "compare.png")
            draw(found, written[-1])
        for path in written:
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if not found.passed:
        raise typer.Exit(1)


def _show(console: Console, c: Comparison) -> None:
    shapes = [f"{k} {list(x.shape)}" for k, x in c.call.arguments.items() if k in ("q", "v")]
    dtype = str(c.call.arguments["q"].dtype).removeprefix("torch.")
    console.print(f"{c.call.function}: {', '.join(shapes)}, {dtype}", markup=False, highlight=False)
    for letter, side in (("A", c.a), ("B", c.b)):
        ran = ", ".join(f"{key} {value}" for key, value in side.ran.items())
        line = f"{letter} {side.name}: ran {ran}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("result", "compared", "worst block", "over all", "worst at"):
        table.add_column(heading, no_wrap=True)
    for o in c.outputs:
        shown = o.name
        rows = (("A - float64", o.a), ("B - float64", o.b), ("B - A", o.apart))
        for what, off in rows:
            table.add_row(shown, what, f"{off.worst:.1e}", f"{off.all:.1e}", off.place)
            shown = ""
    console.print()
    console.print(table, highlight=False)
    console.print()
    for o in c.outputs:
        console.print(_verdict(o, c.a, c.b), markup=False, highlight=False, soft_wrap=True)


def _verdict(o: Output, a: Side, b: Side) -> str:
    names = {"a": f"A ({a.name})", "b": f"B ({b.name})"}
    if o.same_bits:
        words = "the same bits"
    elif o.nearer is None:
        words = "alike in their distance from float64"
    else:
        words = f"{names[o.nearer]} is nearer to float64"
    far = [names[s] for s in names if o.allowed is not None and getattr(o, s).worst > o.allowed]
    limit = "not judged" if o.allowed is None else f"rounding explains {o.allowed:.1e}"
    wrong = f", exceeded by {' and '.join(far)}" if far else ""
    return f"{o.name}: {words}; {limit}{wrong}"
