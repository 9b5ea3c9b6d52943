"""Kimi Delta Attention prefill: kernels compiled at run time for the GPU at hand.

    out, final_state = kda_jit.prefill(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias)

Importing this touches neither CuPy, Triton nor a GPU.
"""

from kda_jit import ops as ops  # registers torch.ops.kda_jit
from kda_jit import reference
from kda_jit._version import __version__
from kda_jit.api import prefill, warmup
from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.capturing import capture
from kda_jit.chunk import chunk_kda
from kda_jit.errors import (
    BackendNameError,
    CaptureError,
    CompileError,
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    IntegrationError,
    KdaError,
    LaunchError,
    NoBackendError,
    OutputConflictError,
    WorkspaceError,
)
from kda_jit.layer import KDACore, StepRecord
from kda_jit.recurrent import recurrent
from kda_jit.resolver import Resolution, resolve_backend
from kda_jit.step import StepMetadata
from kda_jit.workspace import (
    Spec,
    Workspace,
    WorkspaceLanes,
    planned_bytes,
    workspace_specs,
)

__all__ = [
    "BackendNameError",
    "CaptureError",
    "CompileError",
    "DeviceError",
    "GradError",
    "InputError",
    "InputTypeError",
    "IntegrationError",
    "KDACore",
    "KdaError",
    "LaunchError",
    "LaunchRecord",
    "NoBackendError",
    "OutputConflictError",
    "Resolution",
    "Spec",
    "StepMetadata",
    "StepRecord",
    "Workspace",
    "WorkspaceError",
    "WorkspaceLanes",
    "__version__",
    "capture",
    "chunk_kda",
    "last_launch",
    "planned_bytes",
    "prefill",
    "recurrent",
    "reference",
    "resolve_backend",
    "warmup",
    "workspace_specs",
]
