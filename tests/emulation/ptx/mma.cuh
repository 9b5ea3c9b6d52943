// PTX of common/mma.cuh, for the emulated GPU.
#pragma once
#include "simt/formats.hpp"

KDA_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    simt::mma(simt::Format::kF16, c, a, b);
}
KDA_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    simt::mma(simt::Format::kBf16, c, a, b);
}
KDA_DEVICE void mma_bf16_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    for (float& x : d) x = 0.0f;
    mma_bf16(d, {a0, a1, 0, 0}, b, 0);
}
KDA_DEVICE void mma_tf32(float (&c)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    const u32 a[4] = {__float_as_uint(a0), __float_as_uint(a1), __float_as_uint(a2), __float_as_uint(a3)};
    const u32 b[2] = {__float_as_uint(b0), __float_as_uint(b1)};
    simt::mma(simt::Format::kTf32, c, a, b);
}
KDA_DEVICE float f16_lo(u32 pair) { return simt::f16_to_float(static_cast<u16>(pair)); }
KDA_DEVICE float f16_hi(u32 pair) { return simt::f16_to_float(static_cast<u16>(pair >> 16)); }
KDA_DEVICE u32 mul_f16x2(u32 a, u32 b) {  // a product of two f16 is exact in fp32
    return pack_f16(f16_lo(a) * f16_lo(b), f16_hi(a) * f16_hi(b));
}

KDA_DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) { simt::load_matrices(r, address, false); }
KDA_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { simt::load_matrices(r, address, true); }
KDA_DEVICE void stmatrix_x4(u32 address, const u32 (&r)[4]) { simt::store_matrices(address, r, false); }
KDA_DEVICE u32 movmatrix_trans(u32 x) { return simt::transpose_matrix(x); }

KDA_DEVICE void cp_async_16(u32 shared, const void* global) { simt::copy_async(shared, global, true); }
KDA_DEVICE void cp_async_16_or_zero(u32 shared, const void* global, bool live) { simt::copy_async(shared, global, live); }
KDA_DEVICE void cp_async_commit() { simt::copy_async_commit(); }
template <int kPending>
KDA_DEVICE void cp_async_wait() {
    simt::copy_async_wait(kPending);
}
KDA_DEVICE void cp_async_wait_all() { simt::copy_async_wait(-1); }

KDA_DEVICE u32 max_abs_f16x2(u32 m, u32 x) { return simt::larger_magnitudes(m, x, 0x7c00); }
KDA_DEVICE u32 max_abs_bf16x2(u32 m, u32 x) { return simt::larger_magnitudes(m, x, 0x7f80); }
KDA_DEVICE float warp_max_positive(float x) { return __uint_as_float(simt::reduce_max(__float_as_uint(x))); }

// No-ops before sm_90.
KDA_DEVICE void grid_launch_dependents() {
    if (__CUDA_ARCH__ >= 900) simt::launch_dependents();
}
KDA_DEVICE void grid_wait_for_prerequisites() {
    if (__CUDA_ARCH__ >= 900) simt::wait_for_prerequisites();
}
