// Kernels that ask the emulated machine one thing each; tests/emulation/test_machine.py knows the answers.
#include "common/barrier.cuh"
#include "common/cluster.cuh"
#include "common/kda_args.cuh"
#include "common/mma.cuh"
#include "common/numerics.cuh"
#include "common/stage.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"

struct Args {
    const void* in;
    void* out;
    u32* flags;
    i64 number;
};
struct MapArgs {
    Args args;
    u64 reserved[4];
    TensorMap map;
};

KDA_DEVICE const float* floats_of(const Args& args) { return static_cast<const float*>(args.in); }
KDA_DEVICE u32* words_of(const Args& args) { return static_cast<u32*>(args.out); }

// Pairs of floats to f16 and bf16 and back, `number` of them.
extern "C" __global__ void convert(const __grid_constant__ Args args) {
    for (i64 i = threadIdx.x; i < args.number; i += blockDim.x) {
        const float lo = floats_of(args)[2 * i], hi = floats_of(args)[2 * i + 1];
        words_of(args)[2 * i] = pack_f16(lo, hi);
        words_of(args)[2 * i + 1] = pack_bf16(lo, hi);
    }
}
extern "C" __global__ void approximate(const __grid_constant__ Args args) {
    for (i64 i = threadIdx.x; i < args.number; i += blockDim.x) {
        const float x = floats_of(args)[i];
        float* to = static_cast<float*>(args.out) + 3 * i;
        to[0] = exp2_approx(x), to[1] = reciprocal_approx(x), to[2] = rsqrt_approx(x);
    }
}
// The larger of |x| and |y|, half by half, of two words.
extern "C" __global__ void largest(const __grid_constant__ Args args) {
    const u32* words = static_cast<const u32*>(args.in);
    for (i64 i = threadIdx.x; i < args.number; i += blockDim.x) {
        words_of(args)[2 * i] = max_abs_f16x2(words[2 * i] & 0x7fff7fffu, words[2 * i + 1]);
        words_of(args)[2 * i + 1] = max_abs_bf16x2(words[2 * i] & 0x7fff7fffu, words[2 * i + 1]);
    }
}

// C [16 x 8] += A [16 x 16] B [16 x 8] with A and B^T in f16, row by row, by ldmatrix; then with words of A and B^T as tf32.
extern "C" __global__ void multiply(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    const int lane = threadIdx.x, gid = lane >> 2, tid = lane & 3;
    const u16* from = static_cast<const u16*>(args.in);
    u16* a_tile = reinterpret_cast<u16*>(dynamic_smem);
    u16* b_tile = a_tile + 16 * 16;
    for (int i = lane; i < 16 * 24; i += 32) a_tile[i] = from[i];
    __syncwarp();
    u32 a[4], b[4];
    ldmatrix_x4(a, shared_address(a_tile + 16 * (lane % 16) + 8 * (lane / 16)));
    ldmatrix_x4(b, shared_address(b_tile + 16 * (lane % 8) + 8 * (lane / 8 % 2)));
    float c[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    mma_f16(c, a, b[0], b[1]);
    float* to = static_cast<float*>(args.out);
    for (int e = 0; e < 4; ++e) to[8 * (gid + 8 * (e / 2)) + 2 * tid + e % 2] = c[e];

    const float* words = reinterpret_cast<const float*>(from + 16 * 24);
    const float *x = words, *y = words + 16 * 8;  // [16 x 8], [8 x 8]
    float d[4] = {};
    mma_tf32(d, x[8 * gid + tid], x[8 * (gid + 8) + tid], x[8 * gid + tid + 4], x[8 * (gid + 8) + tid + 4], y[8 * gid + tid], y[8 * gid + tid + 4]);
    for (int e = 0; e < 4; ++e) to[16 * 8 + 8 * (gid + 8 * (e / 2)) + 2 * tid + e % 2] = d[e];
}

// D [64 x 64] = A B^T and D [64 x 128] = A B, for A [64 x 16], B^T [64 x 16] and B [16 x 128] in f16: operands as in a stage image.
// Where `number` is 1, the accumulators are read before the wait; where it is 2, A is written.
extern "C" __global__ void multiply_by_warpgroup(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread / 32, gid = lane >> 2, tid = lane & 3;
    const u16 *a_in = static_cast<const u16*>(args.in), *rows = a_in + 64 * 16, *columns = rows + 64 * 16;
    u8* wide = dynamic_smem + 64 * kRowBytes;
    for (int i = thread; i < 64 * 16; i += 128) {
        const int row = i / 16, k = i % 16;
        *reinterpret_cast<u16*>(dynamic_smem + row * kRowBytes + ((k / 8) ^ (row & 7)) * 16 + k % 8 * 2) = rows[i];
    }
    for (int i = thread; i < 16 * 128; i += 128) {
        const int row = i / 128, n = i % 128;
        *reinterpret_cast<u16*>(wide + tile_offset(row, n / 8) + n % 8 * 2) = columns[i];
    }
    u32 a[4];
    for (int i = 0; i < 4; ++i) a[i] = *reinterpret_cast<const u32*>(a_in + 16 * (16 * warp + gid + 8 * (i % 2)) + 2 * tid + 8 * (i / 2));
    async_proxy_fence();
    __syncthreads();
    float c[4][4], d[4][4], e[16][4] = {};
    wgmma_fence();
    wgmma_n64<false>(c, d, a, operand(kRowsOf128Bytes, operand_address(shared_address(dynamic_smem))));
    wgmma_n128_rows(e, a, operand(operand_layout(kHalfStride, 8 * kRowBytes, kSwizzle128), operand_address(shared_address(wide))));
    wgmma_commit();
    if (args.number == 0) wgmma_wait<0>();
    if (args.number == 2) a[3] ^= 1;
    float* to = static_cast<float*>(args.out);
    for (int n = 0; n < 24; ++n) {
        const float(&tile)[4] = n < 4 ? c[n] : n < 8 ? d[n - 4] : e[n - 8];
        for (int i = 0; i < 4; ++i) to[192 * (16 * warp + gid + 8 * (i / 2)) + 8 * n + 2 * tid + i % 2] = tile[i];
    }
    wgmma_wait<0>();
}

// 64 floats by cp.async, read before the wait where `number` is 1.
extern "C" __global__ void copy_by_lanes(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    if (threadIdx.x < 16) cp_async_16(shared_address(dynamic_smem + 16 * threadIdx.x), floats_of(args) + 4 * threadIdx.x);
    cp_async_commit();
    if (args.number == 0) cp_async_wait<0>();
    __syncwarp();
    for (int i = threadIdx.x; i < 64; i += 32) static_cast<float*>(args.out)[i] = reinterpret_cast<float*>(dynamic_smem)[i];
    __syncwarp();
    cp_async_wait<0>();
}

// 64 floats by a bulk copy and back again, through the peer of the cluster. `number` bytes are missing where they are waited for.
extern "C" __global__ void __cluster_dims__(2, 1, 1) copy_by_peers(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    const u32 rank = cluster_rank(), data = shared_address(dynamic_smem), barrier = data + 256;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
    }
    cluster_sync();
    if (rank == 0) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_bytes(barrier, 256);
            bulk_copy(data, args.in, 256, barrier);
        }
        mbarrier_wait(barrier, 0);
        if (threadIdx.x == 0) {
            peer_mbarrier_arrive_expect_bytes(peer_address(barrier, 1), 256 + static_cast<u32>(args.number));
            bulk_copy_to_peer(peer_address(data, 1), data, 256, peer_address(barrier, 1));
        }
    } else {
        mbarrier_wait(barrier, 0);
        if (threadIdx.x == 0) {
            bulk_store(args.out, data, 256);
            bulk_store_commit();
            bulk_store_wait<0>();
        }
    }
    __syncwarp();
    cluster_sync();
}

// The tile at channel 64, token `number`, row 0, as it lies in shared memory.
extern "C" __global__ void copy_tile(const __grid_constant__ MapArgs args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    const u32 barrier = shared_address(dynamic_smem) + kHalfTile;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_arrive_expect_bytes(barrier, kHalfTile);
        tensor_copy(shared_address(dynamic_smem), args.map, 64, static_cast<int>(args.args.number), 0, barrier);
    }
    __syncwarp();
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < kHalfTile / 16; i += 32) store_quad(static_cast<u8*>(args.args.out) + 16 * i, load_quad(dynamic_smem + 16 * i));
}

// The second CTA waits until a flag of 64 bits has the value that the first one gives it after a word in front of it.
extern "C" __global__ void hand_over(const __grid_constant__ Args args) {
    u64* flag = reinterpret_cast<u64*>(args.flags) + 1;
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            args.flags[0] = 7;
            store_release(flag, static_cast<u64>(args.number));
        }
    } else {
        while (load_acquire(flag) != static_cast<u64>(args.number)) {}
        words_of(args)[threadIdx.x] = args.flags[0];
    }
}

// What is wrong, by its number.
extern "C" __global__ void err(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) u8 dynamic_smem[];
    const u32 smem = shared_address(dynamic_smem);
    const int warp = threadIdx.x / 32;
    switch (args.number) {
    case 0: named_barrier(1 + warp, 64); break;                     // two warps at two barriers
    case 1: mbarrier_arrive(smem); break;                           // never initialised
    case 2: load_shared_quad(smem + 1024); break;                   // outside
    case 3: load_shared_quad(smem + 8); break;                      // not aligned
    case 4: words_of(args)[1ll << 44] = 0; break;                   // nowhere
    case 5: while (load_acquire(args.flags) == 0) {} break;         // nobody sets it
    case 6: bulk_store(args.out, smem, 64); break;                  // the CTA ends before it is read
    case 7: if (threadIdx.x == 0) __syncwarp(); break;              // the others are gone
    case 8: dynamic_smem[1024 + 1024] = 0; break;                   // past the end
    case 9: if (warp == 0) __syncwarp(); else __shfl_sync(1u, 0, 0); break;  // not all lanes
    case 10: for (;;) __syncwarp();                                 // forever
    default: break;
    }
}

// The first grid writes a word, the second one reads it after waiting, or before where `number` is 1.
extern "C" __global__ void write_late(const __grid_constant__ Args args) {
    grid_launch_dependents();
    for (int i = 0; i < 100; ++i) __syncwarp();
    if (threadIdx.x == 0) args.flags[0] = 7;
}
extern "C" __global__ void read_early(const __grid_constant__ Args args) {
    if (args.number == 0) grid_wait_for_prerequisites();
    if (threadIdx.x == 0) args.flags[1] = args.flags[0];
}
