"""Decode and verification as compiled: sizes, graphs and hosts that the interpreter cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit.backends.recurrent_triton import FEW, config_for
from kda_jit.contract.recurrent import make_recurrent_problem
from kda_jit.errors import CaptureError
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case, Step, assert_close, relative_rms, run_recurrent_reference

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

NAN = float("nan")
# What is left is the rounding of the output.
LIMITS = {torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
VERIFY = Step(
    Case(1, (3, 0, 5, 1, 5, 2, 4), 2, 4, padding=3),
    columns=5,
    accepted=(1, 2, 5, 0, 1, 3, 1),
    padded=(4, 5),
    null_index=0,
)
#: With and without tokens, a column that was accepted, and a slot.
FRESH = replace(VERIFY, fresh=(1, 2, 3, 4, 6))


def run(arguments: dict[str, Any], **changes: Any) -> Tensor:
    arguments = arguments | changes
    arguments.setdefault("out", torch.full_like(arguments["v"], NAN))
    out = kda_jit.recurrent(**arguments, backend="triton")
    launch = kda_jit.last_launch()
    assert launch is not None
    assert (launch.backend, launch.kernels) == ("triton", ("kda_recurrent",))
    return out


def judged(arguments: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    """(out, pool) by the reference, over copies."""
    arguments = copied(arguments) | changes
    arguments["out"] = torch.full_like(arguments["v"], NAN)
    run_recurrent_reference(make_recurrent_problem(**arguments))
    return arguments["out"], arguments["state_pool"]


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: x.clone() if isinstance(x, Tensor) else x for k, x in arguments.items()}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def written(pool: Tensor, before: Tensor) -> list[int]:
    changed = (bits(pool.flatten(1)) != bits(before.flatten(1))).any(1)
    return changed.nonzero().flatten().tolist()


@pytest.mark.parametrize("regime", ["random", "unbounded_real"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (16, 16), (96, 80), (40, 200), (256, 256)])
def test_head_sizes_and_dtypes(K: int, V: int, dtype: torch.dtype, regime: str) -> None:
    lengths = (1, 0, 4, 2, 4)
    step = Step(Case(2, lengths, 1, 2, regime=regime, padding=5), 4, (4, 1, 2, 0, 1))
    arguments = step.arguments("cuda", dtype, K, V)
    want, want_pool = judged(arguments)
    before = arguments["state_pool"].clone()
    out = run(arguments)
    end = sum(lengths)
    ends = arguments["cu_seqlens"]
    assert_close("out", out[:, :end], want[:, :end], LIMITS[dtype], cu_seqlens=ends, chunk=1)
    assert out[:, end:].isnan().all()
    slots = written(want_pool, before)
    assert written(arguments["state_pool"], before) == slots
    assert_close("state", arguments["state_pool"][slots], want_pool[slots], 3e-5)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_plain_decode_over_many_steps(state_dtype: str) -> None:
    """A state that goes through the pool 256 times is a prefill's, but for its own rounding."""
    x = Case(3, (256,) * 3, 2, 4, regime="mixed").tensors("cuda")
    arguments = Step(Case(3, (1,) * 3, 2, 4, state_dtype=state_dtype)).arguments("cuda")
    arguments |= {name: x.kwargs[name] for name in ("A_log", "dt_bias", "lower_bound")}
    slots = arguments["state_indices"].long()
    assert x.initial_state is not None
    arguments["state_pool"][slots] = x.initial_state.to(arguments["state_pool"].dtype)
    begin = torch.arange(3, device="cuda") * 256
    for t in range(256):
        tokens = [y[:, begin + t] for y in x.args]
        run(arguments | dict(zip(("q", "k", "v", "g", "beta"), tokens, strict=True)))
    error = relative_rms(arguments["state_pool"][slots], x.reference().final_state)
    assert error < (1e-4 if state_dtype == "float32" else 5e-2)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("K, V", [(128, 128), (40, 200), (256, 256)])
@pytest.mark.parametrize("columns", [None, 3])
def test_a_fresh_sequence_is_one_whose_slot_holds_zeros(
    columns: int | None, K: int, V: int, state_dtype: str
) -> None:
    """Bit for bit, over NaN; the flags are a part of a step's, at an odd address."""
    accepted = None if columns is None else (2, 1, 3, 1, 3)
    lengths = (1,) * 5 if columns is None else (3, 1, 2, 0, 3)
    case = Case(11, lengths, 2, 4, state_dtype=state_dtype)
    dirty = Step(case, columns, accepted, fresh=(0, 2, 4)).arguments("cuda", torch.bfloat16, K, V)
    zeros = Step(case, columns, accepted).arguments("cuda", torch.bfloat16, K, V)
    flags = torch.tensor([True] * 3 + [False, True, False, True, False], device="cuda")[3:]
    before = dirty["state_pool"].clone()
    fresh = (dirty["state_pool"].isnan() & ~zeros["state_pool"].isnan()).flatten(1).any(1)
    assert int(fresh.sum()) == 3
    zeros["state_pool"][fresh] = 0.0
    out = run(dirty, has_initial_state=flags)
    assert out.isfinite().all()
    assert torch.equal(bits(out), bits(run(zeros)))
    slots = written(dirty["state_pool"], before)
    assert len(slots) == (5 if columns is None else 9)
    assert torch.equal(bits(dirty["state_pool"][slots]), bits(zeros["state_pool"][slots]))


@pytest.mark.parametrize("step", [VERIFY, FRESH])
def test_a_step_that_writes_nothing_gives_the_same_bits(step: Step) -> None:
    arguments = step.arguments("cuda")
    before = arguments["state_pool"].clone()
    dry = run(arguments, write_state=False)
    assert torch.equal(bits(arguments["state_pool"]), bits(before))
    assert torch.equal(bits(run(arguments)), bits(dry))
    assert written(arguments["state_pool"], before) == written(judged(arguments)[1], before)


def test_verification_and_plain_decode_agree_bit_for_bit() -> None:
    verify = Step(Case(4, (4, 4), 2), columns=4).arguments("cuda")
    plain = Step(Case(5, (1, 1), 2)).arguments("cuda")
    gates = {name: verify[name] for name in ("A_log", "dt_bias", "lower_bound")}
    slots = plain["state_indices"].long()
    plain["state_pool"][slots] = verify["state_pool"][verify["state_indices"][:, 0].long()]
    out = run(verify)
    for j in range(4):
        tokens = {name: verify[name][:, [j, 4 + j]] for name in ("q", "k", "v", "g", "beta")}
        assert torch.equal(bits(run(plain | gates | tokens)), bits(out[:, [j, 4 + j]]))
        column = verify["state_pool"][verify["state_indices"][:, j].long()]
        assert torch.equal(plain["state_pool"][slots], column)


def test_a_view_of_a_block_table_is_as_good_as_its_copy() -> None:
    arguments = VERIFY.arguments("cuda")
    table = torch.full((7, 11), 99, dtype=torch.int32, device="cuda")
    table[:, 1::2] = arguments["state_indices"]
    plain, strided = copied(arguments), copied(arguments)
    assert torch.equal(bits(run(plain)), bits(run(strided, state_indices=table[:, 1::2])))
    assert torch.equal(bits(plain["state_pool"]), bits(strided["state_pool"]))


def test_what_the_host_cannot_see_is_padding() -> None:
    """Counts and slots out of range, more tokens than columns: zero rows, and no other change."""
    arguments = Step(Case(6, (2, 2, 3, 2, 2), 2), 3, (1,) * 5).arguments("cuda")
    sound = copied(arguments)
    want = run(sound)
    slots = arguments["state_pool"].shape[0]
    arguments["num_accepted_tokens"][:2] = torch.tensor([4, -7], device="cuda")
    arguments["state_indices"][3, 0] = slots
    before = arguments["state_pool"].clone()
    narrow = arguments["state_indices"][:, :2]
    out = run(arguments, state_indices=narrow)
    torch.cuda.synchronize()
    assert (out[:, :9] == 0).all()
    assert torch.equal(bits(out[:, 9:]), bits(want[:, 9:]))
    mine = narrow[4].tolist()
    assert written(arguments["state_pool"], before) == sorted(mine)


@pytest.mark.parametrize("N, heads", [(70_000, 1), (3_000, 32)])
def test_more_programs_than_the_second_axis_of_a_grid_holds(N: int, heads: int) -> None:
    torch.manual_seed(0)
    q, k, v, g = torch.randn(4, N, heads, 16, device="cuda").unbind(0)
    beta = torch.randn(N, heads, device="cuda")
    gates = {"A_log": torch.zeros(heads, device="cuda")}
    gates["dt_bias"] = torch.zeros(heads, 16, device="cuda")
    state = torch.randn(N, heads, 16, 16, device="cuda")
    pool = state.clone()
    slots = torch.randperm(N, device="cuda")
    out = run({
        "q": q, "k": k, "v": v, "g": g, "beta": beta, **gates, "state_pool": pool,
        "state_indices": slots,
    })  # fmt: skip
    dense = [x.unsqueeze(1) for x in (q, k, v, g, beta)]
    want = recurrent_kda(*dense, **gates, initial_state=state[slots])
    by_sequence = (out - want.out[:, 0]).flatten(1).norm(dim=1) / want.out.flatten(1).norm(dim=1)
    assert by_sequence.max() < 1e-4
    assert_close("state", pool[slots], want.final_state, 1e-4)


def test_slots_beyond_2_31_elements() -> None:
    """4100 slots of 32 heads: the last one lies past what 32 bits address."""
    free, _ = torch.cuda.mem_get_info()
    if free < 12 << 30:
        pytest.skip(f"needs 12 GiB of GPU memory, {free >> 30} are free")
    arguments = Step(Case(7, (1, 1), 32)).arguments("cuda")
    pool = torch.empty(4100, 32, 128, 128, device="cuda")
    assert pool.numel() > 2**31
    far = torch.tensor([4099, 0], device="cuda")
    pool[far] = arguments["state_pool"][arguments["state_indices"].long()]
    pool[1], pool[4098] = NAN, NAN
    near = copied(arguments)
    out = run(arguments, state_pool=pool, state_indices=far)
    assert torch.equal(bits(out), bits(run(near)))
    assert torch.equal(pool[far], near["state_pool"][near["state_indices"].long()])
    assert pool[1].isnan().all()
    assert pool[4098].isnan().all()


def test_steps_neither_recompile_nor_synchronise() -> None:
    """Whatever their lengths, sequences, columns, null index and strides of the index tensors."""
    compiled: list[str] = []
    flags = torch.rand(40, device="cuda") < 0.5
    run(VERIFY.arguments("cuda"))
    run(FRESH.arguments("cuda"))
    previous = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **kw: compiled.append(kw["repr"])
    try:
        for i in range(30):
            columns = 1 + i % 6
            lengths = tuple((i + j) % (columns + 1) for j in range(1 + i % 7))
            step = Step(
                Case(i, lengths, 2, 4), columns, (1,) * len(lengths), null_index=(None, 0)[i % 2]
            )
            arguments = step.arguments("cuda")
            if not sum(lengths):
                continue
            arguments["out"] = torch.empty_like(arguments["v"])
            if i % 4 == 3:  # at any address
                arguments["has_initial_state"] = flags[i : i + len(lengths)]
            torch.cuda.set_sync_debug_mode("error")
            try:
                run(arguments, write_state=i % 3 > 0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    finally:
        triton.knobs.runtime.jit_post_compile_hook = previous
    assert compiled == []


def test_graph_replays_with_new_inputs_lengths_counts_slots_and_flags() -> None:
    """A graph of the largest step, replayed with fewer sequences and garbage behind them."""
    large = Step(Case(8, (4, 4, 4, 4), 2), 4, (1,) * 4, fresh=(1, 2)).arguments("cuda")
    small = Step(Case(9, (2, 4, 0, 0), 2, padding=10), 4, (2, 3, 1, 1), fresh=(0, 3))
    small = small.arguments("cuda")
    static = copied(large)
    static["out"] = torch.full_like(large["v"], NAN)
    run(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static)
    small["state_indices"][2:] = -1
    small["num_accepted_tokens"][2:] = 1_065_369_473
    for name, x in small.items():
        if isinstance(x, Tensor):
            static[name].copy_(x)
    static["out"].fill_(NAN)
    graph.replay()
    assert torch.equal(bits(static["out"]), bits(run(small)))
    assert static["out"][:, 6:].isnan().all()
    assert torch.equal(bits(static["state_pool"]), bits(small["state_pool"]))


def test_cold_call_inside_a_capture_is_refused() -> None:
    # A head that nothing else here compiles.
    arguments = Step(Case(10, (1, 1), 2)).arguments("cuda", head_dim=24)
    before = arguments["state_pool"].clone()
    out = torch.empty_like(arguments["v"])
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match=r"^recurrent: "), torch.cuda.graph(graph):
        run(arguments, out=out)
    torch.cuda.synchronize()
    assert torch.equal(bits(arguments["state_pool"]), bits(before))
    want, _ = judged(arguments)
    assert_close("out", run(arguments), want, LIMITS[torch.bfloat16], chunk=1)


#: Sequences of four value heads that are many programs.
MANY = 600


def programs(sequences: int, heads: int, head_dim: int) -> int:
    return sequences * heads * -(-head_dim // config_for(head_dim).BV)


@pytest.mark.parametrize("first, then, head_dim", [(1, MANY, 112), (MANY, 1, 104)])
def test_a_graph_of_another_number_of_sequences(first: int, then: int, head_dim: int) -> None:
    """Few programs and many are two kernels, of heads that nothing else here compiles."""
    assert programs(1, 4, head_dim) < FEW <= programs(MANY, 4, head_dim)

    def step(sequences: int) -> dict[str, Any]:
        case = Case(12, (2,) * sequences, 4)
        return Step(case, 2, (1,) * sequences).arguments("cuda", head_dim=head_dim)

    run(step(first))
    static = step(then)
    static["out"] = torch.full_like(static["v"], NAN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(static)
    graph.replay()
    eager = step(then)
    assert torch.equal(bits(static["out"]), bits(run(eager)))
    assert torch.equal(bits(static["state_pool"]), bits(eager["state_pool"]))


def test_few_sequences_and_many_have_equal_bits() -> None:
    some = 100
    assert programs(some, 4, 128) < FEW <= programs(MANY, 4, 128)
    whole = Step(Case(13, (2,) * MANY, 4), 2, (1, 2) * (MANY // 2)).arguments("cuda")
    part = copied(whole)
    for name in ("state_indices", "num_accepted_tokens"):
        part[name] = part[name][:some]
    part["cu_seqlens"] = part["cu_seqlens"][: some + 1]
    assert torch.equal(bits(run(part)[:, : 2 * some]), bits(run(whole)[:, : 2 * some]))
    mine = part["state_indices"].flatten().long()
    assert torch.equal(bits(part["state_pool"][mine]), bits(whole["state_pool"][mine]))


def test_work_goes_to_the_current_stream() -> None:
    arguments = VERIFY.arguments("cuda")
    want = run(copied(arguments))
    late = copied(arguments)
    fresh = late["state_pool"].clone()
    late["state_pool"].zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late["state_pool"].copy_(fresh)
        out = run(late)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(bits(out), bits(want))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_any_device_whatever_the_current_one() -> None:
    want = run(VERIFY.arguments("cuda:0"))
    out = run(VERIFY.arguments("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert torch.equal(bits(out.to("cuda:0")), bits(want))
