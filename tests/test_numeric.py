"""The comparison finds a planted error, says where, and is not fooled by the usual ways out."""

from __future__ import annotations

import pytest
import torch

from kda_jit.testing import (
    Case,
    Limit,
    assert_close,
    plain_loss,
    relative_rms,
    worst_block_error,
    worst_state_error,
)

ENDS = torch.tensor([0, 65, 65, 193])  # lengths 65, 0, 128


@pytest.fixture
def want() -> torch.Tensor:
    return torch.randn(1, 200, 3, 8, generator=torch.Generator().manual_seed(0))


def test_relative_rms() -> None:
    want = torch.tensor([3.0, 4.0])
    assert relative_rms(want, want) == 0.0
    assert relative_rms(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_rms(torch.tensor([3.0, torch.nan]), want) == torch.inf
    assert relative_rms(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_rms(torch.ones(2), torch.zeros(2)) == torch.inf


@pytest.mark.parametrize(
    "token, place", [(0, (0, 0)), (64, (0, 1)), (65, (2, 0)), (128, (2, 0)), (192, (2, 1))]
)
def test_a_wrong_element_is_placed(want: torch.Tensor, token: int, place: tuple[int, int]) -> None:
    got = want.clone()
    got[0, token, 2, 5] += 1.0
    worst = worst_block_error(got, want, ENDS)
    assert (worst.sequence, worst.chunk) == place
    assert worst.head == 2
    assert worst.element == (0, token, 2, 5)
    assert worst.error > 0.04


def test_the_worst_block_is_not_averaged_away(want: torch.Tensor) -> None:
    """One wrong tail row of a head: 1 % of the whole, all of its block."""
    got = want.clone()
    got[0, 64, 1] = 0.0
    assert relative_rms(got, want) < 0.1
    assert worst_block_error(got, want, ENDS).error == pytest.approx(1.0)


def test_rows_past_the_end_do_not_count(want: torch.Tensor) -> None:
    got = want.clone()
    got[0, 193:] = torch.nan
    assert worst_block_error(got, want, ENDS).error == 0.0
    assert worst_block_error(got, want).error == torch.inf


def test_nan_and_infinity_are_the_worst(want: torch.Tensor) -> None:
    for bad in (torch.nan, torch.inf):
        got = want.clone()
        got[0, 100, 0, 3] = bad
        worst = worst_block_error(got, want, ENDS)
        assert worst.error == torch.inf
        assert worst.element == (0, 100, 0, 3)


def test_a_dense_batch_is_placed_by_row() -> None:
    want = torch.ones(3, 20, 2, 4)
    got = want.clone()
    got[1, 17, 1, 2] = 2.0
    worst = worst_block_error(got, want, chunk=16)
    assert (worst.sequence, worst.head, worst.chunk) == (1, 1, 1)
    assert worst.element == (1, 17, 1, 2)


def test_a_quiet_block_is_judged_by_its_head_and_only_by_it(want: torch.Tensor) -> None:
    want = want.clone()
    want[0, :64, 0] *= 1e-6  # quiet: rounding of the loud part may be as large
    got = want.clone()
    got[0, :64, 0] += 1e-6
    assert worst_block_error(got, want, ENDS).error < 1e-3
    want[0, :65, 0] = 0.0  # the whole head of the sequence is zero: nothing excuses an error
    got = want.clone()
    got[0, 3, 0, 0] = 1e-9
    assert worst_block_error(got, want, ENDS).error == torch.inf


def test_states_are_judged_by_sequence_and_head() -> None:
    want = torch.ones(4, 3, 8, 8)
    got = want.clone()
    got[2, 1, 7, 3] = 3.0
    worst = worst_state_error(got, want)
    assert worst.error == pytest.approx(0.25)
    assert worst.element == (2, 1, 7, 3)
    got[3, 0] = torch.nan
    assert worst_state_error(got, want).sequence == 3
    assert worst_state_error(got[:0], want[:0]).error == 0.0


def test_no_tokens_no_error() -> None:
    empty = torch.empty(1, 0, 2, 4)
    assert worst_block_error(empty, empty, torch.tensor([0, 0])).error == 0.0


def test_message_has_place_limit_element_and_case() -> None:
    case = Case(seed=17, lengths=(65, 0, 128), heads=3, regime="saturated_closed")
    want = torch.ones(3, 3, 8, 8)
    got = want.clone()
    got[2, 1, 3, 4] = 1.25
    limit = Limit(plain=4.8e-3)
    with pytest.raises(AssertionError) as raised:
        assert_close("final_state", got, want, limit, case=case)
    first, second = str(raised.value).splitlines()
    assert first == (
        "final_state: relative RMS error 3.1e-02 at sequence 2, head 1; "
        "allowed 1.0e-02 (2 x plain torch bf16, 4.8e-03, + 4e-04)"
    )
    assert second == (
        "  worst element [2, 1, 3, 4]: got 1.25, want 1     "
        "Case(seed=17, lengths=(65, 0, 128), heads=3, regime='saturated_closed')"
    )
    with pytest.raises(AssertionError, match=r"out: .* at sequence 2, head 3, chunk 0; allowed 1"):
        assert_close("out", got, want, 1e-2)


def test_within_the_limit_passes_and_shapes_must_agree() -> None:
    want = torch.ones(3, 3, 8, 8)
    assert_close("final_state", want * 1.009, want, Limit(plain=4.8e-3))
    with pytest.raises(AssertionError, match="allowed"):
        assert_close("final_state", want * 1.011, want, Limit(plain=4.8e-3))
    with pytest.raises(AssertionError, match="shape"):
        assert_close("out", want[:1], want, 1.0)


def test_plain_loss_follows_the_conditioning_of_the_inputs() -> None:
    def loss(regime: str) -> float:
        x = Case(seed=1, lengths=(128,), heads=2, regime=regime).tensors(head_dim=64)
        return plain_loss(x).out

    random, near = loss("random"), loss("table_9_keep_near_keys")
    assert 1e-3 < random < 1e-2
    assert near > 2 * random
    x = Case(seed=1, lengths=(128,), heads=2).tensors(head_dim=64)
    assert plain_loss(x, operands=torch.float32).out < 1e-6
    assert plain_loss(x, x.reference()) == plain_loss(x)
