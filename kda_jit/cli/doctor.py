"""`kda-jit doctor`: what is here, what does not fit, and what to type."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import InputError
from .plain import as_json

if TYPE_CHECKING:
    from ..doctor import Facts, Finding

NONE = "none"
_STYLES = {"broken": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}


def doctor(
    json_: Annotated[
        Path | None,
        typer.Option("--json", help="Write all of it here, too; - for this alone, on the screen."),
    ] = None,
) -> None:
    """Looks at everything that a call needs, and says what does not fit and what to type.

    GPUs, driver, torch, CuPy, NVRTC, headers, Triton, sources, cache, KDA_JIT_ variables; which
    backend a prefill gets here and why not the others. It then runs a small one, checked against
    float64. Whatever is broken is a line, never a traceback.
    Exits with 0 when a prefill runs and all that is installed and set works, with 1 when something
    is broken. What is missing, or could be better, is a warning or a note, and no failure.
    """
    from ..doctor import Level, gather, judge

    screen = json_ is None or str(json_) != "-"
    console = Console()
    with Console(stderr=True).status("looking ..."):
        facts = gather()
    findings = judge(facts)
    if json_ is not None:
        text = as_json(_as_json(facts, findings))
        if screen:
            try:
                json_.write_text(text + "\n")
            except OSError as error:
                raise InputError(
                    f"json: expected a file that can be written, got {json_} ({error.strerror})."
                ) from None
        else:
            typer.echo(text)
    if screen:
        _show(console, facts, findings)
    if any(finding.level == Level.BROKEN for finding in findings):
        raise typer.Exit(1)


def _as_json(facts: Facts, findings: list[Finding]) -> dict[str, object]:
    return {
        "runs": facts.trial.passed and facts.choice.chosen is not None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }


def _show(console: Console, facts: Facts, findings: list[Finding]) -> None:
    console.print(
        f"kda_jit {facts.kda_jit}, Python {facts.python}, {facts.platform}\n", highlight=False
    )
    worst = {finding.part: finding.level for finding in reversed(findings)}
    for part, words in _rows(facts):
        status = str(worst.get(part, "-" if words.startswith(NONE) else "ok"))
        shown = f"[{_STYLES.get(status, 'default')}]{status:<7}[/]"
        # Not a table: it would break paths that somebody wants to copy.
        line = f"{shown}  {part:<11}  {escape(words)}"
        console.print(line, highlight=False, soft_wrap=True)
    if facts.choice.reasons:
        console.print(f"\nA prefill in bf16, K = V = 128, on {facts.choice.device}:")
        for name, why in _backends(facts):
            console.print(f"  {name:<7} {why}", markup=False, highlight=False, soft_wrap=True)
    for number, finding in enumerate(findings, 1):
        head = f"\n{number}. [{_STYLES[finding.level]}]{finding.level}[/], {finding.part}: "
        console.print(head + escape(finding.words), highlight=False, soft_wrap=True)
        console.print(f"   {finding.fix}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"\n{_verdict(facts, findings)}", highlight=False)


def _rows(f: Facts) -> list[tuple[str, str]]:
    """What was found: (part, words)."""
    from ..doctor.facts import dotted

    gpus = [
        f"{gpu.name}, compute capability {dotted(gpu.capability)}, {gpu.sms} SMs, "
        f"{gpu.memory_gib:.0f} GiB, target {gpu.target or 'none'}"
        for gpu in f.torch.gpus
    ]
    d, t, c, n, h, r = f.driver, f.torch, f.cupy, f.nvrtc, f.headers, f.triton
    driver = [d.module or "", f"runs CUDA {dotted(d.cuda)} and older" if d.cuda else ""]
    wheels = ", ".join(f"{name} {version}" for name, version in c.wheels.items())
    cupy = [wheels or c.version or "", f"for CUDA {c.generation}" if c.generation else ""]
    nvrtc = [dotted(n.version) if n.version else "", n.path or ""]
    builds = [target for target, why_not in n.targets.items() if why_not is None]
    built = f"builds {', '.join(builds)}{'' if f.torch.gpus else ', tried without a GPU'}"
    headers = "the kernels include none"
    if h.folder is not None:
        headers += f"; CuPy would take CUDA {dotted(h.cuda)} in {h.folder}"
    triton = [r.version or "", f"C compiler {r.compiler}" if r.version and r.compiler else ""]
    cache = f"{f.cache.folder}, {f.cache.entries} kernels, {f.cache.bytes / 2**20:.1f} MiB"
    values = [f"{name}={text}" for name, text in f.environment.values.items()]
    trial = f"{f.trial.tokens} tokens by {f.trial.ran.get('backend', '')}"
    off = f"{f.trial.off:.1e} off in the worst block, {f.trial.allowed:.1e} allowed"
    none = f"{NONE}: {d.error}" if d.error else NONE
    packages = "others than kda_jit asks for" if f.packages.misfits else "as kda_jit asks for"
    return [
        ("GPU", "; ".join(gpus) or NONE),
        ("driver", none if d.cuda is None and d.module is None else _joined(driver)),
        ("torch", f"{t.version}, {'built for CUDA ' + dotted(t.cuda) if t.cuda else 'no CUDA'}"),
        ("CuPy", _joined(cupy)),
        ("NVRTC", _joined([*nvrtc, built if builds else ""])),
        ("headers", headers),
        ("Triton", _joined(triton)),
        ("sources", f.sources or NONE),
        ("cache", cache),
        ("environment", ", ".join(values) or f"{NONE} set"),
        ("packages", f"{NONE} looked at: {f.packages.error}" if f.packages.error else packages),
        ("prefill", _joined([trial, f.trial.ran.get("kernels", ""), off]) if f.trial.ran else NONE),
    ]


def _joined(parts: list[str]) -> str:
    return ", ".join(filter(None, parts)) or NONE


def _backends(f: Facts) -> list[tuple[str, str]]:
    found = []
    for name, why_not in f.choice.reasons.items():
        if name == f.choice.chosen:
            found.append((name, "taken"))
        else:
            found.append((name, f"no: {'; '.join(why_not)}" if why_not else "could"))
    return found


def _verdict(f: Facts, findings: list[Finding]) -> str:
    levels = [finding.level for finding in findings]
    counts = [(levels.count(level), level) for level in dict.fromkeys(levels)]
    told = ", ".join(f"{count} {level}" for count, level in counts) or "nothing to mend"
    if f.trial.passed and f.choice.chosen is not None:
        return f"[green]A prefill runs, by {f.choice.chosen} on {f.choice.device}[/]: {told}."
    return f"[red]No prefill runs here[/]: {told}."
