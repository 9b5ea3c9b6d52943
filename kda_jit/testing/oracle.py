"""The whole contract of a call, buffers and pools included, by way of the reference."""

from __future__ import annotations

import torch

from kda_jit.contract import KdaProblem
from kda_jit.contract.recurrent import RecurrentProblem
from kda_jit.reference import recurrent_kda


def run_reference(problem: KdaProblem, dtype: torch.dtype = torch.float64) -> None:
    """What a backend's `run` must do, computed by `recurrent_kda` in `dtype`.

    A law is tried on this first: a law that it breaks is a wrong law.
    """
    p = problem
    slots = list(range(p.N)) if p.state_indices is None else p.state_indices.tolist()
    fresh = [slot < 0 for slot in slots]
    if p.has_initial_state is not None:
        flags = p.has_initial_state.tolist()
        fresh = [f or not has for f, has in zip(fresh, flags, strict=True)]

    initial = None
    if p.initial_state is not None:
        initial = torch.zeros(p.N, p.HV, p.V, p.K, dtype=dtype, device=p.device)
        for n, slot in enumerate(slots):
            if not fresh[n]:
                initial[n] = p.initial_state[slot]
    result = recurrent_kda(
        p.q,
        p.k,
        p.v,
        p.g,
        p.beta,
        A_log=p.A_log,
        dt_bias=p.dt_bias,
        lower_bound=p.lower_bound,
        scale=p.scale,
        initial_state=initial,
        cu_seqlens=p.cu_seqlens,
        checkpoint_offsets=p.checkpoint_offsets,
        dtype=dtype,
    )
    tokens = p.T if p.cu_seqlens is None else int(p.cu_seqlens[-1])
    p.out[:, :tokens] = result.out[:, :tokens].to(p.out.dtype)
    for n, slot in enumerate(slots):
        if slot >= 0:
            p.final_state[slot] = result.final_state[n].to(p.final_state.dtype)
    if p.checkpoint_state is not None:
        assert p.checkpoint_offsets is not None
        assert result.checkpoint_state is not None
        for n, offset in enumerate(p.checkpoint_offsets.tolist()):
            if offset > 0:
                p.checkpoint_state[n] = result.checkpoint_state[n].to(p.checkpoint_state.dtype)


def run_recurrent_reference(problem: RecurrentProblem, dtype: torch.dtype = torch.float64) -> None:
    """What a backend must do for `kda_jit.recurrent`, by `recurrent_kda` over one token at a time.

    From token to token the state stays in `dtype`, whatever is stored of it on the way.
    """
    p = problem

    def is_slot(index: int) -> bool:
        return 0 <= index < p.state_pool.shape[0] and index != p.null_index

    ends = None if p.cu_seqlens is None else p.cu_seqlens.tolist()
    accepted = [1] * p.N if p.num_accepted_tokens is None else p.num_accepted_tokens.tolist()
    has = [True] * p.N if p.has_initial_state is None else p.has_initial_state.tolist()
    for n, columns in enumerate(p.state_indices.tolist()):
        row, begin, end = (n, 0, p.T) if ends is None else (0, ends[n], ends[n + 1])
        too_long = p.per_token and end - begin > len(columns)
        start = columns[accepted[n] - 1] if 1 <= accepted[n] <= len(columns) else -1
        if too_long or not is_slot(start):
            p.out[row, begin:end] = 0.0
            continue
        state = p.state_pool[start : start + 1].to(dtype)
        if not has[n]:
            state = torch.zeros_like(state)
        for t in range(begin, end):
            token = slice(row, row + 1), slice(t, t + 1)
            result = recurrent_kda(
                *(x[token] for x in (p.q, p.k, p.v, p.g, p.beta)),
                A_log=p.A_log,
                dt_bias=p.dt_bias,
                lower_bound=p.lower_bound,
                scale=p.scale,
                initial_state=state,
                dtype=dtype,
            )
            p.out[token] = result.out.to(p.out.dtype)
            state = result.final_state
            target = columns[t - begin if p.per_token else 0]
            if p.write_state and (p.per_token or t == end - 1) and is_slot(target):
                p.state_pool[target] = state[0].to(p.state_pool.dtype)
