"""What the kernels compute, against the recurrence in float64, on every schedule."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from kda_jit.reference import RecurrentResult, recurrent_kda
from kda_jit.testing import Case, Inputs, Limit, assert_close
from kda_jit.testing.cases import BOUNDED
from kda_jit.testing.laws import LAWS
from kda_jit.testing.runner import rounding_limits
from tests.emulation.conftest import RUNS
from tests.emulation.emulator import Emulator

NAN = float("nan")
#: Laws that say nothing about kernels here, and kinds of numbers on which one is not quite kept.
SKIPPED_LAWS = ("graph", "recurrent")
NOT_QUITE = {
    # Gates are summed in f16: a state that has forgotten 18 nats is off by 5e-4.
    "decay": ("large_state",),
    # Values of later tokens choose the units of a chunk, by which an output of 1e-6 may be rounded
    # otherwise; and a zero query is deaf.
    "causal": ("zero_rows",),
    # After zero rows at a sequence's end the state may hold nothing but what its chunk has
    # forgotten by 2^21: f16's subnormals, off by 1e-9, which is 1e-2 of it. Other laws hold there.
    **dict.fromkeys(("recurrence", "split", "checkpoint", "resume"), ("zero_rows",)),
}
#: Of cases that are held against the recurrence.
DRAWN = tuple(regime for regime in BOUNDED if regime != "zero_rows")


@functools.cache
def exact(case: Case) -> tuple[Inputs, RecurrentResult, tuple[Limit, Limit]]:
    x = case.tensors()
    want = x.reference()
    return x, want, rounding_limits(x, None, want)


def check(emulated: Emulator, case: Case, **buffers: torch.Tensor) -> None:
    x, want, (out_limit, state_limit) = exact(case)
    out, state = emulated.prefill(x, **buffers)
    tokens = x.bounds[-1] if case.packed else x.q.shape[1]
    assert out[:, :tokens].isfinite().all(), case
    assert out[:, tokens:].isnan().all(), "rows past the last sequence were written"
    assert_close("out", out, want.out, out_limit, cu_seqlens=x.cu_seqlens, case=case)
    rounding = 4e-3 if state.dtype is torch.bfloat16 else 0.0
    limit = state_limit.allowed + rounding
    assert_close("final_state", state, want.final_state, limit, case=case)


@pytest.mark.parametrize("regime", BOUNDED)
def test_every_regime_is_accurate_in_its_worst_block(emulated: Emulator, regime: str) -> None:
    """Grouped heads, a NaN tail, an empty sequence, checkpoints on the way."""
    case = Case(
        seed=21, lengths=(33, 0, 100, 16, 1, 130), heads=1, value_heads=2, regime=regime, padding=9
    )
    x, want, limits = exact(case)
    offsets = torch.tensor((32, 0, 96, 16, 0, 80), dtype=torch.int32)
    saved = torch.full_like(want.final_state, NAN, dtype=torch.float32)
    check(emulated, case, checkpoint_state=saved, checkpoint_offsets=offsets)
    kept = recurrent_kda(*x.args, **x.kwargs, checkpoint_offsets=offsets).checkpoint_state
    assert kept is not None
    rows = offsets > 0
    assert_close("checkpoint_state", saved[rows], kept[rows], limits[1], case=case)
    assert saved[~rows].isnan().all()


@pytest.mark.parametrize("run", range(2 * RUNS))
def test_cases_of_this_run_alone(emulated: Emulator, run: int) -> None:
    rng = random.Random(emulated.seed)
    packed = rng.random() < 0.8
    lengths = [
        rng.choice((0, 1, 15, 16, 17, 32, 33, 64, 65, 200)) for _ in range(rng.randint(1, 5))
    ]
    heads, group = rng.randint(1, 2), rng.choice((1, 2, 3))
    case = Case(
        seed=rng.randrange(1 << 30),
        lengths=tuple(lengths if packed else [max(1, lengths[0])] * min(len(lengths), 3)),
        heads=heads,
        value_heads=heads * group,
        regime=rng.choice(DRAWN),
        state_dtype=rng.choice(("float32", "bfloat16")),
        initial=rng.random() < 0.7,
        packed=packed,
        padding=rng.choice((0, 40)) if packed else 0,
    )
    print(case)
    x, _, _ = exact(case)
    dtype = rng.choice((torch.float32, torch.bfloat16))
    final = torch.full((x.N, case.HV, 128, 128), NAN, dtype=dtype)
    buffers = {"final_state": final}
    if packed:
        assert x.cu_seqlens is not None
        buffers["cu_seqlens"] = x.cu_seqlens.to(rng.choice((torch.int32, torch.int64)))
    check(emulated, case, **buffers)


@pytest.mark.parametrize("name", [name for name in LAWS if name not in SKIPPED_LAWS])
def test_laws(emulated: Emulator, name: str) -> None:
    law, rng = LAWS[name], random.Random(emulated.seed)
    regimes = [r for r in law.regimes if r in BOUNDED and r not in NOT_QUITE.get(name, ())]
    for _ in range(2 * RUNS):
        case = law.draw(rng, emulated, rng.choice(regimes), rng.randrange(6))
        law(emulated, case)


@pytest.mark.parametrize(
    "state, values, logit",
    [
        pytest.param(0.0, (-120, 115, 115), None, id="from tiny to huge"),
        pytest.param(0.0, (115, -120, -120), None, id="from huge to tiny"),
        pytest.param(2.0**-112, (-120, -120), -20.0, id="a tiny state, tiny betas"),
        pytest.param(2.0**100, (-120, 115), -20.0, id="a huge one, and huge values"),
    ],
)
def test_units_go_from_one_end_of_fp32_to_the_other(
    emulated: Emulator, state: float, values: tuple[int, ...], logit: float | None
) -> None:
    """Exponents of v, a chunk each: further apart than a single power of two takes them."""
    x = Case(seed=86, lengths=(32 * len(values),), heads=2).tensors()
    assert x.initial_state is not None
    v = x.v * torch.tensor(values).exp2().repeat_interleave(32)[None, :, None, None].to(x.v.dtype)
    x = x.replace(v=v, initial_state=x.initial_state * state)
    if logit is not None:
        # Of values as of states: without it both forget the first chunk.
        x = x.replace(beta=torch.full_like(x.beta, logit), g=torch.full_like(x.g, -12.0))
    want = x.reference()
    out, final = emulated.prefill(x)
    assert_close("out", out, want.out, 1e-2, cu_seqlens=x.cu_seqlens)
    assert_close("final_state", final, want.final_state, 2e-3)


def test_infinite_elements_of_a_state_do_not_choose_its_units(emulated: Emulator) -> None:
    x = Case(seed=87, lengths=(70,), heads=1).tensors()
    assert x.initial_state is not None
    state = x.initial_state.clone()
    state[0, 0, 5, 7], state[0, 0, 6] = float("inf"), NAN
    want = x.reference()
    _, final = emulated.prefill(x.replace(initial_state=state))
    rows = [row for row in range(128) if row not in (5, 6)]
    assert_close("final_state", final[:, :, rows], want.final_state[:, :, rows], 2e-3)


def test_a_slot_that_the_pool_does_not_have_is_neither_read_nor_written(emulated: Emulator) -> None:
    x, _, _ = exact(Case(seed=84, lengths=(40, 30, 20, 10), heads=2))
    assert x.initial_state is not None
    memory = torch.full((8, 2, 128, 128), 7.0)
    pool = memory[2:6]
    pool.copy_(x.initial_state)
    start = torch.zeros_like(x.initial_state)
    start[[0, 2]] = x.initial_state[[3, 0]]
    want_out, want = emulated.prefill(x.replace(initial_state=start))
    indices = torch.tensor((3, 4, 0, 5))
    out, _ = emulated.prefill(x.replace(initial_state=pool), state_indices=indices)
    assert torch.equal(out, want_out)
    assert torch.equal(pool[[3, 0]], want[[0, 2]])
    assert torch.equal(pool[[1, 2]], x.initial_state[[1, 2]])
    assert bool((memory[:2] == 7.0).all() and (memory[6:] == 7.0).all())


@pytest.mark.parametrize("ends", [(0, 50, 20, 90, 100), (40, 50, 60, 90, 100), (0, 9, 50, 900, 99)])
def test_wrong_cu_seqlens_leave_no_buffer(emulated: Emulator, ends: tuple[int, ...]) -> None:
    """The host does not see them. Results are anyone's guess, but nothing else is written."""
    x, _, _ = exact(Case(seed=83, lengths=(25, 25, 25, 25), heads=2))
    emulated.prefill(x, cu_seqlens=torch.tensor(ends, dtype=torch.int32))
