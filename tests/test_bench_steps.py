"""Benchmarks of decode and of the layer, without a GPU: steps, their gate, lineups, vLLM's sources.

No time is real. With TRITON_INTERPRET=1 the subjects are the Triton kernels, else torch.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kda_jit.backends.base import LaunchRecord
from kda_jit.bench import gate, lineup, registry, report, rows, step_peers, timer, vllm_sources
from kda_jit.bench.lineup import Contest, Lineup
from kda_jit.bench.peers import FlashKDA
from kda_jit.bench.registry import DECODE, LAYER
from kda_jit.bench.step_gate import StepGate
from kda_jit.bench.step_subjects import Layer, Recurrent, StepCall
from kda_jit.bench.steps import StepCase, split
from kda_jit.bench.subject import Ours
from kda_jit.bench.timer import HostTiming, Profile, Timing
from kda_jit.errors import InputError
from kda_jit.layer import StepRecord

CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND = "triton" if INTERPRETED else "torch"
DECODES = StepCase("decodes", 2, "decode", decodes=3)
VERIFIED = StepCase("verified", 1, "decode", verified=2, drafts=2)
PREFILLS = StepCase("prefills", 1, prefills=(20, 17))
BESIDE = StepCase("beside", 1, decodes=2, prefills=(18, 3))
MIXED = StepCase("mixed", 1, decodes=1, prefills=(17, 5), verified=2, drafts=1)
STEPS = (DECODES, VERIFIED, PREFILLS, BESIDE, MIXED)


# --- cases ------------------------------------------------------------------------------------


def test_steps_are_those_that_are_asked_about():
    assert [case.name for case in DECODE] == [
        *(f"decode_{n}_h16" for n in (1, 16, 64, 256, 1024)),
        *(f"verify_64_k{k}_h16" for k in (1, 3, 7)),
    ]
    names = [case.name for case in (*DECODE, *LAYER)]
    assert len(set(names)) == len(names)
    assert {case.heads for case in LAYER} == {12, 16}
    for case in LAYER:
        assert case.name.endswith(f"_h{case.heads}")
    (case,) = [case for case in LAYER if case.name == "step_900_and_1x4096_h16"]
    assert (case.decodes, case.prefills, case.tokens, case.sequences) == (900, (4096,), 4996, 901)
    decodes, prefills = case.parts
    assert (decodes.decodes, decodes.prefills) == (900, ())
    assert (prefills.decodes, prefills.prefills) == (0, (4096,))
    assert [bool(case.parts) for case in STEPS] == [False, False, False, True, False]


def test_select_takes_steps_by_suite():
    assert registry.select(["decode"]) == (list(DECODE), [])
    assert registry.select(["decode", "layer"], ["*900*"])[0] == [LAYER[8], LAYER[8 + 15 - 1]]


def test_floor_counts_what_a_step_holds():
    x = BESIDE.inputs(CPU)
    rows = x.qkv.nbytes + 2 * x.g.nbytes + x.beta.nbytes  # out is like g
    states = 2 * 2 + (1 + 2)  # a decode reads and writes, a fresh prompt writes
    assert BESIDE.floor_bytes == rows + states * x.pool[0].nbytes
    x = VERIFIED.inputs(CPU)
    rows = x.qkv.nbytes + 2 * x.g.nbytes + x.beta.nbytes
    assert VERIFIED.floor_bytes == rows + 2 * (1 + 3) * x.pool[0].nbytes


def test_inputs_hold_the_step_and_leave_slot_0_alone():
    x = MIXED.inputs(CPU)
    m = x.metadata
    assert (m.num_actual_tokens, m.num_decodes, m.num_prefills, m.num_spec_decodes) == (27, 1, 2, 2)
    assert m.non_spec_query_start_loc.tolist() == [0, 1, 18, 23]
    assert m.spec_query_start_loc.tolist() == [0, 2, 4]
    assert m.has_initial_state.tolist() == [True, False, True]
    slots = m.non_spec_state_indices.tolist() + m.spec_state_indices.flatten().tolist()
    assert sorted(slots) == list(range(1, 8)) == list(range(1, x.pool.shape[0]))
    tokens = m.non_spec_token_indx.tolist() + m.spec_token_indx.tolist()
    assert sorted(tokens) == list(range(27))
    assert tokens != list(range(27)), "the groups lie in each other"
    assert all(1 <= count <= 2 for count in m.num_accepted_tokens.tolist())
    q, k, v = split(x.qkv, 1)
    assert torch.equal(torch.cat([q, k, v], -1).flatten(2), x.qkv)
    assert q.stride(1) == 3 * 128
    again = MIXED.inputs(CPU)
    assert torch.equal(again.qkv, x.qkv)
    assert again.metadata.spec_token_indx.tolist() == m.spec_token_indx.tolist()


# --- gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [DECODES, VERIFIED], ids=lambda case: case.name)
def test_the_recurrent_kernel_passes(case):
    verdict = StepGate(case.inputs(CPU)).check(Recurrent(BACKEND))
    assert verdict.record.backend == BACKEND
    assert 0 < verdict.out_error < 5e-3
    assert verdict.state_error < 1e-5


@pytest.mark.parametrize("apart", [None, True, False])
@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.name)
def test_a_layer_passes(case, apart):
    subject = Layer(BACKEND, apart=apart)
    verdict = StepGate(case.inputs(CPU)).check(subject)
    facts = subject.facts(verdict.record)
    assert facts["backend"] == BACKEND
    assert facts["route"] == ("scatter" if case is MIXED else "direct")
    assert ("recurrent" in facts["ran"]) == bool(
        case.verified or not case.prefills or (case.decodes and apart is not False)
    )
    assert verdict.out_error < 1e-2


class SpoiledCall(StepCall):
    """Runs, then changes out and pool."""

    def __call__(self):
        out, pool = super().__call__()
        self.change(out, pool, self._inputs)
        return out, pool


@dataclass(frozen=True)
class Spoiled(Layer):
    change: object = None

    def bind(self, inputs):
        call = super().bind(inputs)
        call.__class__, call.change = SpoiledCall, self.change
        return call


def one_row(out, pool, x):
    out[0, int(x.metadata.spec_token_indx[0])] *= 1.5


def other_column(out, pool, x):
    columns = x.metadata.spec_state_indices[0].long()
    pool[columns] = pool[columns.flip(0)]


def unwritten(out, pool, x):
    out[0, -1] = torch.nan


def neighbour(out, pool, x):
    pool[0] += 1


@pytest.mark.parametrize(
    "change, words",
    [
        (one_row, "torch, speculative: out: relative RMS error"),
        (other_column, "torch, speculative: final_state: relative RMS error"),
        (unwritten, r"torch, (non-)?speculative: out: relative RMS error"),
        (neighbour, "torch: wrote to slots of the pool that are nobody's"),
    ],
)
def test_gate_refuses_a_wrong_step(change, words):
    with pytest.raises(gate.WrongResult, match=words):
        StepGate(MIXED.inputs(CPU)).check(Spoiled("torch", change=change))


PREPARE = LaunchRecord("cuda", ("kda_prepare", "kda_recurrence"), "portable", "sm_90a")


def helper(name, backend="triton"):
    return LaunchRecord(backend, (f"kda_{name}",))


MIXED_RAN = (helper("pack"), PREPARE, helper("recurrent"), helper("scatter"))
IN_TORCH = helper("recurrent", "torch")


@pytest.mark.parametrize(
    "subject, ran, words",
    [
        (Layer("cuda"), StepRecord("direct", (PREPARE,)), None),
        (Layer("cuda"), StepRecord("direct", (PREPARE, helper("recurrent"))), None),
        (Layer("cuda"), StepRecord("scatter", MIXED_RAN), None),
        (Layer("cuda"), None, "cuda launched nothing"),
        (Layer("triton"), StepRecord("direct", (PREPARE,)), "asked for triton, cuda ran kda_prep"),
        (Layer("cuda"), StepRecord("direct", (IN_TORCH,)), "asked for triton, torch ran kda_recur"),
        (
            Layer("cuda", "hopper"),
            StepRecord("direct", (PREPARE,)),
            "asked for schedule hopper, portable ran",
        ),
        (
            Layer("cuda"),
            StepRecord("scatter", (PREPARE,)),
            "cuda: a step by the route scatter ran prepare, recurrence",
        ),
        (Recurrent(), helper("recurrent"), None),
        (Recurrent(), IN_TORCH, "asked for triton, LaunchRecord(backend='torch'"),
    ],
)
def test_record_must_be_what_was_asked(subject, ran, words):
    found = subject.misnamed(ran)
    assert found is None if words is None else found.startswith(words)


# --- rows -------------------------------------------------------------------------------------


class FakeTimer:
    """A call takes 10 us, over a part 4, and a peer's 30; the profiler sees what layers record."""

    def cold(self, contenders):
        return {c.name: Timing(self.us(c.name), 9.0, 12.0, 20) for c in contenders}

    def replayed(self, contenders):
        return {}

    def host(self, contender, gpu_us):
        return HostTiming(3.0, 11.0)

    measure = timer.Timer.measure

    def profile(self, contender):
        contender.call()
        record = getattr(contender.call, "record", None)
        kernels = record.kernels if record else ()
        return Profile(dict.fromkeys(kernels, 4.0), len(kernels))

    @staticmethod
    def us(name):
        return 4.0 if "its " in name else 30.0 if name.startswith("vllm") else 10.0


class FakePeer:
    name, suite, version = "vllm_layer", "layer", "1"

    def activate(self):
        pass

    def bind(self, inputs):
        return Layer("torch").bind(inputs)


def test_a_row_compares_a_layer_with_others_and_with_its_parts():
    class Other(Layer):
        name = "other"

    ours, other = Layer("torch"), Other("torch")
    row = rows.time_case(
        BESIDE, Lineup([ours, other], [FakePeer()], [other]), FakeTimer(), 4e12, CPU
    )
    assert row["case"] == "beside"
    assert (row["decodes"], row["prefills"], row["verified"]) == (2, [18, 3], 0)
    assert (row["us"], row["of_parts"]) == (10.0, 10.0 / 8.0)
    assert (row["host_us"], row["launches"]) == (3.0, 2)
    assert (row["other_us"], row["vs_other"]) == (10.0, 1.0)
    assert (row["vllm_layer_us"], row["vs_vllm_layer"]) == (30.0, 3.0)
    assert list(row["timings"]) == [
        "torch", "other", "vllm_layer", "torch, its decodes", "torch, its prefills",
        "other, its decodes", "other, its prefills",
    ]  # fmt: skip
    assert row["timings"]["other"]["of_parts"] == 1.25
    assert row["timings"]["torch"]["launches"] == 2
    assert row["timings"]["torch"]["route"] == "direct"
    run_file = {"rows": [row], "summary": report.summary([row])}
    table = report.speed_table(run_file)
    assert table[0][-8:] == [
        "host us", "launches", "of parts", "other us", "vs other", "vLLM layer us",
        "vs vLLM layer", "max error",
    ]  # fmt: skip
    assert table[1][-8:-1] == ["3.0", "2", "1.25x", "10.0", "1.00x", "30.0", "3.00x"]
    assert run_file["summary"]["vs_vllm_layer"]["least"] == 3.0


def test_a_layer_that_is_wrong_on_a_part_alone_has_no_time(monkeypatch):
    real = StepGate.check

    def check(self, subject, baseline=None):
        if not self.inputs.metadata.num_prefills:
            raise gate.WrongResult("wrong on decodes")
        return real(self, subject, baseline)

    monkeypatch.setattr(StepGate, "check", check)
    row = rows.time_case(BESIDE, Lineup([Layer("torch")]), FakeTimer(), 4e12, CPU)
    assert row["failed"] == "wrong on decodes"
    assert "us" not in row


# --- who runs what ----------------------------------------------------------------------------


def names(subjects):
    return [subject.name for subject in subjects]


def test_lineups():
    class Peer:
        name, suite, version = "p", "decode", "1"

    contest = Contest([Ours("cuda"), Ours("cuda", "portable")], [], [Peer(), FakePeer()])
    assert contest.versions == {"p": "1", "vllm_layer": "1"}
    found = contest.lineup(DECODES)
    assert (names(found.ours), names(found.peers), found.beside) == (["triton"], ["p"], ())
    found = contest.lineup(PREFILLS)
    assert names(found.ours) == ["cuda", "cuda/portable", "triton"]
    assert (names(found.peers), names(found.beside)) == (["vllm_layer"], ["triton"])
    assert names(contest.lineup(BESIDE).ours)[3:] == [
        "cuda, decodes apart",
        "cuda, decodes chunked",
    ]
    assert names(Contest([Ours("torch")], []).lineup(DECODES).ours) == ["torch"]
    assert names(Contest([Ours("torch")], []).lineup(PREFILLS).ours) == ["torch"]
    alone = Contest([Ours("triton")], []).lineup(PREFILLS)
    assert (names(alone.ours), list(alone.beside)) == (["triton"], [])
    assert names(contest.lineup(registry.SPEED[0]).ours) == ["cuda", "cuda/portable"]


def test_peers_of_steps_say_why_they_are_not_here(monkeypatch, tmp_path):
    monkeypatch.delenv("KDA_JIT_FLASHKDA_SO", raising=False)
    assert lineup.find_all_peers(None, None, None) == ([], [])
    with pytest.raises(InputError, match=r"peer: expected one of flashkda, fla, .* got 'flash'"):
        lineup.find_all_peers(["flash"], None, None)
    with pytest.raises(InputError, match=r"peer: .* got 'vllm_kimi_k3': no --vllm-sources"):
        lineup.find_all_peers(["vllm_kimi_k3"], None, None)
    with pytest.raises(InputError, match=r"got 'vllm_glm5next': there is no .*kernels.py"):
        lineup.find_all_peers(["vllm_glm5next"], None, tmp_path)
    with pytest.raises(InputError, match="got 'vllm_layer': KDA_JIT_FLASHKDA_SO is not set"):
        lineup.find_all_peers(["vllm_layer"], None, tmp_path)
    assert set(step_peers.STEP_PEERS) == {"vllm_kimi_k3", "vllm_glm5next", "vllm_layer"}


# --- vLLM's sources ---------------------------------------------------------------------------

# Not vLLM's code: modules of the same names that take the same names from the rest.
SOURCES = {
    step_peers.RECURRENT["kimi_k3"]: """
from vllm.platforms import current_platform
from vllm.third_party.flash_linear_attention.ops.op import exp, log
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv, next_power_of_2
assert cdiv(9, 4) == 3 and next_power_of_2(9) == 16 and exp is tl.exp
PDL = current_platform.is_arch_support_pdl()
def fused_recurrent_kda(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state,
                        cu_seqlens, ssm_state_indices, num_accepted_tokens=None, out=None):
    CALLS.append(dict(locals()))
    return RUN(q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens,
               ssm_state_indices, num_accepted_tokens, out), initial_state
""",
    step_peers.RECURRENT["glm5next"]: """
from vllm.third_party.flash_linear_attention.ops.solve_tril import solve_tril
from .fused_recurrent import token_stride
def fused_recurrent_kda(q, k, v, g, beta, initial_state, cu_seqlens, ssm_state_indices,
                        num_accepted_tokens, out, sigmoid_beta, a_log, g_bias, compute_gate,
                        lower_bound):
    assert sigmoid_beta and compute_gate
    CALLS.append(dict(locals()))
    return RUN(q, k, v, g, beta, a_log, g_bias, lower_bound, initial_state, cu_seqlens,
               ssm_state_indices, num_accepted_tokens, out), initial_state
""",
    "vllm.models.glm5next.nvidia.ops.third_party.kda.fused_recurrent": """
def token_stride(x): return x.stride(1)
""",
    f"{step_peers._STATES}.gather_initial_states": """
from vllm.triton_utils import tl, triton
def gather_initial_states(state, indices, has):
    found = state[indices.long()]
    found[~has] = 0
    return found
""",
    f"{step_peers._STATES}.scatter_states": """
from vllm.model_executor.warmup.jit_warmup import WarmupIntRange
from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec, triton_kernel_dispatcher_with_warmup)
class Kernel:
    def __getitem__(self, grid):
        assert grid == (1,)
        def run(state, src, indices, *, size):
            assert size == src.shape[0]
            state[indices.long()] = src
        return run
@triton_kernel_dispatcher_with_warmup(kernel=Kernel(), warmup_inputs=None)
def scatter_states(state, src, indices) -> DispatchSpec:
    return (1,), dict(size=src.shape[0])
""",
}


def run_as_ours(
    q, k, v, g, beta, A_log, dt_bias, lower_bound, pool, start_loc, slots, accepted, out
):
    import kda_jit

    return kda_jit.recurrent(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, state_pool=pool,
        state_indices=slots, num_accepted_tokens=accepted, cu_seqlens=start_loc, out=out,
        backend="torch",
    )  # fmt: skip


@pytest.fixture
def sources(tmp_path: Path):
    pytest.importorskip("triton", reason="vLLM's kernels are Triton's")
    for module, text in SOURCES.items():
        path = vllm_sources.path_of(tmp_path, module)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def vllm_modules():
    return {name: module for name, module in sys.modules.items() if name.startswith("vllm")}


def test_sources_load_without_vllm_and_leave_no_trace(sources, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", sys)  # as if it were installed and imported
    before = vllm_modules()
    module = vllm_sources.load(sources, step_peers.RECURRENT["kimi_k3"])
    assert module.PDL is False or torch.cuda.is_available()
    assert vllm_modules() == before
    glm = vllm_sources.load(sources, step_peers.RECURRENT["glm5next"])
    with pytest.raises(NotImplementedError, match=r"ops.solve_tril.solve_tril has no stand-in"):
        glm.solve_tril(1)
    words = vllm_sources.version(sources, step_peers.RECURRENT["kimi_k3"])
    assert words.startswith("vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent, sha")


def test_sources_that_do_not_load_are_a_reason(sources):
    path = vllm_sources.path_of(sources, step_peers.RECURRENT["kimi_k3"])
    path.write_text("from vllm.somewhere import else_")
    reason = step_peers.VllmRecurrent("kimi_k3", sources).why_not()
    assert reason == f"{path} does not load: ModuleNotFoundError: No module named 'vllm'"


@pytest.mark.parametrize("model", step_peers.RECURRENT)
@pytest.mark.parametrize("case", [DECODES, VERIFIED], ids=lambda case: case.name)
def test_vllm_kernels_get_the_step(sources, model, case):
    peer = step_peers.VllmRecurrent(model, sources)
    assert peer.why_not() is None
    calls = []
    peer._function.__globals__.update(CALLS=calls, RUN=run_as_ours)
    x = case.inputs(CPU)
    gate.check_peer(peer, x, gate.run_once(Recurrent("torch"), x)[:2])
    (call,) = calls
    assert call["q"].stride(1) == 3 * 128 * case.heads
    assert call["initial_state"] is not x.pool
    m = x.metadata
    assert call["num_accepted_tokens"] is (m.num_accepted_tokens if case.verified else None)


class FakeOps:
    """FlashKDA's operators, by the float64 recurrence."""

    @staticmethod
    def get_workspace_size(tokens, heads, sequences):
        return 16

    @staticmethod
    def fwd(
        q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, bound, initial, final, ends, *no
    ):
        from kda_jit.reference import recurrent_kda

        assert all(x.is_contiguous() for x in (q, k, v, g, out, initial, final))
        result = recurrent_kda(
            q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=bound, scale=scale,
            initial_state=initial, cu_seqlens=ends,
        )  # fmt: skip
        out.copy_(result.out)
        final.copy_(result.final_state)


SPEC_ONLY = StepCase("spec", 1, verified=2, drafts=2)
WITHOUT_PREFILLS = StepCase("decodes_and_spec", 1, decodes=2, verified=2, drafts=1)


@pytest.mark.parametrize(
    "case", [*STEPS[2:], SPEC_ONLY, WITHOUT_PREFILLS], ids=lambda case: case.name
)
def test_the_layer_of_vllm_computes_the_step(sources, monkeypatch, case):
    flashkda = FlashKDA(sources / "x.so")
    monkeypatch.setitem(flashkda.__dict__, "ops", FakeOps)
    peer = step_peers.VllmLayer(flashkda, sources)
    peer._recurrent._function.__globals__.update(CALLS=[], RUN=run_as_ours)
    x = case.inputs(CPU)
    gate.check_peer(peer, x, gate.run_once(Layer("torch"), x)[:2])
