"""Steps as this package runs them: the recurrent kernel by itself, and the whole layer.

Calls run under inference_mode, as engines do. Metadata is bound once, so that a timed call of a
layer costs what the second and every further layer of an engine's step costs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from kda_jit import KDACore, StepRecord, recurrent, settings
from kda_jit.backends.base import LaunchRecord, last_launch

from .cases import HEAD_DIM
from .steps import StepInputs
from .subject import Call, Ours

#: Roles of launches, by what their kernels are called after the first underscore.
HELPERS = ("pack", "recurrent", "scatter")


@dataclass(frozen=True)
class Recurrent:
    """`kda_jit.recurrent` over a step of decodes, or one of verifications."""

    backend: str = "triton"

    @property
    def name(self) -> str:
        return self.backend

    def activate(self) -> None:
        pass

    def bind(self, inputs: StepInputs) -> Call:
        x, m = inputs, inputs.metadata
        pool, out, tokens = x.pool.clone(), x.fresh_out(), x.tokens
        if m.num_spec_decodes:
            start_loc, slots = m.spec_query_start_loc, m.spec_state_indices
        else:
            start_loc, slots = m.non_spec_query_start_loc, m.non_spec_state_indices
        assert slots is not None

        @torch.inference_mode()
        def call() -> tuple[Tensor, Tensor]:
            recurrent(
                *tokens,
                A_log=x.A_log,
                dt_bias=x.dt_bias,
                lower_bound=x.lower_bound,
                state_pool=pool,
                state_indices=slots,
                num_accepted_tokens=m.num_accepted_tokens,
                has_initial_state=m.has_initial_state,
                cu_seqlens=start_loc,
                out=out,
                backend=self.backend,
            )
            return out, pool

        return call

    def record(self, call: Call) -> LaunchRecord | None:
        return last_launch()

    def misnamed(self, record: LaunchRecord | None) -> str | None:
        want = (self.backend, ("recurrent",))
        found = record and (record.backend, tuple(map(_role, record.kernels)))
        return None if found == want else f"asked for {self.backend}, {record} ran"

    def facts(self, record: LaunchRecord) -> dict[str, str | None]:
        return {"backend": record.backend}


class StepCall:
    """A step of a layer; `record` is what its last run launched."""

    def __init__(self, core: KDACore, inputs: StepInputs) -> None:
        self.record: StepRecord | None = None
        self._core, self._inputs, self._tokens = core, inputs, inputs.tokens
        self._pool, self._out = inputs.pool.clone(), inputs.fresh_out()

    @torch.inference_mode()
    def __call__(self) -> tuple[Tensor, Tensor]:
        x = self._inputs
        self.record = self._core.forward(
            *self._tokens, x.A_log, x.dt_bias, self._pool, x.metadata, self._out
        )
        return self._out, self._pool


@dataclass(frozen=True)
class Layer:
    """`KDACore` with a prefill backend; for "cuda" under a schedule, or "auto".

    apart  whether decodes beside prefills leave the chunked kernels; None: the layer's own policy
    """

    backend: str
    schedule: str = "auto"
    apart: bool | None = None

    @property
    def name(self) -> str:
        plain = Ours(self.backend, self.schedule).name
        if self.apart is None:
            return plain
        return f"{plain}, decodes {'apart' if self.apart else 'chunked'}"

    def activate(self) -> None:
        os.environ[settings.SCHEDULE.name] = self.schedule

    def bind(self, inputs: StepInputs) -> StepCall:
        m, slots = inputs.metadata, inputs.metadata.spec_state_indices
        core = KDACore(
            num_heads=inputs.beta.shape[2],
            head_dim=HEAD_DIM,
            lower_bound=inputs.lower_bound,
            max_num_batched_tokens=m.num_actual_tokens,
            max_num_seqs=m.num_non_spec + m.num_spec_decodes,
            num_spec=0 if slots is None else slots.shape[1] - 1,
            device=inputs.device,
            backend=self.backend,
            decodes_apart=self.apart,
        )
        return StepCall(core, inputs)

    def record(self, call: Call) -> StepRecord | None:
        return call.record if isinstance(call, StepCall) else None

    def misnamed(self, record: StepRecord | None) -> str | None:
        """Helpers run in Triton (beside "torch", in torch), everything else on the backend."""
        if record is None or not record.launches:
            return f"{self.name} launched nothing"
        helper = "torch" if self.backend == "torch" else "triton"
        for launch in record.launches:
            roles = list(map(_role, launch.kernels))
            helps = bool(roles) and all(role in HELPERS for role in roles)
            want = helper if helps else self.backend
            if launch.backend != want:
                return f"asked for {want}, {launch.backend} ran {', '.join(launch.kernels)}"
            if helps:
                continue
            reason = Ours(self.backend, self.schedule).misnamed(launch)
            if reason is not None:
                return reason
        roles = [_role(kernel) for kernel in record.kernels]
        mixed = {"pack", "scatter"}.issubset(roles)
        if mixed != (record.route == "scatter"):
            return f"{self.name}: a step by the route {record.route} ran {', '.join(roles)}"
        return None

    def facts(self, record: StepRecord) -> dict[str, str | None]:
        prefill = [x for x in record.launches if not {*map(_role, x.kernels)} & {*HELPERS}]
        found: dict[str, str | None] = {"backend": self.backend, "route": record.route}
        for launch in prefill:
            found |= {"schedule": launch.schedule, "target": launch.target}
        return found | {"ran": " ".join(record.kernels)}


def _role(kernel: str) -> str:
    """ "kda_pack", "torch_pack" -> "pack"."""
    return kernel.partition("_")[2]
