"""Live calls to files, to be made again elsewhere: `kda_jit.capture` and KDA_JIT_CAPTURE.

Nothing of a call changes: its tensors are copied before it runs, what it wrote is copied after, and
whatever goes wrong with the copies is a warning. A captured call waits for the GPU, so it is slow;
any other call pays for one look at `recorder`.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit._version import __version__
from kda_jit.backends.base import Backend, last_launch
from kda_jit.callfile import Call, write_call
from kda_jit.errors import InputError, InputTypeError
from kda_jit.extras import install
from kda_jit.jit.cache import why_not_writable
from kda_jit.resolver import ORDER, get_backend
from kda_jit.snapshot import Snapshot, of_prefill, of_recurrent

if TYPE_CHECKING:
    from kda_jit.contract import KdaProblem
    from kda_jit.contract.recurrent import RecurrentProblem
    from kda_jit.workspace import Workspace

CALLS = 4
MAX_BYTES = 512 << 20

RunRecurrent = Callable[["RecurrentProblem"], None]

#: Of this process, so that its files can be put in order, however many recorders there are.
_numbers = itertools.count()

_lock = threading.RLock()
#: What the open blocks of all threads put in `recorder`, the last one entered last.
_blocks: list[Tap | None] = []
#: What is in `recorder` while there is none.
_outside: Tap | None = None


@contextmanager
def capture(
    folder: str | os.PathLike[str],
    *,
    calls: int = CALLS,
    skip: int = 0,
    max_bytes: int = MAX_BYTES,
) -> Iterator[Recorder]:
    """Writes the calls of `kda_jit.prefill` and `kda_jit.recurrent` inside the block to files.

        with kda_jit.capture("calls") as recorder:
            model(prompt)
        print(recorder.files)

    A file has the tensors that the call was given (of a pool of states the slots that it names),
    every option, what it wrote, and what it ran on. `kda-jit run` and `kda-jit compare` read it.

    folder      made where it does not exist
    calls       how many are written
    skip        how many go by before the first that is written; one without a token never counts
    max_bytes   of one file; a larger call is left out, with a warning

    Also left out, with a warning, are calls inside a CUDA graph capture, and those of
    `kda_jit.chunk_kda` whose inputs come activated. Results are the same to the bit. Calls of every
    thread are seen; of several open blocks, the one that was entered last sees them.
    """
    for name, number in (("calls", calls), ("skip", skip), ("max_bytes", max_bytes)):
        if not isinstance(number, Integral):
            raise InputTypeError(f"{name}: expected an int, got {type(number).__name__}.")
    found = Recorder(folder, calls=range(skip, skip + calls), max_bytes=max_bytes)
    with _through(found):
        yield found


def unseen() -> AbstractContextManager[None]:
    """No call inside the block is captured, whatever the environment says."""
    return _through(None)


@contextmanager
def _through(tap: Tap | None) -> Iterator[None]:
    """Calls pass through `tap` inside the block. Blocks of several threads end in any order."""
    global recorder, _outside
    with _lock:
        if not _blocks:
            _outside = recorder
        _blocks.append(tap)
        recorder = tap
    try:
        yield
    finally:
        with _lock:
            at = max(i for i, one in enumerate(_blocks) if one is tap)
            del _blocks[at]
            recorder = _blocks[-1] if _blocks else _outside


class Recorder:
    """What a `capture` block gives: `files` are those written so far."""

    def __init__(
        self, folder: str | os.PathLike[str], *, calls: range, max_bytes: int = MAX_BYTES
    ) -> None:
        """calls  the first and the last but one to write, counted from 0"""
        if not calls or calls.start < 0:
            raise InputError(
                f"calls, skip: expected at least 1 and at least 0, got {calls.stop - calls.start} "
                f"and {calls.start}."
            )
        if max_bytes < 1:
            raise InputError(f"max_bytes: expected at least 1, got {max_bytes}.")
        self.folder = _ready(Path(folder).absolute())  # wherever the process goes from here
        self.files: list[Path] = []
        self._skip, self._left, self._max_bytes = calls.start, len(calls), max_bytes
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def tapped(self, backend: Backend) -> Backend:
        """The backend, with a `run` that also writes a file."""
        if not self._left:
            return backend
        if backend.name not in ORDER or backend is not get_backend(backend.name):
            self._leave_out("form", "its inputs come activated, as no prefill takes them")
            return backend
        return _Tapped(backend, self)

    def tapped_recurrent(self, run: RunRecurrent) -> RunRecurrent:
        """Likewise for what runs a `kda_jit.recurrent`."""
        if not self._left:
            return run
        return lambda p: self.around(p.device, lambda: of_recurrent(p), lambda: run(p))

    def around(
        self, device: torch.device, look: Callable[[], Snapshot], run: Callable[[], None]
    ) -> None:
        """Runs a call on `device`, and writes it to a file if it is its turn."""
        taken = self._take(device, look)
        if taken is None:
            run()
            return
        snapshot, call = taken
        try:
            run()
        except Exception as error:
            failed = {"error": f"{type(error).__name__}: {error}"}
            self._write(call, failed, dict)
            raise
        launch = last_launch()
        self._write(call, {} if launch is None else launch.facts(), snapshot.written)

    def _take(
        self, device: torch.device, look: Callable[[], Snapshot]
    ) -> tuple[Snapshot, Call] | None:
        """What the call is given, copied; None for one that is left out."""
        with self._lock:
            if self._skip or not self._left:
                self._skip -= self._skip > 0
                return None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._leave_out("graph", "it is inside a CUDA graph capture")
            return None
        try:
            snapshot = look()
            if snapshot.nbytes > self._max_bytes:
                size, most = (f"{n / 2**20:.1f} MiB" for n in (snapshot.nbytes, self._max_bytes))
                self._leave_out(
                    "size",
                    f"it takes {size}, and {most} are allowed (max_bytes, or "
                    f"{settings.CAPTURE_MIB.name})",
                )
                return None
            call = snapshot.call()
            call.facts.update(_where(device))
        except Exception as error:
            self._leave_out("copy", f"{type(error).__name__}: {error}")
            return None
        with self._lock:
            if not self._left:
                return None
            self._left -= 1
        return snapshot, call

    def _write(
        self, call: Call, outcome: dict[str, str], results: Callable[[], dict[str, Tensor]]
    ) -> None:
        now = datetime.datetime.now(datetime.UTC)
        # Processes of several containers may write to one folder at once, under the same number.
        whose = f"{os.getpid()}-{secrets.token_hex(3)}"
        name = f"{call.function}-{now:%Y%m%dT%H%M%S}-{next(_numbers):04d}-{whose}"
        path = self.folder / f"{name}.safetensors"
        try:
            facts = call.facts | outcome | {"date": now.isoformat(timespec="seconds")}
            write_call(path, replace(call, results=results(), facts=facts))
        except Exception as error:
            self._leave_out("write", f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self.files.append(path)

    def _leave_out(self, kind: str, why: str) -> None:
        """Says so, once for each kind of reason."""
        with self._lock:
            known = kind in self._warned
            self._warned.add(kind)
        if not known:
            warnings.warn(
                f"kda_jit: a call is not captured in {self.folder}: {why}. Others for this reason "
                "are left out without a word.",
                RuntimeWarning,
                stacklevel=2,
            )


class _Tapped:
    """A backend for one call."""

    def __init__(self, backend: Backend, recorder: Recorder) -> None:
        self.name = backend.name
        self.rejects = backend.rejects
        self._run, self._recorder = backend.run, recorder

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        if problem.is_empty:  # and yet to be run: a pool has slots to clear
            return self._run(problem, workspace)
        return self._recorder.around(
            problem.device, lambda: of_prefill(problem), lambda: self._run(problem, workspace)
        )


class Tap(Protocol):
    """What a call passes through: a Recorder, or what decides whether there is one."""

    def tapped(self, backend: Backend) -> Backend: ...

    def tapped_recurrent(self, run: RunRecurrent) -> RunRecurrent: ...


class _AsTheEnvironmentSays:
    """Stands in `recorder` until the first call, which pays for the look at the environment."""

    def __init__(self) -> None:
        self._known = False
        self._found: Recorder | None = None

    def tapped(self, backend: Backend) -> Backend:
        found = self._settle()
        return backend if found is None else found.tapped(backend)

    def tapped_recurrent(self, run: RunRecurrent) -> RunRecurrent:
        found = self._settle()
        return run if found is None else found.tapped_recurrent(run)

    def _settle(self) -> Recorder | None:
        global recorder
        with _lock:  # first calls of several threads share one recorder
            if not self._known:
                if (folder := settings.capture()) is not None:
                    self._found = Recorder(
                        folder, calls=settings.capture_calls(), max_bytes=settings.capture_bytes()
                    )
                self._known = True
            if recorder is self:
                recorder = self._found
            return self._found


#: What calls pass through; None costs a call nothing but the look.
recorder: Tap | None = _AsTheEnvironmentSays()


def _ready(folder: Path) -> Path:
    """The folder, made and fit to be written, or InputError."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise InputError(
            "capture: expected the package safetensors, which writes the files, got none: "
            f"{install('cli')}."
        ) from None
    if (reason := why_not_writable(folder)) is not None:
        raise InputError(f"folder: expected one that can be written, got {folder} ({reason}).")
    return folder


def _where(device: torch.device) -> dict[str, str]:
    """The machine and the versions, as text."""
    found = {
        "kda_jit": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found
