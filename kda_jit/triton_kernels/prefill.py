"""KDA prefill in Triton: two kernels over chunks of 16 tokens, for any GPU with tensor cores.

    S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t

`kda_prepare`, one program per (chunk, value head), does all that needs no state: gates and their
cumulative sum G, norms, the products inside the chunk, and T = (I + A_kk)^-1 diag(beta), which it
folds into its neighbours. `kda_recurrence`, one program per (sequence, value head, block of V),
walks along the chunks with the state in fp32 registers:

    R   = v - k_decayed S                        k_decayed = k exp(G),  q_decayed = q exp(G)
    o   = scale * (q_decayed S + Aq R)           Aq = A_qk T
    S  <- diag(exp(G_last)) S + Ak^T R           Ak = T^T (k exp(G_last - G))

in      q k [B,T,H,K]  v [B,T,HV,V]  g [B,T,HV,K]  beta [B,T,HV]: fp32, bf16 or fp16, token-strided;
        cu_seqlens [N+1]; states [N or slots, HV, V, K] fp32 or bf16
out     out [B,T,HV,V], final states, checkpoints
scratch stages [slots, HV, 48 BK + 256], fp16 or fp32: k_decayed, q_decayed, Ak [16,BK], Aq [16,16];
        totals [slots, HV, BK] fp32: exp(G_last). All entries are at most 1 in size (T is a product
        of contractions), so fp16 holds them with the mantissa that a tf32 product uses anyway.
gates   base 2 after the load. Only differences G_i - G_j with i >= j meet an exp2, but for the
        bounded gate, where 16 tokens span less than fp32's range and one matrix product suffices.
chunks  16 tokens, so a checkpoint is always a chunk's border, and nothing that a token or a state
        is made of depends on later tokens, on other sequences or on whether a checkpoint is taken.
slots   chunk c of sequence n lies in slot cu_seqlens[n] // 16 + n + c: increasing in n, so its
        owner is found by bisection on the device. There are at most T // 16 + N.
limits  16 <= K <= 256, any V; T // 16 * HV and N * HV * V / 16 below 2^31 (grid axis 0)
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(16)
STAGE_ROWS = tl.constexpr(48)  # k_decayed, q_decayed, Ak
STAGE_TAIL = tl.constexpr(256)  # Aq
LOG2E = tl.constexpr(1.4426950408889634)
# A decay below 2^-128 is 0 in fp32 whatever it multiplies. Clamping there keeps sums of gates small
# enough to subtract: unclamped, one token of -6e4 would blur every later difference by 4e-3.
LOWEST_LOG2_DECAY = tl.constexpr(-128.0)
LARGEST = tl.constexpr(3.0e38)
DOWN = tl.constexpr(8.470329472543003e-22)  # 2^-70: squares of any float so scaled are finite


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2E))


@triton.jit
def _log2_decay(g_raw, rate, bias, lower_bound, BOUNDED: tl.constexpr):
    """Raw gate logits [16, BK] -> log2 of the decay per token, at most 0. NaN stays NaN."""
    x = g_raw + bias
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))  # 0 * inf is NaN
    if BOUNDED:
        return lower_bound * LOG2E * _sigmoid(rate * x)
    # softplus(x) = max(x, 0) + log1p(y). The hardware's log2 has an absolute error near 1, which
    # would lose slow gates; log1p(y) = 2 atanh(y / (2 + y)) as a series loses nothing.
    y = tl.exp2(-tl.abs(x) * LOG2E)
    s = y / (2.0 + y)
    z = s * s
    series = 1.0 / 11.0 + z * (1.0 / 13.0 + z * (1.0 / 15.0))
    series = 1.0 / 5.0 + z * (1.0 / 7.0 + z * (1.0 / 9.0 + z * series))
    log1p = 2.0 * s * (1.0 + z * (1.0 / 3.0 + z * series))
    decay = -(rate * (tl.where(x > 0.0, x, 0.0) + log1p)) * LOG2E
    return tl.where(decay < LOWEST_LOG2_DECAY, LOWEST_LOG2_DECAY, decay)


@triton.jit
def _unit_rows(x):
    """x / |x| over axis 1, eps under the root. Rows whose squares overflow are scaled down."""
    huge = tl.max(tl.abs(x), axis=1) > 1.1e15
    x = x * tl.where(huge, DOWN, 1.0)[:, None]
    square = tl.sum(x * x, axis=1) + tl.where(huge, 0.0, 1e-6)
    return x * tl.rsqrt(square)[:, None]


@triton.jit
def _bounds(cu_seqlens, n, T):
    """First token of sequence n and the one past its last; inside [0, T] whatever is stored."""
    begin = tl.load(cu_seqlens + n).to(tl.int64)
    end = tl.load(cu_seqlens + n + 1).to(tl.int64)
    return tl.minimum(tl.maximum(begin, 0), T), tl.minimum(end, T)


@triton.jit
def _owner(cu_seqlens, slot, N, search_steps):
    """The sequence whose slots include `slot`: the last n with cu_seqlens[n] // 16 + n <= slot."""
    low = N * 0
    high = N
    for _ in range(search_steps):
        middle = (low + high) // 2
        first = tl.load(cu_seqlens + middle).to(tl.int64) // CHUNK + middle
        low = tl.where(first <= slot, middle, low)
        high = tl.where(first <= slot, high, middle)
    return low


@triton.jit
def _chunk_of(cu_seqlens, slot, T, N, search_steps):
    """Batch row and chunk of a slot, and its sequence's first token and the one past its last.

    A chunk without tokens, or below 0 where cu_seqlens decreases, is none.
    """
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
    return batch, chunk, begin, end


@triton.jit
def _write_stage(
    q,
    k,
    g_log2,
    beta,
    mask,
    stages,
    totals,
    lower_bound,
    beta_scale,
    BK: tl.constexpr,
    NARROW: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Stage and totals of this program's chunk: q, k, g_log2 [16, BK], beta [16], all in fp32.

    mask       [16, BK], false past the last token and channel, where q and k are 0
    NARROW     16 tokens of a gate of at least lower_bound span less than fp32's range
    NORMALIZE  q and k to unit length; else as they are
    SIGMOID    beta_scale * sigmoid(beta); else beta as it is
    """
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BK)
    # gate_cumsum: rows past the end and padded channels decay by nothing and hold nothing.
    g_cumsum = tl.cumsum(tl.where(mask, g_log2, 0.0), axis=0)
    g_last = tl.sum(tl.where(rows[:, None] == CHUNK - 1, g_cumsum, 0.0), axis=0)
    if NORMALIZE:
        q = _unit_rows(q)
        k = _unit_rows(k)
    if SIGMOID:
        beta = beta_scale * _sigmoid(beta)  # past the end q, k and v are 0, so any beta will do

    # intra: A_kk[i, j] = k_i . (k_j exp(G_i - G_j)), A_qk alike with q_i; both [16, 16].
    if NARROW:
        # exp(G_i - G_j) = exp(G_i - m) exp(m - G_j) with m halfway down the lowest possible G: at
        # bound -5 both exponents lie within 58 of 0, in base 2, and their sum within 116.
        middle = 8.0 * lower_bound * LOG2E
        toward = tl.exp2(g_cumsum - middle)
        k_from = tl.trans(k * tl.exp2(middle - g_cumsum))
        A_kk = tl.dot(k * toward, k_from, input_precision="tf32x3")
        A_qk = tl.dot(q * toward, k_from, input_precision="tf32x3")
    else:
        A_kk = tl.zeros([CHUNK, CHUNK], tl.float32)
        A_qk = tl.zeros([CHUNK, CHUNK], tl.float32)
        for j in range(CHUNK):
            is_j = rows[:, None] == j
            k_j = tl.sum(tl.where(is_j, k, 0.0), axis=0)[None, :]
            g_j = tl.sum(tl.where(is_j, g_cumsum, 0.0), axis=0)[None, :]
            k_j = k_j * tl.exp2(tl.where(rows[:, None] >= j, g_cumsum - g_j, 0.0))
            here = rows[None, :] == j
            A_kk = tl.where(here, tl.sum(k * k_j, axis=1)[:, None], A_kk)
            A_qk = tl.where(here, tl.sum(q * k_j, axis=1)[:, None], A_qk)
    A_kk = tl.where(rows[:, None] > rows[None, :], A_kk * beta[:, None], 0.0)
    A_qk = tl.where(rows[:, None] >= rows[None, :], A_qk, 0.0)

    # solve: T = (I + A_kk)^-1 diag(beta) by fp32 substitution. A Neumann series has terms in the
    # thousands for repeated keys.
    T_mat = tl.where(rows[:, None] == rows[None, :], beta[:, None], 0.0)
    for j in range(CHUNK - 1):
        column = tl.sum(tl.where(rows[None, :] == j, A_kk, 0.0), axis=1)
        row = tl.sum(tl.where(rows[:, None] == j, T_mat, 0.0), axis=0)
        T_mat -= column[:, None] * row[None, :]

    # wy: T folded into its neighbours.
    k_restored = k * tl.exp2(g_last[None, :] - g_cumsum)
    Ak = tl.dot(tl.trans(T_mat), k_restored, input_precision="tf32x3")
    Aq = tl.dot(A_qk, T_mat, input_precision="tf32x3")

    decay = tl.exp2(g_cumsum)
    record = tl.program_id(0).to(tl.int64)  # slot * HV + head
    stages += record * (STAGE_ROWS * BK + STAGE_TAIL)
    dtype = stages.dtype.element_ty
    block = rows[:, None] * BK + cols[None, :]
    tl.store(stages + block, (k * decay).to(dtype))
    tl.store(stages + CHUNK * BK + block, (q * decay).to(dtype))
    tl.store(stages + 2 * CHUNK * BK + block, Ak.to(dtype))
    tl.store(stages + STAGE_ROWS * BK + rows[:, None] * CHUNK + rows[None, :], Aq.to(dtype))
    tl.store(totals + record * BK + cols, tl.exp2(g_last))


@triton.jit(
    do_not_specialize=[
        "T", "N", "HV", "group", "search_steps", "beta_batch_stride", "beta_token_stride",
    ],
    do_not_specialize_on_alignment=["beta", "A_log", "cu_seqlens"],
)  # fmt: skip
def kda_prepare(
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
    BOUNDED: tl.constexpr,
):
    """Everything of one chunk and value head that needs no state. Grid (slots * HV)."""
    slot = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    batch, chunk, begin, end = _chunk_of(cu_seqlens, slot, T, N, search_steps)
    first = begin + chunk * CHUNK
    # The rounding of slots leaves some without tokens; chunk < 0 needs cu_seqlens that decrease.
    if chunk < 0 or first >= end:
        return

    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BK)
    tokens = first + rows
    valid = tokens < end
    mask = valid[:, None] & (cols < K)[None, :]
    qk_cols = ((head // group) * K + cols)[None, :]
    q_rows = batch * q_batch_stride + tokens * q_token_stride
    k_rows = batch * k_batch_stride + tokens * k_token_stride
    g_rows = batch * g_batch_stride + tokens * g_token_stride
    beta_rows = batch * beta_batch_stride + tokens * beta_token_stride
    q_raw = tl.load(q + q_rows[:, None] + qk_cols, mask, 0.0).to(tl.float32)
    k_raw = tl.load(k + k_rows[:, None] + qk_cols, mask, 0.0).to(tl.float32)
    g_raw = tl.load(g + g_rows[:, None] + (head * K + cols)[None, :], mask, 0.0).to(tl.float32)
    beta_raw = tl.load(beta + beta_rows + head, valid, 0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * K + cols, cols < K, 0.0)
    rate = tl.exp2(tl.load(A_log + head) * LOG2E)
    rate = tl.where(rate > LARGEST, LARGEST, rate)  # inf times a logit of 0 would be NaN

    g_log2 = _log2_decay(g_raw, rate, bias[None, :], lower_bound, BOUNDED)
    _write_stage(
        q_raw, k_raw, g_log2, beta_raw, mask, stages, totals, lower_bound, 1.0,
        BK, BOUNDED, True, True,
    )  # fmt: skip


@triton.jit
def _advance(
    S,
    stages,
    totals,
    v,
    out,
    scale,
    first_chunk,
    last_chunk,
    length,
    wide_HV,
    v_token_stride,
    out_token_stride,
    V,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state S [BV, BK] after chunks [first_chunk, last_chunk), whose outputs are stored.

    stages, totals point at this sequence and head; v, out [BV] at its first token and V block.
    """
    rows = tl.arange(0, CHUNK).to(tl.int64)
    cols = tl.arange(0, BK)
    v_mask = tl.arange(0, BV) < V
    block = rows[:, None] * BK + cols[None, :]
    for chunk in range(first_chunk, last_chunk):
        record = chunk * wide_HV
        stage = stages + record * (STAGE_ROWS * BK + STAGE_TAIL)
        k_decayed = tl.load(stage + block).to(tl.float32)
        q_decayed = tl.load(stage + CHUNK * BK + block).to(tl.float32)
        Ak = tl.load(stage + 2 * CHUNK * BK + block).to(tl.float32)
        Aq_block = STAGE_ROWS * BK + rows[:, None] * CHUNK + rows[None, :]
        Aq = tl.load(stage + Aq_block).to(tl.float32)
        g_total = tl.load(totals + record * BK + cols)
        tokens = chunk * CHUNK + rows
        mask = v_mask[:, None] & (tokens < length)[None, :]
        v_t = tl.load(v[:, None] + (tokens * v_token_stride)[None, :], mask, 0.0).to(tl.float32)

        # All of it transposed: S as the left operand stays in the registers that hold it.
        R = v_t - tl.dot(S, tl.trans(k_decayed), input_precision=PRECISION)
        o = tl.dot(S, tl.trans(q_decayed), input_precision=PRECISION)
        o = tl.dot(R, tl.trans(Aq), o, input_precision=PRECISION) * scale
        tl.store(
            out[:, None] + (tokens * out_token_stride)[None, :],
            o.to(out.dtype.element_ty),
            mask,
        )
        S = tl.dot(R, Ak, S * g_total[None, :], input_precision=PRECISION)
    return S


@triton.jit(
    do_not_specialize=[
        "T", "N", "HV", "num_slots", "index_stride",
    ],
    do_not_specialize_on_alignment=[
        "cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets",
    ],
)  # fmt: skip
def kda_recurrence(
    stages,
    totals,
    v,
    out,
    initial_state,
    final_state,
    checkpoint_state,
    cu_seqlens,
    state_indices,
    has_initial_state,
    checkpoint_offsets,
    scale,
    T,
    N,
    HV,
    num_slots,
    index_stride,
    v_batch_stride,
    v_token_stride,
    out_batch_stride,
    out_token_stride,
    initial_stride,
    final_stride,
    checkpoint_stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunks of one sequence, head and block of V, one after the other.

    Grid (N * HV * cdiv(V, BV)), blocks of V adjacent: they read the same stages, from L2.
    state_indices (or None) pick slots of the pool; one outside [0, num_slots) is no slot: the
    sequence starts from zero and its state is dropped.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    v_first = (tl.program_id(0) % blocks) * BV
    head = tl.program_id(0) // blocks % HV
    n = tl.program_id(0) // blocks // HV
    wide_n = n.to(tl.int64)
    if cu_seqlens is None:
        batch = wide_n
        begin = wide_n * 0
        end = begin + T
        slot = wide_n * ((T + CHUNK - 1) // CHUNK)
    else:
        batch = wide_n * 0
        begin, end = _bounds(cu_seqlens, n, T)
        slot = begin // CHUNK + n
    length = tl.maximum(end - begin, 0)
    num_chunks = ((length + CHUNK - 1) // CHUNK).to(tl.int32)

    cols = tl.arange(0, BK)
    v_cols = v_first + tl.arange(0, BV)
    state_mask = (v_cols < V)[:, None] & (cols < K)[None, :]
    state_block = head.to(tl.int64) * (V * K) + v_cols[:, None] * K + cols[None, :]

    state_row = wide_n
    owned = n >= 0
    if state_indices is not None:
        state_row = tl.load(state_indices + wide_n * index_stride).to(tl.int64)
        owned = (state_row >= 0) & (state_row < num_slots)
    S = tl.zeros([BV, BK], tl.float32)
    if initial_state is not None:
        started = owned
        if has_initial_state is not None:
            started = owned & (tl.load(has_initial_state + n) != 0)
        source = initial_state + state_row * initial_stride + state_block
        S = tl.load(source, state_mask & started, 0.0).to(tl.float32)

    wide_HV = HV.to(tl.int64)
    record = slot * wide_HV + head
    stages += record * (STAGE_ROWS * BK + STAGE_TAIL)
    totals += record * BK
    v += batch * v_batch_stride + begin * v_token_stride + head * V + v_cols
    out += batch * out_batch_stride + begin * out_token_stride + head * V + v_cols
    left = V - v_first
    done = num_chunks * 0
    if checkpoint_offsets is not None:
        offset = tl.load(checkpoint_offsets + n).to(tl.int64)
        taken = (offset > 0) & (offset <= length) & (offset % CHUNK == 0)
        done = tl.where(taken, offset // CHUNK, 0).to(tl.int32)
        S = _advance(
            S, stages, totals, v, out, scale, done * 0, done, length, wide_HV,
            v_token_stride, out_token_stride, left, BK, BV, PRECISION,
        )  # fmt: skip
        target = checkpoint_state + wide_n * checkpoint_stride + state_block
        tl.store(target, S.to(checkpoint_state.dtype.element_ty), state_mask & taken)
    S = _advance(
        S, stages, totals, v, out, scale, done, num_chunks, length, wide_HV,
        v_token_stride, out_token_stride, left, BK, BV, PRECISION,
    )  # fmt: skip
    target = final_state + state_row * final_stride + state_block
    tl.store(target, S.to(final_state.dtype.element_ty), state_mask & owned)
