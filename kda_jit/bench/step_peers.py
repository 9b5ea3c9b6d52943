"""Steps as vLLM 0.33 runs them, if its sources are here: the recurrent kernel, and a whole layer.

vLLM has two recurrent kernels for KDA, one per model; both compute gate and beta from raw logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_jit.errors import InputError
from kda_jit.pack import PackInputs

from . import vllm_sources
from .cases import HEAD_DIM
from .peers import FlashKDA
from .steps import StepInputs, split
from .subject import Call

#: Model -> module of its recurrent kernel.
RECURRENT = {
    "kimi_k3": "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent",
    "glm5next": "vllm.models.glm5next.nvidia.ops.third_party.kda.kernels",
}
_STATES = "vllm.model_executor.layers.mamba.ops"


class VllmRecurrent:
    """vLLM's fused_recurrent_kda over a step of decodes, or one of verifications."""

    suite = "decode"

    def __init__(self, model: str, sources: Path | None) -> None:
        """model: a key of RECURRENT; sources: the folder of vllm_sources, None: none is given."""
        self.name = f"vllm_{model}"
        self._sources = sources
        self._module = RECURRENT[model]
        self._bind = _kimi_k3 if model == "kimi_k3" else _glm5next

    def activate(self) -> None:
        pass

    @property
    def version(self) -> str:
        assert self._sources is not None
        return vllm_sources.version(self._sources, self._module)

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        return _why_not(self._sources, self._module, lambda: self._function)

    @cached_property
    def _function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        assert self._sources is not None
        found: Any = vllm_sources.load(self._sources, self._module).fused_recurrent_kda
        return found

    def run(
        self, x: StepInputs, tokens: PackInputs, pool: Tensor, spec: bool, out: Tensor | None = None
    ) -> Tensor:
        """The speculative or the other sequences of a step, whose rows are `tokens`."""
        return self._function(**self._bind(x, tokens, pool, spec), out=out)[0]

    def bind(self, inputs: StepInputs) -> Call:
        pool, out, tokens = inputs.pool.clone(), inputs.fresh_out(), inputs.tokens
        spec = inputs.metadata.num_spec_decodes > 0
        options = self._bind(inputs, tokens, pool, spec)

        @torch.inference_mode()
        def call() -> tuple[Tensor, Tensor]:
            self._function(**options, out=out)
            return out, pool

        return call


def _sequences(x: StepInputs, pool: Tensor, spec: bool) -> dict[str, Any]:
    """What both kernels call alike."""
    m = x.metadata
    return {
        "initial_state": pool,
        "cu_seqlens": m.spec_query_start_loc if spec else m.non_spec_query_start_loc,
        "ssm_state_indices": m.spec_state_indices if spec else m.non_spec_state_indices,
        "num_accepted_tokens": m.num_accepted_tokens if spec else None,
        "lower_bound": x.lower_bound,
    }


def _kimi_k3(x: StepInputs, tokens: PackInputs, pool: Tensor, spec: bool) -> dict[str, Any]:
    q, k, v, g, beta = tokens
    names = {"q": q, "k": k, "v": v, "raw_g": g, "raw_beta": beta}
    return names | {"A_log": x.A_log, "dt_bias": x.dt_bias} | _sequences(x, pool, spec)


def _glm5next(x: StepInputs, tokens: PackInputs, pool: Tensor, spec: bool) -> dict[str, Any]:
    gates = {"sigmoid_beta": True, "compute_gate": True, "a_log": x.A_log, "g_bias": x.dt_bias}
    return tokens._asdict() | gates | _sequences(x, pool, spec)


class VllmLayer:
    """The layer that KDACore stands in for: FlashKDA or vLLM's recurrent kernel, and what lies
    around them.

    A step with prefills gathers their states, makes q, k and v dense, and scatters the states. One
    with verifications and others gathers projection, gate and beta of both groups (six gathers) and
    copies both outputs to their tokens (two index_copy_).
    """

    suite = "layer"
    name = "vllm_layer"

    def __init__(self, flashkda: FlashKDA, sources: Path | None) -> None:
        self._flashkda, self._sources = flashkda, sources
        self._recurrent = VllmRecurrent("glm5next", sources)

    def activate(self) -> None:
        pass

    @property
    def version(self) -> str:
        return f"{self._flashkda.version}; {self._recurrent.version}"

    def why_not(self) -> str | None:
        """Why it cannot run here; None if it can."""
        reason = self._flashkda.why_not() or self._recurrent.why_not()
        for name in ("gather_initial_states", "scatter_states"):
            reason = reason or _why_not(
                self._sources, f"{_STATES}.{name}", lambda: (self._gather, self._scatter)
            )
        return reason

    @cached_property
    def _gather(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        return self._states("gather_initial_states")

    @cached_property
    def _scatter(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        return self._states("scatter_states")

    def _states(self, name: str) -> Any:
        assert self._sources is not None
        return getattr(vllm_sources.load(self._sources, f"{_STATES}.{name}"), name)

    def bind(self, inputs: StepInputs) -> Call:
        x, m = inputs, inputs.metadata
        pool, out, heads = x.pool.clone(), x.fresh_out(), x.beta.shape[2]
        prefill = self._bind_prefill(x, pool) if m.num_prefills else None
        projected = (x.qkv, x.g, x.beta)

        def rows(some: Sequence[Tensor]) -> PackInputs:
            qkv, g, beta = some
            return PackInputs(*split(qkv, heads), g, beta)

        def others(tokens: PackInputs, target: Tensor | None) -> Tensor:
            if prefill is not None:
                return prefill(tokens, target)
            return self._recurrent.run(x, tokens, pool, False, target)

        @torch.inference_mode()
        def call() -> tuple[Tensor, Tensor]:
            spec, rest = m.spec_token_indx, m.non_spec_token_indx
            if spec is None or rest is None:
                if m.num_spec_decodes:
                    self._recurrent.run(x, rows(projected), pool, True, out)
                else:
                    others(rows(projected), out)
                return out, pool
            drafts = rows([y.index_select(1, spec) for y in projected])
            tokens = rows([y.index_select(1, rest) for y in projected])
            verified = self._recurrent.run(x, drafts, pool, True)
            found = others(tokens, None)
            out.index_copy_(1, spec, verified)
            out.index_copy_(1, rest, found)
            return out, pool

        return call

    def _bind_prefill(
        self, x: StepInputs, pool: Tensor
    ) -> Callable[[PackInputs, Tensor | None], Tensor]:
        """FlashKDA over the non-speculative sequences; without a target, into planned memory."""
        m, gather, scatter = x.metadata, self._gather, self._scatter
        slots, has, ends = (
            m.non_spec_state_indices, m.has_initial_state, m.non_spec_query_start_loc,
        )  # fmt: skip
        assert slots is not None and has is not None and ends is not None
        T, H, N = m.num_actual_tokens, x.beta.shape[2], len(slots)
        rows = T if m.non_spec_token_indx is None else len(m.non_spec_token_indx)
        planned = torch.empty_like(x.g[:, :rows])
        final = torch.empty(N, *pool.shape[1:], device=x.device)
        workspace = self._flashkda.workspace(T, H, N, x.device)
        fwd, scale = self._flashkda.ops.fwd, HEAD_DIM**-0.5

        def prefill(tokens: PackInputs, target: Tensor | None) -> Tensor:
            initial = gather(pool, slots, has)
            q, k, v, g = (y.contiguous() for y in tokens[:4])
            result = planned if target is None else target
            fwd(
                q, k, v, g, tokens.beta, scale, result, workspace, x.A_log, x.dt_bias,
                x.lower_bound, initial, final, ends, None, None,
            )  # fmt: skip
            scatter(pool, final, slots)
            return result

        return prefill


StepPeer = VllmRecurrent | VllmLayer
#: What `--peer` takes for steps.
STEP_PEERS = (*(f"vllm_{model}" for model in RECURRENT), VllmLayer.name)


def find_step_peers(
    asked: Sequence[str] | None, flashkda: FlashKDA, sources: Path | None
) -> list[StepPeer]:
    """The peers to measure against: those asked for, which must run, else those that are here."""
    every: list[StepPeer] = [VllmRecurrent(model, sources) for model in RECURRENT]
    every.append(VllmLayer(flashkda, sources))
    if asked is None:
        return [peer for peer in every if peer.why_not() is None]
    found = [peer for peer in every if peer.name in asked]
    for peer in found:
        if reason := peer.why_not():
            raise InputError(f"peer: expected one that runs here, got {peer.name!r}: {reason}.")
    return found


def _why_not(sources: Path | None, module: str, use: Callable[[], object]) -> str | None:
    if sources is None:
        return "no --vllm-sources are given"
    if not (path := vllm_sources.path_of(sources, module)).is_file():
        return f"there is no {path}"
    try:
        use()
    except Exception as error:  # it is their code: anything may happen
        return f"{path} does not load: {type(error).__name__}: {error}"
    return None
