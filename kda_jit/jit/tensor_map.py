"""CUtensorMap: how the bulk copies of a kernel find tiles of a tensor.

Its other half is kernels_src/common/tensor_map.cuh.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kda_jit.jit.driver import Driver

#: Of one map; it lies at a multiple of ALIGNMENT, on the host and in a kernel's parameter.
NBYTES = 128
ALIGNMENT = 64

# Enumerations of cuda.h.
_BFLOAT16 = 9
_NO_INTERLEAVE = 0
_SWIZZLE_128 = 3
_L2_PROMOTE_256 = 3
_ZEROS_OUTSIDE = 0


def encode_bf16(
    driver: Driver,
    destination: int,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> None:
    """Write the map of a bf16 tensor to `destination`; microseconds, nothing is launched.

    destination  host address, a multiple of 64
    address      of the tensor's first element on the device, a multiple of 16
    shape        innermost first, elements
    strides      bytes, multiples of 16, of all dimensions but the innermost, whose elements are
                 adjacent
    box          shape of a tile, innermost first; 64 elements there, a row of the 128-byte swizzle

    Raises LaunchError with the driver's error.
    """
    rank = len(shape)
    code = driver.library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(destination),
        ctypes.c_int(_BFLOAT16),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(_NO_INTERLEAVE),
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_L2_PROMOTE_256),
        ctypes.c_int(_ZEROS_OUTSIDE),
    )
    driver.check(code, f"tensor map of shape {tuple(shape)}, strides {tuple(strides)}")
