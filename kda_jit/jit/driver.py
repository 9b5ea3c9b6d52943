"""The few CUDA driver calls that we make ourselves, through ctypes. Opened on first use.

CuPy's launcher costs about twice as much, takes no launch attributes and no struct by value.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from kda_jit.errors import LaunchError

SUCCESS = 0
INVALID_CONTEXT = 201
COOPERATIVE_LAUNCH_TOO_LARGE = 720

# CUfunction_attribute and CUdevice_attribute, by their numbers in cuda.h.
FUNC_MAX_THREADS = 0
FUNC_SMEM_STATIC = 1
FUNC_LOCAL_BYTES = 3
FUNC_REGISTERS = 4
FUNC_MAX_DYNAMIC_SMEM = 8
FUNC_SMEM_CARVEOUT = 9  # percent of the most there is; -1: as the driver likes
DEVICE_SMEM_OPTIN = 97

_COOPERATIVE = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes of which we use the first int."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("_pad", ctypes.c_uint),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_byte * 60),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("smem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def launch_attributes() -> ctypes.Array[LaunchAttribute]:
    """Two attributes, of which a launch takes the first, the second, both or none.

    0   the kernel may start before the one ahead of it on the stream has ended
    1   cooperative: its blocks are resident all together, or none of them is yet
    """
    return (LaunchAttribute * 2)(
        LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1),
        LaunchAttribute(id=_COOPERATIVE, value=1),
    )


class Driver:
    """libcuda. Each method raises LaunchError with the driver's own name of the error."""

    def __init__(self, library: Any) -> None:
        self.library = library
        try:
            # Kernel.launch calls it as it is, without argtypes: it passes only ctypes objects.
            self.launch_kernel_ex = library.cuLaunchKernelEx
        except AttributeError:
            raise LaunchError(
                "CUDA driver: it has no cuLaunchKernelEx; 11.8 or newer is needed."
            ) from None

    def error_name(self, code: int) -> str:
        """CUDA_ERROR_... of a return code, with the number."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        return f"{(text.value or b'CUDA error').decode()} ({code})"

    def check(self, code: int, what: str) -> None:
        """Raise LaunchError unless `code` is success. `what` says what was being done."""
        if code != SUCCESS:
            raise LaunchError(f"{what}: {self.error_name(code)}")

    def version(self) -> tuple[int, int]:
        """(major, minor) of the newest CUDA that this driver runs."""
        number = ctypes.c_int()
        self.check(self.library.cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
        return number.value // 1000, number.value % 1000 // 10

    def current_context(self) -> int:
        """Handle of this thread's context; 0 where it has none."""
        handle = ctypes.c_void_p()
        self.check(self.library.cuCtxGetCurrent(ctypes.byref(handle)), "cuCtxGetCurrent")
        return handle.value or 0

    def set_context(self, context: int) -> None:
        """Make `context` this thread's own."""
        self.check(self.library.cuCtxSetCurrent(ctypes.c_void_p(context)), "cuCtxSetCurrent")

    def push_context(self, context: int) -> None:
        """Make `context` current until `pop_context`."""
        self.check(self.library.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "cuCtxPushCurrent")

    def pop_context(self) -> None:
        """Undo the last `push_context`."""
        handle = ctypes.c_void_p()
        self.check(self.library.cuCtxPopCurrent_v2(ctypes.byref(handle)), "cuCtxPopCurrent")

    def function_attribute(self, function: int, attribute: int) -> int:
        """One CUfunction_attribute, by number."""
        value = ctypes.c_int()
        code = self.library.cuFuncGetAttribute(
            ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_void_p(function)
        )
        self.check(code, f"cuFuncGetAttribute({attribute})")
        return value.value

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        """Set one CUfunction_attribute, by number."""
        code = self.library.cuFuncSetAttribute(
            ctypes.c_void_p(function), ctypes.c_int(attribute), ctypes.c_int(value)
        )
        self.check(code, f"cuFuncSetAttribute({attribute}, {value})")

    def device_attribute(self, device_index: int, attribute: int) -> int:
        """One CUdevice_attribute, by number."""
        device = ctypes.c_int()
        value = ctypes.c_int()
        self.check(
            self.library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(device_index)),
            "cuDeviceGet",
        )
        code = self.library.cuDeviceGetAttribute(
            ctypes.byref(value), ctypes.c_int(attribute), device
        )
        self.check(code, f"cuDeviceGetAttribute({attribute})")
        return value.value

    def parameter_sizes(self, function: int) -> tuple[int, ...] | None:
        """Bytes of each parameter of a kernel; None where the driver cannot say."""
        try:
            ask = self.library.cuFuncGetParamInfo  # since CUDA 12.4
        except AttributeError:
            return None
        offset = ctypes.c_size_t()
        size = ctypes.c_size_t()
        out = (ctypes.byref(offset), ctypes.byref(size))
        sizes: list[int] = []
        # There is no count to ask for; the first index that is refused is one too many.
        while ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *out) == SUCCESS:
            sizes.append(size.value)
        return tuple(sizes)

    def max_active_blocks(self, function: int, block: int, smem: int) -> int:
        """Blocks of `block` threads and `smem` dynamic bytes that fit on one multiprocessor."""
        count = ctypes.c_int()
        code = self.library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count),
            ctypes.c_void_p(function),
            ctypes.c_int(block),
            ctypes.c_size_t(smem),
        )
        self.check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return count.value


@functools.cache
def driver() -> Driver:
    """The driver of this machine. Raises LaunchError where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(
            f"CUDA driver: cannot be opened ({error}). Is this a GPU machine?"
        ) from None
    return Driver(library)
