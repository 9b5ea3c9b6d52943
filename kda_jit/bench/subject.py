"""What a benchmark calls: something of ours or a peer, behind one interface; here, prefills."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit.api import prefill
from kda_jit.backends import cuda
from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.testing import Inputs

#: One call over bound inputs: returns (out, states). Those of a step are its whole pool.
Call = Callable[[], tuple[Tensor, Tensor]]


class Subject(Protocol):
    """Something that is timed. `name` is what reports call it."""

    @property
    def name(self) -> str: ...

    def activate(self) -> None:
        """Makes the calls that follow this subject's own; outside of any timed region."""
        ...

    def bind(self, inputs: Any) -> Call:
        """A call over the inputs of a case that allocates nothing it can allocate here.

        Buffers hold NaN until the first call, so that a row which it leaves out shows; a pool is a
        copy of its own.
        """
        ...


class Own(Subject, Protocol):
    """A subject of this package, which knows what it ran. Records are the package's own."""

    def record(self, call: Call) -> Any:
        """What the last run of `call` launched, if nothing else ran since. It has `kernels`."""
        ...

    def misnamed(self, record: Any) -> str | None:
        """Why `record` is not this subject's; None if it is."""
        ...

    def facts(self, record: Any) -> dict[str, str | None]:
        """What a row says of it."""
        ...


@dataclass(frozen=True)
class Ours:
    """A backend of kda_jit, asked for by name; for "cuda" under a schedule, or "auto"."""

    backend: str
    schedule: str = "auto"

    @property
    def name(self) -> str:
        return self.backend if self.schedule == "auto" else f"{self.backend}/{self.schedule}"

    def activate(self) -> None:
        os.environ[settings.SCHEDULE.name] = self.schedule

    def bind(self, inputs: Inputs) -> Call:
        x = inputs
        out = torch.full_like(x.v, torch.nan)
        N, HV, K, V = x.N, x.v.shape[2], x.q.shape[3], x.v.shape[3]
        final = torch.full((N, HV, V, K), torch.nan, device=x.q.device)

        def call() -> tuple[Tensor, Tensor]:
            return prefill(*x.args, **x.kwargs, out=out, final_state=final, backend=self.backend)

        return call

    def record(self, call: Call) -> LaunchRecord | None:
        return last_launch()

    def facts(self, record: LaunchRecord) -> dict[str, str | None]:
        return {"backend": record.backend, "schedule": record.schedule, "target": record.target}

    def misnamed(self, record: LaunchRecord | None) -> str | None:
        if record is None or record.backend != self.backend:
            return f"asked for {self.backend}, {record.backend if record else 'nothing'} ran"
        if not record.kernels:
            return f"{self.name} launched no kernel"
        if self.backend != "cuda":
            return None
        schedule = cuda.SCHEDULES.get(record.schedule or "")
        if schedule is None or self.schedule not in ("auto", record.schedule):
            return f"asked for schedule {self.schedule}, {record.schedule} ran"
        entries = schedule.spec(record.target or "").entries
        if strangers := [name for name in record.kernels if name not in entries]:
            return f"schedule {record.schedule} has no kernel {', '.join(strangers)}"
        return None


def schedules_for(major: int) -> list[str]:
    """Names of the CUDA schedules that run on this major compute capability."""
    return [name for name, found in cuda.SCHEDULES.items() if major in found.capabilities]
