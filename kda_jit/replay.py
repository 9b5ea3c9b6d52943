"""A call from a file, made again: by a backend, and by the float64 recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kda_jit.api import prefill
from kda_jit.callfile import Call
from kda_jit.contract import make_problem
from kda_jit.contract.recurrent import make_recurrent_problem
from kda_jit.recurrent import recurrent
from kda_jit.testing.oracle import run_recurrent_reference, run_reference


@torch.no_grad()
def replay(call: Call, backend: str = "auto") -> dict[str, Tensor]:
    """What the call writes, by name: out, then final_state and checkpoint_state, or state_pool.

    The call's own tensors stay as they are. Raises what the function raises.
    """
    given = fresh(call)
    if call.function == "recurrent":
        out = recurrent(**given, backend=backend)
        return {"out": out} | _kept(given, "state_pool" if _writes(call) else None)
    out, state = prefill(**given, backend=backend)
    return {"out": out, "final_state": state} | _kept(given, "checkpoint_state")


@torch.no_grad()
def exact(call: Call) -> dict[str, Tensor]:
    """The same by the recurrence, token by token, all in float64."""
    given = fresh(call)
    if call.function == "recurrent":
        step = make_recurrent_problem(**given)
        step = step._replace(out=step.out.double().zero_(), state_pool=step.state_pool.double())
        run_recurrent_reference(step)
        return {"out": step.out} | ({"state_pool": step.state_pool} if _writes(call) else {})
    whole = make_problem(**given)
    checkpoint = whole.checkpoint_state
    whole = whole._replace(
        out=torch.zeros_like(whole.v, dtype=torch.float64),
        final_state=whole.final_state.double(),
        checkpoint_state=None if checkpoint is None else checkpoint.double(),
    )
    run_reference(whole)
    return {"out": whole.out, "final_state": whole.final_state} | (
        {} if whole.checkpoint_state is None else {"checkpoint_state": whole.checkpoint_state}
    )


def same_bits(call: Call, name: str, a: Tensor, b: Tensor) -> bool:
    """Whether two results of that name agree to the bit, rows past the last sequence aside."""
    ends = call.arguments.get("cu_seqlens")
    if name == "out" and ends is not None:
        a, b = (x[:, : int(ends[-1])] for x in (a, b))
    return a.dtype is b.dtype and torch.equal(*(as_bytes(x) for x in (a, b)))


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _writes(call: Call) -> bool:
    return bool(call.arguments.get("write_state", True))


def _kept(given: dict[str, Any], name: str | None) -> dict[str, Tensor]:
    return {name: given[name]} if name in given else {}


def fresh(call: Call) -> dict[str, Any]:
    """The arguments, with copies of the buffers that the call writes."""
    given = dict(call.arguments)
    written = {"state_pool", "checkpoint_state"}
    if "state_indices" in given:
        written.add("initial_state")
    for name in written & given.keys():
        given[name] = given[name].clone()
    if call.state_dtype is not torch.float32 and "state_indices" not in given:
        states = make_problem(**given).final_state  # which refuses what has other shapes
        given["final_state"] = torch.empty_like(states, dtype=call.state_dtype)
    return given
