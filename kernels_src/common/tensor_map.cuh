// Tiles of tensors in global memory, copied from and to shared memory by one thread (sm_90 and later).
#pragma once
#include "common/barrier.cuh"

// CUtensorMap, made on the host (kda_jit/jit/tensor_map.py). A kernel takes it inside a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u8 opaque[128];
};

KDA_DEVICE void prefetch_tensor_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// The tile at (channel of all heads, token, row); its bytes count towards the mbarrier's phase.
KDA_DEVICE void tensor_copy(u32 shared, const TensorMap& map, int channel, int token, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
        "l"(&map), "r"(channel), "r"(token), "r"(row), "r"(barrier)
        : "memory");
}
// The way back. Joins the thread's current group, as bulk_store does (common/barrier.cuh).
KDA_DEVICE void tensor_store(u32 shared, const TensorMap& map, int channel, int token, int row) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(channel), "r"(token),
                 "r"(row), "r"(shared)
                 : "memory");
}
