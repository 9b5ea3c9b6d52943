"""Inputs in any form, in Triton: `kda_prepare_forms` makes of them what `kda_recurrence` reads."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kda_jit.backends.base import LaunchRecord, Query, record_launch
from kda_jit.backends.triton import (
    CHUNK,
    Config,
    TritonBackend,
    _ColdCaptureGuard,
    _scratch,
    config_for,
    strides,
)

if TYPE_CHECKING:
    from kda_jit.chunk.forms import Forms
    from kda_jit.contract import KdaProblem
    from kda_jit.workspace import Workspace


@lru_cache(maxsize=64)
def config_of_forms(K: int, V: int, dtype: torch.dtype, bounded: bool) -> Config:
    """As for a prefill, but with fp32 between the kernels unless all that lies there is `bounded`.

    Keys of length 1 with betas up to 2 keep it below 2. Longer keys, or betas from elsewhere, have
    no bound that fp16 could rely on. The products keep the precision of the inputs.
    """
    config = config_for(K, V, dtype)
    if bounded:
        return config
    return config_for(K, V, torch.float32)._replace(precision=config.precision)


class TritonForms:
    """See the module."""

    name = "triton"

    def __init__(self, forms: Forms) -> None:
        self.forms = forms

    def rejects(self, query: Query) -> list[str]:
        """What the prefill's Triton backend rejects."""
        return TritonBackend().rejects(query)

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        """Writes out and final states."""
        from kda_jit.triton_kernels.forms import kda_prepare_forms
        from kda_jit.triton_kernels.prefill import kda_recurrence

        p, f = problem, self.forms
        config = config_of_forms(p.K, p.V, p.q.dtype, f.normalize and f.sigmoid)
        slots = p.T // CHUNK + p.N if p.is_varlen else p.B * -(-p.T // CHUNK)
        stages, totals = _scratch(slots * p.HV, config, p.device, workspace)
        with _ColdCaptureGuard(p.device, "chunk_kda"):
            kda_prepare_forms[(slots * p.HV,)](
                p.q, p.k, p.g, p.beta, p.A_log, p.dt_bias, p.cu_seqlens, stages, totals,
                0.0 if f.lower_bound is None else f.lower_bound, f.beta_scale,
                p.T, p.N, p.HV, p.HV // p.H, p.N.bit_length(),
                *strides(p.q), *strides(p.k), *strides(p.g), *strides(p.beta),
                K=p.K, BK=config.BK, NORMALIZE=f.normalize, LOG_GATE=f.gate == "log",
                BOUNDED=f.gate == "bounded", NARROW=f.narrow, SIGMOID=f.sigmoid,
                num_warps=config.prepare_warps, num_stages=1,
            )  # fmt: skip
            kda_recurrence[(p.N * p.HV * -(-p.V // config.BV),)](
                stages, totals, p.v, p.out, p.initial_state, p.final_state, None, p.cu_seqlens,
                None, None, None, p.scale, p.T, p.N, p.HV, p.N, 0, *strides(p.v), *strides(p.out),
                0 if p.initial_state is None else p.initial_state.stride(0),
                p.final_state.stride(0), 0,
                K=p.K, V=p.V, BK=config.BK, BV=config.BV, PRECISION=config.precision,
                num_warps=config.recurrence_warps, num_stages=config.recurrence_stages,
            )  # fmt: skip
        record_launch(LaunchRecord(self.name, ("kda_prepare_forms", "kda_recurrence")))
