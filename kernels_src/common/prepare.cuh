// The prepare step: one chunk of one value head, by two warps, from raw inputs to a stage image (common/stage.cuh) in shared
// memory.
//
//   gate_cumsum  g = lower_bound sigmoid(exp(A_log) (g_raw + dt_bias)), G = cumsum g          base 2
//   intra        A = beta_i k_i k_j exp(G_i - G_j) (j < i), M = q_i k_j exp(G_i - G_j) (j <= i)
//   solve        T = (I + A)^-1 diag(beta)
//   wy           A_k = T^T (k exp(G_last - G)), A_q = M T
//
// Warp `half` owns 64 channels of all 32 tokens: what crosses between the two blocks of 16 tokens needs no other warp, and only
// norms and scores, sums over channels, are shared. exp(+G) and exp(-G) are taken from a block's own start, where |G| <= 80
// cannot overflow; between the blocks every exponent is negative. Scores of a block need fp32's range for exp(-G) up to e^80 and
// go through tf32; all else is at most 1 in magnitude and goes through f16, which is as precise.
//
// Everything keeps the layout of MMA fragments (common/mma.cuh): a lane holds tokens gid and gid + 8 of a block, channels 2 tid
// and 2 tid + 1 of a tile of eight. The sum of the gates over tokens is a product too: a triangle of ones times the gates
// comes out in that layout, in fp32. Gates are rounded to f16 for it, by 2^-11 of themselves at most.
#pragma once
#include "common/barrier.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/sequence.cuh"

// A stage image before it is one, in shared memory, aligned to 128 bytes: raw k, q and g where k_decayed, q_decayed and a_k will
// be, and what belongs to single channels and tokens where a_q will be. In between k exp(G_last - G) stands in a_k's place. In
// place, 16 channels at a time: read, worked on, written.
constexpr int kRawK = kKDecayed, kRawQ = kQDecayed, kRawG = kAk;
constexpr int kBias = kAq;                  // f32 [128]: the gates' bias times slope
constexpr int kBeta = kBias + 4 * kHeadDim; // f32 [32]: activated; 0 past the last token
constexpr int kSquares = kBeta + 4 * kChunk;  // f32 [half][k, q][32]: sums over 64 channels; negative: of values scaled by kDown
constexpr int kSlope = kSquares + 4 * 4 * kChunk;  // f32: what the gates' logits are multiplied by
constexpr int kValid = kSlope + 4;          // i32: 1 .. 32 tokens
static_assert(kValid + 4 <= kDecay, "where a_q will be");
KDA_DEVICE float& squares_of(u8* image, int half, int tensor, int token) {
    return reinterpret_cast<float*>(image + kSquares)[kChunk * (2 * half + tensor) + token];
}

// What the two warps work with besides.
struct PrepareScratch {
    // Sums over half of the channels, lane by lane: A_00, A_11, A_10 from warp 1 for warp 0; M's from warp 0 for warp 1. Over
    // the former, once they are read: the columns of A, then T.
    Float4 partial[2][6][32];
};

// Block 0's k and q are scaled as the image wants them; block 1's, which are yet to decay over block 0, by so much less.
constexpr float kBlock0Scale = 0x1p4f;
static_assert(kKeyScale == kWriteScale * kBlock0Scale, "k exp(G_end - G) and block 1's k exp(G) carry kWriteScale");
constexpr float kMScale = kWriteScale * kQueryScale / kBlock0Scale;  // of M in f16
// tf32 operands are truncated: each loses 0.72 * 2^-11 of itself on average, which the scores get back.
constexpr float kTruncation = 1.0f + 2 * 0.72f * 0x1p-11f;
// Of gates in f16: 5 log2(e) times this is still in range, and a gate that forgets 2^-26 a token is not yet subnormal.
constexpr float kGateScale = 0x1p12f;

// Column j of a block's A, for the substitution: 16 floats, 80 bytes apart, which costs no bank conflict.
KDA_DEVICE float* a_column(PrepareScratch& scratch, int block, int j) {
    return reinterpret_cast<float*>(scratch.partial[0]) + 20 * (kBlock * block + j);
}
// T, f16 [32 x 32], rows 80 bytes apart, which is conflict-free for ldmatrix.
KDA_DEVICE u16* t_element(PrepareScratch& scratch, int i, int j) {
    return reinterpret_cast<u16*>(scratch.partial[0]) + 40 * i + j;
}

// The power of two that brings the largest beta of a chunk that hardly writes into [1/2, 1).
KDA_DEVICE int beta_shift(float beta_max) {
    return beta_max < 0x1p-6f && beta_max > 0.0f ? min(-1 - ilogb_fast(beta_max), 60) : 0;
}

// Where this lane's row of four 8x8 tiles lies in a tile of the image or of raw inputs: tokens 0 .. 15 by channels 0 .. 15 of the
// warp's half, in the order of an A fragment. Group m of 16 channels is at ^ (m << 5), block 1 kBlock * kRowBytes further on.
KDA_DEVICE u32 lane_tile(int half, int lane) {
    return tile_offset((lane & 7) + 8 * ((lane >> 3) & 1), 8 * half + (lane >> 4));
}

// Squares of values beyond 2^60 overflow fp32; such rows are measured scaled down.
constexpr float kDown = 0x1p-70f;

// Sum of squares of a row's 64 channels, of which a lane of the quad adds up 16.
KDA_DEVICE float scaled_row_squares(const u8* tile, int row, int half) {
    float sum = 0.0f;
#pragma unroll 1  // rare: small rather than fast
    for (int m = 0; m < 2; ++m) {
        const Quad32 x = load_quad(tile + tile_offset(row, 8 * half + 4 * m + (threadIdx.x & 3)));
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float a = bf16_lo(pairs[j]) * kDown, b = bf16_hi(pairs[j]) * kDown;
            sum = fmaf(a, a, sum);
            sum = fmaf(b, b, sum);
        }
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// Leaves the sums of squares of the rows of k and q, 64 channels, at kSquares. They are the diagonals of the rows' Gram
// matrices: exact products, fp32 sums, and no unpacking.
KDA_DEVICE void measure_rows(u8* image, int half) {
    const int lane = threadIdx.x & 31, gid = lane >> 2, tid = lane & 3;
    const u32 rows = shared_address(image) + lane_tile(half, lane);
    float gram[2][2][2][4] = {};  // [k, q][block][tokens gid, gid + 8]
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int tensor = i / 2, block = i % 2;
            u32 a[4];
            ldmatrix_x4(a, (rows ^ (m << 5)) + (tensor ? kRawQ : kRawK) + block * kBlock * kRowBytes);
            mma_bf16(gram[tensor][block][0], a, a[0], a[2]);
            mma_bf16(gram[tensor][block][1], a, a[1], a[3]);
        }
    }
    const bool holds_diagonal = tid == gid >> 1;
    bool overflows = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&x)[2][4] = gram[i / 2][i % 2];
        const float own[2] = {gid & 1 ? x[0][1] : x[0][0], gid & 1 ? x[1][3] : x[1][2]};
        float* squares = &squares_of(image, half, i / 2, kBlock * (i % 2) + gid);
        if (holds_diagonal) squares[0] = own[0], squares[8] = own[1];
        overflows |= holds_diagonal && fmaxf(own[0], own[1]) == __int_as_float(0x7f800000);
    }
    if (__any_sync(0xffffffffu, overflows)) {
        __syncwarp();
#pragma unroll 1  // rare: small rather than fast
        for (int i = 0; i < 8; ++i) {
            const int tensor = i / 4, row = 8 * (i % 4) + gid;
            float& squares = squares_of(image, half, tensor, row);
            const float sum = scaled_row_squares(image + (tensor ? kRawQ : kRawK), row, half);
            if (tid == 0 && squares == __int_as_float(0x7f800000)) squares = -sum;
        }
    }
}
// scale / |x|, eps counted as one more square.
KDA_DEVICE float inverse_norm(u8* image, int tensor, int row, float scale) {
    const float a = squares_of(image, 0, tensor, row), b = squares_of(image, 1, tensor, row);
    const float sum = a + b, inf = __int_as_float(0x7f800000);
    if (a >= 0.0f && b >= 0.0f && sum < inf) return rsqrt_approx(sum + kNormEps) * scale;
    const float scaled = (a < 0.0f ? -a : a * kDown * kDown) + (b < 0.0f ? -b : b * kDown * kDown);
    return rsqrt_approx(scaled) * kDown * scale;
}

// The A fragment that adds up the gates of a block's tokens: 1 / kGateScale on and below the diagonal, 0 past the last token.
KDA_DEVICE void cumulate_fragment(u32 (&a)[4], int valid) {
    const int gid = (threadIdx.x & 31) >> 2, tid = threadIdx.x & 3;
    constexpr u32 one = 0x0c00;  // 2^-12 in f16
    static_assert(kGateScale == 0x1p12f, "its inverse is spelt out here");
    const auto pair = [&](bool below, int token) {  // of tokens `token`, token + 1, which a lane has on or below its diagonal
        const bool lo = token < valid && (below || 2 * tid <= gid), hi = token + 1 < valid && (below || 2 * tid + 1 <= gid);
        return (lo ? one : 0u) | (hi ? one << 16 : 0u);
    };
    a[0] = pair(false, 2 * tid);
    a[1] = pair(true, 2 * tid);
    a[2] = 0;
    a[3] = pair(false, 8 + 2 * tid);
}

// Where a chunk's raw inputs begin (its first token, its head), and their token strides in bytes.
struct ChunkInputs {
    const u8 *q, *k, *g, *beta;
    i32 q_step, k_step, g_step, beta_step;
    i32 valid;  // 1 .. 32 tokens
};

// Of `valid` tokens from `token` of batch row `row` on.
KDA_DEVICE ChunkInputs locate_inputs(const KdaArgs& args, i64 row, i64 token, i32 valid, int hv) {
    const int h = args.HV == args.H ? hv : hv / (args.HV / args.H);
    const auto at = [&](const u16* x, i64 batch, i64 step, int channel) {
        return reinterpret_cast<const u8*>(x + row * batch + token * step + channel);
    };
    ChunkInputs in;
    in.q = at(args.q, args.q_batch, args.q_token, h * kHeadDim);
    in.k = at(args.k, args.k_batch, args.k_token, h * kHeadDim);
    in.g = at(args.g, args.g_batch, args.g_token, hv * kHeadDim);
    in.beta = at(args.beta, args.beta_batch, args.beta_token, hv);
    in.q_step = 2 * static_cast<i32>(args.q_token);  // the host holds token strides below 2^30
    in.k_step = 2 * static_cast<i32>(args.k_token);
    in.g_step = 2 * static_cast<i32>(args.g_token);
    in.beta_step = 2 * static_cast<i32>(args.beta_token);
    in.valid = valid;
    return in;
}

// Those of `valid` tokens from the `start`th on, where `first` has the sequence's first.
KDA_DEVICE ChunkInputs inputs_from(const ChunkInputs& first, i32 start, i32 valid) {
    ChunkInputs in = first;
    in.q += static_cast<i64>(start) * first.q_step;
    in.k += static_cast<i64>(start) * first.k_step;
    in.g += static_cast<i64>(start) * first.g_step;
    in.beta += static_cast<i64>(start) * first.beta_step;
    in.valid = valid;
    return in;
}

// A quarter of a chunk's raw inputs: 64 channels of 16 tokens.
struct Quarter {
    int half, block;
};

// Asks for a quarter of q, k and g; by one warp, half a row a lane.
KDA_DEVICE void prefetch_inputs(const ChunkInputs& in, Quarter part) {
    const int row = kBlock * part.block + (threadIdx.x & 15), byte = 128 * part.half + 4 * (threadIdx.x & 16);
    if (row >= in.valid) return;
    prefetch_line(in.k + static_cast<i64>(row) * in.k_step + byte);
    prefetch_line(in.q + static_cast<i64>(row) * in.q_step + byte);
    prefetch_line(in.g + static_cast<i64>(row) * in.g_step + byte);
}

// Starts copying a quarter of a chunk's rows into a tile, zeros past the last token.
KDA_DEVICE void fetch_rows(u8* tile, const u8* from, i32 step, i32 valid, Quarter part) {
    // Opaque: as in prepare_chunk.
    const int lane = opaque(threadIdx.x) & 31, row = kBlock * part.block + (lane >> 3), piece = lane & 7;
    const u32 to = shared_address(tile) + tile_offset(row, 8 * part.half + piece);
    from += static_cast<i64>(row) * step + 128 * part.half + 16 * piece;
    // Four rows a step: row % 8, with which pieces are XORed, changes by 4.
    const auto place = [&](int i) { return (to ^ ((i & 1) << 6)) + 4 * i * kRowBytes; };
#pragma unroll
    for (int i = 0; i < 4; ++i) cp_async_16_or_zero(place(i), from + 4 * i * static_cast<i64>(step), row + 4 * i < valid);
}
KDA_DEVICE void fetch_keys(u8* image, const ChunkInputs& in, Quarter part) {
    fetch_rows(image + kRawK, in.k, in.k_step, in.valid, part);
    fetch_rows(image + kRawQ, in.q, in.q_step, in.valid, part);
}
KDA_DEVICE void fetch_gates(u8* image, const ChunkInputs& in, Quarter part) {
    fetch_rows(image + kRawG, in.g, in.g_step, in.valid, part);
}

// What is single for a channel, a token or a chunk, as it comes; by one warp, for 64 channels.
struct ChunkScalars {
    u16 beta;  // of token `lane`
    float A_log;
    Float2 bias;  // of channels 2 lane, 2 lane + 1
};
KDA_DEVICE u16 read_beta(const ChunkInputs& in) {
    const int lane = opaque(threadIdx.x) & 31;
    return load_half_streaming(in.beta + static_cast<i64>(min(lane, in.valid - 1)) * in.beta_step);
}
KDA_DEVICE ChunkScalars read_scalars(const KdaArgs& args, const ChunkInputs& in, int hv, int half) {
    const int lane = opaque(threadIdx.x) & 31;  // opaque: as in prepare_chunk
    ChunkScalars x;
    x.beta = read_beta(in);
    x.A_log = args.A_log[hv];
    x.bias = *reinterpret_cast<const Float2*>(args.dt_bias + hv * kHeadDim + 64 * half + 2 * lane);
    return x;
}
// Writes them to `image`: 64 channels' bias, and from `half` 0 what belongs to tokens and to the chunk.
KDA_DEVICE void write_scalars(u8* image, const ChunkScalars& x, i32 valid, int half) {
    const int lane = opaque(threadIdx.x) & 31;
    const float rate = exp2_approx(kLog2E * x.A_log), slope = -kLog2E * (rate > 0x1p100f ? 0x1p100f : rate);  // inf times a bias of 0 is NaN
    *reinterpret_cast<Float2*>(image + kBias + 4 * (64 * half + 2 * lane)) = Float2{x.bias.x * slope, x.bias.y * slope};
    if (half != 0) return;
    // Masked tokens neither decay nor, with k = q = beta = 0, write.
    *reinterpret_cast<float*>(image + kBeta + 4 * lane) = lane < valid ? sigmoid(bf16_to_float(x.beta)) : 0.0f;
    if (lane == 0) {
        *reinterpret_cast<float*>(image + kSlope) = slope;
        *reinterpret_cast<i32*>(image + kValid) = valid;
    }
}

// All of one half of the channels, loaded and measured by the warp that will prepare it. A barrier of both warps must follow.
KDA_DEVICE void load_half(const KdaArgs& args, const ChunkInputs& in, int hv, u8* image, int half) {
#pragma unroll
    for (int block = 0; block < 2; ++block) fetch_keys(image, in, Quarter{half, block});
    cp_async_commit();
#pragma unroll
    for (int block = 0; block < 2; ++block) fetch_gates(image, in, Quarter{half, block});
    cp_async_commit();
    const ChunkScalars scalars = read_scalars(args, in, hv, half);
    cp_async_wait<1>();  // k and q
    __syncwarp();
    measure_rows(image, half);
    write_scalars(image, scalars, in.valid, half);  // not before: they are the last to come
    cp_async_wait<0>();
}

// What was loaded to a stage image and measured, by warps `half` 0 and 1 (uniform, for the compiler too).
//
//   barrier()  joins the two warps
//   decayed()  is called by warp 1, who has time to spare while warp 0 solves: k_decayed and q_decayed are complete
//
// At the end each has written its part, and bulk copies may read what both have. `scratch` may be used for the next chunk at once.
template <typename Barrier, typename Decayed>
KDA_DEVICE void prepare_chunk(float lower_bound, u8* image_bytes, PrepareScratch& scratch, int half, Barrier barrier, Decayed decayed) {
    // Opaque: else a caller's loop keeps all that follows from it in registers.
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;

    float k_norm[2][2], q_norm[2][2];  // [block][tokens gid, gid + 8]
    {
        const float less = lane < kBlock ? 1.0f : 1.0f / kBlock0Scale;
        const float k = inverse_norm(image_bytes, 0, lane, less * kKeyScale), q = inverse_norm(image_bytes, 1, lane, less * kQueryScale);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            k_norm[i / 2][i % 2] = __shfl_sync(0xffffffffu, k, 8 * i + gid);
            q_norm[i / 2][i % 2] = __shfl_sync(0xffffffffu, q, 8 * i + gid);
        }
    }
    u32 cumulate[2][4];
    {
        const int valid = *reinterpret_cast<const i32*>(image_bytes + kValid);
        cumulate_fragment(cumulate[0], valid);
        cumulate_fragment(cumulate[1], valid - kBlock);
    }
    const float slope = *reinterpret_cast<const float*>(image_bytes + kSlope);
    // bound sigmoid(x) kGateScale = 1 / (c + c exp(-x)), exp in base 2 like all others.
    const float gate_c = reciprocal_approx(fminf(lower_bound * kLog2E * kGateScale, -0x1p-120f));
    const u32 image = shared_address(image_bytes);

    // gate_cumsum, intra: the warp's share of all scores, as C tiles of columns 0..7 and 8..15, times the scales; and the
    // chunk-level operands.
    float A[2][2][4] = {}, M[2][2][4] = {}, A_10[2][4] = {}, M_10[2][4] = {};
#pragma unroll 1  // unrolled, it leaves the instruction cache
    for (int m = 0; m < 4; ++m) {
        const u32 group = image + (lane_tile(half, lane) ^ (m << 5));
        u32 k_raw[2][4], q_raw[2][4];                          // A fragments
        u32 k_f16[2][4], q_f16[2][4], k_end[2][4], k_first[4];  // the same; k exp(G_end - G); block 0's exp(G_last - G)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            ldmatrix_x4(k_raw[b], group + kRawK + b * kBlock * kRowBytes);
            ldmatrix_x4(q_raw[b], group + kRawQ + b * kBlock * kRowBytes);
        }
        u32 k_late[4], q_late[4];  // block 1's, decayed over block 0
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const int channel = 64 * half + 16 * m + 8 * t;
            u32 g_raw[4];  // tokens 8 i + 2 tid, + 1 of channel gid
            ldmatrix_x4_trans(g_raw, image + kRawG + tile_offset(lane, 8 * half + 2 * m + t));
            const float bias = *reinterpret_cast<const float*>(image_bytes + kBias + 4 * (channel + gid));
            u32 gates[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float lo = exp2_approx(fmaf(slope, bf16_lo(g_raw[i]), bias)), hi = exp2_approx(fmaf(slope, bf16_hi(g_raw[i]), bias));
                gates[i] = pack_f16(reciprocal_approx(fmaf(gate_c, lo, gate_c)), reciprocal_approx(fmaf(gate_c, hi, gate_c)));
            }
            float end[2][2];  // exp(G) at the end of each block
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                float G[4] = {};
                mma_f16(G, cumulate[b], gates[2 * b], gates[2 * b + 1]);
                float decay[4], growth[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) decay[e] = exp2_approx(G[e]), growth[e] = exp2_approx(-G[e]);
                end[b][0] = __shfl_sync(0xffffffffu, decay[2], 28 + tid);
                end[b][1] = __shfl_sync(0xffffffffu, decay[3], 28 + tid);
                const float to_end[2] = {b ? end[b][0] : end[b][0] / kBlock0Scale, b ? end[b][1] : end[b][1] / kBlock0Scale};
                float kd[4], kg[4], qd[4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 k_pair = k_raw[b][2 * t + r], q_pair = q_raw[b][2 * t + r];
                    const float k[2] = {bf16_lo(k_pair) * k_norm[b][r], bf16_hi(k_pair) * k_norm[b][r]};
                    const float q[2] = {bf16_lo(q_pair) * q_norm[b][r], bf16_hi(q_pair) * q_norm[b][r]};
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        kd[2 * r + e] = k[e] * decay[2 * r + e];
                        qd[2 * r + e] = q[e] * decay[2 * r + e];
                        kg[2 * r + e] = k[e] * growth[2 * r + e];
                    }
                    k_f16[b][2 * t + r] = pack_f16(kd[2 * r], kd[2 * r + 1]);
                    q_f16[b][2 * t + r] = pack_f16(qd[2 * r], qd[2 * r + 1]);
                    k_end[b][2 * t + r] = pack_f16(kg[2 * r] * to_end[0], kg[2 * r + 1] * to_end[1]);
                }
                // The contraction takes channels 2 tid as its columns tid, 2 tid + 1 as tid + 4.
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    mma_tf32(A[b][n], kd[0], kd[2], kd[1], kd[3], kg[2 * n], kg[2 * n + 1]);
                    mma_tf32(M[b][n], qd[0], qd[2], qd[1], qd[3], kg[2 * n], kg[2 * n + 1]);
                }
            }
            const u32 over_first = pack_f16(end[0][0] * kBlock0Scale, end[0][1] * kBlock0Scale);
            const u32 over_second = pack_f16(end[1][0], end[1][1]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                k_late[2 * t + r] = mul_f16x2(k_f16[1][2 * t + r], over_first);
                q_late[2 * t + r] = mul_f16x2(q_f16[1][2 * t + r], over_first);
                k_first[2 * t + r] = mul_f16x2(k_end[0][2 * t + r], over_second);
            }
            if (gid == 0)
                *reinterpret_cast<Float2*>(image_bytes + decay_offset(channel / 8, tid)) = Float2{end[0][0] * end[1][0], end[0][1] * end[1][1]};
        }
        // Block 1 with block 0's keys, which as B fragments are what they are as A fragments.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            mma_f16(A_10[n], k_f16[1], k_end[0][n], k_end[0][n + 2]);
            mma_f16(M_10[n], q_f16[1], k_end[0][n], k_end[0][n + 2]);
        }
        stmatrix_x4(group + kKDecayed, k_f16[0]);
        stmatrix_x4(group + kKDecayed + kBlock * kRowBytes, k_late);
        stmatrix_x4(group + kQDecayed, q_f16[0]);
        stmatrix_x4(group + kQDecayed + kBlock * kRowBytes, q_late);
        stmatrix_x4(group + kRawG, k_first);
        stmatrix_x4(group + kRawG + kBlock * kRowBytes, k_end[1]);
    }

    // Warp 0 completes A, warp 1 M.
    const auto give = [&](const float (&own)[2][2][4], const float (&cross)[2][4]) {
        Float4 (&to)[6][32] = scratch.partial[1 - half];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            to[n][lane] = Float4{own[0][n][0], own[0][n][1], own[0][n][2], own[0][n][3]};
            to[2 + n][lane] = Float4{own[1][n][0], own[1][n][1], own[1][n][2], own[1][n][3]};
            to[4 + n][lane] = Float4{cross[n][0], cross[n][1], cross[n][2], cross[n][3]};
        }
    };
    const auto take = [&](float (&own)[2][2][4], float (&cross)[2][4]) {
        const Float4 (&from)[6][32] = scratch.partial[half];
        const auto add = [&](float (&x)[4], const Float4& y) { x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w; };
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            add(own[0][n], from[n][lane]);
            add(own[1][n], from[2 + n][lane]);
            add(cross[n], from[4 + n][lane]);
        }
    };
    if (half == 0)
        give(M, M_10);
    else
        give(A, A_10);
    const float beta = *reinterpret_cast<const float*>(image_bytes + kBeta + 4 * lane);
    const int shift = beta_shift(warp_max_positive(beta));
    async_proxy_fence();
    barrier();  // the other warp's sums are here

    // Row of T (or of a tile) whose address this lane gives to ldmatrix.x4: tiles (0, 0), (8, 0), (0, 8), (8, 8).
    const int tile_row = (lane & 7) + 8 * ((lane >> 3) & 1), tile_column = 8 * (lane >> 4);
    u32 m_own[2][4], m_10[4];  // f16 A fragments; warp 1's
    if (half == 0) {
        take(A, A_10);
        __syncwarp();  // A's columns go where the sums were
        // Causality (what lies above the diagonal may have overflowed: select, never multiply), and beta on the rows of A.
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const float scale = kTruncation / (b ? kWriteScale * kWriteScale : kKeyScale * kKeyScale);
            const float beta_scaled[2] = {__shfl_sync(0xffffffffu, beta, kBlock * b + gid) * scale,
                                          __shfl_sync(0xffffffffu, beta, kBlock * b + gid + 8) * scale};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = gid + 8 * (e >> 1), j = 8 * n + 2 * tid + (e & 1);
                    a_column(scratch, b, j)[i] = j < i ? A[b][n][e] * beta_scaled[e >> 1] : 0.0f;
                }
            }
        }
        u32 l[4];  // A_10 = diag(beta) L
#pragma unroll
        for (int n = 0; n < 2; ++n) l[2 * n] = pack_f16(A_10[n][0], A_10[n][1]), l[2 * n + 1] = pack_f16(A_10[n][2], A_10[n][3]);
        __syncwarp();

        // solve: both diagonal blocks at once, by forward substitution in fp32 (a Neumann series diverges on repeated keys);
        // lane = column, half a warp for each block.
        {
            const int b = lane >> 4, column = lane & 15;
            const float sigma = beta * exp2_int(shift);
            float x[kBlock];
#pragma unroll
            for (int i = 0; i < kBlock; ++i) x[i] = i == column ? sigma : 0.0f;
#pragma unroll
            for (int j = 0; j + 1 < kBlock; ++j) {
#pragma unroll
                for (int i4 = (j + 1) / 4; i4 < kBlock / 4; ++i4) {
                    const Float4 a = *reinterpret_cast<const Float4*>(a_column(scratch, b, j) + 4 * i4);
                    const float a4[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (4 * i4 + e > j) x[4 * i4 + e] = fmaf(-a4[e], x[j], x[4 * i4 + e]);
                }
            }
            __syncwarp();  // T goes where A's columns were
#pragma unroll
            for (int i = 0; i < kBlock; ++i) *t_element(scratch, kBlock * b + i, lane) = static_cast<u16>(pack_f16(x[i], 0.0f));
        }
        __syncwarp();
        // T_10 = -T_11 L T_00, where T_11's beta stands for that of A_10 = diag(beta) L.
        u32 t00[4], t11[4];
        ldmatrix_x4_trans(t00, shared_address(t_element(scratch, tile_row, tile_column)));
        ldmatrix_x4(t11, shared_address(t_element(scratch, kBlock + tile_row, kBlock + tile_column)));
        // Both factors carry 2^shift, the product needs one; L carries the scales of its keys.
        const float unshift = -exp2_int(-shift) / (kWriteScale * kWriteScale);
        u32 t10[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float p[4] = {}, t[4] = {};
            mma_f16(p, l, t00[2 * n], t00[2 * n + 1]);
            const u32 b0 = movmatrix_trans(pack_f16(p[0] * unshift, p[1] * unshift));
            const u32 b1 = movmatrix_trans(pack_f16(p[2] * unshift, p[3] * unshift));
            mma_f16(t, t11, b0, b1);
            t10[2 * n] = pack_f16(t[0], t[1]), t10[2 * n + 1] = pack_f16(t[2], t[3]);
        }
        stmatrix_x4(shared_address(t_element(scratch, kBlock + tile_row, tile_column)), t10);
    } else {
        take(M, M_10);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                const float scale = kTruncation * kMScale / (b ? kWriteScale * kQueryScale / kBlock0Scale : kKeyScale * kQueryScale);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = gid + 8 * (e >> 1), j = 8 * n + 2 * tid + (e & 1);
                    M[b][n][e] = j <= i ? M[b][n][e] * scale : 0.0f;
                }
                m_own[b][2 * n] = pack_f16(M[b][n][0], M[b][n][1]), m_own[b][2 * n + 1] = pack_f16(M[b][n][2], M[b][n][3]);
            }
            m_10[2 * n] = pack_f16(M_10[n][0], M_10[n][1]), m_10[2 * n + 1] = pack_f16(M_10[n][2], M_10[n][3]);
        }
        decayed();
    }
    barrier();  // T is in place

    // wy, this warp's channels. T^T is upper triangular: block 0 of A_k takes keys of both blocks, block 1 only its own.
    {
        u32 t_00[4], t_10[4], t_11[4];  // A fragments of T^T: transposed loads, tiles (j, i), (j + 8, i), (j, i + 8), (j + 8, i + 8)
        const int i = (lane & 7) + 8 * (lane >> 4), j = 8 * ((lane >> 3) & 1);
        ldmatrix_x4_trans(t_00, shared_address(t_element(scratch, i, j)));
        ldmatrix_x4_trans(t_10, shared_address(t_element(scratch, kBlock + i, j)));
        ldmatrix_x4_trans(t_11, shared_address(t_element(scratch, kBlock + i, kBlock + j)));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const u32 group = image + kAk + (lane_tile(half, lane) ^ (m << 5));
            u32 k_first[4], k_second[4];  // B fragments
            ldmatrix_x4_trans(k_first, group);
            ldmatrix_x4_trans(k_second, group + kBlock * kRowBytes);
            u32 first[4], second[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float x[4] = {}, y[4] = {};
                mma_f16(x, t_00, k_first[2 * n], k_first[2 * n + 1]);
                mma_f16(y, t_11, k_second[2 * n], k_second[2 * n + 1]);
                mma_f16(x, t_10, k_second[2 * n], k_second[2 * n + 1]);
                first[2 * n] = pack_f16(x[0], x[1]), first[2 * n + 1] = pack_f16(x[2], x[3]);
                second[2 * n] = pack_f16(y[0], y[1]), second[2 * n + 1] = pack_f16(y[2], y[3]);
            }
            stmatrix_x4(group, first);
            stmatrix_x4(group + kBlock * kRowBytes, second);
        }
    }
    // A_q = M T by blocks; (0, 1) is zero.
    if (half == 1) {
        u32 t_00[4], t_10[4], t_11[4];  // B fragments
        ldmatrix_x4_trans(t_00, shared_address(t_element(scratch, tile_row, tile_column)));
        ldmatrix_x4_trans(t_10, shared_address(t_element(scratch, kBlock + tile_row, tile_column)));
        ldmatrix_x4_trans(t_11, shared_address(t_element(scratch, kBlock + tile_row, kBlock + tile_column)));
        const float scale = kQueryScale * kWriteScale / kMScale * exp2_int(-shift);
        u32 aq_00[4], aq_10[4], aq_11[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float x[4] = {}, y[4] = {}, z[4] = {};
            mma_f16(x, m_own[0], t_00[2 * n], t_00[2 * n + 1]);
            mma_f16(y, m_10, t_00[2 * n], t_00[2 * n + 1]);
            mma_f16(z, m_own[1], t_11[2 * n], t_11[2 * n + 1]);
            mma_f16(y, m_own[1], t_10[2 * n], t_10[2 * n + 1]);
            aq_00[2 * n] = pack_f16(x[0] * scale, x[1] * scale), aq_00[2 * n + 1] = pack_f16(x[2] * scale, x[3] * scale);
            aq_10[2 * n] = pack_f16(y[0] * scale, y[1] * scale), aq_10[2 * n + 1] = pack_f16(y[2] * scale, y[3] * scale);
            aq_11[2 * n] = pack_f16(z[0] * scale, z[1] * scale), aq_11[2 * n + 1] = pack_f16(z[2] * scale, z[3] * scale);
        }
        const u32 none[4] = {};
        stmatrix_x4(image + kAq + aq_offset(tile_row, lane >> 4), aq_00);
        stmatrix_x4(image + kAq + aq_offset(tile_row, 2 + (lane >> 4)), none);
        stmatrix_x4(image + kAq + aq_offset(kBlock + tile_row, lane >> 4), aq_10);
        stmatrix_x4(image + kAq + aq_offset(kBlock + tile_row, 2 + (lane >> 4)), aq_11);
    } else if (lane == 0) {
        *reinterpret_cast<float*>(image_bytes + kShift) = exp2_int(shift);
        *reinterpret_cast<i32*>(image_bytes + kShift + 4) = shift;
    }
    async_proxy_fence();
}
