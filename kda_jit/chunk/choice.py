"""Which backend runs a call: the resolver's order, less what the forms of the inputs rule out."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from kda_jit.backends.base import Backend, Query, device_capability
from kda_jit.chunk.by_torch import TorchForms
from kda_jit.chunk.by_triton import TritonForms
from kda_jit.chunk.forms import Forms
from kda_jit.contract import LOWEST_BOUND, KdaProblem
from kda_jit.errors import NoBackendError
from kda_jit.resolver import ORDER, asked_backend, rejections

#: What runs inputs that are no plain prefill. The last accepts everything.
_RUNNERS: dict[str, Callable[[Forms], Backend]] = {"triton": TritonForms, "torch": TorchForms}


def forms_runner(p: KdaProblem, forms: Forms, backend: str) -> Backend:
    """For forms that are not `raw`. Raises NoBackendError, with every reason, as a prefill does."""
    device = p.device
    query = Query(
        K=p.K,
        V=p.V,
        dtype=p.q.dtype,
        # Only the softplus has no bound; of the rest `why_not` speaks in the caller's words.
        lower_bound=None if forms.gate == "softplus" else LOWEST_BOUND,
        device=device,
        capability=device_capability(device),
        g_dtype=p.g.dtype,
        beta_dtype=p.beta.dtype,
        misaligned=p.misaligned,
        far_tokens=p.layout.far_tokens,
    )
    name, source = asked_backend(backend)
    return _runner(query, forms, name, source)


@lru_cache(maxsize=1024)
def _runner(query: Query, forms: Forms, name: str, source: str) -> Backend:
    for candidate in ORDER if name == "auto" else (name,):
        reasons = why_not(candidate, query, forms)
        if not reasons:
            return _RUNNERS[candidate](forms)
        if candidate == name:
            raise NoBackendError(
                f"{source}: expected a call that {name!r} can run, got: {'; '.join(reasons)}. "
                'backend="auto" takes the next one that can.'
            )
    raise AssertionError("the last backend of ORDER accepts everything")


def why_not(name: str, query: Query, forms: Forms) -> list[str]:
    """Every reason why the backend cannot run inputs in these forms; [] if it can."""
    reasons = [] if name in _RUNNERS else forms.not_raw()
    return [*reasons, *rejections(name, query)]
