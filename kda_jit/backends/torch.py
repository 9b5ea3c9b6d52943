"""Last resort: the chunked form in plain torch. Any device, dtype, head size and gate.

It trades speed for three guarantees. Nothing overflows, whatever the gate: every decay is the exp
of a sum of log decays between two tokens, which is never positive. Arithmetic is float32 (float64
for float64 inputs; on a GPU, as torch's float32 matmul precision is set) with an exact triangular
solve. And a sequence's result depends, bit for bit, on nothing but its own tokens: sequences run
one at a time, through operations whose shapes are a function of the position in the sequence
alone, so no library routine can choose another order of summation because of what else is in the
batch, or of how long the sequence is.

Lengths, slots and offsets are read on the host. On the CPU that is free; on a GPU each of these
arguments costs a synchronisation, and none may be given during a CUDA graph capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kda_jit.backends.base import LaunchRecord, Query, record_launch
from kda_jit.errors import CaptureError, InputError

if TYPE_CHECKING:
    from kda_jit.contract import KdaProblem
    from kda_jit.contract.recurrent import RecurrentProblem
    from kda_jit.workspace import Workspace

#: Tokens per chunk: the checkpoint granule, so that a checkpoint is a state between two chunks.
CHUNK = 16
#: Chunks prepared together. They grow along the sequence: a short one should pay for little, a
#: long one amortise the calls. Depends on the position alone, as the module's docstring promises.
GROUPS = (1, 1, 2, 4)

_EPS = 1e-6


class TorchBackend:
    """See the module."""

    name = "torch"

    def rejects(self, query: Query) -> list[str]:
        """Accepts everything that the contract lets through."""
        return []

    @torch.no_grad()
    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        """Writes out, final states (or pool slots) and checkpoints; needs no workspace."""
        p = problem
        _refuse_capture(p)
        _refuse_inference_tensors(p)
        bounds = p.cu_seqlens.tolist() if p.cu_seqlens is not None else None
        slots = p.state_indices.tolist() if p.state_indices is not None else None
        keep = p.has_initial_state.tolist() if p.has_initial_state is not None else None
        offsets = p.checkpoint_offsets.tolist() if p.checkpoint_offsets is not None else None

        # Under autocast, torch would run our products in half precision.
        with torch.autocast(p.device.type, enabled=False):
            for n in range(p.N):
                row, begin, end = (n, 0, p.T) if bounds is None else (0, bounds[n], bounds[n + 1])
                slot = n if slots is None else slots[n]
                S = _initial_state(p, slot, keep is None or keep[n])
                _run_sequence(p, row, begin, end, S, n, 0 if offsets is None else offsets[n])
                if slot >= 0:
                    p.final_state[slot] = S
        record_launch(LaunchRecord(self.name, ("torch_chunk16",)))


class _Chunks(NamedTuple):
    """Some consecutive chunks, ready for the serial part."""

    v: Tensor  # [G, HV, C, V]
    k_decayed: Tensor  # [G, HV, C, K]
    q_decayed: Tensor  # [G, HV, C, K], times scale
    Ak: Tensor  # [G, HV, C, K], T^T k_restored
    Aq: Tensor  # [G, HV, C, C], scale A_qk T
    g_total: Tensor  # [G, HV, 1, K], decay of the whole chunk


def _run_sequence(
    p: KdaProblem, row: int, begin: int, end: int, S: Tensor, n: int, checkpoint: int
) -> None:
    """Tokens [begin, end) of batch row `row`; S [HV, V, K] is updated in place."""
    for start, size in _groups(begin, end):
        stop = min(start + size * CHUNK, end)
        c = _prepare(p, row, start, stop, size)
        out = torch.empty_like(c.v)
        for i in range(-(-(stop - start) // CHUNK)):
            R = torch.baddbmm(c.v[i], c.k_decayed[i], S.mT, alpha=-1)
            torch.bmm(c.q_decayed[i], S.mT, out=out[i])
            out[i].baddbmm_(c.Aq[i], R)
            S.mul_(c.g_total[i]).baddbmm_(R.mT, c.Ak[i])
            done = start + (i + 1) * CHUNK
            if done - begin == checkpoint and done <= end:
                assert p.checkpoint_state is not None
                p.checkpoint_state[n] = S
        p.out[row, start:stop] = out.transpose(1, 2).flatten(0, 1)[: stop - start]


def _prepare(p: KdaProblem, row: int, start: int, stop: int, size: int) -> _Chunks:
    """All that does not depend on the state, for `size` chunks of which the last may be short.

    Rows past the end have k = 0, beta = 0 and no decay, so they leave the state as it is.
    """
    dtype = arithmetic(p)
    live = stop - start

    def load(x: Tensor, dtype: torch.dtype = dtype) -> Tensor:
        """[size, heads, C, ...], contiguous, zero past the end."""
        rows = x.new_zeros((size * CHUNK, *x.shape[2:]), dtype=dtype)
        rows[:live] = x[row, start:stop]
        return rows.view(size, CHUNK, *x.shape[2:]).transpose(1, 2).contiguous()

    # Squares in float64: those of large finite inputs overflow float32.
    group = p.HV // p.H
    q = l2norm(load(p.q, torch.float64)).to(dtype).repeat_interleave(group, 1)
    k = l2norm(load(p.k, torch.float64)).to(dtype).repeat_interleave(group, 1)
    q *= p.scale
    v = load(p.v)
    valid = (torch.arange(size * CHUNK, device=q.device) < live).view(size, 1, CHUNK, 1)
    g = torch.where(valid, gate(p, load(p.g)), 0.0)
    beta = torch.where(valid, torch.sigmoid(load(p.beta)).unsqueeze(-1), 0.0)

    # Log decay from token j to token i > j: summed from j on, and not as a difference of two sums
    # from the chunk's start, which an unbounded gate of -2000 would strip of all its digits.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1).unsqueeze(-1)
    decay = torch.where(later, g.unsqueeze(3), 0.0).cumsum(2).exp_()  # [G, HV, i, j, K]
    from_start = g.cumsum(2).exp_()

    k_restored = k * decay[:, :, -1]
    decay *= k.unsqueeze(2)
    A_kk = torch.matmul(decay, k.unsqueeze(-1)).squeeze(-1)
    A_qk = torch.matmul(decay, q.unsqueeze(-1)).squeeze(-1).tril()
    T = torch.linalg.solve_triangular(
        (beta * A_kk).tril(-1), torch.diag_embed(beta.squeeze(-1)), upper=False, unitriangular=True
    )
    return _Chunks(
        v=v,
        k_decayed=k * from_start,
        q_decayed=q * from_start,
        Ak=T.mT @ k_restored,
        Aq=A_qk @ T,
        g_total=from_start[:, :, -1:],
    )


def arithmetic(p: KdaProblem | RecurrentProblem) -> torch.dtype:
    return torch.float64 if p.q.dtype is torch.float64 else torch.float32


def _initial_state(p: KdaProblem, slot: int, keep: bool) -> Tensor:
    """[HV, V, K], a copy in the dtype of the arithmetic. Zero is selected, never multiplied."""
    dtype = arithmetic(p)
    if p.initial_state is None or slot < 0 or not keep:
        return torch.zeros(p.HV, p.V, p.K, dtype=dtype, device=p.device)
    return p.initial_state[slot].to(dtype, copy=True)


def _groups(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """(first token, number of chunks) of the groups that cover [begin, end)."""
    i = 0
    while begin < end:
        size = GROUPS[min(i, len(GROUPS) - 1)]
        yield begin, size
        begin += size * CHUNK
        i += 1


def l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def gate(p: KdaProblem | RecurrentProblem, g_raw: Tensor) -> Tensor:
    """[..., HV, C, K] raw logits -> log decay. Saturates to -inf (a decay of 0), never to NaN."""
    dtype = g_raw.dtype
    most = torch.finfo(dtype).max  # an infinite factor would make NaN of a zero one
    rate = p.A_log.to(dtype).exp().clamp_max(most).view(p.HV, 1, 1)
    x = (g_raw + p.dt_bias.view(p.HV, 1, p.K)).clamp(-most, most)
    if p.lower_bound is None:
        return -rate * torch.nn.functional.softplus(x)
    return p.lower_bound * torch.sigmoid(rate * x)


def _refuse_capture(p: KdaProblem) -> None:
    if p.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return
    for name in ("cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets"):
        if getattr(p, name) is not None:
            raise CaptureError(
                f"{name}: expected None during a CUDA graph capture with backend='torch', got a "
                "tensor. This backend reads it on the host; capture 'triton' or 'cuda' instead."
            )


def _refuse_inference_tensors(p: KdaProblem) -> None:
    """Torch lets nobody write them outside inference mode, and would say so half-way through."""
    if torch.is_inference_mode_enabled():
        return
    for name in ("out", "final_state", "checkpoint_state"):
        x = getattr(p, name)
        if x is not None and x.is_inference():
            raise InputError(
                f"{name}: expected a tensor that may be written here, got one that was made under "
                "torch.inference_mode(). Call under it too, or make the tensor outside."
            )
