// Number formats of the tensor cores and of PTX's conversions.
#pragma once

#include "device.hpp"

namespace simt {

inline float bits_float(u32 x) { return simt_bits<float>(x); }
inline u32 float_bits(float x) { return simt_bits<u32>(x); }

inline float f16_to_float(u16 x) { return static_cast<float>(simt_bits<_Float16>(x)); }
inline float bf16_to_float(u16 x) { return bits_float(static_cast<u32>(x) << 16); }
inline float tf32(u32 x) { return bits_float(x & 0xffffe000u); }  // of a word its upper 19 bits are read

// cvt.rn: to nearest even; beyond the largest number, infinity.
inline u16 float_to_f16(float x) { return x != x ? 0x7fff : simt_bits<u16>(static_cast<_Float16>(x)); }
inline u16 float_to_bf16(float x) {
    if (x != x) return 0x7fff;
    const u32 bits = float_bits(x);
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }  // .ftz

// The larger of m and |x|, 16-bit floats: bit patterns of magnitudes order like the numbers, and a NaN loses.
inline u16 larger_magnitude(u16 m, u16 x, u16 infinity) {
    m &= 0x7fff, x &= 0x7fff;
    if (m > infinity) return x > infinity ? 0x7fff : x;
    return x > infinity || x < m ? m : x;
}
// max.f16x2 or max.bf16x2 of m and |x|.
inline u32 larger_magnitudes(u32 m, u32 x, u16 infinity) {
    const u16 lo = larger_magnitude(static_cast<u16>(m), static_cast<u16>(x), infinity);
    const u16 hi = larger_magnitude(static_cast<u16>(m >> 16), static_cast<u16>(x >> 16), infinity);
    return lo | static_cast<u32>(hi) << 16;
}

}  // namespace simt
