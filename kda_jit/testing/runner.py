"""One way to run a prefill, as the property tests see it: the reference or a named backend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_jit.api import prefill
from kda_jit.backends.base import last_launch
from kda_jit.contract import make_problem
from kda_jit.errors import NoBackendError
from kda_jit.reference import RecurrentResult
from kda_jit.resolver import resolve_backend

from .cases import Inputs
from .numeric import Limit, plain_loss
from .oracle import run_reference

#: In the order in which a law is tried: a law that the reference breaks is a wrong law.
RUNNERS = ("reference", "torch", "triton", "cuda")


@dataclass(frozen=True)
class Runner:
    """Runs prefills through one backend and knows how exact it has to be."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs: the one in which this runner's own errors show best."""
        if self.name == "reference":
            return torch.float64
        if self.name == "torch" or self.device.type == "cpu":
            return torch.float32
        return torch.bfloat16

    @property
    def head_dim(self) -> int:
        return 128 if self.device.type == "cuda" else 32

    @property
    def bitwise(self) -> bool:
        """Whether equal work gives equal bits whatever else is in the batch.

        Not the reference: it works on sequences side by side, and a library may sum in another
        order for another number of them.
        """
        return self.name != "reference"

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        """(out, final_state), by this runner and no other.

        buffers  any further arguments of `kda_jit.prefill`; they win over those of `inputs`.
        """
        arguments = inputs.kwargs | buffers
        if self.name == "reference":
            problem = make_problem(*inputs.args, **arguments)
            run_reference(problem)
            return problem.out, problem.final_state

        result = prefill(*inputs.args, **arguments, backend=self.name)
        launch = last_launch()
        ran = None if launch is None else launch.backend
        assert ran in (self.name, "none"), f"asked for {self.name}, {ran} ran"
        return result

    def limits(self, inputs: Inputs, want: RecurrentResult | None = None) -> tuple[Limit, Limit]:
        """What out and state may err on these inputs. `want`: the recurrence, if known already."""
        if self.name == "reference":  # its states pass through float32 between two calls
            exact = Limit(0.0, slack=1e-6)
            return exact, exact
        if self.name == "torch":
            loss = plain_loss(inputs, want, operands=torch.float32)
            factor, slack, label = 8.0, 2e-6, "plain float32 operands"
        else:
            loss = plain_loss(inputs, want)
            factor, slack, label = 2.0, 4e-4, "plain torch bf16"
        return Limit(loss.out, factor, slack, label), Limit(loss.state, factor, slack, label)


def why_not(name: str, device: torch.device) -> str | None:
    """Why this runner cannot run on `device`; None if it can. The words are the resolver's."""
    if name in ("reference", "torch"):
        return None
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton on the CPU needs TRITON_INTERPRET=1"
    runner = Runner(name, device)
    try:
        resolve_backend(
            name,
            head_dim=runner.head_dim,
            dtype=runner.dtype,
            lower_bound=-5.0,
            device=device,
        )
    except NoBackendError as error:
        return str(error)
    return None
