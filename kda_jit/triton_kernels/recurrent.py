"""KDA token by token in Triton: decode and verification of drafts, in place on a pool of states.

    S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t

One program per (sequence, value head, block of V) walks along the tokens with its rows of the state
in fp32 registers. Blocks of V never meet, so a program stores states over those that it read.

in      q k [B,T,H,K]  v [B,T,HV,V]  g [B,T,HV,K]  beta [B,T,HV]: fp32, bf16 or fp16, token-strided;
        cu_seqlens [N+1]; state_indices [N, columns]; num_accepted_tokens [N]
out     out [B,T,HV,V]; state_pool [slots, HV, V, K], fp32 or bf16, V-major
start   column num_accepted_tokens[n] - 1, or 0 without them. No such column, or no slot in it (a
        negative one, null_index, one outside the pool), or more tokens than columns: the state is
        neither read nor written, and the output is zero. Where has_initial_state[n] is false it
        is zero, whatever the slot holds.
stores  write_each: after token j, to the slot in column j, if there is one. Otherwise after the
        last token, to column 0. All such choices are made at run time, so that decode, verification
        and verification without a write are one binary and agree bit for bit. (Optional tensors,
        there or not, and value heads that share a q/k head or not are binaries of their own.)
gates   base 2 after the load, as in prefill; everything is fp32 between load and store
launch  one warp: a sum over K never waits for another warp
few     how the address of a state that is stored is added up, which decides what ptxas makes of all
        registers: as loads are, it takes 127 and asks for everything early; the other way 80, and
        an SM has 24 programs at once instead of 16. Same numbers, bit for bit.
limits  16 <= K <= 256, any V; HV * V / 8 and N below 2^31
"""

import triton
import triton.language as tl

from .prefill import DOWN, LARGEST, LOG2E, _bounds, _log2_decay, _sigmoid


@triton.jit
def _is_slot(slot, num_slots, null_index):
    return (slot >= 0) & (slot < num_slots) & (slot != null_index)


@triton.jit
def _unit(x):
    """x / |x|, eps under the root. A row whose squares overflow is measured scaled down.

    Both sums are taken: a branch would make the compiler doubt that a warp's lanes stay together.
    """
    square = tl.sum(x * x) + 1e-6
    low = x * DOWN
    huge = square > LARGEST
    inverse = tl.rsqrt(tl.where(huge, tl.sum(low * low), square))
    return tl.where(huge, low, x) * inverse


@triton.jit(
    do_not_specialize=[
        "N", "T", "num_slots", "columns", "null_index", "write", "write_each",
        "index_stride", "column_stride", "accepted_stride", "beta_batch_stride",
        "beta_token_stride",
    ],
    do_not_specialize_on_alignment=[
        "beta", "A_log", "state_indices", "num_accepted_tokens", "has_initial_state", "cu_seqlens",
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
    has_initial_state,
    cu_seqlens,
    lower_bound,
    scale,
    N,
    T,
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
    GRID_N: tl.constexpr,
    BOUNDED: tl.constexpr,
    FEW: tl.constexpr,
):
    """All tokens of one sequence, head and block of V.

    Grid (HV * cdiv(V, BV), min(N, GRID_N), cdiv(N, GRID_N)): neighbours share a sequence.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    v_first = (tl.program_id(0) % blocks) * BV
    head = tl.program_id(0) // blocks
    n = tl.program_id(2).to(tl.int64) * GRID_N + tl.program_id(1)
    if n >= N:
        return

    # What must be known before tokens and state can be asked for: all of it at once.
    column = n * 0
    chosen = columns > 0
    if num_accepted_tokens is not None:
        column = tl.load(num_accepted_tokens + n * accepted_stride).to(tl.int64) - 1
        chosen = (column >= 0) & (column < columns)
    state_indices += n * index_stride
    slot = tl.load(state_indices + column * column_stride, chosen, -1).to(tl.int64)
    target = tl.load(state_indices).to(tl.int64)
    has = 1
    if has_initial_state is not None:
        has = tl.load(has_initial_state + n)
    if cu_seqlens is None:
        begin = n * 0
        end = begin + T
        q += n * q_batch_stride
        k += n * k_batch_stride
        v += n * v_batch_stride
        g += n * g_batch_stride
        beta += n * beta_batch_stride
        out += n * out_batch_stride
    else:
        begin, end = _bounds(cu_seqlens, n, T)
    length = tl.maximum(end - begin, 0).to(tl.int32)
    some = length > 0

    cols = tl.arange(0, BK)
    v_cols = v_first + tl.arange(0, BV)
    k_mask = cols < K
    v_mask = v_cols < V
    q += begin * q_token_stride + head // group * K + cols
    k += begin * k_token_stride + head // group * K + cols
    v += begin * v_token_stride + head * V + v_cols
    g += begin * g_token_stride + head * K + cols
    beta += begin * beta_token_stride + head
    q_raw = tl.load(q, k_mask & some, 0.0, eviction_policy="evict_last")
    k_raw = tl.load(k, k_mask & some, 0.0, eviction_policy="evict_last")
    g_raw = tl.load(g, k_mask & some, 0.0, eviction_policy="evict_last")
    v_raw = tl.load(v, v_mask & some, 0.0, eviction_policy="evict_first")
    beta_raw = tl.load(beta, some, 0.0)

    live = some & _is_slot(slot, num_slots, null_index) & ((write_each == 0) | (length <= columns))

    out += begin * out_token_stride + head * V + v_cols
    if not live:
        nothing = tl.zeros([BV], out.dtype.element_ty)
        for _ in range(length):
            tl.store(out, nothing, v_mask)
            out += out_token_stride
        return

    mask = v_mask[:, None] & k_mask[None, :]
    state_pool += head.to(tl.int64) * (V * K)
    inside = v_cols[:, None] * K + cols[None, :]
    # The bytes of a fresh sequence's slot may be NaN.
    S = tl.load(state_pool + inside + slot * slot_stride, mask & (has != 0), 0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * K + cols, k_mask, 0.0)
    rate = tl.exp2(tl.load(A_log + head) * LOG2E)
    rate = tl.where(rate > LARGEST, LARGEST, rate)  # inf times a logit of 0 would be NaN

    for t in range(length):
        q_unit = _unit(q_raw.to(tl.float32))
        k_unit = _unit(k_raw.to(tl.float32))
        g_log2 = _log2_decay(g_raw.to(tl.float32), rate, bias, lower_bound, BOUNDED)
        decay = tl.exp2(g_log2)
        v_t = v_raw.to(tl.float32)
        beta_act = _sigmoid(beta_raw.to(tl.float32))
        # The next token is on its way while this one is worked on.
        more = t + 1 < length
        q += q_token_stride
        k += k_token_stride
        v += v_token_stride
        g += g_token_stride
        beta += beta_token_stride
        state_indices += column_stride
        q_raw = tl.load(q, k_mask & more, 0.0, eviction_policy="evict_last")
        k_raw = tl.load(k, k_mask & more, 0.0, eviction_policy="evict_last")
        g_raw = tl.load(g, k_mask & more, 0.0, eviction_policy="evict_last")
        v_raw = tl.load(v, v_mask & more, 0.0, eviction_policy="evict_first")
        beta_raw = tl.load(beta, more, 0.0)
        target_after = tl.load(state_indices, more, 0).to(tl.int64)

        # S' q = S q + u (k q): no sum waits for another.
        S *= decay[None, :]
        k_q = tl.sum(k_unit * q_unit)
        S_q = tl.sum(S * q_unit[None, :], axis=1)
        u = beta_act * (v_t - tl.sum(S * k_unit[None, :], axis=1))
        S += u[:, None] * k_unit[None, :]
        o = ((S_q + u * k_q) * scale).to(out.dtype.element_ty)
        tl.store(out, o, v_mask, eviction_policy="evict_first")
        out += out_token_stride

        if (write != 0) & ((write_each != 0) | (t == length - 1)):
            place = mask & _is_slot(target, num_slots, null_index)
            if FEW:
                to = state_pool + inside + target * slot_stride
            else:
                to = state_pool + target * slot_stride + inside
            tl.store(to, S.to(state_pool.dtype.element_ty), place)
        target = target_after
