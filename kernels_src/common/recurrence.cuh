// The recurrence step for 16 rows of the state (16 of V's columns, all of K) by one warp, over one chunk.
//
//   X = S k_decayed     R = V - X     O = S q_decayed + R A_q     S' = D S + A_k^T R       (S, X, R, O transposed: V first)
//
// The state lives in fp32 MMA accumulators, S^T [16 x 128]: as C tiles packed to f16 are A fragments, it feeds its own
// products without leaving the registers.
//
// f16 is eight times as precise as bf16 and has a tenth of its range, so each warp works in units of its own, 2^exponent,
// chosen from the largest |v| of the chunk and the largest |S|. The recurrence is linear in both, and powers of two are
// exact: the units change no bit of a result unless f16 would have overflowed or lost small numbers.
#pragma once
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/stage.cuh"

constexpr int kVRows = 16;  // of S^T, a warp

// In units of 2^exponent, max(|v|, 16 |S|) is kept within [2^4, 2^14]: then |R| <= |v| + sqrt(128) |S| < 2^15.
constexpr float kUnitsLow = 0x1p4f, kUnitsHigh = 0x1p14f;
constexpr int kUnitsTarget = 10;
constexpr int kStateHeadroom = 4;  // as a power of two

struct StateTile {
    float s[16][4];  // C tiles: keys 8 n + 2 tid (+ 1), V rows gid and gid + 8
    int exponent;    // S = s * 2^exponent
};

KDA_DEVICE void pack_state(u32 (&a)[8][4], const StateTile& state) {
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
        a[n / 2][0] = pack_f16(state.s[n][0], state.s[n][1]);
        a[n / 2][1] = pack_f16(state.s[n][2], state.s[n][3]);
        a[n / 2][2] = pack_f16(state.s[n + 1][0], state.s[n + 1][1]);
        a[n / 2][3] = pack_f16(state.s[n + 1][2], state.s[n + 1][3]);
    }
}

// All else waits while a sequence's first and last instructions are executed, some 500 of them a microsecond. So what is usual has the fewest
// there can be, and what is rare, but costs more of them, stands apart from it.

// The largest |S| of the warp's rows, in units; NaN and inf do not count.
KDA_DEVICE float largest_of(const StateTile& state) {
    const float inf = __int_as_float(0x7f800000);
    float m[4] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) m[e] = fmaxf(m[e], fabsf(state.s[n][e]));  // of NaN and a number, the number
    }
    float s_max = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    if (__any_sync(0xffffffffu, s_max == inf)) {
        s_max = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = fabsf(state.s[n][e]);
                s_max = fmaxf(s_max, x < inf ? x : 0.0f);
            }
        }
    }
    return warp_max_positive(s_max);
}

// Chooses new units from the exact maxima, s_max in the state's units, so that the larger of |v| and 2^headroom |S| has exponent `target`. Returns
// the largest |S| in the new ones. Rare; an infinite v leaves the units as they are.
KDA_DEVICE float choose_units(StateTile& state, float s_max, float v_max, int headroom, int target) {
    const float inf = __int_as_float(0x7f800000);
    // Exponents rather than values: s may be far out of f16's range, v in true units far out of s's.
    const int s_log = s_max > 0.0f ? ilogb_fast(s_max) + headroom + state.exponent : -1000;
    const int v_log = v_max > 0.0f ? ilogb_fast(v_max) : -1000;
    const int log = max(s_log, v_log);
    if (log == -1000) {  // of nothing but zeros any will do; shifts would go on moving them
        state.exponent = 0;
        return 0.0f;
    }
    if (!(v_max < inf)) return s_max;
    const int exponent = max(-100, min(log - target, 117));
    const int move = state.exponent - exponent, near = max(-126, min(move, 127));
    const float scale = exp2_int(near);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) state.s[n][e] *= scale;
    }
    s_max *= scale;
    if (near != move) {  // a single power of two would leave fp32's exponents
        const float rest = exp2_int(max(-126, min(move - near, 127)));
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.s[n][e] *= rest;
        }
        s_max *= rest;
    }
    state.exponent = exponent;
    return s_max;
}

// One chunk. `image`: the stage in shared memory; `v_tile`: [32 tokens x 64] bf16, tile_offset layout; v0: the warp's first
// column in it; o: O^T in C tiles over tokens, times kQueryScale, in units of 2^exponent as they were then (returned).
KDA_DEVICE int advance_chunk(StateTile& state, u32 image, u32 v_tile, int v0, float (&o)[4][4]) {
    const int lane = threadIdx.x & 31, tid = lane & 3;
    const int tile_row = (lane & 7) + 8 * ((lane >> 3) & 1), tile_piece = lane >> 4;

    // V^T: transposed loads give rows v, columns tokens; pairs v[nt][0], v[nt][1] are rows gid and gid + 8 of token tile nt.
    u32 v[4][2];
#pragma unroll
    for (int nt = 0; nt < 4; nt += 2) {
        u32 r[4];
        // tiles: (tokens 8 nt, v 0), (tokens 8 nt, v 8), (tokens 8 nt + 8, v 0), (.., v 8)
        const int token = 8 * nt + (lane & 7) + 8 * (lane >> 4);
        ldmatrix_x4_trans(r, v_tile + tile_offset(token, v0 / 8 + ((lane >> 3) & 1)));
        v[nt][0] = r[0], v[nt][1] = r[1], v[nt + 1][0] = r[2], v[nt + 1][1] = r[3];
    }

    u32 a[8][4];
    pack_state(a, state);
    {
        u32 s_max = 0, v_max = 0;
#pragma unroll
        for (int s = 0; s < 8; ++s) {
#pragma unroll
            for (int e = 0; e < 4; ++e) s_max = max_abs_f16x2(s_max, a[s][e]);
        }
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) v_max = max_abs_bf16x2(max_abs_bf16x2(v_max, v[nt][0]), v[nt][1]);
        const float v_true = fmaxf(bf16_lo(v_max), bf16_hi(v_max));
        const float v_units = v_true * exp2_int(-state.exponent);
        const float s_units = fmaxf(f16_lo(s_max), f16_hi(s_max)) * (1 << kStateHeadroom);
        const float largest = warp_max_positive(fmaxf(v_units, s_units));
        if (!(largest >= kUnitsLow && largest <= kUnitsHigh) || state.exponent < -100) {
            choose_units(state, largest_of(state), warp_max_positive(v_true), kStateHeadroom, kUnitsTarget);
            pack_state(a, state);
        }
    }
    const float to_units = exp2_int(-state.exponent);
    const int exponent = state.exponent;

    // X and the state's share of O.
    float x[4][4] = {};
#pragma unroll
    for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[nt][e] = 0.0f;
    }
    // ldmatrix tiles: tokens (8 nt, 8 nt + 8) by pieces (2 s, 2 s + 1): B fragments of two token tiles.
#pragma unroll
    for (int s = 0; s < 8; ++s) {
#pragma unroll
        for (int nt = 0; nt < 4; nt += 2) {
            u32 b[4];
            ldmatrix_x4(b, image + kKDecayed + tile_offset(8 * nt + tile_row, 2 * s + tile_piece));
            mma_f16(x[nt], a[s], b[0], b[2]);
            mma_f16(x[nt + 1], a[s], b[1], b[3]);
        }
    }
#pragma unroll
    for (int s = 0; s < 8; ++s) {
#pragma unroll
        for (int nt = 0; nt < 4; nt += 2) {
            u32 b[4];
            ldmatrix_x4(b, image + kQDecayed + tile_offset(8 * nt + tile_row, 2 * s + tile_piece));
            mma_f16(o[nt], a[s], b[0], b[2]);
            mma_f16(o[nt + 1], a[s], b[1], b[3]);
        }
    }

    // R / kWriteScale, as A fragments over tokens.
    u32 r[2][4];
    {
        const float unscale = -1.0f / (kKeyScale * kWriteScale);
        const float v_scale = to_units * (1.0f / kWriteScale);
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
            const float r0 = fmaf(x[nt][0], unscale, bf16_lo(v[nt][0]) * v_scale);
            const float r1 = fmaf(x[nt][1], unscale, bf16_hi(v[nt][0]) * v_scale);
            const float r2 = fmaf(x[nt][2], unscale, bf16_lo(v[nt][1]) * v_scale);
            const float r3 = fmaf(x[nt][3], unscale, bf16_hi(v[nt][1]) * v_scale);
            r[nt / 2][2 * (nt & 1)] = pack_f16(r0, r1);
            r[nt / 2][2 * (nt & 1) + 1] = pack_f16(r2, r3);
        }
    }

    // S' = D S + A_k^T R, in units 2^shift finer where the chunk's betas were tiny.
    float shift_scale;
    int shift;
    load_shared_pair(image + kShift, shift_scale, shift);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        float d0, d1;
        load_shared_pair(image + decay_offset(n, tid), d0, d1);
        state.s[n][0] *= d0;
        state.s[n][1] *= d1;
        state.s[n][2] *= d0;
        state.s[n][3] *= d1;
    }
    if (shift != 0) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.s[n][e] *= shift_scale;
        }
        state.exponent -= shift;
    }
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            u32 b[4];
            ldmatrix_x4_trans(b, image + kAk + tile_offset(16 * s + tile_row, n + tile_piece));
            mma_f16(state.s[n], r[s], b[0], b[1]);
            mma_f16(state.s[n + 1], r[s], b[2], b[3]);
        }
    }
    // R's share of O; A_q is lower triangular by blocks of 16.
#pragma unroll
    for (int nt = 0; nt < 4; nt += 2) {
#pragma unroll
        for (int s = 0; s <= nt / 2; ++s) {
            u32 b[4];
            ldmatrix_x4(b, image + kAq + aq_offset(8 * nt + tile_row, 2 * s + tile_piece));
            mma_f16(o[nt], r[s], b[0], b[2]);
            mma_f16(o[nt + 1], r[s], b[1], b[3]);
        }
    }
    return exponent;
}

// The state of one (slot, head), V-major fp32 or bf16, from and to C tiles: element (row gid or gid + 8, channels 8 n + 2 tid and + 1).
KDA_DEVICE i64 lane_element(i64 element) {
    const int lane = threadIdx.x & 31, gid = lane >> 2, tid = lane & 3;
    return element + gid * kHeadDim + 2 * tid;
}
KDA_DEVICE constexpr int pair_offset(int n, int r) { return 8 * r * kHeadDim + 8 * n; }

KDA_DEVICE void load_state(StateTile& state, const void* base, i64 element, bool is_bf16) {
    element = lane_element(element);
    if (is_bf16) {
        const u16* from = static_cast<const u16*>(base) + element;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const u32 pair = *reinterpret_cast<const u32*>(from + pair_offset(n, r));
                state.s[n][2 * r] = bf16_lo(pair), state.s[n][2 * r + 1] = bf16_hi(pair);
            }
        }
    } else {
        const float* from = static_cast<const float*>(base) + element;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const Float2 pair = *reinterpret_cast<const Float2*>(from + pair_offset(n, r));
                state.s[n][2 * r] = pair.x, state.s[n][2 * r + 1] = pair.y;
            }
        }
    }
    state.exponent = 0;
}
KDA_DEVICE void store_state(const StateTile& state, void* base, i64 element, bool is_bf16) {
    element = lane_element(element);
    if (!is_bf16 && abs(state.exponent) <= 126) {
        const float scale = exp2_int(state.exponent);
        float* to = static_cast<float*>(base) + element;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<Float2*>(to + pair_offset(n, r)) = Float2{state.s[n][2 * r] * scale, state.s[n][2 * r + 1] * scale};
        }
        return;
    }
    const int half = state.exponent / 2;
    const float a = exp2_int(half), b = exp2_int(state.exponent - half);
#pragma unroll
    for (int n = 0; n < 16; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i64 at = element + pair_offset(n, r);
            const float lo = state.s[n][2 * r] * a * b, hi = state.s[n][2 * r + 1] * a * b;
            if (is_bf16)
                *reinterpret_cast<u32*>(static_cast<u16*>(base) + at) = pack_bf16(lo, hi);
            else
                *reinterpret_cast<Float2*>(static_cast<float*>(base) + at) = Float2{lo, hi};
        }
    }
}
