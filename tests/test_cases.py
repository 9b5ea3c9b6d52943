"""A case is its print, and means the same tensors everywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import find, given

from kda_jit.testing import REGIMES, TABLE_ROWS, Case
from kda_jit.testing.cases import judged_on
from kda_jit.testing.strategies import EDGE_LENGTHS, cases


@given(case=cases())
def test_a_case_is_its_repr(case: Case) -> None:
    assert eval(repr(case)) == case


def test_repr_is_short() -> None:
    assert repr(Case(seed=3, lengths=(1, 2))) == "Case(seed=3, lengths=(1, 2), heads=1)"


@given(case=cases())
def test_shapes_follow_the_case(case: Case) -> None:
    x = case.tensors(head_dim=8, value_dim=4)
    N, HV = len(case.lengths), case.HV
    rows = (1, sum(case.lengths) + case.padding) if case.packed else (N, case.lengths[0])
    assert x.q.shape == x.k.shape == (*rows, case.heads, 8)
    assert x.v.shape == (*rows, HV, 4)
    assert x.g.shape == (*rows, HV, 8)
    assert x.beta.shape == (*rows, HV)
    assert x.A_log.shape == (HV,)
    assert x.dt_bias.shape == (HV, 8)
    assert (x.initial_state is not None) == case.initial
    if x.initial_state is not None:
        assert x.initial_state.shape == (N, HV, 4, 8)
        assert x.initial_state.dtype == getattr(torch, case.state_dtype)
    assert [b - a for a, b in pairwise(x.bounds)] == list(case.lengths)
    assert x.N == N


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_regime_is_finite_repeatable_and_its_own(regime: str, dtype: torch.dtype) -> None:
    case = Case(seed=1, lengths=(20, 3), heads=2, regime=regime)
    x, again = case.tensors(dtype=dtype, head_dim=16), case.tensors(dtype=dtype, head_dim=16)
    tensors = (*x.args, x.A_log, x.dt_bias, x.initial_state)
    repeated = (*again.args, again.A_log, again.dt_bias, again.initial_state)
    for t, same in zip(tensors, repeated, strict=True):
        assert t is not None
        assert t.isfinite().all()
        assert torch.equal(t, same)
    other = Case(seed=2, lengths=(20, 3), heads=2, regime=regime).tensors(dtype=dtype, head_dim=16)
    assert not torch.equal(x.v, other.v)
    assert x.reference().out.isfinite().all()


def decay(regime: str) -> torch.Tensor:
    """Log decay per token and channel."""
    from kda_jit.reference import gate

    x = Case(seed=1, lengths=(64,), heads=4, regime=regime).tensors(dtype=torch.float64)
    return gate(x.g, x.A_log, x.dt_bias, x.lower_bound)


def test_regimes_are_what_they_say() -> None:
    assert -2e-4 < decay("slow").mean().item() < -5e-5
    assert decay("saturated_open").abs().max().item() < 1e-80
    assert torch.equal(decay("saturated_closed"), torch.full((1, 64, 4, 128), -5.0).double())
    both = decay("saturated_both")
    assert set(both.round().unique().tolist()) == {-5.0, 0.0}
    memory = 1 / -decay("mixed").mean((0, 1)).flatten()
    assert memory.min() < 3
    assert memory.max() > 1500
    assert decay("unbounded_real").min() < -1900
    assert -3e-3 < decay("table_3_g_minus_8").mean().item() < -1e-3
    keys = Case(lengths=(32,), regime="table_9_keep_near_keys").tensors().k[0, :, 0].double()
    keys = torch.nn.functional.normalize(keys, dim=-1)
    assert (keys @ keys.T).min() > 0.99
    x = Case(lengths=(64,), heads=2, regime="zero_rows").tensors()
    for t in (x.q, x.k, x.v):
        assert 0 < (t == 0).all(-1).sum() < t[..., 0].numel()


def test_the_accuracy_table_has_nine_rows() -> None:
    assert len(TABLE_ROWS) == 9
    assert set(TABLE_ROWS) <= set(REGIMES)


def test_padding_is_nan_and_changes_nothing_else() -> None:
    bare = Case(seed=1, lengths=(5, 2)).tensors(head_dim=8)
    padded = Case(seed=1, lengths=(5, 2), padding=3).tensors(head_dim=8)
    for t, p in zip(bare.args, padded.args, strict=True):
        assert torch.equal(p[:, :7], t)
        assert p[:, 7:].isnan().all()
    assert torch.equal(bare.cu_seqlens, padded.cu_seqlens)


def test_pack_and_sequence_take_tokens_with_their_states() -> None:
    x = Case(seed=1, lengths=(5, 0, 7), padding=2).tensors(head_dim=8)
    y = x.pack([(2, 1, 4), (0, 0, 5), (1, 0, 0)])
    assert y.bounds == [0, 3, 8, 8]
    assert torch.equal(y.g[0], torch.cat([x.g[0, 6:9], x.g[0, :5]]))
    assert x.initial_state is not None
    assert torch.equal(y.initial_state, x.initial_state[[2, 0, 1]])
    assert torch.equal(x.sequence(2).beta[0], x.beta[0, 5:12])
    dense = Case(seed=1, lengths=(4, 4), packed=False).tensors(head_dim=8)
    assert torch.equal(dense.sequence(1).q, dense.q[1:])


def test_wrong_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="regime: expected one of random"):
        Case(regime="ordinary")
    with pytest.raises(ValueError, match="dense"):
        Case(lengths=(1, 2), packed=False)


def test_cases_shrink_to_something_small() -> None:
    case = find(cases(), lambda c: sum(c.lengths) > 40)
    assert sum(case.lengths) <= 49
    assert (case.heads, case.regime, case.seed) == (1, "random", 0)
    assert {15, 16, 17, 0, 1} <= set(EDGE_LENGTHS)


def test_references_are_computed_where_they_are_asked_for() -> None:
    x = Case(seed=3, lengths=(20, 0, 3), heads=2, padding=2).tensors()
    want, seen = x.reference(), []
    with judged_on(torch.device("cpu", 0)):  # another device, as torch compares them
        got = x.judge(lambda y: seen.append(y) or want)
        assert all(torch.equal(a, b) for a, b in zip(x.reference()[:2], want[:2], strict=True))
    assert seen[0] is not x and seen[0].case == x.case
    assert all(torch.equal(a, b) for a, b in zip(got[:2], want[:2], strict=True))
    assert x.judge(lambda y: want if y is x else None) is want
