"""The command: check every case, time it beside the peers, print and save the run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kda_jit import settings
from kda_jit.errors import InputError, KdaError
from kda_jit.testing import (
    REGIMES,
    Case,
    relative_rms,
    worst_block_error,
    worst_state_error,
)

from . import gate, machine, report
from .cases import TimedCase
from .lineup import (
    BASELINE,
    AnyPeer,
    Contest,
    Lineup,
    find_all_peers,
    find_ours,
    gate_of,
)
from .peers import PEERS
from .registry import FRONT, SUITES, select
from .step_gate import StepGate
from .step_peers import STEP_PEERS
from .subject import Ours, Own, Subject
from .timer import Contender, Timer, copy_bandwidth

#: Where `--save` writes, in a checkout.
RESULTS = machine.ROOT / "benchmarks" / "results"


def time_case(
    case: TimedCase, lineup: Lineup, timer: Timer, bandwidth: float, device: torch.device
) -> dict[str, Any]:
    """A row of the run file (see report). A wrong result of the first leaves it without times.

    bandwidth  bytes per second of a copy
    """
    row = case.head() | {"floor_us": case.floor_us(bandwidth)}
    ours, first = lineup.ours, lineup.ours[0]
    inputs, parts = case.inputs(device), [(part, part.inputs(device)) for part in case.parts]
    verdicts, wrong = _pass_gates([gate_of(*bound) for bound in ((case, inputs), *parts)], ours)
    if first.name in wrong:
        return row | {"failed": wrong[first.name]}
    right = [subject for subject in ours if subject.name in verdicts]
    agreeing: list[AnyPeer] = []
    for peer in lineup.peers:
        try:
            gate.check_peer(peer, inputs, gate.run_once(first, inputs)[:2])
            agreeing.append(peer)
        except Exception as error:  # it is their code: anything may happen
            wrong[peer.name] = _words(peer, error)
    if wrong:
        row["notes"] = list(wrong.values())

    contenders = [Contender(s.name, s.bind(inputs), s.activate) for s in (*right, *agreeing)]
    alone = {
        s.name: [Contender(f"{s.name}, {p.name}", s.bind(x), s.activate) for p, x in parts]
        for s in right
        if s == first or s in lineup.beside
    }
    timings = _measure([*contenders, *chain.from_iterable(alone.values())], timer)
    for subject in right:
        verdict, timing = verdicts[subject.name], timings[subject.name]
        names = verdict.record.kernels
        if missing := [kernel for kernel in names if kernel not in timing["kernels"]]:
            seen = ", ".join(timing["kernels"]) or "none"
            words = f"{subject.name}: expected {', '.join(missing)} on the GPU, the profiler saw"
            return row | {"failed": f"{words} {seen}"}
        timing |= subject.facts(verdict.record)
        timing["max_error"] = max(verdict.out_error, verdict.state_error)
        if parts and subject.name in alone:
            parts_us = sum(timings[part.name]["us"] for part in alone[subject.name])
            timing["of_parts"] = timing["us"] / parts_us
        timing |= {f"vs_{peer.name}": timings[peer.name]["us"] / timing["us"] for peer in agreeing}

    shown = timings[first.name]
    us = shown["us"]
    row |= {
        "us": us,
        "p10_us": shown["p10"],
        "p90_us": shown["p90"],
        "of_peak": row["floor_us"] / us,
        "tb_per_s": 1e-6 * case.floor_bytes / us,
    }
    row |= {
        key: shown[key] for key in ("host_us", "launches", "of_parts", "max_error") if key in shown
    }
    for name in (*(s.name for s in right if s in lineup.beside), *(p.name for p in agreeing)):
        row |= {f"{name}_us": timings[name]["us"], f"vs_{name}": timings[name]["us"] / us}
    return row | {"timings": timings}


def _pass_gates(
    gates: Sequence[gate.Gate | StepGate], ours: Sequence[Own]
) -> tuple[dict[str, gate.Verdict], dict[str, str]]:
    """By subject: the verdicts of those that passed, and what is wrong with those that did not.

    gates  that of the case, from which verdicts are, and those of its parts
    """
    verdicts, wrong = {}, {}
    for subject in ours:
        other = isinstance(subject, Ours) and subject.backend == "cuda"
        baseline = BASELINE if other and subject.name != BASELINE.name else None
        try:
            found = [truth.check(subject, baseline) for truth in gates]
            verdicts[subject.name] = found[0]
        except Exception as error:  # a compiler's, too: the other subjects still have their times
            wrong[subject.name] = _words(subject, error)
    return verdicts, wrong


def _words(subject: Subject, error: Exception) -> str:
    if isinstance(error, gate.WrongResult | KdaError):
        return str(error)
    return f"{subject.name}: {type(error).__name__}: {error}"


def _measure(contenders: Sequence[Contender], timer: Timer) -> dict[str, dict[str, Any]]:
    """By contender, what `timings` of a row holds, save what ours add."""
    cold, replayed = timer.cold(contenders), timer.replayed(contenders)
    timings: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        timing = cold[contender.name]
        found = timing._asdict() | timer.host(contender, timing.us)._asdict()
        if contender.name in replayed:
            found["graph_us"] = replayed[contender.name].us
        profile = timer.profile(contender)
        found |= {"launches": profile.launches, "kernels": dict(profile.kernels)}
        timings[contender.name] = found
    return timings


def table_errors(case: Case, subjects: Sequence[Subject], device: torch.device) -> dict[str, Any]:
    """A row of the accuracy table: every subject against the float64 recurrence."""
    inputs = case.tensors(device)
    want = inputs.reference()
    errors = {}
    for subject in subjects:
        if isinstance(subject, Ours):
            out, state, _ = gate.run_once(subject, inputs)
        else:
            subject.activate()
            out, state = subject.bind(inputs)()
        errors[subject.name] = {
            "out": relative_rms(out, want.out),
            "state": relative_rms(state, want.final_state),
            "worst_out": worst_block_error(out, want.out, inputs.cu_seqlens).error,
            "worst_state": worst_state_error(state, want.final_state).error,
        }
    return {
        "case": case.regime,
        "about": REGIMES[case.regime].about,
        "rounding": relative_rms(want.out.bfloat16(), want.out),
        "errors": errors,
    }


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    found = argparse.ArgumentParser(
        prog="python -m kda_jit.bench",
        description="Checks every case against float64, then times it with a cold L2 beside the "
        "peers that are here. A wrong result gets no time, and an exit status of 1.",
    )
    add = found.add_argument
    add(
        "--suite",
        action="append",
        choices=SUITES,
        help=f"repeatable; default: {' and '.join(FRONT)}",
    )
    add("--case", action="append", metavar="NAME", help="or a pattern such as '*_h96'; repeatable")
    add("--list", action="store_true", help="print the names of the cases and exit")
    add("--backend", default="cuda", choices=("cuda", "triton"), help="default: cuda")
    add(
        "--schedule",
        action="append",
        metavar="NAME",
        help="of the cuda backend, or auto, or all; repeatable, the first is the one that the "
        f"table shows; default: what {settings.SCHEDULE.name} says",
    )
    add(
        "--peer",
        action="append",
        choices=(*PEERS, *STEP_PEERS),
        help="repeatable; default: those that are here, without fla",
    )
    add("--no-peer", action="store_true", help="measure ours alone")
    add("--flashkda", type=Path, metavar="FILE", help="FlashKDA's library")
    add(
        "--vllm-sources",
        type=Path,
        metavar="FOLDER",
        help="vLLM's Triton sources, as kda_jit/bench/vllm_sources.py says",
    )
    add("--budget", type=float, default=150.0, metavar="MS", help="GPU time a measurement")
    add("--out", type=Path, metavar="FILE", help="write the run as json, after each case")
    add("--save", action="store_true", help="write it into benchmarks/results/ of the checkout")
    add("--markdown", action="store_true", help="print markdown tables")
    add("--commit", help="to note where this is not a checkout")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status. `argv`: without the program's name."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parser().parse_args(argv)
    before = os.environ.get(settings.SCHEDULE.name)
    try:
        return _run(options, argv)
    except KdaError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        os.environ.pop(settings.SCHEDULE.name, None)
        if before is not None:
            os.environ[settings.SCHEDULE.name] = before


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    suites = options.suite or list(FRONT)
    speed, accuracy = select(suites, options.case or ())
    if options.list:
        print("\n".join([*(case.name for case in speed), *(case.regime for case in accuracy)]))
        return 0
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA GPU to measure on, got none that torch can use.")
    device = torch.device("cuda", torch.cuda.current_device())
    ours = find_ours(options.backend, options.schedule, device)
    asked = [] if options.no_peer else options.peer
    peers = find_all_peers(asked, options.flashkda, options.vllm_sources)
    contest = Contest(ours, *peers)

    run: report.Run = machine.facts(options.commit)
    run["conditions"] = "L2 cold, medians"
    run["command"] = shlex.join(["kda-jit", "bench", *argv])
    run["peers"] = contest.versions
    bandwidth = copy_bandwidth()
    run["copy_tb_per_s"] = bandwidth / 1e12
    run["rows"], run["accuracy"], run["summary"] = [], [], {}
    timer = Timer(budget_ms=options.budget)
    for case in speed:
        row = time_case(case, contest.lineup(case), timer, bandwidth, device)
        run["rows"].append(row)
        _progress(case.name, row.get("failed") or f"{row['us']:.1f} us")
        torch.cuda.empty_cache()
        run["summary"] = report.summary(run["rows"])
        if options.out:  # a run that is cut short leaves what it has
            report.save(run, options.out)
    if accuracy:
        subjects = contest.tabled(device)
        for table in accuracy:
            run["accuracy"].append(table_errors(table, subjects, device))
            _progress(table.regime, "done")

    print(report.markdown(run) if options.markdown else report.text(run))
    paths = [options.out] if options.out else []
    if options.save:  # README's table is made from the files in RESULTS itself
        folder = RESULTS if set(suites) <= set(FRONT) else RESULTS / "steps"
        paths.append(report.standard_path(run, suites[:1], folder))
    for path in paths:
        report.save(run, path)
        print(f"written: {path}")
    return 1 if any(row.keys() & {"failed", "notes"} for row in run["rows"]) else 0


def _progress(name: str, words: str) -> None:
    """To stderr, at once: a run takes minutes."""
    print(f"{name}: {words}", file=sys.stderr, flush=True)
