// KDA prefill for sm_90a: the prepare kernel of all GPUs, and the recurrence with wgmma. Bounded gate, K = V = 128, bf16.
//
//   S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t
//
// in      KdaArgs (common/kda_args.cuh): q k v g beta in place, token-strided; state fp32 or bf16, [slots, HV, V, K]
// out     out bf16; final_state; checkpoint_state
// launch  kda_prepare     common/prepare_kernel.cuh
//         kda_recurrence, or kda_recurrence_single  grid N * HV * 2, 160 threads, sizeof(RecurrenceSmem) or (SingleSmem);
//                         after kda_prepare, on the same stream
// roles   recurrence: a warpgroup and a warp for each 64 of V's columns
// format  stage images in f16 (common/stage.cuh), scores of 16 tokens in tf32, state and gates in fp32
#include "common/prepare_kernel.cuh"
#include "sm90/chain.cuh"

template <int kStages>
KDA_DEVICE void recurrence(const KdaArgs& args, ChainSmem<kStages>& smem) {
    const int head = blockIdx.x >> 1;
    const ChainUnit unit{head / args.HV, head % args.HV, static_cast<int>(blockIdx.x & 1), 0};
    if (threadIdx.x == 0) init_chains(smem, 1);
    __syncthreads();
    ChainRing<kStages> ring;
    if (__shfl_sync(0xffffffffu, threadIdx.x / kChainThreads, 0) == 0) {
        compute_chain(args, unit, smem, ring);
    } else {
        const i64 pitch = static_cast<i64>(args.HV) * kStageBytes;
        const WorkspaceSource source{args.workspace + slot_base(args, unit.n) * pitch + unit.hv * kStageBytes, pitch};
        move_chain(args, unit, source, smem, ring);
    }
}

using RecurrenceSmem = ChainSmem<3>;
using SingleSmem = ChainSmem<6>;
static_assert(sizeof(RecurrenceSmem) == 108544 && sizeof(SingleSmem) == 216064, "keep kda_jit/backends/cuda.py in step");

// One chain a CTA, two CTAs an SM: they hide each other's latency.
extern "C" __global__ void __launch_bounds__(kChainThreads + 32, 2) kda_recurrence(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    recurrence(args, *reinterpret_cast<RecurrenceSmem*>(dynamic_smem));
}
// One CTA an SM, for so few chains that most have an SM to themselves: more stages hide the way from memory.
extern "C" __global__ void __launch_bounds__(kChainThreads + 32, 1) kda_recurrence_single(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    recurrence(args, *reinterpret_cast<SingleSmem*>(dynamic_smem));
}
