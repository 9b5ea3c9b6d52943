"""The judge is judged: against scalars in plain Python, and against its own chunked form."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kda_jit import reference
from kda_jit.reference import chunk_kda, gate, l2norm, recurrent_kda
from kda_jit.testing import REGIMES, Case, Inputs, relative_rms


def by_hand(x: Inputs) -> tuple[list[float], list[float]]:
    """The eight lines of the definition on Python floats: no tensor operation to share a bug with.

    Returns (out, final_state) flattened, for packed inputs.
    """
    q, k, v, g, beta = (t[0].double().tolist() for t in x.args)
    H, K, HV, V = x.q.shape[2], x.q.shape[3], x.v.shape[2], x.v.shape[3]
    dt_bias = x.dt_bias.double().reshape(HV, K).tolist()
    scale = K**-0.5 if x.scale is None else x.scale
    out = [[[0.0] * V for _ in range(HV)] for _ in q]
    states = []
    for n, (begin, end) in enumerate(pairwise(x.bounds)):
        for h in range(HV):
            hk = h // (HV // H)
            a = math.exp(x.A_log[h].item())
            S = [[0.0] * V for _ in range(K)]
            if x.initial_state is not None:
                S = x.initial_state[n, h].double().T.tolist()
            for t in range(begin, end):
                q_t = unit(q[t][hk])
                k_t = unit(k[t][hk])
                b = sigmoid(beta[t][h])
                for i in range(K):
                    arg = g[t][h][i] + dt_bias[h][i]
                    if x.lower_bound is None:
                        log_decay = -a * math.log1p(math.exp(arg))
                    else:
                        log_decay = x.lower_bound * sigmoid(a * arg)
                    S[i] = [math.exp(log_decay) * s for s in S[i]]
                for j in range(V):
                    u = b * (v[t][h][j] - sum(S[i][j] * k_t[i] for i in range(K)))
                    for i in range(K):
                        S[i][j] += k_t[i] * u
                    out[t][h][j] = scale * sum(S[i][j] * q_t[i] for i in range(K))
            states += [S[i][j] for j in range(V) for i in range(K)]
    return [o for row in out for head in row for o in head], states


def unit(x: list[float]) -> list[float]:
    return [e / math.sqrt(sum(f * f for f in x) + 1e-6) for e in x]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


@pytest.mark.parametrize("regime", ["random", "slow", "tiny", "repeated", "unbounded"])
@pytest.mark.parametrize("initial", [True, False])
def test_the_loop_is_the_definition(regime: str, initial: bool) -> None:
    case = Case(seed=7, lengths=(5, 0, 9), heads=2, value_heads=4, regime=regime, initial=initial)
    x = case.tensors(dtype=torch.float64, head_dim=6, value_dim=3)
    x.dt_bias.add_(torch.linspace(-1, 1, x.dt_bias.numel()).view_as(x.dt_bias))
    out, state = (torch.tensor(values, dtype=torch.float64) for values in by_hand(x))
    got = x.reference()
    torch.testing.assert_close(got.out.flatten(), out, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(got.final_state.flatten(), state, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("regime", REGIMES)
def test_chunked_form_equals_the_recurrence(regime: str) -> None:
    case = Case(seed=1, lengths=(97, 0, 1, 40), heads=2, value_heads=4, regime=regime)
    x = case.tensors(dtype=torch.float64, head_dim=16, value_dim=8)
    want = x.reference()
    for chunk in (1, 16, 32, 64):
        got = chunk_kda(*x.args, **x.kwargs, chunk=chunk)
        assert relative_rms(got.out, want.out) < 1e-11
        assert relative_rms(got.final_state, want.final_state) < 1e-11


def test_rounded_operands_lose_what_bf16_loses() -> None:
    """The yardstick of every limit: too small and right kernels fail, too large and none does."""
    x = Case(seed=1, lengths=(200,), heads=4).tensors()
    want = x.reference()
    got = chunk_kda(*x.args, **x.kwargs, operands=torch.bfloat16)
    assert 1e-3 < relative_rms(got.out, want.out) < 6e-3
    assert 1e-3 < relative_rms(got.final_state, want.final_state) < 6e-3


@pytest.mark.parametrize("form", [recurrent_kda, chunk_kda])
def test_checkpoints_are_the_states_of_cut_sequences(form) -> None:
    x = Case(seed=2, lengths=(70, 32, 0), heads=2).tensors(dtype=torch.float64, head_dim=8)
    offsets = torch.tensor([64, 32, 0])
    got = form(*x.args, **x.kwargs, checkpoint_offsets=offsets).checkpoint_state
    assert got is not None
    for n, offset in enumerate([64, 32]):
        want = x.pack([(n, 0, offset)]).reference().final_state
        torch.testing.assert_close(got[n : n + 1], want, rtol=1e-12, atol=1e-15)
    assert got[2].isnan().all()
    assert form(*x.args, **x.kwargs).checkpoint_state is None


@pytest.mark.parametrize("block_bytes", [0, 5000, 1 << 30])
def test_working_in_blocks_of_sequences_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    x = Case(seed=3, lengths=(3, 0, 40, 17, 17, 1), heads=2).tensors(head_dim=16)
    want = x.reference()
    monkeypatch.setattr(reference, "_STATE_BLOCK_BYTES", block_bytes)
    got = x.reference()
    torch.testing.assert_close(got.out, want.out, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-12, atol=1e-15)


def test_rows_past_the_end_are_zero_and_not_read() -> None:
    x = Case(seed=4, lengths=(5, 3), heads=1, padding=4).tensors(head_dim=8)
    assert x.q[0, 8:].isnan().all()
    for got in (x.reference(), chunk_kda(*x.args, **x.kwargs)):
        assert not got.out[0, 8:].any()
        assert got.out[0, :8].isfinite().all()
        assert got.final_state.isfinite().all()


def test_a_dense_batch_is_the_packed_one() -> None:
    x = Case(seed=5, lengths=(11, 11, 11), heads=2, packed=False).tensors(head_dim=8)
    packed = x.pack([(n, 0, 11) for n in range(3)])
    assert torch.equal(x.reference().out.flatten(0, 1), packed.reference().out[0])
    assert torch.equal(x.reference().final_state, packed.reference().final_state)


def test_initial_state_is_not_modified() -> None:
    x = Case(seed=6, lengths=(4,)).tensors(dtype=torch.float64, head_dim=8)
    assert x.initial_state is not None
    initial = x.initial_state.double()
    before = initial.clone()
    for form in (recurrent_kda, chunk_kda):
        form(*x.args, **(x.kwargs | {"initial_state": initial}))
        assert torch.equal(initial, before)


def test_dtype_is_that_of_the_arithmetic_and_the_results() -> None:
    x = Case(seed=8, lengths=(50,)).tensors()
    single, double = x.reference(torch.float32), x.reference()
    assert single.out.dtype == single.final_state.dtype == torch.float32
    assert double.out.dtype == double.final_state.dtype == torch.float64
    assert 1e-9 < relative_rms(single.out, double.out) < 1e-6


class TestGate:
    def bounded(self, x: float, rate: float, bias: float = 0.0, bound: float = -5.0) -> float:
        g = torch.full((1, 1, 1, 1), x, dtype=torch.float64)
        return gate(g, torch.tensor([rate]).log(), torch.tensor([[bias]]), bound).item()

    def test_bounded_values(self) -> None:
        assert self.bounded(0.0, 1.0) == pytest.approx(-2.5)
        assert self.bounded(1.0, 2.0, bias=0.5) == pytest.approx(-5 / (1 + math.exp(-3)))
        assert self.bounded(1.0, 1.0, bound=-2.0) == pytest.approx(-2 / (1 + math.exp(-1)))
        assert self.bounded(1e4, 16.0) == -5.0
        assert self.bounded(-1e4, 16.0) == 0.0

    def test_it_is_not_a_clamped_softplus(self) -> None:
        """The two agree at both ends, which is where careless tests look."""
        assert abs(self.bounded(1.0, 1.0) - max(-5.0, -math.log1p(math.e))) > 1.0

    def test_unbounded_values(self) -> None:
        g = torch.tensor([-700.0, 0.0, 10.0], dtype=torch.float64).view(1, 1, 1, 3)
        got = gate(g, torch.tensor([math.log(200.0)]), torch.zeros(3), None).flatten()
        want = [0.0, -200 * math.log(2), -200 * math.log1p(math.exp(10.0))]
        assert got.tolist() == pytest.approx(want, rel=1e-6, abs=1e-12)

    @pytest.mark.parametrize("shape", [(2, 3), (6,)])
    def test_bias_is_per_head_and_channel_in_either_shape(self, shape: tuple[int, ...]) -> None:
        bias = torch.arange(6.0).reshape(shape)
        g = torch.zeros(1, 1, 2, 3, dtype=torch.float64)
        got = gate(g, torch.zeros(2), bias, -1.0).flatten()
        assert got.tolist() == pytest.approx([-1 / (1 + math.exp(-i)) for i in range(6)])


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gate_is_finite_where_its_factors_overflow(
    lower_bound: float | None, dtype: torch.dtype
) -> None:
    """exp(A_log) beyond the dtype times a logit of 0, and a sum beyond it times exp(A_log) = 0."""
    for A_log, x in ((800.0, 0.0), (-120.0, float(torch.finfo(dtype).max))):
        g = torch.full((1, 2), x, dtype=dtype)
        activated = gate(g, torch.tensor([A_log]), g.clone(), lower_bound)
        assert not activated.isnan().any()
        assert (activated <= 0).all()


def test_l2norm_adds_its_epsilon_to_the_sum_of_squares() -> None:
    x = torch.full((4,), 1e-3, dtype=torch.float64)
    assert l2norm(x).square().sum().item() == pytest.approx(4e-6 / 5e-6)
    assert not l2norm(torch.zeros(4)).any()


def test_value_head_h_uses_query_head_h_over_group() -> None:
    x = Case(seed=9, lengths=(6,), heads=2, value_heads=6).tensors(head_dim=8)
    got = x.reference()
    for h in range(6):
        one = pick_head(x, h, h // 3)
        want = one.reference().out[:, :, 0]
        torch.testing.assert_close(got.out[:, :, h], want, rtol=1e-12, atol=1e-15)


def pick_head(x: Inputs, value_head: int, head: int) -> Inputs:
    def value(t: Tensor) -> Tensor:
        return t[:, :, value_head : value_head + 1]

    assert x.initial_state is not None
    return x.replace(
        q=x.q[:, :, head : head + 1],
        k=x.k[:, :, head : head + 1],
        v=value(x.v),
        g=value(x.g),
        beta=value(x.beta),
        A_log=x.A_log[value_head : value_head + 1],
        dt_bias=x.dt_bias[value_head : value_head + 1],
        initial_state=x.initial_state[:, value_head : value_head + 1],
    )
