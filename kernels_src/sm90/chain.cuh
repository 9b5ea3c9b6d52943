// A chain: the recurrence of 64 of V's columns of one (sequence, value head), chunk after chunk, by a warpgroup that computes,
// a warp that moves its columns of V and O, and a warp that moves stage images. Both halves of V may run side by side on the same
// images: then two each of the former two.
//
//   X = S k_decayed     R = V - X     O = S q_decayed + R A_q     S' = D S + A_k^T R       (S, X, R, O transposed: V first)
//
// Same units, number formats and rounding as common/recurrence.cuh, with wgmma: S^T [64 x 128] is the accumulator of an
// m64n128 product, and packed to f16 the A operand of the next chunk's products. B is the stage image as it lies in shared memory.
//
//   tensor cores   |       X and O1 at once       |    | O2 |      S'      |           |       X and O1
//   registers      | decay, v, load next, max, wait | R  |    | D, pack O    | snapshot  | decay, v ...
//
// A warp issues in order and waits at a wgmma that does not fit the queue, of about eight: X and O1 as one product of eight steps fit,
// and leave the warp free.
// A round of the loop ends with X of the next chunk, so that a block of code begins there: in one block ptxas puts whatever it can in
// front of a product, the addresses of the next chunk and the unpacking of V, and X would begin a quarter of a round later. The state is
// decayed for the next chunk right after it was packed for it, in the source before X; half of that ptxas puts behind it.
// All else that is not arithmetic is the movers'. Two barriers a stage join the two:
//   full    movers -> compute: the image and V's columns are here
//   empty   compute -> movers: the stage has been read, and O lies where V's columns were
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
constexpr OperandLayout kAkLayout = operand_layout(kHalfStride, 8 * kRowBytes, kSwizzle128);

// In units: v is to be within [2^4, 2^12], a row of the state at most 2^14 long. New units bring |v| into [2^6, 2^7), or |S| into
// [2^8, 2^9) if that is coarser.
constexpr float kPassLow = 0x1p4f, kPassHigh = 0x1p12f, kPassState = 0x1p14f;
constexpr float kPassShare = kPassState * kPassState / 4;  // what each lane of a quad may have of a row's squared length
constexpr int kChainHeadroom = -2;
constexpr int kChainTarget = 6;


// Images and columns together, images from elsewhere.
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
// Where one side of a chain stands in the stages: that of its next chunk, and the parity of that stage's phase. Outlives a chain.
template <int kStages>
struct ChainStages {
    static constexpr int kDepth = kStages;
    // Whether warps work beside the chain that prepare. If so, what is executed counts, and R's products are not to wait for loads between them;
    // else the chain's own way does, and that is the best place for these.
    static constexpr bool kBusy = false;
    ChainSmem<kStages>& smem;
    int place;  // of the chain among those that share the stages
    u32 stage = 0, parity = 0;

    KDA_DEVICE ChainStages(ChainSmem<kStages>& smem, int place) : smem(smem), place(place) {}
    struct Spot {
        u32 image, tile, full;  // shared addresses; the tile holds V's columns, later O's
    };
    KDA_DEVICE Spot spot() const {
        const u32 image = shared_address(smem.stage) + stage * static_cast<u32>(sizeof(smem.stage[0]));
        return {image, image + kImageBytes + place * kChainTile, shared_address(smem.full) + stage * static_cast<u32>(sizeof(u64))};
    }
    KDA_DEVICE void advance() {
        stage = stage + 1 == kStages ? 0u : stage + 1;
        parity ^= stage == 0 ? 1u : 0u;
    }
    KDA_DEVICE bool landed(const Spot& spot) const { return mbarrier_test(spot.full, parity); }
    KDA_DEVICE void wait(const Spot& spot) const { mbarrier_wait(spot.full, parity); }
    static KDA_DEVICE u32 empty(const Spot& spot) { return spot.full + kStages * static_cast<u32>(sizeof(u64)); }
    KDA_DEVICE void release(const Spot& spot) const { mbarrier_arrive(empty(spot)); }  // by one thread a warp
    KDA_DEVICE void wait_released(const Spot& spot) const { mbarrier_wait(empty(spot), parity); }
};
// The same value throughout a warp, which the compiler cannot see: for uniform registers, where wgmma takes its operands' addresses from, a
// chain and all loops around it must be seen to be uniform.
KDA_DEVICE int uniform(int x) { return __reduce_or_sync(0xffffffffu, x); }

// What a chain does.
struct ChainUnit {
    int n, hv, half;
};
// What a chain knows besides the state between two chunks, each lane by itself.
struct ChainMemory {
    float bound;  // of the squared length of the lane's share of rows of the state, in units
    int units;    // exponent of a, R and O in the last chunk
    bool shifted; // whether that chunk's betas were tiny
};
// The chunks of its sequence that it does: all of them. Where it did not begin at the first or end at the last, it would take the state
// from, or give it to, another chain: as it is, so that nothing tells where the cut was.
struct WholeSequence {
    KDA_DEVICE Sequence sequence(const KdaArgs& args, int n) const { return load_sequence(args, n); }
    KDA_DEVICE int begin() const { return 0; }
    KDA_DEVICE int end(const Sequence& seq) const { return seq.num_chunks; }
    KDA_DEVICE void take(StateTile&, ChainMemory&, int) const {}
    KDA_DEVICE void give(const StateTile&, const ChainMemory&, int) const {}
};

// Where stage images come from; the image mover asks, for one chunk after another. This one: the workspace that an earlier grid filled.
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

// The image mover's part of `unit`, by one warp: fills stages with images.
template <typename Stages, typename Source>
KDA_DEVICE void move_images(const KdaArgs& args, const ChainUnit& unit, const Source& source, Stages& stages) {
    const int num_chunks = load_sequence(args, unit.n).num_chunks;
    auto fill = [&](int c, const typename Stages::Spot& spot) {
        source.wait(c);
        const u8* image = source.image(c);
        if (elect_one()) {
            mbarrier_arrive_expect_bytes(spot.full, kStageBytes);
            bulk_copy(spot.image, image, kStageBytes, spot.full);
        }
        __syncwarp();
    };
    {
        Stages ahead = stages;
        for (int c = 0; c < min(Stages::kDepth, num_chunks); ++c, ahead.advance()) fill(c, ahead.spot());
    }
#pragma unroll 1
    for (int c = 0; c < num_chunks; ++c, stages.advance()) {
        const auto spot = stages.spot();
        stages.wait_released(spot);
        // Whoever has done with chunk c has seen that the next one has landed.
        if (Source::kReused) source.consumed(min(c + 1, num_chunks - 1));
        if (c + Stages::kDepth < num_chunks) fill(c + Stages::kDepth, spot);
    }
}

// Rows of 64 columns to and from a tile, by one warp: 8 of 32 rows a thread, kAtOnce at once. The fewer, the fewer registers.
constexpr int kRowsAStep = 4, kRowSteps = kChunk / kRowsAStep;

// A lane's piece of the first of its rows, which are `step` elements apart.
KDA_DEVICE i64 first_row(i64 step) {
    const int lane = threadIdx.x & 31;
    return lane / 8 * step + lane % 8 * 8;
}
// Begins to copy `valid` rows, and zeros after them. `from`: the lane's first row; `readable`: any address that may be read.
template <int kAtOnce>
KDA_DEVICE void fetch_columns(u32 tile, const u16* from, i64 step, int valid, const u16* readable) {
    const int lane = threadIdx.x & 31, row = lane / 8, piece = lane % 8;
#pragma unroll kAtOnce
    for (int i = 0; i < kRowSteps; ++i) {
        const bool live = row + kRowsAStep * i < valid;
        cp_async_16_or_zero(tile + tile_offset(row + kRowsAStep * i, piece), live ? from : readable, live);
        from += kRowsAStep * step;
    }
}
template <int kAtOnce>
KDA_DEVICE void store_columns(u32 tile, u16* to, i64 step, int valid) {
    const int lane = threadIdx.x & 31, row = lane / 8, piece = lane % 8;
#pragma unroll
    for (int first = 0; first < kRowSteps; first += kAtOnce) {
        Quad32 rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) rows[i] = load_shared_quad(tile + tile_offset(row + kRowsAStep * (first + i), piece));
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (row + kRowsAStep * (first + i) < valid) store_global_quad(to, rows[i]);
            to += kRowsAStep * step;
        }
    }
}

// A column mover's part of `unit`, by one warp: brings V's columns to the stages, and takes O out of them. A thread refills just the rows
// that it has read.
template <typename Stages>
KDA_DEVICE void move_columns(const KdaArgs& args, const ChainUnit& unit, Stages& stages) {
    const Sequence seq = load_sequence(args, unit.n);
    const int column = unit.hv * kHeadDim + unit.half * kChainColumns;
    const u16* v = args.v + seq.batch * args.v_batch + seq.first * args.v_token + column + first_row(args.v_token);
    u16* out = args.out + seq.batch * args.out_batch + seq.first * args.out_token + column + first_row(args.out_token);

    auto fill = [&](int c, const typename Stages::Spot& spot) {
        const Chunk chunk = chunk_of(seq, c);
        fetch_columns<kRowSteps>(spot.tile, v + chunk.start * args.v_token, args.v_token, chunk.valid, args.v);
        mbarrier_arrive_after_cp_async(spot.full);
    };
    {
        Stages ahead = stages;
        for (int c = 0; c < min(Stages::kDepth, seq.num_chunks); ++c, ahead.advance()) fill(c, ahead.spot());
    }
#pragma unroll 1
    for (int c = 0; c < seq.num_chunks; ++c, stages.advance()) {
        const auto spot = stages.spot();
        const Chunk chunk = chunk_of(seq, c);
        u16* to = out + chunk.start * args.out_token;
        stages.wait_released(spot);
        store_columns<kRowSteps>(spot.tile, to, args.out_token, chunk.valid);
        if (c + Stages::kDepth < seq.num_chunks) fill(c + Stages::kDepth, spot);
    }
}

// The warpgroup's part of `unit`, from the initial to the final state.
template <typename Stages, typename Part>
KDA_DEVICE void compute_chain(const KdaArgs& args, const ChainUnit& unit, const Part& part, Stages& stages) {
    const int thread = threadIdx.x % kChainThreads, lane = threadIdx.x & 31, tid = lane & 3;
    const int warp = __shfl_sync(0xffffffffu, thread / 32, 0);  // uniform, as far as the compiler can tell
    const Sequence seq = part.sequence(args, unit.n);
    const int begin = part.begin(), num_chunks = uniform(part.end(seq) - begin);
    const bool ends = part.end(seq) == seq.num_chunks;
    const int checkpoint_chunk = (seq.checkpoint + kChunk - 1) / kChunk - 1 - begin;  // below 0: none

    const i64 head = (static_cast<i64>(unit.hv) * kHeadDim + unit.half * kChainColumns + warp * kVRows) * kHeadDim;
    auto store_final = [&](const StateTile& state) {
        const i64 slot = state_slot(args, unit.n);
        if (slot >= 0) store_state(state, args.final_state, slot * args.final_slot + head, args.flags & kFinalBf16);
    };
    StateTile state;
    ChainMemory before{};
    const i64 slot = state_slot(args, unit.n);
    bool is_given = args.initial_state && slot >= 0;
    if (is_given && args.has_initial_state) is_given = args.has_initial_state[unit.n];
    if (begin > 0) {
        part.take(state, before, warp);
    } else if (__any_sync(0xffffffffu, is_given)) {  // one question: else zeros come first, whatever the answer
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
    const u32 own_columns = tile_offset((lane & 7) + 8 * (lane >> 4), 2 * warp + ((lane >> 3) & 1));

    // By shuffles, from itself: else ptxas finds the lane out again for every chunk, which takes long.
    const int own_decays = __shfl_sync(0xffffffffu, decay_offset(0, tid) - decay_offset(0, 0), lane);
    const u32 own_diagonal = __shfl_sync(0xffffffffu, lane >> 3 != tid ? 0u : lane & 4 ? 0xffff0000u : 0x0000ffffu, lane);  // of B [8 x 8]

    u32 a[8][4];                      // S^T in f16, as A fragments
    u32 v[4][2];                      // V^T of a chunk: rows gid and gid + 8 of token tile nt
    float x[4][4], o[4][4];
    int units;                        // exponent of a, R and O
    float decay[16][2], shift_scale;  // of the next chunk; 2^shift, where its betas are tiny, goes into the decay
    int shift;
    float bound;  // this lane's share of the squared length of rows after the chunk whose v was read last, in units
    const float out_scale = args.scale * (1.0f / kQueryScale);

    auto load_v = [&](u32 tile) {
#pragma unroll
        for (int nt = 0; nt < 4; nt += 2) {
            u32 r[4];
            ldmatrix_x4_trans(r, tile + own_columns + 8 * nt * kRowBytes);
            v[nt][0] = r[0], v[nt][1] = r[1], v[nt + 1][0] = r[2], v[nt + 1][1] = r[3];
        }
    };
    auto measure_v = [&] {
        u32 largest[2] = {0, 0};
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
            for (int r = 0; r < 2; ++r) largest[r] = max_abs_bf16x2(largest[r], v[nt][r]);
        }
        largest[0] = max_abs_bf16x2(largest[0], largest[1]);
        return fmaxf(bf16_lo(largest[0]), bf16_hi(largest[0]));
    };
    auto load_decay = [&](u32 image) {
        load_shared_pair(image + kShift, shift_scale, shift);
#pragma unroll
        for (int n = 0; n < 16; n += 2) load_shared_pairs(image + decay_offset(n, 0) + own_decays, decay[n], decay[n + 1]);
    };
    auto shift_decay = [&] {
        if (shift == 0) return;
#pragma unroll
        for (int n = 0; n < 16; ++n) decay[n][0] *= shift_scale, decay[n][1] *= shift_scale;
    };
    // A lane has v of a quarter of the tokens. 5 %: rounding is no contraction.
    auto bound_next = [&](float v_max) { bound = fmaf(v_max * (1.05f * kChunk / 4), v_max, bound); };
    auto new_units = [&](float s_max, float v_max) {
        const float largest = choose_units(state, s_max, warp_max_positive(v_max), kChainHeadroom, kChainTarget);
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

    // Begins X and the state's share of O: rows of k_decayed and of q_decayed are one operand.
    auto multiply_state = [&](u32 image) {
        const u32 base = operand_address(image);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 8; ++s) {
            const u64 b = operand(kRowsOf128Bytes, base + ((kKDecayed + s / 4 * kHalfStride + s % 4 * 32) >> 4));
            if (s == 0)
                wgmma_n64<false>(x, o, a[s], b);
            else
                wgmma_n64<true>(x, o, a[s], b);
        }
        wgmma_commit();
    };

    // Before the chunk whose V was read last, each lane by itself. The state is to be measured where anybody is kOff, or nobody kLarge.
    constexpr u32 kLarge = 1, kOff = 2;
    auto judge = [&](float v_max, bool shifted) -> u32 {
        const float v_largest = v_max * exp2_int(-units);
        const bool off = shifted || !(v_largest <= kPassHigh && bound <= kPassShare);
        bound_next(v_largest);
        return off ? kOff : v_largest >= kPassLow ? kLarge : 0u;
    };
    auto all_is_well = [](u32 judgement) { return __reduce_or_sync(0xffffffffu, judgement) == kLarge; };

    auto spot = stages.spot();
    const float s_max = largest_of(state);  // while the image may be under way
    stages.wait(spot);
    load_v(spot.tile);
    load_decay(spot.image);
    {
        const float v_max = measure_v();
        bound = before.bound, units = before.units;
        if (begin == 0 || !all_is_well(judge(v_max, before.shifted))) new_units(s_max, v_max);
    }
    shift_decay();
    snapshot();
    multiply_state(spot.image);

    bool shifted = false;  // whether the last chunk's betas were tiny
#pragma unroll 1
    for (int c = 0;; ++c) {
        const auto here = spot;
        const u32 base = operand_address(here.image);
        const bool more = c + 1 < num_chunks;
        stages.advance();
        const auto next = stages.spot();
        const bool landed = stages.landed(next);  // asked here, where it costs no waiting

        // In the shadow of X, which is under way: V in units, and the next V with its maximum.
        float v_units[4][4];
        const float to_units = exp2_int(-units), v_scale = to_units * (1.0f / kWriteScale);
        if constexpr (Stages::kBusy) {  // four instructions for 32; but they wait for X
            const u32 bits = __float_as_uint(v_scale), scale = ((bits & 0xffff0000u) | bits >> 16) & own_diagonal;
#pragma unroll
            for (int nt = 0; nt < 4; ++nt) mma_bf16_k8(v_units[nt], v[nt][0], v[nt][1], scale);
        } else {
#pragma unroll
            for (int nt = 0; nt < 4; ++nt) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    v_units[nt][2 * r] = bf16_lo(v[nt][r]) * v_scale;
                    v_units[nt][2 * r + 1] = bf16_hi(v[nt][r]) * v_scale;
                }
            }
        }
        pin(v_units);
        shifted = shift != 0;
        if (!__all_sync(0xffffffffu, landed) && more) stages.wait(next);
        if (more) spot = next;  // after the last chunk: its own again, for nobody
        load_v(spot.tile);
        const float v_max = measure_v();

        wgmma_wait<0>();
        pin(x);
        pin(o);
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
        // R A_q for O, and R times the 32 rows before a_q for X, which nobody needs any more: ptxas serializes all products if x and o are
        // one operand once and two another time.
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s) wgmma_n64<true>(x, o, r[s], operand(kRowsOf64Bytes, base + ((kAq - kChunk * 64 + s * 32) >> 4)));
        wgmma_commit();
#pragma unroll
        for (int s = 0; s < 2; ++s)
            wgmma_n128_rows(state.s, r[s], operand(kAkLayout, base + ((kAk + s * 16 * kRowBytes) >> 4)));
        wgmma_commit();

        // In their shadow: the next chunk's decays, and whether its units may stay.
        if (!Stages::kBusy) load_decay(spot.image);
        wgmma_wait<1>();
        pin(o);
        if (Stages::kBusy) load_decay(spot.image);
        {
            const float scale = out_scale * exp2_int(units);
#pragma unroll
            for (int nt = 0; nt < 4; nt += 2)
                stmatrix_x4_trans(here.tile + own_columns + 8 * nt * kRowBytes,
                                  pack_bf16(o[nt][0] * scale, o[nt][1] * scale),
                                  pack_bf16(o[nt][2] * scale, o[nt][3] * scale),
                                  pack_bf16(o[nt + 1][0] * scale, o[nt + 1][1] * scale),
                                  pack_bf16(o[nt + 1][2] * scale, o[nt + 1][3] * scale));
        }
        const u32 judgement = judge(more ? v_max : 0.0f, shifted);  // what is handed on has not seen a v twice
        // One branch for all that is rare.
        const bool odd = shift != 0 || !more || c == checkpoint_chunk;
        const bool rare = !all_is_well(odd ? kOff : judgement);

        wgmma_wait<0>();
        pin(state.s);
        __syncwarp();
        if (lane == 0) stages.release(here);
        if (rare) {
            if (c == checkpoint_chunk)
                store_state(state, args.checkpoint_state, unit.n * args.checkpoint_slot + head, args.flags & kCheckpointBf16);
            if (!more) break;
            shift_decay();
            if (!all_is_well(judgement)) new_units(largest_of(state), v_max);
        }
        snapshot();
        multiply_state(spot.image);
    }
    if (ends)
        store_final(state);
    else
        part.give(state, ChainMemory{bound, units, shifted}, warp);
}
