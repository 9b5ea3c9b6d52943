// Integers, 16-bit floats and vector accesses that NVRTC does not hand us. Header-free on purpose:
// a kernel that includes no toolkit header cannot be broken by a header of another release.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct alignas(16) Quad32 {
    u32 x, y, z, w;
};
struct alignas(16) Float4 {
    float x, y, z, w;
};
struct alignas(8) Float2 {
    float x, y;
};

#define KDA_DEVICE __device__ __forceinline__

// bf16 lives in the upper half of an fp32 word, so unpacking is a shift or a mask.
KDA_DEVICE float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
KDA_DEVICE float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
KDA_DEVICE float bf16_to_float(u16 x) { return __uint_as_float(static_cast<u32>(x) << 16); }

// Round to nearest even; `lo` lands in bits 0..15, which is the lower column of an MMA fragment.
KDA_DEVICE u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
KDA_DEVICE u32 pack_f16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

KDA_DEVICE Quad32 load_quad(const void* p) { return *static_cast<const Quad32*>(p); }
KDA_DEVICE void store_quad(void* p, Quad32 v) { *static_cast<Quad32*>(p) = v; }

// Volatile: a load must be issued where it stands, not where its value is needed. Read once: out of the workspace's way in L1.
KDA_DEVICE u16 load_half_streaming(const void* p) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// The same number, but the compiler cannot know: what follows from it is computed where it stands, not kept from earlier.
KDA_DEVICE u32 opaque(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

KDA_DEVICE Quad32 load_shared_quad(u32 shared) {
    Quad32 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(shared) : "memory");
    return v;
}
// Volatile, as above.
KDA_DEVICE void load_shared_pair(u32 shared, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(shared));
}
KDA_DEVICE void load_shared_pair(u32 shared, float& x, i32& y) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=f"(x), "=r"(y) : "r"(shared));
}
KDA_DEVICE void load_shared_pairs(u32 shared, float (&x)[2], float (&y)[2]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(y[0]), "=f"(y[1]) : "r"(shared));
}
// Asks for a line of global memory, so that whoever loads it finds it in L2.
KDA_DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Where the compiler would store four words.
KDA_DEVICE void store_global_quad(void* p, Quad32 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
KDA_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
