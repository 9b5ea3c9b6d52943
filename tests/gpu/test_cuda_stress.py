"""Prefill at size and under repetition: many sequences, offsets beyond 2^31, equal bits again.

What is too large for the recurrence is compared with small calls, which are compared with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kda_jit.testing import Case, Inputs, relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INPUTS = ("q", "k", "v", "g", "beta")
NAN = float("nan")
GIB = 1 << 30


def need(gib: float) -> None:
    """Skips where the GPU is too small. Torch's cache is given back first."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / GIB:.0f}")


def drawn(lengths: Tensor, heads: int, seed: int, initial: bool = True) -> Inputs:
    """Random inputs, drawn on the GPU: a Case of this size takes seconds on the CPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device="cuda")
        return x.normal_(generator=generator)

    T, N = int(lengths.sum()), lengths.numel()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int().cuda()
    return Inputs(
        q=normal(1, T, heads, 128),
        k=normal(1, T, heads, 128),
        v=normal(1, T, heads, 128),
        g=normal(1, T, heads, 128).sub_(3.0),
        beta=normal(1, T, heads),
        A_log=torch.zeros(heads, device="cuda"),
        dt_bias=torch.zeros(heads, 128, device="cuda"),
        lower_bound=-5.0,
        scale=None,
        initial_state=normal(N, heads, 128, 128, dtype=torch.float32) if initial else None,
        cu_seqlens=ends,
    )


def check_some(way: Any, x: Inputs, out: Tensor, state: Tensor, picked: list[int]) -> None:
    """These sequences among all have the bits that they have in a small call, which is accurate."""
    starts = x.bounds
    small = x.pack([(n, 0, starts[n + 1] - starts[n]) for n in picked])
    small_out, small_state = way.prefill(small)
    way.check(small, small.reference(), small_out, small_state)
    for i, n in enumerate(picked):
        rows = out[:, starts[n] : starts[n + 1]]
        assert torch.equal(rows, small_out[:, small.bounds[i] : small.bounds[i + 1]]), n
    assert torch.equal(state[picked], small_state)


# -- many sequences ------------------------------------------------------------------------------


@pytest.mark.xdist_group("many sequences")
def test_twenty_thousand_ragged_sequences(way: Any) -> None:
    need(16)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 41, (20_000,), generator=generator)
    lengths[:2] = lengths[-2:] = 0
    x = drawn(lengths, 2, 1)
    poison = way.poison(x)
    out, state = way.prefill(
        x,
        out=torch.full_like(x.v, NAN),
        final_state=way.nan_states(x),
        workspace=poison.workspace,
    )
    poison.check()
    assert out.isfinite().all()
    assert state.isfinite().all()
    empty = (lengths == 0).cuda()
    assert torch.equal(state[empty], x.initial_state[empty])
    picked = torch.randperm(20_000, generator=generator)[:200].tolist()
    check_some(way, x, out, state, [0, 1, 2, 19_997, 19_998, 19_999, *picked])


@pytest.mark.xdist_group("many sequences")
@pytest.mark.parametrize("N, heads", [(70_000, 1), (3_000, 32)])
def test_more_sequences_and_heads_than_a_grid_axis(way: Any, N: int, heads: int) -> None:
    need(20)
    x = drawn(torch.ones(N, dtype=torch.int64), heads, 2)
    out, state = way.prefill(x)
    assert out.isfinite().all()
    picked = [0, 1, 1023, 2047, 2048, N // 2, N - 2, N - 1]
    check_some(way, x, out, state, picked)


def test_decodes_packed_before_and_after_a_long_prompt(way: Any) -> None:
    lengths = torch.ones(901, dtype=torch.int64)
    lengths[450] = 3239
    x = drawn(lengths, 4, 3)
    out, state = way.prefill(x)
    check_some(way, x, out, state, [0, 1, 449, 450, 451, 900])


@pytest.mark.parametrize("checkpoints", [True, False])
def test_scratch_of_many_partial_chunks_is_large_enough(way: Any, checkpoints: bool) -> None:
    """Every sequence wastes most of a chunk, and a checkpoint that of another."""
    lengths = tuple((1, 17, 33, 49)[i % 4] for i in range(127))
    x, want = way.exact(Case(seed=4, lengths=lengths, heads=6))
    poison = way.poison(x, checkpoints=checkpoints)
    buffers = {}
    if checkpoints:
        offsets = torch.tensor([16 * (n // 16) for n in lengths], device="cuda")
        buffers = {"checkpoint_state": way.nan_states(x), "checkpoint_offsets": offsets}
    out, state = way.prefill(x, workspace=poison.workspace, **buffers)
    poison.check()
    way.check(x, want, out, state)


# -- beyond 2^31 elements ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements_of_tokens(way: Any) -> None:
    """The last 64 tokens against a short run from the state before them, and the first 64."""
    need(60)
    T, heads = 262_160, 64
    assert T * heads * 128 > 2**31
    cut = T - 64
    x = drawn(torch.tensor([T]), heads, 5)
    saved = way.nan_states(x)
    offsets = torch.tensor([cut], dtype=torch.int64, device="cuda")
    out, state = way.prefill(x, checkpoint_state=saved, checkpoint_offsets=offsets)
    assert out[:, ::997].isfinite().all()
    tail = x.pack([(0, cut, T)]).replace(initial_state=saved)
    tail_out, tail_state = way.prefill(tail)
    # Not to the bit: a kernel may have entered the tail with other units for its f16 operands.
    assert relative_rms(tail_out, out[:, cut:]) < 1e-3
    assert relative_rms(tail_state, state) < 1e-4
    head_out, _ = way.prefill(x.pack([(0, 0, 64)]))
    assert torch.equal(out[:, :64], head_out)
    del x, out
    torch.cuda.empty_cache()


@pytest.mark.xdist_group("memory")
def test_batch_rows_more_than_2_31_elements_apart(way: Any) -> None:
    need(12)
    x, _ = way.exact(Case(seed=6, lengths=(70, 70), heads=2, packed=False))
    want = way.prefill(x)
    pitch = 2**31 + 64
    memory = torch.empty(pitch + (1 << 18), dtype=torch.bfloat16, device="cuda")
    start, views = 0, {}
    for name in (*INPUTS, "out"):
        y = x.v if name == "out" else getattr(x, name)
        inner = y[0].numel()
        shape, strides = y.shape, (pitch, *y.stride()[1:])
        views[name] = memory.as_strided(shape, strides, start)
        views[name].copy_(y)
        start += -(-inner // 8) * 8
    out = views.pop("out").fill_(NAN)
    got = way.prefill(x.replace(**views), out=out)
    assert all(map(torch.equal, got, want))


_FAR = """
import torch, kda_jit
from kda_jit.testing import Case
x = Case(seed=7, lengths=(3,), heads=2).tensors("cuda")
pitch = 2**30 + 8
memory = torch.empty(2 * pitch + 512, dtype=torch.bfloat16, device="cuda")
want = kda_jit.prefill(*x.args, **x.kwargs)
for name in ("q", "k", "v", "g", "beta", "out"):
    y = x.v if name == "out" else getattr(x, name)
    far = memory.as_strided(y.shape, (3 * pitch, pitch, *y.stride()[2:]))
    far.copy_(y)
    near = x if name == "out" else x.replace(**{name: far})
    print(name, end=" ", flush=True)
    try:
        got = kda_jit.prefill(*near.args, **near.kwargs, out=far if name == "out" else None)
    except (ValueError, RuntimeError) as error:
        print("refused:", error)
        continue
    torch.cuda.synchronize()
    print("right" if all(map(torch.equal, got, want)) else "wrong")
"""


@pytest.mark.xdist_group("memory")
def test_tokens_more_than_2_30_elements_apart(cuda: Any, python: Any) -> None:
    """Two bytes each, so their distance in bytes is no int32: right, or refused before a launch."""
    need(8)
    for line in python(_FAR, KDA_JIT_BACKEND=cuda.backend).splitlines():
        name, verdict = line.split(" ", 1)
        assert verdict == "right" or (verdict.startswith("refused") and name in verdict), line


@pytest.mark.xdist_group("memory")
def test_pool_slots_beyond_2_31_elements(way: Any) -> None:
    """Slots at both ends of the pool, with padding between slots; all others stay as they are."""
    need(24)
    heads, slots = 32, 4100
    size, pitch = heads * 128 * 128, 540_672
    x = drawn(torch.tensor([40, 0, 17, 70, 5]), heads, 8)
    want_out, want = way.prefill(x)
    memory = torch.full((slots, pitch), NAN, device="cuda")
    pool = memory[:, :size].view(slots, heads, 128, 128)
    used = [4099, 2, 3972, 0, 4098]
    pool[used] = x.initial_state
    assert used[0] * pitch > 2**31
    out, _ = way.prefill(
        x.replace(initial_state=pool), state_indices=torch.tensor(used, device="cuda")
    )
    assert torch.equal(out, want_out)
    assert torch.equal(pool[used], want)
    pool[used] = NAN
    assert memory.isnan().all(), "another slot was written"
    del memory, pool
    torch.cuda.empty_cache()


# -- again and again -----------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 12, 64])
def test_fifty_runs_give_the_same_bits(way: Any, heads: int) -> None:
    lengths = torch.tensor([300, 0, 33, 64, 1, 500, 129])
    x = drawn(lengths, heads, 9)
    offsets = torch.tensor([48, 0, 32, 64, 0, 496, 128], device="cuda")

    def run() -> tuple[Tensor, ...]:
        saved = way.nan_states(x).zero_()
        return *way.prefill(x, checkpoint_state=saved, checkpoint_offsets=offsets), saved

    first = run()
    for i in range(50):
        assert all(map(torch.equal, run(), first)), f"run {i}"


def test_empty_sequences_two_hundred_times(way: Any) -> None:
    """Their final states come from nowhere but the initial ones."""
    x, _ = way.exact(Case(seed=10, lengths=(0, 0, 37, 0, 43, 0), heads=4))
    for initial in (x.initial_state, x.initial_state.bfloat16(), None):
        y = x.replace(initial_state=initial)
        for dtype in (torch.float32, torch.bfloat16):
            _, first = way.prefill(y, final_state=way.nan_states(x, dtype))
            wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            for _ in range(200):
                _, state = way.prefill(y, final_state=way.nan_states(x, dtype))
                wrong += (state != first).sum()
            assert int(wrong) == 0
            for n in (0, 1, 3, 5):
                want = torch.zeros_like(first[n]) if initial is None else initial[n]
                assert torch.equal(first[n], want.to(dtype))


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("initial", [False, True])
def test_seven_uneven_prompts_of_many_heads(way: Any, initial: bool, final: bool) -> None:
    lengths = torch.tensor([1238, 1199, 1240, 1216, 1187, 1203, 519])
    x = drawn(lengths, 48, 11, initial)
    buffers = {"final_state": way.nan_states(x)} if final else {}
    out, state = (y.clone() for y in way.prefill(x, **buffers))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(50):
        again, again_state = way.prefill(x, **buffers)
        wrong += (again != out).sum() + (again_state != state).sum()
    assert int(wrong) == 0
    assert out.isfinite().all()


# The filler's recurrence holds half of the SMs when two calls of different priority come: what of
# the first one finds room runs, and the second takes the SMs that the filler leaves.
_HALF_A_GPU_EACH = """
import os, time, torch
import kda_jit
from kda_jit.testing import Case

sms = torch.cuda.get_device_properties(0).multi_processor_count
filler = Case(seed=0, lengths=(64,), heads=sms // 4).tensors("cuda")
times = 131072 // 64
long = [y.repeat(1, times, *[1] * (y.dim() - 2)) for y in filler.args]
more = filler.kwargs | {"cu_seqlens": torch.tensor([0, 131072], device="cuda", dtype=torch.int32)}
calls = [Case(seed=i, lengths=(8192,), heads=16).tensors("cuda") for i in (1, 2)]
streams = [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)]
background = torch.cuda.Stream(priority=0)

def call(schedule, args, kwargs, stream):
    os.environ["KDA_JIT_SCHEDULE"] = schedule
    with torch.cuda.stream(stream):
        result = kda_jit.prefill(*args, **kwargs, backend="cuda")
    assert kda_jit.last_launch().schedule == schedule
    return result

want = [call("pipeline", x.args, x.kwargs, s) for x, s in zip(calls, streams)]
call("hopper_single", long, more, background)
torch.cuda.synchronize()
for wait in [0.0005 * i for i in range(10)]:
    call("hopper_single", long, more, background)
    time.sleep(wait)
    for _ in range(3):
        got = [call("pipeline", x.args, x.kwargs, s) for x, s in zip(calls, streams)]
    torch.cuda.synchronize()
    for a, b in zip(want, got):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
print("both ended")
"""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="the pipeline is for capability 9.0",
)
def test_two_pipelines_of_different_priority_do_not_wait_for_each_other(python: Any) -> None:
    assert "both ended" in python(_HALF_A_GPU_EACH, timeout=60)


@pytest.mark.parametrize("last", [1, 2, 15, 16, 17])
def test_short_sequence_after_a_long_one(way: Any, last: int) -> None:
    x = drawn(torch.tensor([8191, last]), 4, 12)
    out, state = way.prefill(x)
    check_some(way, x, out, state, [1])
    whole = x.pack([(0, 0, 8191)])
    assert torch.equal(way.prefill(whole)[0], out[:, :8191])


def test_random_batches_of_every_kind(way: Any) -> None:
    """Two hundred shapes in turn: each meets what the one before has left in the scratch."""
    generator = torch.Generator().manual_seed(13)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for i in range(200):
        N = pick(1, 12)
        lengths = torch.tensor([pick(0, (2, 40, 300)[pick(0, 3)]) for _ in range(N)])
        lengths[pick(0, N)] += 1
        x = drawn(lengths, (1, 2, 4, 6)[pick(0, 4)], 1000 + i, initial=pick(0, 4) > 0)
        out, state = way.prefill(x)
        n = pick(0, N)
        rows = slice(x.bounds[n], x.bounds[n + 1])
        alone, alone_state = way.prefill(x.sequence(n))
        assert torch.equal(out[:, rows], alone), (i, lengths.tolist(), n)
        assert torch.equal(state[n], alone_state[0]), (i, lengths.tolist(), n)
