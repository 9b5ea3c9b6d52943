// PTX of common/numerics.cuh: approximations are correctly rounded here, and flush as .ftz says.
#pragma once
#include "simt/formats.hpp"

KDA_DEVICE float exp2_approx(float x) { return simt::flush(exp2f(simt::flush(x))); }
KDA_DEVICE float reciprocal_approx(float x) { return simt::flush(1.0f / simt::flush(x)); }
KDA_DEVICE float rsqrt_approx(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(simt::flush(x)))); }
