"""Writes the parts of the documentation that repeat what the code or a run file already knows.

    python docs/generate.py           rewrite them
    python docs/generate.py --check   write nothing; exit 1 and name what is out of date

environment.md   from the table in kda_jit/settings.py
cli.md           from the commands of kda_jit/cli
README.md        the table between the bench markers, from benchmarks/results/*.json: for each GPU
                 the newest run file's, and nothing where there is no file
benchmarks.md    the suites of kda_jit/bench, and the same run files in full; the site draws them
conformance.md   the laws, regimes and faults of kda_jit/testing, and what `kda-jit verify` found:
                 of each subject and device the newest of benchmarks/results/conformance-*.json

A run file is one json object (all of it: kda_jit/bench/report.py):

    {"gpu": "H200", "date": "2026-11-29", "commit": "1a2b3c4", "conditions": "L2 cold",
     "rows": [{"case": "varlen_8x1024_h64", "us": 412.0, "tb_per_s": 2.61, "of_peak": 0.54,
               "vs_flashkda": 1.9, "vs_fla": 3.1, "max_error": 3.1e-3}, ...]}

"conditions" and every key of a row but "case" may be absent; a column that no row has is not shown.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed, too
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
CONFORMANCE = "conformance-"  # how reports of kda-jit verify begin their names
GENERATED = "<!-- written by docs/generate.py; edit the code it describes instead -->\n\n"

CONFORMANCE_INTRODUCTION = """\
`kda-jit verify` tries the laws below on a prefill, ours or anybody's: a backend by its name;
another implementation through its adapter (`peer:flashkda`, FlashKDA as vLLM builds it;
`peer:flash_kda`, its own package; `peer:fla`; `peer:cula`); or a function of yours with the
arguments of `kda_jit.prefill` (`module:function`; what its signature does not name, or what it
answers with NotImplementedError, is not tried). Each law is tried on each kind of
numbers where it says something, and every run checks which backend ran. The bodies of the laws are
in `kda_jit/testing/laws.py`. They hold for the float64 reference first: a law that it breaks is a
wrong law. Which kinds of faults people met, and what covers each, is in
[field-coverage.md](field-coverage.md).
"""
BENCHMARKS_INTRODUCTION = """\
`kda-jit bench` measures; every figure below is from a run that it saved. For each case it first
holds the result against float64, and makes sure that the backend and the kernels that ran are those
asked for: a wrong result gets no time. Then everybody takes turns in one process, each call from a
cold L2. Shown are medians. The floor is what a copy of the bytes that must move would take (inputs
and outputs once, states in and out) at the bandwidth measured in the same run; *of peak* is its
share of the time. `max error` is the worst block against float64.

Times of two machines, or of two days, are not to be compared; ratios within one run are. How to
read such a table is the subject of a [notebook](../notebooks/05_read_a_benchmark.ipynb).

    kda-jit bench --suite flashkda --flashkda _flashkda_C.abi3.so --out run.json
    kda-jit bench --lens 300,17,4096 --heads 16
    kda-jit bench --from run.json --plot pictures
    kda-jit bench --out new.json --against run.json

Without a GPU the same command measures wall time of the torch backend on small shapes. All options:
[cli.md](cli.md).
"""
FAULTS_INTRODUCTION = """\
A law that has never failed is not known to work. So each of these faults was put into the torch
backend, and `tests/test_faults.py` asserts which laws notice it."""

# key in a run file's row -> (heading, how a value is written)
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "us": ("us", lambda x: f"{x:.0f}" if x >= 100 else f"{x:.1f}"),
    "tb_per_s": ("TB/s", lambda x: f"{x:.2f}"),
    "of_peak": ("of peak", lambda x: f"{100 * x:.0f} %"),
    "vs_flashkda": ("vs FlashKDA", lambda x: f"{x:.2f}x"),
    "vs_fla": ("vs fla", lambda x: f"{x:.2f}x"),
    "max_error": ("max error", lambda x: f"{x:.1e}"),
}


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """A markdown table; with `right`, all columns but the first are set right."""
    rule = "|---|" + ("---:|" if right else "---|") * (len(headings) - 1)
    return "\n".join(
        "| " + " | ".join(row) + " |" if row else rule for row in [headings, [], *rows]
    )


def runs(results: Path, *patterns: str) -> list[dict[str, Any]]:
    """The run files among these, each with its `file`, in order of their dates, then names."""
    from kda_jit.bench import report

    paths = sorted(path for pattern in patterns for path in results.glob(pattern))
    found = [
        report.load(path) | {"file": path.relative_to(results).as_posix()}
        for path in paths
        if not path.name.startswith(CONFORMANCE)
    ]
    return sorted(found, key=lambda run: run["date"])


def bench_section(results: Path) -> str:
    """Markdown for the newest run file of each GPU under `results`; empty where there is none."""
    newest = {run["gpu"]: run for run in runs(results, "*.json")}
    parts = []
    for gpu, run in sorted(newest.items()):
        keys = [key for key in COLUMNS if any(key in row for row in run["rows"])]
        rows = [
            [f"`{row['case']}`", *(COLUMNS[key][1](row[key]) if key in row else "" for key in keys)]
            for row in run["rows"]
        ]
        where = [gpu, *([run["conditions"]] if "conditions" in run else [])]
        parts.append(
            f"{', '.join(where)}; commit {run['commit']}, {run['date']} "
            f"([run file](benchmarks/results/{run['file']})):\n\n"
            + table(["case", *(COLUMNS[key][0] for key in keys)], rows, right=True)
        )
    return "## Measured\n\n" + "\n\n".join(parts) if parts else ""


def benchmarks(results: Path) -> str:
    """The page of benchmarks: suites, of each GPU and set of cases the newest run, every run."""
    from kda_jit.bench import registry, report

    parts = ["# Benchmarks\n\n" + GENERATED + BENCHMARKS_INTRODUCTION.rstrip()]
    suites = [
        [f"`{name}`", " ".join(f"`{case.name}`" for case in cases)]
        for name, cases in registry.SUITES.items()
    ]
    suites.append(["`accuracy`", "errors alone, on inputs of T = 4096, H = 8"])
    parts.append("## Suites\n\n" + table(["suite", "cases"], suites))
    found = runs(results, "*.json", "suites/*.json")
    timed = [run for run in found if any("us" in row for row in run["rows"])]
    newest = {(run["gpu"], *(row["case"] for row in run["rows"])): run for run in timed}
    for run in sorted(newest.values(), key=lambda run: run["gpu"]):
        ratios = [
            f"{name.removeprefix('vs_')}: {x['geomean']:.2f}x as geometric mean of {x['cases']} "
            f"cases, {x['least']:.2f}x at least"
            for name, x in run["summary"].items()
        ]
        parts += [
            f"## {run['gpu']}, {len(run['rows'])} cases",
            _file(run),
            f"<!-- pictures of {run['file']} -->",
            report.markdown(run),
        ]
        parts += [f"Speed against {'; '.join(ratios)}."] if ratios else []
    tabled = [run for run in found if run["accuracy"]]
    if tabled:
        lines = report.accuracy_table(tabled[-1])
        about = "Relative RMS errors against float64, of the output and of the final state."
        parts += [f"## Errors\n\n{about} {_file(tabled[-1])}"]
        parts.append(table(lines[0], lines[1:], right=True))
    rows = [
        [
            f"[{run['file']}](../benchmarks/results/{run['file']})",
            run["gpu"],
            run["commit"],
            f"{len(run['rows'])}",
            ", ".join(
                f"{n.removeprefix('vs_')} {x['geomean']:.2f}x" for n, x in run["summary"].items()
            ),
        ]
        for run in reversed(found)
    ]
    heads = ["run file", "GPU", "commit", "cases", "speed against, geomean"]
    parts.append("## Every saved run\n\n" + table(heads, rows))
    return "\n\n".join(parts) + "\n"


def _file(run: dict[str, Any]) -> str:
    """Where a run is, and how it was asked for."""
    link = f"[{run['file']}](../benchmarks/results/{run['file']})"
    return f"From {link}; `{run['command']}`." if "command" in run else f"From {link}."


def readme(text: str, results: Path) -> str:
    """`text` with what stands between the markers replaced by the section from `results`."""
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise SystemExit(f"README.md: the markers {BEGIN} and {END} are gone")
    section = bench_section(results)
    return before + BEGIN + ("\n" + section + "\n" if section else "\n") + END + after


def environment() -> str:
    """The page of environment variables, from the one table that the code reads."""
    from kda_jit import settings

    rows = [[f"`{s.name}`", s.default, s.meaning] for s in settings.SETTINGS]
    return (
        "# Environment variables\n\n"
        + GENERATED
        + "Read when needed, never on import; an argument of a call wins over any of them.\n\n"
        + table(["variable", "default", "meaning"], rows)
        + "\n"
    )


def command_line() -> str:
    """The page of the command `kda-jit`, from the commands themselves."""
    from kda_jit.cli import describe

    parts = ["# The command `kda-jit`\n\n" + GENERATED]
    parts.append("`kda-jit` and `python -m kda_jit` are the same. It comes with the extra `cli`.\n")
    parts.append("`kda-jit --version` prints the version, `--help` after a command its options.\n")
    for command in describe():
        parts.append(f"\n## `kda-jit {command.usage}`\n\n{command.help}\n")
        if command.options:
            rows = [[f"`{o.names}`", o.default, o.help] for o in command.options]
            parts.append("\n" + table(["option", "default", "meaning"], rows) + "\n")
    return "".join(parts)


def conformance(results: Path) -> str:
    """The page of laws: what they are, which faults they notice, and who was found to hold them."""
    from kda_jit.testing import REGIMES
    from kda_jit.testing.faults import FAULTS
    from kda_jit.testing.laws import EVERY, LAWS
    from kda_jit.testing.verify import LEGEND, from_json, markdown

    parts = ["# Conformance\n\n" + GENERATED + CONFORMANCE_INTRODUCTION.rstrip()]
    laws = [[f"`{law.name}`", law.about] for law in LAWS.values()]
    parts.append("## Laws\n\n" + table(["law", "says"], laws))
    regimes = [[f"`{name}`", REGIMES[name].about] for name in EVERY]
    parts.append("## Regimes\n\n" + table(["regime", "numbers"], regimes))
    faults = [
        [f"`{fault.name}`", fault.about, ", ".join(f"`{name}`" for name in fault.caught_by)]
        for fault in FAULTS.values()
    ]
    parts.append(
        f"## Faults that the laws notice\n\n{FAULTS_INTRODUCTION}\n\n"
        + table(["fault", "what the faulty kernel does", "noticed by"], faults)
    )
    newest: dict[tuple[str, str], tuple[Any, str]] = {}
    for path in sorted(results.glob(f"{CONFORMANCE}*.json")):
        report = from_json(json.loads(path.read_text()))
        key = (report.subject, report.device)
        if key not in newest or report.head["date"] >= newest[key][0].head["date"]:
            newest[key] = (report, path.name)
    if newest:
        parts.append(f"## Found\n\nIn the tables: {LEGEND}.")
    for report, name in (newest[key] for key in sorted(newest)):
        file = f"[Report](../benchmarks/results/{name})."
        parts.append(markdown(report, "###", legend=False).rstrip() + "\n\n" + file)
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """Every generated file and what it should say."""
    front = ROOT / "README.md"
    return {
        ROOT / "docs" / "environment.md": environment(),
        ROOT / "docs" / "cli.md": command_line(),
        ROOT / "docs" / "benchmarks.md": benchmarks(ROOT / "benchmarks" / "results"),
        ROOT / "docs" / "conformance.md": conformance(ROOT / "benchmarks" / "results"),
        front: readme(front.read_text(), ROOT / "benchmarks" / "results"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a stale page")
    check = parser.parse_args().check
    wanted = pages()
    stale = [path for path in wanted if not path.exists() or path.read_text() != wanted[path]]
    for path in stale:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted[path])
    if check and stale:
        sys.exit("run `make docs`")


if __name__ == "__main__":
    main()
