"""The Triton backend: any head size, both gates, 16-bit and fp32 inputs, on any tensor-core GPU.

It serves what the CUDA kernels do not, so it favours accuracy and few compiled variants: no
autotuning, one configuration per shape of a head, and nothing that depends on the number of tokens
or sequences is compiled in. Under ``TRITON_INTERPRET=1`` it runs CPU tensors, for tests.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import CaptureError
from .base import LaunchRecord, Query, record_launch

if TYPE_CHECKING:
    from ..contract import KdaProblem
    from ..workspace import Workspace

CHUNK = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_HEAD_DIMS = (16, 256)
_LEAST_CAPABILITY = (8, 0)


class Config(NamedTuple):
    """What is compiled in for a head of K x V channels and an input dtype.

    BK         K padded to a power of two
    BV         channels of V per recurrence program
    stage      dtype of the stages between the kernels, see `kda_prepare`
    precision  of the recurrence's products. tf32 for 16-bit inputs: its 11 bits lose less than the
               rounding of the output; fp32 inputs get three tf32 products, about 1e-6.

    The warps are those with the fewest spilled registers; the pipeline's depth is what fits 99 KB
    of shared memory, so that one table serves every GPU.
    """

    BK: int
    BV: int
    stage: torch.dtype
    precision: str
    prepare_warps: int
    recurrence_warps: int
    recurrence_stages: int

    def scratch_bytes(self, records: int) -> tuple[int, int]:
        """Bytes of the stages and of the decays of that many (chunk slot, value head) pairs."""
        elements = 3 * CHUNK * self.BK + CHUNK * CHUNK
        return records * elements * self.stage.itemsize, records * self.BK * 4


@lru_cache(maxsize=64)
def config_for(K: int, V: int, dtype: torch.dtype) -> Config:
    BK = max(16, 1 << (K - 1).bit_length())
    prepare_warps = {16: 2, 32: 2, 64: 4, 128: 4, 256: 8}[BK]
    if dtype == torch.float32:
        return Config(BK, 16, torch.float32, "tf32x3", prepare_warps, 4, 2)
    BV = 16 if V <= 16 or BK == 256 else 32
    warps = 1 if V <= 16 and BK < 256 else 2
    return Config(BK, BV, torch.float16, "tf32", prepare_warps, warps, 3)


class TritonBackend:
    """`kda_prepare`, then `kda_recurrence`; see `triton_kernels/prefill.py`."""

    name = "triton"

    def rejects(self, query: Query) -> list[str]:
        reasons = []
        low, high = _HEAD_DIMS
        for label, size in (("K", query.K), ("V", query.V)):
            if not low <= size <= high:
                reasons.append(f"needs {label} from {low} to {high}, got {label} = {size}")
        if query.dtype not in _DTYPES:
            reasons.append(f"needs bfloat16, float16 or float32, got {query.dtype}")
        missing, interpreted = _triton_state()
        if missing:
            reasons.append(f"needs the package triton: {missing}")
        if query.device.type == "cuda":
            if interpreted:
                reasons.append("needs a compiling Triton on a GPU, got TRITON_INTERPRET=1")
            if query.capability is None:
                reasons.append(
                    f"needs a CUDA device, got {query.device}, which torch cannot use here"
                )
            elif query.capability < _LEAST_CAPABILITY:
                found = ".".join(map(str, query.capability))
                reasons.append(f"needs compute capability 8.0 or later, got {found}")
        elif not interpreted and not missing:
            reasons.append(f"needs a CUDA device (or TRITON_INTERPRET=1), got {query.device}")
        return reasons

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        from ..triton_kernels.prefill import kda_prepare, kda_recurrence

        p = problem
        config = config_for(p.K, p.V, p.q.dtype)
        slots = p.T // CHUNK + p.N if p.is_varlen else p.B * -(-p.T // CHUNK)
        stages, totals = _scratch(slots * p.HV, config, p.device, workspace)
        q_batch, q_token = strides(p.q)
        k_batch, k_token = strides(p.k)
        g_batch, g_token = strides(p.g)
        beta_batch, beta_token = strides(p.beta)
        v_batch, v_token = strides(p.v)
        out_batch, out_token = strides(p.out)
        with _ColdCaptureGuard(p.device):
            kda_prepare[(slots * p.HV,)](
                p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, p.cu_seqlens, stages, totals,
                0.0 if p.lower_bound is None else p.lower_bound,
                p.T, p.N, p.HV, p.HV // p.H, p.N.bit_length(),
                q_batch, q_token, k_batch, k_token, g_batch, g_token, beta_batch, beta_token,
                K=p.K, BK=config.BK, BOUNDED=p.lower_bound is not None,
                num_warps=config.prepare_warps, num_stages=1,
            )  # fmt: skip
            kda_recurrence[(p.N * p.HV * -(-p.V // config.BV),)](
                stages, totals, p.v, p.out, p.initial_state, p.final_state, p.checkpoint_state,
                p.cu_seqlens, p.state_indices, p.has_initial_state, p.checkpoint_offsets,
                p.scale, p.T, p.N, p.HV, p.final_state.shape[0],
                0 if p.state_indices is None else p.state_indices.stride(0),
                v_batch, v_token, out_batch, out_token,
                0 if p.initial_state is None else p.initial_state.stride(0),
                p.final_state.stride(0),
                0 if p.checkpoint_state is None else p.checkpoint_state.stride(0),
                K=p.K, V=p.V, BK=config.BK, BV=config.BV, PRECISION=config.precision,
                num_warps=config.recurrence_warps, num_stages=config.recurrence_stages,
            )  # fmt: skip
        record_launch(LaunchRecord(self.name, ("kda_prepare", "kda_recurrence")))


def strides(x: Tensor) -> tuple[int, int]:
    """Elements from row to row of the batch and from token to token.

    The batch stride of a single row is 0: it would only make Triton compile again for its size.
    """
    return (x.stride(0) if x.shape[0] > 1 else 0), x.stride(1)


def _scratch(
    records: int, config: Config, device: torch.device, workspace: Workspace | None
) -> tuple[Tensor, Tensor]:
    """The stages and decays of `kda_prepare` for that many records, uninitialised."""
    stage_bytes, total_bytes = config.scratch_bytes(records)
    nbytes = stage_bytes + total_bytes
    if workspace is None:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    else:
        memory = workspace.get("prefill_stages", nbytes, caller="triton prefill")
    return memory[:stage_bytes].view(config.stage), memory[stage_bytes:nbytes].view(torch.float32)


@lru_cache(maxsize=1)
def _triton_state() -> tuple[str, bool]:
    """(why Triton cannot be imported or "", whether it interprets instead of compiling).

    Triton reads TRITON_INTERPRET when a kernel is defined, so the answer holds for the process.
    """
    try:
        from triton.runtime.interpreter import InterpretedFunction

        from ..triton_kernels.prefill import kda_prepare
    except (ImportError, OSError) as error:
        return str(error) or type(error).__name__, False
    return "", isinstance(kda_prepare, InterpretedFunction)


class _ColdCaptureGuard:
    """Refuses a compilation while the current stream is being captured into a CUDA graph.

    Loading a new kernel there would end the capture with a bare CUDA error. Only captures pay for
    it: Triton's cache hook is set for the duration, and acts for this thread alone.
    """

    def __init__(self, device: torch.device, function: str = "prefill") -> None:
        """function  the public one that was called"""
        self._function = function
        self._capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._knobs: Any = None
        self._previous: Any = None

    def __enter__(self) -> None:
        if not self._capturing:
            return
        from triton import knobs

        owner = threading.get_ident()
        self._knobs = knobs.runtime
        self._previous = previous = knobs.runtime.jit_cache_hook

        def refuse(*args: Any, **kwargs: Any) -> bool | None:
            if threading.get_ident() == owner:
                _refuse_cold_capture(self._function)
            return None if previous is None else previous(*args, **kwargs)

        knobs.runtime.jit_cache_hook = refuse

    def __exit__(self, *error: object) -> None:
        if self._capturing:
            self._knobs.jit_cache_hook = self._previous


def _refuse_cold_capture(function: str) -> NoReturn:
    warmup = "kda_jit.warmup(...), or " if function == "prefill" else ""
    raise CaptureError(
        f"{function}: expected the Triton kernels of this call to be compiled before a CUDA graph "
        f"is captured, got a first call inside the capture. Call {warmup}{function} once with "
        "tensors of the same dtypes, strides and options, before the capture."
    )
