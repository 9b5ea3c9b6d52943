// Warp-level tensor-core instructions of sm_80 and later, and the loads that feed them.
//
// Fragments of mma.m16n8k16, lane = 4 * gid + tid (gid 0..7, tid 0..3):
//   A[16 x 16]  a0 (gid, 2 tid)  a1 (gid + 8, 2 tid)  a2 (gid, 2 tid + 8)  a3 (gid + 8, 2 tid + 8)
//   B[16 x 8]   b0 (2 tid, gid)  b1 (2 tid + 8, gid)         pairs run along the 16
//   C[16 x 8]   c0 c1 (gid, 2 tid)   c2 c3 (gid + 8, 2 tid)
// so two neighbouring C tiles, packed to 16 bits, are an A fragment, and B is A read as tokens x channels.
#pragma once
#include "common/types.cuh"

KDA_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KDA_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a b, m16n8k8 on bf16: a0 (gid, 2 tid) a1 (gid + 8, 2 tid), b (2 tid, gid), pairs along the 8. If b is a multiple of the identity, d is
// that multiple of a in fp32.
KDA_DEVICE void mma_bf16_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

// m16n8k8 on fp32 words, of which the tensor core reads the upper 19 bits (truncation: relative error up to 2^-10, 0.7 * 2^-11
// on average). A: a0 (gid, tid) a1 (gid + 8, tid) a2 (gid, tid + 4) a3 (gid + 8, tid + 4); B: b0 (tid, gid) b1 (tid + 4, gid).
KDA_DEVICE void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
KDA_DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Four 8x8 tiles of 16-bit elements; lane i gives the row address of tile i / 8, row i % 8.
KDA_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
KDA_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
// The other way: lane i gives the row address of tile i / 8, row i % 8. An instruction from sm_90 on.
KDA_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
#else
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 row = __shfl_sync(0xffffffffu, address, 8 * i + (lane >> 2));
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + 4 * (lane & 3)), "r"(r[i]) : "memory");
    }
#endif
}
// Transposes one 8x8 tile held across the warp.
KDA_DEVICE u32 movmatrix_trans(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

KDA_DEVICE void cp_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Copies 16 bytes, or writes 16 zero bytes where `live` is false (nothing is read then).
KDA_DEVICE void cp_async_16_or_zero(u32 shared, const void* global, bool live) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(live ? 16 : 0)
                 : "memory");
}
KDA_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
KDA_DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

KDA_DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Largest magnitude of each half of two packed values; a NaN loses against a number.
KDA_DEVICE u32 max_abs_f16x2(u32 m, u32 x) {
    u32 r;
    asm("{.reg .b32 t; abs.f16x2 t, %2; max.f16x2 %0, %1, t;}" : "=r"(r) : "r"(m), "r"(x));
    return r;
}
KDA_DEVICE u32 max_abs_bf16x2(u32 m, u32 x) {
    u32 r;
    asm("{.reg .b32 t; abs.bf16x2 t, %2; max.bf16x2 %0, %1, t;}" : "=r"(r) : "r"(m), "r"(x));
    return r;
}
KDA_DEVICE float f16_lo(u32 pair) {
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(r) : "r"(pair));
    return r;
}
KDA_DEVICE float f16_hi(u32 pair) {
    float r;
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(r) : "r"(pair));
    return r;
}
// Largest of 32 non-negative floats: their bits order like the numbers.
KDA_DEVICE float warp_max_positive(float x) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(__float_as_uint(x)));
    return __uint_as_float(r);
}

// Programmatic dependent launch; no-ops before sm_90.
KDA_DEVICE void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
KDA_DEVICE void grid_wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
