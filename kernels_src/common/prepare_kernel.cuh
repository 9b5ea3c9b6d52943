// kda_prepare: the prepare step as a kernel of its own, a CTA for each chunk of each value head. Every image has its own place in
// the workspace, so that nobody waits for anybody.
//
// launch  grid chunk slots * HV, 128 threads, sizeof(PrepareSmem)
#pragma once
#include "common/prepare.cuh"

struct PrepareSmem {
    alignas(128) u8 image[kStageBytes];
    PrepareScratch scratch;
};
static_assert(sizeof(PrepareSmem) == 32640, "keep kda_jit/backends/cuda.py in step");

// Heads of sequences whose initial states are asked for in L2, where the recurrence will look for them: 16 MiB, which stay there until it does.
constexpr int kPrefetchedStates = 256;

// Six CTAs an SM fill its shared memory. Each warp finds the chunk for itself: a barrier costs more than the instructions.
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 6) kda_prepare(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    PrepareSmem& smem = *reinterpret_cast<PrepareSmem*>(dynamic_smem);
    grid_launch_dependents();

    const u32 slot = blockIdx.x / args.HV, hv = blockIdx.x % args.HV;
    const int n = sequence_of_slot(args, slot);
    const Sequence seq = load_sequence(args, n);
    const int c = static_cast<int>(slot - slot_base(args, n, seq.batch * args.T + seq.first));
    if (c >= seq.num_chunks) return;
    const Chunk chunk = chunk_of(seq, c);
    const ChunkInputs in = locate_inputs(args, seq.batch, seq.first + chunk.start, chunk.valid, hv);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // uniform, for the compiler too
    const Quarter part{warp % 2, warp / 2};
    fetch_quarter(smem.image, in, part);
    finish_quarter(args, in, hv, smem.image, part);
#if __CUDA_ARCH__ >= 900
    // Not before the inputs have come: of many heads of short sequences, states are as many bytes.
    if (c == 0 && warp == 1 && args.N * args.HV <= kPrefetchedStates) prefetch_state(args, n, hv, 0, kHeadDim);
#endif
    const PrepareBarriers barriers{1};
    barriers.all();
    prepare_chunk(args.lower_bound, smem.image, smem.scratch, part, barriers, [] {}, [] {});
    __syncthreads();

    u8* image = args.workspace + static_cast<i64>(blockIdx.x) * kStageBytes;
#if __CUDA_ARCH__ >= 900
    if (warp == 0 && elect_one()) {
        bulk_store(image, shared_address(smem.image), kStageBytes);
        bulk_store_commit();
        bulk_store_wait<0>();  // the CTA's shared memory lives no longer than the CTA
    }
#else
    for (int at = 16 * threadIdx.x; at < kStageBytes; at += 16 * kPrepareThreads) store_quad(image + at, load_quad(smem.image + at));
#endif
}
