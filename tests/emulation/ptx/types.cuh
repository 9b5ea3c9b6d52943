// PTX of common/types.cuh, for the emulated GPU.
#pragma once
#include "simt/formats.hpp"

KDA_DEVICE u32 pack_bf16(float lo, float hi) { return simt::float_to_bf16(lo) | static_cast<u32>(simt::float_to_bf16(hi)) << 16; }
KDA_DEVICE u32 pack_f16(float lo, float hi) { return simt::float_to_f16(lo) | static_cast<u32>(simt::float_to_f16(hi)) << 16; }
KDA_DEVICE u16 load_half_streaming(const void* p) { return *static_cast<const u16*>(p); }
KDA_DEVICE u32 opaque(u32 x) { return x; }
KDA_DEVICE Quad32 load_shared_quad(u32 shared) { return *static_cast<const Quad32*>(simt::shared_pointer(shared, 16)); }
KDA_DEVICE void load_shared_pair(u32 shared, float& x, float& y) {
    const auto* p = static_cast<const float*>(simt::shared_pointer(shared, 8));
    x = p[0], y = p[1];
}
KDA_DEVICE void load_shared_pair(u32 shared, float& x, i32& y) {
    const auto* p = static_cast<const float*>(simt::shared_pointer(shared, 8));
    x = p[0], y = __float_as_int(p[1]);
}
KDA_DEVICE void load_shared_pairs(u32 shared, float (&x)[2], float (&y)[2]) {
    const auto* p = static_cast<const float*>(simt::shared_pointer(shared, 16));
    x[0] = p[0], x[1] = p[1], y[0] = p[2], y[1] = p[3];
}
KDA_DEVICE void prefetch_line(const void*) {}
KDA_DEVICE void store_global_quad(void* p, Quad32 v) { *static_cast<Quad32*>(p) = v; }
