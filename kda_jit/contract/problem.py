"""KdaProblem, and how the caller's arguments become one."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from kda_jit.contract.checks import (
    INDEX_DTYPES,
    LOWEST_BOUND,
    check_contents,
    check_cu_seqlens,
    check_grad,
    check_lower_bound,
    check_parameter,
    check_per_sequence,
    check_scale,
    check_state,
    check_tokens,
)
from kda_jit.contract.memory import (
    ALIGNMENT,
    NOWHERE,
    check_aliasing,
    meets,
    misaligned_names,
    same_view,
)
from kda_jit.contract.words import kind_of, refuse_device, refuse_dtype, refuse_shape, shape_of
from kda_jit.errors import DeviceError, InputError

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    last, and only where the caller gave none; copies ``A_log`` and ``dt_bias`` only if strided.
    """
    # -- q fixes B, T, H, K, the dtype and the device; v fixes HV and V --------------------------
    if not isinstance(q, Tensor) or q.dim() != 4:
        refuse_shape("q", q, "[B, T, H, K]", None)
    if not isinstance(v, Tensor) or v.dim() != 4:
        refuse_shape("v", v, "[B, T, HV, V]", None)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    dtype = q.dtype
    index = q.get_device()
    on_cpu = q.is_cpu
    if H == 0 or K == 0 or V == 0:
        raise InputError(
            "q, v: expected at least one head and one channel, got "
            f"q {shape_of(q)}, v {shape_of(v)}."
        )
    if HV == 0 or HV % H:
        raise InputError(
            f"v: expected HV, the number of value heads, to be a multiple of H = {H}, got HV = "
            f"{HV}. Each q/k head serves HV / H value heads."
        )
    if dtype not in _FLOATS:
        refuse_dtype("q", q, _FLOATS)
    if not on_cpu and not q.is_cuda:
        raise DeviceError(f"q: expected a CUDA or CPU tensor, got one on {q.device}.")
    q_range = check_tokens("q", q, (B, T, H, K), "[B, T, H, K]", index)
    k_range = check_tokens("k", k, (B, T, H, K), "[B, T, H, K]", index)
    v_range = check_tokens("v", v, (B, T, HV, V), "[B, T, HV, V]", index)
    g_range = check_tokens("g", g, (B, T, HV, K), "[B, T, HV, K]", index)
    beta_range = check_tokens("beta", beta, (B, T, HV), "[B, T, HV]", index)
    if k.dtype is not dtype:
        refuse_dtype("k", k, (dtype,), "q, k and v share one dtype.")
    if v.dtype is not dtype:
        refuse_dtype("v", v, (dtype,), "q, k and v share one dtype.")
    if g.dtype is not dtype and g.dtype is not torch.float32:
        refuse_dtype("g", g, (dtype, torch.float32))
    if beta.dtype is not dtype and beta.dtype is not torch.float32:
        refuse_dtype("beta", beta, (dtype, torch.float32))

    # -- gate parameters and scalars -------------------------------------------------------------
    if not isinstance(A_log, Tensor) or A_log.numel() != HV:
        refuse_shape("A_log", A_log, "[HV]", (HV,), "It holds one number per value head.")
    A_log_range = check_parameter("A_log", A_log, index)
    if not isinstance(dt_bias, Tensor) or dt_bias.shape not in ((HV * K,), (HV, K)):
        refuse_shape(
            "dt_bias",
            dt_bias,
            "[HV, K] or [HV * K]",
            (HV, K),
            "It holds one number per value head and key channel, not one per head.",
        )
    dt_bias_range = check_parameter("dt_bias", dt_bias, index)
    if lower_bound is not None and not (
        type(lower_bound) is float and LOWEST_BOUND <= lower_bound < 0.0
    ):
        lower_bound = check_lower_bound(lower_bound)
    if scale is None:
        scale = K**-0.5
    elif type(scale) is not float or not isfinite(scale):
        scale = check_scale(scale)

    # -- sequences -------------------------------------------------------------------------------
    cu_seqlens_range = indices_range = flags_range = offsets_range = NOWHERE
    N = B
    if cu_seqlens is not None:
        N = check_cu_seqlens(cu_seqlens, B)
        cu_seqlens_range = check_per_sequence("cu_seqlens", cu_seqlens, N + 1, INDEX_DTYPES, index)

    # -- states and other results ----------------------------------------------------------------
    state_shape = (N, HV, V, K)
    initial_range = final_range = checkpoint_range = out_range = NOWHERE
    state: Tensor | None
    if state_indices is not None:
        if initial_state is None:
            raise InputError(
                "state_indices: expected initial_state, the pool [slots, HV, V, K] that they "
                "index, got initial_state=None. For new states without a pool, drop state_indices."
            )
        indices_range = check_per_sequence(
            "state_indices", state_indices, N, INDEX_DTYPES, index, strided=True
        )
        final_range = check_state("initial_state", initial_state, None, state_shape, index, True)
        if final_state is not None and not same_view(final_state, initial_state):
            raise InputError(
                "final_state: expected None or the very pool given as initial_state, since "
                "state_indices makes the pool be updated in place, got another "
                f"{kind_of(final_state)}."
            )
        state = initial_state
    else:
        if initial_state is not None:
            initial_range = check_state(
                "initial_state", initial_state, N, state_shape, index, False
            )
        if final_state is not None:
            final_range = check_state("final_state", final_state, N, state_shape, index, True)
        state = final_state
    if has_initial_state is not None:
        if initial_state is None:
            raise InputError(
                "has_initial_state: expected initial_state along with it, got initial_state=None."
            )
        flags_range = check_per_sequence(
            "has_initial_state", has_initial_state, N, (torch.bool,), index
        )
    if checkpoint_state is not None or checkpoint_offsets is not None:
        if checkpoint_state is None or checkpoint_offsets is None:
            missing = "checkpoint_state" if checkpoint_state is None else "checkpoint_offsets"
            raise InputError(
                "checkpoint_state, checkpoint_offsets: expected both or neither, got "
                f"{missing}=None."
            )
        checkpoint_range = check_state(
            "checkpoint_state", checkpoint_state, N, state_shape, index, True
        )
        offsets_range = check_per_sequence(
            "checkpoint_offsets", checkpoint_offsets, N, INDEX_DTYPES, index
        )
    if out is not None:
        out_range = check_tokens("out", out, (B, T, HV, V), "[B, T, HV, V]", index, True)
        if out.dtype is not dtype:
            refuse_dtype("out", out, (dtype,), "The output has the dtype of v.")

    # -- grad, aliasing, contents ----------------------------------------------------------------
    if torch.is_grad_enabled():  # not under inference_mode or no_grad, so not in an engine
        check_grad(
            q=q, k=k, v=v, g=g, beta=beta, A_log=A_log, dt_bias=dt_bias, out=out,
            initial_state=initial_state, final_state=final_state,
            checkpoint_state=checkpoint_state,
        )  # fmt: skip
    read = (
        q_range, k_range, v_range, g_range, beta_range, A_log_range, dt_bias_range, initial_range,
        cu_seqlens_range, indices_range, flags_range, offsets_range,
    )  # fmt: skip
    if (
        (out is not None and meets(out_range, read))
        or (state is not None and meets(final_range, (*read, out_range)))
        or (
            checkpoint_state is not None
            and meets(checkpoint_range, (*read, out_range, final_range))
        )
    ):
        check_aliasing(
            {
                "out": out,
                "final_state" if state_indices is None else "initial_state": state,
                "checkpoint_state": checkpoint_state,
            },
            {
                "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
                "initial_state": initial_state if state_indices is None else None,
                "cu_seqlens": cu_seqlens,
                "state_indices": state_indices, "has_initial_state": has_initial_state,
                "checkpoint_offsets": checkpoint_offsets,
            },
        )  # fmt: skip
    if on_cpu:
        # Other devices without an index, such as "meta", look like the CPU to get_device().
        for name, x in (
            ("k", k), ("v", v), ("g", g), ("beta", beta), ("A_log", A_log), ("dt_bias", dt_bias),
            ("initial_state", initial_state), ("final_state", state), ("out", out),
            ("cu_seqlens", cu_seqlens), ("state_indices", state_indices),
            ("has_initial_state", has_initial_state), ("checkpoint_state", checkpoint_state),
            ("checkpoint_offsets", checkpoint_offsets),
        ):  # fmt: skip
            if x is not None and not x.is_cpu:
                refuse_device(name, x, index)
        check_contents(B, T, N, cu_seqlens, state_indices, initial_state, checkpoint_offsets)

    # -- from here on the call is legal: reshape, allocate ---------------------------------------
    if A_log.dim() != 1 or not A_log.is_contiguous():
        A_log = A_log.reshape(HV)
    if dt_bias.dim() != 1 or not dt_bias.is_contiguous():
        dt_bias = dt_bias.reshape(HV * K)
    if out is None:
        out = torch.empty((B, T, HV, V), dtype=dtype, device=q.device)
    if state is None:
        state = torch.empty(state_shape, dtype=torch.float32, device=q.device)
    bits = (
        q_range[2] | k_range[2] | v_range[2] | g_range[2] | out_range[2]
        | initial_range[2] | final_range[2] | checkpoint_range[2]
    )  # fmt: skip
    misaligned: tuple[str, ...] = ()
    if bits & (ALIGNMENT - 1):
        misaligned = misaligned_names(
            q=q, k=k, v=v, g=g, out=out, initial_state=initial_state, final_state=state,
            checkpoint_state=checkpoint_state,
        )  # fmt: skip
    return KdaProblem(
        q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, initial_state, state,
        cu_seqlens, out, state_indices, has_initial_state, checkpoint_state, checkpoint_offsets,
        B, T, H, HV, K, V, N, misaligned,
    )  # fmt: skip
