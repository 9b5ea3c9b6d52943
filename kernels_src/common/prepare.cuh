// The prepare step: one chunk of one value head, by two warps, from raw inputs to a stage image (common/stage.cuh).
//
//   gate_cumsum  g = lower_bound sigmoid(exp(A_log) (g_raw + dt_bias)), G = cumsum g          fp32, base 2
//   intra        A = beta_i k_i k_j exp(G_i - G_j) (j < i), M = q_i k_j exp(G_i - G_j) (j <= i)
//   solve        T = (I + A)^-1 diag(beta)
//   wy           A_k = T^T (k exp(G_last - G)), A_q = M T
//
// Warp w owns the 16 tokens of block w. exp(+G) and exp(-G) are taken from the block's own start, where |G| <= 80 cannot
// overflow; between the blocks every exponent is negative. Scores of a block need bf16 operands for exp(-G) up to e^80;
// all else is at most 1 in magnitude and goes through f16, eight times as precise.
//
// The gates are summed with a lane for four channels, token after token, in fp32. Everything else uses the
// MMA layout with permuted channels: lane (gid, tid) holds tokens gid and gid + 8, channels 32 m + 8 tid .. + 7 of each
// group m, so that global accesses are 16 bytes wide and A and B fragments need no shuffle. A contraction
// does not mind in which order its channels come, as long as both operands agree.
#pragma once
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/sequence.cuh"

constexpr int kGRow = kHeadDim + 4;  // floats: neighbouring rows start 16 bytes apart, modulo the banks

struct PrepareSmem {
    float G[kChunk][kGRow];           // cumulative log2 decay from the block's start; later T and block 1's k_local
    float block_decay[2][kHeadDim];   // exp(G) at the end of each block
    alignas(128) u8 k[2 * kHalfTile];  // raw bf16; then k_restored, f16, channels permuted: position 32 m + 8 jj + 2 tid + b is 32 m + 8 tid + 2 jj + b
    alignas(128) u8 q[2 * kHalfTile];  // raw bf16; then block 0's k_end and block 1's q_local
    float A_columns[2][kBlock][kBlock];  // [block][j][i]: column j of A, for the substitution
    float beta[kChunk];
};

// Fragments that one warp leaves for the other (or for itself), lane by lane, in the place of what it has used up. Each is
// 16 bytes a lane for 16 channels; group m has two.
KDA_DEVICE Quad32* k_end_fragment(PrepareSmem& smem, int m, int half, int lane) {  // f16 B: k exp(G_end - G), block 0
    const int at = 32 * half + lane;
    return reinterpret_cast<Quad32*>(smem.q + tile_offset(at / 4, 4 * m + at % 4));
}
KDA_DEVICE Quad32* q_local_fragment(PrepareSmem& smem, int m, int half, int lane) {  // f16 A: q exp(G), block 1
    const int at = 32 * half + lane;
    return reinterpret_cast<Quad32*>(smem.q + tile_offset(kBlock + at / 4, 4 * m + at % 4));
}
KDA_DEVICE Quad32* k_local_fragment(PrepareSmem& smem, int m, int half, int lane) {  // f16 A: k exp(G), block 1
    const int at = 32 * half + lane;
    return reinterpret_cast<Quad32*>(&smem.G[kBlock + at / 8][32 * m + 4 * (at % 8)]);
}
// T, f16 [32 x 32], over block 0's gates. Rows 80 bytes apart: conflict-free for ldmatrix.
KDA_DEVICE u16* t_element(PrepareSmem& smem, int i, int j) { return reinterpret_cast<u16*>(smem.G) + 40 * i + j; }

// The power of two that brings the largest beta of a chunk that hardly writes into [1/2, 1).
KDA_DEVICE int beta_shift(float beta_max) {
    return beta_max < 0x1p-6f && beta_max > 0.0f ? min(-1 - ilogb_fast(beta_max), 60) : 0;
}

// 1 / |x| of a row of which four lanes hold 32 channels each; eps counts as one more square.
KDA_DEVICE float row_rsqrt(const u8* tile, int row, float prescale) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        const Quad32 x = load_quad(tile + tile_offset(row, 4 * m + (threadIdx.x & 3)));
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float a = bf16_lo(pairs[j]) * prescale, b = bf16_hi(pairs[j]) * prescale;
            sum = fmaf(a, a, sum);
            sum = fmaf(b, b, sum);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return rsqrt_approx(fmaf(kNormEps * prescale, prescale, sum)) * prescale;
}
// Squares of values beyond 2^60 overflow fp32: a warp that meets one measures its rows again, scaled down.
KDA_DEVICE float inverse_norm(const u8* tile, int row) {
    const float r = row_rsqrt(tile, row, 1.0f);
    if (!__any_sync(0xffffffffu, r == 0.0f)) return r;
    const float scaled = row_rsqrt(tile, row, 0x1p-70f);
    return r == 0.0f ? scaled : r;
}

// Block `warp` of chunk `chunk` of sequence `seq` for value head `hv`; `barrier()` joins the two warps, who call it equally often.
template <int warp, typename Barrier>
KDA_DEVICE void prepare_block(const KdaArgs& args, const Sequence& seq, const Chunk& chunk, int hv, u8* image,
                              PrepareSmem& smem, Barrier barrier) {
    const int lane = threadIdx.x & 31, gid = lane >> 2, tid = lane & 3;
    const int row0 = warp * kBlock;
    const int h = hv / (args.HV / args.H);
    const i64 token = seq.first + chunk.start;

    // Loads first: q and k on their way to shared memory while the gates are worked on. A lane fetches the pieces that
    // it will read itself, so waiting for its own copies is enough.
    const u16* q = args.q + seq.batch * args.q_batch + (token + row0 + gid) * args.q_token + h * kHeadDim + 8 * tid;
    const u16* k = args.k + seq.batch * args.k_batch + (token + row0 + gid) * args.k_token + h * kHeadDim + 8 * tid;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + gid + 8 * r;
        const bool live = row < chunk.valid;
        const u16* q_row = live ? q + 8 * r * args.q_token : args.q;  // any address will do for no bytes
        const u16* k_row = live ? k + 8 * r * args.k_token : args.k;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            cp_async_16_or_zero(shared_address(smem.k + tile_offset(row, 4 * m + tid)), k_row + 32 * m, live);
            cp_async_16_or_zero(shared_address(smem.q + tile_offset(row, 4 * m + tid)), q_row + 32 * m, live);
        }
    }
    cp_async_commit();
    const u16* g = args.g + seq.batch * args.g_batch + (token + row0) * args.g_token + hv * kHeadDim + 4 * lane;
    Pair32 g_raw[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i)
        g_raw[i] = row0 + i < chunk.valid ? load_pair_streaming(g + i * args.g_token) : Pair32{0, 0};
    float beta = 0.0f;
    if (lane < kBlock && row0 + lane < chunk.valid) {
        beta = sigmoid(bf16_to_float(args.beta[seq.batch * args.beta_batch + (token + row0 + lane) * args.beta_token + hv]));
    }
    if (lane < kBlock) smem.beta[row0 + lane] = beta;

    // gate_cumsum: lane owns channels 4 lane .. + 3. Masked tokens neither decay nor, with k = q = beta = 0, write.
    {
        const float slope = exp2_approx(kLog2E * args.A_log[hv]);
        const Float4 bias = *reinterpret_cast<const Float4*>(args.dt_bias + hv * kHeadDim + 4 * lane);
        const float bound = args.lower_bound * kLog2E;
        Float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            const float live = row0 + i < chunk.valid ? bound : 0.0f;
            sum.x = fmaf(live, sigmoid(slope * (bf16_lo(g_raw[i].x) + bias.x)), sum.x);
            sum.y = fmaf(live, sigmoid(slope * (bf16_hi(g_raw[i].x) + bias.y)), sum.y);
            sum.z = fmaf(live, sigmoid(slope * (bf16_lo(g_raw[i].y) + bias.z)), sum.z);
            sum.w = fmaf(live, sigmoid(slope * (bf16_hi(g_raw[i].y) + bias.w)), sum.w);
            *reinterpret_cast<Float4*>(&smem.G[row0 + i][4 * lane]) = sum;
        }
        *reinterpret_cast<Float4*>(&smem.block_decay[warp][4 * lane]) =
            Float4{exp2_approx(sum.x), exp2_approx(sum.y), exp2_approx(sum.z), exp2_approx(sum.w)};
    }
    cp_async_wait<0>();
    float k_inverse_norm[2], q_inverse_norm[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        k_inverse_norm[r] = inverse_norm(smem.k, row0 + gid + 8 * r);
        q_inverse_norm[r] = inverse_norm(smem.q, row0 + gid + 8 * r);
    }
    barrier();  // G, block_decay and beta of both blocks are in place

    const int shift = beta_shift(warp_max_positive(smem.beta[lane]));

    // intra: scores within the block, and the chunk-level operands on the way.
    float A[2][4] = {}, M[2][4] = {};     // C tiles: columns 0..7 and 8..15 of the block
#pragma unroll 1  // unrolled, it needs twice the registers and gains nothing
    for (int m = 0; m < 4; ++m) {
        const int channel = 32 * m + 8 * tid;
        float own[8], other[8];  // decay of this block, and of the one before or after it
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
            *reinterpret_cast<Float4*>(own + c) = *reinterpret_cast<const Float4*>(&smem.block_decay[warp][channel + c]);
            *reinterpret_cast<Float4*>(other + c) = *reinterpret_cast<const Float4*>(&smem.block_decay[1 - warp][channel + c]);
        }
        u32 k_bf16[2][4], q_bf16[2][4], k_grown[2][4], k_end[2][4], k_f16[2][4], q_f16[2][4];  // pairs of channels, by row
        const Quad32 k_raw[2] = {load_quad(smem.k + tile_offset(row0 + gid, 4 * m + tid)),
                                 load_quad(smem.k + tile_offset(row0 + gid + 8, 4 * m + tid))};
        const Quad32 q_raw[2] = {load_quad(smem.q + tile_offset(row0 + gid, 4 * m + tid)),
                                 load_quad(smem.q + tile_offset(row0 + gid + 8, 4 * m + tid))};
        __syncwarp();  // the warp has read group m of k and q, whose places are about to be reused
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = row0 + gid + 8 * r;
            const Quad32 kq = k_raw[r], qq = q_raw[r];
            const u32 k_pairs[4] = {kq.x, kq.y, kq.z, kq.w}, q_pairs[4] = {qq.x, qq.y, qq.z, qq.w};
            u32 k_image[4], q_image[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const Float2 G = *reinterpret_cast<const Float2*>(&smem.G[row][channel + 2 * j]);
                const float decay_lo = exp2_approx(G.x), decay_hi = exp2_approx(G.y);
                const float k_lo = bf16_lo(k_pairs[j]) * k_inverse_norm[r], k_hi = bf16_hi(k_pairs[j]) * k_inverse_norm[r];
                const float kd_lo = k_lo * decay_lo, kd_hi = k_hi * decay_hi;
                const float qd_lo = bf16_lo(q_pairs[j]) * q_inverse_norm[r] * decay_lo;
                const float qd_hi = bf16_hi(q_pairs[j]) * q_inverse_norm[r] * decay_hi;
                const float grown_lo = k_lo * exp2_approx(-G.x), grown_hi = k_hi * exp2_approx(-G.y);
                const float end_lo = grown_lo * own[2 * j], end_hi = grown_hi * own[2 * j + 1];
                k_bf16[r][j] = pack_bf16(kd_lo, kd_hi);
                q_bf16[r][j] = pack_bf16(qd_lo, qd_hi);
                k_grown[r][j] = pack_bf16(grown_lo, grown_hi);
                k_end[r][j] = pack_f16(end_lo, end_hi);
                k_f16[r][j] = pack_f16(kd_lo, kd_hi);
                q_f16[r][j] = pack_f16(qd_lo, qd_hi);
                const float scale_lo = kOperandScale * (warp ? other[2 * j] : 1.0f);
                const float scale_hi = kOperandScale * (warp ? other[2 * j + 1] : 1.0f);
                k_image[j] = pack_f16(kd_lo * scale_lo, kd_hi * scale_hi);
                q_image[j] = pack_f16(qd_lo * scale_lo, qd_hi * scale_hi);
                *reinterpret_cast<u32*>(smem.k + tile_offset(row, 4 * m + j) + 4 * tid) =
                    warp ? pack_f16(end_lo, end_hi) : pack_f16(end_lo * other[2 * j], end_hi * other[2 * j + 1]);
            }
            const int at = tile_offset(row, 4 * m + tid);
            store_quad(image + kKDecayed + at, Quad32{k_image[0], k_image[1], k_image[2], k_image[3]});
            store_quad(image + kQDecayed + at, Quad32{q_image[0], q_image[1], q_image[2], q_image[3]});
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 16 channels each
            const int j = 2 * half;
            const u32 k_a[4] = {k_bf16[0][j], k_bf16[1][j], k_bf16[0][j + 1], k_bf16[1][j + 1]};
            const u32 q_a[4] = {q_bf16[0][j], q_bf16[1][j], q_bf16[0][j + 1], q_bf16[1][j + 1]};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma_bf16(A[n], k_a, k_grown[n][j], k_grown[n][j + 1]);
                mma_bf16(M[n], q_a, k_grown[n][j], k_grown[n][j + 1]);
            }
            if (warp == 0) {
                *k_end_fragment(smem, m, half, lane) = Quad32{k_end[0][j], k_end[0][j + 1], k_end[1][j], k_end[1][j + 1]};
            } else {
                *q_local_fragment(smem, m, half, lane) = Quad32{q_f16[0][j], q_f16[1][j], q_f16[0][j + 1], q_f16[1][j + 1]};
            }
        }
        if (warp == 1) {
            __syncwarp();  // the warp has read group m of G
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int j = 2 * half;
                *k_local_fragment(smem, m, half, lane) = Quad32{k_f16[0][j], k_f16[1][j], k_f16[0][j + 1], k_f16[1][j + 1]};
            }
        }
    }
    // Causality, and beta on the rows of A.
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = gid + 8 * (e >> 1), j = 8 * n + 2 * tid + (e & 1);
            smem.A_columns[warp][j][i] = j < i ? A[n][e] * smem.beta[row0 + i] : 0.0f;
            if (j > i) M[n][e] = 0.0f;
        }
    }
    barrier();  // A, k_restored and block 0's keys are in place

    // solve: both diagonal blocks at once by warp 0, by forward substitution in fp32 (a Neumann series diverges on repeated
    // keys); lane = column, half a warp for each block. Meanwhile warp 1 takes block 1's scores with block 0's keys.
    float L[2][4] = {}, M_10[2][4] = {};
    if (warp == 0) {
        const int block = lane >> 4, column = lane & 15;
        const float sigma = smem.beta[lane] * exp2_int(shift);
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) x[i] = i == column ? sigma : 0.0f;
#pragma unroll
        for (int j = 0; j + 1 < kBlock; ++j) {
#pragma unroll
            for (int i4 = (j + 1) / 4; i4 < kBlock / 4; ++i4) {
                const Float4 a = *reinterpret_cast<const Float4*>(&smem.A_columns[block][j][4 * i4]);
                const float a4[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (4 * i4 + e > j) x[4 * i4 + e] = fmaf(-a4[e], x[j], x[4 * i4 + e]);
            }
        }
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
            *t_element(smem, 16 * block + i, 16 * block + column) = static_cast<u16>(pack_f16(x[i], 0.0f));
        }
    } else {
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const Quad32 b = *k_end_fragment(smem, s / 2, s & 1, lane);
            const Quad32 kl = *k_local_fragment(smem, s / 2, s & 1, lane), ql = *q_local_fragment(smem, s / 2, s & 1, lane);
            const u32 k_a[4] = {kl.x, kl.y, kl.z, kl.w}, q_a[4] = {ql.x, ql.y, ql.z, ql.w};
            mma_f16(L[0], k_a, b.x, b.y);
            mma_f16(L[1], k_a, b.z, b.w);
            mma_f16(M_10[0], q_a, b.x, b.y);
            mma_f16(M_10[1], q_a, b.z, b.w);
        }
    }
    barrier();  // T's diagonal blocks are in place

    // Row of T (or k_restored) whose address this lane gives to ldmatrix.x4: tiles (0, 0), (8, 0), (0, 8), (8, 8).
    const int tile_row = (lane & 7) + 8 * ((lane >> 3) & 1), tile_column = 8 * (lane >> 4);
    if (warp == 1) {
        // T_10 = -T_11 L T_00, where T_11's beta stands for that of A_10 = diag(beta) L.
        u32 t00[4], t11[4];
        ldmatrix_x4_trans(t00, shared_address(t_element(smem, tile_row, tile_column)));
        ldmatrix_x4(t11, shared_address(t_element(smem, 16 + tile_row, 16 + tile_column)));
        const u32 l[4] = {pack_f16(L[0][0], L[0][1]), pack_f16(L[0][2], L[0][3]), pack_f16(L[1][0], L[1][1]), pack_f16(L[1][2], L[1][3])};
        const float unshift = -exp2_int(-shift);  // both factors carry 2^shift, the product needs one
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float p[4] = {}, t10[4] = {};
            mma_f16(p, l, t00[2 * n], t00[2 * n + 1]);
            const u32 b0 = movmatrix_trans(pack_f16(p[0] * unshift, p[1] * unshift));
            const u32 b1 = movmatrix_trans(pack_f16(p[2] * unshift, p[3] * unshift));
            mma_f16(t10, t11, b0, b1);
            *reinterpret_cast<u32*>(t_element(smem, 16 + gid, 8 * n + 2 * tid)) = pack_f16(t10[0], t10[1]);
            *reinterpret_cast<u32*>(t_element(smem, 24 + gid, 8 * n + 2 * tid)) = pack_f16(t10[2], t10[3]);
        }
    }
    barrier();  // T is in place

    // wy: rows of this block. T^T is upper triangular: block 0 of A_k takes keys of both blocks, block 1 only its own.
    u32 t_upper[4] = {}, t_own[4];  // A fragments of T^T
    {
        // Transposed loads: tiles in the order of an A fragment of T^T, (j, i), (j + 8, i), (j, i + 8), (j + 8, i + 8).
        const int i = (lane & 7) + 8 * (lane >> 4), j = 8 * ((lane >> 3) & 1);
        ldmatrix_x4_trans(t_own, shared_address(t_element(smem, row0 + i, row0 + j)));
        if (warp == 0) ldmatrix_x4_trans(t_upper, shared_address(t_element(smem, 16 + i, j)));
    }
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        float ak[4][4] = {};
#pragma unroll
        for (int jj = 0; jj < 4; jj += 2) {
            const int piece = 4 * m + jj + (lane >> 4);
            u32 b[4];
            ldmatrix_x4_trans(b, shared_address(smem.k + tile_offset(row0 + tile_row, piece)));
            mma_f16(ak[jj], t_own, b[0], b[1]);
            mma_f16(ak[jj + 1], t_own, b[2], b[3]);
            if (warp == 0) {
                ldmatrix_x4_trans(b, shared_address(smem.k + tile_offset(16 + tile_row, piece)));
                mma_f16(ak[jj], t_upper, b[0], b[1]);
                mma_f16(ak[jj + 1], t_upper, b[2], b[3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            store_quad(image + kAk + tile_offset(row0 + gid + 8 * r, 4 * m + tid),
                       Quad32{pack_f16(ak[0][2 * r], ak[0][2 * r + 1]), pack_f16(ak[1][2 * r], ak[1][2 * r + 1]),
                              pack_f16(ak[2][2 * r], ak[2][2 * r + 1]), pack_f16(ak[3][2 * r], ak[3][2 * r + 1])});
        }
    }
    {
        float own[2][4] = {}, low[2][4] = {};  // columns of this block, and of block 0 for block 1's rows
        const u32 m_own[4] = {pack_f16(M[0][0], M[0][1]), pack_f16(M[0][2], M[0][3]),
                              pack_f16(M[1][0], M[1][1]), pack_f16(M[1][2], M[1][3])};
        u32 b[4];
        ldmatrix_x4_trans(b, shared_address(t_element(smem, row0 + tile_row, row0 + tile_column)));
        mma_f16(own[0], m_own, b[0], b[1]);
        mma_f16(own[1], m_own, b[2], b[3]);
        if (warp == 1) {
            const u32 m_10[4] = {pack_f16(M_10[0][0], M_10[0][1]), pack_f16(M_10[0][2], M_10[0][3]),
                                 pack_f16(M_10[1][0], M_10[1][1]), pack_f16(M_10[1][2], M_10[1][3])};
            ldmatrix_x4_trans(b, shared_address(t_element(smem, 16 + tile_row, tile_column)));
            mma_f16(low[0], m_own, b[0], b[1]);
            mma_f16(low[1], m_own, b[2], b[3]);
            ldmatrix_x4_trans(b, shared_address(t_element(smem, tile_row, tile_column)));
            mma_f16(low[0], m_10, b[0], b[1]);
            mma_f16(low[1], m_10, b[2], b[3]);
        }
        const float scale = kOperandScale * exp2_int(-shift);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 own_pair = pack_f16(own[n][2 * r] * scale, own[n][2 * r + 1] * scale);
                const u32 low_pair = pack_f16(low[n][2 * r] * scale, low[n][2 * r + 1] * scale);
                u8* row = image + kAq + 4 * tid;
                const int t = row0 + gid + 8 * r;
                *reinterpret_cast<u32*>(row + aq_offset(t, n)) = warp ? low_pair : own_pair;
                *reinterpret_cast<u32*>(row + aq_offset(t, n + 2)) = warp ? own_pair : 0u;
            }
        }
    }
    {
        const int c = 64 * warp + 2 * lane;
        *reinterpret_cast<Float2*>(image + kDecay + 4 * c) =
            Float2{smem.block_decay[0][c] * smem.block_decay[1][c], smem.block_decay[0][c + 1] * smem.block_decay[1][c + 1]};
        if (warp == 0 && lane == 0) {
            *reinterpret_cast<float*>(image + kShift) = exp2_int(shift);
            *reinterpret_cast<i32*>(image + kShift + 4) = shift;
        }
    }
}
