// KDA prefill for sm_90a: the prepare kernel of all GPUs, and the recurrence with wgmma. Bounded gate, K = V = 128, bf16.
//
//   S' = diag(exp g_t) S      S = S' + beta_t k_t (v_t - S'^T k_t)^T      o_t = scale S^T q_t
//
// in      KdaArgs (common/kda_args.cuh): q k v g beta in place, token-strided; state fp32 or bf16, [slots, HV, V, K]
// out     out bf16; final_state; checkpoint_state
// launch  kda_prepare            common/prepare_kernel.cuh
//         kda_recurrence         grid N * HV, 384 threads, sizeof(RecurrenceSmem); after kda_prepare, on the same stream. Or:
//         kda_recurrence_single  grid N * HV * 2, 192 threads, sizeof(RecurrenceSmem), likewise
// roles   recurrence: a warpgroup that computes and a warp that moves V and O for each 64 of V's columns; a warp for the images
// format  stage images in f16 (common/stage.cuh), scores of 16 tokens in tf32, state and gates in fp32
#include "common/prepare_kernel.cuh"
#include "sm90/chain.cuh"

constexpr int kStages = 6;
using RecurrenceSmem = ChainSmem<kStages>;
static_assert(sizeof(RecurrenceSmem) == 216064, "keep kda_jit/backends/cuda.py in step");

// `place`: of the chain among those of the CTA.
KDA_DEVICE void compute(const KdaArgs& args, const ChainUnit& unit, RecurrenceSmem& smem, int place) {
    ChainStages<kStages> stages(smem, place);
    compute_chain(args, unit, WholeSequence{}, stages);
}
KDA_DEVICE void move(const KdaArgs& args, const ChainUnit& unit, RecurrenceSmem& smem, int place) {
    ChainStages<kStages> stages(smem, place);
    move_columns(args, unit, stages);
}
KDA_DEVICE void move_images(const KdaArgs& args, const ChainUnit& unit, RecurrenceSmem& smem) {
    ChainStages<kStages> stages(smem, 0);
    const i64 pitch = static_cast<i64>(args.HV) * kStageBytes;
    const WorkspaceSource source{args.workspace + slot_base(args, unit.n) * pitch + unit.hv * kStageBytes, pitch};
    move_images(args, unit, source, stages);
}

// A head a CTA: both halves of V on the same images.
extern "C" __global__ void __launch_bounds__(384, 1) kda_recurrence(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    RecurrenceSmem& smem = *reinterpret_cast<RecurrenceSmem*>(dynamic_smem);
    if (threadIdx.x == 0) init_chains(smem, 2);
    __syncthreads();
    const int n = blockIdx.x / args.HV, hv = blockIdx.x % args.HV, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < 8) {  // 2 x 128 x 208 + 128 x 88 registers, of 384 x 168
        raise_registers<208>();
        const int place = __shfl_sync(0xffffffffu, threadIdx.x / kChainThreads, 0);
        compute(args, ChainUnit{n, hv, place}, smem, place);
    } else {
        lower_registers<88>();
        if (warp < 10)
            move(args, ChainUnit{n, hv, warp - 8}, smem, warp - 8);
        else if (warp == 10)
            move_images(args, ChainUnit{n, hv, 0}, smem);
    }
}
// Half a head a CTA, for so few that there are SMs for all.
extern "C" __global__ void __launch_bounds__(kChainThreads + 64, 1) kda_recurrence_single(const __grid_constant__ KdaArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    RecurrenceSmem& smem = *reinterpret_cast<RecurrenceSmem*>(dynamic_smem);
    if (threadIdx.x == 0) init_chains(smem, 1);
    __syncthreads();
    const int head = blockIdx.x >> 1;
    const ChainUnit unit{head / args.HV, head % args.HV, static_cast<int>(blockIdx.x & 1)};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp < kChainThreads / 32)
        compute(args, unit, smem, 0);
    else if (warp == kChainThreads / 32)
        move(args, unit, smem, 0);
    else
        move_images(args, unit, smem);
}
