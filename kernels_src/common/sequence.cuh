// Which tokens belong to which chunk, found on the device from cu_seqlens alone.
//
// Sequence n with tokens [a, a + L) owns the chunk slots from slot_base(n) = a / 32 + n * (2 with checkpoints, else 1).
// That is enough for its ceil(L / 32) chunks (one more where a checkpoint starts a new chunk), needs no prefix sum,
// and grows with n, so a slot's sequence is found by search.
#pragma once
#include "common/barrier.cuh"
#include "common/kda_args.cuh"
#include "common/stage.cuh"

struct Sequence {
    i64 first;       // token index of its first token (varlen), or 0
    i64 batch;       // batch row
    i32 length;      // tokens
    i32 checkpoint;  // tokens before the checkpoint; 0: none
    i32 num_chunks;
};
struct Chunk {
    i32 start;  // within the sequence
    i32 valid;  // 1 .. 32 tokens
};

KDA_DEVICE i64 load_index(const void* p, i64 i, bool wide) {
    return wide ? static_cast<const i64*>(p)[i] : static_cast<const i32*>(p)[i];
}

// Clamped to the tensor, so that no cu_seqlens, however wrong, makes a kernel leave its buffers.
KDA_DEVICE i64 sequence_start(const KdaArgs& args, int n) {
    if (!args.cu_seqlens) return static_cast<i64>(n) * args.T;
    const i64 start = load_index(args.cu_seqlens, n, args.flags & kCuSeqlens64);
    return min(max(start, 0ll), static_cast<i64>(args.T));
}

// The slot of sequence n's state, or -1: a slot that the pool does not have is neither read nor written.
KDA_DEVICE i64 state_slot(const KdaArgs& args, int n) {
    if (!args.state_indices) return n;
    const i64 slot = load_index(args.state_indices, n * args.state_indices_stride, args.flags & kStateIndices64);
    return slot >= 0 && slot < args.num_state_slots ? slot : -1;
}

// Asks for `rows` rows of sequence n's initial state from V's column `first` on, so that whoever loads them finds them in L2. By one warp; from
// sm_90 on.
KDA_DEVICE void prefetch_state(const KdaArgs& args, int n, int hv, int first, int rows) {
    if (!args.initial_state) return;
    const i64 slot = state_slot(args, n);
    if (slot < 0 || (args.has_initial_state && !args.has_initial_state[n])) return;
    const int bytes = args.flags & kInitialBf16 ? 2 : 4;
    const i64 element = slot * args.initial_slot + (static_cast<i64>(hv) * kHeadDim + first) * kHeadDim;
    if (elect_one()) bulk_prefetch(static_cast<const u8*>(args.initial_state) + element * bytes, rows * kHeadDim * bytes);
}

KDA_DEVICE Sequence load_sequence(const KdaArgs& args, int n) {
    Sequence s;
    const i64 begin = sequence_start(args, n);
    s.length = max(static_cast<i32>(sequence_start(args, n + 1) - begin), 0);
    s.first = args.cu_seqlens ? begin : 0;
    s.batch = args.cu_seqlens ? 0 : n;
    s.checkpoint = 0;
    if (args.checkpoint_state) {
        const i64 m = load_index(args.checkpoint_offsets, n, args.flags & kOffsets64);
        if (m > 0 && m <= s.length && m % kBlock == 0) s.checkpoint = static_cast<i32>(m);
    }
    // A checkpoint ends a chunk, so that its state is that of the sequence cut there, to the bit.
    s.num_chunks = (s.checkpoint + kChunk - 1) / kChunk + (s.length - s.checkpoint + kChunk - 1) / kChunk;
    return s;
}

KDA_DEVICE Chunk chunk_of(const Sequence& s, int c) {
    const int before = (s.checkpoint + kChunk - 1) / kChunk;
    Chunk chunk;
    if (c < before) {
        chunk.start = c * kChunk;
        chunk.valid = min(kChunk, s.checkpoint - chunk.start);
    } else {
        chunk.start = s.checkpoint + (c - before) * kChunk;
        chunk.valid = min(kChunk, s.length - chunk.start);
    }
    return chunk;
}

// `start`: sequence_start(args, n).
KDA_DEVICE i64 slot_base(const KdaArgs& args, int n, i64 start) {
    return start / kChunk + static_cast<i64>(n) * (args.checkpoint_state ? 2 : 1);
}
KDA_DEVICE i64 slot_base(const KdaArgs& args, int n) { return slot_base(args, n, sequence_start(args, n)); }

// The last n with slot_base(n) + n * more <= slot, by the whole warp: 32 probes a round, three rounds for 20,000 sequences.
KDA_DEVICE int sequence_of_slot(const KdaArgs& args, i64 slot, i64 more = 0) {
    int low = 0, high = args.N;  // the answer is in [low, high)
    const int lane = threadIdx.x & 31;
    while (high - low > 1) {
        const int step = (high - low + 31) / 32;
        const int n = low + lane * step;
        const bool reached = n < high && slot_base(args, n) + n * more <= slot;
        const int count = __popc(__ballot_sync(0xffffffffu, reached));  // 0 where the first sequence does not start at 0
        low += max(count - 1, 0) * step;
        high = min(high, low + step);
    }
    return low;
}
