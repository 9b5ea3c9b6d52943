"""What schedules have in common, and what only some have: equal bits, reused memory, fallbacks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from kda_jit.backends import cuda
from kda_jit.backends.base import last_launch
from kda_jit.testing import Case, Inputs
from kda_jit.testing.cases import BOUNDED
from kda_jit.workspace import Workspace
from tests.emulation.conftest import HOPPER, RUNS, WAYS, Way
from tests.emulation.emulator import Emulator


def bits(*tensors: Tensor) -> list[Tensor]:
    """Copies that compare where there is NaN."""
    return [x.detach().clone().contiguous().view(torch.uint8) for x in tensors]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def mixed(seed: int) -> tuple[Inputs, dict[str, Tensor]]:
    """A batch of short, empty and longer sequences, with checkpoints for some."""
    rng = random.Random(seed)
    lengths = [rng.choice((0, 1, 16, 31, 33, 64, 100, 200)) for _ in range(rng.randint(2, 6))]
    heads, group = rng.randint(1, 2), rng.randint(1, 2)
    case = Case(
        seed=seed,
        lengths=tuple(lengths),
        heads=heads,
        value_heads=group * heads,
        regime=rng.choice(BOUNDED),
        padding=rng.choice((0, 20)),
    )
    x = case.tensors()
    offsets = torch.tensor([16 * rng.randint(0, n // 16) for n in lengths], dtype=torch.int32)
    kept = torch.full((len(lengths), case.HV, 128, 128), torch.nan)
    return x, {"checkpoint_state": kept, "checkpoint_offsets": offsets}


@pytest.mark.parametrize("run", range(6 * RUNS))
def test_the_schedules_of_hopper_have_equal_bits_in_any_order_of_events(run: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    found: dict[str, list[Tensor]] = {}
    x, more = mixed(seed)
    print(x.case)
    for name in HOPPER:
        with Way(name)() as emulated:
            for _ in range(2):
                kept = torch.full_like(more["checkpoint_state"], torch.nan)
                got = bits(*emulated.prefill(x, **(more | {"checkpoint_state": kept})), kept)
                assert same(found.setdefault("first", got), got), (name, emulated.seed)


@pytest.mark.parametrize("name", WAYS)
def test_what_ran_is_what_was_asked_for(name: str) -> None:
    kernels = {
        "portable": ("kda_prepare", "kda_recurrence"),
        "hopper": ("kda_prepare", "kda_recurrence"),
        "hopper_single": ("kda_prepare", "kda_recurrence_single"),
        "fused": ("kda_fused",),
        "pipeline": ("kda_pipeline_begin", "kda_pipeline"),
    }
    schedule, options = WAYS[name]
    with Way(name)() as emulated:
        emulated.prefill(Case(lengths=(40,)).tensors())
    launch = last_launch()
    assert launch is not None
    assert launch.kernels == kernels[schedule]
    assert launch.target == options.get("target", "sm_90a")


def test_a_pipeline_as_it_is_planned() -> None:
    """More chunks than producers work on at a time: they go round, and the rings fill up."""
    x = Case(seed=5, lengths=(700, 0, 33, 900), heads=2).tensors()
    with Way("hopper")() as emulated:
        want = bits(*emulated.prefill(x))
    for _ in range(2 * RUNS):
        with Way("pipeline")(any_plan=False, sm_count=12) as emulated:
            assert same(bits(*emulated.prefill(x)), want)


@pytest.mark.parametrize("sm_count", [2, 4, 6, 14])
def test_units_in_any_number_of_shares(sm_count: int) -> None:
    x = Case(seed=6, lengths=(130, 0, 33, 200, 1, 64), heads=3).tensors()
    with Way("hopper")() as emulated:
        want = bits(*emulated.prefill(x))
    for _ in range(2 * RUNS):
        with Way("fused")(sm_count=sm_count) as emulated:
            assert same(bits(*emulated.prefill(x)), want)


@pytest.mark.parametrize("name", WAYS)
def test_a_sequence_of_nan_does_not_reach_its_neighbours(name: str) -> None:
    """Though tiles are copied whole, and end in the next sequence's tokens."""
    lengths = (33, 40, 17, 63, 96, 5)
    x = Case(seed=10, lengths=lengths, heads=1).tensors()
    with Way(name)() as emulated:
        want, states = emulated.prefill(x)
        spoilt = {key: getattr(x, key).clone() for key in ("q", "k", "v", "g", "beta")}
        for bad in (1, 3, 5):
            begin = sum(lengths[:bad])
            for tensor in spoilt.values():
                tensor[:, begin : begin + lengths[bad]] = torch.nan
        out, after = emulated.prefill(x.replace(**spoilt))
        for good in (0, 2, 4):
            begin = sum(lengths[:good])
            rows = slice(begin, begin + lengths[good])
            assert same(bits(out[:, rows], after[good]), bits(want[:, rows], states[good]))


def test_rows_with_no_stride_go_without_tensor_maps() -> None:
    """Such a batch is for another schedule."""
    x = Case(seed=7, lengths=(40, 40), heads=1, packed=False).tensors()
    y = x.replace(k=x.k[:1].expand_as(x.k))
    with Way("hopper")() as emulated:
        want = bits(*emulated.prefill(y))
    with Way("fused")() as emulated:
        emulated.schedule = "hopper"  # what is to run, while `fused` is asked for
        assert same(bits(*emulated.prefill(y)), want)


@pytest.mark.parametrize("name", WAYS)
def test_a_workspace_is_used_again_as_it_was_left(name: str) -> None:
    """By calls of other sizes, and by the very same call, as a graph replays it."""
    calls = [Case(seed=8, lengths=n, heads=2).tensors() for n in ((130, 33), (64,), (1, 90, 70))]
    with Way(name)() as emulated:
        want = [bits(*emulated.prefill(x)) for x in calls]
        memory = Workspace(device="cpu")
        for i in (0, 1, 2, 0, 0, 2):
            got = bits(*emulated.prefill(calls[i], workspace=memory))
            assert same(got, want[i]), (i, emulated.seed)


def test_a_replay_hands_states_over_with_the_number_of_the_call_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_calls", itertools.repeat(5))
    x = Case(seed=9, lengths=(300, 200), heads=2, initial=False).tensors()
    with Way("fused")() as emulated:
        want = bits(*emulated.prefill(x))
        memory = Workspace(device="cpu")
        for _ in range(8):
            for y in (x, x.replace(v=-x.v)):
                out, state = emulated.prefill(y, workspace=memory)
            assert same(bits(-out), want[:1])
            assert same(bits(-state), want[1:])


def test_an_emulator_leaves_the_backend_as_it_was() -> None:
    names = ("load", "driver", "_sm_count", "_target", "plan_pipeline")
    before = [getattr(cuda, name) for name in names]
    with Emulator("fused", any_plan=True):
        assert all(getattr(cuda, name) is not old for name, old in zip(names, before))
    assert [getattr(cuda, name) for name in names] == before


def test_lanes_may_fall_behind_their_warp(way: Way) -> None:
    """As CUDA allows: what one lane does alone waits for those that ask the same barrier."""
    x = Case(seed=3, lengths=(33, 0, 270, 16), heads=1, value_heads=2).tensors()
    want = []
    for _ in range(4 * RUNS):
        with way(lanes_apart=True) as emulated:
            got = bits(*emulated.prefill(x))
            want = want or got
            assert same(want, got), emulated.seed
