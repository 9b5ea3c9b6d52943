// The prepare step: one chunk of one value head, by four warps, from raw inputs to a stage image (common/stage.cuh) in shared
// memory.
//
//   gate_cumsum  g = lower_bound sigmoid(exp(A_log) (g_raw + dt_bias)), G = cumsum g          base 2
//   intra        A = beta_i k_i k_j exp(G_i - G_j) (j < i), M = q_i k_j exp(G_i - G_j) (j <= i)
//   solve        T = (I + A)^-1 diag(beta)
//   wy           A_k = T^T (k exp(G_last - G)), A_q = M T
//
// Warp (half, block) owns 64 channels of 16 tokens. Norms and scores, sums over channels, are shared; what crosses between the two blocks
// of tokens goes through the image.
//
//   (half, block)  0, 0                 1, 0            0, 1                        1, 1
//                  norms
//                  gates, k and q decayed from the block's start, k exp(G_end - G), the block's scores
//                  solves T_00, T_11    M_00, spare     block 1's k and q over block 0, block 0's k over block 1, scores across
//                                                       A_10                        M_11, M_10
//                  A_k but for T_10's part, of 32 channels each
//                                       A_q's block 0   before: T_10                A_q's block 1
//                  T_10's part
//
// exp(+G) and exp(-G) are taken from a block's own start, where |G| <= 80 cannot overflow; between the blocks every exponent is
// negative. Scores of a block need fp32's range for exp(-G) up to e^80 and go through tf32; all else is at most 1 in magnitude and
// goes through f16, which is as precise.
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

constexpr int kPrepareThreads = 128;  // a chunk
// 64 channels of 16 tokens: a warp's part of a chunk.
struct Quarter {
    int half, block;
};
// Named barriers of a chunk's warps: two ids from `first` on.
struct PrepareBarriers {
    int first;
    KDA_DEVICE void all() const { named_barrier(first, kPrepareThreads); }
    KDA_DEVICE void late() const { named_barrier(first + 1, kPrepareThreads / 2); }  // of block 1's two
};

KDA_DEVICE float& squares_of(u8* image, int half, int tensor, int token) {
    return reinterpret_cast<float*>(image + kSquares)[kChunk * (2 * half + tensor) + token];
}

// A block's scores with itself, without what lies above the diagonal: tiles of 8 x 8 tokens, (0, 0), (1, 0) and (1, 1), as they come out of
// one product for A and M. A lane's first two elements of each are A's, the others M's, of row gid and columns 2 tid, 2 tid + 1.
constexpr int kTiles8 = 3;
using BlockScores = float[kTiles8][4];
// Of A or M, over half of the channels, lane by lane.
struct ScoreSums {
    Float4 first[32];
    Float2 last[32];
};

// What the warps work with besides.
struct PrepareScratch {
    union {
        ScoreSums a[3];                       // A_00 of (1, 0), A_11 of (0, 1) and of (1, 1), for (0, 0). Over them, once they are read:
        float columns[2 * kBlock][20];        // of A's two blocks, for the substitution: 16 floats, 80 bytes apart, which costs no bank conflict
        u16 t[kChunk][40];                    // then T, f16: rows 80 bytes apart, which is conflict-free for ldmatrix
    };
    ScoreSums m_00;  // of (0, 0) for (1, 0)
    union {
        ScoreSums m_11;     // of (0, 1) for (1, 1), who then leaves there
        Float4 a_10[2][32]; // its own for (0, 1)
    };
    Float2 ends[2][kHeadDim / 2];  // exp(G) at the end of each block
};
constexpr int kCross = kAq + 1024;  // in the image: M_10 of (0, 1) for (1, 1), where squares, slope and valid were
static_assert(kCross + 1024 == kDecay, "where a_q's block 1 will be");

// Block 0's k and q are scaled as the image wants them; block 1's, which are yet to decay over block 0, by so much less.
constexpr float kBlock0Scale = 0x1p4f;
static_assert(kKeyScale == kWriteScale * kBlock0Scale, "k exp(G_end - G) and block 1's k exp(G) carry kWriteScale");
constexpr float kMScale = kWriteScale * kQueryScale / kBlock0Scale;  // of M in f16
// tf32 operands are truncated: each loses 0.72 * 2^-11 of itself on average, which the scores get back.
constexpr float kTruncation = 1.0f + 2 * 0.72f * 0x1p-11f;
// Of gates in f16: 5 log2(e) times this is still in range, and a gate that forgets 2^-26 a token is not yet subnormal.
constexpr float kGateScale = 0x1p12f;

KDA_DEVICE float* a_column(PrepareScratch& scratch, int block, int j) { return scratch.columns[kBlock * block + j]; }
KDA_DEVICE u16* t_element(PrepareScratch& scratch, int i, int j) { return &scratch.t[i][j]; }

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
        const Quad32 x = load_quad(tile + tile_offset(row, 8 * half + 4 * m + (opaque(threadIdx.x) & 3)));  // opaque: as in prepare_chunk
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

// Leaves the sums of squares of 16 rows of k and q, 64 channels, at kSquares. They are the diagonals of the rows' Gram
// matrices: exact products, fp32 sums, and no unpacking.
KDA_DEVICE void measure_rows(u8* image, Quarter part) {
    const int half = part.half, block = part.block;
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    const u32 rows = shared_address(image) + lane_tile(half, lane) + block * kBlock * kRowBytes;
    float gram[2][2][4] = {};  // [k, q][tokens gid, gid + 8]
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
        for (int tensor = 0; tensor < 2; ++tensor) {
            u32 a[4];
            ldmatrix_x4(a, (rows ^ (m << 5)) + (tensor ? kRawQ : kRawK));
            mma_bf16(gram[tensor][0], a, a[0], a[2]);
            mma_bf16(gram[tensor][1], a, a[1], a[3]);
        }
    }
    const bool holds_diagonal = tid == gid >> 1;
    bool overflows = false;
#pragma unroll
    for (int tensor = 0; tensor < 2; ++tensor) {
        const float (&x)[2][4] = gram[tensor];
        const float own[2] = {gid & 1 ? x[0][1] : x[0][0], gid & 1 ? x[1][3] : x[1][2]};
        float* squares = &squares_of(image, half, tensor, kBlock * block + gid);
        if (holds_diagonal) squares[0] = own[0], squares[8] = own[1];
        overflows |= holds_diagonal && fmaxf(own[0], own[1]) == __int_as_float(0x7f800000);
    }
    if (__any_sync(0xffffffffu, overflows)) {
        __syncwarp();
#pragma unroll 1  // rare: small rather than fast
        for (int i = 0; i < 4; ++i) {
            const int tensor = i / 2, row = kBlock * block + 8 * (i % 2) + gid;
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
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;  // opaque: as in prepare_chunk
    constexpr u32 one = 0x0c00;  // 2^-12 in f16
    static_assert(kGateScale == 0x1p12f, "its inverse is spelt out here");
    const auto pair = [&](bool below, int token) {  // of tokens `token`, token + 1, which a lane has on or below its diagonal
        const bool lo = token < valid && (below || 2 * tid <= gid), hi = token + 1 < valid && (below || 2 * tid + 1 <= gid);
        return (lo ? one : 0u) | (hi ? one << 16 : 0u);
    };
    a[0] = pair(false, 2 * tid);
    a[1] = pair(true, 2 * tid);
    a[2] = (valid + kBlock) & 64;  // 0, which ptxas is not to know: it would make it anew for each product, and move the others
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

// Zeros over what came from past the last token: a quarter of k, q and g, where whole tiles were copied.
KDA_DEVICE void clear_rows(u8* image, Quarter part, i32 valid) {
    const int lane = opaque(threadIdx.x) & 31, piece = lane & 7;
#pragma unroll 1  // once a sequence: small rather than fast
    for (int row = kBlock * part.block + (lane >> 3); row < kBlock * (part.block + 1); row += 4) {
        if (row < valid) continue;
        u8* at = image + tile_offset(row, 8 * part.half + piece);
        store_quad(at + kRawK, Quad32{}), store_quad(at + kRawQ, Quad32{}), store_quad(at + kRawG, Quad32{});
    }
    __syncwarp();
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

// Starts loading a quarter to where the warp that will prepare it is to find it.
KDA_DEVICE void fetch_quarter(u8* image, const ChunkInputs& in, Quarter part) {
    fetch_keys(image, in, part);
    cp_async_commit();
    fetch_gates(image, in, part);
    cp_async_commit();
}
// Waits for it, and measures it. A barrier of the four warps must follow.
KDA_DEVICE void finish_quarter(const KdaArgs& args, const ChunkInputs& in, int hv, u8* image, Quarter part) {
    ChunkScalars scalars{};
    if (part.block == 0) scalars = read_scalars(args, in, hv, part.half);
    cp_async_wait<1>();  // k and q
    __syncwarp();
    measure_rows(image, part);
    if (part.block == 0) write_scalars(image, scalars, in.valid, part.half);  // not before: they are the last to come
    cp_async_wait<0>();
}

// A score tile of 16 x 16, as a Float4 a lane for each half of its columns.
KDA_DEVICE void put_scores(Float4 (&to)[2][32], const float (&x)[2][4]) {
    const int lane = opaque(threadIdx.x) & 31;
#pragma unroll
    for (int n = 0; n < 2; ++n) to[n][lane] = Float4{x[n][0], x[n][1], x[n][2], x[n][3]};
}
KDA_DEVICE void add_scores(float (&x)[2][4], const Float4 (&from)[2][32]) {
    const int lane = opaque(threadIdx.x) & 31;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const Float4 y = from[n][lane];
        x[n][0] += y.x, x[n][1] += y.y, x[n][2] += y.z, x[n][3] += y.w;
    }
}

constexpr int kOfA = 0, kOfM = 2;
KDA_DEVICE void put_sums(ScoreSums& to, const BlockScores& x, int of) {
    const int lane = opaque(threadIdx.x) & 31;
    to.first[lane] = Float4{x[0][of], x[0][of + 1], x[1][of], x[1][of + 1]};
    to.last[lane] = Float2{x[2][of], x[2][of + 1]};
}
// A's or M's of this warp and of another.
KDA_DEVICE void take_sums(float (&sum)[kTiles8][2], const ScoreSums& from) {
    const int lane = opaque(threadIdx.x) & 31;
    const Float4 first = from.first[lane];
    const Float2 last = from.last[lane];
    sum[0][0] = first.x, sum[0][1] = first.y, sum[1][0] = first.z, sum[1][1] = first.w, sum[2][0] = last.x, sum[2][1] = last.y;
}

// The warp's channels and tokens, in place; its share of A and M of its block.
KDA_DEVICE void decay_block(float lower_bound, u8* image_bytes, PrepareScratch& scratch, Quarter part, BlockScores& scores) {
    const int half = part.half, block = part.block;
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    float k_norm[2], q_norm[2];  // of tokens gid, gid + 8
    {
        const bool is_q = lane >= kBlock;
        const float less = block == 0 ? 1.0f : 1.0f / kBlock0Scale;
        const float x = inverse_norm(image_bytes, is_q, kBlock * block + lane % kBlock, less * (is_q ? kQueryScale : kKeyScale));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            k_norm[r] = __shfl_sync(0xffffffffu, x, 8 * r + gid);
            q_norm[r] = __shfl_sync(0xffffffffu, x, kBlock + 8 * r + gid);
        }
    }
    u32 cumulate[4];
    cumulate_fragment(cumulate, *reinterpret_cast<const i32*>(image_bytes + kValid) - kBlock * block);
    const float slope = *reinterpret_cast<const float*>(image_bytes + kSlope);
    // bound sigmoid(x) kGateScale = 1 / (c + c exp(-x)), exp in base 2 like all others.
    const float gate_c = reciprocal_approx(fminf(lower_bound * kLog2E * kGateScale, -0x1p-120f));
    const float end_scale = block == 0 ? 1.0f / kBlock0Scale : 1.0f;
    const u32 rows = shared_address(image_bytes) + lane_tile(half, lane) + block * kBlock * kRowBytes;
    const float* bias = reinterpret_cast<const float*>(image_bytes + kBias) + 64 * half + gid;
    Float2* ends = &scratch.ends[block][32 * half + tid];
    // Rows of g for transposed loads: tiles (tokens 0, channels 0), (8, 0), (0, 8), (8, 8), which is the order of lane_tile.
#pragma unroll 1
    for (int m = 0; m < 4; ++m, bias += 16, ends += 8) {
        const u32 group = rows ^ (m << 5);
        u32 k_raw[4], q_raw[4], g_raw[4];  // A fragments; g's: tokens 2 tid, + 1 and 8 more of channel gid, of tiles t in pairs
        ldmatrix_x4_trans(g_raw, group + kRawG);
        const float biases[2] = {bias[0], bias[8]};  // before their time, when nobody waits for them
        ldmatrix_x4(k_raw, group + kRawK);
        ldmatrix_x4(q_raw, group + kRawQ);
        u32 k_f16[4], q_f16[4], k_end[4];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            u32 gates[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 pair = g_raw[2 * t + i];
                const float lo = exp2_approx(fmaf(slope, bf16_lo(pair), biases[t])), hi = exp2_approx(fmaf(slope, bf16_hi(pair), biases[t]));
                gates[i] = pack_f16(reciprocal_approx(fmaf(gate_c, lo, gate_c)), reciprocal_approx(fmaf(gate_c, hi, gate_c)));
            }
            float G[4] = {};
            mma_f16(G, cumulate, gates[0], gates[1]);
            float decay[4], growth[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) decay[e] = exp2_approx(G[e]), growth[e] = exp2_approx(-G[e]);
            const float end[2] = {__shfl_sync(0xffffffffu, decay[2], 28 + tid), __shfl_sync(0xffffffffu, decay[3], 28 + tid)};
            if (gid == 0) ends[4 * t] = Float2{end[0], end[1]};
            const float to_end[2] = {end[0] * end_scale, end[1] * end_scale};
            float kd[4], kg[4], qd[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 k_pair = k_raw[2 * t + r], q_pair = q_raw[2 * t + r];
                const float k[2] = {bf16_lo(k_pair) * k_norm[r], bf16_hi(k_pair) * k_norm[r]};
                const float q[2] = {bf16_lo(q_pair) * q_norm[r], bf16_hi(q_pair) * q_norm[r]};
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    kd[2 * r + e] = k[e] * decay[2 * r + e];
                    qd[2 * r + e] = q[e] * decay[2 * r + e];
                    kg[2 * r + e] = k[e] * growth[2 * r + e];
                }
                k_f16[2 * t + r] = pack_f16(kd[2 * r], kd[2 * r + 1]);
                q_f16[2 * t + r] = pack_f16(qd[2 * r], qd[2 * r + 1]);
                k_end[2 * t + r] = pack_f16(kg[2 * r] * to_end[0], kg[2 * r + 1] * to_end[1]);
            }
            // Eight rows of k and eight of q. The contraction takes channels 2 tid as its columns tid, 2 tid + 1 as tid + 4.
            mma_tf32(scores[0], kd[0], qd[0], kd[1], qd[1], kg[0], kg[1]);
            mma_tf32(scores[1], kd[2], qd[2], kd[3], qd[3], kg[0], kg[1]);
            mma_tf32(scores[2], kd[2], qd[2], kd[3], qd[3], kg[2], kg[3]);
        }
        stmatrix_x4(group + kKDecayed, k_f16);
        stmatrix_x4(group + kQDecayed, q_f16);
        stmatrix_x4(group + kRawG, k_end);
    }
}

// Between the blocks, for 64 channels: A_10 and M_10, block 1's k and q decayed over block 0, block 0's keys over block 1.
KDA_DEVICE void cross_blocks(u8* image_bytes, const PrepareScratch& scratch, int half, float (&A_10)[2][4], float (&M_10)[2][4]) {
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    const u32 rows = shared_address(image_bytes) + lane_tile(half, lane);
    constexpr int kBlock1 = kBlock * kRowBytes;
    const Float2* ends = &scratch.ends[0][32 * half + tid];
    u8* decay = image_bytes + decay_offset(8 * half, tid);
#pragma unroll 1
    for (int m = 0; m < 4; ++m, ends += 8, decay += 16) {
        const u32 group = rows ^ (m << 5);
        u32 k_late[4], q_late[4], k_end[4];
        ldmatrix_x4(k_late, group + kKDecayed + kBlock1);
        ldmatrix_x4(q_late, group + kQDecayed + kBlock1);
        ldmatrix_x4(k_end, group + kRawG);
        const Float2 firsts[2] = {ends[0], ends[4]}, seconds[2] = {ends[kHeadDim / 2], ends[kHeadDim / 2 + 4]};
        // Block 0's keys, which as B fragments are what they are as A fragments.
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            mma_f16(A_10[n], k_late, k_end[n], k_end[n + 2]);
            mma_f16(M_10[n], q_late, k_end[n], k_end[n + 2]);
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const Float2 first = firsts[t], second = seconds[t];
            const u32 over_first = pack_f16(first.x * kBlock0Scale, first.y * kBlock0Scale);
            const u32 over_second = pack_f16(second.x, second.y);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                k_late[2 * t + r] = mul_f16x2(k_late[2 * t + r], over_first);
                q_late[2 * t + r] = mul_f16x2(q_late[2 * t + r], over_first);
                k_end[2 * t + r] = mul_f16x2(k_end[2 * t + r], over_second);
            }
            if (gid == 0) *reinterpret_cast<Float2*>(decay + 8 * t) = Float2{first.x * second.x, first.y * second.y};
        }
        stmatrix_x4(group + kKDecayed + kBlock1, k_late);
        stmatrix_x4(group + kQDecayed + kBlock1, q_late);
        stmatrix_x4(group + kRawG, k_end);
    }
}

// A of both blocks, of which this warp has its share of block 0's, to T_00 and T_11.
KDA_DEVICE void solve_blocks(PrepareScratch& scratch, const BlockScores& own, float beta, int shift) {
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    float A[2][kTiles8][2], of_other[kTiles8][2];
    take_sums(A[0], scratch.a[0]);
    take_sums(A[1], scratch.a[1]);
    take_sums(of_other, scratch.a[2]);
#pragma unroll
    for (int tile = 0; tile < kTiles8; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) A[0][tile][e] += own[tile][kOfA + e], A[1][tile][e] += of_other[tile][e];
    }
    __syncwarp();  // A's columns go where the sums were
    // Causality (what lies above the diagonal may have overflowed: select, never multiply), and beta on the rows of A.
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        const float scale = kTruncation / (b ? kWriteScale * kWriteScale : kKeyScale * kKeyScale);
        const float beta_scaled[2] = {__shfl_sync(0xffffffffu, beta, kBlock * b + gid) * scale,
                                      __shfl_sync(0xffffffffu, beta, kBlock * b + gid + 8) * scale};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const bool below = 2 * tid + e < gid;
            a_column(scratch, b, 2 * tid + e)[gid] = below ? A[b][0][e] * beta_scaled[0] : 0.0f;
            a_column(scratch, b, 2 * tid + e)[gid + 8] = A[b][1][e] * beta_scaled[1];
            a_column(scratch, b, 2 * tid + e + 8)[gid + 8] = below ? A[b][2][e] * beta_scaled[1] : 0.0f;
        }
    }
    __syncwarp();
    // Both diagonal blocks at once, by forward substitution in fp32 (a Neumann series diverges on repeated keys);
    // lane = column, half a warp for each block.
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

// M of a diagonal block in f16, as an A fragment, of this warp's share and of another's.
KDA_DEVICE void mask_scores(u32 (&m)[4], const BlockScores& own, const ScoreSums& other, int block) {
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    const float scale = kTruncation * kMScale / (block ? kWriteScale * kQueryScale / kBlock0Scale : kKeyScale * kQueryScale);
    float M[kTiles8][2];
    take_sums(M, other);
#pragma unroll
    for (int tile = 0; tile < kTiles8; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float x = (M[tile][e] + own[tile][kOfM + e]) * scale;
            M[tile][e] = tile == 1 || 2 * tid + e <= gid ? x : 0.0f;
        }
    }
    m[0] = pack_f16(M[0][0], M[0][1]), m[1] = pack_f16(M[1][0], M[1][1]);
    m[2] = 0, m[3] = pack_f16(M[2][0], M[2][1]);
}

// What was loaded to a stage image and measured, by warps (half, block) (uniform, for the compiler too).
//
//   spare()   is called by warp (1, 0), which has time until T's diagonal blocks are solved
//   solved()  by all of them then
//
// At the end each has written its part, and bulk copies may read what all have. `scratch` may be used for the next chunk after a barrier.
template <typename Spare, typename Solved>
KDA_DEVICE void prepare_chunk(float lower_bound, u8* image_bytes, PrepareScratch& scratch, Quarter part, PrepareBarriers barriers, Spare spare,
                              Solved solved) {
    const int half = part.half, block = part.block;
    u32 m_own[4], m_10[4], l[4];  // f16 A fragments: (1, block)'s M; (1, 1)'s; (0, 1)'s A_10 = diag(beta) L
    int shift;
    {
        BlockScores scores = {};
        decay_block(lower_bound, image_bytes, scratch, part, scores);
        const float beta = *reinterpret_cast<const float*>(image_bytes + kBeta + 4 * (opaque(threadIdx.x) & 31));
        if (block == 1)
            put_sums(scratch.a[1 + half], scores, kOfA);
        else if (half == 1)
            put_sums(scratch.a[0], scores, kOfA);
        if (half == 0) put_sums(block ? scratch.m_11 : scratch.m_00, scores, kOfM);
        shift = beta_shift(warp_max_positive(beta));
        barriers.all();  // sums and keys of all are here
        if (half == 1) mask_scores(m_own, scores, block ? scratch.m_11 : scratch.m_00, block);
        if (block == 1) {
            float A_10[2][4] = {}, M_10[2][4] = {};
            cross_blocks(image_bytes, scratch, half, A_10, M_10);
            Float4 (&m_place)[2][32] = *reinterpret_cast<Float4 (*)[2][32]>(image_bytes + kCross);
            if (half == 0)
                put_scores(m_place, M_10);
            else
                put_scores(scratch.a_10, A_10);
            barriers.late();
            if (half == 0) {
                add_scores(A_10, scratch.a_10);
#pragma unroll
                for (int n = 0; n < 2; ++n) l[2 * n] = pack_f16(A_10[n][0], A_10[n][1]), l[2 * n + 1] = pack_f16(A_10[n][2], A_10[n][3]);
            } else {
                add_scores(M_10, m_place);
#pragma unroll
                for (int n = 0; n < 2; ++n) m_10[2 * n] = pack_f16(M_10[n][0], M_10[n][1]), m_10[2 * n + 1] = pack_f16(M_10[n][2], M_10[n][3]);
            }
        } else if (half == 0) {
            solve_blocks(scratch, scores, beta, shift);
        } else {
            spare();
        }
    }
    barriers.all();  // T_00 and T_11 are in place
    solved();

    const int lane = opaque(threadIdx.x) & 31;  // opaque: else all that follows from it is kept from earlier
    const u32 image = shared_address(image_bytes);
    // Row of T (or of a tile) whose address this lane gives to ldmatrix.x4: tiles (0, 0), (8, 0), (0, 8), (8, 8).
    const int tile_row = (lane & 7) + 8 * ((lane >> 3) & 1), tile_column = 8 * (lane >> 4);
    if (block == 1 && half == 0) {
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
    }

    // wy, 32 channels. T^T is upper triangular: block 0 of A_k takes keys of both blocks, block 1 only its own.
    float x[2][2][4] = {};
    u32 k_second[2][4];  // B fragments
    const int row = (lane & 7) + 8 * (lane >> 4), token = 8 * ((lane >> 3) & 1);  // of T^T's A fragments: transposed loads
    const u32 group = image + kAk + (lane_tile(half, lane) ^ (block << 6));
    {
        u32 t_00[4], t_11[4], k_first[2][4];
        ldmatrix_x4_trans(t_11, shared_address(t_element(scratch, kBlock + row, kBlock + token)));
        ldmatrix_x4_trans(t_00, shared_address(t_element(scratch, row, token)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            ldmatrix_x4_trans(k_second[m], (group ^ (m << 5)) + kBlock * kRowBytes);
            ldmatrix_x4_trans(k_first[m], group ^ (m << 5));
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 second[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float y[4] = {};
                mma_f16(x[m][n], t_00, k_first[m][2 * n], k_first[m][2 * n + 1]);
                mma_f16(y, t_11, k_second[m][2 * n], k_second[m][2 * n + 1]);
                second[2 * n] = pack_f16(y[0], y[1]), second[2 * n + 1] = pack_f16(y[2], y[3]);
            }
            stmatrix_x4((group ^ (m << 5)) + kBlock * kRowBytes, second);
        }
    }
    // A_q = M T by blocks; (0, 1) is zero.
    const float scale = kQueryScale * kWriteScale / kMScale * exp2_int(-shift);
    float z[2][4] = {};
    if (half == 1) {
        u32 t_own[4], aq[4];  // B fragments
        ldmatrix_x4_trans(t_own, shared_address(t_element(scratch, kBlock * block + tile_row, kBlock * block + tile_column)));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float y[4] = {};
            mma_f16(y, m_own, t_own[2 * n], t_own[2 * n + 1]);
            aq[2 * n] = pack_f16(y[0] * scale, y[1] * scale), aq[2 * n + 1] = pack_f16(y[2] * scale, y[3] * scale);
        }
        stmatrix_x4(image + kAq + aq_offset(kBlock * block + tile_row, 2 * block + (lane >> 4)), aq);
        if (block == 0) {
            const u32 none[4] = {};
            stmatrix_x4(image + kAq + aq_offset(tile_row, 2 + (lane >> 4)), none);
            if (lane == 0) {
                *reinterpret_cast<float*>(image_bytes + kShift) = exp2_int(shift);
                *reinterpret_cast<i32*>(image_bytes + kShift + 4) = shift;
            }
        } else {
            u32 t_00[4];
            ldmatrix_x4_trans(t_00, shared_address(t_element(scratch, tile_row, tile_column)));
#pragma unroll
            for (int n = 0; n < 2; ++n) mma_f16(z[n], m_10, t_00[2 * n], t_00[2 * n + 1]);
        }
    }
    barriers.all();  // and T_10
    {
        u32 t_10[4];
        ldmatrix_x4_trans(t_10, shared_address(t_element(scratch, kBlock + row, token)));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 first[4];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                mma_f16(x[m][n], t_10, k_second[m][2 * n], k_second[m][2 * n + 1]);
                first[2 * n] = pack_f16(x[m][n][0], x[m][n][1]), first[2 * n + 1] = pack_f16(x[m][n][2], x[m][n][3]);
            }
            stmatrix_x4(group ^ (m << 5), first);
        }
    }
    if (half == 1 && block == 1) {
        u32 t_10[4], aq[4];
        ldmatrix_x4_trans(t_10, shared_address(t_element(scratch, kBlock + tile_row, tile_column)));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            mma_f16(z[n], m_own, t_10[2 * n], t_10[2 * n + 1]);
            aq[2 * n] = pack_f16(z[n][0] * scale, z[n][1] * scale), aq[2 * n + 1] = pack_f16(z[n][2] * scale, z[n][3] * scale);
        }
        stmatrix_x4(image + kAq + aq_offset(kBlock + tile_row, lane >> 4), aq);
    }
    async_proxy_fence();
}
