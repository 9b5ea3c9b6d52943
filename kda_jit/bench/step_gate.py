"""The gate of steps: every output row and every slot of the pool against the float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_jit.reference import recurrent_kda
from kda_jit.testing import Inputs, Limit

from .gate import Exact, Verdict, WrongResult, compare, run_once
from .steps import StepInputs
from .subject import Own

#: A recurrent kernel computes in fp32: all it loses is the rounding of a bf16 output.
FINE = (Limit(5e-3, 1.0, 0.0, "rounding"), Limit(3e-4, 1.0, 0.0, "fp32 arithmetic"))


@dataclass(frozen=True)
class Group:
    """Sequences that a step treats alike, and where what it writes of them lies.

    rows   tokens of the step, in the order of the group
    slots  of the pool, in the order of the exact states
    """

    name: str
    rows: Tensor
    slots: Tensor
    exact: Exact


class StepGate:
    """A step's exact results, computed once for all subjects."""

    def __init__(self, inputs: StepInputs) -> None:
        self.inputs = inputs
        found = (_non_speculative(inputs), _speculative(inputs))
        self.groups = [group for group in found if group is not None]
        touched = torch.zeros(inputs.pool.shape[0], dtype=torch.bool, device=inputs.device)
        for group in self.groups:
            touched[group.slots] = True
        self._others = torch.where(~touched)[0]

    def check(self, subject: Own, baseline: Own | None = None) -> Verdict:
        """Raises WrongResult where `subject` computes or writes something else.

        baseline  not needed: every head is compared with float64
        """
        out, pool, record = run_once(subject, self.inputs)
        errors = []
        for group in self.groups:
            name = f"{subject.name}, {group.name}"
            got = out[:, group.rows], pool[group.slots]
            errors.append(compare(name, got, group.exact))
        if not torch.equal(pool[self._others], self.inputs.pool[self._others]):
            raise WrongResult(f"{subject.name}: wrote to slots of the pool that are nobody's")
        return Verdict(record, max(e[0] for e in errors), max(e[1] for e in errors))


def _non_speculative(x: StepInputs) -> Group | None:
    m = x.metadata
    if m.non_spec_state_indices is None:
        return None
    slots = m.non_spec_state_indices.long()
    initial = x.pool[slots]
    if m.has_initial_state is not None:
        initial[~m.has_initial_state] = 0
    rows = _rows(x, m.non_spec_token_indx)
    inputs = _inputs(x, rows, initial, m.non_spec_query_start_loc)
    exact = inputs.reference()
    if m.num_prefills:  # whose kernels may run the decodes, too
        found = Exact.of(inputs, exact)
    else:
        found = Exact(inputs, (exact.out, exact.final_state), FINE)
    return Group("non-speculative", rows, slots, found)


def _speculative(x: StepInputs) -> Group | None:
    """Sequences of equal length, so that a token of each is one dense batch."""
    m = x.metadata
    if m.spec_state_indices is None:
        return None
    assert m.num_accepted_tokens is not None
    columns = m.spec_state_indices.long()
    S, C = columns.shape
    start = columns.gather(1, m.num_accepted_tokens.long().unsqueeze(1) - 1).squeeze(1)
    rows = _rows(x, m.spec_token_indx)
    inputs = _inputs(x, rows, x.pool[start], m.spec_query_start_loc)
    tokens = [y.unflatten(1, (S, C)).squeeze(0) for y in inputs.args]
    outs, states = [], []
    state = inputs.initial_state
    for j in range(C):
        result = recurrent_kda(
            *(y[:, j : j + 1] for y in tokens), **inputs.kwargs | _dense(state), dtype=torch.float64
        )
        state = result.final_state
        outs.append(result.out)
        states.append(state)
    out = torch.cat(outs, 1).flatten(0, 1).unsqueeze(0)
    exact = Exact(inputs, (out, torch.stack(states, 1).flatten(0, 1)), FINE)
    return Group("speculative", rows, columns.flatten(), exact)


def _dense(state: Tensor | None) -> dict[str, Any]:
    return {"initial_state": state, "cu_seqlens": None}


def _rows(x: StepInputs, tokens: Tensor | None) -> Tensor:
    """Tokens of a group: those given, or, of a group that is alone, all."""
    return torch.arange(x.g.shape[1], device=x.device) if tokens is None else tokens


def _inputs(x: StepInputs, rows: Tensor, initial: Tensor, start_loc: Tensor | None) -> Inputs:
    """A group as a packed batch."""
    q, k, v, g, beta = (y[:, rows] for y in x.tokens)
    return Inputs(
        q=q, k=k, v=v, g=g, beta=beta, A_log=x.A_log, dt_bias=x.dt_bias,
        lower_bound=x.lower_bound, scale=None, initial_state=initial, cu_seqlens=start_loc,
    )  # fmt: skip
