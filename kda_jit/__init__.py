"""Kimi Delta Attention prefill: kernels compiled at run time for the GPU at hand.

    out, final_state = kda_jit.prefill(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias)

Importing this touches neither CuPy, Triton nor a GPU.
"""

from kda_jit._version import __version__
from kda_jit.api import prefill, warmup
from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.errors import (
    BackendNameError,
    CaptureError,
    CompileError,
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    KdaError,
    LaunchError,
    NoBackendError,
    WorkspaceError,
)
from kda_jit.resolver import Resolution, resolve_backend
from kda_jit.workspace import Spec, Workspace, planned_bytes, workspace_specs

__all__ = [
    "BackendNameError",
    "CaptureError",
    "CompileError",
    "DeviceError",
    "GradError",
    "InputError",
    "InputTypeError",
    "KdaError",
    "LaunchError",
    "LaunchRecord",
    "NoBackendError",
    "Resolution",
    "Spec",
    "Workspace",
    "WorkspaceError",
    "__version__",
    "last_launch",
    "planned_bytes",
    "prefill",
    "resolve_backend",
    "warmup",
    "workspace_specs",
]
