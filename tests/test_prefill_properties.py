"""The laws of Kimi Delta Attention, over the reference and every backend that can run here.

Each test's name states a law, whose body is in kda_jit.testing.laws; here Hypothesis draws the
cases and the edges are pinned. `backend` is a kda_jit.testing.runner.Runner; the reference is one
of them, and comes first.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kda_jit.testing import REGIMES, TABLE_ROWS, Case, laws, relative_rms
from kda_jit.testing.laws import GRANULE as BT
from kda_jit.testing.runner import Runner
from kda_jit.testing.strategies import UNBOUNDED, cases_for

CUTS = st.integers(0, 130)


def skip_what_it_lacks(backend: Runner, *features: str) -> None:
    for feature in features:
        if feature in backend.lacks:
            pytest.skip(backend.lacks[feature])


# -- against the recurrence ----------------------------------------------------------------------


@given(case=cases_for(laws.recurrence))
@example(case=Case(lengths=(0, 0, BT + 1, 0), heads=1, padding=3))
@example(case=Case(lengths=(1, 2 * BT, 1), heads=3, value_heads=6, regime="saturated_closed"))
def test_prefill_is_the_recurrence(backend: Runner, case: Case) -> None:
    laws.recurrence(backend, case)


@given(case=cases_for(laws.recurrence, unbounded=True))
@example(case=Case(lengths=(BT, 3), heads=2, regime="unbounded_real"))
def test_prefill_is_the_recurrence_with_an_unbounded_gate(backend: Runner, case: Case) -> None:
    skip_what_it_lacks(backend, "unbounded")
    laws.recurrence(backend, case)


@pytest.mark.parametrize("regime", [r for r in REGIMES if r not in TABLE_ROWS])
def test_every_regime_is_finite_and_accurate(backend: Runner, regime: str) -> None:
    if regime in UNBOUNDED:
        skip_what_it_lacks(backend, "unbounded")
    laws.recurrence(backend, Case(seed=1, lengths=(70, 0, 150), heads=2, regime=regime))


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["slow", "mixed", "near_keys", "blocks"])
def test_sixteen_thousand_tokens_stay_accurate(backend: Runner, regime: str) -> None:
    if backend.name == "triton" and backend.device.type == "cpu":
        pytest.skip("interpreted, a token takes a millisecond and more")
    laws.recurrence(backend, Case(seed=8, lengths=(16384,), heads=1, regime=regime))


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1])
def test_scale_multiplies_the_output_and_zero_is_not_the_default(
    backend: Runner, value: float
) -> None:
    laws.scale(backend, Case(seed=3, lengths=(40,), heads=2), value=value)
    laws.recurrence(backend, Case(seed=3, lengths=(40,), heads=2, scale=value))


# -- laws ----------------------------------------------------------------------------------------


@given(case=cases_for(laws.split), cut=CUTS)
@example(case=Case(seed=0, lengths=(BT + 1,), regime="saturated_closed"), cut=BT)
@example(case=Case(seed=1, lengths=(65,), regime="slow", value_heads=2), cut=17)
def test_prefill_in_two_parts_equals_one(backend: Runner, case: Case, cut: int) -> None:
    laws.split(backend, case, cut=cut)


@given(case=cases_for(laws.decay))
@example(case=Case(lengths=(BT + 1, 0, 3), regime="mixed"))
def test_zero_beta_only_decays_the_state(backend: Runner, case: Case) -> None:
    laws.decay(backend, case)


@given(case=cases_for(laws.causal), cut=CUTS, seed=st.integers(0, 99))
@example(case=Case(lengths=(2 * BT,), regime="slow"), cut=BT + 3, seed=5)
def test_output_ignores_later_tokens(backend: Runner, case: Case, cut: int, seed: int) -> None:
    laws.causal(backend, case, cut=cut, seed=seed)


@given(case=cases_for(laws.linear))
@example(case=Case(lengths=(33,), heads=2))
def test_output_is_linear_in_v_and_initial_state(backend: Runner, case: Case) -> None:
    laws.linear(backend, case)


@given(case=cases_for(laws.company), order=st.randoms(use_true_random=False))
@example(case=Case(lengths=(0, 0, 37, 0, 1, 65, 0)), order=None)
def test_packed_sequences_do_not_touch_each_other(
    backend: Runner, case: Case, order: Random | None
) -> None:
    laws.company(backend, case, order=order)


@given(
    case=cases_for(laws.poison), victim=st.integers(0, 3), what=st.sampled_from(("all", "state"))
)
@example(case=Case(lengths=(BT, 5, BT)), victim=1, what="all")
def test_nan_in_one_sequence_stays_there(
    backend: Runner, case: Case, victim: int, what: str
) -> None:
    laws.poison(backend, case, victim=victim, what=what)


@given(case=cases_for(laws.overwrite))
@example(case=Case(lengths=(BT + 2,), heads=2))
def test_repeated_key_with_beta_one_overwrites(backend: Runner, case: Case) -> None:
    laws.overwrite(backend, case)


@given(case=cases_for(laws.closed))
@example(case=Case(lengths=(3 * BT + 5, BT, BT + 1, 3)))
def test_closed_gate_remembers_the_last_tokens_only(backend: Runner, case: Case) -> None:
    laws.closed(backend, case)


@given(case=cases_for(laws.checkpoint), data=st.data())
@example(case=Case(lengths=(130, 15, 0, 64), padding=2), data=None)
def test_checkpoint_is_the_final_state_of_the_cut_sequence(
    backend: Runner, case: Case, data: Any
) -> None:
    offsets = [
        BT * (n // BT if data is None else data.draw(st.integers(0, n // BT))) for n in case.lengths
    ]
    laws.checkpoint(backend, case, offsets=offsets)


@given(case=cases_for(laws.pool), data=st.data())
@example(case=Case(lengths=(BT, 0, 33, 1, 0)), data=None)
def test_pool_is_dense_states_in_place(backend: Runner, case: Case, data: Any) -> None:
    N = len(case.lengths)
    if data is None:
        slots, kinds = list(range(N + 2, 2, -1)), ["old", "fresh", "none", "fresh", "old"][:N]
    else:
        slots = data.draw(st.permutations(range(N + 3)))[:N]
        kind = st.sampled_from(("old", "fresh", "none"))
        kinds = data.draw(st.lists(kind, min_size=N, max_size=N))
    laws.pool(backend, case, slots=slots, kinds=kinds)


@given(case=cases_for(laws.resume))
@example(case=Case(seed=7, lengths=(130, 15, 0, 64, 16), regime="slow"))
def test_checkpoint_in_another_slot_continues_the_sequence(backend: Runner, case: Case) -> None:
    laws.resume(backend, case)


@given(case=cases_for(laws.dense))
@example(case=Case(lengths=(67,) * 2, packed=False))
def test_dense_batch_is_the_packed_one(backend: Runner, case: Case) -> None:
    laws.dense(backend, case)


@given(case=cases_for(laws.strided))
@example(case=Case(lengths=(17,), heads=1))
def test_column_slices_of_a_projection_equal_contiguous_inputs(backend: Runner, case: Case) -> None:
    laws.strided(backend, case)


@given(case=cases_for(laws.padded), padding=st.integers(1, 60))
@example(case=Case(lengths=(BT + 1, 0)), padding=31)
def test_rows_past_the_end_are_neither_read_nor_written(
    backend: Runner, case: Case, padding: int
) -> None:
    laws.padded(backend, case, padding=padding)


@given(case=cases_for(laws.grouped), group=st.sampled_from((2, 3)))
@example(case=Case(lengths=(33,), heads=2), group=2)
def test_grouped_value_heads_are_repeated_query_and_key_heads(
    backend: Runner, case: Case, group: int
) -> None:
    laws.grouped(backend, case, group=group)


@given(case=cases_for(laws.heads))
@example(case=Case(lengths=(50,), value_heads=2))
def test_head_alone_is_the_head_among_others(backend: Runner, case: Case) -> None:
    laws.heads(backend, case)


@given(case=cases_for(laws.empty))
@example(case=Case(lengths=(0, 0), heads=2))
@example(case=Case(lengths=(0, 5, 0), initial=False))
def test_an_empty_sequence_keeps_its_state(backend: Runner, case: Case) -> None:
    laws.empty(backend, case)


@given(case=cases_for(laws.unit), power=st.integers(1, 6))
def test_length_of_keys_and_queries_does_not_matter(
    backend: Runner, case: Case, power: int
) -> None:
    laws.unit(backend, case, power=power)


@given(case=cases_for(laws.layout))
@example(case=Case(seed=2, lengths=(20,), heads=2, regime="slow"))
def test_state_is_v_major(backend: Runner, case: Case) -> None:
    laws.layout(backend, case)


@given(case=cases_for(laws.repeat))
def test_inputs_are_not_modified_and_runs_repeat_bit_for_bit(backend: Runner, case: Case) -> None:
    laws.repeat(backend, case)


@given(case=cases_for(laws.recurrent))
@example(case=Case(lengths=(1, 0, 4, 1)))
def test_prefill_is_the_recurrent_operator(backend: Runner, case: Case) -> None:
    if reason := laws.recurrent.why_not(backend, case.regime):
        pytest.skip(reason)
    laws.recurrent(backend, case)


@pytest.mark.parametrize("lengths", [(BT, 0, 33, 1), (130,), (1, 1, 64, 15, 0)])
def test_graph_replays_as_an_eager_call(backend: Runner, lengths: tuple[int, ...]) -> None:
    skip_what_it_lacks(backend, "graph")
    laws.graph(backend, Case(seed=4, lengths=lengths, heads=2))


@pytest.mark.parametrize("seed", [5, 6])
def test_state_dtypes_mix(backend: Runner, seed: int) -> None:
    laws.dtypes(backend, Case(seed=seed, lengths=(20, 0, 3), heads=2))


@pytest.mark.parametrize("count", [127, 300])
def test_many_short_sequences(backend: Runner, count: int) -> None:
    lengths = tuple((1, 17, 0, 33, 2)[i % 5] for i in range(count))
    laws.recurrence(backend, Case(seed=6, lengths=lengths))


# -- guards of the laws themselves ---------------------------------------------------------------


def test_a_transposed_state_is_noticed(backend: Runner) -> None:
    """With K = V no shape check can: the layout must show in the numbers."""
    x = Case(seed=2, lengths=(20,), heads=2, regime="slow").tensors(
        backend.device, backend.dtype, backend.head_dim
    )
    out, state = backend.prefill(x)
    other_out, other_state = backend.prefill(x.replace(initial_state=laws.read_transposed(x)))
    assert relative_rms(other_out, out) > 0.1
    assert relative_rms(other_state, state) > 0.1


def test_every_law_is_tried_here() -> None:
    """By a test of its own, and under the name that reports use."""
    source = Path(__file__).read_text()
    assert [name for name in laws.LAWS if f"laws.{name}(" not in source] == []
    assert all(law.about and getattr(laws, name) is law for name, law in laws.LAWS.items())


def test_what_a_law_measures_is_the_comparison_nearest_to_its_limit() -> None:
    runner = Runner("torch", torch.device("cpu"))
    found = laws.recurrence(runner, Case(seed=1, lengths=(40,)))
    assert found.what in ("out", "final_state")
    assert 0 < found.error < found.allowed
    assert 0 < found.ratio < 1
    assert laws.Measured(0.0, 0.0, "out").ratio == 0.0
    assert laws.Measured(1e-9, 0.0, "out").ratio == float("inf")
