// The prepare step: one chunk of one value head, by four warps, from raw inputs to a stage image (common/stage.cuh).
//
//   gate_cumsum  g = lower_bound sigmoid(exp(A_log) (g_raw + dt_bias)), G = cumsum g          fp32, base 2
//   intra        A = beta_i k_i k_j exp(G_i - G_j) (j < i), M = q_i k_j exp(G_i - G_j) (j <= i)
//   solve        T = (I + A)^-1 diag(beta)
//   wy           A_k = T^T (k exp(G_last - G)), A_q = M T
//
// Four warps share a chunk: warp (block, half) owns 16 tokens and 64 channels. exp(+G) and exp(-G) are taken from the block's
// own start, where |G| <= 80 cannot overflow; between the blocks every exponent is negative. Scores of a block need fp32's
// range for exp(-G) up to e^80 and go through tf32; all else is at most 1 in magnitude and goes through f16, which is as precise.
//
// The gates are summed with a lane for four channels of eight tokens, in fp32. Everything else uses the MMA layout with
// permuted channels: lane (gid, tid) holds tokens gid and gid + 8, channels 32 m + 8 tid .. + 7 of each group m, so that global
// accesses are 16 bytes wide and A and B fragments need no shuffle. A contraction does not mind in which order its channels
// come, as long as both operands agree.
#pragma once
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/sequence.cuh"

constexpr int kGRow = kHeadDim + 4;  // floats: neighbouring rows start 16 bytes apart, modulo the banks

// The tiles of k and q in shared memory: tile_offset with another order of XORs, so that neighbouring rows, which a quarter of a
// warp reads 16 bytes a lane, fall into different halves of the banks.
KDA_DEVICE int work_offset(int row, int piece) {
    const int order = ((row & 1) << 2) | ((row >> 1) & 3);
    return (piece >> 3) * kHalfTile + row * kRowBytes + (((piece & 7) ^ order) << 4);
}

struct PrepareSmem {
    float G[kChunk][kGRow];            // cumulative log2 decay from the block's start; later what the functions below put there
    float own_decay[2][kHeadDim];      // exp(G) at the end of the block; block 0: / kBlock0Scale
    u32 other_decay[2][kHeadDim / 2];  // f16 pairs: of block 1, and of block 0 * kBlock0Scale
    alignas(128) u8 k[2 * kHalfTile];  // raw bf16; then k_restored, f16, channels permuted: position 32 m + 8 jj + 2 tid + b is 32 m + 8 tid + 2 jj + b
    alignas(128) u8 q[2 * kHalfTile];  // raw bf16; then block 0's k_end and block 1's q_local
    Quad32 m_own[32];                  // f16 A fragment of block 1's M
    float squares[2][2][kChunk];       // [half][k, q][token]: sums over 64 channels; negative: of values scaled by kDown
    float beta[kChunk];
};

// Block 0's k and q are scaled as the image wants them; block 1's, which its other_decay multiplies, by so much less.
constexpr float kBlock0Scale = 0x1p4f;
static_assert(kKeyScale == kWriteScale * kBlock0Scale, "k_end and block 1's k_local carry kWriteScale");
constexpr float kMScale = kWriteScale * kQueryScale / kBlock0Scale;  // of M in f16
// tf32 operands are truncated: each loses 0.72 * 2^-11 of itself on average, which the scores get back.
constexpr float kTruncation = 1.0f + 2 * 0.72f * 0x1p-11f;

// Fragments that one warp leaves for the other (or for itself), lane by lane, in the place of what it has used up. Each is
// 16 bytes a lane for 16 channels; group m has two.
KDA_DEVICE Quad32* k_end_fragment(PrepareSmem& smem, int m, int step, int lane) {  // f16 B: k exp(G_end - G), block 0
    return reinterpret_cast<Quad32*>(smem.q + work_offset(lane / 4, 4 * m + lane % 4) + step * 8 * kRowBytes);
}
KDA_DEVICE Quad32* q_local_fragment(PrepareSmem& smem, int m, int step, int lane) {  // f16 A: q exp(G), block 1
    return k_end_fragment(smem, m, step, lane) + kBlock * kRowBytes / sizeof(Quad32);
}
KDA_DEVICE Quad32* k_local_fragment(PrepareSmem& smem, int m, int step, int lane) {  // f16 A: k exp(G), block 1
    return reinterpret_cast<Quad32*>(&smem.G[kBlock + 4 * step + lane / 8][32 * m + 4 * (lane % 8)]);
}
// Half 1's share of the scores of its block, for half 0 to add, in the rest of its own gates: tiles A[0], A[1], M[0], M[1].
KDA_DEVICE Float4* partial_scores(PrepareSmem& smem, int block, int tile, int lane) {
    return reinterpret_cast<Float4*>(&smem.G[kBlock * block + 8 + 4 * (tile & 1) + lane / 8][32 * (2 + tile / 2) + 4 * (lane % 8)]);
}
// Over block 0's gates, once the scores are done: column j of A [block][j][i], for the substitution; and T, f16 [32 x 32], rows
// 80 bytes apart, which is conflict-free for ldmatrix.
KDA_DEVICE float* a_column(PrepareSmem& smem, int block, int j) { return &smem.G[0][0] + 256 * block + 16 * j; }
KDA_DEVICE u16* t_element(PrepareSmem& smem, int i, int j) { return reinterpret_cast<u16*>(&smem.G[0][0] + 512) + 40 * i + j; }

// The power of two that brings the largest beta of a chunk that hardly writes into [1/2, 1).
KDA_DEVICE int beta_shift(float beta_max) {
    return beta_max < 0x1p-6f && beta_max > 0.0f ? min(-1 - ilogb_fast(beta_max), 60) : 0;
}

// Squares of values beyond 2^60 overflow fp32; such rows are measured scaled down.
constexpr float kDown = 0x1p-70f;

// Sum of squares of a row's 64 channels of groups 2 half and 2 half + 1, of which a lane of the quad holds 16.
KDA_DEVICE float scaled_row_squares(const u8* tile, int row, int half) {
    float sum = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const Quad32 x = load_quad(tile + work_offset(row, 4 * (2 * half + m) + (threadIdx.x & 3)));
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

// Leaves the sums of squares of 16 rows from row - gid on, 64 channels, in `squares`. They are the diagonal of the rows' Gram
// matrix: exact products, fp32 sums, and no unpacking.
KDA_DEVICE void measure_rows(float* squares, const u8* tile, int row, int half, int work_piece) {
    const int gid = (threadIdx.x & 31) >> 2, tid = threadIdx.x & 3;
    float gram[2][4] = {};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const u8* piece = tile + (work_piece ^ (m << 6));
        const Quad32 x = load_quad(piece), y = load_quad(piece + 8 * kRowBytes);
        const u32 a[4] = {x.x, y.x, x.y, y.y}, b[4] = {x.z, y.z, x.w, y.w};
        mma_bf16(gram[0], a, x.x, x.y);
        mma_bf16(gram[1], a, y.x, y.y);
        mma_bf16(gram[0], b, x.z, x.w);
        mma_bf16(gram[1], b, y.z, y.w);
    }
    float own[2] = {gid & 1 ? gram[0][1] : gram[0][0], gid & 1 ? gram[1][3] : gram[1][2]};
    const bool holds_diagonal = tid == gid >> 1;
    if (__any_sync(0xffffffffu, holds_diagonal && (own[0] == __int_as_float(0x7f800000) || own[1] == __int_as_float(0x7f800000)))) {
        own[0] = -scaled_row_squares(tile, row, half);
        own[1] = -scaled_row_squares(tile, row + 8, half);
    }
    if (holds_diagonal) squares[row] = own[0], squares[row + 8] = own[1];
}
// scale / |x|, eps counted as one more square.
KDA_DEVICE float inverse_norm(const PrepareSmem& smem, int tensor, int row, float scale) {
    const float a = smem.squares[0][tensor][row], b = smem.squares[1][tensor][row];
    if (!(a < 0.0f || b < 0.0f)) return rsqrt_approx(a + b + kNormEps) * scale;
    const float scaled = (a < 0.0f ? -a : a * kDown * kDown) + (b < 0.0f ? -b : b * kDown * kDown);
    return rsqrt_approx(scaled) * kDown * scale;
}

// Where a chunk's raw inputs begin (its first token, its head), and their token strides in bytes.
struct ChunkInputs {
    const u8 *q, *k, *g, *beta;
    i32 q_step, k_step, g_step, beta_step;
    i32 valid;  // 1 .. 32 tokens
};

KDA_DEVICE ChunkInputs locate_inputs(const KdaArgs& args, const Sequence& seq, const Chunk& chunk, int hv) {
    const int h = args.HV == args.H ? hv : hv / (args.HV / args.H);
    const i64 token = seq.first + chunk.start;
    const auto at = [&](const u16* x, i64 batch, i64 step, int channel) {
        return reinterpret_cast<const u8*>(x + seq.batch * batch + token * step + channel);
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
    in.valid = chunk.valid;
    return in;
}

// Asks for a chunk's rows of q, k and g, one row a lane, so that whoever loads them finds them in L2.
KDA_DEVICE void prefetch_inputs(const ChunkInputs& in) {
    const int row = threadIdx.x & 31;
    if (row >= in.valid) return;
    const u8* rows[3] = {in.g + static_cast<i64>(row) * in.g_step, in.k + static_cast<i64>(row) * in.k_step,
                         in.q + static_cast<i64>(row) * in.q_step};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
        for (int at = 0; at < 2 * kHeadDim; at += 64) asm volatile("prefetch.global.L2 [%0];" ::"l"(rows[i] + at));
    }
}

// Warp (block, half)'s share of a chunk of value head `hv`, whose image goes to `place()`, which is asked when it is needed: a
// pointer held from the start costs registers. `barrier()` joins the four warps, who call it equally often;
// `wait_for_place()` returns when the image may be written, and is called by warp (0, 0) as late as can be; `meanwhile()` is
// called by warp (1, 0), which else would wait for warp (0, 0) to solve.
template <int block, typename Place, typename Barrier, typename Wait, typename Meanwhile>
KDA_DEVICE void prepare_block(const KdaArgs& args, const ChunkInputs& in, int hv, Place place, PrepareSmem& smem, Barrier barrier,
                              Wait wait_for_place, Meanwhile meanwhile) {
    // Opaque: else a caller's loop keeps all that follows from it in registers.
    const int half = opaque(threadIdx.x) >> 5 & 1;
    const int lane = opaque(threadIdx.x) & 31, gid = lane >> 2, tid = lane & 3;
    constexpr int row0 = block * kBlock;
    // Offsets of this lane's own piece in row gid of group 2 half, in the image and in shared memory; that of group 2 half + 1
    // is at ^ 64: the swizzle is an XOR.
    const int own_piece = tile_offset(row0 + gid, 8 * half + tid), work_piece = work_offset(row0 + gid, 8 * half + tid);

    // Loads first: the gates, then q and k on their way to shared memory while the gates are worked on. Rows past the
    // last token repeat it, where the value does not matter, or are zeros. A lane fetches the pieces of q and k that it will
    // read itself, so waiting for its own copies is enough.
    constexpr int kRows = kBlock / 2;  // of gates, a lane
    const int gate_row = row0 + kRows * (lane >> 4), gate_channel = 64 * half + 4 * (lane & 15);
    Pair32 g_raw[kRows];
    {
        const u8* g = in.g + static_cast<i64>(min(gate_row, in.valid - 1)) * in.g_step + 2 * gate_channel;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            g_raw[i] = load_pair_streaming(g);
            g += gate_row + i + 1 < in.valid ? in.g_step : 0;
        }
    }
    const int beta_row = row0 + (lane & 15);
    const u16 beta_raw = load_half_streaming(in.beta + static_cast<i64>(min(beta_row, in.valid - 1)) * in.beta_step);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + gid + 8 * r;
        const bool live = row < in.valid;
        const i64 at = live ? row : 0;  // any address will do for no bytes
        const int channel_bytes = 128 * half + 16 * tid;
        const u8 *q = in.q + at * in.q_step + channel_bytes, *k = in.k + at * in.k_step + channel_bytes;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int piece = (work_piece ^ (m << 6)) + 8 * r * kRowBytes;
            cp_async_16_or_zero(shared_address(smem.k + piece), k + 64 * m, live);
            cp_async_16_or_zero(shared_address(smem.q + piece), q + 64 * m, live);
        }
    }
    cp_async_commit();

    // gate_cumsum: lanes 0..15 own the first eight tokens, the others the last eight. Masked tokens neither decay nor, with
    // k = q = beta = 0, write.
    {
        const float slope = -kLog2E * fminf(exp2_approx(kLog2E * args.A_log[hv]), 0x1p100f);  // inf times a bias of 0 is NaN
        Float4 bias = *reinterpret_cast<const Float4*>(args.dt_bias + hv * kHeadDim + gate_channel);
        bias.x *= slope, bias.y *= slope, bias.z *= slope, bias.w *= slope;
        const float bound = args.lower_bound * kLog2E;
        const auto gate = [&](float x, float b) { return reciprocal_approx(1.0f + exp2_approx(fmaf(slope, x, b))); };
        Float4 g[kRows], sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const float live = gate_row + i < in.valid ? bound : 0.0f;
            sum.x = fmaf(live, gate(bf16_lo(g_raw[i].x), bias.x), sum.x);
            sum.y = fmaf(live, gate(bf16_hi(g_raw[i].x), bias.y), sum.y);
            sum.z = fmaf(live, gate(bf16_lo(g_raw[i].y), bias.z), sum.z);
            sum.w = fmaf(live, gate(bf16_hi(g_raw[i].y), bias.w), sum.w);
            g[i] = sum;
        }
        const float from_first = lane >> 4 ? 1.0f : 0.0f;
        const Float4 first{from_first * __shfl_sync(0xffffffffu, sum.x, lane & 15), from_first * __shfl_sync(0xffffffffu, sum.y, lane & 15),
                           from_first * __shfl_sync(0xffffffffu, sum.z, lane & 15), from_first * __shfl_sync(0xffffffffu, sum.w, lane & 15)};
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            g[i] = Float4{g[i].x + first.x, g[i].y + first.y, g[i].z + first.z, g[i].w + first.w};
            *reinterpret_cast<Float4*>(&smem.G[gate_row + i][gate_channel]) = g[i];
        }
        if (lane >> 4) {
            const Float4 G = g[kRows - 1];
            const float x = exp2_approx(G.x), y = exp2_approx(G.y), z = exp2_approx(G.z), w = exp2_approx(G.w);
            constexpr float own = block ? 1.0f : 1.0f / kBlock0Scale, other = block ? 1.0f : kBlock0Scale;
            *reinterpret_cast<Float4*>(&smem.own_decay[block][gate_channel]) = Float4{x * own, y * own, z * own, w * own};
            *reinterpret_cast<Pair32*>(&smem.other_decay[1 - block][gate_channel / 2]) =
                Pair32{pack_f16(x * other, y * other), pack_f16(z * other, w * other)};
        } else if (half == 0) {
            smem.beta[beta_row] = beta_row < in.valid ? sigmoid(bf16_to_float(beta_raw)) : 0.0f;
        }
    }
    cp_async_wait<0>();
    measure_rows(smem.squares[half][0], smem.k, row0 + gid, half, work_piece);
    measure_rows(smem.squares[half][1], smem.q, row0 + gid, half, work_piece);
    if (block == 0 && half == 0) wait_for_place();
    barrier();  // G, the decays, the squares and beta are in place
    u8* image = place();

    constexpr float k_scale = block ? kKeyScale / kBlock0Scale : kKeyScale, q_scale = block ? kQueryScale / kBlock0Scale : kQueryScale;
    const float k_norm[2] = {inverse_norm(smem, 0, row0 + gid, k_scale), inverse_norm(smem, 0, row0 + gid + 8, k_scale)};
    const float q_norm[2] = {inverse_norm(smem, 1, row0 + gid, q_scale), inverse_norm(smem, 1, row0 + gid + 8, q_scale)};

    // intra: scores within the block, and the chunk-level operands on the way.
    float A[2][4] = {}, M[2][4] = {};  // C tiles: columns 0..7 and 8..15 of the block, times the scales
    const int shared_piece = work_offset(row0 + gid, 8 * half) + 4 * tid;  // pieces j that this lane shares with its quad: ^ 16 j
#pragma unroll 1  // unrolled, it needs more registers and gains nothing
    for (int odd = 0; odd < 2; ++odd) {
        const int m = 2 * half + odd, channel = 32 * m + 8 * tid;
        const u8 *k_piece = smem.k + (work_piece ^ (odd << 6)), *q_piece = smem.q + (work_piece ^ (odd << 6));
        const Quad32 k_raw[2] = {load_quad(k_piece), load_quad(k_piece + 8 * kRowBytes)};
        const Quad32 q_raw[2] = {load_quad(q_piece), load_quad(q_piece + 8 * kRowBytes)};
        __syncwarp();  // the warp has read group m of k and q, whose places are about to be reused

        u32 k_f16[2][4], q_f16[2][4], k_end[2][4];  // pairs of channels, by row
#pragma unroll
        for (int four = 0; four < 2; ++four) {
            float G[2][4], own_decay[4];
            *reinterpret_cast<Float4*>(own_decay) = *reinterpret_cast<const Float4*>(&smem.own_decay[block][channel + 4 * four]);
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<Float4*>(G[r]) = *reinterpret_cast<const Float4*>(&smem.G[row0 + gid + 8 * r][channel + 4 * four]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = 2 * four + i;
                float kd[2][2], qd[2][2], grown[2][2];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const Quad32 kq = k_raw[r], qq = q_raw[r];
                    const u32 k_pair = j == 0 ? kq.x : j == 1 ? kq.y : j == 2 ? kq.z : kq.w;
                    const u32 q_pair = j == 0 ? qq.x : j == 1 ? qq.y : j == 2 ? qq.z : qq.w;
                    float end[2];
#pragma unroll
                    for (int b = 0; b < 2; ++b) {
                        const float k = (b ? bf16_hi(k_pair) : bf16_lo(k_pair)) * k_norm[r];
                        const float q = (b ? bf16_hi(q_pair) : bf16_lo(q_pair)) * q_norm[r];
                        const float decay = exp2_approx(G[r][2 * i + b]);
                        kd[r][b] = k * decay;
                        qd[r][b] = q * decay;
                        grown[r][b] = k * exp2_approx(-G[r][2 * i + b]);
                        end[b] = grown[r][b] * own_decay[2 * i + b];
                    }
                    k_f16[r][j] = pack_f16(kd[r][0], kd[r][1]);
                    q_f16[r][j] = pack_f16(qd[r][0], qd[r][1]);
                    k_end[r][j] = pack_f16(end[0], end[1]);
                }
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    mma_tf32(A[n], kd[0][0], kd[1][0], kd[0][1], kd[1][1], grown[n][0], grown[n][1]);
                    mma_tf32(M[n], qd[0][0], qd[1][0], qd[0][1], qd[1][1], grown[n][0], grown[n][1]);
                }
            }
        }
        const Quad32 other = load_quad(&smem.other_decay[block][channel / 2]);
        const u32 other_decay[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            u32 k_image[4], q_image[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                k_image[j] = block ? mul_f16x2(k_f16[r][j], other_decay[j]) : k_f16[r][j];
                q_image[j] = block ? mul_f16x2(q_f16[r][j], other_decay[j]) : q_f16[r][j];
                const u32 restored = block ? k_end[r][j] : mul_f16x2(k_end[r][j], other_decay[j]);
                *reinterpret_cast<u32*>(smem.k + (shared_piece ^ (odd << 6) ^ (j << 4)) + 8 * r * kRowBytes) = restored;
            }
            const int piece = own_piece ^ (odd << 6);
            store_quad(image + kKDecayed + piece + 8 * r * kRowBytes, Quad32{k_image[0], k_image[1], k_image[2], k_image[3]});
            store_quad(image + kQDecayed + piece + 8 * r * kRowBytes, Quad32{q_image[0], q_image[1], q_image[2], q_image[3]});
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int j = 2 * step;
            if (block == 0)
                *k_end_fragment(smem, m, step, lane) = Quad32{k_end[0][j], k_end[0][j + 1], k_end[1][j], k_end[1][j + 1]};
            else
                *q_local_fragment(smem, m, step, lane) = Quad32{q_f16[0][j], q_f16[1][j], q_f16[0][j + 1], q_f16[1][j + 1]};
        }
        if (block == 1) {
            __syncwarp();  // the warp has read group m of G
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const int j = 2 * step;
                *k_local_fragment(smem, m, step, lane) = Quad32{k_f16[0][j], k_f16[1][j], k_f16[0][j + 1], k_f16[1][j + 1]};
            }
        }
    }
    if (half == 1) {
        __syncwarp();
        *partial_scores(smem, block, 0, lane) = Float4{A[0][0], A[0][1], A[0][2], A[0][3]};
        *partial_scores(smem, block, 1, lane) = Float4{A[1][0], A[1][1], A[1][2], A[1][3]};
        *partial_scores(smem, block, 2, lane) = Float4{M[0][0], M[0][1], M[0][2], M[0][3]};
        *partial_scores(smem, block, 3, lane) = Float4{M[1][0], M[1][1], M[1][2], M[1][3]};
    }
    barrier();  // k_restored, the fragments and half 1's scores are in place

    // Half 0 completes the scores of its block. Half 1 takes block 1's with block 0's keys: L (k) in warp (0, 1), M_10 (q) in (1, 1).
    u32 m_own[4] = {}, crossed[4] = {};  // f16 A fragments
    if (half == 0) {
        // Causality (what lies above the diagonal may have overflowed: select, never multiply), and beta on the rows of A.
        constexpr float A_scale = kTruncation / (k_scale * k_scale);
        constexpr float M_scale = kTruncation * kMScale / (k_scale * q_scale);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const Float4 a = *partial_scores(smem, block, n, lane), m = *partial_scores(smem, block, 2 + n, lane);
            A[n][0] += a.x, A[n][1] += a.y, A[n][2] += a.z, A[n][3] += a.w;
            M[n][0] += m.x, M[n][1] += m.y, M[n][2] += m.z, M[n][3] += m.w;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = gid + 8 * (e >> 1), j = 8 * n + 2 * tid + (e & 1);
                a_column(smem, block, j)[i] = j < i ? A[n][e] * (A_scale * smem.beta[row0 + i]) : 0.0f;
                M[n][e] = j <= i ? M[n][e] * M_scale : 0.0f;
            }
            m_own[2 * n] = pack_f16(M[n][0], M[n][1]);
            m_own[2 * n + 1] = pack_f16(M[n][2], M[n][3]);
        }
        if (block == 1) smem.m_own[lane] = Quad32{m_own[0], m_own[1], m_own[2], m_own[3]};
    } else {
        float cross[2][4] = {};
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const Quad32 b = *k_end_fragment(smem, s / 2, s & 1, lane);
            const Quad32 x = block ? *q_local_fragment(smem, s / 2, s & 1, lane) : *k_local_fragment(smem, s / 2, s & 1, lane);
            const u32 a[4] = {x.x, x.y, x.z, x.w};
            mma_f16(cross[0], a, b.x, b.y);
            mma_f16(cross[1], a, b.z, b.w);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            crossed[2 * n] = pack_f16(cross[n][0], cross[n][1]);
            crossed[2 * n + 1] = pack_f16(cross[n][2], cross[n][3]);
        }
    }
    const int shift = beta_shift(warp_max_positive(smem.beta[lane]));
    barrier();  // A is in place

    // solve: both diagonal blocks at once by warp (0, 0), by forward substitution in fp32 (a Neumann series diverges on repeated
    // keys); lane = column, half a warp for each block.
    if (block == 0 && half == 0) {
        const int b = lane >> 4, column = lane & 15;
        const float sigma = smem.beta[lane] * exp2_int(shift);
        float x[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) x[i] = i == column ? sigma : 0.0f;
#pragma unroll
        for (int j = 0; j + 1 < kBlock; ++j) {
#pragma unroll
            for (int i4 = (j + 1) / 4; i4 < kBlock / 4; ++i4) {
                const Float4 a = *reinterpret_cast<const Float4*>(a_column(smem, b, j) + 4 * i4);
                const float a4[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (4 * i4 + e > j) x[4 * i4 + e] = fmaf(-a4[e], x[j], x[4 * i4 + e]);
            }
        }
#pragma unroll
        for (int i = 0; i < kBlock; ++i) *t_element(smem, 16 * b + i, 16 * b + column) = static_cast<u16>(pack_f16(x[i], 0.0f));
    }
    if (block == 1 && half == 0) meanwhile();
    barrier();  // T's diagonal blocks are in place

    // Row of T (or k_restored) whose address this lane gives to ldmatrix.x4: tiles (0, 0), (8, 0), (0, 8), (8, 8).
    const int tile_row = (lane & 7) + 8 * ((lane >> 3) & 1), tile_column = 8 * (lane >> 4);
    if (block == 0 && half == 1) {
        // T_10 = -T_11 L T_00, where T_11's beta stands for that of A_10 = diag(beta) L.
        u32 t00[4], t11[4];
        ldmatrix_x4_trans(t00, shared_address(t_element(smem, tile_row, tile_column)));
        ldmatrix_x4(t11, shared_address(t_element(smem, 16 + tile_row, 16 + tile_column)));
        // Both factors carry 2^shift, the product needs one; L carries the scales of its keys.
        const float unshift = -exp2_int(-shift) / (kWriteScale * kWriteScale);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float p[4] = {}, t10[4] = {};
            mma_f16(p, crossed, t00[2 * n], t00[2 * n + 1]);
            const u32 b0 = movmatrix_trans(pack_f16(p[0] * unshift, p[1] * unshift));
            const u32 b1 = movmatrix_trans(pack_f16(p[2] * unshift, p[3] * unshift));
            mma_f16(t10, t11, b0, b1);
            *reinterpret_cast<u32*>(t_element(smem, 16 + gid, 8 * n + 2 * tid)) = pack_f16(t10[0], t10[1]);
            *reinterpret_cast<u32*>(t_element(smem, 24 + gid, 8 * n + 2 * tid)) = pack_f16(t10[2], t10[3]);
        }
    }
    barrier();  // T is in place

    const int wy_half = opaque(threadIdx.x) >> 5 & 1;  // `half` again: it is not worth a register until here

    // wy: rows of this block, channels of this half. T^T is upper triangular: block 0 of A_k takes keys of both blocks, block 1
    // only its own.
    u32 t_upper[4] = {}, t_own[4];  // A fragments of T^T
    {
        // Transposed loads: tiles in the order of an A fragment of T^T, (j, i), (j + 8, i), (j, i + 8), (j + 8, i + 8).
        const int i = (lane & 7) + 8 * (lane >> 4), j = 8 * ((lane >> 3) & 1);
        ldmatrix_x4_trans(t_own, shared_address(t_element(smem, row0 + i, row0 + j)));
        if (block == 0) ldmatrix_x4_trans(t_upper, shared_address(t_element(smem, 16 + i, j)));
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        float ak[4][4] = {};
#pragma unroll
        for (int jj = 0; jj < 4; jj += 2) {
            const int piece = 8 * wy_half + 4 * odd + jj + (lane >> 4);
            u32 b[4];
            ldmatrix_x4_trans(b, shared_address(smem.k + work_offset(row0 + tile_row, piece)));
            mma_f16(ak[jj], t_own, b[0], b[1]);
            mma_f16(ak[jj + 1], t_own, b[2], b[3]);
            if (block == 0) {
                ldmatrix_x4_trans(b, shared_address(smem.k + work_offset(16 + tile_row, piece)));
                mma_f16(ak[jj], t_upper, b[0], b[1]);
                mma_f16(ak[jj + 1], t_upper, b[2], b[3]);
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            store_quad(image + kAk + (own_piece ^ (odd << 6)) + 8 * r * kRowBytes,
                       Quad32{pack_f16(ak[0][2 * r], ak[0][2 * r + 1]), pack_f16(ak[1][2 * r], ak[1][2 * r + 1]),
                              pack_f16(ak[2][2 * r], ak[2][2 * r + 1]), pack_f16(ak[3][2 * r], ak[3][2 * r + 1])});
        }
    }
    // A_q = M T by blocks: (0, 0) and (1, 1) by half 0; (1, 0) by warp (1, 1), who has M_10; (0, 1), zero, by warp (0, 1).
    float aq[2][4] = {};
    if (wy_half == 0) {
        u32 b[4];
        ldmatrix_x4_trans(b, shared_address(t_element(smem, row0 + tile_row, row0 + tile_column)));
        mma_f16(aq[0], m_own, b[0], b[1]);
        mma_f16(aq[1], m_own, b[2], b[3]);
    } else if (block == 1) {
        u32 b[4];
        const Quad32 m = smem.m_own[lane];
        const u32 m_11[4] = {m.x, m.y, m.z, m.w};
        ldmatrix_x4_trans(b, shared_address(t_element(smem, 16 + tile_row, tile_column)));
        mma_f16(aq[0], m_11, b[0], b[1]);
        mma_f16(aq[1], m_11, b[2], b[3]);
        ldmatrix_x4_trans(b, shared_address(t_element(smem, tile_row, tile_column)));
        mma_f16(aq[0], crossed, b[0], b[1]);
        mma_f16(aq[1], crossed, b[2], b[3]);
    }
    const float aq_scale = kQueryScale * kWriteScale / kMScale * exp2_int(-shift);
    const int aq_column = wy_half == 0 ? 2 * block : 2 * (1 - block);  // in pieces
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            *reinterpret_cast<u32*>(image + kAq + aq_offset(row0 + gid + 8 * r, aq_column + n) + 4 * tid) =
                pack_f16(aq[n][2 * r] * aq_scale, aq[n][2 * r + 1] * aq_scale);
    }
    const int c = 64 * wy_half + 32 * block + lane;
    *reinterpret_cast<float*>(image + kDecay + 4 * c) = kBlock0Scale * smem.own_decay[0][c] * smem.own_decay[1][c];
    if (block == 0 && wy_half == 0 && lane == 0) {
        *reinterpret_cast<float*>(image + kShift) = exp2_int(shift);
        *reinterpret_cast<i32*>(image + kShift + 4) = shift;
    }
}
