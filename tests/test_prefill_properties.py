"""The laws of Kimi Delta Attention, over the reference and every backend that can run here.

Each test's name states a law. `backend` is a kda_jit.testing.runner.Runner; the reference is one of
them, and comes first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from kda_jit.reference import l2norm
from kda_jit.testing import REGIMES, TABLE_ROWS, Case, Inputs, assert_close, relative_rms
from kda_jit.testing.runner import Runner
from kda_jit.testing.strategies import BOUNDED, UNBOUNDED, cases

BT = 16  # the smallest chunk in use

# Kinds of numbers on which comparing two runs is fair: elsewhere the law would hold too, but the
# limit would be so wide that nothing could break it.
MILD = ("random", "slow", "mixed", "saturated_both", "zero_rows")


def tensors(backend: Runner, case: Case) -> Inputs:
    return case.tensors(backend.device, backend.dtype, backend.head_dim)


def unbounded_here(backend: Runner) -> bool:
    return backend.name != "cuda"


def assert_same(backend: Runner, name: str, got: Tensor, want: Tensor, **where: Any) -> None:
    """Equal bits, or equal to rounding where the runner does not promise bits."""
    if backend.bitwise:
        assert torch.equal(got, want), (
            f"{name}: {int((got != want).sum())} of {got.numel()} elements differ, "
            f"by up to {(got - want).abs().max().item():.1e}     {where.get('case')}"
        )
    else:
        assert_close(name, got, want, 1e-6, **where)


def bits(x: Tensor) -> Tensor:
    """For comparing tensors that hold NaN."""
    return x.contiguous().view(torch.uint8)


# -- against the recurrence ----------------------------------------------------------------------


@given(case=cases(regimes=BOUNDED))
@example(case=Case(lengths=(0, 0, BT + 1, 0), heads=1, padding=3))
@example(case=Case(lengths=(1, 2 * BT, 1), heads=3, value_heads=6, regime="saturated_closed"))
def test_prefill_is_the_recurrence(backend: Runner, case: Case) -> None:
    x = tensors(backend, case)
    check_against_recurrence(backend, x, case)


@given(case=cases(regimes=UNBOUNDED))
@example(case=Case(lengths=(BT, 3), heads=2, regime="unbounded_real"))
def test_prefill_is_the_recurrence_with_an_unbounded_gate(backend: Runner, case: Case) -> None:
    if not unbounded_here(backend):
        pytest.skip("the CUDA backend has a bounded gate only")
    x = tensors(backend, case)
    check_against_recurrence(backend, x, case)


@pytest.mark.parametrize("regime", [r for r in REGIMES if r not in TABLE_ROWS])
def test_every_regime_is_finite_and_accurate(backend: Runner, regime: str) -> None:
    if regime in UNBOUNDED and not unbounded_here(backend):
        pytest.skip("the CUDA backend has a bounded gate only")
    case = Case(seed=1, lengths=(70, 0, 150), heads=2, regime=regime)
    x = tensors(backend, case)
    check_against_recurrence(backend, x, case)


@pytest.mark.parametrize("scale", [None, 0.0, 1.0, -0.1])
def test_scale_multiplies_the_output_and_zero_is_not_the_default(
    backend: Runner, scale: float | None
) -> None:
    case = Case(seed=3, lengths=(40,), heads=2, scale=scale)
    x = tensors(backend, case)
    check_against_recurrence(backend, x, case)
    if scale == 0.0:
        assert not backend.prefill(x)[0].any()


def check_against_recurrence(backend: Runner, x: Inputs, case: Case) -> None:
    want = x.reference()
    out, state = backend.prefill(x)
    tokens = x.bounds[-1] if x.cu_seqlens is not None else x.q.shape[1]
    assert torch.isfinite(out[:, :tokens]).all()
    assert torch.isfinite(state).all()
    out_limit, state_limit = backend.limits(x, want)
    assert_close("out", out, want.out, out_limit, cu_seqlens=x.cu_seqlens, case=case)
    assert_close("final_state", state, want.final_state, state_limit, case=case)


# -- laws ----------------------------------------------------------------------------------------


@given(case=cases(max_sequences=1, regimes=MILD, dense=False), cut=st.integers(0, 130))
@example(case=Case(seed=0, lengths=(BT + 1,), regime="saturated_closed"), cut=BT)
@example(case=Case(seed=1, lengths=(65,), regime="slow", value_heads=2), cut=17)
def test_prefill_in_two_parts_equals_one(backend: Runner, case: Case, cut: int) -> None:
    """Running [0, cut), then [cut, T) from its final state, is running [0, T)."""
    (T,) = case.lengths
    cut = min(cut, T)
    x = tensors(backend, case)
    out, state = backend.prefill(x)
    first_out, middle = backend.prefill(x.pack([(0, 0, cut)]))
    rest = x.pack([(0, cut, T)]).replace(initial_state=middle)
    rest_out, end = backend.prefill(rest)

    out_limit, state_limit = backend.limits(x)
    parts = torch.cat([first_out, rest_out], 1)
    assert_close("out", parts, out[:, :T], out_limit, case=case)
    assert_close("final_state", end, state, state_limit, case=case)


@given(case=cases(max_sequences=2, regimes=("slow", "mixed"), initial=True))
@example(case=Case(lengths=(BT + 1, 0, 3), regime="mixed"))
def test_zero_beta_only_decays_the_state(backend: Runner, case: Case) -> None:
    """Nothing is learnt: S is the product of the decays times the initial S."""
    x = tensors(backend, case)
    x = x.replace(beta=torch.full_like(x.beta, -200.0))
    _, state = backend.prefill(x)
    want = x.reference().final_state
    _, state_limit = backend.limits(x)
    assert_close("final_state", state, want, state_limit, case=case)

    # The keys and values must not matter at all.
    other = x.replace(k=x.k.roll(1, -1), v=-x.v)
    assert torch.equal(backend.prefill(other)[1], state), f"learnt with beta 0: {case}"


@given(
    case=cases(max_sequences=1, regimes=MILD, dense=False),
    cut=st.integers(0, 130),
    seed=st.integers(0, 99),
)
@example(case=Case(lengths=(2 * BT,), regime="slow"), cut=BT + 3, seed=5)
def test_output_ignores_later_tokens(backend: Runner, case: Case, cut: int, seed: int) -> None:
    (T,) = case.lengths
    assume(T > 0)
    cut = min(cut, T)
    x = tensors(backend, case)
    y = tensors(backend, Case(seed=1000 + seed, **_but_seed(case)))
    changed = x.replace(
        **{
            name: torch.cat([getattr(x, name)[:, :cut], getattr(y, name)[:, cut:]], 1)
            for name in ("q", "k", "v", "g", "beta")
        }
    )
    out, other = backend.prefill(x)[0], backend.prefill(changed)[0]
    assert_same(backend, "out", other[:, :cut], out[:, :cut], case=case)
    if cut < T:
        assert not torch.equal(other[:, cut:T], out[:, cut:T])


@given(case=cases(max_sequences=2, regimes=("random", "slow", "mixed"), initial=True))
@example(case=Case(lengths=(33,), heads=2))
def test_output_is_linear_in_v_and_initial_state(backend: Runner, case: Case) -> None:
    """Values are small integers, so that 2 v1 - v2 is exact in every dtype."""
    assume(sum(case.lengths) > 0)
    x = tensors(backend, case)
    assert x.initial_state is not None

    def integers(like: Tensor, seed: int, scale: float) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return (torch.randint(-8, 9, like.shape, generator=g) * scale).to(like)

    v1, v2 = integers(x.v, 1, 1.0), integers(x.v, 2, 1.0)
    s1, s2 = integers(x.initial_state, 3, 0.0625), integers(x.initial_state, 4, 0.0625)
    one = x.replace(v=v1, initial_state=s1)
    two = x.replace(v=v2, initial_state=s2)
    both = x.replace(v=2 * v1 - v2, initial_state=2 * s1 - s2)
    (o1, f1), (o2, f2), (o, f) = (backend.prefill(y) for y in (one, two, both))
    out_limit, state_limit = backend.limits(both)
    want = 2 * o1.double() - o2.double()
    assert_close("out", o, want, out_limit, cu_seqlens=x.cu_seqlens, case=case)
    assert_close("final_state", f, 2 * f1.double() - f2.double(), state_limit, case=case)


@given(case=cases(max_sequences=5, dense=False), order=st.randoms(use_true_random=False))
@example(case=Case(lengths=(0, 0, 37, 0, 1, 65, 0)), order=None)
def test_packed_sequences_do_not_touch_each_other(backend: Runner, case: Case, order: Any) -> None:
    """A sequence alone is the same sequence among others, in any order, with empty ones between."""
    x = tensors(backend, case)
    places = list(range(x.N)) * 2  # each twice, in different company
    if order is not None:
        order.shuffle(places)
    starts = x.bounds
    lengths = [end - begin for begin, end in pairwise(starts)]
    mixed = x.pack([(n, 0, lengths[n]) for n in places])
    out, state = backend.prefill(mixed)
    for i, n in enumerate(places):
        alone_out, alone_state = backend.prefill(x.sequence(n))
        got = out[:, mixed.bounds[i] : mixed.bounds[i + 1]]
        assert_same(backend, "out", got, alone_out, case=case)
        assert_same(backend, "final_state", state[i : i + 1], alone_state, case=case)


@given(case=cases(max_sequences=4, dense=False, initial=True), victim=st.integers(0, 3))
@example(case=Case(lengths=(BT, 5, BT)), victim=1)
def test_nan_in_one_sequence_stays_there(backend: Runner, case: Case, victim: int) -> None:
    x = tensors(backend, case)
    victim = min(victim, x.N - 1)
    out, state = backend.prefill(x)
    begin, end = x.bounds[victim : victim + 2]
    poisoned = {name: getattr(x, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for tensor in poisoned.values():
        tensor[:, begin:end] = torch.nan
    assert x.initial_state is not None
    poisoned["initial_state"] = x.initial_state.clone()
    poisoned["initial_state"][victim] = torch.nan
    bad_out, bad_state = backend.prefill(x.replace(**poisoned))

    others = [n for n in range(x.N) if n != victim]
    assert_same(backend, "final_state", bad_state[others], state[others], case=case)
    for n in others:
        rows = slice(x.bounds[n], x.bounds[n + 1])
        assert_same(backend, "out", bad_out[:, rows], out[:, rows], case=case)
    assert bad_state[victim].isnan().all(), "the poison had no effect"


@given(case=cases(max_sequences=2, regimes=("random",)))
@example(case=Case(lengths=(BT + 2,), heads=2))
def test_repeated_key_with_beta_one_overwrites(backend: Runner, case: Case) -> None:
    """With no decay and beta 1, asking the state for the key gives the last value written."""
    x = tensors(backend, case)
    key = x.k[:1, :1] if x.k.shape[1] else x.k.new_ones(1, 1, *x.k.shape[2:])
    x = x.replace(
        k=key.expand_as(x.k).contiguous(),
        g=torch.full_like(x.g, -200.0),
        beta=torch.full_like(x.beta, 200.0),
    )
    _, state = backend.prefill(x)
    group = x.v.shape[2] // x.k.shape[2]
    unit = l2norm(key.double())[0, 0].repeat_interleave(group, 0)  # [HV, K]
    values = x.v.flatten(0, 1)
    limit = 2 * backend.limits(x)[1].allowed
    for n, (begin, end) in enumerate(pairwise(x.bounds)):
        if begin < end:
            recalled = torch.einsum("hvk,hk->hv", state[n].double(), unit)
            assert relative_rms(recalled, values[end - 1]) < limit, case


@given(case=cases(max_sequences=4), data=st.data())
@example(case=Case(lengths=(130, 15, 0, 64), padding=2), data=None)
def test_checkpoint_is_the_final_state_of_the_cut_sequence(
    backend: Runner, case: Case, data: Any
) -> None:
    x = tensors(backend, case)
    lengths = [end - begin for begin, end in pairwise(x.bounds)]
    offsets = [
        BT * (n // BT if data is None else data.draw(st.integers(0, n // BT))) for n in lengths
    ]
    shape = (x.N, x.v.shape[2], x.v.shape[3], x.q.shape[3])
    checkpoint = torch.full(shape, torch.nan, device=backend.device)
    out, state = backend.prefill(
        x,
        checkpoint_state=checkpoint,
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32, device=backend.device),
    )
    plain_out, plain_state = backend.prefill(x)
    rows = slice(0, x.bounds[-1] if case.packed else x.q.shape[1])
    assert torch.equal(out[:, rows], plain_out[:, rows]), f"asking changed the output: {case}"
    assert torch.equal(state, plain_state)
    for n, offset in enumerate(offsets):
        if offset:
            _, want = backend.prefill(x.pack([(n, 0, offset)]))
            assert_same(backend, "checkpoint_state", checkpoint[n : n + 1], want, case=case)
        else:
            assert checkpoint[n].isnan().all(), f"row {n} without a checkpoint was written: {case}"


@given(case=cases(max_sequences=4, dense=False, initial=True), data=st.data())
@example(case=Case(lengths=(BT, 0, 33, 1, 0)), data=None)
def test_pool_is_dense_states_in_place(backend: Runner, case: Case, data: Any) -> None:
    """Slots are read and written by index; -1 is no slot; a fresh sequence reads no old bytes."""
    x = tensors(backend, case)
    N = x.N
    assert x.initial_state is not None
    slots = data.draw(st.permutations(range(N + 3)))[:N] if data else list(range(N + 2, 2, -1))
    kinds = (
        data.draw(st.lists(st.sampled_from(("old", "fresh", "none")), min_size=N, max_size=N))
        if data
        else ["old", "fresh", "none", "fresh", "old"][:N]
    )
    pool = torch.full((N + 3, *x.initial_state.shape[1:]), torch.nan, device=backend.device)
    pool = pool.to(x.initial_state.dtype)
    dense = torch.zeros_like(x.initial_state)
    for n, kind in enumerate(kinds):
        if kind == "old":
            pool[slots[n]] = dense[n] = x.initial_state[n]
    index = [-1 if kind == "none" else slot for kind, slot in zip(kinds, slots, strict=True)]
    before = pool.clone()
    final = torch.empty_like(dense)
    want_out, _ = backend.prefill(x.replace(initial_state=dense), final_state=final)
    out, returned = backend.prefill(
        x.replace(initial_state=pool),
        state_indices=torch.tensor(index, dtype=torch.int32, device=backend.device),
        has_initial_state=torch.tensor([k == "old" for k in kinds], device=backend.device),
    )
    assert returned.data_ptr() == pool.data_ptr()
    end = x.bounds[-1]
    assert torch.equal(out[:, :end], want_out[:, :end])
    used = [slot for slot in index if slot >= 0]
    for n, slot in enumerate(index):
        if slot >= 0:
            assert torch.equal(pool[slot], final[n]), f"slot {slot} of sequence {n}: {case}"
    for slot in set(range(N + 3)) - set(used):
        assert torch.equal(bits(pool[slot]), bits(before[slot])), f"slot {slot}: {case}"


@given(case=cases(max_sequences=3))
@example(case=Case(lengths=(17,), heads=1))
def test_column_slices_of_a_projection_equal_contiguous_inputs(backend: Runner, case: Case) -> None:
    x = tensors(backend, case)
    flat = torch.cat([y.flatten(2) for y in x.args], -1)
    width = -(-flat.shape[-1] // 8) * 8 + 8  # rows stay multiples of 16 bytes apart
    wide = flat.new_full((*flat.shape[:2], width), torch.nan)
    wide[..., : flat.shape[-1]] = flat
    views, column = {}, 0
    for name, y in zip(("q", "k", "v", "g", "beta"), x.args, strict=True):
        size = y.shape[2:].numel()
        views[name] = wide[..., column : column + size].unflatten(-1, y.shape[2:])
        column += size
    out, state = backend.prefill(x)
    strided_out, strided_state = backend.prefill(x.replace(**views))
    rows = slice(0, x.bounds[-1] if case.packed else x.q.shape[1])
    assert_same(backend, "out", strided_out[:, rows], out[:, rows], case=case)
    assert_same(backend, "final_state", strided_state, state, case=case)


@given(case=cases(max_sequences=3, dense=False), padding=st.integers(1, 60))
@example(case=Case(lengths=(BT + 1, 0)), padding=31)
def test_rows_past_the_end_are_neither_read_nor_written(
    backend: Runner, case: Case, padding: int
) -> None:
    """The padding of a case is NaN in every input."""
    bare = tensors(backend, Case(**(_fields(case) | {"padding": 0})))
    x = tensors(backend, Case(**(_fields(case) | {"padding": padding})))
    end = x.bounds[-1]
    buffer = torch.full_like(x.v, 7.0)
    out, state = backend.prefill(x, out=buffer)
    assert out is buffer
    assert bool((out[:, end:] == 7.0).all()), f"padded rows were written: {case}"
    bare_out, bare_state = backend.prefill(bare)
    assert_same(backend, "out", out[:, :end], bare_out, case=case)
    assert_same(backend, "final_state", state, bare_state, case=case)


@given(case=cases(max_sequences=2, grouped=False, regimes=MILD), group=st.sampled_from((2, 3)))
@example(case=Case(lengths=(33,), heads=2), group=2)
def test_grouped_value_heads_are_repeated_query_and_key_heads(
    backend: Runner, case: Case, group: int
) -> None:
    grouped = Case(**(_fields(case) | {"value_heads": group * case.heads}))
    x = tensors(backend, grouped)
    repeated = x.replace(q=x.q.repeat_interleave(group, 2), k=x.k.repeat_interleave(group, 2))
    out, state = backend.prefill(x)
    want_out, want_state = backend.prefill(repeated)
    rows = slice(0, x.bounds[-1] if case.packed else x.q.shape[1])
    assert_same(backend, "out", out[:, rows], want_out[:, rows], case=grouped)
    assert_same(backend, "final_state", state, want_state, case=grouped)


@given(case=cases(max_sequences=3, dense=False))
@example(case=Case(lengths=(0, 0), heads=2))
@example(case=Case(lengths=(0, 5, 0), initial=False))
def test_an_empty_sequence_keeps_its_state(backend: Runner, case: Case) -> None:
    case = Case(**(_fields(case) | {"lengths": (0, *case.lengths, 0, 0)}))
    x = tensors(backend, case)
    _, state = backend.prefill(x)
    for n, length in enumerate(case.lengths):
        if length == 0:
            want = torch.zeros_like(state[n]) if x.initial_state is None else x.initial_state[n]
            assert torch.equal(state[n], want.to(state.dtype)), f"sequence {n}: {case}"


@given(case=cases(max_sequences=3))
def test_inputs_are_not_modified_and_runs_repeat_bit_for_bit(backend: Runner, case: Case) -> None:
    x = tensors(backend, case)
    named = [
        t for t in (*x.args, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens) if t is not None
    ]
    before = [t.clone() for t in named]
    out, state = backend.prefill(x)
    again_out, again_state = backend.prefill(x)
    for t, old in zip(named, before, strict=True):
        assert torch.equal(bits(t), bits(old)), case
    assert out.numel() == 0 or out.data_ptr() != again_out.data_ptr()
    rows = slice(0, x.bounds[-1] if case.packed else x.q.shape[1])
    assert torch.equal(again_out[:, rows], out[:, rows])
    assert torch.equal(again_state, state)


# -- guards of the tests themselves --------------------------------------------------------------


def test_a_transposed_state_is_noticed(backend: Runner) -> None:
    """With K = V no shape check can: the layout must show in the numbers."""
    x = tensors(backend, Case(seed=2, lengths=(20,), heads=2, regime="slow"))
    assert x.initial_state is not None
    out, state = backend.prefill(x)
    flipped = x.replace(initial_state=x.initial_state.mT.contiguous())
    other_out, other_state = backend.prefill(flipped)
    assert relative_rms(other_out, out) > 0.1
    assert relative_rms(other_state, state) > 0.1


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("final_dtype", [torch.float32, torch.bfloat16])
def test_state_dtypes_mix(backend: Runner, state_dtype: str, final_dtype: torch.dtype) -> None:
    case = Case(seed=5, lengths=(20, 0, 3), heads=2, state_dtype=state_dtype)
    x = tensors(backend, case)
    want = x.reference()
    shape = want.final_state.shape
    final = torch.full(shape, torch.nan, dtype=final_dtype, device=backend.device)
    out, returned = backend.prefill(x, final_state=final)
    assert returned is final
    out_limit, state_limit = backend.limits(x, want)
    rounding = 4e-3 if final_dtype is torch.bfloat16 else 0.0
    assert_close("out", out, want.out, out_limit, cu_seqlens=x.cu_seqlens, case=case)
    limit = state_limit.allowed + rounding
    assert_close("final_state", final, want.final_state, limit, case=case)


@pytest.mark.parametrize("count", [127, 300])
def test_many_short_sequences(backend: Runner, count: int) -> None:
    case = Case(seed=6, lengths=tuple((1, 17, 0, 33, 2)[i % 5] for i in range(count)))
    x = tensors(backend, case)
    check_against_recurrence(backend, x, case)


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def _but_seed(case: Case) -> dict[str, Any]:
    return {name: value for name, value in _fields(case).items() if name != "seed"}
