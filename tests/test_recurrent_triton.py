"""The Triton kernel of decode and verification, in Triton's interpreter: sizes and guards.

On a GPU nobody looks at lengths, counts and slots before the kernel does, so here they are put into
problems that are already checked. The laws, over this backend too, are in test_recurrent.py.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_jit.backends import recurrent_triton
from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.backends.recurrent_triton import config_for
from kda_jit.contract.recurrent import RecurrentProblem, make_recurrent_problem
from kda_jit.testing import Case, Step, assert_close

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="kernels run in Triton's interpreter only: set TRITON_INTERPRET=1",
)
# numpy warns of what is on purpose: a sigmoid of 0, and NaN in a whole row.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
NAN = float("nan")
# Slot n * 4 + 1 to n * 4 + 3 for the three columns of sequence n; the others belong to nobody.
TABLE = torch.tensor([[1, 2, 3], [5, 6, 7], [9, 10, 11]])


def problem(**changes: Any) -> RecurrentProblem:
    """Three sequences of 2, 3 and 1 tokens and a pool of twelve slots, in a store of sixteen."""
    call = Step(Case(1, (2, 3, 1), padding=4), columns=3).arguments(
        "cpu", torch.float32, head_dim=16
    )
    store = torch.full((16, 1, 16, 16), NAN)
    store[TABLE[:, 0]] = call["state_pool"][call["state_indices"][:, 0].long()]
    call |= {
        "state_pool": store[:12],
        "state_indices": TABLE.clone(),
        "num_accepted_tokens": torch.ones(3, dtype=torch.int32),
        "out": torch.full((1, 16, 1, 16), NAN)[:, 2:12],
    }
    return make_recurrent_problem(**call)._replace(**changes)


def everything(x: Tensor) -> Tensor:
    """All the memory of which x is a view."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def run(p: RecurrentProblem) -> RecurrentProblem:
    recurrent_triton.run(p)
    assert last_launch() == LaunchRecord("triton", ("kda_recurrent",))
    return p


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def check_as_padding(broken: RecurrentProblem, sequence: int) -> None:
    """The broken sequence has zero rows and its states untouched, the others what they have."""
    sound, before = run(problem()), everything(problem().state_pool)
    run(broken)
    rows = torch.tensor([0, 0, 1, 1, 1, 2])
    zero = broken.out[0, :6][rows == sequence]
    assert (bits(zero) == 0).all()
    kept = rows != sequence
    assert torch.equal(bits(broken.out[0, :6][kept]), bits(sound.out[0, :6][kept]))
    assert broken.out[:, 6:].isnan().all()
    want = everything(sound.state_pool).clone().view(16, -1)
    mine = slice(sequence * 4, sequence * 4 + 4)
    want[mine] = before.view(16, -1)[mine]
    assert torch.equal(bits(everything(broken.state_pool).view(16, -1)), bits(want))


@interpreter
def test_more_sequences_than_a_grid_axis_has_blocks(monkeypatch) -> None:
    """They go on along the next axis, whose last row is not full."""
    want = run(problem())
    monkeypatch.setattr(recurrent_triton, "GRID_N", 2)
    got = run(problem())
    assert torch.equal(bits(got.out), bits(want.out))
    assert torch.equal(bits(got.state_pool), bits(want.state_pool))


# -- numbers -------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("regime", ["random", "unbounded_real"])
@pytest.mark.parametrize(
    "K, V, dtype",
    [
        (16, 16, torch.float16),
        (40, 20, torch.float32),
        (96, 40, torch.float16),
        (128, 24, torch.bfloat16),
        (256, 24, torch.float32),
    ],
)
def test_head_sizes_and_dtypes(K: int, V: int, dtype: torch.dtype, regime: str) -> None:
    case = Case(2, (3, 0, 1), 1, 2, regime=regime)
    x = case.tensors("cpu", dtype, K, V)
    call = Step(case, columns=3).arguments("cpu", dtype, K, V)
    p = run(make_recurrent_problem(**call))
    want = x.reference()
    assert_close("out", p.out, want.out, LIMITS[dtype], cu_seqlens=x.cu_seqlens, chunk=1)
    last = p.state_indices[[0, 2], [2, 0]].long()
    assert_close("state", p.state_pool[last], want.final_state[[0, 2]], LIMITS[torch.float32])


@interpreter
@pytest.mark.parametrize("A_log", [90.0, -90.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_rates_stay_finite(A_log: float, lower_bound: float | None) -> None:
    """Past fp32's range, with gate logits of exactly 0, where inf * 0 lies in wait."""
    p = problem(A_log=torch.full((1,), A_log), dt_bias=torch.zeros(16), lower_bound=lower_bound)
    p.g[:, ::2] = 0.0
    assert run(p).out[:, :6].isfinite().all()


@interpreter
def test_a_slow_decay_is_not_lost_in_rounding() -> None:
    """log decay -8e-5 per token, which bf16 rounds to none: 200 tokens forget 1.6 %."""
    case = Case(3, (200,), regime="slow")
    x = case.tensors("cpu", torch.float32, 16)
    g = torch.full_like(x.g, -11.0)
    call = Step(case).arguments("cpu", torch.float32, 16) | {"g": g}
    p = run(make_recurrent_problem(**call))
    want = x.replace(g=g).reference()
    assert_close("state", p.state_pool[p.state_indices[:, 0].long()], want.final_state, 2e-6)


# -- what only the device can see ----------------------------------------------------------------


@interpreter
@pytest.mark.parametrize(
    "sequence, accepted", [(0, 0), (1, -1), (1, 4), (2, 4), (1, 1_065_369_473), (0, -(2**31))]
)
def test_a_count_without_a_column_is_padding(sequence: int, accepted: int) -> None:
    """Among them those that would read the neighbour's indices, before and after."""
    p = problem()
    assert p.num_accepted_tokens is not None
    p.num_accepted_tokens[sequence] = accepted
    check_as_padding(p, sequence)


@interpreter
@pytest.mark.parametrize("slot", [-1, 12, 15, 2**40, -(2**40), 8])
def test_a_slot_outside_the_pool_is_no_slot(slot: int) -> None:
    """8 is the index that the caller named null."""
    p = problem(null_index=8)
    p.state_indices[1, 0] = slot
    check_as_padding(p, 1)


@interpreter
def test_a_later_column_outside_the_pool_is_not_written() -> None:
    p, sound = problem(null_index=8), run(problem())
    p.state_indices[1, 1], p.state_indices[1, 2], p.state_indices[0, 1] = 12, 8, -7
    run(p)
    assert torch.equal(bits(p.out), bits(sound.out))
    want = everything(sound.state_pool).clone().view(16, -1)
    want[[6, 7, 2]] = NAN
    assert torch.equal(bits(everything(p.state_pool).view(16, -1)), bits(want))


@interpreter
def test_more_tokens_than_columns_are_padding() -> None:
    """The memory past the columns holds slots of other sequences."""
    p = problem()
    check_as_padding(p._replace(state_indices=p.state_indices[:, :2]), 1)


@interpreter
@pytest.mark.parametrize("ends", [[0, 300, 10, 20], [0, 5, 500, 20], [-40, 5, 9, 300]])
def test_broken_lengths_write_inside_the_buffers(ends: list[int]) -> None:
    p = problem()
    before = everything(p.state_pool).clone()
    run(p._replace(cu_seqlens=torch.tensor(ends)))
    around = everything(p.out).view(16, -1)
    assert around[:2].isnan().all()
    assert around[12:].isnan().all()
    used = TABLE.flatten()
    others = [slot for slot in range(16) if slot not in used]
    store = everything(p.state_pool).view(16, -1)
    assert torch.equal(bits(store[others]), bits(before.view(16, -1)[others]))


@interpreter
@pytest.mark.parametrize("slot", [-1, 12, 2**40, 8])
def test_a_fresh_sequence_needs_a_slot_like_any_other(slot: int) -> None:
    p = problem(null_index=8, has_initial_state=torch.tensor([True, False, True]))
    p.state_indices[1, 0] = slot
    check_as_padding(p, 1)


@interpreter
@pytest.mark.parametrize("accepted", [0, -1, 4])
def test_a_fresh_sequence_needs_a_column_like_any_other(accepted: int) -> None:
    p = problem(has_initial_state=torch.tensor([True, False, True]))
    assert p.num_accepted_tokens is not None
    p.num_accepted_tokens[1] = accepted
    check_as_padding(p, 1)


@interpreter
@pytest.mark.parametrize("K, V", [(16, 16), (40, 20), (128, 24)])
def test_a_fresh_start_is_zero_in_every_row(K: int, V: int) -> None:
    """Also of blocks that a head's channels do not fill; the flags lie at an odd address."""
    case, flags = Case(4, (3, 1, 2), 1, 2), torch.tensor([False, True, False, True, False])
    call = Step(case, columns=3, fresh=(0, 2)).arguments("cpu", torch.float32, K, V)
    p = run(make_recurrent_problem(**call | {"has_initial_state": flags[2:]}))
    x = case.tensors("cpu", torch.float32, K, V)
    assert x.initial_state is not None
    start = x.initial_state * torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1)
    want = x.replace(initial_state=start).reference()
    assert_close("out", p.out, want.out, 1e-5, cu_seqlens=x.cu_seqlens, chunk=1)
    last = p.state_indices[[0, 1, 2], [2, 0, 1]].long()
    assert_close("state", p.state_pool[last], want.final_state, 1e-5)


# -- addresses -----------------------------------------------------------------------------------


@interpreter
def test_offsets_beyond_32_bits() -> None:
    """Slots and tokens 2^27 elements apart. Untouched pages cost no memory."""
    far, count = 1 << 27, 18
    call = Step(Case(1, (14, 3, 1))).arguments("cpu", torch.float16, head_dim=16)
    start = call["state_pool"][call["state_indices"].long()].bfloat16()
    slots = torch.tensor([17, 1, 16])
    near = torch.full((count, 1, 16, 16), NAN, dtype=torch.bfloat16)
    near[slots] = start
    memory = torch.empty(count * far, dtype=torch.float16)

    def apart(y: Tensor, column: int) -> Tensor:
        wide = memory.as_strided(y.shape, (count * far, far, *y.stride()[2:]), column)
        return wide.copy_(y)

    tokens = {
        name: apart(call[name], 64 * i) for i, name in enumerate(("q", "k", "v", "g", "beta"))
    }
    pool = memory.view(torch.bfloat16).as_strided(near.shape, (far, 256, 16, 1), 2048)
    pool[slots] = start
    call |= {"state_indices": slots, "state_pool": near}
    sound = run(make_recurrent_problem(**call))
    out = apart(torch.full_like(call["v"], NAN), 512)
    wide = run(make_recurrent_problem(**call | tokens | {"state_pool": pool, "out": out}))
    assert torch.equal(bits(wide.out), bits(sound.out))
    assert torch.equal(bits(pool[slots]), bits(near[slots]))
    assert near[slots].isfinite().all()


# -- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [16, 17, 64, 96, 128, 129, 256])
def test_a_thread_holds_what_fits_its_registers(K: int) -> None:
    config = config_for(K)
    assert config.BK >= K
    assert config.BK & (config.BK - 1) == 0
    assert config.BK * config.BV <= 32 * 64
