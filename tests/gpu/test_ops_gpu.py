"""The operators on a GPU: compiled and captured calls have the eager bits of the same backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.library import opcheck

import kda_jit
from kda_jit import workspace
from kda_jit.backends.base import LaunchRecord, record_launch
from kda_jit.testing import Case, Inputs, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONE_GPU = torch.cuda.device_count() < 2
NAN = float("nan")
LENGTHS = ((100, 33, 16), (1, 64, 200), (17, 0, 300))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def cases(heads: int = 2) -> list[Case]:
    """The same shapes but for T: three sequences each."""
    return [Case(seed=300 + i, lengths=x, heads=heads) for i, x in enumerate(LENGTHS)]


def same_shapes(heads: int = 2, count: int = 5) -> list[Case]:
    """One total of tokens, so that one CUDA graph serves all of them."""
    cuts = ((100, 33, 16), (16, 33, 100), (149, 0, 0), (0, 148, 1), (50, 50, 49))
    return [Case(seed=310 + i, lengths=x, heads=heads) for i, x in enumerate(cuts[:count])]


def call(way: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The public function with this way's backend, as a user would write it."""

    def prefill(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: Any) -> Any:
        return kda_jit.prefill(q, k, v, g, beta, **rest, backend=way.backend)

    return prefill


def assert_ran(way: Any, x: Inputs) -> None:
    B, T, HV, _ = x.v.shape
    launch = kda_jit.last_launch()
    assert launch is not None
    assert (launch.backend, launch.schedule) == (way.backend, way.schedule_for(B * T, x.N, HV))


@contextmanager
def replayed() -> Iterator[None]:
    """Nothing of ours runs on the host within: what happens is the replay of a graph."""
    marker = LaunchRecord("replayed")
    record_launch(marker)
    yield
    assert kda_jit.last_launch() is marker, "the call ran on the host, not from a CUDA graph"
    assert counters["inductor"]["cudagraph_skips"] == 0


# -- one operator --------------------------------------------------------------------------------


def test_opcheck(way: Any) -> None:
    x, _ = way.exact(Case(seed=320, lengths=(100, 33), heads=2))
    rest = x.kwargs | {"backend": way.backend}
    found = opcheck(torch.ops.kda_jit.prefill.default, x.args, rest)
    assert set(found.values()) == {"SUCCESS"}
    pool = rest.pop("initial_state").clone()
    buffers = {
        "output": torch.zeros_like(x.v),
        "state": pool,
        "state_indices": torch.tensor([1, 0], device="cuda"),
        "has_initial_state": torch.tensor([True, False], device="cuda"),
        "checkpoint_state": torch.zeros_like(pool),
        "checkpoint_offsets": torch.tensor([64, 0], dtype=torch.int32, device="cuda"),
    }
    found = opcheck(torch.ops.kda_jit.prefill.inplace, x.args, rest | buffers)
    assert set(found.values()) == {"SUCCESS"}


def test_opcheck_recurrent() -> None:
    pytest.importorskip("triton")
    step = Step(Case(seed=321, lengths=(2, 3, 1), heads=2), columns=3, fresh=(1,))
    arguments = step.arguments("cuda")
    arguments["state_pool"].nan_to_num_()
    tokens = tuple(arguments.pop(name) for name in ("q", "k", "v", "g", "beta"))
    arguments["backend"] = "triton"
    found = opcheck(torch.ops.kda_jit.recurrent.default, tokens, arguments)
    arguments["read_only_pool"] = arguments.pop("state_pool")
    arguments["output"] = torch.zeros_like(tokens[2])
    found |= opcheck(torch.ops.kda_jit.recurrent.inplace, tokens, arguments)
    assert set(found.values()) == {"SUCCESS"}


# -- compiled ------------------------------------------------------------------------------------


def test_compiled_calls_have_the_eager_bits(way: Any) -> None:
    compiled = torch.compile(call(way), fullgraph=True, dynamic=True)
    for case in cases():
        x, exact = way.exact(case)
        want = way.prefill(x)
        out, state = compiled(*x.args, **x.kwargs)
        assert_ran(way, x)
        assert torch.equal(out, want[0])
        assert torch.equal(state, want[1])
        way.check(x, exact, out, state)


def test_reduce_overhead_replays_a_graph_with_the_eager_bits(way: Any) -> None:
    """Scratch that outlived a call in the graph's pool would make the second call fail."""
    workspace.release_default_workspaces()  # the first call of all is the one that warms up
    compiled = torch.compile(call(way), fullgraph=True, mode="reduce-overhead")
    inputs = [way.exact(case)[0] for case in same_shapes()]
    want = [tuple(y.clone() for y in way.prefill(x)) for x in inputs]
    for i, x in enumerate(inputs * 2):
        if i < 2:  # warms up, then records
            out, state = compiled(*x.args, **x.kwargs)
        else:
            with replayed():
                out, state = compiled(*x.args, **x.kwargs)
        exact = want[i % len(inputs)]
        assert torch.equal(out, exact[0]), f"call {i}"
        assert torch.equal(state, exact[1]), f"call {i}"


def test_reduce_overhead_over_a_pool_in_place(way: Any) -> None:
    """A pool at an address that torch was told is static: no copy of it, and no skipped graph."""
    inputs = [way.exact(case)[0] for case in same_shapes()]
    H, D = inputs[0].v.shape[2], inputs[0].v.shape[3]
    torch.manual_seed(3)
    start = torch.randn(7, H, D, D, device="cuda")
    pools = [start.clone(), start.clone()]
    torch._dynamo.mark_static_address(pools[1])
    generator = torch.Generator().manual_seed(4)

    def step(pool: Tensor, slots: Tensor, q: Tensor, *rest: Tensor, **more: Any) -> Tensor:
        arguments = more | {"initial_state": pool, "state_indices": slots}
        return kda_jit.prefill(q, *rest, **arguments, backend=way.backend)[0]

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for i, x in enumerate(inputs * 2):
        slots = torch.randperm(7, generator=generator)[:3].to("cuda")
        more = x.kwargs | {"initial_state": None}
        want = step(pools[0], slots, *x.args, **more).clone()
        if i < 2:
            out = compiled(pools[1], slots, *x.args, **more)
        else:
            with replayed():
                out = compiled(pools[1], slots, *x.args, **more)
        assert torch.equal(out, want), f"call {i}"
        assert torch.equal(pools[1], pools[0]), f"call {i}"


def test_reduce_overhead_decodes_in_place() -> None:
    pytest.importorskip("triton")
    N, H, D = 4, 2, 128
    torch.manual_seed(5)
    start = torch.randn(9, H, D, D, device="cuda")
    pools = [start.clone(), start.clone()]
    torch._dynamo.mark_static_address(pools[1])
    gates = {"A_log": torch.randn(H, device="cuda"), "dt_bias": torch.randn(H, D, device="cuda")}

    def step(pool: Tensor, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor):
        return kda_jit.recurrent(
            q, k, v, g, beta, **gates, state_pool=pool, state_indices=slots, backend="triton"
        )

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for i in range(6):
        tokens = torch.randn(4, N, H, D, dtype=torch.bfloat16, device="cuda").unbind()
        beta = torch.randn(N, H, dtype=torch.bfloat16, device="cuda")
        slots = torch.tensor([8, 1, -1, 3 + i % 2], dtype=torch.int32, device="cuda")
        want = step(pools[0], slots, *tokens, beta).clone()
        if i < 2:
            out = compiled(pools[1], slots, *tokens, beta)
        else:
            with replayed():
                out = compiled(pools[1], slots, *tokens, beta)
        assert torch.equal(out, want), f"step {i}"
        assert torch.equal(pools[1], pools[0]), f"step {i}"


def test_inductor_writes_the_callers_buffers_where_they_are(way: Any) -> None:
    x, _ = way.exact(Case(seed=330, lengths=(100, 33), heads=2))
    B, T, H, D = x.v.shape
    wide = torch.full((B, T, 2 * H, D), NAN, dtype=x.v.dtype, device="cuda")
    state = x.initial_state.clone()

    def step(q: Tensor, wide: Tensor, state: Tensor, *rest: Tensor, **more: Any) -> Tensor:
        more |= {"initial_state": state, "final_state": state, "out": wide[:, :, :H]}
        out, _ = kda_jit.prefill(q, *rest, **more, backend=way.backend)
        return out.float().abs().amax()

    torch.cuda.synchronize()
    want, want_state = way.prefill(x)
    most = torch.compile(step, fullgraph=True)(x.q, wide, state, *x.args[1:], **x.kwargs)
    assert torch.equal(wide[:, :, :H], want)
    assert wide[:, :, H:].isnan().all()
    assert torch.equal(state, want_state)
    assert torch.equal(most, want.float().abs().amax())


# -- streams, captures, devices ------------------------------------------------------------------


def test_a_compiled_call_runs_on_the_stream_of_the_call(way: Any) -> None:
    """Compiled on the default stream; called on another, whose inputs arrive late."""
    x, _ = way.exact(Case(seed=331, lengths=(100, 33), heads=2))
    want, want_state = way.prefill(x)
    late = x.replace(q=torch.zeros_like(x.q))
    compiled = torch.compile(call(way), fullgraph=True)
    compiled(*late.args, **late.kwargs)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        compiled(*late.args, **late.kwargs)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(int(100 * 1.7e6))
        late.q.copy_(x.q)
        out, state = compiled(*late.args, **late.kwargs)
        copies = out.clone(), state.clone()
        busy = not side.query()
    idle = torch.cuda.default_stream().query()
    side.synchronize()
    assert busy, "the call waited for the GPU, or ran elsewhere"
    assert idle, "the call used the default stream"
    assert torch.equal(copies[0], want)
    assert torch.equal(copies[1], want_state)


def test_an_operator_in_a_captured_graph_follows_its_inputs(way: Any) -> None:
    inputs = [way.exact(case)[0] for case in same_shapes(count=3)]
    names = ("q", "k", "v", "g", "beta", "cu_seqlens", "initial_state", "A_log", "dt_bias")
    fixed = inputs[0].replace(**{name: getattr(inputs[0], name).clone() for name in names})
    way.prefill(fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = torch.ops.kda_jit.prefill(*fixed.args, **fixed.kwargs, backend=way.backend)
    others = [torch.full((1 << 20,), NAN, device="cuda") for _ in range(8)]
    for x in inputs:
        for name in names:
            getattr(fixed, name).copy_(getattr(x, name))
        graph.replay()
        want, want_state = way.prefill(x)
        assert torch.equal(out, want)
        assert torch.equal(state, want_state)
    assert all(y.isnan().all() for y in others), "the graph wrote into memory of others"


def test_scratch_of_an_operator_goes_back_to_torch(way: Any) -> None:
    x, _ = way.exact(Case(seed=332, lengths=(300, 212), heads=2))
    arguments = x.kwargs | {"backend": way.backend}
    del arguments["initial_state"]
    buffers = {"output": torch.empty_like(x.v), "state": x.initial_state.clone()}
    torch.ops.kda_jit.prefill(*x.args, **arguments, **buffers)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        torch.ops.kda_jit.prefill(*x.args, **arguments, **buffers)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(ONE_GPU, reason="needs two CUDA devices")
def test_a_compiled_call_runs_where_its_tensors_are(way: Any) -> None:
    x, _ = way.exact(Case(seed=333, lengths=(100, 33), heads=2))
    want = way.prefill(x)
    there = {n: y.to("cuda:1") if isinstance(y, Tensor) else y for n, y in x.kwargs.items()}
    compiled = torch.compile(call(way), fullgraph=True)
    out, state = compiled(*(y.to("cuda:1") for y in x.args), **there)
    assert torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), want[0])
    assert torch.equal(state.to("cuda:0"), want[1])
