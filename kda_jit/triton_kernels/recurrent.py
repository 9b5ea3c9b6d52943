"""KDA token by token in Triton: decode and verification of drafts, in place on a pool of states.

    S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t

One program per (sequence, value head, block of V) walks along the tokens with its rows of the state
in fp32 registers. Blocks of V never meet, so a program stores states over those that it read.

in      q k [B,T,H,K]  v [B,T,HV,V]  g [B,T,HV,K]  beta [B,T,HV]: fp32, bf16 or fp16, token-strided;
        cu_seqlens [N+1]; state_indices [N, columns]; num_accepted_tokens [N]
out     out [B,T,HV,V]; state_pool [slots, HV, V, K], fp32 or bf16, V-major
start   column num_accepted_tokens[n] - 1, or 0 without them. No such column, or no slot in it (a
        negative one, null_index, one outside the pool), or more tokens than columns: the state is
        neither read nor written, and the output is zero.
stores  write_each: after token j, to the slot in column j, if there is one. Otherwise after the
        last token, to column 0. All such choices are made at run time, so that decode, verification
        and verification without a write are one binary and agree bit for bit.
gates   base 2 after the load, as in prefill; everything is fp32 between load and store
launch  one warp: a sum over K never waits for another warp
limits  16 <= K <= 256, any V; N * HV * V / 8 below 2^31 (grid axis 0)
"""

import triton
import triton.language as tl

from .prefill import LARGEST, LOG2E, _bounds, _log2_decay, _sigmoid, _unit_rows


@triton.jit
def _is_slot(slot, num_slots, null_index):
    return (slot >= 0) & (slot < num_slots) & (slot != null_index)


@triton.jit(
    do_not_specialize=[
        "T", "HV", "group", "num_slots", "columns", "null_index", "write", "write_each",
        "index_stride", "column_stride", "accepted_stride", "beta_batch_stride",
        "beta_token_stride",
    ],
    do_not_specialize_on_alignment=[
        "beta", "A_log", "state_indices", "num_accepted_tokens", "cu_seqlens",
    ],
)  # fmt: skip
def kda_recurrent(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    out,
    state_pool,
    state_indices,
    num_accepted_tokens,
    cu_seqlens,
    lower_bound,
    scale,
    T,
    HV,
    group,
    num_slots,
    columns,
    null_index,
    write,
    write_each,
    index_stride,
    column_stride,
    accepted_stride,
    q_batch_stride,
    q_token_stride,
    k_batch_stride,
    k_token_stride,
    v_batch_stride,
    v_token_stride,
    g_batch_stride,
    g_token_stride,
    beta_batch_stride,
    beta_token_stride,
    out_batch_stride,
    out_token_stride,
    slot_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """All tokens of one sequence, head and block of V. Grid (N * HV * cdiv(V, BV))."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    v_first = (tl.program_id(0) % blocks) * BV
    head = tl.program_id(0) // blocks % HV
    n = (tl.program_id(0) // blocks // HV).to(tl.int64)
    if cu_seqlens is None:
        batch = n
        begin = n * 0
        end = begin + T
    else:
        batch = n * 0
        begin, end = _bounds(cu_seqlens, n, T)
    length = tl.maximum(end - begin, 0).to(tl.int32)
    if length == 0:
        return

    column = n * 0
    chosen = columns > 0
    if num_accepted_tokens is not None:
        column = tl.load(num_accepted_tokens + n * accepted_stride).to(tl.int64) - 1
        chosen = (column >= 0) & (column < columns)
    state_indices += n * index_stride
    slot = tl.load(state_indices + column * column_stride, chosen, -1).to(tl.int64)
    live = _is_slot(slot, num_slots, null_index) & ((write_each == 0) | (length <= columns))

    cols = tl.arange(0, BK)[None, :]
    v_cols = v_first + tl.arange(0, BV)
    k_mask = cols < K
    v_mask = v_cols < V
    out += batch * out_batch_stride + begin * out_token_stride + head * V
    if not live:
        nothing = tl.zeros([BV], out.dtype.element_ty)
        for _ in range(length):
            tl.store(out + v_cols, nothing, v_mask)
            out += out_token_stride
        return

    mask = v_mask[:, None] & k_mask
    state_pool += head.to(tl.int64) * (V * K) + v_cols[:, None] * K + cols
    S = tl.load(state_pool + slot * slot_stride, mask, 0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * K + cols, k_mask, 0.0)
    rate = tl.exp2(tl.load(A_log + head) * LOG2E)
    rate = tl.where(rate > LARGEST, LARGEST, rate)  # inf times a logit of 0 would be NaN

    q += batch * q_batch_stride + begin * q_token_stride + (head // group) * K
    k += batch * k_batch_stride + begin * k_token_stride + (head // group) * K
    v += batch * v_batch_stride + begin * v_token_stride + head * V
    g += batch * g_batch_stride + begin * g_token_stride + head * K
    beta += batch * beta_batch_stride + begin * beta_token_stride + head
    for t in range(length):
        q_unit = _unit_rows(tl.load(q + cols, k_mask, 0.0).to(tl.float32))
        k_unit = _unit_rows(tl.load(k + cols, k_mask, 0.0).to(tl.float32))
        g_raw = tl.load(g + cols, k_mask, 0.0).to(tl.float32)
        v_t = tl.load(v + v_cols, v_mask, 0.0).to(tl.float32)
        beta_act = _sigmoid(tl.load(beta).to(tl.float32))

        g_log2 = _log2_decay(g_raw, rate, bias, lower_bound, BOUNDED)
        S *= tl.exp2(g_log2)
        u = beta_act * (v_t - tl.sum(S * k_unit, axis=1))
        S += u[:, None] * k_unit
        o = tl.sum(S * q_unit, axis=1) * scale
        tl.store(out + v_cols, o.to(out.dtype.element_ty), v_mask)

        if (write != 0) & ((write_each != 0) | (t == length - 1)):
            target = tl.load(state_indices).to(tl.int64)
            kept = mask & _is_slot(target, num_slots, null_index)
            tl.store(state_pool + target * slot_stride, S.to(state_pool.dtype.element_ty), kept)
        state_indices += column_stride
        q += q_token_stride
        k += k_token_stride
        v += v_token_stride
        g += g_token_stride
        beta += beta_token_stride
        out += out_token_stride
