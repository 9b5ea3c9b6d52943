// kda_prepare: the prepare step as a kernel of its own, a CTA for each chunk of each value head. Every image has its own place in
// the workspace, so that nobody waits for anybody.
//
// launch  grid chunk slots * HV, 128 threads, sizeof(PrepareSmem)
#pragma once
#include "common/prepare.cuh"

static_assert(sizeof(PrepareSmem) == 35968, "keep kda_jit/backends/cuda.py in step");

// Five CTAs an SM: at most 96 registers. Each warp finds the chunk for itself: a barrier costs more than the instructions.
extern "C" __global__ void __launch_bounds__(128, 5) kda_prepare(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    PrepareSmem& smem = *reinterpret_cast<PrepareSmem*>(dynamic_smem);
    grid_launch_dependents();

    const u32 slot = blockIdx.x / args.HV, hv = blockIdx.x % args.HV;
    const int n = sequence_of_slot(args, slot);
    const Sequence seq = load_sequence(args, n);
    const int c = static_cast<int>(slot - slot_base(args, n));
    if (c >= seq.num_chunks) return;
    const auto place = [&] { return args.workspace + static_cast<i64>(blockIdx.x) * kStageBytes; };
    const ChunkInputs in = locate_inputs(args, seq, chunk_of(seq, c), hv);
    const auto barrier = [] { __syncthreads(); };
    const auto nothing = [] {};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform, for the compiler too
    if (warp < 2)
        prepare_block<0>(args, in, hv, place, smem, barrier, nothing, nothing);
    else
        prepare_block<1>(args, in, hv, place, smem, barrier, nothing, nothing);
}
