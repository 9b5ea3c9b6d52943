"""Inputs in any form, in plain torch: the last resort, as exact as the prefill's torch backend.

A chunk at a time, in operations whose shapes depend on nothing but the sizes of a head, so that a
sequence's result does not depend on what else is in the batch. Every decay is the exp of a sum of
log decays between two tokens and never a quotient, so nothing overflows for log decays up to 0.
cu_seqlens are read on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kda_jit.backends.base import LaunchRecord, Query, record_launch
from kda_jit.backends.torch import CHUNK, arithmetic, gate, l2norm
from kda_jit.errors import CaptureError

if TYPE_CHECKING:
    from kda_jit.chunk.forms import Forms
    from kda_jit.contract import KdaProblem
    from kda_jit.workspace import Workspace


class TorchForms:
    """See the module."""

    name = "torch"

    def __init__(self, forms: Forms) -> None:
        self.forms = forms

    def rejects(self, query: Query) -> list[str]:
        """Accepts everything that the contract lets through."""
        return []

    @torch.no_grad()
    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        """Writes out and final states; needs no workspace."""
        p = problem._replace(lower_bound=self.forms.lower_bound)
        if p.cu_seqlens is not None and p.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "cu_seqlens: expected None during a CUDA graph capture with backend='torch', got a "
                "tensor. This backend reads it on the host; capture 'triton' or 'cuda' instead."
            )
        ends = p.cu_seqlens.tolist() if p.cu_seqlens is not None else None
        dtype = arithmetic(p)
        # Under autocast, torch would run our products in half precision.
        with torch.autocast(p.device.type, enabled=False):
            for n in range(p.N):
                row, begin, end = (n, 0, p.T) if ends is None else (0, ends[n], ends[n + 1])
                if p.initial_state is None:
                    S = torch.zeros(p.HV, p.V, p.K, dtype=dtype, device=p.device)
                else:
                    S = p.initial_state[n].to(dtype, copy=True)
                for start in range(begin, end, CHUNK):
                    stop = min(start + CHUNK, end)
                    out = _advance(p, self.forms, row, start, stop, S)
                    p.out[row, start:stop] = out[:, : stop - start].transpose(0, 1)
                p.final_state[n] = S
        record_launch(LaunchRecord(self.name, ("torch_forms_chunk16",)))


def _advance(p: KdaProblem, forms: Forms, row: int, start: int, stop: int, S: Tensor) -> Tensor:
    """The output [HV, CHUNK, V] of tokens [start, stop); S [HV, V, K] is updated in place.

    Rows past the end have k = 0, beta = 0 and no decay, so they leave the state as it is.
    """
    dtype = arithmetic(p)
    live = stop - start

    def load(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        """[heads, CHUNK, ...], zero past the end."""
        rows = x.new_zeros((CHUNK, *x.shape[2:]), dtype=dtype)
        rows[:live] = x[row, start:stop]
        return rows.transpose(0, 1).contiguous()

    def load_qk(x: Tensor) -> Tensor:
        # Squares in float64: those of large finite inputs overflow float32.
        x = l2norm(load(x, torch.float64)).to(dtype) if forms.normalize else load(x)
        return x.repeat_interleave(p.HV // p.H, 0)

    q, k, v = load_qk(p.q) * p.scale, load_qk(p.k), load(p.v)
    valid = (torch.arange(CHUNK, device=p.device) < live).unsqueeze(1)
    g, beta = load(p.g), load(p.beta)
    if forms.gate != "log":
        g = torch.where(valid, gate(p, g), 0.0)
    if forms.sigmoid:
        beta = torch.sigmoid(beta) * forms.beta_scale
    beta = torch.where(valid, beta.unsqueeze(-1), 0.0)

    # Log decay from token j to token i > j, summed from j on.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=p.device).tril(-1).unsqueeze(-1)
    decay = torch.where(later, g.unsqueeze(2), 0.0).cumsum(1).exp_()  # [HV, i, j, K]
    from_start = g.cumsum(1).exp_()
    k_restored = k * decay[:, -1]
    k_seen = decay.mul_(k.unsqueeze(1))  # key j as token i sees it
    A_kk = (k_seen @ k.unsqueeze(-1)).squeeze(-1)
    A_qk = (k_seen @ q.unsqueeze(-1)).squeeze(-1).tril()
    R = v - (k * from_start) @ S.mT
    u = torch.linalg.solve_triangular(
        (beta * A_kk).tril(-1), beta * R, upper=False, unitriangular=True
    )
    out = (q * from_start) @ S.mT + A_qk @ u
    S.mul_(from_start[:, -1:]).add_(u.mT @ k_restored)
    return out
