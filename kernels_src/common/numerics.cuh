// Every approximation that the kernels use, each with its error bound (relative, from the PTX ISA).
#pragma once
#include "common/types.cuh"

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNormEps = 1e-6f;  // inside the sum of squares: x * rsqrt(sum(x^2) + eps)

KDA_DEVICE float exp2_approx(float x) {  // 2^-22; flushes results below 2^-126 to zero
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
KDA_DEVICE float reciprocal_approx(float x) {  // 1 ulp; 1/inf = 0
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
KDA_DEVICE float rsqrt_approx(float x) {  // 2^-22.9
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// tanh.approx would save one MUFU, but it is off by up to 0.9 % where the gate is nearly closed.
KDA_DEVICE float sigmoid(float x) { return reciprocal_approx(1.0f + exp2_approx(-kLog2E * x)); }

// 2^e for e in [-126, 127], exactly.
KDA_DEVICE float exp2_int(int e) { return __int_as_float((e + 127) << 23); }
// floor(log2 |x|) of a normal x; -127 for zero and subnormals, 128 for inf and NaN.
KDA_DEVICE int ilogb_fast(float x) { return static_cast<int>((__float_as_uint(x) >> 23) & 0xffu) - 127; }
