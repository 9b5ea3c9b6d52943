"""`kda-jit compare`: two backends on one captured call, or on a folder of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..errors import BackendNameError, DeviceError, InputError
from ..extras import install
from .plain import as_json

if TYPE_CHECKING:
    from ..compare import Comparison, Output, Side

_BACKEND = (
    "auto, cuda, triton, torch; captured: what the live call wrote; peer:flashkda, peer:fla, "
    "peer:flash_kda or peer:cula; or module:function, a function with the arguments of "
    "kda_jit.prefill."
)


def compare(
    a: Annotated[str, typer.Argument(help=_BACKEND)],
    b: Annotated[str, typer.Argument(help=_BACKEND)],
    inputs: Annotated[
        Path,
        typer.Argument(help="A safetensors file, as `kda-jit run` reads it, or a folder of them."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for compare.png and compare.json.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; empty: a GPU if there is one.")
    ] = "",
    flashkda: Annotated[
        Path | None, typer.Option(help="FlashKDA's library, for peer:flashkda.")
    ] = None,
) -> None:
    """Makes one call by two backends, and says who is nearer to float64, and where they part.

    A and B are backends, other implementations, functions, or the word captured for what the live
    call wrote into the file. For each result it shows the worst block of either against the
    recurrence in float64, and of B against A; a block is a sequence, a head and 64 tokens, of a
    state a sequence (or slot) and a head. The picture shows the error along the sequence with the
    worst block, and by head and chunk. Of a folder it shows a line a file, the worst one last,
    which is the one in the picture.
    Exits with 1 when a prefill's result is further from float64 than rounding explains, and when
    a call of a folder could not be made.
    """
    import torch

    from .. import compare as work
    from ..callfile import read_call
    from ..jit.cache import why_not_writable
    from ..picture import draw
    from ..testing.verify import find_subject

    if output is not None and (why_not := why_not_writable(output)) is not None:
        raise InputError(f"output: expected a folder to write to, got {output} ({why_not}).")
    # Into a file or a pipe nothing is cut: it is searched there.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")

    try:
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        words = f"device: expected one that torch can use, got {place}: {error}"
        raise DeviceError(words) from None

    def make(file: Path) -> Comparison:
        try:
            return work.compare(read_call(file, place), a, b, flashkda=flashkda)
        except BackendNameError as error:
            raise BackendNameError(f"{error} {_OTHERS}") from None

    found: Comparison | None
    if inputs.is_dir():
        for name in (a, b):
            if ":" in name:  # said once, not once a file
                find_subject(name, torch.device(place), flashkda=flashkda)
        found, facts, passed = _compare_all(console, inputs, make)
    else:
        with Console(stderr=True).status("comparing ..."):
            found = make(inputs)
        _show(console, found)
        facts, passed = work.as_json(found), found.passed
    if output is not None:
        written = [output / "compare.json"]
        written[0].write_text(as_json(facts) + "\n")
        (output / "compare.png").unlink(missing_ok=True)  # of another comparison
        if found is None:
            pass
        elif importlib.util.find_spec("matplotlib") is None:
            console.print(f"no picture: it needs matplotlib ({install('demo')})", markup=False)
        elif found.along is not None:
            written.append(output / "compare.png")
            draw(found, written[-1])
        for path in written:
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


_OTHERS = (
    "Or captured: what the live call wrote. Or peer:flashkda and its like, or module:function, a "
    "function with the arguments of kda_jit.prefill."
)


class _Line(NamedTuple):
    """What is kept of a call of a folder: not its tensors."""

    file: str
    worse: tuple[bool, float, float]  # wrong ones last, then by how much is allowed, then by error
    words: tuple[str, ...]
    nearer: str | None
    passed: bool
    unjudged: bool
    facts: dict[str, Any]


def _line(file: str, c: Comparison) -> _Line:
    from .. import compare as work

    o = max(c.outputs, key=_worse)
    off = o.a if _number(o.a.worst) > _number(o.b.worst) else o.b
    near = "equal" if o.same_bits else {"a": "A", "b": "B", None: "alike"}[o.nearer]
    numbers = (f"{x.worst:.1e}" for x in (o.a, o.b, o.apart))
    judged = "" if c.passed else "TOO FAR"
    if all(x.allowed is None for x in c.outputs):
        judged = "not judged"
    words = (*numbers, near, judged, f"{file}: {o.name}, {off.place}")
    unjudged = any(x.allowed is None or x.unjudged for x in c.outputs)
    return _Line(file, _worse(o), words, o.nearer, c.passed, unjudged, work.as_json(c))


def _worse(o: Output) -> tuple[bool, float, float]:
    over = max(o.excess_a, o.excess_b)
    return not o.passed, over, max(_number(o.a.worst), _number(o.b.worst))


def _number(x: float) -> float:
    """NaN is worse than anything."""
    return x if x == x else float("inf")


def _compare_all(
    console: Console, folder: Path, make: Callable[[Path], Comparison]
) -> tuple[Comparison | None, dict[str, Any], bool]:
    """A line a file, the worst last: that one, all of them for json, and whether all is well."""
    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise InputError(f"inputs: expected a folder with *.safetensors, got {folder}.")
    made: list[_Line] = []
    failed: list[tuple[str, str]] = []
    worst: Comparison | None = None
    for file in track(files, "comparing", console=Console(stderr=True), transient=True):
        name = str(file.relative_to(folder))
        try:
            found = make(file)
        except (BackendNameError, DeviceError):
            raise  # what is asked for is there for no file
        except Exception as error:  # a kernel may raise anything, and says nothing of the others
            failed.append((name, f"{type(error).__name__}: {error}"))
            continue
        made.append(_line(name, found))
        if made[-1].worse >= max(line.worse for line in made):
            worst = found
    made.sort(key=lambda line: line.worse)

    def show(*words: str) -> None:  # whole lines, however narrow the terminal: they are searched
        line = "{:>11}  {:>11}  {:>7}  {:>6}  {:<10}  {}".format(*words)
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if made:
        show("A - float64", "B - float64", "B - A", "nearer", "", "file: worst at")
    for line in made:
        show(*line.words)
    for name, why in failed:
        console.print(f"{name}: {why}", markup=False, highlight=False, soft_wrap=True)
    nearer = [line.nearer for line in made]
    wrong = sum(not line.passed for line in made)
    console.print(
        f"\n{len(files)} calls: A nearer to float64 in {nearer.count('a')}, B in "
        f"{nearer.count('b')}, alike in {nearer.count(None)}; further than rounding explains in "
        f"{wrong}; not judged, or in part: {sum(line.unjudged for line in made)}; not made: "
        f"{len(failed)}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    calls = [{"file": line.file, **line.facts} for line in made]
    calls += [{"file": name, "error": why} for name, why in failed]
    passed = not wrong and not failed
    return worst, {"passed": passed, "calls": calls}, passed


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
    far = [
        name
        for name, over in zip(names.values(), (o.excess_a, o.excess_b), strict=True)
        if over > 1
    ]
    limit = "not judged" if o.allowed is None else f"rounding explains {o.allowed:.1e}"
    wrong = f", exceeded by {' and '.join(far)}" if far else ""
    if o.unjudged and o.allowed is not None:
        wrong += f"; {o.unjudged} blocks without a bound not judged"
    return f"{o.name}: {words}; {limit}{wrong}"
