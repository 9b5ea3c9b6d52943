"""Which backend runs a call: the first in ``ORDER`` that does not say why it cannot.

Asking is cheap: what a backend answered is remembered per query, and a backend's module is imported
when it is first asked. Nothing here looks at shapes beyond the head size, so one answer serves a
whole layer.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

import torch

from kda_jit import settings
from kda_jit.backends.base import Backend, Query, device_capability
from kda_jit.contract.checks import FLOATS, check_lower_bound
from kda_jit.errors import BackendNameError, InputError, InputTypeError, NoBackendError

#: Names in the order in which "auto" tries them. The last accepts everything.
ORDER = ("cuda", "triton", "torch")
#: Other names of the same backends.
ALIASES = {"flashkda": "cuda"}


class Resolution(NamedTuple):
    """The backend that runs, and why each of the others does not."""

    backend: str
    reasons: dict[str, tuple[str, ...]]


def resolve_backend(
    backend: str = "auto",
    *,
    head_dim: int,
    dtype: torch.dtype,
    lower_bound: float | None,
    device: torch.device | str,
    value_head_dim: int | None = None,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    capability: tuple[int, int] | None = None,
) -> Resolution:
    """Which backend :func:`kda_jit.prefill` takes for calls of this kind.

    backend         "auto", "cuda" (alias "flashkda"), "triton" or "torch". For "auto", the
                    environment variable KDA_JIT_BACKEND decides where it is set.
    head_dim        K, and V unless value_head_dim says otherwise
    dtype           of q, k, v, and of g and beta unless g_dtype, beta_dtype say otherwise
    lower_bound     of the gate; None: unbounded
    device          of the tensors; "cuda" is the current one
    capability      (major, minor) to assume instead of the device's own, for a GPU elsewhere

    Raises BackendNameError for an unknown name; NoBackendError, listing every unmet condition, when
    the backend asked for by name cannot run.
    """
    if lower_bound is not None:
        lower_bound = check_lower_bound(lower_bound)
    for name, size in (("head_dim", head_dim), ("value_head_dim", value_head_dim)):
        if size is not None and (type(size) is not int or size < 1):
            raise InputError(f"{name}: expected an int of at least 1, got {size!r}.")
    for name, kind in (("dtype", dtype), ("g_dtype", g_dtype), ("beta_dtype", beta_dtype)):
        if kind not in (*FLOATS, None):
            raise InputTypeError(f"{name}: expected one of {FLOATS}, got {kind!r}.")
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        current = torch.cuda.current_device() if torch.cuda.is_available() else 0
        place = torch.device("cuda", current)
    query = Query(
        K=head_dim,
        V=head_dim if value_head_dim is None else value_head_dim,
        dtype=dtype,
        lower_bound=lower_bound,
        device=place,
        capability=capability or device_capability(place),
        g_dtype=g_dtype,
        beta_dtype=beta_dtype,
    )
    return resolve(query, backend)


def resolve(query: Query, backend: str = "auto", argument: str = "backend") -> Resolution:
    """The same for a query that is ready; `argument` is what errors call `backend`."""
    name, source = asked_backend(backend, argument)
    if name == "auto":
        return _first_that_can(query)
    reasons = rejections(name, query)
    if reasons:
        raise NoBackendError(
            f"{source}: expected a call that {name!r} can run, got: {'; '.join(reasons)}. "
            'backend="auto" takes the next one that can.'
        )
    asked: tuple[str, ...] = (f"{source} asks for {name}",)
    return Resolution(name, {other: asked for other in ORDER if other != name})


def asked_backend(backend: str, argument: str = "backend") -> tuple[str, str]:
    """(a name in ``ORDER`` or "auto", where it was asked for). An explicit argument wins."""
    if not isinstance(backend, str):
        kind = type(backend).__name__
        raise InputTypeError(f"{argument}: expected a str, got {kind} {backend!r}.")
    return _parse(backend, argument, settings.backend() if backend == "auto" else "")


@lru_cache(maxsize=64)
def _parse(backend: str, argument: str, variable: str) -> tuple[str, str]:
    asked, source = backend, f"{argument}={backend!r}"
    if backend == "auto" and variable != "auto":
        asked, source = variable, f"{settings.BACKEND.name}={variable}"
    name = ALIASES.get(asked, asked)
    if name != "auto" and name not in ORDER:
        valid = ["auto", *ORDER, *ALIASES]
        close = get_close_matches(asked, valid, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise BackendNameError(
            f"{source.partition('=')[0]}: expected one of {', '.join(valid)}, got {asked!r}.{hint}"
        )
    return name, source


@lru_cache(maxsize=1024)
def rejections(name: str, query: Query) -> tuple[str, ...]:
    """Why the backend cannot serve the query; () if it can."""
    return tuple(get_backend(name).rejects(query))


def explain(query: Query) -> dict[str, tuple[str, ...]]:
    """Every backend's reasons, in ``ORDER``; () for one that can."""
    return {name: rejections(name, query) for name in ORDER}


@lru_cache(maxsize=len(ORDER))
def get_backend(name: str) -> Backend:
    """The one instance of a backend; ``name`` is one of ``ORDER``."""
    module = import_module(f"kda_jit.backends.{name}")
    backend: Backend = getattr(module, f"{name.capitalize()}Backend")()
    return backend


@lru_cache(maxsize=1024)
def _first_that_can(query: Query) -> Resolution:
    reasons: dict[str, tuple[str, ...]] = {}
    chosen = None
    for name in ORDER:
        if chosen is not None:
            reasons[name] = (f"{chosen} comes first",)
            continue
        why_not = rejections(name, query)
        if why_not:
            reasons[name] = why_not
        else:
            chosen = name
    assert chosen is not None, "the last backend of ORDER accepts everything"
    return Resolution(chosen, reasons)
