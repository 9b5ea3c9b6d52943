"""The layer on a GPU: the serving machine on each backend, graphs, streams, and large offsets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

import kda_jit
from kda_jit import KDACore, StepMetadata, WorkspaceError, WorkspaceLanes
from kda_jit.pack import Group, PackInputs, pack, scatter
from kda_jit.testing.runner import why_not
from kda_jit.testing.serving import GARBAGE, Engine, Work
from tests.test_layer_machine import MEMORY, Serving, poisoned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
NAN = float("nan")
BACKENDS = ("cuda", "triton")
HEADS: dict[str, Any] = {"num_heads": 2, "head_dim": 128, "num_value_heads": 4}


def need(backend: str) -> None:
    reason = why_not(backend, CUDA)
    if reason is not None:
        pytest.skip(reason)


def build(backend: str, **changes: Any) -> KDACore:
    need(backend)
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 12, "num_spec": 3}
    arguments = HEADS | sizes | {"lower_bound": -5.0, "device": CUDA, "backend": backend}
    core = KDACore(**(arguments | changes))
    assert core.backend == backend
    return core


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- the machine ---------------------------------------------------------------------------------


@lru_cache
def machine_core(
    backend: str, num_spec: int, decodes_apart: bool, state_dtype: torch.dtype
) -> KDACore:
    sizes = {"max_num_batched_tokens": 256, "max_num_seqs": 12, "num_spec": num_spec}
    specs = KDACore.specs(**HEADS, **sizes)
    return build(
        backend,
        num_spec=num_spec,
        decodes_apart=decodes_apart,
        state_dtype=state_dtype,
        workspace=WorkspaceLanes(specs, CUDA, 2, poisoned),
    )


class ServingOnGpu(Serving):
    backend: str

    @classmethod
    def build(cls, num_spec: int, decodes_apart: bool, state_dtype: torch.dtype) -> KDACore:
        return machine_core(cls.backend, num_spec, decodes_apart, state_dtype)

    @staticmethod
    def limit(state_dtype: torch.dtype) -> float:
        return 2e-2 if state_dtype == torch.float32 else 4e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_plays_against_the_layer(backend: str) -> None:
    need(backend)
    profile = settings.get_profile("kda")
    machine = type(f"ServingOn{backend}", (ServingOnGpu,), {"backend": backend})
    case = machine.TestCase
    case.settings = settings(profile, stateful_step_count=40)
    case("runTest").runTest()
    MEMORY.clear()
    machine_core.cache_clear()


# -- what runs, without the host waiting for it --------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_of_every_kind_of_step(backend: str) -> None:
    """Which backend ran what, and that a mixed step has one pack and one scatter."""
    engine = Engine(build(backend, decodes_apart=True), slots=32)
    a, b, c = engine.add(40), engine.add(30), engine.add(20)

    def ran(*work: Work, **options: Any) -> list[tuple[str, tuple[str, ...]]]:
        return [(x.backend, x.kernels) for x in engine.step(work, **options).launches]

    ((name, prefill),) = ran(Work(a, "prefill", 40, checkpoint=32), padding=3)
    assert name == backend
    recurrent = ("triton", ("kda_recurrent",))
    assert ran(Work(a, "decode"), idle_sequences=3, idle_rows=3) == [recurrent]
    assert ran(Work(a, "speculative", 4, 2), idle_sequences=3, idle_rows=3) == [recurrent]
    assert ran(Work(a, "decode"), Work(b, "prefill", 30)) == [(backend, prefill), recurrent]
    mixed = ran(Work(a, "decode"), Work(b, "speculative", 3, 1), Work(c, "prefill", 20), padding=5)
    assert mixed == [
        ("triton", ("kda_pack",)), (backend, prefill), recurrent, recurrent,
        ("triton", ("kda_scatter",)),
    ]  # fmt: skip


class Buffers:
    """Static buffers of a mixed step: a decode, two prefills and three verifications at most."""

    TOKENS = 64

    def __init__(self, core: KDACore) -> None:
        torch.manual_seed(0)
        T, H, HV, D = self.TOKENS, core.num_heads, core.num_value_heads, core.head_dim

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=CUDA).to(core.dtype)

        def index(*shape: int) -> Tensor:
            return torch.full(shape, GARBAGE, dtype=torch.int32, device=CUDA)

        self.core = core
        self.inputs = PackInputs(
            random(1, T, H, D), random(1, T, H, D), random(1, T, HV, D), random(1, T, HV, D),
            random(1, T, HV),
        )  # fmt: skip
        self.A_log, self.dt_bias = torch.randn(HV, device=CUDA), torch.randn(HV, D, device=CUDA)
        self.pool = torch.randn(20, HV, D, D, device=CUDA, dtype=core.state_dtype)
        self.out = torch.full_like(self.inputs.v, NAN)
        self.metadata = StepMetadata(
            T, num_decodes=1, num_prefills=2, num_spec_decodes=3,
            non_spec_query_start_loc=index(4), non_spec_state_indices=index(3),
            has_initial_state=torch.zeros(3, dtype=torch.bool, device=CUDA),
            spec_query_start_loc=index(4), spec_state_indices=index(3, 4),
            num_accepted_tokens=index(3), non_spec_token_indx=index(T), spec_token_indx=index(12),
        )  # fmt: skip

    def fill(self, prefills: tuple[int, int], drafts: tuple[int, int, int], seed: int) -> None:
        """Other lengths, slots, tokens and inputs in the same memory."""
        m, generator = self.metadata, torch.Generator().manual_seed(seed)
        lengths = [1, *prefills]
        order = torch.randperm(sum(lengths) + sum(drafts), generator=generator).int()
        slots = torch.randperm(20, generator=generator).int()

        def write(target: Tensor | None, values: Any) -> None:
            assert target is not None
            target.fill_(GARBAGE)
            values = torch.as_tensor(values, dtype=torch.int32)
            target[: len(values)] = values.to(CUDA)

        def ends(group: Any) -> Tensor:
            return torch.tensor([0, *group]).cumsum(0)

        write(m.non_spec_query_start_loc, ends(lengths))
        write(m.non_spec_state_indices, slots[:3])
        assert m.has_initial_state is not None
        m.has_initial_state.copy_(torch.rand(3, generator=generator) < 0.5)
        write(m.spec_query_start_loc, ends(drafts))
        write(m.spec_state_indices, slots[3:15].view(3, 4))
        write(m.num_accepted_tokens, torch.randint(0, 5, (3,), generator=generator))
        # Tokens of a group keep their order among themselves.
        write(m.non_spec_token_indx, order[: sum(lengths)].sort().values)
        write(m.spec_token_indx, order[sum(lengths) :].sort().values)
        for x in self.inputs:
            x.copy_(torch.randn(x.shape, generator=generator))

    def run(self) -> kda_jit.StepRecord:
        return self.core.forward(
            *self.inputs, self.A_log, self.dt_bias, self.pool, self.metadata, self.out
        )


STEPS = [((20, 30), (4, 4, 4)), ((0, 0), (1, 0, 0)), ((1, 17), (3, 0, 2)), ((50, 1), (4, 4, 4))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_a_mixed_step_replays_with_other_counts(backend: str) -> None:
    buffers = Buffers(build(backend))
    buffers.fill(*STEPS[0], seed=0)
    assert buffers.run().route == "scatter"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.run()
    for seed, (prefills, drafts) in enumerate(STEPS):
        buffers.fill(prefills, drafts, seed)
        start = buffers.pool.clone()
        buffers.out.fill_(NAN)
        buffers.run()
        want_out, want_pool = buffers.out.clone(), buffers.pool.clone()
        buffers.pool.copy_(start)
        buffers.out.fill_(NAN)
        graph.replay()
        assert same_bits(buffers.out, want_out)
        assert same_bits(buffers.pool, want_pool)
        live = 1 + sum(prefills) + sum(drafts)
        tokens = buffers.metadata.non_spec_token_indx, buffers.metadata.spec_token_indx
        rows = torch.cat([tokens[0][: live - sum(drafts)], tokens[1][: sum(drafts)]]).long()
        assert buffers.out[:, rows].isfinite().all()
        others = torch.ones(Buffers.TOKENS, dtype=torch.bool, device=CUDA)
        others[rows] = False
        assert buffers.out[:, others].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_host_never_waits(backend: str) -> None:
    buffers = Buffers(build(backend, decodes_apart=True))
    buffers.fill(*STEPS[0], seed=1)
    buffers.run()
    with no_waiting():
        buffers.run()
    m = buffers.metadata
    one = torch.tensor([0, 1, 9, 64], dtype=torch.int32, device=CUDA)
    steps = (
        StepMetadata(64, num_prefills=3, non_spec_query_start_loc=one,
                     non_spec_state_indices=m.non_spec_state_indices,
                     has_initial_state=m.has_initial_state),
        StepMetadata(64, num_decodes=1, num_prefills=2, non_spec_query_start_loc=one,
                     non_spec_state_indices=m.non_spec_state_indices,
                     has_initial_state=m.has_initial_state),
        StepMetadata(1, num_decodes=1, non_spec_query_start_loc=one,
                     non_spec_state_indices=m.non_spec_state_indices),
        StepMetadata(12, num_spec_decodes=3, spec_query_start_loc=m.spec_query_start_loc,
                     spec_state_indices=m.spec_state_indices,
                     num_accepted_tokens=m.num_accepted_tokens),
    )  # fmt: skip
    for metadata in steps:
        buffers.metadata = metadata
        buffers.run()
        with no_waiting():
            buffers.run()


def test_lengths_do_not_recompile() -> None:
    triton = pytest.importorskip("triton")
    buffers = Buffers(build("triton"))
    buffers.fill(*STEPS[0], seed=0)
    buffers.run()
    compiled: list[str] = []
    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw["repr"])
    try:
        for T in (63, 48, 33, 16):
            buffers.inputs = PackInputs(*(x[:, :T] for x in buffers.inputs))
            buffers.out = buffers.out[:, :T]
            buffers.fill((T // 2 - 8, 1), (2, 1, 1), seed=T)
            buffers.metadata = StepMetadata(
                T, **{n: x for n, x in vars(buffers.metadata).items()
                      if n not in ("num_actual_tokens", "memo")}
            )  # fmt: skip
            buffers.run()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert not compiled


# -- streams, captures ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_lanes_on_two_streams(backend: str) -> None:
    core = build(backend, lanes=2)
    pairs = []
    for lane in (0, 1):
        buffers = Buffers(core)
        buffers.fill(*STEPS[lane], seed=lane)
        start = buffers.pool.clone()
        pairs.append((buffers, start, torch.cuda.Stream()))
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for _ in range(10):
        for lane, (buffers, start, stream) in enumerate(pairs):
            with torch.cuda.stream(stream):
                buffers.pool.copy_(start)
                core.forward(
                    *buffers.inputs, buffers.A_log, buffers.dt_bias, buffers.pool,
                    buffers.metadata, buffers.out, lane=lane,
                )  # fmt: skip
                results[lane].append(buffers.pool.clone())
    torch.cuda.synchronize()
    for found in results:
        assert all(same_bits(x, found[0]) for x in found[1:])
    with pytest.raises(WorkspaceError, match="expected calls on stream"):
        pairs[0][0].run()


COLD = """
import sys, torch, kda_jit
sys.path.insert(0, ".")
from tests.gpu.test_layer_gpu import Buffers, STEPS, build
buffers = Buffers(build("triton"))
buffers.fill(*STEPS[0], seed=0)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        buffers.run()
except kda_jit.CaptureError as error:
    print("refused:", error)
"""


def test_a_cold_capture_is_refused_with_words() -> None:
    need("triton")
    ran = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=250)
    assert "refused: pack: expected the Triton kernels" in ran.stdout, ran.stderr


# -- offsets beyond 32 bits ----------------------------------------------------------------------


def test_tokens_beyond_32_bit_offsets() -> None:
    """The last tokens of inputs with more than 2^31 elements, and an output as large."""
    need("triton")
    T, H = 131_200, 128
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip(f"needs 24 GiB of GPU memory, {free >> 30} are free")
    big = torch.zeros(1, T, H, 128, dtype=torch.bfloat16, device=CUDA)
    assert big.numel() > 2**31
    last = torch.tensor([T - 1, 5, T - 7], device=CUDA)
    big[0, last] = torch.randn(3, H, 128, device=CUDA).bfloat16()
    beta = torch.randn(1, T, H, device=CUDA).bfloat16()
    x = PackInputs(big, big, big, big, beta)
    ends = torch.tensor([0, 2], device=CUDA), torch.tensor([0, 1], device=CUDA)
    groups = Group(last[:2], ends[0], 2), Group(last[2:], ends[1], 1)
    packed = PackInputs(*(y.new_empty(1, 3, *y.shape[2:]) for y in x))
    pack(x, packed, *groups, triton=True)
    for y, z in zip(x, packed, strict=True):
        assert torch.equal(z[0], y[0, last])
    out = torch.zeros_like(big)
    scatter(packed.v, out, *groups, triton=True)
    assert torch.equal(out[0, last], packed.v[0])
    assert int(out.count_nonzero()) == int(packed.v.count_nonzero())
