"""What a benchmark calls: a backend of ours under a schedule, or a peer, behind one interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit.api import prefill
from kda_jit.backends import cuda
from kda_jit.backends.base import LaunchRecord
from kda_jit.testing import Inputs

#: One prefill over bound inputs: returns (out, final_state).
Call = Callable[[], tuple[Tensor, Tensor]]


class Subject(Protocol):
    """Something that computes a prefill. `name` is what reports call it."""

    @property
    def name(self) -> str: ...

    def activate(self) -> None:
        """Makes the calls that follow this subject's own; outside of any timed region."""
        ...

    def bind(self, inputs: Inputs) -> Call:
        """A call over `inputs` that allocates nothing it can allocate here.

        Buffers hold NaN until the first call, so that a row which it leaves out shows.
        """
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

    def misnamed(self, record: LaunchRecord | None) -> str | None:
        """Why `record`, of the last launch, is not this subject's; None if it is."""
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
