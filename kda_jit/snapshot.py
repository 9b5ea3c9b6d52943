"""What of a problem goes into a file: its arguments before it runs, what it wrote after."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from kda_jit.callfile import Call, to_host
from kda_jit.contract import KdaProblem
from kda_jit.contract.recurrent import RecurrentProblem

_TOKENS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclass(frozen=True)
class Snapshot:
    """A call about to be made. Nothing is copied before `call` and `written` are.

    inputs, results  tensors by their names as arguments; the results are the very buffers that the
                     call writes
    numbers          the other arguments
    pools            of which inputs and results only these rows count
    """

    function: str
    inputs: dict[str, Tensor]
    numbers: dict[str, float | bool | None]
    results: dict[str, Tensor]
    state_dtype: torch.dtype = torch.float32
    pools: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of the tensors in the file."""
        both = (*self.inputs.items(), *self.results.items())
        return sum(self._rows(name, x) * prod(x.shape[1:]) * x.element_size() for name, x in both)

    def call(self) -> Call:
        """Copies on the host of all that is given."""
        copies = {name: self._copy(name, x) for name, x in self.inputs.items()}
        facts = {
            "strides": json.dumps(
                {name: x.stride() for name, x in self.inputs.items() if not x.is_contiguous()}
            )
        }
        if self.pools:
            slots = next(iter(self.pools.values()))
            facts["slots"] = ",".join(map(str, slots.tolist()))
        return Call(self.function, copies | self.numbers, state_dtype=self.state_dtype, facts=facts)

    def written(self) -> dict[str, Tensor]:
        """Copies on the host of all that the call wrote, once it ran. Waits for the GPU."""
        return {name: self._copy(name, x) for name, x in self.results.items()}

    def _rows(self, name: str, x: Tensor) -> int:
        return len(self.pools[name]) if name in self.pools else len(x)

    def _copy(self, name: str, x: Tensor) -> Tensor:
        return to_host(x.detach()[self.pools[name].to(x.device)] if name in self.pools else x)


def of_prefill(p: KdaProblem) -> Snapshot:
    """Reads `state_indices` on the host."""
    names = (
        *_TOKENS, "initial_state", "cu_seqlens", "has_initial_state", "checkpoint_state",
        "checkpoint_offsets",
    )  # fmt: skip
    inputs = _given(p, names)
    results = {"out": p.out, "final_state": p.final_state}
    if p.checkpoint_state is not None:
        results["checkpoint_state"] = p.checkpoint_state
    pools = {}
    if p.state_indices is not None:
        slots, inputs["state_indices"] = compact(p.state_indices, len(p.final_state))
        pools = {"initial_state": slots, "final_state": slots}
    numbers = {"lower_bound": p.lower_bound, "scale": p.scale}
    return Snapshot("prefill", inputs, numbers, results, p.final_state.dtype, pools)


def of_recurrent(p: RecurrentProblem) -> Snapshot:
    """Reads `state_indices` on the host. In the file no index but a negative one means no slot."""
    names = (*_TOKENS, "state_pool", "num_accepted_tokens", "has_initial_state", "cu_seqlens")
    inputs = _given(p, names)
    slots, indices = compact(p.state_indices, len(p.state_pool), p.null_index)
    inputs["state_indices"] = indices if p.per_token else indices[:, 0]
    results = {"out": p.out} | ({"state_pool": p.state_pool} if p.write_state else {})
    return Snapshot(
        "recurrent",
        inputs,
        {"lower_bound": p.lower_bound, "scale": p.scale, "write_state": p.write_state},
        results,
        pools={"state_pool": slots},
    )


def compact(indices: Tensor, size: int, null: int = -1) -> tuple[Tensor, Tensor]:
    """(the slots of a pool of `size` that are named, `indices` into just those), on the host.

    What means no slot becomes -1; what lies beyond the pool lies as far beyond the smaller one. The
    first slot is kept where none is named, since a pool has at least one.
    """
    given = indices.detach().cpu().long()
    named = (given >= 0) & (given < size) & (given != null)
    slots, inside = given[named].unique(return_inverse=True)
    if not len(slots):
        slots = given.new_zeros(min(size, 1))
    found = torch.where((given >= size) & (given != null), given - size + len(slots), -1)
    found[named] = inside
    return slots, found.to(indices.dtype)


def _given(p: object, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: x for name in names if (x := getattr(p, name)) is not None}
