"""vLLM's FlashKDA operators, on kda_jit's kernels.

    KDA_JIT_VLLM=on vllm serve ...                    # switches the plugin on, in every process

or, before vLLM builds its layers, in a process of yours:

    kda_jit.integrations.vllm.register()

Either way `torch.ops._flashkda_C.get_workspace_size` and `fwd` exist with the schema of vLLM 0.33's
compiled extension, and `import vllm._flashkda_C` does nothing instead of loading that. Its models
(kimi_k3, glm5next) run as they are. In one process it is the one or the other: loading the compiled
extension on top of ours ends the process, since torch defines a name once.
"""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit._version import __version__
from kda_jit.errors import IntegrationError
from kda_jit.integrations._flashkda import forward, workspace_bytes

__all__ = ["MODULE", "NAMESPACE", "SCHEMAS", "is_registered", "plugin", "register", "unregister"]

#: Of the operators: torch.ops._flashkda_C.
NAMESPACE = "_flashkda_C"
#: The module that vLLM imports to have them.
MODULE = "vllm._flashkda_C"
#: The operators as vLLM 0.33 declares them.
SCHEMAS = {
    "get_workspace_size": "get_workspace_size(int T_total, int H, int N=1) -> int",
    "fwd": (
        "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
        "Tensor(c!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound, "
        "Tensor? initial_state=None, Tensor(b!)? final_state=None, Tensor? cu_seqlens=None, "
        "Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()"
    ),
}

_library: torch.library.Library | None = None
_mutex = Lock()


def register() -> None:
    """Defines the operators, once in a process; again is no error.

    Raises IntegrationError, having changed nothing, where vLLM's extension is loaded already.
    """
    global _library
    with _mutex:
        if _library is None:
            _refuse_the_extension()
            _library = _define()
        sys.modules[MODULE] = _module()


def unregister() -> None:
    """Takes the operators back, so that the extension may be loaded. Nothing, where there are none.

    What holds an operator already, compiled functions and captured graphs, must not run any more.
    """
    global _library
    with _mutex:
        if _library is not None:
            _library._destroy()
            _library = None
            sys.modules.pop(MODULE, None)


def plugin() -> None:
    """What vLLM calls in each of its processes: `register` if the environment asks for it."""
    if not settings.vllm():
        return
    register()
    # A child of vLLM's logger, so that the line is in its log.
    logging.getLogger("vllm.kda_jit").info(
        "kda_jit %s serves torch.ops.%s (%s).", __version__, NAMESPACE, settings.VLLM.name
    )


def is_registered() -> bool:
    """Whether the operators of this process are ours."""
    return _library is not None


def _refuse_the_extension() -> None:
    namespace = getattr(torch.ops, NAMESPACE)
    found = [f"torch.ops.{NAMESPACE}.{name}" for name in SCHEMAS if hasattr(namespace, name)]
    if MODULE in sys.modules:
        found.append(f"the module {MODULE}")
    if found:
        raise IntegrationError(
            f"vllm: expected a process without FlashKDA's extension, got {', '.join(found)} loaded "
            "already. Operators cannot be replaced: register before vLLM builds its layers, or "
            f"unset {settings.VLLM.name} to keep the extension."
        )


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for schema in SCHEMAS.values():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("get_workspace_size", _workspace_size, "CompositeExplicitAutograd")
    for key in ("CPU", "CUDA"):
        library.impl("fwd", forward, key)
    torch.library.register_fake(f"{NAMESPACE}::fwd", _fake_forward, lib=library)
    return library


def _workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """The operator does not say whether there will be checkpoints, so there may be."""
    return workspace_bytes(T_total, H, N, checkpoints=True)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """All results are the caller's tensors, as the schema says."""


def _module() -> ModuleType:
    """Stands in `sys.modules` for the extension, so that importing that loads nothing."""
    module = ModuleType(MODULE, f"kda_jit {__version__} in the place of FlashKDA's extension.")
    module.__spec__ = ModuleSpec(MODULE, None, origin=__name__)
    return module
