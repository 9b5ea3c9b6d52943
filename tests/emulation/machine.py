"""The emulated machine as the CUDA backend sees a GPU: kernels to launch, a driver, an error.

The machine itself is C++ (simt/), one a process. Launches are enqueued as on a stream and run by
`synchronize`; one that may overlap with the launch ahead of it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kda_jit.errors import LaunchError
from kda_jit.jit import KernelSpec
from kda_jit.jit.arch import arch_named
from tests.emulation import build

_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
#: TensorLayout of simt/copies.cpp, in the 128 bytes of a CUtensorMap.
_TENSOR_MAP = struct.Struct("=8s6Q4I")
_PLACE = re.compile(r"@(\S+)\+(0x[0-9a-f]+)")


class EmulationError(AssertionError):
    """A deadlock, an access out of bounds, or another use of the machine that has no meaning."""


class EmulatedKernel:
    """Stands in for kda_jit.jit.launch.Kernel."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._entry = _Entry.in_dll(library, f"simt_entry_{name}")

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        smem: int,
        stream: int,
        args: ctypes.Array[Any] | bytes | None = None,
        *,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        content = b"" if args is None else bytes(args)
        expected = self._entry.args_bytes
        if len(content) != expected:
            raise LaunchError(f"{self.name}: expected {expected} bytes, got {len(content)}")
        if grid[1:] != (1, 1):
            raise LaunchError(f"{self.name}: expected a grid of one dimension, got {grid}")
        refused = _machine().simt_enqueue(
            ctypes.byref(self._entry), grid[0], block, smem, content, pdl, cooperative
        )
        if refused is not None:
            raise LaunchError(f"{self.name}: {refused.decode()}")

    @contextlib.contextmanager
    def own_context(self) -> Iterator[None]:
        yield


def load(spec: KernelSpec, folder: Path) -> dict[str, EmulatedKernel]:
    """The kernels of a spec by name, from a kernels_src and for the architecture that it names."""
    major, minor = arch_named(spec.target).cc
    path = build.kernel_library(folder, spec.file, spec.entries, 100 * major + 10 * minor)
    _machine()
    library = ctypes.CDLL(str(path))
    return {name: EmulatedKernel(library, name) for name in spec.entries}


def synchronize(seed: int, *, lanes_apart: bool = False) -> None:
    """Runs all that was enqueued, in an order and with delays drawn from `seed`.

    lanes_apart  let any lane fall behind its warp, as CUDA would allow and the hardware does not do
    """
    error = _machine().simt_run(seed, lanes_apart)
    if error is not None:
        raise EmulationError(f"{_with_lines(error.decode())}\n  machine's seed {seed}")


def driver() -> Any:
    """As much of kda_jit.jit.driver.Driver as writing tensor maps takes."""
    return SimpleNamespace(
        library=SimpleNamespace(cuTensorMapEncodeTiled=_encode_tiled), check=_check
    )


class _Entry(ctypes.Structure):
    """simt::Entry."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("args_bytes", ctypes.c_uint32),
        ("cluster_ctas", ctypes.c_uint32),
    ]


@functools.cache
def _machine() -> ctypes.CDLL:
    """Kernels find its symbols, since it is loaded before them."""
    library = ctypes.CDLL(str(build.machine_library()), mode=ctypes.RTLD_GLOBAL)
    library.simt_run.argtypes = [ctypes.c_uint64, ctypes.c_int]
    library.simt_run.restype = ctypes.c_char_p
    library.simt_enqueue.argtypes = [
        ctypes.c_void_p, *[ctypes.c_uint32] * 3, ctypes.c_char_p, *[ctypes.c_int] * 2
    ]  # fmt: skip
    library.simt_enqueue.restype = ctypes.c_char_p
    return library


def _with_lines(words: str) -> str:
    """Places in the kernels' code by their lines."""
    return _PLACE.sub(lambda m: "at " + (build.source_line(*m.groups()) or m.group()), words)


def _encode_tiled(
    destination: Any,
    dtype: Any,
    rank: Any,
    address: Any,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *rest: Any,
) -> int:
    """cuTensorMapEncodeTiled for bf16 tensors of three dimensions, and what it refuses."""
    legal = (
        rank.value == 3
        and address.value
        and address.value % 16 == 0
        and destination.value % 64 == 0
        and all(0 < extent <= 1 << 32 for extent in shape)
        and all(0 < stride < 1 << 40 and stride % 16 == 0 for stride in strides)
        and all(0 < size <= 256 for size in box)
        and box[0] * 2 == 128
    )
    if not legal:
        return _INVALID_VALUE
    content = _TENSOR_MAP.pack(b"TnsorMap", address.value, *shape, *strides, *box, 2)
    ctypes.memmove(destination.value, content.ljust(128, b"\0"), 128)
    return 0


def _check(code: int, words: str) -> None:
    if code:
        raise LaunchError(f"{words}: CUDA error {code}")
