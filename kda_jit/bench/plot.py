"""Pictures of a run; they need matplotlib.

length    speed against the length of sequences, a line for each number of them
batch     speed against the number of sequences, a line for each length
roofline  time against the bytes that must move. A token of a head costs the same bytes and the same
          arithmetic wherever it stands, so the roof that counts is that of memory
floor     which share of a case's time the floor is, subject by subject
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_jit.errors import InputError

from .report import Run
from .shapes import Point, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Okabe and Ito's, told apart by colour-blind readers, too.
_COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31",
)  # fmt: skip
_MARKERS = "osD^vPX*<>hd"
_PER_ROW = 2


def draw(run: Run, folder: Path, prefix: str = "") -> dict[str, Path]:
    """Writes <folder>/<prefix><picture>.png of every picture that the run's cases allow.

    Returns them by picture. Raises InputError where the run has no time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = points(run)
    if not found:
        raise InputError("plot: expected a run with a time at least, got one without.")
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, picture in _PICTURES.items():
        figure = picture(run, found)
        if figure is None:
            continue
        figure.suptitle(_where(run), fontsize=10, color="0.35")
        written[name] = folder / f"{prefix}{name}.png"
        figure.savefig(written[name], dpi=130)
        plt.close(figure)
    return written


def _where(run: Run) -> str:
    return f"{run['gpu']}, {run['conditions']}; commit {run['commit']}, {run['date']}"


def _length(run: Run, found: Sequence[Point]) -> Figure | None:
    return _speeds(
        found,
        x=lambda p: p.length or 0,
        line=lambda p: p.sequences,
        axis="tokens of each sequence",
        words=lambda n: "1 sequence" if n == 1 else f"{n} sequences",
    )


def _batch(run: Run, found: Sequence[Point]) -> Figure | None:
    return _speeds(
        found,
        x=lambda p: p.sequences,
        line=lambda p: p.length or 0,
        axis="sequences",
        words=lambda n: "1 token each" if n == 1 else f"{n} tokens each",
    )


def _speeds(
    found: Sequence[Point],
    *,
    x: Callable[[Point], int],
    line: Callable[[Point], int],
    axis: str,
    words: Callable[[int], str],
) -> Figure | None:
    """A panel for each number of heads, a colour for each subject, a marker for each line.

    None where no two cases differ in `x` alone.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    equal = [p for p in found if p.length]
    heads = [
        h
        for h in sorted({p.heads for p in equal})
        if any(len({x(p) for p in line_}) > 1 for line_ in _lines(equal, h, line))
    ]
    if not heads:
        return None
    shown = [p for p in equal if p.heads in heads]
    colours = _colours(shown)
    markers = dict(zip(sorted({line(p) for p in shown}), _MARKERS * len(shown)))
    columns = min(_PER_ROW, len(heads))
    rows = -(-len(heads) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(1.0 + 5.0 * columns, 0.9 + 3.6 * rows), squeeze=False,
        layout="constrained", sharex=True,
    )  # fmt: skip
    for panel, h in zip(panels.flat, heads):
        for line_ in _lines(shown, h, line):
            _draw_line(panel, sorted(line_, key=x), x, colours, markers[line(line_[0])])
        panel.set(title=f"{h} heads", xlabel=axis, ylabel="10⁶ tokens × heads / s", ylim=(0, None))
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelbottom=True)
    for panel in panels.flat[len(heads) :]:
        panel.set_visible(False)
    handles = [Line2D([], [], color=c, label=name) for name, c in colours.items()]
    handles += [
        Line2D([], [], color="0.4", marker=m, linestyle="", label=words(n))
        for n, m in markers.items()
    ]
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
    return figure


def _lines(found: Sequence[Point], heads: int, line: Callable[[Point], int]) -> list[list[Point]]:
    def key(p: Point) -> tuple[str, int]:
        return p.subject, line(p)

    some = sorted((p for p in found if p.heads == heads), key=key)
    return [[*group] for _, group in groupby(some, key)]


def _draw_line(
    panel: Axes,
    line: Sequence[Point],
    x: Callable[[Point], int],
    colours: dict[str, str],
    marker: str,
) -> None:
    panel.plot(
        [x(p) for p in line], [p.speed for p in line], marker=marker, markersize=5,
        color=colours[line[0].subject], linewidth=1.4, zorder=_order(line[0].subject, colours),
    )  # fmt: skip


def _roofline(run: Run, found: Sequence[Point]) -> Figure:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(9.5, 6.5), layout="constrained")
    colours = _colours(found)
    bandwidth = run["copy_tb_per_s"]
    for (name, colour), marker in zip(colours.items(), _MARKERS):
        some = [p for p in found if p.subject == name]
        xs, ys = [p.floor_us * bandwidth for p in some], [p.us for p in some]
        spread = [p.us - p.low for p in some], [p.high - p.us for p in some]
        style: dict[str, Any] = {"fmt": marker, "markersize": 6, "color": colour}
        style["zorder"] = _order(name, colours)
        axis.errorbar(xs, ys, yerr=spread, elinewidth=1, label=name, **style)
    low = min(p.floor_us for p in found) * bandwidth / 1.5
    high = max(p.floor_us for p in found) * bandwidth * 1.5
    ends = [low, high]
    for times, style_ in ((1, "-"), (2, "--"), (5, ":")):
        label = f"floor: a copy at {bandwidth:.3g} TB/s" if times == 1 else f"{times}x the floor"
        axis.plot(ends, [times * e / bandwidth for e in ends], style_, color="0.4", label=label)
    axis.set(
        title="Time against the bytes that must move", xscale="log", yscale="log",
        xlabel="MB read and written at least", ylabel="µs", xlim=(low, high),
    )  # fmt: skip
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.grid(alpha=0.25, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def _floor(run: Run, found: Sequence[Point]) -> Figure:
    from matplotlib import pyplot as plt

    cases = list(dict.fromkeys(p.case for p in found))
    colours = _colours(found)
    thick = 0.8 / len(colours)
    figure, axis = plt.subplots(
        figsize=(9.5, 1.4 + len(cases) * max(0.3, 0.17 * len(colours))), layout="constrained"
    )
    for i, (name, colour) in enumerate(colours.items()):
        some = [p for p in found if p.subject == name]
        places = [cases.index(p.case) - 0.4 + thick * (i + 0.5) for p in some]
        bars = axis.barh(
            places, [100 * p.share for p in some], height=thick, color=colour, label=name
        )
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=7)
    axis.set_yticks(range(len(cases)), cases)
    axis.invert_yaxis()
    axis.set(
        title="Share of the floor in the time; at 100 %, as fast as a copy of the same bytes",
        xlabel="%",
    )
    axis.margins(y=0.01)
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=min(4, len(colours)))
    return figure


def _colours(found: Sequence[Point]) -> dict[str, str]:
    names = dict.fromkeys(p.subject for p in found)
    return dict(zip(names, _COLOURS * len(names)))


def _order(name: str, colours: dict[str, str]) -> float:
    """The first subject is drawn over the others, which may have run the same kernels."""
    return 3.0 - list(colours).index(name) / len(colours)


_PICTURES: dict[str, Callable[[Run, Sequence[Point]], Figure | None]] = {
    "length": _length,
    "batch": _batch,
    "roofline": _roofline,
    "floor": _floor,
}
