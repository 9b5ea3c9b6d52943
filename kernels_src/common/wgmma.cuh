// Warpgroup matrix instructions of sm_90a: D [64 x N] += A [64 x 16] B [16 x N], A from registers, B from shared memory.
//
// Warp w of the warpgroup holds rows 16 w .. 16 w + 15 of A and D, laid out as in mma.m16n8k16 (common/mma.cuh): D as C tiles
// d[N / 8][4], A as one A fragment. ptxas keeps several batches in flight only if it can follow them; when it cannot, it
// waits after each instruction and says so (C7510 .. C7517 in the log). What it needs:
//   * registers of a batch in flight are neither read nor written before its wait, and pin() follows that wait;
//   * accumulators of a later batch are not written while an earlier batch is in flight;
//   * what is in flight at the end of a loop's body is the same, in the same registers, when the loop begins.
#pragma once
#include "common/types.cuh"

KDA_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KDA_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
KDA_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving reads of an accumulator above the wait.
template <int kTiles>
KDA_DEVICE void pin(float (&d)[kTiles][4]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
}

// How B lies in shared memory, less its address. K-major: rows of B^T, 16 elements of each a step. MN-major: rows of B.
struct OperandLayout {
    u32 low, high;
};
constexpr OperandLayout operand_layout(u32 leading_bytes, u32 stride_bytes, u32 swizzle) {
    return {leading_bytes >> 4 << 16, stride_bytes >> 4 | swizzle << 30};
}
constexpr u32 kSwizzle128 = 1, kSwizzle64 = 2;
// Stride: between groups of 8 rows. Leading: between tiles of 64 columns (MN-major only; else ignored).
constexpr OperandLayout kRowsOf128Bytes = operand_layout(16, 8 * 128, kSwizzle128);
constexpr OperandLayout kRowsOf64Bytes = operand_layout(16, 8 * 64, kSwizzle64);

// A shared address in units of 16 bytes, as descriptors have it: within the CTA. In a cluster its upper byte is the CTA's rank.
KDA_DEVICE u32 operand_address(u32 shared) { return (shared & 0x3ffffu) >> 4; }
// `address`: of the operand, from operand_address.
KDA_DEVICE u64 operand(OperandLayout layout, u32 address) {
    return static_cast<u64>(layout.high) << 32 | (layout.low + address);
}

// (c d) = (kAccumulate ? (c d) : 0) + a b, B K-major [16 x 64]: its first 32 columns give c, the others d.
template <bool kAccumulate>
KDA_DEVICE void wgmma_n64(float (&c)[4][4], float (&d)[4][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "{\n"
        ".reg .pred accumulate;\n"
        "setp.ne.b32 accumulate, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, "
        "accumulate, 1, 1, 0;\n"
        "}"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),
          "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]),
          "+f"(c[3][2]), "+f"(c[3][3]), "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]),
          "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAccumulate ? 1 : 0));
}
// d += a b, B MN-major.
KDA_DEVICE void wgmma_n128_rows(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
          "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]),
          "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
          "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]),
          "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
          "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Stores four 8x8 tiles of 16-bit elements transposed; lane i gives the address of row i % 8 of tile i / 8.
KDA_DEVICE void stmatrix_x4_trans(u32 address, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}
