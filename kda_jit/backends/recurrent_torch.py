"""Decode and verification in plain torch: the recurrence, for any device, dtype and head size.

One sequence and one token at a time, through operations whose shapes no neighbour can change, so
that a sequence's result depends bit for bit on nothing but its own tokens and state. Lengths and
slots are read on the host: on a GPU that waits for it, and a CUDA graph capture is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kda_jit.backends.base import LaunchRecord, record_launch
from kda_jit.backends.torch import arithmetic, gate, l2norm
from kda_jit.errors import CaptureError

if TYPE_CHECKING:
    from kda_jit.contract.recurrent import RecurrentProblem


@torch.no_grad()
def run(problem: RecurrentProblem) -> None:
    """Writes ``out`` and the slots of the pool. Ends with ``record_launch``."""
    p = problem
    if p.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "recurrent: expected no CUDA graph capture with backend='torch', got one. This backend "
            "reads state_indices on the host; capture 'triton' instead."
        )
    ends = p.cu_seqlens.tolist() if p.cu_seqlens is not None else None
    table = p.state_indices.tolist()
    accepted = [1] * p.N if p.num_accepted_tokens is None else p.num_accepted_tokens.tolist()
    has = None if p.has_initial_state is None else p.has_initial_state.tolist()
    # Under autocast, torch would run our products in half precision.
    with torch.autocast(p.device.type, enabled=False):
        for n, columns in enumerate(table):
            row, begin, end = (n, 0, p.T) if ends is None else (0, ends[n], ends[n + 1])
            slots = [slot if _is_slot(p, slot) else -1 for slot in columns]
            start = slots[accepted[n] - 1] if 1 <= accepted[n] <= len(slots) else -1
            if p.per_token:
                start = start if end - begin <= len(slots) else -1
            else:
                slots = [-1] * (end - begin - 1) + slots
            if start < 0:
                p.out[row, begin:end] = 0
            else:
                fresh = has is not None and not has[n]
                _run_sequence(p, row, begin, end, None if fresh else start, slots)
    record_launch(LaunchRecord("torch", ("torch_recurrent",)))


def _is_slot(p: RecurrentProblem, slot: int) -> bool:
    return 0 <= slot < p.state_pool.shape[0] and slot != p.null_index


def _run_sequence(
    p: RecurrentProblem, row: int, begin: int, end: int, start: int | None, slots: list[int]
) -> None:
    """Tokens [begin, end) of a batch row; slots has one for the state after each, -1 for none.

    start  the slot of the state before; None: it is zero
    """
    dtype = arithmetic(p)
    group = p.HV // p.H
    if start is None:
        S = p.state_pool.new_zeros((p.HV, p.V, p.K), dtype=dtype)
    else:
        S = p.state_pool[start].to(dtype, copy=True)
    for t, slot in zip(range(begin, end), slots):
        # Squares in float64: those of large finite inputs overflow float32.
        q, k = (
            l2norm(x[row, t].double()).to(dtype).repeat_interleave(group, 0).unsqueeze(-1)
            for x in (p.q, p.k)
        )
        v = p.v[row, t].to(dtype).unsqueeze(-1)
        beta = torch.sigmoid(p.beta[row, t].to(dtype)).view(p.HV, 1, 1)
        S *= gate(p, p.g[row, t].to(dtype).unsqueeze(1)).exp()
        u = beta * (v - torch.bmm(S, k))
        S += u * k.mT
        p.out[row, t] = p.scale * torch.bmm(S, q).squeeze(-1)
        if p.write_state and slot >= 0:
            p.state_pool[slot] = S
