"""The KDA layer of vLLM 0.33, its code as it is, serves a small engine on our operators."""

import ast
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kda_jit
from kda_jit.errors import IntegrationError
from kda_jit.integrations import vllm
from kda_jit.layer import StepRecord
from kda_jit.step import Limits
from kda_jit.testing.serving import Engine, Work

SOURCE = Path("vllm/models/glm5next/common/kda.py")
SOURCES = Path(__file__).resolve().parent.parent / ".peers" / "vllm_src"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H, D, SPEC = 2, 128, 3
MOST_TOKENS, MOST_SEQUENCES = 256, 8


@pytest.fixture
def operators():
    try:
        vllm.register()
    except IntegrationError as error:
        pytest.skip(str(error))
    yield torch.ops._flashkda_C
    vllm.unregister()


def methods(scope):
    """`_forward` and `_flashkda_prefill` of the layer's class, in a scope of ours."""
    path = SOURCES / SOURCE
    if not path.is_file():
        pytest.skip(f"needs vLLM's sources: unzip its {SOURCE} into .peers/vllm_src")
    tree = ast.parse("from __future__ import annotations\n" + path.read_text())
    wanted = ("_forward", "_flashkda_prefill")
    found = [n for n in ast.walk(tree) if getattr(n, "name", "") in wanted]
    assert len(found) == len(wanted)
    exec(compile(ast.Module([tree.body[0], *found], []), str(path), "exec"), scope)
    return SimpleNamespace(**{name: scope[name] for name in wanted})


def gather_initial_states(states, indices, has_initial_state):
    return torch.where(has_initial_state[:, None, None, None], states[indices.long()], 0.0)


def scatter_states(states, new, indices):
    states[indices.long()] = new


def fused_recurrent_kda(
    q, k, v, g, beta, initial_state, use_qk_l2norm_in_kernel, cu_seqlens, ssm_state_indices,
    sigmoid_beta, a_log, g_bias, compute_gate, lower_bound, num_accepted_tokens=None, out=None,
):  # fmt: skip
    """What the layer asks of vLLM's kernel, by ours."""
    assert use_qk_l2norm_in_kernel and sigmoid_beta and compute_gate
    out = kda_jit.recurrent(
        q, k, v, g, beta, A_log=a_log.view(-1), dt_bias=g_bias, lower_bound=lower_bound,
        state_pool=initial_state, state_indices=ssm_state_indices, cu_seqlens=cu_seqlens,
        num_accepted_tokens=num_accepted_tokens, out=out,
    )  # fmt: skip
    return out, initial_state


class Layer:
    """vLLM's layer, with the interface of a KDACore. Its convolutions let everything through."""

    num_heads = num_value_heads = H
    head_dim = value_head_dim = D
    lower_bound, scale = -5.0, D**-0.5
    dtype = g_dtype = beta_dtype = torch.bfloat16
    state_dtype, device = torch.float32, DEVICE
    limits = Limits(MOST_TOKENS, MOST_SEQUENCES, SPEC)

    def __init__(self, operators):
        self.prefills = []  # what ran for each
        self._metadata = None
        states = (MOST_SEQUENCES, H, D, D)
        specs = [
            (states, torch.float32),
            (states, torch.float32),
            ((operators.get_workspace_size(MOST_TOKENS, H, MOST_SEQUENCES),), torch.uint8),
            ((1, MOST_TOKENS, H, D), torch.bfloat16),
        ]
        lent = [torch.full(shape, 0xFF if dtype is torch.uint8 else torch.nan, dtype=dtype,
                           device=DEVICE) for shape, dtype in specs]  # fmt: skip
        same = lambda x, *_, **__: x  # noqa: E731
        code = methods({
            "torch": torch, "eager_break_during_capture": lambda f: f,
            "GDNAttentionMetadata": SimpleNamespace,
            "get_forward_context": lambda: SimpleNamespace(attn_metadata={"layer": self._metadata}),
            "current_workspace_manager": lambda: SimpleNamespace(
                get_simultaneous=lambda *asked: lent if list(asked) == specs else None
            ),
            "causal_conv1d_fn": same, "causal_conv1d_update": same,
            "gather_initial_states": gather_initial_states, "scatter_states": scatter_states,
            "fused_recurrent_kda": fused_recurrent_kda,
        })  # fmt: skip
        self._forward = code._forward
        self.layer = SimpleNamespace(
            prefix="layer", kda_safe_gate=True, kda_lower_bound=self.lower_bound,
            kda_prefill_backend="flashkda", _flashkda_buffer_specs=specs,
            _conv_state_dim_first=True, _merged_conv_weight=torch.empty(0),
            q_conv1d=SimpleNamespace(bias=None), local_projection_size=H * D, local_num_heads=H,
            head_dim=D, _checkpoint_exporter=SimpleNamespace(export=self._export),
        )  # fmt: skip

        def prefill(**given):
            before = kda_jit.last_launch()
            result = code._flashkda_prefill(self.layer, **given)
            assert kda_jit.last_launch() is not before
            self.prefills.append(kda_jit.last_launch().backend)
            return result

        self.layer._flashkda_prefill = prefill

    def _export(self, checkpoint, *, recurrent_checkpoint, **_):
        asked = checkpoint.checkpoint_offsets > 0
        checkpoint.into[asked] = recurrent_checkpoint[asked]

    def forward(self, q, k, v, g, beta, A_log, dt_bias, pool, step, out, *, lane=0):
        N, S = step.num_non_spec, step.num_spec_decodes

        def first(x, count):
            return None if x is None else x[:count]

        ends = first(step.non_spec_query_start_loc, N + 1)
        spec_ends = first(step.spec_query_start_loc, S + 1)
        mixed = N > 0 and S > 0
        checkpoint = None
        if step.checkpoint_offsets is not None:
            offsets = step.checkpoint_offsets[:N]
            checkpoint = SimpleNamespace(checkpoint_offsets=offsets, into=step.checkpoint_state)
        has = step.has_initial_state
        if has is None:
            has = torch.ones(N, dtype=torch.bool, device=DEVICE)
        self._metadata = SimpleNamespace(
            has_initial_state=has,
            non_spec_query_start_loc=ends, spec_query_start_loc=spec_ends,
            non_spec_state_indices_tensor=first(step.non_spec_state_indices, N),
            num_actual_tokens=step.num_actual_tokens,
            spec_sequence_masks=torch.ones(S, dtype=torch.bool) if S else None,
            spec_state_indices_tensor=first(step.spec_state_indices, S),
            non_spec_token_indx=step.non_spec_token_indx[: ends[-1]].long() if mixed else None,
            spec_token_indx=step.spec_token_indx[: spec_ends[-1]].long() if mixed else None,
            num_accepted_tokens=first(step.num_accepted_tokens, S), num_spec_decodes=S,
            num_prefills=step.num_prefills, num_decodes=step.num_decodes, checkpoint=checkpoint,
        )  # fmt: skip
        self.layer.A_log, self.layer.dt_bias = A_log.view(1, 1, -1, 1), dt_bias
        self.layer.kv_cache = (torch.empty(0), pool)
        projected = torch.cat([x.flatten(2) for x in (q, k, v)], -1)[0]
        self._forward(self.layer, qkv_proj_states=projected, g1=g, beta=beta, core_attn_out=out)
        return StepRecord("scatter" if mixed else "direct" if N or S else "none", ())


KINDS = [("prefill", "speculative"), ("prefill", "decode", "speculative")]


def work_of(rng, request, kinds):
    """What it does in the next step, one of `kinds`; sometimes nothing."""
    kind = "prefill" if request.pending else rng.choice(["speculative", "decode"])
    if kind not in kinds or rng.random() < 0.1:
        return None
    if kind == "prefill":
        tokens = rng.randint(1, min(request.pending, 48))
        return Work(request, kind, tokens, checkpoint=16 * rng.randint(0, tokens // 16))
    if kind == "speculative":
        return Work(request, kind, 1 + SPEC, rng.randint(1, 1 + SPEC))
    return Work(request, kind)


@pytest.mark.parametrize("seed", range(3))
def test_an_engine_is_served_by_vllms_own_layer(operators, seed):
    """Prefills, decodes, verifications, all at once, and checkpoints to resume from."""
    rng = random.Random(seed)
    layer = Layer(operators)
    engine = Engine(layer, slots=4 * (1 + SPEC), seed=seed)
    requests = [engine.add(rng.randint(1, 120)) for _ in range(3)]
    seen, checkpoints = set(), 0
    for _ in range(60):
        if engine.has_room and rng.random() < 0.3:
            old = [r for r in requests if r.checkpoints]
            if old and rng.random() < 0.5:
                requests.append(engine.resume(rng.choice(old), 0, rng.randint(1, 40)))
            else:
                requests.append(engine.add(rng.randint(1, 120)))
        elif len(requests) > 3:
            engine.preempt(requests.pop(0))
        kinds = rng.choice([*KINDS, ("speculative",), ("decode",)])
        work = [w for w in (work_of(rng, r, kinds) for r in requests) if w is not None]
        if not work:
            continue  # vLLM makes no such step
        engine.step(work, padding=rng.choice([0, 3]))
        seen.add(tuple(sorted({w.kind for w in work})))
        checkpoints += any(w.checkpoint for w in work)
    assert {("decode",), ("speculative",), ("prefill",), ("prefill", "speculative")} <= seen
    assert checkpoints > 3
    assert set(layer.prefills) == {"cuda" if DEVICE.type == "cuda" else "torch"}
