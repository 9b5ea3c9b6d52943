"""What a backend is, what it may be asked, and the record of what ran last."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from kda_jit.contract import KdaProblem
    from kda_jit.workspace import Workspace


@dataclass(frozen=True)
class Query:
    """The facts by which a backend accepts or rejects: plain data, so no GPU is needed to ask.

    K, V         channels of keys and values
    dtype        of q, k, v
    lower_bound  of the gate; None: unbounded
    device       of every tensor
    capability   compute capability of that device; None off the GPU
    g_dtype, beta_dtype
                 None: like ``dtype``
    misaligned   names of tensors whose address or strides are no multiple of 16 bytes
    far_tokens   names of tensors whose tokens are 2**30 or more elements apart
    """

    K: int
    V: int
    dtype: torch.dtype
    lower_bound: float | None
    device: torch.device
    capability: tuple[int, int] | None
    g_dtype: torch.dtype | None = None
    beta_dtype: torch.dtype | None = None
    misaligned: tuple[str, ...] = ()
    far_tokens: tuple[str, ...] = ()

    @property
    def aligned(self) -> bool:
        return not self.misaligned


class Backend(Protocol):
    """One way to run a prefill."""

    name: str

    def rejects(self, query: Query) -> list[str]:
        """Every reason why this backend cannot serve the query, in words; [] if it can."""
        ...

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        """Writes ``problem.out``, its final states (or pool slots) and its checkpoints.

        Called for problems that ``rejects`` let pass and that have a sequence, though maybe no
        token. On a GPU the problem's device is current and ``workspace`` is held for the call;
        everything goes to torch's current stream. Ends with ``record_launch``.
        """
        ...


class LaunchRecord(NamedTuple):
    """What ran: the backend, its kernels in order, the schedule and the compile target.

    ``schedule`` and ``target`` are None where the backend has no such notion.
    """

    backend: str
    kernels: tuple[str, ...] = ()
    schedule: str | None = None
    target: str | None = None

    def facts(self) -> dict[str, str]:
        """The same as text, for a file or a table; what there is none of is left out."""
        named = {"kernels": ", ".join(self.kernels), "schedule": self.schedule}
        named["target"] = self.target
        return {"backend": self.backend} | {name: text for name, text in named.items() if text}


class _Last(threading.local):
    record: LaunchRecord | None = None


_last = _Last()


def record_launch(record: LaunchRecord) -> None:
    """Called by a backend's ``run``; the record belongs to the calling thread."""
    _last.record = record


def last_launch() -> LaunchRecord | None:
    """What the last call of this thread ran; None before the first.

    A call without a token launches nothing and records ``LaunchRecord("none")``.
    """
    return _last.record


@lru_cache(maxsize=64)
def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability, None for a device that is not a CUDA GPU. Asked of torch once each.

    Through torch and for the tensor's own device: a fresh worker process that asks the driver
    before a context exists may be told stale numbers.
    """
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        return None
    return torch.cuda.get_device_capability(device)
