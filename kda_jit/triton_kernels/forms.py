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
    STAGE_ROWS,
    STAGE_TAIL,
    _bounds,
    _log2_decay,
    _owner,
    _sigmoid,
    _unit_rows,
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
    if cu_seqlens is None:
        chunks = (T + CHUNK - 1) // CHUNK
        batch = (slot // chunks).to(tl.int64)
        chunk = (slot % chunks).to(tl.int64)
        begin = chunk * 0
        end = begin + T
    else:
        n = _owner(cu_seqlens, slot, N, search_steps)
        begin, end = _bounds(cu_seqlens, n, T)
        chunk = slot - (begin // CHUNK + n)
        batch = chunk * 0
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
    if NORMALIZE:
        q_in = _unit_rows(q_in)
        k_in = _unit_rows(k_in)
    if SIGMOID:
        beta_in = beta_scale * _sigmoid(beta_in)
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
    # Rows past the end and padded channels decay by nothing and hold nothing.
    g_cumsum = tl.cumsum(tl.where(mask, g_log2, 0.0), axis=0)
    g_last = tl.sum(tl.where(rows[:, None] == CHUNK - 1, g_cumsum, 0.0), axis=0)

    # A_kk[i, j] = k_i . (k_j exp(G_i - G_j)), A_qk alike with q_i; both [16, 16].
    if NARROW:
        middle = 8.0 * lower_bound * LOG2E  # halfway down the lowest possible sum: see kda_prepare
        toward = tl.exp2(g_cumsum - middle)
        k_from = tl.trans(k_in * tl.exp2(middle - g_cumsum))
        A_kk = tl.dot(k_in * toward, k_from, input_precision="tf32x3")
        A_qk = tl.dot(q_in * toward, k_from, input_precision="tf32x3")
    else:
        A_kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        A_qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        for j in range(CHUNK):
            is_j = rows[:, None] == j
            k_j = tl.sum(tl.where(is_j, k_in, 0.0), axis=0)[None, :]
            g_j = tl.sum(tl.where(is_j, g_cumsum, 0.0), axis=0)[None, :]
            k_j = k_j * tl.exp2(tl.where(rows[:, None] >= j, g_cumsum - g_j, 0.0))
            column = rows[None, :] == j
            A_kk = tl.where(column, tl.sum(k_in * k_j, axis=1)[:, None], A_kk)
            A_qk = tl.where(column, tl.sum(q_in * k_j, axis=1)[:, None], A_qk)
    A_kk = tl.where(rows[:, None] > rows[None, :], A_kk * beta_in[:, None], 0.0)
    A_qk = tl.where(rows[:, None] >= rows[None, :], A_qk, 0.0)

    # T = (I + A_kk)^-1 diag(beta), by substitution in fp32.
    T_mat = tl.where(rows[:, None] == rows[None, :], beta_in[:, None], 0.0)
    for j in range(CHUNK - 1):
        left = tl.sum(tl.where(rows[None, :] == j, A_kk, 0.0), axis=1)
        row = tl.sum(tl.where(rows[:, None] == j, T_mat, 0.0), axis=0)
        T_mat -= left[:, None] * row[None, :]
    Ak = tl.dot(
        tl.trans(T_mat), k_in * tl.exp2(g_last[None, :] - g_cumsum), input_precision="tf32x3"
    )
    Aq = tl.dot(A_qk, T_mat, input_precision="tf32x3")

    decay = tl.exp2(g_cumsum)
    record = tl.program_id(0).to(tl.int64)  # slot * HV + head
    stages += record * (STAGE_ROWS * BK + STAGE_TAIL)
    dtype = stages.dtype.element_ty
    block = rows[:, None] * BK + cols[None, :]
    tl.store(stages + block, (k_in * decay).to(dtype))
    tl.store(stages + CHUNK * BK + block, (q_in * decay).to(dtype))
    tl.store(stages + 2 * CHUNK * BK + block, Ak.to(dtype))
    tl.store(stages + STAGE_ROWS * BK + rows[:, None] * CHUNK + rows[None, :], Aq.to(dtype))
    tl.store(totals + record * BK + cols, tl.exp2(g_last))
