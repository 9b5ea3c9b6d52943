// The one parameter of every KDA kernel. Mirrored by kda_jit/backends/cuda.py, which packs it by the same
// order; both sides check the size.
#pragma once
#include "common/types.cuh"

enum KdaFlags : u32 {
    kCuSeqlens64 = 1u << 0,    // cu_seqlens is int64
    kStateIndices64 = 1u << 1, // state_indices is int64
    kOffsets64 = 1u << 2,      // checkpoint_offsets is int64
    kInitialBf16 = 1u << 3,    // state dtypes; fp32 when clear
    kFinalBf16 = 1u << 4,
    kCheckpointBf16 = 1u << 5,
};

struct KdaArgs {
    const u16* q;      // bf16 [.., H, 128]
    const u16* k;      // bf16 [.., H, 128]
    const u16* v;      // bf16 [.., HV, 128]
    const u16* g;      // bf16 [.., HV, 128], raw gate logits
    const u16* beta;   // bf16 [.., HV], raw logits
    u16* out;          // bf16 [.., HV, 128]
    const float* A_log;    // [HV]
    const float* dt_bias;  // [HV, 128]
    const void* initial_state;     // [slots, HV, V, K] or null (zero)
    void* final_state;             // [slots, HV, V, K]
    void* checkpoint_state;        // [N, HV, V, K] or null
    const void* cu_seqlens;        // [N + 1], or null: N sequences of T tokens, one per batch row
    const void* state_indices;     // [N] slots (none where there is no such slot), or null: sequence n uses slot n
    const u8* has_initial_state;   // [N] bool, or null: all have
    const void* checkpoint_offsets;  // [N] tokens, 0: none
    u8* workspace;                 // stage images, one per (chunk slot, value head)
    i64 q_token, k_token, v_token, g_token, beta_token, out_token;  // strides in elements
    i64 q_batch, k_batch, v_batch, g_batch, beta_batch, out_batch;
    i64 initial_slot, final_slot, checkpoint_slot;  // strides in elements
    i64 state_indices_stride;
    i32 N, T, H, HV;
    float scale, lower_bound;
    u32 flags;
    u32 num_state_slots;  // that final_state holds (and initial_state, where they are one pool)
};
static_assert(sizeof(KdaArgs) == 16 * 8 + 16 * 8 + 8 * 4, "keep kda_jit/backends/cuda.py in step");
