"""The argument contract of :func:`kda_jit.recurrent`; what it shares with a prefill is reused."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from kda_jit.contract.checks import (
    INDEX_DTYPES,
    check_contents,
    check_grad,
    check_lower_bound,
    check_per_sequence,
    check_scale,
    check_state,
)
from kda_jit.contract.layout import TENSORS, find_layout
from kda_jit.contract.memory import address_range, check_aliasing
from kda_jit.contract.words import kind_of, refuse_device, refuse_dtype, refuse_shape
from kda_jit.errors import InputError, InputTypeError


class RecurrentProblem(NamedTuple):
    """One legal decode or verification: every tensor in the layout that the backends expect.

    q, k         [B, T, H, K]    bf16, fp16, fp32 or fp64; as given, so maybe token-strided
    v, out       [B, T, HV, V]   dtype of q
    g            [B, T, HV, K]   dtype of q or fp32; raw gate logits
    beta         [B, T, HV]      dtype of q or fp32; raw logits
    A_log        [HV]            fp32, contiguous
    dt_bias      [HV * K]        fp32, contiguous
    lower_bound  None is the unbounded gate, otherwise in [-5, 0)
    scale        finite
    state_pool   [slots, HV, V, K]  fp32 or bf16, dense inside a slot
    state_indices [N, columns]   int32 or int64, any strides
    num_accepted_tokens [N]      int32 or int64, any positive stride; None: all 1
    has_initial_state [N]        bool, contiguous; False selects a zero initial state
    cu_seqlens   [N + 1]         int32 or int64, contiguous; None: B sequences of T tokens
    null_index   an index that means no slot, as every negative one does
    write_state  False: the pool is only read
    per_token    True: the state after token j goes to column j. False: there is one column, and the
                 state after the last token goes to it
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    scale: float
    state_pool: Tensor
    state_indices: Tensor
    num_accepted_tokens: Tensor | None
    has_initial_state: Tensor | None
    cu_seqlens: Tensor | None
    null_index: int
    write_state: bool
    per_token: bool
    out: Tensor
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def columns(self) -> int:
        """1 + num_spec."""
        return self.state_indices.shape[1]

    @property
    def is_empty(self) -> bool:
        """No token at all."""
        return self.T == 0 or self.N == 0


def make_recurrent_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    state_pool: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_index: int | None = None,
    write_state: bool = True,
    out: Tensor | None = None,
) -> RecurrentProblem:
    """Checks the arguments of :func:`kda_jit.recurrent` (which see) and fills in the defaults.

    Raises what `make_problem` raises. Allocates ``out`` last, and only where there is none.
    """
    if isinstance(q, Tensor) and q.dim() == 3:
        axis = 1 if cu_seqlens is None else 0
        q = q.unsqueeze(axis)
        k = _lifted("k", k, 3, "[T, H, K]", axis)
        v = _lifted("v", v, 3, "[T, HV, V]", axis)
        g = _lifted("g", g, 3, "[T, HV, K]", axis)
        beta = _lifted("beta", beta, 2, "[T, HV]", axis)
        if out is not None:
            out = _lifted("out", out, 3, "[T, HV, V]", axis)
    # -- what a prefill has, too -----------------------------------------------------------------
    given = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out,
        "A_log": A_log, "dt_bias": dt_bias, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    layout, addresses = find_layout(tuple(map(given.get, TENSORS)))
    N, HV, V, K = layout.N, layout.HV, layout.V, layout.K

    # -- the pool and what points into it --------------------------------------------------------
    index = q.get_device()
    if not isinstance(write_state, bool):
        raise InputTypeError(f"write_state: expected a bool, got {kind_of(write_state)}.")
    pool_bytes, _ = check_state("state_pool", state_pool, None, (N, HV, V, K), index, write_state)
    _check_indices(state_indices, N, index)
    if num_accepted_tokens is not None:
        check_per_sequence(
            "num_accepted_tokens", num_accepted_tokens, N, INDEX_DTYPES, index, strided=True
        )
    if has_initial_state is not None:
        check_per_sequence("has_initial_state", has_initial_state, N, (torch.bool,), index)
    per_token = state_indices.dim() == 2
    if not per_token:
        state_indices = state_indices.unsqueeze(1)

    # -- numbers, grad, aliasing, contents -------------------------------------------------------
    if null_index is not None and (
        isinstance(null_index, bool) or not isinstance(null_index, Integral)
    ):
        raise InputTypeError(f"null_index: expected an int or None, got {kind_of(null_index)}.")
    if lower_bound is not None:
        lower_bound = check_lower_bound(lower_bound)
    scale = K**-0.5 if scale is None else check_scale(scale)
    tensors: dict[str, Tensor | None] = given | {
        "state_pool": state_pool,
        "state_indices": state_indices,
        "num_accepted_tokens": num_accepted_tokens,
        "has_initial_state": has_initial_state,
    }
    if torch.is_grad_enabled():
        check_grad(list(tensors), list(tensors.values()))
    spans = {
        name: (start, start + size)
        for name, start, (size, _) in zip(TENSORS, addresses, layout.extents, strict=True)
    }
    start = state_pool.data_ptr()
    spans["state_pool"] = start, start + pool_bytes
    spans["state_indices"] = address_range(state_indices)
    if num_accepted_tokens is not None:
        spans["num_accepted_tokens"] = address_range(num_accepted_tokens)
    if has_initial_state is not None:
        spans["has_initial_state"] = address_range(has_initial_state)
    written = (["state_pool"] if write_state else []) + ([] if out is None else ["out"])
    if any(_meets(spans, name) for name in written):
        read = {name: x for name, x in tensors.items() if name not in written}
        check_aliasing({name: tensors[name] for name in written}, read)
    problem = RecurrentProblem(
        q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, state_pool, state_indices,
        num_accepted_tokens, has_initial_state, cu_seqlens,
        -1 if null_index is None else int(null_index), write_state, per_token,
        v if out is None else out,  # stands in for what comes last
        layout.B, layout.T, layout.H, HV, K, V, N,
    )  # fmt: skip
    if q.is_cpu:
        for name, x in tensors.items():
            if x is not None and not x.is_cpu:
                refuse_device(name, x, -1)
        _check_contents(problem)

    # -- from here on the call is legal: reshape, allocate ---------------------------------------
    return problem._replace(
        A_log=A_log.ravel(),
        dt_bias=dt_bias.ravel(),
        out=torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out,
    )


def _lifted(name: str, x: Tensor, rank: int, axes: str, axis: int) -> Tensor:
    """With the axis that tensors without a batch lack."""
    if not isinstance(x, Tensor) or x.dim() != rank:
        refuse_shape(name, x, axes, None, "It has no batch axis, like q.")
    return x.unsqueeze(axis)


def _check_indices(x: Tensor, N: int, index: int) -> None:
    """[N] or [N, 1 + num_spec], with any strides: columns and rows of a block table, say."""
    fits = isinstance(x, Tensor) and x.dim() in (1, 2) and x.shape[0] == N
    if not fits or (x.dim() == 2 and x.shape[1] == 0):
        hint = f"There are N = {N} sequences; slice a longer buffer."
        refuse_shape("state_indices", x, "[N] or [N, 1 + num_spec]", None, hint)
    if x.dtype not in INDEX_DTYPES:
        refuse_dtype("state_indices", x, INDEX_DTYPES)
    if x.get_device() != index:
        refuse_device("state_indices", x, index)


def _meets(spans: dict[str, tuple[int, int]], name: str) -> bool:
    """Whether the tensor may share a byte with another, judged by address ranges alone."""
    start, end = spans[name]
    return any(
        other_start < end and start < other_end
        for other, (other_start, other_end) in spans.items()
        if other != name
    )


def _check_contents(p: RecurrentProblem) -> None:
    """Values of the index tensors of a CPU call. On a GPU the kernel guards what it addresses."""
    check_contents(p.B, p.T, p.N, p.cu_seqlens, None, None, None)
    ends = p.cu_seqlens.tolist() if p.cu_seqlens is not None else None
    accepted = p.num_accepted_tokens.tolist() if p.num_accepted_tokens is not None else None
    slots = p.state_pool.shape[0]
    owner: dict[int, int] = {}
    for n, row in enumerate(p.state_indices.tolist()):
        length = p.T if ends is None else ends[n + 1] - ends[n]
        if length == 0 or all(slot < 0 or slot == p.null_index for slot in row):
            continue  # whatever else it holds is not looked at
        if p.per_token and length > p.columns:
            raise InputError(
                f"state_indices: expected a column for each token, got {p.columns} columns for "
                f"sequence {n} of {length} tokens. Its shape is [N, 1 + num_spec]."
            )
        first = 1 if accepted is None else accepted[n]
        if not 0 <= first <= p.columns:
            raise InputError(
                f"num_accepted_tokens: expected 0 to {p.columns}, the number of columns of "
                f"state_indices, got {first} for sequence {n}."
            )
        touched = {row[first - 1]} if first else set()
        if touched and p.write_state and p.per_token:
            touched.update(row[:length])
        for slot in touched - {p.null_index}:
            if slot >= slots:
                raise InputError(
                    f"state_indices: expected slots below {slots}, the size of the pool, got "
                    f"{slot} for sequence {n}."
                )
            if slot >= 0 and p.write_state and owner.setdefault(slot, n) != n:
                raise InputError(
                    f"state_indices: expected no slot in two sequences, got slot {slot} for "
                    f"sequences {owner[slot]} and {n}. Mark padding with -1 or null_index."
                )
