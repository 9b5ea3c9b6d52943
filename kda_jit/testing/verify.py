"""Every law on every kind of numbers, for one subject: what `kda-jit verify` runs and reports.

    subject = find_subject("torch", torch.device("cpu"))
    report = verify(subject)
    assert report.passed, report.text()

A cell is a law on a regime: a few cases, drawn from a seed, the worst error of all, and of a law
that breaks, the smallest case that was found to break it. A subject is a backend of ours, a peer,
or anybody's function.
"""

from __future__ import annotations

import datetime
import importlib
import json
import multiprocessing
import os
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.bench import machine
from kda_jit.bench.peers import PEERS, Peer, find_peers
from kda_jit.errors import InputError, NoBackendError
from kda_jit.reference import RecurrentResult
from kda_jit.resolver import ALIASES, ORDER, resolve_backend

from .cases import REGIMES, Case, Inputs, judged_on
from .laws import EVERY, LAWS, NOT_WORTH_TRYING, Law, Measured
from .numeric import Limit, Mismatch
from .runner import Function, Runner, Subject, rounding_limits, why_not

#: Called with (cells done, cells in all, the last of them).
Progress = Callable[[int, int, str], None]

#: With `long`, these laws also see one sequence of so many tokens in these regimes.
LONG_TOKENS = 16384
LONG_LAWS = ("recurrence", "split")
LONG_REGIMES = ("slow", "mixed", "near_keys", "blocks")
_SHRINKS = 40  # runs that may be spent on making a case smaller

CPU = torch.device("cpu")
INTERRUPTED = "interrupted"
HOLDS, BROKEN, SKIPPED, UNTRIED = "holds", "broken", "skipped", "not tried"


# -- who is tried --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerRunner:
    """Another implementation, through its adapter of the benchmarks: bf16, K = V = 128."""

    peer: Peer
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    bitwise: bool = False

    @property
    def name(self) -> str:
        return self.peer.name

    @property
    def lacks(self) -> Mapping[str, str]:
        return dict.fromkeys(self.peer.lacks, f"the adapter of {self.peer.name} has no such call")

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        if buffers:
            raise NotImplementedError(f"the adapter of {self.name} has no {', '.join(buffers)}")
        before = last_launch()
        self.peer.activate()
        result = self.peer.bind(inputs)()
        assert last_launch() is before, f"asked for {self.name}, kda_jit ran"
        return result

    def limits(self, inputs: Inputs, want: RecurrentResult | None = None) -> tuple[Limit, Limit]:
        return rounding_limits(inputs, None, want)


def find_subject(
    name: str,
    device: torch.device,
    *,
    flashkda: Path | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
    bitwise: bool = False,
) -> Subject:
    """The subject that a person means by `name`.

    name      a backend of ours ("auto": the first that can), "reference", "peer:" and one of PEERS,
              or "module:function", a function with the arguments of kda_jit.prefill
    flashkda  FlashKDA's library; None: where the environment says
    dtype, head_dim, bitwise
              of a function: what its inputs are, whether it promises equal bits

    Raises InputError or NoBackendError, with the reason, for one that cannot run on `device`.
    """
    if name.startswith("peer:"):
        kind = name.removeprefix("peer:")
        if kind not in PEERS:
            raise InputError(f"backend: expected peer:{', peer:'.join(PEERS)}, got {name!r}.")
        if device.type != "cuda":
            raise InputError(f"device: expected a CUDA GPU for {name!r}, got {device}.")
        return PeerRunner(find_peers([kind], flashkda, tuned=False)[0], device)
    on_gpu = device.type == "cuda"
    if ":" in name:
        wide = torch.bfloat16 if on_gpu else torch.float32
        size = 128 if on_gpu else 32
        function = import_function(name)
        return Function(name, function, device, dtype or wide, head_dim or size, bitwise)
    asked = ALIASES.get(name, name)
    if asked == "auto":
        resolution = resolve_backend(
            "auto",
            head_dim=128 if on_gpu else 32,
            dtype=torch.bfloat16,
            lower_bound=-5.0,
            device=device,
        )
        asked = resolution.backend
    if asked not in ("reference", *ORDER):
        raise InputError(
            f"backend: expected auto, reference, {', '.join(ORDER)}, peer:{', peer:'.join(PEERS)} "
            f"or module:function, got {name!r}."
        )
    if asked == "cuda" and device.type != "cuda":
        none = "" if torch.cuda.is_available() else ", and torch finds no GPU here"
        raise NoBackendError(f"device: expected a CUDA GPU for {name!r}, got {device}{none}.")
    if reason := why_not(asked, device):
        raise NoBackendError(reason)
    return Runner(asked, device)


def import_function(name: str) -> Callable[..., Any]:
    """What "module:function" names; modules of the current folder are found, too."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # whatever a module does when it is imported
        words = f"{error}" if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise InputError(f"backend: expected module:function, got {name!r}: {words}.") from error
    if not callable(found):
        raise InputError(f"backend: expected a function, {name!r} is a {type(found).__name__}.")
    function: Callable[..., Any] = found
    return function


# -- what came of it -----------------------------------------------------------------------------


class Cell(NamedTuple):
    """A law on a regime.

    status          HOLDS, BROKEN, SKIPPED or UNTRIED
    examples        cases that were tried
    error, allowed  of the comparison that came nearest to its limit; both 0: equal bits
    what            was compared there
    case            where that was; of a broken law, the smallest one known to break it
    words           why it is broken, was skipped or was not tried
    """

    law: str
    regime: str
    status: str
    examples: int = 0
    error: float = 0.0
    allowed: float = 0.0
    what: str = ""
    case: str = ""
    words: str = ""

    @property
    def shown(self) -> str:
        """The cell in a few characters."""
        if self.status == BROKEN:
            return f"{self.error:.1e}!" if self.error else "broken"
        if self.status == HOLDS:
            return f"{self.error:.1e}" if self.error else "="
        return "." if self.status == SKIPPED else "?"


LEGEND = (
    "worst error of a cell; = equal bits; ! or broken: beyond what is allowed; . not tried, "
    "for a reason; ? never reached"
)


@dataclass(frozen=True)
class Report:
    """All cells of a run, and what the run was of.

    ran     what was seen to run: backends with schedule, target and kernels, or a peer's version
    head    date, commit, gpu, versions and command
    """

    subject: str
    device: str
    dtype: str
    head_dim: int
    seed: int
    examples: int
    ran: tuple[str, ...]
    cells: tuple[Cell, ...]
    seconds: float
    head: Mapping[str, Any]

    @property
    def broken(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.status == BROKEN]

    @property
    def tried(self) -> int:
        """Cells in which a case was tried."""
        return sum(cell.status in (HOLDS, BROKEN) for cell in self.cells)

    @property
    def passed(self) -> bool:
        """Something was tried, everything was reached, nothing broke."""
        finished = all(cell.status != UNTRIED for cell in self.cells)
        return self.tried > 0 and finished and not self.broken

    @property
    def laws(self) -> list[str]:
        return list(dict.fromkeys(cell.law for cell in self.cells))

    @property
    def regimes(self) -> list[str]:
        tried = {cell.regime for cell in self.cells}
        return [name for name in REGIMES if name in tried]

    def cell(self, law: str, regime: str) -> Cell:
        found = (c for c in self.cells if (c.law, c.regime) == (law, regime))
        return next(found, Cell(law, regime, SKIPPED, words=NOT_WORTH_TRYING))

    def command(self, cell: Cell) -> str:
        """Runs a cell's case alone."""
        return f'kda-jit verify --backend {self.subject} --laws {cell.law} --case "{cell.case}"'

    def headline(self) -> str:
        """What the run was of, in one line."""
        count = sum(cell.examples for cell in self.cells)
        return (
            f"{self.subject} on {self.device}, {self.dtype}, K = V = {self.head_dim}: "
            f"{self.tried} cells, {count} cases, seed {self.seed}, {self.seconds:.0f} s"
        )

    def text(self) -> str:
        """Headline, what ran, and every broken cell with the command that shows it again."""
        lines = [self.headline(), *(f"ran {what}" for what in self.ran)]
        for cell in self.broken:
            lines += [f"{cell.law} x {cell.regime}: {cell.words}", f"  {self.command(cell)}"]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """What `save` writes and docs/generate.py reads; of a cell, what differs from a default."""
        fields = Cell._field_defaults
        rows = [
            {k: v for k, v in cell._asdict().items() if k not in fields or v != fields[k]}
            for cell in self.cells
            if cell.words != NOT_WORTH_TRYING
        ]
        return {
            "subject": self.subject,
            **self.head,
            "device": self.device,
            "dtype": self.dtype,
            "head_dim": self.head_dim,
            "seed": self.seed,
            "examples": self.examples,
            "seconds": round(self.seconds, 1),
            "ran": list(self.ran),
            "passed": self.passed,
            "cells": rows,
        }


def from_json(run: Mapping[str, Any]) -> Report:
    """The report that was saved as `run`."""
    head = ("date", "commit", "gpu", "versions")
    own = ("subject", "device", "dtype", "head_dim", "seed", "examples", "seconds")
    if missing := {*head, *own, "ran", "cells"} - run.keys():
        raise InputError(f"report: expected one of kda-jit verify, lacks {sorted(missing)}.")
    return Report(
        **{key: run[key] for key in own},
        ran=tuple(run["ran"]),
        cells=tuple(Cell(**row) for row in run["cells"]),
        head={key: run[key] for key in head} | {"command": run.get("command", "")},
    )


def markdown(report: Report, heading: str = "#", *, legend: bool = True) -> str:
    """The whole report for a page: law x regime, what was not tried and why, what broke."""
    verdict = "every law holds" if report.passed else f"{len(report.broken)} cells broken"
    if not report.tried:
        verdict = "nothing was tried"
    parts = [
        f"{heading} {report.subject} on {report.device}: {verdict}",
        f"{report.headline()}; commit {report.head['commit']}, {report.head['date']}.",
    ]
    if report.head["command"]:
        parts.append(f"`{report.head['command']}`")
    if report.ran:
        parts.append("Ran: " + "; ".join(report.ran) + ".")
    regimes = report.regimes
    cells = [["law", *(f"`{name}`" for name in regimes)]]
    cells += [
        [f"`{name}`", *(report.cell(name, regime).shown for regime in regimes)]
        for name in report.laws
    ]
    parts += [_markdown_table(cells), *([f"({LEGEND}.)"] if legend else [])]
    reasons: dict[str, list[str]] = {}
    for cell in report.cells:
        if cell.status == SKIPPED and cell.words != NOT_WORTH_TRYING:
            reasons.setdefault(cell.words, []).append(cell.law)
    for words, names in reasons.items():
        parts.append(f"Not tried: {', '.join(f'`{n}`' for n in dict.fromkeys(names))}: {words}.")
    for cell in report.broken:
        words = cell.words.replace("\n", "\n    ")
        parts.append(
            f"**`{cell.law}` x `{cell.regime}`**\n\n    {words}\n    {report.command(cell)}"
        )
    return "\n\n".join(parts) + "\n"


def save(report: Report, path: Path) -> None:
    """As markdown where the name ends with .md, else as json, a line a cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".md":
        path.write_text(markdown(report))
        return
    parts = []
    for key, value in report.as_json().items():
        if key == "cells":
            lines = ",\n".join(f"  {json.dumps(_rounded(row))}" for row in value)
            parts.append(f' "{key}": [\n{lines}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


# -- the run -------------------------------------------------------------------------------------


def verify(
    subject: Subject,
    *,
    laws: Sequence[str] = (),
    regimes: Sequence[str] = (),
    examples: int = 3,
    each_law: int = 0,
    seed: int = 0,
    case: Case | None = None,
    long: bool = False,
    jobs: int = 1,
    again: Callable[[], Subject] | None = None,
    commit: str = "",
    command: str = "",
    progress: Progress | None = None,
) -> Report:
    """Tries the laws (all) on the regimes (all of EVERY) with `examples` cases a cell.

    each_law  at least so many cases of a law, over all of its regimes
    case      this one case instead, on its own regime
    long      also one sequence of 16384 tokens where rounding adds up
    jobs      processes that share the cells; each makes its subject by `again`, which is pickled
    commit    for the report; empty: that of this checkout
    command   for the report: how to ask for the same

    Interrupted (Ctrl-C), it reports what it has; the other cells are not tried.
    """
    chosen = [LAWS[name] for name in _known("law", laws, LAWS)]
    kinds = _known("regime", regimes, REGIMES, EVERY) if case is None else [case.regime]
    if examples < 1:
        raise InputError(f"examples: expected at least 1, got {examples}.")
    if jobs < 1 or (jobs > 1 and again is None):
        raise InputError(f"jobs: expected 1, or more and a way to make the subject, got {jobs}.")
    start = time.perf_counter()
    places = []
    for law in chosen:
        able = sum(law.why_not(subject, regime) is None for regime in kinds)
        cases = max(examples, -(-each_law // max(able, 1)))
        for regime in kinds:
            extra = long and law.name in LONG_LAWS and regime in LONG_REGIMES
            places.append(Place(law.name, regime, cases, seed, extra, case))
    ran: dict[str, None] = {}
    tell = progress or (lambda done, total, words: None)
    if jobs == 1:
        cells = []
        with suppress(KeyboardInterrupt):
            for cell in _cells(subject, places, ran):
                cells.append(cell)
                tell(len(cells), len(places), f"{cell.law} x {cell.regime}")
        cells += [Cell(x.law, x.regime, UNTRIED, words=INTERRUPTED) for x in places[len(cells) :]]
    else:
        assert again is not None
        cells = _shared(again, places, ran, min(jobs, len(places)), tell)
    tell(len(places), len(places), "")
    if isinstance(subject, PeerRunner):
        ran[f"{subject.name} {subject.peer.version}"] = None
    elif isinstance(subject, Function):
        ran[subject.name] = None
    return Report(
        subject=f"peer:{subject.name}" if isinstance(subject, PeerRunner) else subject.name,
        device=_device_name(subject.device),
        dtype=str(subject.dtype).removeprefix("torch."),
        head_dim=subject.head_dim,
        seed=seed,
        examples=examples,
        ran=tuple(ran),
        cells=tuple(cells),
        seconds=time.perf_counter() - start,
        head={
            "date": datetime.date.today().isoformat(),
            "commit": commit or machine.checkout_commit() or "unknown",
            "gpu": _device_name(subject.device),
            "versions": machine.versions(),
            "command": command,
        },
    )


#: (number of a cell, the cell, what was seen to run so far in its process)
_Done = tuple[int, Cell, list[str]]


class Place(NamedTuple):
    """A cell that is yet to be: `cases` of a law on a regime, and a long one, or `case` alone."""

    law: str
    regime: str
    cases: int
    seed: int
    long: bool
    case: Case | None


def _cells(
    subject: Subject,
    places: Iterable[Place],
    ran: dict[str, None],
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Cell]:
    lost = ""
    for place in places:
        law, regime, case = LAWS[place.law], place.regime, place.case
        if stopped():
            lost = INTERRUPTED
        if lost:
            yield Cell(law.name, regime, UNTRIED, words=lost)
            continue
        if reason := (law.why_not if case is None else law.cannot)(subject, regime):
            yield Cell(law.name, regime, SKIPPED, words=reason)
            continue
        with judged_on(CPU):
            if case is not None:
                cell = _try(law, subject, [case], 1, ran, shrink=False)
            else:
                cell = _try(law, subject, _draw(law, subject, place), place.cases + place.long, ran)
        yield cell
        lost = _lost(subject)


def _shared(
    again: Callable[[], Subject],
    places: Sequence[Place],
    ran: dict[str, None],
    jobs: int,
    tell: Progress,
) -> list[Cell]:
    """The cells by processes: a device that one of them loses is lost for its share alone."""
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    cells: dict[int, Cell] = {}
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with (
        _noted_interrupts() as interrupts,
        context.Manager() as manager,
        ProcessPoolExecutor(jobs, context, ignore) as pool,
    ):
        done: queue.Queue[_Done] = manager.Queue()
        stop = manager.Event()
        numbered = list(enumerate(places))
        shares: list[Future[None]] = [
            pool.submit(_do_share, again, numbered[first::jobs], done, stop)
            for first in range(jobs)
        ]
        while True:
            ended = all(share.done() for share in shares)
            try:
                i, cell, seen = done.get(timeout=0.0 if ended else 0.1)
                cells[i] = cell
                ran.update(dict.fromkeys(seen))
                tell(len(cells), len(places), f"{cell.law} x {cell.regime}")
            except queue.Empty:
                if ended:
                    break
            if interrupts:
                stop.set()
    for i, place in numbered:
        if i not in cells:
            error = shares[i % jobs].exception()
            words = f"{type(error).__name__}: {error}"
            cells[i] = Cell(place.law, place.regime, UNTRIED, words=words)
    return [cells[i] for i, _ in numbered]


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Ctrl-C adds to the list, and breaks into nothing: not into a talk between processes."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def _do_share(
    again: Callable[[], Subject],
    share: Sequence[tuple[int, Place]],
    done: queue.Queue[_Done],
    stop: threading.Event,
) -> None:
    """In a process of its own."""
    ran: dict[str, None] = {}
    numbers = [i for i, _ in share]
    places = [place for _, place in share]
    cells = _cells(again(), places, ran, stop.is_set)
    for i, cell in zip(numbers, cells, strict=True):
        done.put((i, cell, list(ran)))


def _draw(law: Law, subject: Subject, place: Place) -> Iterator[Case]:
    """More cases than are asked for: a subject may not claim some of them."""
    if place.long:
        yield Case(seed=place.seed, lengths=(LONG_TOKENS,), regime=place.regime)
    rng = random.Random(f"{place.seed}/{law.name}/{place.regime}")
    for index in range(4 * place.cases):
        yield law.draw(rng, subject, place.regime, index)


def _try(
    law: Law,
    subject: Subject,
    cases: Iterable[Case],
    wanted: int,
    ran: dict[str, None],
    *,
    shrink: bool = True,
) -> Cell:
    """The cell of the first `wanted` cases that the subject claims."""
    best: Measured | None = None
    where, refused, count, regime = "", "", 0, ""
    for case in cases:
        regime = case.regime
        try:
            found = law(subject, case)
        except NotImplementedError as reason:
            refused = str(reason) or "not implemented"
            continue
        except Exception as error:
            if _lost(subject):  # a GPU that fails once fails for good: nothing more can be learnt
                return _broken(law, count + 1, case, error)
            small, error = _shrink(law, subject, case, error) if shrink else (case, error)
            return _broken(law, count + 1, small, error, _second_opinion(law, subject, small))
        count += 1
        _note(subject, ran)
        if best is None or found.ratio > best.ratio:
            best, where = found, repr(case)
        if count == wanted:
            break
    if best is None:
        return Cell(law.name, regime, SKIPPED, words=refused)
    return Cell(law.name, regime, HOLDS, count, *best, case=where)


def _broken(law: Law, count: int, case: Case, error: Exception, opinion: str = "") -> Cell:
    words = str(error).strip()
    if not isinstance(error, AssertionError):
        words = f"{type(error).__name__}: {words}"
    words = words.removesuffix(repr(case)).rstrip()
    found, allowed = (error.error, error.allowed) if isinstance(error, Mismatch) else (0.0, 0.0)
    return Cell(
        law.name,
        case.regime,
        BROKEN,
        examples=count,
        error=found,
        allowed=allowed,
        case=repr(case),
        words=words + opinion,
    )


def _shrink(law: Law, subject: Subject, case: Case, error: Exception) -> tuple[Case, Exception]:
    """A smaller case that breaks the law in the same way, if one is found soon."""
    left = _SHRINKS
    again = True
    while again and left > 0:
        again = False
        for smaller in _smaller(law, case):
            left -= 1
            try:
                law(subject, smaller)
            except NotImplementedError:
                pass
            except Exception as found:
                if _lost(subject):
                    return smaller, found
                if isinstance(found, AssertionError) == isinstance(error, AssertionError):
                    case, error, again = smaller, found, True
                    break
            if left <= 0:
                break
    return case, error


def _smaller(law: Law, case: Case) -> Iterator[Case]:
    if len(case.lengths) > 1:
        for n in range(len(case.lengths)):
            yield case.replace(lengths=case.lengths[:n] + case.lengths[n + 1 :])
    if case.padding:
        yield case.replace(padding=0)
    if case.value_heads not in (None, case.heads):
        yield case.replace(value_heads=None)
    if case.heads > 1:
        group = None if case.value_heads is None else case.HV // case.heads
        yield case.replace(heads=1, value_heads=group)
    if case.initial and law.initial is None:
        yield case.replace(initial=False)
    if case.state_dtype != "float32":
        yield case.replace(state_dtype="float32")
    for shorter in (lambda n: n // 2, lambda n: n - n % 16, lambda n: max(0, n - 1)):
        lengths = tuple(map(shorter, case.lengths))
        if lengths != case.lengths:
            yield case.replace(lengths=lengths)


def _second_opinion(law: Law, subject: Subject, case: Case) -> str:
    """What the reference does on the same case: a law that it breaks is a wrong law."""
    if isinstance(subject, Runner) and subject.name == "reference":
        return ""
    judge = Runner("reference", subject.device)
    try:
        law(judge, case)
    except NotImplementedError:
        return ""
    except Exception as error:
        return f"\n  the float64 reference breaks it, too: {error}"
    return "" if law.why_not(judge, case.regime) else "\n  the float64 reference holds it"


def _note(subject: Subject, ran: dict[str, None]) -> None:
    """Keeps what a backend of ours was last seen to run; `Runner` asserts each single call."""
    record = last_launch()
    if isinstance(subject, Runner) and record is not None and record.backend == subject.name:
        ran[_describe(record)] = None


def _describe(record: LaunchRecord) -> str:
    facts = [record.backend]
    facts += [f"schedule {record.schedule}"] if record.schedule else []
    facts += [f"target {record.target}"] if record.target else []
    return f"{', '.join(facts)}: {', '.join(record.kernels)}"


def _lost(subject: Subject) -> str:
    """Why the device answers no more; empty where it does."""
    if subject.device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(subject.device)
    except RuntimeError as error:
        return f"the device is lost: {str(error).partition(chr(10))[0]}"
    return ""


def _known(
    what: str, asked: Sequence[str], known: Mapping[str, object], default: Sequence[str] = ()
) -> list[str]:
    for name in asked:
        if name not in known:
            raise InputError(f"{what}: expected one of {', '.join(known)}, got {name!r}.")
    return list(dict.fromkeys(asked)) or list(default or known)


def _device_name(device: torch.device) -> str:
    return (
        machine.short_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"
    )


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in row.items()}


def _markdown_table(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---|" + "---:|" * (len(lines[0]) - 1), *body])
