"""A run as a table for the terminal, as markdown, as json.

A run is the json object that `docs/generate.py` reads. At its head gpu, date, commit, conditions;
device, versions, sources (digests), command, copy_tb_per_s. Then

    rows      one per case: case, heads, lengths or what a step holds, floor_us; then `failed`, why
              it has no time, or us, p10_us, p90_us, of_peak (floor / us), tb_per_s (floor bytes
              over the time), host_us, launches, of_parts (us / the sum over the parts of a step,
              each run alone), max_error (worst block against float64), flashkda_us, vs_flashkda,
              ...; `notes`, who else was wrong; and per subject `timings`: us, p10, p90, runs,
              graph_us, host_us, call_us, launches, kernels {name: us}, and for ours what ran
              (backend, schedule, target, ...), max_error, of_parts, vs_...
    accuracy  one per input: case, about, rounding (relative RMS of the exact output in bf16), and
              per subject `errors`: out, state (relative RMS), worst_out, worst_state (worst block)
    summary   of vs_flashkda, ...: geomean, least

us, p10_us, p90_us, host_us, launches and what follows from them are those of the first subject.
Without a GPU, gpu is "CPU", and host_us, graph_us, call_us, launches and kernels are absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import exp, fsum, log
from pathlib import Path
from typing import Any

from kda_jit.errors import InputError

Run = dict[str, Any]
#: What stands for the GPU in a run without one.
CPU = "CPU"


def show_us(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}"


def show_ratio(x: float) -> str:
    return f"{x:.2f}x"


_Column = tuple[str, Callable[[float], str]]

# key of a row -> (heading, how a value is written)
_FIRST: dict[str, _Column] = {
    "us": ("us", show_us),
    "p10_us": ("p10", show_us),
    "p90_us": ("p90", show_us),
    "floor_us": ("floor us", show_us),
    "of_peak": ("of peak", lambda x: f"{100 * x:.0f} %"),
    "tb_per_s": ("TB/s", lambda x: f"{x:.2f}"),
    "host_us": ("host us", show_us),
    "launches": ("launches", lambda x: f"{x:.0f}"),
    "of_parts": ("of parts", show_ratio),
}
_LAST: dict[str, _Column] = {"max_error": ("max error", lambda x: f"{x:.1e}")}
# subject -> what columns call it, if not by its name
_TITLES = {
    "flashkda": "FlashKDA",
    "cula": "cuLA",
    "vllm_kimi_k3": "vLLM Kimi",
    "vllm_glm5next": "vLLM GLM",
    "vllm_layer": "vLLM layer",
}
_HOST_KEYS = ("us", "graph_us", "host_us", "call_us")


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, _Column]:
    """Those that some row has; two for everyone whom rows are compared with."""
    others: dict[str, _Column] = {}
    for name in (key.removeprefix("vs_") for row in rows for key in row if key.startswith("vs_")):
        title = _TITLES.get(name, name)
        others |= {
            f"{name}_us": (f"{title} us", show_us),
            f"vs_{name}": (f"vs {title}", show_ratio),
        }
    known = _FIRST | others | _LAST
    return {key: column for key, column in known.items() if any(key in row for row in rows)}


def speed_table(run: Run) -> list[list[str]]:
    """Headings, then a row per case; a column that no row has is left out."""
    rows = run["rows"]
    columns = _columns(rows)
    cells = [
        [row["case"], *(show(row[key]) if key in row else "" for key, (_, show) in columns.items())]
        for row in rows
    ]
    return [["case", *(heading for heading, _ in columns.values())], *cells]


def host_table(run: Run) -> list[list[str]]:
    """What a case costs beside its kernels, per subject: replayed, host, back to back; kernels."""
    lines = [["case", "subject", "us", "graph us", "host us", "call us", "launches", "kernels"]]
    for row in run["rows"]:
        for name, found in row.get("timings", {}).items():
            shown = [show_us(found[key]) if key in found else "" for key in _HOST_KEYS]
            each = found.get("kernels", {})
            kernels = " ".join(f"{kernel} {show_us(us)}" for kernel, us in each.items())
            launches = f"{found['launches']:.0f}" if "launches" in found else ""
            lines.append([row["case"], name, *shown, launches, kernels])
    return lines


def accuracy_table(run: Run) -> list[list[str]]:
    """Headings, then a row per input: each subject's relative RMS error of out and of state."""
    rows = run["accuracy"]
    names = list(dict.fromkeys(name for row in rows for name in row["errors"]))
    lines = [["input", *(f"{name} out / state" for name in names), "rounding"]]
    for row in rows:
        found = [row["errors"].get(name) for name in names]
        shown = [f"{e['out']:.4f} / {e['state']:.4f}" if e else "" for e in found]
        lines.append([row["about"], *shown, f"{row['rounding']:.4f}"])
    return lines


def headline(run: Run) -> str:
    """What every number of the run shares, in one line."""
    versions = run["versions"]
    nvrtc, torch = versions.get("nvrtc", "?"), versions.get("torch", "?")
    under = [f"driver {run['device'].get('driver') or '?'}", f"NVRTC {nvrtc}"]
    facts = [run["gpu"], *(under if run["gpu"] != CPU else ()), f"torch {torch}", run["conditions"]]
    facts += [f"copy {run['copy_tb_per_s']:.2f} TB/s", f"commit {run['commit']}", run["date"]]
    return ", ".join(facts)


def text(run: Run) -> str:
    """The run for a terminal."""
    parts = [headline(run)]
    if run["rows"]:
        parts.append(aligned(speed_table(run)))
        if run["gpu"] != CPU:
            parts.append(aligned(host_table(run), left=(0, 1, 7)))
        parts += [f"{row['case']}: {row['failed']}" for row in run["rows"] if "failed" in row]
        parts += [
            f"{row['case']}: {reason}" for row in run["rows"] for reason in row.get("notes", ())
        ]
    for name, found in run["summary"].items():
        parts.append(f"{name}: geomean {found['geomean']:.2f}x, least {found['least']:.2f}x")
    if run["accuracy"]:
        parts.append(aligned(accuracy_table(run)))
    return "\n\n".join(parts)


def markdown(run: Run) -> str:
    """The run's tables for a page or a pull request."""
    tables = [speed_table(run)] if run["rows"] else []
    tables += [accuracy_table(run)] if run["accuracy"] else []
    return "\n\n".join([headline(run) + ":", *map(_markdown, tables)])


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and least of every ratio to a peer, over the rows that have it."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("vs_"))
    found = {}
    for key in keys:
        ratios = [row[key] for row in rows if key in row]
        mean = exp(fsum(map(log, ratios)) / len(ratios))
        found[key] = {"geomean": mean, "least": min(ratios), "cases": len(ratios)}
    return found


def save(run: Run, path: Path) -> None:
    """As json with one line a row, so that a diff shows which rows changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for key, value in _rounded(run).items():
        if key in ("rows", "accuracy"):
            lines = ",\n".join(f"  {json.dumps(row)}" for row in value)
            parts.append(f' "{key}": [\n{lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def load(path: Path) -> Run:
    """A run that `save` wrote. Raises InputError for any other file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"run file: expected a run saved as json, got {path}: {error}.") from None
    head = found.keys() if isinstance(found, dict) else set()
    if missing := {"gpu", "date", "commit", "rows"} - head:
        lacks = ", ".join(sorted(missing))
        raise InputError(f"run file: expected a run, got {path}, which lacks {lacks}.")
    return dict(found)


def standard_path(run: Run, suites: Sequence[str], folder: Path) -> Path:
    """<folder>/<gpu>-<date>-<suite>.json"""
    gpu = "".join(c if c.isalnum() else "-" for c in run["gpu"].lower())
    return folder / f"{gpu}-{run['date']}-{'-'.join(suites)}.json"


def _rounded(x: Any) -> Any:
    """Floats to five digits: more is noise, and makes a diff unreadable."""
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list | tuple) else x


def aligned(lines: list[list[str]], left: Sequence[int] = (0,)) -> str:
    """Columns under each other; numbers end together, the columns `left` start together."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _markdown(lines: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---|" + "---:|" * (len(lines[0]) - 1), *body])
