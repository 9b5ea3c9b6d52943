"""KernelSpec -> kernels on a device: compiled or cached, loaded once per device, kept for good.

A loaded module is never unloaded: a captured CUDA graph may hold its functions. `reload()` and
`use_sources()` therefore only forget modules, and those that a caller holds go on working.
A `SourceTree` remembers what was loaded from it, for whoever goes to and fro between sources.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_jit.errors import CaptureError, CompileError, InputError, LaunchError
from kda_jit.jit import sources
from kda_jit.jit.arch import arch_for, arch_named, why_no_arch
from kda_jit.jit.compiler import Compiled, compile_spec, unavailable_reason
from kda_jit.jit.driver import Driver, driver
from kda_jit.jit.launch import Kernel
from kda_jit.jit.spec import KernelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """A compiled file on one device. `kernels` has every entry by name."""

    compiled: Compiled
    device_index: int
    kernels: Mapping[str, Kernel]
    raw: Any
    """The cupy.RawModule, which owns the code."""


Table = dict[tuple[KernelSpec, int], Module]
Launches = Mapping[tuple[str, str], tuple[int, int]]
"""Threads and bytes of dynamic shared memory, by a file of kernels_src and an entry in it."""


class SourceTree:
    """A kernels_src other than the usual one, and the modules that were loaded from it.

    A module is built from what its files hold when it is first needed and then kept, as from the
    usual sources: a later edit of the folder takes a `reload()` or another tree.

    launches  how kernels are launched that these sources want launched otherwise
    """

    def __init__(self, folder: str | Path, launches: Launches | None = None) -> None:
        self.folder = Path(folder)
        self.launches = dict(launches or {})
        self.loaded: Table = {}
        _trees.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        # What a process loaded stays there. A copy owns nothing: the folder goes with the original.
        return SourceTree, (self.folder, self.launches)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Take all kernels from here inside the block. Other threads never notice."""
        with sources.using(self.folder):
            token = _tree.set(self)
            try:
                yield
            finally:
                _tree.reset(token)


_lock = threading.RLock()
_loaded: Table = {}
"""What `load` answers from. Specs with a text are not in it: their headers may change any time."""
_tree: ContextVar[SourceTree | None] = ContextVar("kda_jit_source_tree", default=None)
"""Whose table takes the place of `_loaded` in this thread."""
_trees: weakref.WeakSet[SourceTree] = weakref.WeakSet()
_by_key: dict[tuple[str, int], Module] = {}
"""Every module of this process by its cache key, so equal sources are loaded once."""
_of_parent: list[object] = []
"""After a fork: modules of the parent, kept because unloading them here would call its driver."""


def load(spec: KernelSpec, device_index: int | None = None) -> Module:
    """The module of `spec` on a device (None: the current one), built and loaded on the first call.

    A later call is one dictionary look-up. Raises CompileError; CaptureError where a first call
    comes inside a CUDA graph capture; LaunchError where the driver refuses the code.
    """
    if device_index is None:
        import torch

        device_index = torch.cuda.current_device()
    module = _table().get((spec, device_index))
    return _load(spec, device_index) if module is None else module


def is_loaded(spec: KernelSpec, device_index: int) -> bool:
    """True where `load` would neither compile nor load."""
    return (spec, device_index) in _table()


def generation() -> object:
    """Another object each time that `load` starts over or turns to other sources.

    Whoever keeps kernels beside it may use them as long as this is the very same object.
    """
    return _table()


def changed_launches() -> Launches:
    """Of the kernels that this thread's sources launch otherwise than the usual ones."""
    tree = _tree.get()
    return {} if tree is None else tree.launches


def reload() -> None:
    """Forget the loaded modules, so that the next calls see what changed in kernels_src.

    Inside a block that takes kernels from elsewhere: those of that place.
    """
    global _loaded
    with _lock:
        tree = _tree.get()
        if tree is None:
            _loaded = {}
        else:
            tree.loaded = {}


@contextlib.contextmanager
def use_sources(folder: str | Path) -> Iterator[None]:
    """Take all kernels from another kernels_src inside the block, for an A/B in a notebook.

    Edits are seen each time the block is entered. Holds for this thread alone.
    """
    with SourceTree(folder).active():
        yield


@functools.cache
def device_unavailable_reason(device_index: int) -> str | None:
    """Why compiled kernels cannot run on a device, None if they can. Asked once per device.

    Builds, loads and launches an empty kernel: a driver too old for this NVRTC, or a CuPy of
    another CUDA, shows here rather than in a user's call. Does not wait for the GPU. Must be called
    first outside of a graph capture, else it raises CaptureError.
    """
    import torch

    cc = torch.cuda.get_device_capability(device_index)
    arch = arch_for(cc)
    if arch is None:
        return why_no_arch(cc)
    reason = unavailable_reason(arch.target)
    if reason is not None:
        return reason
    text = 'extern "C" __global__ void probe() {}'
    probe = KernelSpec("probe.cu", ("probe",), arch.target, text=text)
    try:
        kernel = load(probe, device_index).kernels["probe"]
        kernel.launch((1, 1, 1), 32, 0, torch.cuda.current_stream(device_index).cuda_stream)
    except (CompileError, InputError, LaunchError) as error:
        return str(error)
    return None


def _table() -> Table:
    """What `load` answers from in this thread."""
    tree = _tree.get()
    return _loaded if tree is None else tree.loaded


def _load(spec: KernelSpec, device_index: int) -> Module:
    import torch

    torch.cuda.init()
    with _lock, torch.cuda.device(device_index):
        table = _table()
        module = table.get((spec, device_index))
        if module is not None:
            return module
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                f"{spec.label()}: expected to be loaded on cuda:{device_index} before a CUDA graph "
                "capture, got a first call inside one. Call kda_jit.warmup(...), or run the call "
                "once outside."
            )
        misfit = arch_named(spec.target).why_not_on(torch.cuda.get_device_capability(device_index))
        if misfit is not None:
            raise LaunchError(f"{spec.label()} on cuda:{device_index}: {misfit}.")
        compiled = compile_spec(spec)
        module = _by_key.get((compiled.key, device_index))
        if module is None:
            module = _to_device(compiled, device_index, driver(), torch._C._cuda_getDevice)
            _by_key[compiled.key, device_index] = module
        if spec.text is None:
            table[spec, device_index] = module
        return module


def _to_device(compiled: Compiled, device_index: int, cuda: Driver, current_device: Any) -> Module:
    """Load a binary on the current device, which is `device_index`."""
    import cupy

    label = f"{compiled.spec.label()} on cuda:{device_index}"
    try:
        raw = cupy.RawModule(path=str(compiled.path))
        handles = {name: raw.get_function(name).kernel.ptr for name in compiled.entries}
    except Exception as error:
        ours, drivers = (
            ".".join(map(str, version)) for version in (compiled.nvrtc, cuda.version())
        )
        raise LaunchError(
            f"{label}: the driver does not take {compiled.path} ({error}). It was built with NVRTC "
            f"{ours}; the driver runs CUDA {drivers} and older."
        ) from error
    context = cuda.current_context()
    kernels = {
        name: Kernel(
            name,
            f"{name} for {compiled.spec.target} on cuda:{device_index}",
            handle,
            driver=cuda,
            context=context,
            device_index=device_index,
            current_device=current_device,
        )
        for name, handle in handles.items()
    }
    return Module(compiled, device_index, kernels, raw)


def _forget_parent() -> None:
    """In a forked child: the parent's modules and lock are of no use here."""
    global _lock, _loaded, _by_key
    _of_parent.extend((_loaded, _by_key))  # what trees loaded is in the latter, too
    _lock = threading.RLock()
    _loaded = {}
    _by_key = {}
    for tree in list(_trees):
        tree.loaded = {}
    device_unavailable_reason.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
