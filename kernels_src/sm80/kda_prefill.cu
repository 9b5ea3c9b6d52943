// KDA prefill, portable: two kernels for sm_80 and later (mma.sync, cp.async), bounded gate, K = V = 128, bf16.
//
//   S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t
//
// in      KdaArgs (common/kda_args.cuh): q k v g beta in place, token-strided; state fp32 or bf16, [slots, HV, V, K]
// out     out bf16; final_state; checkpoint_state
// launch  kda_prepare     common/prepare_kernel.cuh
//         kda_recurrence  grid N * HV * 2, 128 threads, sizeof(RecurrenceSmem); after kda_prepare, on the same stream
// roles   recurrence: a warp for each 16 of V's columns, 64 a CTA
// format  stage images in f16 (common/stage.cuh), scores of 16 tokens in tf32, state and gates in fp32
#include "common/kda_args.cuh"
#include "common/prepare_kernel.cuh"
#include "common/recurrence.cuh"
#include "common/sequence.cuh"

constexpr int kWarps = 4;
constexpr int kVColumns = kWarps * kVRows;  // a CTA
constexpr int kStages = 3;
constexpr int kVTile = kHalfTile;           // 32 tokens x 64 columns

struct RecurrenceSmem {
    alignas(128) u8 image[kStages][kStageBytes];
    alignas(128) u8 v[kStages][kVTile];
    alignas(128) u32 out[kWarps][kChunk][kVRows / 2];  // bf16 pairs, staged so that global stores fill sectors
};

static_assert(sizeof(RecurrenceSmem) == 98176, "keep kda_jit/backends/cuda.py in step");

extern "C" __global__ void __launch_bounds__(128, 2) kda_recurrence(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(128) u8 dynamic_smem[];
    RecurrenceSmem& smem = *reinterpret_cast<RecurrenceSmem*>(dynamic_smem);
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31, gid = lane >> 2, tid = lane & 3;
    const int half = blockIdx.x & 1;
    const int hv = (blockIdx.x >> 1) % args.HV;
    const int n = (blockIdx.x >> 1) / args.HV;
    const Sequence seq = load_sequence(args, n);
    const i64 first_slot = slot_base(args, n);

    const i64 slot = state_slot(args, n);
    const bool has_initial = args.initial_state && slot >= 0 && (!args.has_initial_state || args.has_initial_state[n]);
    const i64 head = (static_cast<i64>(hv) * kHeadDim + half * kVColumns + warp * kVRows) * kHeadDim;
    StateTile state;
    if (has_initial) {
        load_state(state, args.initial_state, slot * args.initial_slot + head, args.flags & kInitialBf16);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) state.s[i][e] = 0.0f;
        }
        state.exponent = 0;
    }

    const u16* v = args.v + seq.batch * args.v_batch + seq.first * args.v_token + hv * kHeadDim + half * kVColumns;
    u16* out = args.out + seq.batch * args.out_batch + seq.first * args.out_token + hv * kHeadDim + half * kVColumns;

    grid_wait_for_prerequisites();  // the stage images

    auto fetch = [&](int c) {
        if (c < seq.num_chunks) {
            const int stage = c % kStages;
            const u8* image = args.workspace + ((first_slot + c) * args.HV + hv) * kStageBytes;
            const u32 to = shared_address(smem.image[stage]);
            for (int at = threadIdx.x * 16; at < kStageBytes; at += 128 * 16) cp_async_16(to + at, image + at);
            const Chunk chunk = chunk_of(seq, c);
            const u32 v_to = shared_address(smem.v[stage]);
#pragma unroll
            for (int i = 0; i < kVTile / 16 / 128; ++i) {
                const int row = threadIdx.x / 8 + 16 * i, piece = threadIdx.x % 8;
                const bool live = row < chunk.valid;
                const u16* from = v + (chunk.start + (live ? row : 0)) * args.v_token + 8 * piece;
                cp_async_16_or_zero(v_to + tile_offset(row, piece), from, live);
            }
        }
        cp_async_commit();  // empty groups keep the count
    };
#pragma unroll
    for (int c = 0; c + 1 < kStages; ++c) fetch(c);

    for (int c = 0; c < seq.num_chunks; ++c) {
        cp_async_wait<kStages - 2>();
        __syncthreads();  // chunk c is here for all, and all are done with chunk c - 1, whose stage is filled next
        fetch(c + kStages - 1);

        const int stage = c % kStages;
        const Chunk chunk = chunk_of(seq, c);
        float o[4][4];
        const int exponent = advance_chunk(state, shared_address(smem.image[stage]), shared_address(smem.v[stage]), warp * kVRows, o);

        // O^T to token rows: transpose 8 x 8 tiles, stage, store 16 bytes a lane.
        const float scale = args.scale * (1.0f / kQueryScale) * exp2_int(exponent);
#pragma unroll
        for (int nt = 0; nt < 4; ++nt) {
            smem.out[warp][8 * nt + gid][tid] = movmatrix_trans(pack_bf16(o[nt][0] * scale, o[nt][1] * scale));
            smem.out[warp][8 * nt + gid][4 + tid] = movmatrix_trans(pack_bf16(o[nt][2] * scale, o[nt][3] * scale));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = lane / 2 + 16 * i, piece = lane % 2;
            if (row < chunk.valid)
                store_quad(out + (chunk.start + row) * args.out_token + warp * kVRows + 8 * piece,
                           load_quad(&smem.out[warp][row][4 * piece]));
        }
        __syncwarp();  // before the next chunk's staging

        if (chunk.start + chunk.valid == seq.checkpoint)
            store_state(state, args.checkpoint_state, n * args.checkpoint_slot + head, args.flags & kCheckpointBf16);
    }
    if (slot >= 0) store_state(state, args.final_state, slot * args.final_slot + head, args.flags & kFinalBf16);
}
