"""Every exception that kda_jit raises on purpose.

    KdaError                               base: `except kda_jit.KdaError` catches all of the below
    ├── InputError        (ValueError)     wrong value, shape, stride or aliasing of an argument
    ├── InputTypeError    (TypeError)      wrong dtype, or not a tensor where one is expected
    ├── BackendNameError  (ValueError)     unknown backend name; lists the valid ones
    ├── DeviceError       (RuntimeError)   wrong device, such as a CPU tensor with backend="cuda"
    ├── NoBackendError    (RuntimeError)   the asked backend cannot run; lists every unmet condition
    ├── GradError         (RuntimeError)   a tensor requires grad; this package is forward only
    ├── WorkspaceError    (RuntimeError)   a locked workspace was asked to grow, or a plan exceeded
    ├── OutputConflictError (RuntimeError) a step would write an output row twice, or not at all
    ├── IntegrationError  (RuntimeError)   what an integration stands in for is there already
    ├── CaptureError      (RuntimeError)   a first call (compile, load) inside a CUDA graph capture
    ├── CompileError      (RuntimeError)   NVRTC refused a kernel, or is not there
    └── LaunchError       (RuntimeError)   the CUDA driver refused to load or launch a kernel

Each has a fitting built-in base, so callers that know nothing of this package can still catch it.
Messages have one voice: `name: expected X, got Y. <likely cause>`.
"""

from __future__ import annotations


class KdaError(Exception):
    """Base of all errors that this package raises on purpose."""


class InputError(KdaError, ValueError):
    """An argument has a wrong value, shape, stride, or overlaps another one."""


class InputTypeError(KdaError, TypeError):
    """An argument has a wrong dtype, or is not a tensor where one is expected."""


class BackendNameError(KdaError, ValueError):
    """The backend's name is not one of ours. The message lists those that are."""


class DeviceError(KdaError, RuntimeError):
    """Tensors lie on a device that the call cannot use, or on several devices."""


class NoBackendError(KdaError, RuntimeError):
    """The backend that was asked for by name cannot run; every unmet condition is listed."""


class GradError(KdaError, RuntimeError):
    """A tensor requires grad outside no_grad(); there is no backward pass."""


class WorkspaceError(KdaError, RuntimeError):
    """A workspace was asked for more than it holds or was planned for."""


class OutputConflictError(KdaError, RuntimeError):
    """Parts of a layer's step would write one row of its output twice, or leave one out."""


class IntegrationError(KdaError, RuntimeError):
    """An integration cannot be switched on, since what it stands in for is there already."""


class CaptureError(KdaError, RuntimeError):
    """Something that must happen once before a CUDA graph capture was needed inside one."""


class CompileError(KdaError, RuntimeError):
    """A kernel could not be compiled.

    Both attributes are plain data, so the error survives pickling between processes.
    """

    log: str = ""
    """What NVRTC said, in full; empty where it never ran."""

    folder: str | None = None
    """Folder with the failing source, flags and log; None where nothing was saved."""


class LaunchError(KdaError, RuntimeError):
    """The CUDA driver refused to load a module or to launch a kernel."""
