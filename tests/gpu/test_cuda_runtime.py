"""How a prefill lives in a process: graphs, streams, threads, forks, memory, synchronisation."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit import jit
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.backends.pipeline import plan_pipeline
from kda_jit.backends.policy import hopper_schedule
from kda_jit.testing import Case, Inputs
from kda_jit.workspace import stage_slots, workspace_specs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONE_GPU = torch.cuda.device_count() < 2
NAN = float("nan")


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def empty_like_results(x: Inputs) -> dict[str, Tensor]:
    shape = (x.N, *x.v.shape[2:], x.q.shape[3])
    return {
        "out": torch.full_like(x.v, NAN),
        "final_state": torch.full(shape, NAN, device=x.q.device),
    }


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spin(milliseconds: float) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


_HOG = """
struct Args { long long nanoseconds; };
extern "C" __global__ void hog(const __grid_constant__ Args args) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < args.nanoseconds);
}
"""


def hog(blocks: int, milliseconds: float) -> None:
    """Occupies whole multiprocessors, by their shared memory, on the current stream."""
    kernel = jit.load(jit.compile_source(_HOG).spec).kernels["hog"]
    stream = torch.cuda.current_stream().cuda_stream
    args = int(milliseconds * 1e6).to_bytes(8, "little")
    kernel.launch((blocks, 1, 1), 32, kernel.smem_dynamic, stream, args)


# -- CUDA graphs ---------------------------------------------------------------------------------


def test_a_thousand_replays_with_changed_inputs_lengths_and_slots(way: Any) -> None:
    """Everything that a graph reads changes between replays; each fiftieth is compared."""
    T, N, slots = 256, 5, 9
    generator = torch.Generator().manual_seed(7)
    lengths = [
        (256, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (17, 33, 0, 64, 100),
        (1, 1, 1, 1, 1),
        (0, 200, 0, 31, 0),
        (64, 16, 15, 32, 129),
    ]
    bank = [
        Case(seed=100 + i, lengths=(T,), heads=2, initial=False).tensors(way.device)
        for i in range(4)
    ]
    ends = torch.tensor([(0, *n) for n in lengths], dtype=torch.int32).cumsum(1).int()
    ends = ends.to(way.device)
    tables = torch.stack([torch.randperm(slots, generator=generator)[:N] for _ in range(16)])
    tables[::3, 1] = -1
    tables = tables.int().to(way.device)
    flags = (torch.rand(16, N, generator=generator) < 0.6).to(way.device)
    pools = 0.1 * torch.randn(2, slots, 2, 128, 128, generator=generator).to(way.device)
    cuts = torch.tensor([[16, 0, 32, 0, 64], [0] * N, [48, 16, 8, 16, 96]], dtype=torch.int32)
    cuts = cuts.to(way.device)

    static = bank[0].replace(
        **{name: getattr(bank[0], name).clone() for name in ("q", "k", "v", "g", "beta")},
        cu_seqlens=ends[2].clone(),
        initial_state=pools[0].clone(),
    )
    more = {
        "out": torch.zeros_like(static.v),
        "state_indices": tables[0].clone(),
        "has_initial_state": flags[0].clone(),
        "checkpoint_state": torch.zeros(N, 2, 128, 128, device=way.device),
        "checkpoint_offsets": cuts[0].clone(),
    }
    way.prefill(static, **more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way.prefill(static, **more)

    def arrange(i: int) -> None:
        source = bank[i % len(bank)]
        for name in ("q", "k", "v", "g", "beta"):
            getattr(static, name).copy_(getattr(source, name))
        static.cu_seqlens.copy_(ends[i % len(lengths)])
        static.initial_state.copy_(pools[i % 2])
        more["state_indices"].copy_(tables[i % 16])
        more["has_initial_state"].copy_(flags[(i // 16) % 16])
        more["checkpoint_offsets"].copy_(cuts[i % 3])
        more["out"].fill_(NAN)
        more["checkpoint_state"].fill_(NAN)

    for i in range(1000):
        arrange(i)
        graph.replay()
        if i % 50 == 49 or i < 6:
            replayed = [
                y.clone() for y in (more["out"], static.initial_state, more["checkpoint_state"])
            ]
            arrange(i)
            way.prefill(static, **more)
            eager = (more["out"], static.initial_state, more["checkpoint_state"])
            assert all(map(same, replayed, eager)), f"replay {i}"


_COLD = """
import torch, kda_jit
from kda_jit.testing import Case
x = Case(seed=1, lengths=(300, 0, 3), heads=2).tensors("cuda")
out, final = torch.empty_like(x.v), torch.empty_like(x.initial_state)
def run():
    kda_jit.prefill(*x.args, **x.kwargs, out=out, final_state=final, backend="cuda")
torch.cuda.synchronize()
graph, words = torch.cuda.CUDAGraph(), ""
with torch.cuda.graph(graph):
    torch.zeros(4, device="cuda")
    try:
        run()
    except kda_jit.CaptureError as error:
        words = str(error)
kda_jit.warmup(backend="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    run()
graph.replay()
replayed = out.clone(), final.clone()
out.zero_(), final.zero_()
run()
torch.cuda.synchronize()
assert torch.equal(out, replayed[0]) and torch.equal(final, replayed[1])
assert out.any() and final.any()
print(kda_jit.last_launch().schedule, words)
"""


def test_cold_call_in_a_capture_is_refused_and_warmup_is_enough(cuda: Any, python: Any) -> None:
    printed = python(_COLD)
    assert printed.startswith(f"{cuda.schedule} ")
    assert "kda_jit.warmup" in printed


def test_graph_outlives_the_growth_of_its_workspace(cuda: Any) -> None:
    """The old memory may be in a graph: it is kept, and not handed to anybody else."""
    small, _ = cuda.exact(Case(seed=110, lengths=(64,), heads=2))
    # So many heads that every schedule needs a workspace.
    large = Case(seed=111, lengths=(2048,), heads=80).tensors("cuda")
    workspace = kda_jit.Workspace(device="cuda")
    results = empty_like_results(small)
    want = [y.clone() for y in cuda.prefill(small, workspace=workspace, **results)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.prefill(small, workspace=workspace, **results)
    before = workspace.nbytes
    want_large = cuda.prefill(large, workspace=workspace)
    assert workspace.nbytes > before
    others = [torch.full((before // 4,), NAN, device="cuda") for _ in range(4)]
    for y in results.values():
        y.fill_(NAN)
    graph.replay()
    again = cuda.prefill(large, workspace=workspace)
    assert all(map(torch.equal, results.values(), want))
    assert all(map(torch.equal, again, want_large))
    assert all(y.isnan().all() for y in others), "the graph wrote into memory of others"


def test_graph_without_a_workspace_survives_anything_after_it(way: Any) -> None:
    small, _ = way.exact(Case(seed=110, lengths=(64,), heads=2))
    results = empty_like_results(small)
    want = [y.clone() for y in way.prefill(small, **results)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way.prefill(small, **results)
    way.prefill(Case(seed=111, lengths=(2048,), heads=4).tensors("cuda"))
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), NAN, device="cuda") for _ in range(8)]
    for y in results.values():
        y.fill_(NAN)
    graph.replay()
    assert all(map(torch.equal, results.values(), want))
    assert all(y.isnan().all() for y in others), "the graph wrote into memory of others"


def test_several_layers_in_one_graph(cuda: Any) -> None:
    inputs = [cuda.exact(Case(seed=112 + i, lengths=(70, 33), heads=2))[0] for i in range(4)]
    want = [cuda.prefill(x) for x in inputs]
    results = [empty_like_results(x) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, into in zip(inputs, results):
            cuda.prefill(x, **into)
    for _ in range(20):
        graph.replay()
    for got, exact in zip(results, want):
        assert all(map(torch.equal, got.values(), exact))


# -- streams -------------------------------------------------------------------------------------


def test_work_is_ordered_on_the_current_stream_and_on_no_other(way: Any) -> None:
    """Inputs arrive late on a side stream, and results are consumed there without waiting."""
    x, _ = way.exact(Case(seed=120, lengths=(100, 33), heads=2))
    want, want_state = way.prefill(x)
    late = x.replace(q=torch.zeros_like(x.q), initial_state=torch.zeros_like(x.initial_state))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # whatever a first call on a stream allocates
        way.prefill(late)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        spin(100)
        late.q.copy_(x.q)
        late.initial_state.copy_(x.initial_state)
        out, state = way.prefill(late)
        copies = out.clone(), state.clone()
        busy = not side.query()
    idle = torch.cuda.default_stream().query()
    side.synchronize()
    assert busy, "the call waited for the GPU, or ran elsewhere"
    assert idle, "the call used the default stream"
    assert torch.equal(copies[0], want)
    assert torch.equal(copies[1], want_state)


def test_two_streams_at_a_time_have_scratch_of_their_own(way: Any) -> None:
    inputs = [
        way.exact(Case(seed=121 + i, lengths=lengths, heads=4))[0]
        for i, lengths in enumerate(((500, 33), (300, 0, 64)))
    ]
    want = [way.prefill(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    results = [[empty_like_results(x) for x in inputs] for _ in range(100)]
    torch.cuda.synchronize()
    for round_ in results:
        for x, stream, into in zip(inputs, streams, round_):
            with torch.cuda.stream(stream):
                way.prefill(x, **into)
    torch.cuda.synchronize()
    for i, round_ in enumerate(results):
        for got, exact in zip(round_, want):
            assert all(map(torch.equal, got.values(), exact)), f"run {i}"


def test_one_workspace_serves_one_stream(cuda: Any) -> None:
    x, _ = cuda.exact(Case(seed=120, lengths=(100, 33), heads=2))
    workspace = kda_jit.Workspace(device="cuda")
    cuda.prefill(x, workspace=workspace)
    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(kda_jit.WorkspaceError, match="one Workspace per stream"),
    ):
        cuda.prefill(x, workspace=workspace)


def test_calls_follow_each_other_closely_in_one_workspace(cuda: Any) -> None:
    """The next call must not overtake those who still read the scratch of the last."""
    inputs = [
        cuda.exact(Case(seed=123 + i, lengths=lengths, heads=heads))[0]
        for i, (lengths, heads) in enumerate((((700,), 2), ((64,) * 9, 8), ((3, 0, 1), 1)))
    ]
    want = [cuda.prefill(x) for x in inputs]
    workspace = kda_jit.Workspace(device="cuda")
    results = [[empty_like_results(x) for x in inputs] for _ in range(60)]
    spin(20)
    for round_ in results:
        for x, into in zip(inputs, round_):
            cuda.prefill(x, workspace=workspace, **into)
    for i, round_ in enumerate(results):
        for got, exact in zip(round_, want):
            assert all(map(torch.equal, got.values(), exact)), f"round {i}"


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_other_kernels_on_the_multiprocessors_do_not_matter(cuda: Any, share: float) -> None:
    """Whoever counts on all of its blocks being resident hangs here, or skips work."""
    x, _ = cuda.exact(Case(seed=126, lengths=(700, 33, 0, 200), heads=16))
    want = cuda.prefill(x)
    blocks = int(share * torch.cuda.get_device_properties(0).multi_processor_count)
    side = torch.cuda.Stream()
    hog(1, 0.01)  # compiled
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.cuda.stream(side):
            hog(blocks, 10)
        results = empty_like_results(x)
        cuda.prefill(x, **results)
        torch.cuda.synchronize()
        assert all(map(torch.equal, results.values(), want))


_TOGETHER = """
import torch, kda_jit
from kda_jit import jit
from kda_jit.testing import Case
inputs = [Case(seed=s, lengths=(2000 + 500 * s, 77), heads=8).tensors("cuda") for s in range(3)]
want = [kda_jit.prefill(*x.args, **x.kwargs, backend="cuda") for x in inputs]
launch = kda_jit.last_launch()
hog = jit.load(jit.compile_source(HOG).spec).kernels["hog"]
blocks = torch.cuda.get_device_properties(0).multi_processor_count
streams = [torch.cuda.Stream() for _ in range(4)]
for _ in range(30):
    torch.cuda.synchronize()
    args = (2_000_000).to_bytes(8, "little")
    hog.launch((blocks, 1, 1), 32, hog.smem_dynamic, streams[3].cuda_stream, args)
    got = []
    for x, stream in zip(inputs, streams):
        with torch.cuda.stream(stream):
            for _ in range(3):
                got.append(kda_jit.prefill(*x.args, **x.kwargs, backend="cuda"))
    torch.cuda.synchronize()
    for i, pair in enumerate(got):
        assert all(map(torch.equal, pair, want[i // 3]))
print(launch.schedule)
"""


def test_three_streams_that_start_at_once_on_a_full_gpu(cuda: Any, python: Any) -> None:
    """Blocks of all three become resident side by side: none may wait for one that cannot start."""
    printed = python(f"HOG = '''{_HOG}'''" + _TOGETHER, timeout=40)
    assert printed.strip() == cuda.schedule


def test_inputs_may_be_freed_right_after_the_call(way: Any) -> None:
    """On a side stream, whose memory goes to the next allocation there at once."""
    x, _ = way.exact(Case(seed=127, lengths=(200, 33), heads=4))
    want = way.prefill(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    kept = []
    with torch.cuda.stream(side):
        for _ in range(30):
            y = x.replace(**{name: getattr(x, name).clone() for name in ("q", "k", "v", "g")})
            kept.append(way.prefill(y))
            shape = y.q.shape
            del y
            for _ in range(4):
                torch.full(shape, NAN, dtype=torch.bfloat16, device="cuda")
    side.synchronize()
    assert all(torch.equal(a, b) for got in kept for a, b in zip(got, want))


# -- threads, processes, devices -----------------------------------------------------------------


@pytest.mark.parametrize("own_stream", [True, False])
def test_threads_do_not_disturb_each_other(way: Any, own_stream: bool) -> None:
    """With streams of their own, or all on one, where they share a workspace."""
    inputs = [
        way.exact(Case(seed=130 + i, lengths=(64 * i, 17, 300 - 50 * i), heads=2))[0]
        for i in range(4)
    ]
    want = [way.prefill(x) for x in inputs]
    torch.cuda.synchronize()
    failures: list[object] = []

    def work(i: int) -> None:
        try:
            stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
            with torch.cuda.stream(stream):
                for round_ in range(30):
                    got = way.prefill(inputs[i])
                    stream.synchronize()
                    if not all(map(torch.equal, got, want[i])):
                        failures.append((i, round_))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


_FORK = """
import os, sys
import torch, kda_jit
from kda_jit.testing import Case
def run(who):
    x = Case(seed=1, lengths=(40, 0, 3), heads=2).tensors("cuda")
    out, state = kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")
    print(who, float(out.double().abs().sum()), float(state.double().abs().sum()), flush=True)
assert not torch.cuda.is_initialized()
pids = []
for who in range(2):
    pid = os.fork()
    if pid == 0:
        run(who)
        os._exit(0)
    pids.append(pid)
run(2)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
"""


@pytest.mark.slow
def test_forked_processes_use_it_at_the_same_time_as_their_parent(
    python: Any, tmp_path: Path
) -> None:
    """Importing touches no GPU, so a fork after it is legal. Three first calls meet in a cache."""
    printed = python(_FORK, KDA_JIT_CACHE_DIR=str(tmp_path))
    lines = [line.split() for line in printed.splitlines()]
    assert sorted(line[0] for line in lines) == ["0", "1", "2"]
    assert len({tuple(line[1:]) for line in lines}) == 1


_AGAIN = """
import sys
from kda_jit.jit import compile_source
text = 'extern "C" __global__ void fresh(int* x) { *x = 1; } // ' + sys.executable
for _ in range(2):
    import os
    built = compile_source(text, target="sm_90a")
    print(built.from_cache, built.entries, built.resources["fresh"].registers > 0)
    os.environ["KDA_JIT_CACHE_DIR"] += "-another"
"""


def test_what_the_compiler_remembers_by_itself_does_not_matter(python: Any, tmp_path: Path) -> None:
    """With a driver about, NVRTC may answer from a cache of its own, and then without a log."""
    printed = python(_AGAIN, KDA_JIT_CACHE_DIR=str(tmp_path / "cache"))
    assert printed.splitlines() == ["False ('fresh',) True"] * 2


@pytest.mark.skipif(ONE_GPU, reason="needs two CUDA devices")
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [1, 0])
def test_any_device_whatever_the_current_one(way: Any, index: int, current: int) -> None:
    case = Case(seed=140, lengths=(65, 0, 20), heads=2)
    x, want = way.exact(case)
    there = case.tensors(f"cuda:{index}")
    with torch.cuda.device(current):
        out, state = way.prefill(there)
        assert torch.cuda.current_device() == current
    assert out.device == state.device == torch.device("cuda", index)
    way.check(x, want, out.to(x.q.device), state.to(x.q.device))


def test_inference_mode_and_no_grad(way: Any) -> None:
    x, _ = way.exact(Case(seed=141, lengths=(40,), heads=2))
    want = way.prefill(x)
    with torch.inference_mode():
        assert all(map(torch.equal, way.prefill(x), want))
    q = x.q.clone().requires_grad_()
    with torch.no_grad():
        assert all(map(torch.equal, way.prefill(x.replace(q=q)), want))
    with pytest.raises(kda_jit.GradError, match="q: "):
        way.prefill(x.replace(q=q))


def test_misspelt_schedule_lists_those_there_are(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = cuda.exact(Case(seed=141, lengths=(40,), heads=2))
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "portabel")
    with pytest.raises(kda_jit.InputError, match="portable"):
        kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")


@pytest.mark.parametrize("lengths", [(40,), (1500,), (1100, 1000, 1200), (2048,) * 10])
def test_auto_follows_the_policy_and_changes_no_bit(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the policy is for capability 9.0")
    monkeypatch.delenv("KDA_JIT_ARCH", raising=False)
    x = Case(seed=142, lengths=lengths, heads=8).tensors("cuda")
    sm_count = torch.cuda.get_device_properties(x.q.device).multi_processor_count
    sizes = len(lengths), 8, sm_count
    best = hopper_schedule(len(lengths), sum(lengths), 8, sm_count)
    found = {}
    for name in ("auto", "hopper", "hopper_single", "pipeline", "fused"):
        monkeypatch.setenv("KDA_JIT_SCHEDULE", name)
        found[name] = kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")
        launch = kda_jit.last_launch()
        assert launch is not None
        expected = name if name != "auto" else best
        if name == "pipeline" and plan_pipeline(sum(lengths), *sizes) is None:
            expected = "hopper"
        assert launch.schedule == expected
    for name in ("hopper", "hopper_single", "pipeline", "fused"):
        assert all(map(same, found["auto"], found[name])), name


# -- waiting and memory --------------------------------------------------------------------------


def _calls(way: Any) -> dict[str, Callable[[], object]]:
    """Calls of every kind, on tensors that are made beforehand."""
    x, _ = way.exact(Case(seed=150, lengths=(65, 0, 20), heads=2))
    dense, _ = way.exact(Case(seed=151, lengths=(40, 40), heads=2, packed=False))
    pool = x.initial_state.repeat(2, 1, 1, 1)
    slots = torch.tensor([4, -1, 2], dtype=torch.int32, device="cuda")
    flags = torch.tensor([True, True, False], device="cuda")
    offsets = torch.tensor([32, 0, 16], dtype=torch.int32, device="cuda")
    saved = torch.zeros_like(x.initial_state)
    results, dense_results = empty_like_results(x), empty_like_results(dense)
    out = {"out": results["out"]}
    specs = workspace_specs(128, 8, 2, 128)
    own = kda_jit.Workspace(specs, "cuda")
    return {
        "packed": lambda: way.prefill(x, **results, workspace=own),
        "dense": lambda: way.prefill(dense, **dense_results, workspace=own),
        "no workspace": lambda: way.prefill(x, **results),
        "fresh": lambda: way.prefill(x, initial_state=None, **results, workspace=own),
        "pool": lambda: way.prefill(
            x,
            initial_state=pool,
            state_indices=slots,
            has_initial_state=flags,
            **out,
            workspace=own,
        ),
        "checkpoints": lambda: way.prefill(
            x, checkpoint_state=saved, checkpoint_offsets=offsets, **results, workspace=own
        ),
    }


def test_nothing_waits_for_the_gpu(way: Any) -> None:
    x, _ = way.exact(Case(seed=150, lengths=(65, 0, 20), heads=2))
    calls = _calls(way)
    calls["allocating"] = lambda: way.prefill(x)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    spin(200)
    with no_synchronisation():
        for call in calls.values():
            call()
    # What the debug mode does not know of, such as a driver call, would have waited for the spin.
    assert not torch.cuda.current_stream().query(), "a call waited for the GPU"


def test_nothing_is_allocated_where_buffers_are_given(way: Any) -> None:
    calls = _calls(way)
    for call in calls.values():
        call()
    for name, call in calls.items():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, name


def test_only_results_are_allocated_where_none_are_given(cuda: Any) -> None:
    x, _ = cuda.exact(Case(seed=150, lengths=(65, 0, 20), heads=2))
    kept = cuda.prefill(x)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kept = cuda.prefill(x)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2
    assert kept[0].untyped_storage().nbytes() == x.v.nbytes


def test_cupy_holds_no_memory_and_keeps_its_device(cuda: Any) -> None:
    import cupy

    def held() -> tuple[int, ...]:  # what other tests of the process made is theirs
        pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
        devices = cupy.cuda.runtime.getDevice(), torch.cuda.current_device()
        return pool.used_bytes(), pool.total_bytes(), pinned.n_free_blocks(), *devices

    gc.collect()
    before = held()
    for call in _calls(cuda).values():
        call()
    assert held() == before


_FOOTPRINT = """
import torch, kda_jit
from kda_jit.testing import Case
x = Case(seed=1, lengths=(300, 0, 33), heads=4).tensors("cuda")
torch.zeros(1, device="cuda"); torch.cuda.synchronize()
def beyond():  # bytes of the device that torch's allocator does not hold
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
before = beyond()
for _ in range(3):
    kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")
torch.cuda.synchronize()
print(beyond() - before)
"""


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs the GPU to itself")
def test_little_memory_is_taken_beside_the_allocator(cuda: Any, python: Any) -> None:
    """Code and a stack; a spilling or recursing kernel takes gigabytes of local memory."""
    taken = int(python(_FOOTPRINT))
    print(f"{cuda.schedule}: {taken >> 20} MiB beside torch's allocator")
    assert taken < 300 << 20


def test_kernels_need_no_local_memory_and_fit_the_device(cuda: Any) -> None:
    x = Case(seed=150, lengths=(650, 0, 200), heads=2).tensors(cuda.device)  # enough for a pipeline
    cuda.prefill(x)
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.schedule == cuda.schedule
    arch = jit.arch_for(torch.cuda.get_device_capability())
    assert launch.target == arch.target
    schedule = SCHEDULES[cuda.schedule]
    module = jit.load(schedule.spec(launch.target), torch.cuda.current_device())
    assert set(launch.kernels) == {planned.entry for planned in schedule.launches}
    for planned in schedule.launches:
        kernel = module.kernels[planned.entry]
        assert kernel.local_bytes == 0, kernel
        assert kernel.max_active_blocks(planned.block, planned.smem) >= 1, kernel


def test_a_call_keeps_no_tensor_alive(way: Any) -> None:
    x = Case(seed=152, lengths=(40,), heads=2).tensors("cuda")
    way.prefill(x)
    dead = [weakref.ref(t) for t in (x.q, x.g, x.initial_state, x.cu_seqlens)]
    del x
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4


def test_lengths_are_read_anew_by_each_call(way: Any) -> None:
    """No plan is remembered by the address of cu_seqlens."""
    x, _ = way.exact(Case(seed=153, lengths=(20, 30, 50), heads=2))
    ends = x.cu_seqlens.clone()
    want = way.prefill(x)
    other = torch.tensor([0, 50, 50, 100], dtype=torch.int32, device="cuda")
    want_other = way.prefill(x.replace(cu_seqlens=other))
    assert not torch.equal(want[1], want_other[1])
    for _ in range(3):
        ends.copy_(other)
        assert all(map(torch.equal, way.prefill(x.replace(cu_seqlens=ends)), want_other))
        ends.copy_(x.cu_seqlens)
        assert all(map(torch.equal, way.prefill(x.replace(cu_seqlens=ends)), want))


# -- workspaces ----------------------------------------------------------------------------------


def test_planned_and_locked_workspace_is_enough_and_no_more(cuda: Any) -> None:
    x, _ = cuda.exact(Case(seed=160, lengths=(65, 1, 0, 33), heads=2))
    T = x.q.shape[1]
    workspace = kda_jit.Workspace(workspace_specs(T, x.N, 2, 128, checkpoints=False), "cuda")
    want = cuda.prefill(x)
    with workspace.locked():
        assert all(map(torch.equal, cuda.prefill(x, workspace=workspace), want))
        assert all(map(torch.equal, cuda.prefill(x, workspace=workspace), want))
        # So many heads that every schedule needs a workspace.
        larger = Case(seed=161, lengths=(32 * stage_slots(T, x.N) + 32,), heads=80).tensors("cuda")
        results = empty_like_results(larger)
        with pytest.raises(kda_jit.WorkspaceError, match=r"cuda prefill.*prefill_stages"):
            cuda.prefill(larger, workspace=workspace, **results)
        assert all(y.isnan().all() for y in results.values())
        assert all(map(torch.equal, cuda.prefill(x, workspace=workspace), want))


def test_twenty_shapes_hold_no_more_than_the_largest_needs(cuda: Any) -> None:
    workspace = kda_jit.Workspace(device="cuda")
    sizes = [64, 2048, 128, 1024, 4096, 96, 512, 33, 1, 3000]
    most = 0
    for length in (*sizes, *reversed(sizes)):
        x = Case(seed=162, lengths=(length,), heads=2).tensors("cuda")
        cuda.prefill(x, workspace=workspace)
        most = max(most, workspace.nbytes)
    assert workspace.nbytes == most
    largest = kda_jit.planned_bytes(workspace_specs(4096, 1, 2, 128))
    assert most <= largest + (4 << 20)


# -- what other GPUs will execute ----------------------------------------------------------------

_PORTABLE = """
import torch, kda_jit
from kda_jit.testing import Case, relative_rms
x = Case(seed=1, lengths=(130, 0, 17, 1), heads=2, value_heads=4).tensors("cuda")
want = x.reference()
out, state = kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")
launch = kda_jit.last_launch()
print(launch.backend, launch.schedule, launch.target)
print(relative_rms(out, want.out), relative_rms(state, want.final_state))
"""


def test_portable_ptx_gives_the_numbers_that_machine_code_gives(python: Any) -> None:
    """compute_80 is compiled by the driver for this device: instructions that all GPUs have."""
    printed = python(_PORTABLE, KDA_JIT_ARCH="compute_80", KDA_JIT_SCHEDULE="portable")
    ran, errors = printed.splitlines()
    assert ran == "cuda portable compute_80"
    out, state = map(float, errors.split())
    assert out < 3e-3
    assert state < 1.5e-3


def test_target_of_another_gpu_is_refused_with_words(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = cuda.exact(Case(seed=141, lengths=(40,), heads=2))
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "portable")
    capability = torch.cuda.get_device_capability()
    monkeypatch.setenv("KDA_JIT_ARCH", "sm_120a" if capability[0] != 12 else "sm_90a")
    results = empty_like_results(x)
    with pytest.raises(kda_jit.KdaError, match="this device is"):
        kda_jit.prefill(*x.args, **x.kwargs, backend="cuda", **results)
    assert all(y.isnan().all() for y in results.values())


# -- cost ----------------------------------------------------------------------------------------


def test_host_time_of_a_call_is_reported(way: Any, record_property: Any) -> None:
    """Not judged here: hosts differ. The benchmark does."""
    times = {}
    for name, call in _calls(way).items():
        for _ in range(5):
            call()
        torch.cuda.synchronize()
        samples = []
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(20):
                call()
            samples.append((time.perf_counter() - start) / 20 * 1e6)
            torch.cuda.synchronize()
        times[name] = round(sorted(samples)[5], 1)
    record_property("host_us", times)
    print(f"{way.schedule or way.backend}: host us per call {times}")
