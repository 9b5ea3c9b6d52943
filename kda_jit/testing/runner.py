"""What a law is tried on: the reference, a backend of ours by name, or anybody's function.

A Subject runs prefills and says how exact it has to be, what it does not claim to do, and whether
equal work gives equal bits.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

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

#: What a prefill may do beyond packed sequences, fp32 states, a bounded gate and HV = H.
FEATURES: dict[str, str] = {
    "dense": "batches without cu_seqlens",
    "grouped": "more value heads than query heads",
    "unbounded": "the softplus gate (lower_bound=None)",
    "bf16_state": "an initial state in bf16",
    "padding": "rows past the last sequence",
    "strided": "q, k, v, g, beta as column slices of one projection",
    "buffers": "the caller's out and final_state",
    "pool": "states in slots of a pool (state_indices, has_initial_state)",
    "checkpoint": "the state at an offset inside a sequence (checkpoint_state, checkpoint_offsets)",
    "graph": "capture in a CUDA graph",
}


class Subject(Protocol):
    """Something that computes a prefill."""

    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs: the one in which this subject's own errors show best."""
        ...

    @property
    def head_dim(self) -> int: ...

    @property
    def bitwise(self) -> bool:
        """Whether equal work gives equal bits whatever else is in the batch."""
        ...

    @property
    def lacks(self) -> Mapping[str, str]:
        """Of FEATURES, those that it does not claim, each with the reason."""
        ...

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        """(out, final_state), by this subject and no other.

        buffers  any further arguments of `kda_jit.prefill`; they win over those of `inputs`.
        """
        ...

    def limits(self, inputs: Inputs, want: RecurrentResult | None = None) -> tuple[Limit, Limit]:
        """What out and state may err on these inputs. `want`: the recurrence, if known already."""
        ...


@dataclass(frozen=True)
class Runner:
    """The reference, or one backend of ours and no other."""

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
        """Not the reference: it works on sequences side by side, and a library may sum in another
        order for another number of them.
        """
        return self.name != "reference"

    @property
    def lacks(self) -> Mapping[str, str]:
        found = {}
        if self.name == "cuda":
            found["unbounded"] = "the cuda backend has a bounded gate only"
        if self.device.type != "cuda":
            found["graph"] = "a CUDA graph needs a GPU"
        elif self.name in ("reference", "torch"):
            found["graph"] = f"{self.name} reads lengths on the host"
        return found

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
        return rounding_limits(inputs, torch.float32 if self.name == "torch" else None, want)


@dataclass(frozen=True)
class Function:
    """Anybody's function that takes arguments of `kda_jit.prefill` by the same names.

    q, k, v, g, beta by position; the rest by keyword. What its signature does not name, it does not
    claim; of what a signature cannot say (dense batches, HV > H, a softplus gate, ...) it raises
    NotImplementedError, whose words the report repeats.
    """

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 128
    bitwise: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _named(self) -> frozenset[str] | None:
        """Parameters of the function; None where it takes any."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # written in another language
            return None
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return None
        return frozenset(parameters)

    @cached_property
    def lacks(self) -> Mapping[str, str]:
        needed = {
            "buffers": ("out", "final_state"),
            "pool": ("state_indices", "has_initial_state"),
            "checkpoint": ("checkpoint_state", "checkpoint_offsets"),
        }
        found = {}
        for feature, names in needed.items():
            if absent := [n for n in names if self._named is not None and n not in self._named]:
                found[feature] = f"{self.name} has no argument {', '.join(absent)}"
        if self.device.type != "cuda":
            found["graph"] = "a CUDA graph needs a GPU"
        elif "buffers" in found:
            found["graph"] = found["buffers"]
        return found

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        arguments = inputs.kwargs | buffers
        if self._named is not None:
            given = [n for n, x in arguments.items() if x is not None]
            if unknown := [n for n in given if n not in self._named]:
                raise NotImplementedError(f"{self.name} has no argument {', '.join(unknown)}")
            arguments = {n: x for n, x in arguments.items() if n in self._named}
        with torch.no_grad():
            return self.function(*inputs.args, **arguments, **self.options)

    def limits(self, inputs: Inputs, want: RecurrentResult | None = None) -> tuple[Limit, Limit]:
        wide = self.dtype in (torch.float32, torch.float64)
        return rounding_limits(inputs, torch.float32 if wide else None, want)


def rounding_limits(
    inputs: Inputs, operands: torch.dtype | None, want: RecurrentResult | None = None
) -> tuple[Limit, Limit]:
    """What out and state may err: a few times what the chunked form loses with such operands.

    operands  torch.float32, or None for bf16
    """
    loss = plain_loss(inputs, want, operands=operands or torch.bfloat16)
    return rounding_limit(loss.out, operands), rounding_limit(loss.state, operands)


def rounding_limit(loss: float, operands: torch.dtype | None) -> Limit:
    """Where the chunked form loses so much."""
    if operands is torch.float32:
        return Limit(loss, 8.0, 2e-6, "plain float32 operands")
    return Limit(loss)


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
