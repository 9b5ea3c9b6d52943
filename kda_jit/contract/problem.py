"""KdaProblem, and how the caller's arguments become one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kda_jit.contract.checks import (
    LARGEST,
    LOWEST_BOUND,
    check_contents,
    check_grad,
    check_lower_bound,
    check_same_pool,
    check_scale,
)
from kda_jit.contract.layout import (
    A_LOG,
    DT_BIAS,
    FINAL,
    OUT,
    TENSORS,
    Layout,
    check_placement,
    find_layout,
)
from kda_jit.contract.memory import ALIGNMENT
from kda_jit.contract.words import refuse_device


class KdaProblem(NamedTuple):
    """One legal prefill: every tensor in the layout that the backends are written for.

    A named tuple and not a frozen dataclass, because building the latter costs 2 us a call.

    q, k         [B, T, H, K]    bf16, fp16, fp32 or fp64; as given, so maybe token-strided
    v            [B, T, HV, V]   dtype of q
    g            [B, T, HV, K]   dtype of q or fp32; raw gate logits
    beta         [B, T, HV]      dtype of q or fp32; raw logits
    A_log        [HV]            fp32, contiguous
    dt_bias      [HV * K]        fp32, contiguous
    lower_bound  None is the unbounded gate, otherwise in [-5, 0)
    scale        finite
    initial_state, final_state, checkpoint_state
                 [N, HV, V, K]   fp32 or bf16 each, dense but for the stride between sequences;
                                 with ``state_indices`` the first two are one pool [slots, HV, V, K]
    cu_seqlens   [N + 1]         int32 or int64, contiguous; None: B sequences of T tokens
    out          [B, T, HV, V]   dtype of v, maybe token-strided
    state_indices [N]            int32 or int64, any positive stride; negative: no slot
    has_initial_state [N]        bool, contiguous; False selects a zero initial state
    checkpoint_offsets [N]       int32 or int64, contiguous; 0: no checkpoint
    misaligned   names of the tensors whose address or strides are no multiple of 16 bytes
    addresses    of each of ``layout.TENSORS``, 0 for None: reading them twice would cost 1 us
    layout       shared with the calls that differ in nothing but addresses, numbers and contents
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
    initial_state: Tensor | None
    final_state: Tensor
    cu_seqlens: Tensor | None
    out: Tensor
    state_indices: Tensor | None
    has_initial_state: Tensor | None
    checkpoint_state: Tensor | None
    checkpoint_offsets: Tensor | None
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    misaligned: tuple[str, ...]
    layout: Layout
    addresses: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.q.device

    @property
    def is_pool(self) -> bool:
        """States are read from and written to slots of one pool, in place."""
        return self.state_indices is not None

    @property
    def is_varlen(self) -> bool:
        return self.cu_seqlens is not None

    @property
    def is_empty(self) -> bool:
        """No token at all: every state keeps its initial value."""
        return self.T == 0 or self.N == 0


def make_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = LOWEST_BOUND,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> KdaProblem:
    """Checks the arguments of :func:`kda_jit.prefill` (which see) and fills in the defaults.

    Raises InputError (shape, stride, value, aliasing), InputTypeError (dtype, not a tensor),
    DeviceError (tensors on several devices) or GradError. Allocates ``out`` and ``final_state``
    last, and only where the caller gave none; copies ``A_log`` and ``dt_bias`` only if strided, or
    the latter if misaligned.
    """
    tensors = (
        q, k, v, g, beta, out, A_log, dt_bias, initial_state, final_state, checkpoint_state,
        cu_seqlens, state_indices, has_initial_state, checkpoint_offsets,
    )  # fmt: skip
    layout, addresses = find_layout(tensors)

    # -- what each call is looked at for: numbers, grad, aliasing, contents ----------------------
    if lower_bound is not None and not (
        type(lower_bound) is float and LOWEST_BOUND <= lower_bound < 0.0
    ):
        lower_bound = check_lower_bound(lower_bound)
    if scale is None:
        scale = layout.K**-0.5
    elif type(scale) is not float or not -LARGEST <= scale <= LARGEST:
        scale = check_scale(scale)
    state = final_state
    if state_indices is not None:
        check_same_pool(final_state, initial_state)
        state = initial_state
    if torch.is_grad_enabled():  # not under inference_mode or no_grad, so not in an engine
        check_grad(TENSORS, tensors)
    misaligned = check_placement(layout, tensors, addresses)
    if q.is_cpu:
        # Other devices without an index, such as "meta", look like the CPU to get_device().
        for name, x in zip(TENSORS, tensors, strict=True):
            if x is not None and not x.is_cpu:
                refuse_device(name, x, -1)
        check_contents(
            layout.B, layout.T, layout.N, cu_seqlens, state_indices, initial_state,
            checkpoint_offsets,
        )  # fmt: skip

    # -- from here on the call is legal: reshape, allocate ---------------------------------------
    filled = list(addresses)
    if A_log.dim() != 1 or not A_log.is_contiguous():
        A_log = A_log.ravel()
        filled[A_LOG] = A_log.data_ptr()
    if dt_bias.dim() != 1 or not dt_bias.is_contiguous():
        dt_bias = dt_bias.ravel()
        filled[DT_BIAS] = dt_bias.data_ptr()
    if filled[DT_BIAS] % ALIGNMENT:  # a slice of one flat parameter: kernels read four at a time
        dt_bias = dt_bias.clone()
        filled[DT_BIAS] = dt_bias.data_ptr()
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        filled[OUT] = out.data_ptr()
    if state is None:
        shape = (layout.N, layout.HV, layout.V, layout.K)
        state = torch.empty(shape, dtype=torch.float32, device=layout.device)
    if state is not final_state:
        filled[FINAL] = state.data_ptr()
    return KdaProblem(
        q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, initial_state, state, cu_seqlens,
        out, state_indices, has_initial_state, checkpoint_state, checkpoint_offsets,
        layout.B, layout.T, layout.H, layout.HV, layout.K, layout.V, layout.N, misaligned, layout,
        tuple(filled),
    )  # fmt: skip
