"""The command: check every case, time it beside the peers, print and save the run."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kda_jit import settings
from kda_jit.errors import InputError, KdaError, NoBackendError
from kda_jit.resolver import resolve_backend
from kda_jit.testing import (
    REGIMES,
    Case,
    Inputs,
    relative_rms,
    worst_block_error,
    worst_state_error,
)

from . import gate, machine, report
from .peers import PEERS, Peer, find_peers
from .registry import SUITES, BenchCase, select
from .subject import Ours, Subject, schedules_for
from .timer import Contender, Timer, copy_bandwidth

#: Where `--save` writes, in a checkout.
RESULTS = machine.ROOT / "benchmarks" / "results"
#: The schedule that every other one is compared with on the full shape.
BASELINE = Ours("cuda", "portable")


def time_case(
    case: BenchCase,
    ours: Sequence[Ours],
    peers: Sequence[Peer],
    timer: Timer,
    bandwidth: float,
    device: torch.device,
) -> dict[str, Any]:
    """A row of the run file (see report). A wrong result of the first leaves it without times.

    ours       the first is whose times the row's head shows
    bandwidth  bytes per second of a copy
    """
    row: dict[str, Any] = {
        "case": case.name,
        "lengths": list(case.lengths),
        "heads": case.heads,
        "floor_us": case.floor_us(bandwidth),
    }
    inputs = case.inputs(device)
    verdicts, wrong = _pass_gate(case, ours, inputs)
    if ours[0].name in wrong:
        return row | {"failed": wrong[ours[0].name]}
    right = [subject for subject in ours if subject.name in verdicts]
    agreeing: list[Peer] = []
    for peer in peers:
        try:
            gate.check_peer(peer, inputs, gate.run_once(ours[0], inputs))
            agreeing.append(peer)
        except gate.WrongResult as disagreement:
            wrong[peer.name] = str(disagreement)
    if wrong:
        row["notes"] = list(wrong.values())

    contenders = [Contender(s.name, s.bind(inputs), s.activate) for s in (*right, *agreeing)]
    timings = _measure(contenders, timer)
    for name, verdict in verdicts.items():
        record, timing = verdict.record, timings[name]
        if missing := [kernel for kernel in record.kernels if kernel not in timing["kernels"]]:
            seen = ", ".join(timing["kernels"]) or "none"
            words = f"{name}: expected {', '.join(missing)} on the GPU, the profiler saw {seen}"
            return row | {"failed": words}
        timing |= {
            "backend": record.backend,
            "schedule": record.schedule,
            "target": record.target,
            "max_error": max(verdict.out_error, verdict.state_error),
        }
        timing |= {f"vs_{peer.name}": timings[peer.name]["us"] / timing["us"] for peer in agreeing}

    first = timings[ours[0].name]
    row |= {
        "us": first["us"],
        "p10_us": first["p10"],
        "p90_us": first["p90"],
        "of_peak": row["floor_us"] / first["us"],
        "tb_per_s": 1e-6 * case.floor_bytes / first["us"],
        "max_error": first["max_error"],
    }
    row |= {f"{peer.name}_us": timings[peer.name]["us"] for peer in agreeing}
    row |= {key: value for key, value in first.items() if key.startswith("vs_")}
    return row | {"timings": timings}


def _pass_gate(
    case: BenchCase, ours: Sequence[Ours], inputs: Inputs
) -> tuple[dict[str, gate.Verdict], dict[str, str]]:
    """By subject: the verdicts of those that passed, and what is wrong with those that did not."""
    truth = gate.Gate(case, inputs)
    verdicts, wrong = {}, {}
    for subject in ours:
        other = subject.backend == "cuda" and subject.schedule != BASELINE.schedule
        try:
            verdicts[subject.name] = truth.check(subject, BASELINE if other else None)
        except (gate.WrongResult, KdaError) as error:
            wrong[subject.name] = str(error)
    return verdicts, wrong


def _measure(contenders: Sequence[Contender], timer: Timer) -> dict[str, dict[str, Any]]:
    """By contender, what `timings` of a row holds, save what ours add."""
    cold, replayed = timer.cold(contenders), timer.replayed(contenders)
    timings: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        timing = cold[contender.name]
        found = timing._asdict() | timer.host(contender, timing.us)._asdict()
        if contender.name in replayed:
            found["graph_us"] = replayed[contender.name].us
        timings[contender.name] = found | {"kernels": dict(timer.kernels(contender))}
    return timings


def table_errors(case: Case, subjects: Sequence[Subject], device: torch.device) -> dict[str, Any]:
    """A row of the accuracy table: every subject against the float64 recurrence."""
    inputs = case.tensors(device)
    want = inputs.reference()
    errors = {}
    for subject in subjects:
        if isinstance(subject, Ours):
            out, state = gate.run_once(subject, inputs)
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
        prog="kda-jit bench",
        description="Checks every case against float64, then times it with a cold L2 beside the "
        "peers that are here. A wrong result gets no time, and an exit status of 1.",
    )
    add = found.add_argument
    add("--suite", action="append", choices=SUITES, help="repeatable; default: all")
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
    add("--peer", action="append", choices=PEERS, help="default: flashkda if it is here")
    add("--no-peer", action="store_true", help="measure ours alone")
    add("--flashkda", type=Path, metavar="FILE", help="FlashKDA's library")
    add("--budget", type=float, default=150.0, metavar="MS", help="GPU time a measurement")
    add("--out", type=Path, metavar="FILE", help="write the run as json")
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
    suites = options.suite or list(SUITES)
    speed, accuracy = select(suites, options.case or ())
    if options.list:
        print("\n".join([*(case.name for case in speed), *(case.regime for case in accuracy)]))
        return 0
    if not torch.cuda.is_available():
        raise InputError("device: expected a CUDA GPU to measure on, got none that torch can use.")
    device = torch.device("cuda", torch.cuda.current_device())
    ours = _ours(options.backend, options.schedule, device)
    peers = [] if options.no_peer else find_peers(options.peer, options.flashkda)

    run: report.Run = machine.facts(options.commit)
    run["conditions"] = "L2 cold, medians"
    run["command"] = shlex.join(["kda-jit", "bench", *argv])
    run["peers"] = {peer.name: peer.version for peer in peers}
    bandwidth = copy_bandwidth()
    run["copy_tb_per_s"] = bandwidth / 1e12
    run["rows"], run["accuracy"], run["summary"] = [], [], {}
    timer = Timer(budget_ms=options.budget)
    for case in speed:
        row = time_case(case, ours, peers, timer, bandwidth, device)
        run["rows"].append(row)
        _progress(case.name, row.get("failed") or f"{row['us']:.1f} us")
        torch.cuda.empty_cache()
    run["summary"] = report.summary(run["rows"])
    if accuracy:
        subjects = _tabled(ours, peers, device)
        for table in accuracy:
            run["accuracy"].append(table_errors(table, subjects, device))
            _progress(table.regime, "done")

    print(report.markdown(run) if options.markdown else report.text(run))
    paths = [options.out] if options.out else []
    paths += [report.standard_path(run, suites[:1], RESULTS)] if options.save else []
    for path in paths:
        report.save(run, path)
        print(f"written: {path}")
    return 1 if any(row.keys() & {"failed", "notes"} for row in run["rows"]) else 0


def _ours(backend: str, asked: Sequence[str] | None, device: torch.device) -> list[Ours]:
    """What to time. Raises InputError for a schedule that this GPU does not have."""
    if backend != "cuda":
        return [Ours(backend)]
    known = schedules_for(torch.cuda.get_device_capability(device)[0])
    names = list(asked or [settings.schedule()])
    for name in names:
        if name not in ("auto", "all", *known):
            raise InputError(f"schedule: expected auto, all, {', '.join(known)}, got {name!r}.")
    every = [n for name in names for n in (known if name == "all" else [name])]
    return [Ours(backend, name) for name in dict.fromkeys(every)]


def _tabled(ours: Sequence[Ours], peers: Sequence[Peer], device: torch.device) -> list[Subject]:
    """What the accuracy table compares: what is timed, and every other backend that runs here."""
    timed = {subject.backend for subject in ours}
    others = []
    for name in ("cuda", "triton", "torch"):
        try:
            resolve_backend(
                name, head_dim=128, dtype=torch.bfloat16, lower_bound=-5.0, device=device
            )
        except NoBackendError:
            continue
        if name not in timed:
            others.append(Ours(name))
    return [*ours, *others, *peers]


def _progress(name: str, words: str) -> None:
    """To stderr, at once: a run takes minutes."""
    print(f"{name}: {words}", file=sys.stderr, flush=True)
