"""Decode and verification in Triton: one kernel, one configuration per head size, no scratch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from .base import LaunchRecord, record_launch
from .triton import _ColdCaptureGuard, strides

if TYPE_CHECKING:
    from ..contract.recurrent import RecurrentProblem


#: Sequences along the second axis of the grid, which may have 65,535 blocks; then along the third.
GRID_N = 1 << 15
#: Programs that are few: an H200 runs 2,112 or 3,168 at once.
FEW = 8192
#: What was compiled and loaded, with its twin for few programs or for many.
_ready: WeakSet[Any] = WeakSet()


class Config(NamedTuple):
    """What is compiled in for a head of K channels. One warp, so that no sum crosses warps.

    BK  K padded to a power of two
    BV  channels of V per program: 32 elements of the state a thread, 64 for the widest heads
    """

    BK: int
    BV: int


@lru_cache(maxsize=64)
def config_for(K: int) -> Config:
    BK = max(16, 1 << (K - 1).bit_length())
    return Config(BK, min(32, max(8, 1024 // BK)))


def run(problem: RecurrentProblem) -> None:
    """Writes ``out`` and the slots of the pool. Ends with ``record_launch``.

    For what `TritonBackend.rejects` lets pass; the problem's device is current.
    """
    from ..triton_kernels.recurrent import kda_recurrent

    p = problem
    config = config_for(p.K)
    accepted = p.num_accepted_tokens
    grid = p.HV * -(-p.V // config.BV), min(p.N, GRID_N), -(-p.N // GRID_N)
    few = p.HV * -(-p.V // config.BV) * p.N < FEW

    def launch(grid: tuple[int, int, int], N: int, few: bool) -> Any:
        return kda_recurrent[grid](
            p.q, p.k, p.v, p.g, p.beta, p.A_log, p.dt_bias, p.out, p.state_pool,
            p.state_indices, accepted, p.has_initial_state, p.cu_seqlens,
            0.0 if p.lower_bound is None else p.lower_bound,
            p.scale, N, p.T, p.HV // p.H, p.state_pool.shape[0], p.columns, p.null_index,
            int(p.write_state), int(p.per_token),
            p.state_indices.stride(0), p.state_indices.stride(1) if p.per_token else 0,
            0 if accepted is None else accepted.stride(0),
            *strides(p.q), *strides(p.k), *strides(p.v), *strides(p.g), *strides(p.beta),
            *strides(p.out), p.state_pool.stride(0),
            K=p.K, V=p.V, BK=config.BK, BV=config.BV, GRID_N=GRID_N,
            BOUNDED=p.lower_bound is not None, FEW=few, num_warps=1,
        )  # fmt: skip

    with _ColdCaptureGuard(p.device, "recurrent"):
        kernel = launch(grid, p.N, few)
        # Triton's interpreter has no kernels. A graph of more or fewer sequences may be captured
        # after this call, so its kernel is made ready too, by a program that finds no sequence.
        if kernel is not None and kernel not in _ready:
            _ready.update((kernel, launch((1, 1, 1), 0, not few)))
    record_launch(LaunchRecord("triton", ("kda_recurrent",)))
