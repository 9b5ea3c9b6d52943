"""Prefill on the GPU, by every CUDA schedule and by Triton: numbers, lengths, strides, states."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit.reference import l2norm, recurrent_kda
from kda_jit.testing import TABLE_ROWS, Case, Inputs, assert_close, relative_rms
from kda_jit.testing.numeric import worst_state_error
from kda_jit.testing.strategies import BOUNDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

INPUTS = ("q", "k", "v", "g", "beta")
LENGTHS = (0, 0, 1, 2, 15, 0, 16, 17, 31, 32, 33, 0, 0, 48, 63, 64, 65, 100, 0, 0)
NAN = float("nan")
#: Of cu_seqlens, state_indices, checkpoint_offsets. Triton compiles anew for each triple.
INDEX_DTYPES = (
    (torch.int32, torch.int32, torch.int64),
    (torch.int32, torch.int64, torch.int32),
    (torch.int64, torch.int32, torch.int32),
    (torch.int64, torch.int64, torch.int64),
)

#: Relative RMS errors (out, state) at T = 4096, H = 8, fp32 states, against a float64 recurrence:
#: FlashKDA as shipped in vLLM 0.33 (H200), then fla-core 0.6's chunk_kda.
PEERS = {
    "table_1_mixed_rates": ((0.0059, 0.0049), (0.0041, 0.0030)),
    "table_2_plain": ((0.0057, 0.0051), (0.0041, 0.0028)),
    "table_3_g_minus_8": ((0.0072, 0.0062), (0.0055, 0.0046)),
    "table_4_g_minus_4": ((0.0063, 0.0048), (0.0044, 0.0034)),
    "table_5_g_plus_8": ((0.0053, 0.0052), (0.0038, 0.0023)),
    "table_6_wide_gate": ((0.0059, 0.0047), (0.0041, 0.0030)),
    "table_7_bias": ((0.0069, 0.0057), (0.0053, 0.0043)),
    "table_8_keep": ((0.0063, 0.0054), (0.0059, 0.0053)),
    "table_9_keep_near_keys": ((0.0187, 0.0253), (0.0206, 0.0286)),
}


def bits(x: Tensor) -> Tensor:
    """For comparing tensors that hold NaN."""
    return x.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def ints(values: Any, x: Inputs, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(list(values), dtype=dtype, device=x.q.device)


def padded(x: Tensor, rows: int, columns: int = 0) -> Tensor:
    """The same values as a view into NaN: `rows` more tokens a batch row, wider tokens."""
    B, T = x.shape[:2]
    flat = x.flatten(2)
    # Rows stay multiples of 16 bytes apart, as the CUDA backend asks.
    width = -(-flat.shape[2] // 8) * 8 + columns
    wide = torch.full((B, T + rows, width), NAN, dtype=x.dtype, device=x.device)
    view = wide[:, :T, : flat.shape[2]]
    view.copy_(flat)
    return view.unflatten(2, x.shape[2:])


# -- accuracy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", TABLE_ROWS)
def test_error_is_below_the_peers_in_every_row_of_the_table(
    cuda: Any, row: str, record_property: Any
) -> None:
    x, want = cuda.exact(Case(seed=20, lengths=(4096,), heads=8, regime=row))
    out, state = cuda.prefill(x)
    errors = relative_rms(out, want.out), relative_rms(state, want.final_state)
    record_property("relative_rms", errors)
    print(f"{cuda.schedule} {row}: out {errors[0]:.4f}, state {errors[1]:.5f}")
    for name, peer in zip(("FlashKDA", "fla"), PEERS[row]):
        assert errors[0] <= peer[0], f"out {errors[0]:.4f}, {name} {peer[0]}"
        assert errors[1] <= peer[1], f"state {errors[1]:.4f}, {name} {peer[1]}"


@pytest.mark.parametrize("regime", BOUNDED)
def test_every_regime_is_accurate_in_its_worst_block(way: Any, regime: str) -> None:
    """Grouped heads, a NaN tail, every result pre-filled with NaN, checkpoints on the way."""
    case = Case(
        seed=21,
        lengths=(33, 0, 100, 16, 1, 257),
        heads=2,
        value_heads=4,
        regime=regime,
        padding=9,
    )
    x, want = way.exact(case)
    offsets = ints((32, 0, 96, 16, 0, 144), x)
    saved = way.nan_states(x)
    out, state = way.prefill(
        x,
        out=torch.full_like(x.v, NAN),
        final_state=way.nan_states(x),
        checkpoint_state=saved,
        checkpoint_offsets=offsets,
    )
    way.check(x, want, out, state)
    exact = recurrent_kda(*x.args, **x.kwargs, checkpoint_offsets=offsets)
    assert exact.checkpoint_state is not None
    rows = offsets > 0
    limit = way.limits(x, want)[1]
    assert_close("checkpoint_state", saved[rows], exact.checkpoint_state[rows], limit, case=case)
    assert saved[~rows].isnan().all()
    assert out[:, x.bounds[-1] :].isnan().all()


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("regime", ["repeated", "slow", "table_9_keep_near_keys"])
def test_long_weakly_forgotten_sequences_stay_accurate(
    way: Any, regime: str, initial: bool
) -> None:
    """One key for all tokens makes a Neumann series for the inverse diverge; decay in bf16 is 1."""
    case = Case(seed=22, lengths=(2048, 17), heads=2, regime=regime, initial=initial)
    x, want = way.exact(case)
    way.check(x, want, *way.prefill(x))


@pytest.mark.parametrize("length", [64, 128, 2048])
def test_strongly_correlated_keys(way: Any, length: int) -> None:
    case = Case(seed=23, lengths=(length,), heads=2)
    x = case.tensors(way.device)
    noise = torch.randn(x.k.shape, generator=torch.Generator().manual_seed(1)).to(way.device)
    base = l2norm(torch.randn(128, generator=torch.Generator().manual_seed(2))).to(way.device)
    x = x.replace(
        k=l2norm(base + 0.05 * noise).to(x.k.dtype),
        beta=torch.full_like(x.beta, 10.0),
        g=torch.full_like(x.g, -5.5),  # 0.02 per token
        A_log=torch.zeros_like(x.A_log),
        dt_bias=torch.zeros_like(x.dt_bias),
    )
    want = x.reference()
    way.check(x, want, *way.prefill(x))


def test_one_key_for_a_whole_prompt_and_blocks_of_equal_values(way: Any) -> None:
    """16 equal tokens in a row are where an f16 Neumann inverse of I + L gives NaN."""
    case = Case(seed=24, lengths=(1024,), heads=1, regime="repeated", initial=False)
    x = case.tensors(way.device)
    x = x.replace(v=x.v[:, ::16].repeat_interleave(16, 1).contiguous())
    want = x.reference()
    out, state = way.prefill(x)
    way.check(x, want, out, state)
    # With beta near 1 the state recalls the last value: the recurrence does, and so must this.
    unit = l2norm(x.k[0, -1].double())
    for S, limit in ((want.final_state, 1e-3), (state, 2e-2)):
        recalled = torch.einsum("hvk,hk->hv", S[0].double(), unit)
        assert relative_rms(recalled, x.v[0, -1]) < limit


def test_decay_of_4096_tokens_is_kept_in_fp32(way: Any) -> None:
    """Nothing is learnt, so only the gates count: a decay rounded to bf16 would be 1."""
    case = Case(seed=25, lengths=(4096,), heads=2, regime="slow")
    x = case.tensors(way.device)
    x = x.replace(beta=torch.full_like(x.beta, -200.0))
    want = x.reference().final_state
    _, state = way.prefill(x)
    assert worst_state_error(state, want).error < 1e-4
    assert relative_rms(x.initial_state, want) > 0.2  # else there was no decay to get wrong


def test_error_of_the_state_does_not_grow_with_the_length(way: Any) -> None:
    def error(length: int) -> float:
        case = Case(seed=26, lengths=(length,), heads=2, regime="slow", initial=False)
        x = case.tensors(way.device)
        x = x.replace(beta=torch.full_like(x.beta, 0.3))
        return worst_state_error(way.prefill(x)[1], x.reference().final_state).error

    short, long = error(512), error(4096)
    assert long < 1.5 * short + 2e-4, f"{short:.1e} after 512 tokens, {long:.1e} after 4096"


def test_decay_to_the_last_valid_token_of_a_partial_chunk(way: Any) -> None:
    x, want = way.exact(Case(seed=27, lengths=(16, 31, 48, 64, 111, 192), regime="slow"))
    way.check(x, want, *way.prefill(x))


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_scale_of_the_values_is_that_of_the_result(way: Any, power: int) -> None:
    """v and the initial state from 1e-30 to 1e30: f16 inside must not show."""
    case = Case(seed=28, lengths=(100, 33), heads=2, regime="mixed")
    x, _ = way.exact(case)
    factor = 2.0**power
    y = x.replace(v=x.v * factor, initial_state=x.initial_state * factor)
    want = y.reference()
    way.check(y, want, *way.prefill(y))


@pytest.mark.parametrize("scales", [(1e-30, 1e30), (1e30, 1e-30), (1.0, 1e25)])
def test_values_and_states_of_very_different_size(way: Any, scales: tuple[float, float]) -> None:
    """Each sequence, and each stretch of a sequence, has its own size."""
    case = Case(seed=29, lengths=(96, 96), heads=2, regime="random")
    x, _ = way.exact(case)
    v = x.v.clone()
    v[:, :48] *= scales[0]
    v[:, 48:] *= scales[1]
    y = x.replace(v=v)
    want = y.reference()
    way.check(y, want, *way.prefill(y))


@pytest.mark.parametrize("power", [-90, -20, 20, 90])
def test_scale_of_keys_and_queries_hardly_matters(way: Any, power: int) -> None:
    """Squares of 2^90 overflow fp32; far below the epsilon of l2norm keys vanish, with words."""
    case = Case(seed=30, lengths=(70,), heads=2, regime="random")
    x, _ = way.exact(case)
    y = x.replace(q=x.q * 2.0**power, k=x.k * 2.0**power)
    want = y.reference()
    out, state = way.prefill(y)
    assert out.isfinite().all()
    assert state.isfinite().all()
    if power > -90:  # q and k of 1e-27 leave nothing to compare
        way.check(y, want, out, state)


@pytest.mark.parametrize("logit", [-10.0, -20.0, -40.0])
def test_tiny_betas_write_tiny_but_exact_states(cuda: Any, logit: float) -> None:
    """Down to 1e-18. Triton and, below 1e-6, outputs of a state from zero are not so exact."""
    case = Case(seed=31, lengths=(100, 7), heads=2, initial=False)
    x = case.tensors(cuda.device)
    y = x.replace(beta=x.beta + logit)
    want = y.reference()
    out, state = cuda.prefill(y)
    if logit == -10.0:
        cuda.check(y, want, out, state)
    assert_close("final_state", state, want.final_state, cuda.limits(y, want)[1], case=case)
    # And beside tokens that do write.
    beta = x.beta.clone()
    beta[:, ::3] += logit
    y = x.replace(beta=beta)
    cuda.check(y, y.reference(), *cuda.prefill(y))


@pytest.mark.parametrize("logit", [-6.0, -11.5, -15.0])
def test_columns_of_zeros_stay_zero_however_small_the_betas(cuda: Any, logit: float) -> None:
    """A chunk of tiny betas moves the units of the state, which for zeros nothing brings back."""
    x = Case(seed=32, lengths=(2100,), heads=1, initial=False).tensors(cuda.device)
    v = x.v.clone()
    v[..., 32:64] = 0
    y = x.replace(v=v, beta=torch.full_like(x.beta, logit))
    out, state = cuda.prefill(y)
    assert out.isfinite().all()
    assert not out[..., 32:64].any()
    want = y.reference()
    assert_close("final_state", state, want.final_state, cuda.limits(y, want)[1], case=y.case)


def test_norms_that_overflow_only_in_sum(cuda: Any) -> None:
    """64 channels of 1.9e18 have a sum of squares that fp32 holds, 128 have none."""
    x = Case(seed=33, lengths=(70,), heads=2).tensors(cuda.device)
    y = x.replace(q=x.q.sign() * 1.9e18, k=x.k.sign() * 1.9e18)
    cuda.check(y, y.reference(), *cuda.prefill(y))


def test_a_lower_bound_that_hardly_is_one(cuda: Any) -> None:
    x = Case(seed=34, lengths=(70,), heads=2).tensors(cuda.device)
    y = x.replace(lower_bound=-1e-44, g=x.g * 100)
    cuda.check(y, y.reference(), *cuda.prefill(y))


def test_nan_in_a_parameter_shows_in_its_head_alone(cuda: Any) -> None:
    x = Case(seed=35, lengths=(70,), heads=2).tensors(cuda.device)
    A_log = x.A_log.clone()
    A_log[1] = torch.nan
    out, state = cuda.prefill(x)
    broken, broken_state = cuda.prefill(x.replace(A_log=A_log))
    assert broken[:, :, 1].isnan().all()
    assert broken_state[:, 1].isnan().all()
    assert torch.equal(broken[:, :, 0], out[:, :, 0])
    assert torch.equal(broken_state[:, 0], state[:, 0])


@pytest.mark.parametrize("heads", [1, 3, 5, 7, 12, 20])
def test_any_number_of_heads(way: Any, heads: int) -> None:
    """Tokens of beta are then no multiple of 16 bytes apart."""
    for lengths in ((33,), (32, 3)):
        x, want = way.exact(Case(seed=32, lengths=lengths, heads=heads))
        way.check(x, want, *way.prefill(x))


@pytest.mark.parametrize("group", [2, 3, 8])
def test_grouped_value_heads(way: Any, group: int) -> None:
    x, want = way.exact(Case(seed=33, lengths=(40, 0, 65), heads=2, value_heads=2 * group))
    out, state = way.prefill(x)
    way.check(x, want, out, state)
    repeated = x.replace(q=x.q.repeat_interleave(group, 2), k=x.k.repeat_interleave(group, 2))
    assert all(map(torch.equal, way.prefill(repeated), (out, state)))


def test_a_rank_with_some_of_the_heads_computes_the_slice_of_all(way: Any) -> None:
    x, _ = way.exact(Case(seed=34, lengths=(100, 0, 17), heads=8))
    out, state = way.prefill(x)
    for heads in (slice(0, 2), slice(6, 8), slice(3, 4)):
        y = x.replace(
            **{name: getattr(x, name)[:, :, heads].contiguous() for name in INPUTS},
            A_log=x.A_log[heads],
            dt_bias=x.dt_bias[heads],
            initial_state=x.initial_state[:, heads].contiguous(),
        )
        part, part_state = way.prefill(y)
        assert torch.equal(part, out[:, :, heads])
        assert torch.equal(part_state, state[:, heads])


def test_scale_is_a_run_time_number_and_zero_is_not_the_default(way: Any) -> None:
    case = Case(seed=35, lengths=(65, 3), heads=2)
    x, want = way.exact(case)
    plain, plain_state = way.prefill(x)
    for scale in (None, 0.0, 1.0, -0.1, 128**-0.5, None):
        out, state = way.prefill(x, scale=scale)
        assert torch.equal(state, plain_state)
        if scale in (None, 128**-0.5):
            assert torch.equal(out, plain)
        else:
            ratio = scale / 128**-0.5
            limit = way.limits(x, want)[0]
            assert_close("out", out, want.out * ratio, limit, cu_seqlens=x.cu_seqlens, case=case)
    assert not way.prefill(x, scale=0.0)[0].any()


def test_two_lower_bounds_in_turn(way: Any) -> None:
    x, _ = way.exact(Case(seed=36, lengths=(65, 20), heads=2))
    bounds = (-5.0, -0.3, -1)
    wants = {bound: x.replace(lower_bound=bound).reference() for bound in bounds}
    first: dict[float, tuple[Tensor, Tensor]] = {}
    for bound in bounds * 2:
        y = x.replace(lower_bound=bound)
        got = way.prefill(y)
        way.check(y.replace(lower_bound=float(bound)), wants[bound], *got)
        assert all(map(torch.equal, got, first.setdefault(bound, got)))


def test_error_against_the_recurrence_sees_a_wrong_gate(way: Any) -> None:
    """Guards the tests above: a clamp instead of a sigmoid agrees at both saturated ends alone."""
    x, want = way.exact(Case(seed=37, lengths=(65,), heads=2, regime="table_2_plain"))
    out, _ = way.prefill(x.replace(g=x.g + 0.25))
    with pytest.raises(AssertionError, match="relative RMS error"):
        assert_close("out", out, want.out, way.limits(x, want)[0], cu_seqlens=x.cu_seqlens)


# -- lengths and what lies beyond them -----------------------------------------------------------


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_every_length_in_poisoned_memory(way: Any, initial: bool, checkpoints: bool) -> None:
    """NaN past the last token of every input, in every result before, and all over the scratch."""
    case = Case(seed=40, lengths=LENGTHS, heads=2, initial=initial, padding=37)
    x, want = way.exact(case)
    buffers: dict[str, Tensor] = {"final_state": way.nan_states(x)}
    if checkpoints:
        offsets = [16 * (n // 16) for n in LENGTHS]
        buffers["checkpoint_state"] = saved = way.nan_states(x)
        buffers["checkpoint_offsets"] = ints(offsets, x)
    poison = way.poison(x, checkpoints=checkpoints)
    wide = torch.full_like(torch.cat([x.v, x.v], 1), NAN)
    out, state = way.prefill(x, out=wide[:, : x.v.shape[1]], workspace=poison.workspace, **buffers)
    way.check(x, want, out, state)
    poison.check()
    end = x.bounds[-1]
    assert wide[:, end:].isnan().all(), "rows past the last token were written"
    for n, length in enumerate(LENGTHS):
        if length == 0:
            kept = x.initial_state[n] if initial else torch.zeros_like(state[n])
            assert torch.equal(state[n], kept), f"empty sequence {n}"
        if checkpoints:
            assert saved[n].isfinite().all() if offsets[n] else saved[n].isnan().all()


@pytest.mark.parametrize("length", [0, 1, 15, 17, 33, 64, 1500])
def test_dense_batches_in_poisoned_memory(way: Any, length: int) -> None:
    """Each row of the batch ends in NaN, and NaN fills the gaps between tokens."""
    x, want = way.exact(Case(seed=41, lengths=(length,) * 3, heads=2, packed=False))
    y = x.replace(**{name: padded(getattr(x, name), 5, 16) for name in INPUTS})
    wide = torch.full((3, length + 7, 3, 128), NAN, dtype=x.v.dtype, device=way.device)
    poison = way.poison(x)
    out, state = way.prefill(
        y,
        out=wide[:, :length, :2],
        final_state=way.nan_states(x),
        workspace=poison.workspace,
    )
    poison.check()
    way.check(x, want, out, state)
    plain, plain_state = way.prefill(x)
    assert torch.equal(out, plain)
    assert torch.equal(state, plain_state)
    assert wide[:, length:].isnan().all()
    assert wide[:, :, 2].isnan().all()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_a_row_of_inputs_expanded_to_a_batch(way: Any, name: str) -> None:
    """Its stride is 0, which not every way to read a tensor takes."""
    x = Case(seed=44, lengths=(100,) * 3, heads=2, packed=False).tensors(way.device)
    shared = getattr(x, name)[:1].expand_as(getattr(x, name))
    want = way.prefill(x.replace(**{name: shared.clone()}))
    y = x.replace(**{name: shared})
    got = kda_jit.prefill(*y.args, **y.kwargs, backend=way.backend)
    assert all(map(torch.equal, got, want))


def test_batches_with_tokens_first(way: Any) -> None:
    """The stride of a batch row is below that of a token, which the driver need not like."""
    x = Case(seed=45, lengths=(100,) * 3, heads=2, packed=False).tensors(way.device)
    want = way.prefill(x)
    y = x.replace(
        **{n: getattr(x, n).transpose(0, 1).contiguous().transpose(0, 1) for n in "qkvg"},
        beta=x.beta.transpose(0, 1).contiguous().transpose(0, 1),
    )
    assert y.q.stride(0) < y.q.stride(1)
    assert all(map(torch.equal, way.prefill(y), want))


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_but_empty_sequences(way: Any, lengths: tuple[int, ...], tokens: int) -> None:
    case = Case(seed=42, lengths=lengths, heads=2, padding=tokens)
    x = case.tensors(way.device)
    out = torch.full_like(x.v, 7.0)
    _, state = way.prefill(x, out=out, final_state=way.nan_states(x))
    assert torch.equal(state, x.initial_state)
    assert bool((out == 7.0).all())
    fresh = x.replace(initial_state=None)
    assert not way.prefill(fresh, final_state=way.nan_states(x))[1].any()


@pytest.mark.parametrize("dtypes", INDEX_DTYPES, ids=str)
def test_index_dtypes_are_all_the_same(way: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    x, _ = way.exact(Case(seed=43, lengths=(20, 0, 65, 3), heads=2))
    ends, slots, offsets = dtypes

    def run(ends: torch.dtype, slots: torch.dtype, offsets: torch.dtype) -> tuple[Tensor, ...]:
        pool = way.nan_states(x).repeat(2, 1, 1, 1)
        pool[[6, 1, 0]] = x.initial_state[[0, 1, 3]]
        saved = way.nan_states(x)
        out, pool = way.prefill(
            x,
            initial_state=pool,
            cu_seqlens=x.cu_seqlens.to(ends),
            state_indices=ints((6, 1, -1, 0), x, slots),
            checkpoint_state=saved,
            checkpoint_offsets=ints((16, 0, 48, 0), x, offsets),
        )
        return out, pool, saved

    want = run(torch.int32, torch.int32, torch.int32)
    assert all(map(same, run(ends, slots, offsets), want))


def test_column_slices_of_one_projection(way: Any) -> None:
    """q, k, v, g, beta are read in place, out is written into a strided slice: same bits."""
    for heads, value_heads, packed in ((2, 4, True), (3, 3, False), (1, 1, True)):
        lengths = (33, 0, 70) if packed else (40, 40)
        case = Case(seed=44, lengths=lengths, heads=heads, value_heads=value_heads, packed=packed)
        x, _ = way.exact(case)
        flat = [getattr(x, name).flatten(2) for name in INPUTS]
        starts = [0]
        for y in flat:
            starts.append(-(-(starts[-1] + y.shape[2]) // 8) * 8 + 8)
        wide = torch.full((*x.v.shape[:2], starts[-1]), NAN, dtype=x.q.dtype, device=way.device)
        views = {}
        for name, y, start in zip(INPUTS, flat, starts):
            views[name] = wide[..., start : start + y.shape[2]]
            views[name].copy_(y)
            views[name] = views[name].unflatten(2, getattr(x, name).shape[2:])
        results = torch.full((*x.v.shape[:2], value_heads + 2, 128), NAN, dtype=x.v.dtype)
        results = results.to(way.device)
        before = wide.clone()
        out, state = way.prefill(x)
        got, got_state = way.prefill(x.replace(**views), out=results[:, :, 1:-1])
        assert torch.equal(got, out)
        assert torch.equal(got_state, state)
        assert same(wide, before)
        assert results[:, :, [0, -1]].isnan().all()


def test_beta_may_start_anywhere(way: Any) -> None:
    """Only beta has no need of 16-byte addresses: heads may be any number."""
    x, _ = way.exact(Case(seed=45, lengths=(33, 5), heads=3))
    out, state = way.prefill(x)
    wide = torch.full((1, 38, 8), NAN, dtype=x.beta.dtype, device=way.device)
    for start in (1, 3, 5):
        view = wide[..., start : start + 3]
        view.copy_(x.beta)
        got = way.prefill(x.replace(beta=view))
        assert all(map(torch.equal, got, (out, state)))


def test_inputs_are_only_read(way: Any) -> None:
    x = Case(seed=46, lengths=(65, 0, 20), heads=2, padding=4).tensors(way.device)
    offsets, fresh = ints((32, 0, 16), x), torch.tensor([True, False, True], device=way.device)
    tensors = [*x.args, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens, offsets, fresh]
    before = [t.clone() for t in tensors]
    for _ in range(2):
        way.prefill(
            x,
            has_initial_state=fresh,
            checkpoint_state=way.nan_states(x),
            checkpoint_offsets=offsets,
        )
    assert all(map(same, tensors, before))


def test_parameters_of_any_legal_shape(way: Any) -> None:
    x, _ = way.exact(Case(seed=47, lengths=(40,), heads=3))
    want = way.prefill(x)
    strided = torch.stack([x.A_log, x.A_log * 0 + NAN], 1)[:, 0]
    wide = torch.cat([x.dt_bias, x.dt_bias * 0 + NAN], 1)[:, :128]
    for A_log, dt_bias in (
        (x.A_log.view(1, 1, 3, 1), x.dt_bias.flatten()),
        (strided, wide),
    ):
        got = way.prefill(x.replace(A_log=A_log, dt_bias=dt_bias))
        assert all(map(torch.equal, got, want))


# -- sequences beside each other -----------------------------------------------------------------


def test_a_sequence_has_the_same_bits_in_any_company(way: Any) -> None:
    lengths = (17, 0, 64, 1, 100, 33, 31, 16, 2)
    x, _ = way.exact(Case(seed=50, lengths=lengths, heads=2))
    alone = [way.prefill(x.sequence(n)) for n in range(x.N)]
    orders = (range(9), reversed(range(9)), (4, 4, 1, 0, 8, 8, 8, 1, 1, 6, 2, 5, 3, 7))
    for order in map(list, orders):
        y = x.pack([(n, 0, lengths[n]) for n in order])
        out, state = way.prefill(y)
        for i, n in enumerate(order):
            assert torch.equal(out[:, y.bounds[i] : y.bounds[i + 1]], alone[n][0]), (order, i)
            assert torch.equal(state[i], alone[n][1][0]), (order, i)


@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("victim", [0, 1, 2, 3, 4])
def test_nan_stays_in_its_sequence(way: Any, victim: int, poison: float) -> None:
    """A long sequence, a single token, an empty one, another long one, in turn the sick one."""
    x, _ = way.exact(Case(seed=51, lengths=(256, 1, 0, 97, 31), heads=2))
    out, state = way.prefill(x)
    states = x.initial_state.clone()
    states[victim, 0, 5, 7] = poison
    sick = {"initial_state": x.replace(initial_state=states)}
    begin, end = x.bounds[victim : victim + 2]
    for name in INPUTS if end > begin else ():
        value = getattr(x, name).clone()
        value[:, begin + (end - begin) // 2] = poison
        sick[name] = x.replace(**{name: value})
    others = [n for n in range(x.N) if n != victim]
    for name, y in sick.items():
        bad_out, bad_state = way.prefill(y)
        for n in others:
            rows = slice(x.bounds[n], x.bounds[n + 1])
            assert torch.equal(bad_out[:, rows], out[:, rows]), (name, n)
            assert torch.equal(bad_state[n], state[n]), (name, n)
        # The other head has nothing to do with a sick state, nor the past with a sick token.
        if name == "initial_state":
            assert not bad_state[victim, 0].isfinite().all()
            assert torch.equal(bad_state[victim, 1], state[victim, 1])
        else:
            healthy = slice(begin, begin + (end - begin) // 2 // 32 * 32)
            assert torch.equal(bad_out[:, healthy], out[:, healthy]), name
        if name == "v" or (poison != poison and name in ("k", "g", "beta")):
            assert not bad_state[victim].isfinite().all(), f"{name}: the poison had no effect"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cutting_anywhere_and_carrying_the_state(way: Any, dtype: torch.dtype) -> None:
    x, want = way.exact(Case(seed=52, lengths=(130,), heads=2, regime="mixed"))
    cuts = (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 129, 130)
    first = x.pack([(0, 0, cut) for cut in cuts])
    head, carried = way.prefill(first, final_state=way.nan_states(first, dtype))
    rest = x.pack([(0, cut, 130) for cut in cuts]).replace(initial_state=carried)
    tail, state = way.prefill(rest)
    out_limit, state_limit = way.limits(x, want)
    loss = 4e-3 if dtype is torch.bfloat16 else 0.0
    for i, cut in enumerate(cuts):
        parts = [y[:, b[i] : b[i + 1]] for y, b in ((head, first.bounds), (tail, rest.bounds))]
        whole = torch.cat(parts, 1)
        where = f"cut at {cut}"
        assert_close(where, whole, want.out, out_limit.allowed + loss, per="chunk")
        limit = state_limit.allowed + loss
        assert_close(where, state[i : i + 1], want.final_state, limit, per="state")


# -- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("initial", [None, torch.bfloat16, torch.float32])
def test_state_dtypes(way: Any, initial: torch.dtype | None, final: torch.dtype | None) -> None:
    """bf16 states are fp32 states rounded at the ends, in all nine pairs."""
    x, _ = way.exact(Case(seed=60, lengths=(20, 0, 65, 1), heads=2))
    start = None if initial is None else x.initial_state.to(initial)
    plain = x.replace(initial_state=None if start is None else start.float())
    want_out, want = way.prefill(plain)
    buffer = None if final is None else way.nan_states(x, final)
    out, state = way.prefill(x.replace(initial_state=start), final_state=buffer)
    assert state.dtype is (final or torch.float32)
    assert torch.equal(out, want_out)
    assert torch.equal(state, want.to(state.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_pool_is_read_and_written_in_place(way: Any, dtype: torch.dtype, strided: bool) -> None:
    """A NaN pool with wide slots between guards; indices in a column of a block table; padding."""
    lengths = (33, 17, 0, 64, 0, 5, 1)
    x, _ = way.exact(Case(seed=61, lengths=lengths, heads=2))
    slots = (4, 9, 2, -1, 7, -3, 0)
    old = (True, False, True, True, False, True, True)
    size = 2 * 128 * 128
    pitch = size + (8192 if strided else 0)
    memory = torch.full((14, pitch), NAN, dtype=dtype, device=way.device)
    pool = memory[1:13, :size].view(12, 2, 128, 128)
    dense = torch.zeros_like(x.initial_state)
    for n, (slot, has) in enumerate(zip(slots, old)):
        if slot >= 0 and has:
            pool[slot] = x.initial_state[n]
            dense[n] = pool[slot].float()
    before = memory.clone()
    table = torch.full((len(slots), 5), 11, dtype=torch.int32, device=way.device)
    table[:, 0] = ints(slots, x)
    index = table[:, 0] if strided else table[:, 0].contiguous()
    want_out, want = way.prefill(x.replace(initial_state=dense))
    out, returned = way.prefill(
        x.replace(initial_state=pool),
        state_indices=index,
        has_initial_state=torch.tensor(old, device=way.device),
    )
    assert returned.data_ptr() == pool.data_ptr()
    assert torch.equal(out, want_out)
    for n, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(pool[slot], want[n].to(dtype)), f"sequence {n} in slot {slot}"
            before[1 + slot, :size] = pool[slot].flatten()
    assert same(memory, before), "memory of no sequence was written"


def test_fresh_sequences_select_zero_whatever_their_state_holds(way: Any) -> None:
    x, _ = way.exact(Case(seed=62, lengths=(20, 0, 40, 3), heads=2))
    has = torch.tensor([True, False, False, True], device=way.device)
    zeros, dirty = x.initial_state.clone(), x.initial_state.clone()
    zeros[~has] = 0.0
    for poison in (NAN, float("-inf"), 1e38):
        dirty[~has] = poison
        got = way.prefill(x.replace(initial_state=dirty), has_initial_state=has)
        assert all(map(torch.equal, got, way.prefill(x.replace(initial_state=zeros))))


def test_final_state_may_be_the_initial_state(way: Any) -> None:
    x, _ = way.exact(Case(seed=63, lengths=(33, 0, 17, 100), heads=2))
    out, state = way.prefill(x)
    buffer = x.initial_state.clone()
    got, returned = way.prefill(x.replace(initial_state=buffer), final_state=buffer)
    assert returned is buffer
    assert torch.equal(got, out)
    assert torch.equal(buffer, state)


def test_padded_slots_of_every_state(way: Any) -> None:
    """Initial, final and checkpoint states with gaps between sequences, used where they are."""
    x, _ = way.exact(Case(seed=64, lengths=(33, 0, 70), heads=2))
    offsets = ints((16, 0, 64), x)
    saved = way.nan_states(x)
    out, state = way.prefill(x, checkpoint_state=saved, checkpoint_offsets=offsets)

    def wide() -> tuple[Tensor, Tensor]:
        memory = torch.full((3, 3, 128, 128), NAN, device=way.device)
        return memory, memory[:, :2]

    first, initial = wide()
    initial.copy_(x.initial_state)
    last, final = wide()
    middle, kept = wide()
    got, _ = way.prefill(
        x.replace(initial_state=initial),
        final_state=final,
        checkpoint_state=kept,
        checkpoint_offsets=offsets,
    )
    assert torch.equal(got, out)
    assert torch.equal(final, state)
    assert same(kept, saved)
    assert all(memory[:, 2].isnan().all() for memory in (first, last, middle))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_is_the_final_state_of_the_cut_sequence(way: Any, dtype: torch.dtype) -> None:
    lengths = (130, 130, 130, 130, 130, 64, 16, 0, 15)
    cuts = (0, 16, 32, 48, 128, 64, 16, 0, 0)
    x, want = way.exact(Case(seed=65, lengths=lengths, heads=2))
    saved = way.nan_states(x, dtype)
    out, state = way.prefill(
        x, checkpoint_state=saved, checkpoint_offsets=ints(cuts, x), workspace=None
    )
    way.check(x, want, out, state)
    plain_out, _ = way.prefill(x)
    for n, cut in enumerate(cuts):
        if cut:
            y = x.pack([(n, 0, cut)])
            _, cut_state = way.prefill(y, final_state=way.nan_states(y, dtype))
            assert torch.equal(saved[n : n + 1], cut_state), f"sequence {n} at {cut}"
        else:
            assert saved[n].isnan().all(), f"sequence {n} has no checkpoint"
            rows = slice(x.bounds[n], x.bounds[n + 1])
            assert torch.equal(out[:, rows], plain_out[:, rows])
    # And going on from a checkpoint gives the rest.
    rest = x.pack([(4, 128, 130)]).replace(initial_state=saved[4:5])
    tail, end = way.prefill(rest)
    if dtype is torch.float32:
        assert torch.equal(tail, out[:, x.bounds[4] + 128 : x.bounds[5]])
        assert torch.equal(end[0], state[4])


def test_checkpoint_offsets_that_are_none_are_ignored(way: Any) -> None:
    """Only the device sees them: no multiple of 16, negative, beyond the sequence, beyond int32."""
    cuts = (8, 17, -16, 112, 2**40, -(2**40), 100)
    x, _ = way.exact(Case(seed=66, lengths=(100,) * len(cuts), heads=2))
    saved = way.nan_states(x)
    got = way.prefill(x, checkpoint_state=saved, checkpoint_offsets=ints(cuts, x, torch.int64))
    assert saved.isnan().all()
    assert all(map(torch.equal, got, way.prefill(x)))


def test_large_states_do_not_overflow(way: Any) -> None:
    for size in (1e2, 1e5, 1e20, 1e36):
        case = Case(seed=67, lengths=(70, 0, 3), heads=2, regime="mixed")
        x, _ = way.exact(case)
        y = x.replace(initial_state=x.initial_state * size)
        way.check(y, y.reference(), *way.prefill(y))


def test_states_near_the_end_of_fp32(cuda: Any) -> None:
    x = Case(seed=67, lengths=(70, 0, 3), heads=2, regime="mixed").tensors(cuda.device)
    y = x.replace(initial_state=x.initial_state * 2e37)
    cuda.check(y, y.reference(), *cuda.prefill(y))


def test_outputs_of_one_call_survive_the_next(way: Any) -> None:
    cases = [Case(seed=seed, lengths=(65, 20), heads=2) for seed in (68, 69, 70)]
    inputs = [way.exact(case)[0] for case in cases]
    kept = [way.prefill(x) for x in inputs]
    again = [way.prefill(x) for x in inputs]
    for one, other in zip(kept, again):
        assert all(map(torch.equal, one, other))
        assert one[0].data_ptr() != other[0].data_ptr()
        assert one[1].data_ptr() != other[1].data_ptr()


# -- wrong input ---------------------------------------------------------------------------------


def refused(way: Any, x: Inputs, error: type[Exception], words: str, **changes: Any) -> None:
    """The call raises, and none of its results was touched."""
    results = {
        "out": torch.full_like(x.v, NAN),
        "final_state": way.nan_states(x),
        "checkpoint_state": way.nan_states(x),
    }
    before = {name: y.clone() for name, y in results.items()}
    arguments = (
        x.kwargs
        | results
        | {"checkpoint_offsets": torch.zeros(x.N, dtype=torch.int32, device=way.device)}
        | {"backend": way.backend}
        | dict(zip(INPUTS, x.args))
        | changes
    )
    with pytest.raises(error, match=words):
        kda_jit.prefill(**arguments)
    torch.cuda.synchronize()
    assert all(same(y, before[name]) for name, y in results.items())


def test_wrong_calls_are_refused_before_anything_is_written(cuda: Any) -> None:
    x, _ = cuda.exact(Case(seed=80, lengths=(33, 7), heads=2))

    def check(error: type[Exception], words: str, **changes: Any) -> None:
        refused(cuda, x, error, words, **changes)

    check(RuntimeError, "k: .*cuda", k=x.k.cpu())
    check(RuntimeError, "cu_seqlens: .*cuda", cu_seqlens=x.cu_seqlens.cpu())
    check(RuntimeError, "A_log: .*cuda", A_log=x.A_log.cpu())
    check(RuntimeError, "initial_state: .*cuda", initial_state=x.initial_state.cpu())
    check(ValueError, "g: ", g=x.g[..., 0])
    check(ValueError, "g: ", g=torch.cat([x.g, x.g], 1))
    check(ValueError, "dt_bias: ", dt_bias=x.dt_bias[:, 0].contiguous())
    check(TypeError, "dt_bias: ", dt_bias=x.dt_bias.bfloat16())
    check(ValueError, "lower_bound: ", lower_bound=-5.01)
    check(ValueError, "scale: ", scale=NAN)
    check(ValueError, "final_state: .*partial overlap|initial_state", **_shifted(x))
    check(ValueError, "out: .*v", out=x.v)
    check(ValueError, "state_indices", state_indices=ints((0, 1), x), initial_state=None)
    check(RuntimeError, "lower_bound = None", lower_bound=None)
    half = {name: getattr(x, name).half() for name in INPUTS}
    half["out"] = torch.empty_like(half["v"])
    check(RuntimeError, "torch.bfloat16, got torch.float16", **half)
    check(RuntimeError, "g in torch.bfloat16, got torch.float32", g=x.g.float())


def _shifted(x: Inputs) -> dict[str, Tensor]:
    memory = torch.zeros(3, *x.initial_state.shape[1:], device=x.q.device)
    return {"initial_state": memory[:2], "final_state": memory[1:]}


def test_cpu_tensors_are_no_fallback(cuda: Any) -> None:
    x = Case(seed=81, lengths=(5,), heads=1).tensors("cpu")
    with pytest.raises(kda_jit.NoBackendError, match="needs a CUDA device, got cpu"):
        kda_jit.prefill(*x.args, **x.kwargs, backend="cuda")


def misaligned(x: Tensor) -> Tensor:
    """A copy that starts two bytes past a multiple of 16."""
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    return flat[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out", "final_state"])
def test_misaligned_tensors_are_refused_with_the_reason(cuda: Any, name: str) -> None:
    x, _ = cuda.exact(Case(seed=82, lengths=(33, 7), heads=2))
    value = {"out": x.v, "final_state": x.initial_state}.get(name)
    shifted = misaligned(getattr(x, name) if value is None else value)
    refused(cuda, x, kda_jit.NoBackendError, f"16 bytes, got others for {name}", **{name: shifted})


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "out"])
def test_misaligned_tensors_run_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)
    x = Case(seed=82, lengths=(33, 7), heads=2).tensors("cuda")
    more = {name: misaligned(x.v if name == "out" else getattr(x, name))}
    tensors = dict(zip(INPUTS, x.args))
    out, state = kda_jit.prefill(**(tensors | x.kwargs | more))
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.backend in ("triton", "torch")
    want = x.reference()
    assert relative_rms(out, want.out) < 5e-3
    assert relative_rms(state, want.final_state) < 5e-3


def test_wrong_indices_on_the_device_stay_inside_the_buffers(way: Any) -> None:
    """Lengths and slots that only the device sees: results are anything, but not elsewhere."""
    few = Case(seed=83, lengths=(40, 30, 20, 10), heads=2).tensors(way.device)
    many = Case(seed=83, lengths=(400, 300, 200, 100), heads=8).tensors(way.device)
    wide = Case(seed=83, lengths=(40, 30, 20, 10), heads=64).tensors(way.device)
    for x, ends in (
        (few, (0, 50, 20, 90, 100)),
        (few, (0, 2**31 - 1, -5, 10**6, 100)),
        (few, (-(2**31), -1, 200, 300, 400)),
        (few, (100, 100, 0, 0, 2**31 - 1)),
        (many, (0, 1000, 100, 500, 1000)),
        (many, (0, 600, 200, 1000, 1000)),
        (many, (900, 100, 100, 2000, 1)),
        (wide, (0, 50, 20, 90, 100)),
        (wide, (40, 50, 60, 90, 100)),
        (wide, (0, 10, 50, 2000, 3000)),
    ):
        memory = torch.full((3, *x.v.shape[1:]), 7.0, dtype=x.v.dtype, device=way.device)
        states = torch.full((6, x.v.shape[2], 128, 128), 7.0, device=way.device)
        poison = way.poison(x)
        way.prefill(
            x,
            cu_seqlens=ints(ends, x),
            out=memory[1:2],
            final_state=states[1:5],
            workspace=poison.workspace,
        )
        poison.check()
        assert bool((memory[[0, 2]] == 7.0).all()), ends
        assert bool((states[[0, 5]] == 7.0).all()), ends


def test_slots_beyond_the_pool_are_no_slots(way: Any) -> None:
    """The pool is the middle of a larger one, so a slot beyond its end would show, not fault."""
    x, _ = way.exact(Case(seed=84, lengths=(40, 30, 20, 10), heads=2))
    memory = torch.full((8, 2, 128, 128), 7.0, device=way.device)
    pool = memory[2:6]
    pool.copy_(x.initial_state)
    start = torch.zeros_like(x.initial_state)
    start[[0, 2]] = x.initial_state[[3, 0]]
    want_out, want = way.prefill(x.replace(initial_state=start))
    out, _ = way.prefill(x.replace(initial_state=pool), state_indices=ints((3, 4, 0, 5), x))
    assert torch.equal(out, want_out)
    assert torch.equal(pool[[3, 0]], want[[0, 2]])
    assert torch.equal(pool[[1, 2]], x.initial_state[[1, 2]])
    assert bool((memory[:2] == 7.0).all())
    assert bool((memory[6:] == 7.0).all()), "a state was written past the end of the pool"


# -- guards of the tests themselves --------------------------------------------------------------


def test_poisoned_workspace_notices_a_byte_outside(way: Any) -> None:
    x, _ = way.exact(Case(seed=90, lengths=(33,), heads=1))
    poison = way.poison(x)
    way.prefill(x, workspace=poison.workspace)
    poison.check()
    poison._block[-1] = 0
    with pytest.raises(AssertionError, match="outside the workspace"):
        poison.check()


def test_cases_here_have_the_lengths_they_need() -> None:
    assert set(LENGTHS) >= {0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100}
    assert LENGTHS[:2] == LENGTHS[-2:] == (0, 0)
    assert any(a == b == 0 for a, b in pairwise(LENGTHS[2:-2]))
    assert set(PEERS) == set(TABLE_ROWS)
