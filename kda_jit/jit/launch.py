"""Kernel: one entry of a loaded module, and the fast way to launch it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kda_jit.errors import LaunchError
from kda_jit.jit import driver as cuda
from kda_jit.jit.driver import Driver, LaunchConfig


class _Prepared:
    """What a launch hands to the driver, and for which request it is filled in."""

    __slots__ = ("args", "attributes", "config", "config_ref", "params", "request")

    def __init__(self) -> None:
        self.attributes = cuda.launch_attributes()
        self.config = LaunchConfig(block_y=1, block_z=1)
        self.config_ref = ctypes.byref(self.config)
        # kernelParams: a pointer to the one struct, of which the driver copies all that the
        # kernel declares.
        self.params = (ctypes.c_void_p * 1)()
        self.request: tuple[int, ...] | None = None
        self.args: object = self  # the object in params; nothing that a caller could pass


class _Frame(threading.local):
    """Built once per kernel and thread, never shared by two."""

    def __init__(self) -> None:
        self.prepared = _Prepared()


class TogetherError(LaunchError):
    """The process may not use as many multiprocessors as a cooperative launch needs."""


class Kernel:
    """An entry point on one device, whose one parameter is a struct passed by value (or none).

    name            the entry's name
    label           name, target and device, for messages
    args_bytes      size of its struct, 0 without one; -1: it has several parameters, which `launch`
                    cannot pass; None where the driver is too old to say
    registers       per thread at entry
    local_bytes     per thread: spills, local arrays and stack
    max_threads     largest block that its registers allow
    smem_static     bytes per block
    smem_dynamic    most bytes that `launch` may ask for on top; the driver's opt-in is already made
    """

    __slots__ = (
        "_context",
        "_current_device",
        "_device_index",
        "_driver",
        "_frame",
        "_handle",
        "_launch",
        "args_bytes",
        "label",
        "local_bytes",
        "max_threads",
        "name",
        "registers",
        "smem_dynamic",
        "smem_static",
    )

    def __init__(
        self,
        name: str,
        label: str,
        handle: int,
        *,
        driver: Driver,
        context: int,
        device_index: int,
        current_device: Callable[[], int],
    ) -> None:
        """Wrap the CUfunction `handle`; `context` is its device's, and current in this thread.

        current_device    returns the index of this thread's current device, cheaply
        """
        self.name = name
        self.label = label
        self._driver = driver
        self._launch = driver.launch_kernel_ex
        self._handle = ctypes.c_void_p(handle)
        self._context = context
        self._device_index = device_index
        self._current_device = current_device
        self._frame = _Frame()
        sizes = driver.parameter_sizes(handle)
        self.args_bytes: int | None
        if sizes is None:
            self.args_bytes = None
        else:
            self.args_bytes = sum(sizes) if len(sizes) < 2 else -1
        self.registers = driver.function_attribute(handle, cuda.FUNC_REGISTERS)
        self.local_bytes = driver.function_attribute(handle, cuda.FUNC_LOCAL_BYTES)
        self.max_threads = driver.function_attribute(handle, cuda.FUNC_MAX_THREADS)
        self.smem_static = driver.function_attribute(handle, cuda.FUNC_SMEM_STATIC)
        limit = driver.device_attribute(device_index, cuda.DEVICE_SMEM_OPTIN)
        self.smem_dynamic = limit - self.smem_static
        # Once and for all, to the most there is: above 48 KiB a launch fails without it.
        driver.set_function_attribute(handle, cuda.FUNC_MAX_DYNAMIC_SMEM, self.smem_dynamic)
        # A hint. Left to itself, the driver may divide L1 and shared memory differently for each
        # kernel, and an SM that must change over cannot run two dependent kernels side by side.
        driver.set_function_attribute(handle, cuda.FUNC_SMEM_CARVEOUT, 100)

    def __repr__(self) -> str:
        return f"Kernel({self.label}, {self.registers} registers, {self.local_bytes} local bytes)"

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        smem: int,
        stream: int,
        args: ctypes.Structure | ctypes.Array[Any] | bytes | None = None,
        *,
        pdl: bool = False,
        cooperative: bool = False,
    ) -> None:
        """Enqueue the kernel on `stream`; never waits for it.

        grid      blocks in x, y, z; none may be 0
        block     threads per block
        smem      dynamic shared memory, bytes, at most `smem_dynamic`
        stream    raw CUstream of this kernel's device: torch._C._cuda_getCurrentRawStream(index)
        args      the kernel's struct: a ctypes object (read in place, the fast way; kept until the
                  next launch, so not to be resized) or bytes. It is copied before this returns.
                  None for a kernel without parameters.
        pdl       programmatic dependent launch: may start before its predecessor ends, so the
                  kernel itself must wait (griddepcontrol.wait) before it reads what that one writes
        cooperative  no block starts before all can: they may wait for each other

        Raises LaunchError with the driver's error, and where `args` has another size than the
        kernel's parameters; TogetherError where not all blocks of a cooperative launch can be
        resident at once, as under a limit of MPS.
        """
        prepared = self._frame.prepared
        # Launches that follow each other mostly ask for the same; a field costs 45 ns to set.
        request = (*grid, block, smem, stream, pdl, cooperative)
        if request != prepared.request:
            prepared.request = None  # until every field is set
            config = prepared.config
            config.grid_x, config.grid_y, config.grid_z = grid
            config.block_x = block
            config.smem = smem
            config.stream = stream
            config.num_attributes = pdl + cooperative
            config.attributes = ctypes.pointer(prepared.attributes[0 if pdl else 1])
            prepared.request = request
        if args is not prepared.args:
            self._take(args, prepared)
        config_ref, params = prepared.config_ref, prepared.params
        if self._current_device() == self._device_index:
            code = self._launch(config_ref, self._handle, params, None)
            if code == cuda.INVALID_CONTEXT:
                # A thread that has not used CUDA yet has no context, whatever its current device.
                self._driver.set_context(self._context)
                code = self._launch(config_ref, self._handle, params, None)
        else:
            with self.own_context():
                code = self._launch(config_ref, self._handle, params, None)
        if code != cuda.SUCCESS:
            error = TogetherError if code == cuda.COOPERATIVE_LAUNCH_TOO_LARGE else LaunchError
            raise error(
                f"{self.label}: {self._driver.error_name(code)}. grid {tuple(grid)}, block {block} "
                f"of at most {self.max_threads} threads, {smem} bytes of dynamic smem of at "
                f"most {self.smem_dynamic}. If all are in order, an earlier kernel may have failed."
            )

    def _take(
        self, args: ctypes.Structure | ctypes.Array[Any] | bytes | None, prepared: _Prepared
    ) -> None:
        """Point the launch at `args`, which `prepared` keeps alive from here on."""
        prepared.args = prepared
        size = 0
        if args is not None:
            if isinstance(args, bytes):
                args = ctypes.create_string_buffer(args, len(args))
            size = ctypes.sizeof(args)
            prepared.params[0] = ctypes.addressof(args)
        if size != self.args_bytes and self.args_bytes is not None:
            if self.args_bytes < 0:
                raise LaunchError(
                    f"{self.label}: expected a kernel with one parameter, a struct by value, got "
                    "one with several. Put them into a struct."
                )
            raise LaunchError(
                f"{self.label}: expected {self.args_bytes} bytes of arguments, got {size}. Does "
                "the struct packed in Python match the one in kernels_src?"
            )
        prepared.args = args

    def max_active_blocks(self, block: int, smem: int) -> int:
        """Blocks of `block` threads and `smem` dynamic bytes that fit on one multiprocessor.

        Asks the driver each time, about a microsecond; callers keep the answer.
        """
        with self.own_context():
            return self._driver.max_active_blocks(self._handle.value or 0, block, smem)

    @contextmanager
    def own_context(self) -> Iterator[None]:
        """Its device's context, for this thread, whatever is current."""
        self._driver.push_context(self._context)
        try:
            yield
        finally:
            self._driver.pop_context()
