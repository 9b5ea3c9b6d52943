"""fla's own ``chunk_kda``, run by this package: a backend in the dispatch of fla-core 0.6.

    import kda_jit.integrations.fla

    kda_jit.integrations.fla.register()

From then on every call of ``fla.ops.kda.chunk_kda`` that this package can run is run by it, whoever
makes it and whenever it was imported. What only fla can do stays there: gradients, context
parallelism, intermediate states; and so do calls with a wrong argument. After a call,
`kda_jit.last_launch()` names the backend that ran, "fla" where it was left to fla.

Nothing of fla is imported before ``register``.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from inspect import unwrap
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor

from kda_jit.backends.base import LaunchRecord, record_launch
from kda_jit.chunk import ChunkCall, prepare_chunk
from kda_jit.errors import IntegrationError
from kda_jit.resolver import asked_backend

__all__ = ["is_registered", "register", "unregister"]

#: fla's name for us, and the variable with which fla switches us off: FLA_KDA_JIT=0.
BACKEND_TYPE = "kda_jit"
ENV_VAR = "FLA_KDA_JIT"
#: The lower the earlier: fla has FlashKDA at 3, and its own kernels last.
PRIORITY = 1

_mutex = threading.Lock()


def register(*, backend: str = "auto") -> None:
    """Makes ``fla.ops.kda.chunk_kda`` run here. Once more only changes ``backend``.

    backend  as in `kda_jit.chunk_kda`. "auto": what the CUDA kernels or Triton can run and, on the
             CPU, where fla has no kernels, torch. "cuda": only what the CUDA kernels can; the rest
             is left to fla.

    Raises BackendNameError for an unknown name, and IntegrationError where there is no fla-core 0.6
    or its dispatch is switched off.
    """
    asked_backend(backend)
    with _mutex:
        registry = _registry()
        registry.register(_adapter(backend))


def unregister() -> None:
    """Leaves every call to fla again; nothing if there was nothing to undo."""
    with _mutex:
        if is_registered():
            del _registry()._backends[BACKEND_TYPE]


def is_registered() -> bool:
    """Whether fla asks this package first. Imports nothing."""
    if "fla.ops.kda" not in sys.modules:
        return False
    try:
        return BACKEND_TYPE in _registry()._backends
    except IntegrationError:
        return False


def _registry() -> Any:
    """fla's list of backends for `chunk_kda`."""
    try:
        backends = import_module("fla.backends")
        entry_point = import_module("fla.ops.kda").chunk_kda
    except (ImportError, AttributeError) as error:
        raise IntegrationError(
            f"fla: expected fla-core 0.6 or later to be installed, got: {error}."
        ) from error
    if getattr(backends, "_DISPATCH_DISABLED", False):
        raise IntegrationError(
            "fla: expected its dispatch to be on, got FLA_DISABLE_BACKEND_DISPATCH=1 at its import."
        )
    registry = getattr(backends, "_function_registries", {}).get(unwrap(entry_point))
    if registry is None or not isinstance(getattr(registry, "_backends", None), dict):
        version = getattr(import_module("fla"), "__version__", "of unknown version")
        raise IntegrationError(
            "fla: expected a registry of backends for fla.ops.kda.chunk_kda, as fla-core 0.6 has "
            f"it, got fla {version} without one. kda_jit.chunk_kda needs none."
        )
    return registry


def _adapter(backend: str) -> Any:
    """An object as fla wants its backends; its base class is fla's."""
    base: Any = import_module("fla.backends").BaseBackend

    class KdaJitBackend(base):
        """Prefill by the package kda_jit."""

        backend_type = BACKEND_TYPE
        env_var = ENV_VAR
        priority = PRIORITY

        def chunk_kda_verifier(self, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """Whether we run the call; fla takes an exception for a no and its text for the why."""
            _pending.call = None
            record_launch(LaunchRecord("fla"))
            call = prepare_chunk(*args, backend=backend, **kwargs)
            on_gpu = call.problem.q.is_cuda
            if on_gpu and call.runner.name == "torch" and asked_backend(backend)[0] == "auto":
                return False, "no kernel of kda_jit can run this, and torch would be slow"
            _pending.call = _Pending(args, kwargs, call)
            return True, None

        def chunk_kda(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            """What was accepted, run."""
            pending, _pending.call = _pending.call, None
            if pending is not None and pending.is_for(args, kwargs):
                return pending.call.run()
            return prepare_chunk(*args, backend=backend, **kwargs).run()

    return KdaJitBackend()


class _Pending(NamedTuple):
    """A call that was prepared to be verified, so that running it need not prepare it again."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: ChunkCall

    def is_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == len(self.args)
            and all(map(is_, args, self.args))
            and kwargs.keys() == self.kwargs.keys()
            and all(value is self.kwargs[name] for name, value in kwargs.items())
        )


class _Thread(threading.local):
    call: _Pending | None = None


_pending = _Thread()
