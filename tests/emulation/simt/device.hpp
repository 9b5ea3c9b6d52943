// What device code sees of the emulated GPU: CUDA's built-in names, and the operations of the machine that ptx/*.cuh spells PTX with.
//
// A CUDA thread is a lane: a fiber that runs until it must wait for others. Everything here may switch to another lane.
#pragma once

#include <cmath>

namespace simt {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct Index {
    u32 x, y, z;
};
// Of the lane that runs.
struct LaneIndex {
    Index thread, block, block_size, grid_size;
};
extern LaneIndex* current;

// -- a CTA's shared memory ---------------------------------------------------------------------------------------------------------------
//
// A shared address is an offset into the CTA's memory, with the CTA's rank in a cluster in its upper byte, as on the hardware.

void* dynamic_shared();
void* static_shared(const void* key, u32 bytes, u32 alignment);  // the same place for all lanes of a CTA that give the same key
u32 shared_address(const void* p);
u32 shared_address_in(u32 address, u32 rank);
u32 cluster_rank();
u32 own(u32 address);  // an error where it is that of a peer
const void* shared_pointer(u32 address, u32 bytes);

// -- lanes of a warp together ------------------------------------------------------------------------------------------------------------

void whole_warp(u32 mask);  // an error where a mask leaves lanes out, which is not emulated
void sync_warp();
u32 shuffle(u32 value, int source);
u32 ballot(bool vote);
u32 reduce_or(u32 value);
u32 reduce_max(u32 value);
void load_matrices(u32 (&r)[4], u32 address, bool transposed);
void store_matrices(u32 address, const u32 (&r)[4], bool transposed);
u32 transpose_matrix(u32 x);

enum class Format { kF16, kBf16, kTf32 };
void mma(Format format, float (&c)[4], const u32* a, const u32* b);

// One warp's rows of a warpgroup's product. `d`: its accumulators, four at a time, which are NaN until the wait.
constexpr int kMaxTiles = 32;
void wgmma(float* const* d, int tiles, const u32 (&a)[4], u64 operand, bool rows_of_b, bool accumulate);
void wgmma_commit();
void wgmma_wait(int pending);

// -- barriers ----------------------------------------------------------------------------------------------------------------------------

void sync_threads(int barrier, int threads);  // 0 threads: all of the CTA
int sync_threads_count(bool vote);
void sync_cluster();

void mbarrier_init(u32 barrier, u32 arrivals);
void mbarrier_arrive(u32 barrier, u32 expected_bytes);
void mbarrier_expect(u32 barrier, u32 bytes);
void mbarrier_wait(u32 barrier, u32 parity);
bool mbarrier_test(u32 barrier, u32 parity);

// -- copies that land later --------------------------------------------------------------------------------------------------------------

void copy_async(u32 to, const void* from, bool live);  // 16 bytes
void copy_async_commit();
void copy_async_wait(int pending);  // below 0: for all, committed or not
void mbarrier_arrive_after_copies(u32 barrier);

void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier);
void bulk_copy_to_peer(u32 to, u32 from, u32 bytes, u32 barrier);
void bulk_store(void* to, u32 from, u32 bytes);
void bulk_store_commit();
void bulk_store_wait(int pending, bool only_read);
void tensor_copy(u32 to, const void* map, int channel, int token, int row, u32 barrier);
void tensor_store(u32 from, const void* map, int channel, int token, int row);

// -- global memory -----------------------------------------------------------------------------------------------------------------------

u32 poll(const u32* p);
u64 poll(const u64* p);
void publish(u32* p, u32 value);
void publish(u64* p, u64 value);
u32 atomic_add(u32* p, u32 value);

// -- grids -------------------------------------------------------------------------------------------------------------------------------

void launch_dependents();
void wait_for_prerequisites();

#define SIMT_EXPORT __attribute__((visibility("default")))

struct Entry {
    const char* name;
    void (*call)(const void* args);
    u32 args_bytes;
    u32 cluster_ctas;
};
template <typename Args>
constexpr Entry entry(const char* name, void (*)(Args), void (*call)(const void*), u32 cluster_ctas) {
    return {name, call, sizeof(Args), cluster_ctas};
}
constexpr Entry entry(const char* name, void (*)(), void (*call)(const void*), u32 cluster_ctas) { return {name, call, 0, cluster_ctas}; }
template <typename Args>
void call(void (*kernel)(Args), const void* args) {
    kernel(*static_cast<const Args*>(args));
}
inline void call(void (*kernel)(), const void*) { kernel(); }

}  // namespace simt

// -- CUDA's names ------------------------------------------------------------------------------------------------------------------------

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n)

#define threadIdx (::simt::current->thread)
#define blockIdx (::simt::current->block)
#define blockDim (::simt::current->block_size)
#define gridDim (::simt::current->grid_size)

#define SIMT_OVERLOADS(T)                                \
    inline T min(T a, T b) { return b < a ? b : a; }     \
    inline T max(T a, T b) { return a < b ? b : a; }
SIMT_OVERLOADS(int)
SIMT_OVERLOADS(unsigned int)
SIMT_OVERLOADS(long long)
SIMT_OVERLOADS(unsigned long long)
#undef SIMT_OVERLOADS

template <typename To, typename From>
inline To simt_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}
inline float __uint_as_float(unsigned int x) { return simt_bits<float>(x); }
inline float __int_as_float(int x) { return simt_bits<float>(x); }
inline unsigned int __float_as_uint(float x) { return simt_bits<unsigned int>(x); }
inline int __float_as_int(float x) { return simt_bits<int>(x); }
inline int __popc(unsigned int x) { return __builtin_popcount(x); }
inline int __ffs(unsigned int x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned long long __cvta_generic_to_shared(const void* p) { return simt::shared_address(p); }

inline void __syncwarp(unsigned int mask = 0xffffffffu) { simt::whole_warp(mask), simt::sync_warp(); }
template <typename T>
inline T __shfl_sync(unsigned int mask, T x, int source) {
    simt::whole_warp(mask);
    return simt_bits<T>(simt::shuffle(simt_bits<unsigned int>(x), source));
}
template <typename T>
inline T __shfl_xor_sync(unsigned int mask, T x, int lanes) {
    return __shfl_sync(mask, x, static_cast<int>(threadIdx.x & 31) ^ lanes);
}
inline unsigned int __ballot_sync(unsigned int mask, bool vote) { return simt::whole_warp(mask), simt::ballot(vote); }
inline int __any_sync(unsigned int mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned int mask, bool vote) { return __ballot_sync(mask, vote) == 0xffffffffu; }
template <typename T>
inline T __reduce_or_sync(unsigned int mask, T x) {
    simt::whole_warp(mask);
    return simt_bits<T>(simt::reduce_or(simt_bits<unsigned int>(x)));
}

inline void __syncthreads() { simt::sync_threads(0, 0); }
inline int __syncthreads_or(bool vote) { return simt::sync_threads_count(vote) != 0; }
inline int __syncthreads_and(bool vote) { return simt::sync_threads_count(!vote) == 0; }
inline void __threadfence() {}
inline unsigned int atomicAdd(unsigned int* p, unsigned int value) { return simt::atomic_add(p, value); }
