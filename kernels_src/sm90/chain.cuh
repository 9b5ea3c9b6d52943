// A chain: the recurrence of 64 of V's columns of one (sequence, value head), chunk after chunk, by a warpgroup that computes
// and a warp that moves data. Both halves of V may run side by side on the same stage images: then two of each.
//
//   X = S k_decayed     R = V - X     O = S q_decayed + R A_q     S' = D S + A_k^T R       (S, X, R, O transposed: V first)
//
// Same units, number formats and rounding as common/recurrence.cuh, with wgmma: S^T [64 x 128] is the accumulator of an
// m64n128 product, and packed to f16 the A operand of the next chunk's products. B is the stage image as it lies in shared memory.
//
//   tensor cores   |      X       |      O1     | O2 |      S'     |                  |      X
//   registers      | v, load next |     wait    | R  | max, D, pack O | snapshot, decay  | v ...
//
// A warp issues in order and waits at a wgmma that does not fit the queue, of about eight: a load between X and O1 costs nothing,
// work there does.
// The state is decayed for the next chunk right after it was packed for it: ptxas lets nobody write an accumulator while
// an earlier batch is in flight. All else that is not arithmetic is the movers'. Two barriers a stage join the two:
//   full    movers -> compute: the image and V's columns are here
//   empty   compute -> movers: the stage has been read, and O lies where V's columns were
// The first mover also moves the images.
//
// f16 range. A new choice of units needs the state's exact maximum, which costs time on the chain. So each warp keeps a bound instead: the
// rule is a contraction, |s'|^2 <= |s|^2 + v^2 a token for each row s of S^T. It grows by 32 max(v)^2 a chunk, and only when it comes near
// f16's end (every thousands of tokens, as units are chosen), or v leaves the range where the units suit it, is the state measured.
#pragma once
#include "common/barrier.cuh"
#include "common/recurrence.cuh"
#include "common/sequence.cuh"
#include "common/wgmma.cuh"

constexpr int kChainThreads = 128;  // that compute
constexpr int kChainColumns = 64;   // of V
constexpr int kImageBytes = (kStageBytes + 1023) / 1024 * 1024;
constexpr int kChainTile = kHalfTile;  // 32 tokens x 64 columns, bf16, tile_offset layout
constexpr OperandLayout kAkLayout = operand_layout(kHalfTile, 8 * kRowBytes, kSwizzle128);

// In units: v is to be within [2^4, 2^12], a row of the state at most 2^14 long. New units bring |v| into [2^6, 2^7), or |S| into
// [2^8, 2^9) if that is coarser.
constexpr float kPassLow = 0x1p4f, kPassHigh = 0x1p12f, kPassState = 0x1p14f;
constexpr float kPassShare = kPassState * kPassState / 4;  // what each lane of a quad may have of a row's squared length
constexpr int kChainHeadroom = -2;
constexpr int kChainTarget = 6;

enum ChainEvents : u32 { kMeasure = 1, kCheckpoint = 2, kFinal = 4 };  // after a chunk

template <int kStages>
struct ChainSmem {
    struct Stage {
        u8 image[kImageBytes];
        u8 v[2][kChainTile];  // of each chain; later O
    };
    alignas(1024) Stage stage[kStages];
    u64 full[kStages];
    u64 empty[kStages];
};
// Where one side stands in the ring: the stage of its next chunk, and the parity of that stage's phase. Outlives a chain.
template <int kStages>
struct ChainRing {
    u32 stage = 0, parity = 0;

    KDA_DEVICE void advance() {
        stage = stage + 1 == kStages ? 0u : stage + 1;
        parity ^= stage == 0 ? 1u : 0u;
    }
};
// What a chain does; `place` is its number among those that share the stages.
struct ChainUnit {
    int n, hv, half, place;
};

// Where stage images come from; the first mover asks, for one chunk after another. This one: the workspace that an earlier grid filled.
struct WorkspaceSource {
    const u8* images;  // of the sequence's first chunk
    i64 pitch;         // bytes to the next chunk's

    KDA_DEVICE const u8* image(int c) const { return images + c * pitch; }
    KDA_DEVICE void wait(int c) const {  // returns when chunk c's image may be read by bulk copies; called in order
        if (c == 0) grid_wait_for_prerequisites();
    }
    static constexpr bool kReused = false;  // if true, consumed(c) is called: chunk c's image has been copied, its place is free
    KDA_DEVICE void consumed(int) const {}
};

// Once per kernel, by one thread; a barrier of all users must follow. `chains`: 1 or 2, that share the stages.
template <int kStages>
KDA_DEVICE void init_chains(ChainSmem<kStages>& smem, int chains) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
        mbarrier_init(shared_address(&smem.full[i]), 1 + 32 * chains);
        mbarrier_init(shared_address(&smem.empty[i]), kChainThreads / 32 * chains);
    }
    mbarrier_init_fence();
}

// The mover's part of `unit`, by one warp: fills stages, and takes O out of them.
template <int kStages, typename Source>
KDA_DEVICE void move_chain(const KdaArgs& args, const ChainUnit& unit, const Source& source, ChainSmem<kStages>& smem,
                           ChainRing<kStages>& ring) {
    constexpr int kRows = 4, kSteps = kChunk / kRows;  // rows a step; a thread refills just the rows that it has read
    const int thread = threadIdx.x & 31, row = thread / 8, piece = thread % 8;
    const Sequence seq = load_sequence(args, unit.n);
    const int column = unit.hv * kHeadDim + unit.half * kChainColumns + 8 * piece;
    const u16* v = args.v + seq.batch * args.v_batch + seq.first * args.v_token + column;
    u16* out = args.out + seq.batch * args.out_batch + seq.first * args.out_token + column;

    auto fill = [&](int c, u32 stage) {
        const u32 full = shared_address(smem.full) + stage * static_cast<u32>(sizeof(u64));
        const u32 to = shared_address(smem.stage) + stage * static_cast<u32>(sizeof(smem.stage[0]));
        if (unit.place == 0) {
            source.wait(c);
            const u8* image = source.image(c);
            if (thread == 0) {
                mbarrier_arrive_expect_bytes(full, kStageBytes);
                bulk_copy(to, image, kStageBytes, full);
            }
            __syncwarp();
        }
        const Chunk chunk = chunk_of(seq, c);
        const u16* from = v + (chunk.start + row) * args.v_token;
        const u32 tile = to + kImageBytes + unit.place * kChainTile;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const bool live = row + kRows * i < chunk.valid;
            cp_async_16_or_zero(tile + tile_offset(row + kRows * i, piece), live ? from : args.v, live);
            from += kRows * args.v_token;
        }
        mbarrier_arrive_after_cp_async(full);
    };
    {
        ChainRing<kStages> ahead = ring;
        for (int c = 0; c < min(kStages, seq.num_chunks); ++c, ahead.advance()) fill(c, ahead.stage);
    }
#pragma unroll 1
    for (int c = 0; c < seq.num_chunks; ++c, ring.advance()) {
        const u8* tile = smem.stage[ring.stage].v[unit.place];
        const Chunk chunk = chunk_of(seq, c);
        u16* to = out + (chunk.start + row) * args.out_token;
        mbarrier_wait(shared_address(&smem.empty[ring.stage]), ring.parity);
        // Whoever has done with chunk c has seen that the next one has landed.
        if (Source::kReused && unit.place == 0) source.consumed(min(c + 1, seq.num_chunks - 1));
        Quad32 rows[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) rows[i] = load_quad(tile + tile_offset(row + kRows * i, piece));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            if (row + kRows * i < chunk.valid) store_quad(to, rows[i]);
            to += kRows * args.out_token;
        }
        if (c + kStages < seq.num_chunks) fill(c + kStages, ring.stage);
    }
}

// The warpgroup's part of `unit`, from the initial to the final state.
template <int kStages>
KDA_DEVICE void compute_chain(const KdaArgs& args, const ChainUnit& unit, ChainSmem<kStages>& smem, ChainRing<kStages>& ring) {
    const int thread = threadIdx.x % kChainThreads, lane = threadIdx.x & 31, tid = lane & 3;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // uniform, as far as the compiler can tell
    const Sequence seq = load_sequence(args, unit.n);
    const int num_chunks = seq.num_chunks;
    const int checkpoint_chunk = (seq.checkpoint + kChunk - 1) / kChunk - 1;  // -1: none

    const i64 head = (static_cast<i64>(unit.hv) * kHeadDim + unit.half * kChainColumns + warp * kVRows) * kHeadDim;
    auto store_final = [&](const StateTile& state) {
        const i64 slot = state_slot(args, unit.n);
        if (slot >= 0) store_state(state, args.final_state, slot * args.final_slot + head, args.flags & kFinalBf16);
    };
    StateTile state;
    const i64 slot = state_slot(args, unit.n);
    if (args.initial_state && slot >= 0 && (!args.has_initial_state || args.has_initial_state[unit.n])) {
        load_state(state, args.initial_state, slot * args.initial_slot + head, args.flags & kInitialBf16);
    } else {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.s[n][e] = 0.0f;
        }
        state.exponent = 0;
    }
    if (num_chunks == 0) {
        store_final(state);
        return;
    }

    // A lane's row of a [tokens x columns] tile, for ldmatrix and stmatrix of the warp's own columns: tiles
    // (tokens 0, columns 0), (0, 8), (8, 0), (8, 8); tokens 16 .. 31 are 16 rows further on.
    const u32 own_tile = kImageBytes + unit.place * kChainTile + tile_offset((lane & 7) + 8 * (lane >> 4), 2 * warp + ((lane >> 3) & 1));

    u32 a[8][4];                // S^T in f16, as A fragments
    u32 v[4][2], v_next[4][2];  // V^T of this chunk and of the next: rows gid and gid + 8 of token tile nt
    float x[4][4], o[4][4];
    int units;                         // exponent of a, R and O
    float decay[16][2], shift_scale;  // of the next chunk; 2^shift, where its betas are tiny, goes into the decay
    int shift;
    float bound;  // this lane's share of the squared length of rows after the chunk whose v was read last, in units
    const float out_scale = args.scale * (1.0f / kQueryScale);

    auto load_v = [&](u32 image) {
#pragma unroll
        for (int nt = 0; nt < 4; nt += 2) {
            u32 r[4];
            ldmatrix_x4_trans(r, image + own_tile + 8 * nt * kRowBytes);
            v_next[nt][0] = r[0], v_next[nt][1] = r[1], v_next[nt + 1][0] = r[2], v_next[nt + 1][1] = r[3];
        }
    };
    auto measure_v = [&] {
        u32 largest[2] = {0, 0};
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int r = 0; r < 2; ++r) largest[r] = max_abs_bf16x2(largest[r], v_next[nt][r]);
        }
        largest[0] = max_abs_bf16x2(largest[0], largest[1]);
        return fmaxf(bf16_lo(largest[0]), bf16_hi(largest[0]));
    };
    auto load_decay = [&](u32 image) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(shift_scale), "=r"(shift) : "r"(image + kShift));
#pragma unroll
        for (int n = 0; n < 16; n += 2)
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(decay[n][0]), "=f"(decay[n][1]), "=f"(decay[n + 1][0]), "=f"(decay[n + 1][1])
                         : "r"(image + decay_offset(n, tid)));
    };
    auto shift_decay = [&] {
        if (shift == 0) return;
#pragma unroll
        for (int n = 0; n < 16; ++n) decay[n][0] *= shift_scale, decay[n][1] *= shift_scale;
    };
    // A lane has v of a quarter of the tokens. 5 %: rounding is no contraction.
    auto bound_next = [&](float v_max) { bound = fmaf(v_max * (1.05f * kChunk / 4), v_max, bound); };
    auto new_units = [&](float v_max) {
        const float largest = choose_units(state, warp_max_positive(v_max), kChainHeadroom, kChainTarget);
        bound = kHeadDim / 4 * largest * largest;
        bound_next(v_max * exp2_int(-state.exponent));
    };
    // S to the A operand, then decayed.
    auto snapshot = [&] {
        pack_state(a, state);
        units = state.exponent;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            state.s[n][0] *= decay[n][0];
            state.s[n][1] *= decay[n][1];
            state.s[n][2] *= decay[n][0];
            state.s[n][3] *= decay[n][1];
        }
        state.exponent -= shift;
    };

    u32 image = shared_address(smem.stage) + ring.stage * static_cast<u32>(sizeof(smem.stage[0]));
    u32 full = shared_address(smem.full) + ring.stage * static_cast<u32>(sizeof(u64));
    constexpr u32 to_empty = kStages * sizeof(u64);
    mbarrier_wait(full, ring.parity);
    load_v(image);
    new_units(measure_v());
    load_decay(image);
    shift_decay();
    snapshot();

#pragma unroll 1
    for (int c = 0; c < num_chunks; ++c) {
        const u32 base = image >> 4, this_image = image, this_full = full;
        const bool more = c + 1 < num_chunks;
        ring.advance();
        full = shared_address(smem.full) + ring.stage * static_cast<u32>(sizeof(u64));
        const bool landed = mbarrier_test(full, ring.parity);  // asked here, where it costs no waiting

#pragma unroll
        for (int nt = 0; nt < 4; ++nt) v[nt][0] = v_next[nt][0], v[nt][1] = v_next[nt][1];
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const u64 b = operand(kRowsOf128Bytes, base + ((kKDecayed + s / 4 * kHalfTile + s % 4 * 32) >> 4));
            if (s == 0)
                wgmma_n32<false>(x, a[s], b);
            else
                wgmma_n32<true>(x, a[s], b);
        }
        wgmma_commit();

#pragma unroll
        for (int nt = 0; nt < 4; ++nt) v[nt][0] = opaque(v[nt][0]), v[nt][1] = opaque(v[nt][1]);  // unpacked here, not before X
        float v_units[4][4];
        const float to_units = exp2_int(-units), v_scale = to_units * (1.0f / kWriteScale);
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                v_units[nt][2 * r] = bf16_lo(v[nt][r]) * v_scale;
                v_units[nt][2 * r + 1] = bf16_hi(v[nt][r]) * v_scale;
            }
        }
        pin(v_units);

        // The next V comes while O's products are issued.
        const bool shifted = shift != 0;
        if (more) {
            if (!__all_sync(0xffffffffu, landed)) mbarrier_wait(full, ring.parity);
            image = shared_address(smem.stage) + ring.stage * static_cast<u32>(sizeof(smem.stage[0]));
        }
        load_v(image);  // after the last chunk: its own again, which nobody uses

        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const u64 b = operand(kRowsOf128Bytes, base + ((kQDecayed + s / 4 * kHalfTile + s % 4 * 32) >> 4));
            if (s == 0)
                wgmma_n32<false>(o, a[s], b);
            else
                wgmma_n32<true>(o, a[s], b);
        }
        wgmma_commit();

        wgmma_wait<1>();
        pin(x);
        // R / kWriteScale, as A fragments over tokens.
        u32 r[2][4];
        constexpr float unscale = -1.0f / (kKeyScale * kWriteScale);
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int e = 0; e < 4; e += 2)
                r[nt / 2][2 * (nt & 1) + e / 2] = pack_f16(fmaf(x[nt][e], unscale, v_units[nt][e]),
                                                           fmaf(x[nt][e + 1], unscale, v_units[nt][e + 1]));
        }
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) wgmma_n32<true>(o, r[s], operand(kRowsOf64Bytes, base + ((kAq + s * 32) >> 4)));
        wgmma_commit();
#pragma unroll
        for (int s = 0; s < 2; ++s)
            wgmma_n128_rows(state.s, r[s], operand(kAkLayout, base + ((kAk + s * 16 * kRowBytes) >> 4)));
        wgmma_commit();

        // In their shadow: the next chunk's decays, and whether its units may stay.
        load_decay(image);
        wgmma_wait<1>();
        pin(o);
        {
            const float scale = out_scale * exp2_int(units);
#pragma unroll
            for (int nt = 0; nt < 4; nt += 2)
                stmatrix_x4_trans(this_image + own_tile + 8 * nt * kRowBytes,
                                  pack_bf16(o[nt][0] * scale, o[nt][1] * scale),
                                  pack_bf16(o[nt][2] * scale, o[nt][3] * scale),
                                  pack_bf16(o[nt + 1][0] * scale, o[nt + 1][1] * scale),
                                  pack_bf16(o[nt + 1][2] * scale, o[nt + 1][3] * scale));
        }
        const float v_max = measure_v(), v_largest = v_max * to_units;
        const bool above = __any_sync(0xffffffffu, !(v_largest <= kPassHigh && bound <= kPassShare));
        const bool below = !__any_sync(0xffffffffu, v_largest >= kPassLow);
        u32 events = 0;  // all of them rare
        if (above || below || shifted) events |= kMeasure;
        bound_next(v_largest);
        if (c == checkpoint_chunk) events |= kCheckpoint;
        if (!more) events |= kFinal;
        shift_decay();
        asm volatile("" : "+r"(events));

        wgmma_wait<0>();
        pin(state.s);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(this_full + to_empty);
        if (events) {
            if (events & kCheckpoint)
                store_state(state, args.checkpoint_state, unit.n * args.checkpoint_slot + head, args.flags & kCheckpointBf16);
            if (events & kFinal) {
                store_final(state);
            } else if (events & kMeasure) {
                new_units(v_max);
            }
        }
        snapshot();
    }
}
