"""`kda_prepare` for inputs that come activated already, or in a form that no prefill has.

    q, k   NORMALIZE: to unit length; else as they are
    gate   LOG_GATE: g is the log decay; BOUNDED: lower_bound * sigmoid(exp(A_log) * (g + dt_bias)),
           where NARROW says that 16 tokens of it span less than fp32's range; neither: the softplus
    beta   SIGMOID: beta_scale * sigmoid(beta); else as it is

It writes the stages and totals that `kda_recurrence` of `triton_kernels/prefill.py` reads, in the
slots that are described there. Without a bound on keys and betas the stages are fp32.
"""

import triton
import triton.language as tl

from kda_jit.triton_kernels.prefill import (
    CHUNK,
    LARGEST,
    LOG2E,
    LOWEST_LOG2_DECAY,
    _chunk_of,
    _log2_decay,
    _write_stage,
)


@triton.jit(
    do_not_specialize=[
        "T", "N", "HV", "group", "search_steps", "beta_batch_stride", "beta_token_stride",
    ],
    do_not_specialize_on_alignment=["beta", "A_log", "dt_bias", "cu_seqlens"],
)  # fmt: skip
def kda_prepare_forms(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    stages,
    totals,
    lower_bound,
    beta_scale,
    T,
    N,
    HV,
    group,
    search_steps,
    q_batch_stride,
    q_token_stride,
    k_batch_stride,
    k_token_stride,
    g_batch_stride,
    g_token_stride,
    beta_batch_stride,
    beta_token_stride,
    K: tl.constexpr,
    BK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LOG_GATE: tl.constexpr,
    BOUNDED: tl.constexpr,
    NARROW: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Everything of one chunk and value head that needs no state. Grid (slots * HV)."""
    slot = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    batch, chunk, begin, end = _chunk_of(cu_seqlens, slot, T, N, search_steps)
    first = begin + chunk * CHUNK
    if chunk < 0 or first >= end:
        return

    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BK)
    here = first + rows
    valid = here < end
    mask = valid[:, None] & (cols < K)[None, :]
    qk_cols = ((head // group) * K + cols)[None, :]
    g_cols = (head * K + cols)[None, :]
    q_rows = batch * q_batch_stride + here * q_token_stride
    k_rows = batch * k_batch_stride + here * k_token_stride
    g_rows = batch * g_batch_stride + here * g_token_stride
    beta_rows = batch * beta_batch_stride + here * beta_token_stride
    q_in = tl.load(q + q_rows[:, None] + qk_cols, mask, 0.0).to(tl.float32)
    k_in = tl.load(k + k_rows[:, None] + qk_cols, mask, 0.0).to(tl.float32)
    g_in = tl.load(g + g_rows[:, None] + g_cols, mask, 0.0).to(tl.float32)
    beta_in = tl.load(beta + beta_rows + head, valid, 0.0).to(tl.float32)
    if LOG_GATE:
        g_log2 = g_in * LOG2E
        g_log2 = tl.where(g_log2 < LOWEST_LOG2_DECAY, LOWEST_LOG2_DECAY, g_log2)
    else:
        bias = tl.load(dt_bias + head * K + cols, cols < K, 0.0)
        rate = tl.exp2(tl.load(A_log + head) * LOG2E)
        rate = tl.where(rate > LARGEST, LARGEST, rate)  # inf times a logit of 0 would be NaN
        g_log2 = _log2_decay(g_in, rate, bias[None, :], lower_bound, BOUNDED)
        if BOUNDED and not NARROW:
            g_log2 = tl.where(g_log2 < LOWEST_LOG2_DECAY, LOWEST_LOG2_DECAY, g_log2)
    _write_stage(
        q_in, k_in, g_log2, beta_in, mask, stages, totals, lower_bound, beta_scale,
        BK, NARROW, NORMALIZE, SIGMOID,
    )  # fmt: skip
