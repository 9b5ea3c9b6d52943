"""Deliberate faults in the torch backend: which laws notice each, and that none notices nothing.

The table is `caught_by` of kda_jit.testing.faults. A law beyond it may notice a fault, but not
clearly: rounding on another machine must not decide.
"""

from __future__ import annotations

import pytest
import torch

from kda_jit.backends import torch as backend
from kda_jit.testing import Case, laws
from kda_jit.testing.faults import CLEARLY, FAULTS, Fault, laws_that_notice
from kda_jit.testing.runner import Runner

CPU = torch.device("cpu")
#: Laws that no fault of the torch backend can break, and why.
BLIND = {"graph": "a CUDA graph needs a GPU"}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_fault_is_noticed_by_its_laws(fault: Fault) -> None:
    assert fault.caught_by, f"no law notices {fault.name}: {fault.about}"
    with fault():
        noticed = laws_that_notice()
    missed = set(fault.caught_by) - noticed.keys()
    assert not missed, f"{fault.name} passes {', '.join(sorted(missed))}"
    clearly = {name for name, ratio in noticed.items() if ratio > CLEARLY}
    beyond = clearly - {*fault.caught_by, *fault.perhaps}
    assert not beyond, f"add to caught_by: {beyond}"


def test_backend_as_it_is_breaks_no_law() -> None:
    assert laws_that_notice() == {}


def test_every_law_notices_some_fault() -> None:
    """Else it would be a law that nothing can break."""
    noticing = {name for fault in FAULTS.values() for name in fault.caught_by}
    assert noticing <= laws.LAWS.keys()
    assert laws.LAWS.keys() - noticing == BLIND.keys()
    runner = Runner("torch", CPU)
    for name, reason in BLIND.items():
        assert laws.LAWS[name].why_not(runner, "random") == reason


def test_some_faults_are_noticed_by_one_law_only() -> None:
    """Those laws cannot be left out."""
    alone = {fault.caught_by[0] for fault in FAULTS.values() if len(fault.caught_by) == 1}
    assert alone >= {"recurrence", "checkpoint", "pool", "padded", "scale", "strided"}


def test_faults_leave_nothing_behind() -> None:
    """Each is gone with its context, also after an error inside."""
    points = ("gate", "l2norm", "_initial_state", "_run_sequence", "_prepare", "_groups")
    before = [getattr(backend, name) for name in points]
    run, tril = backend.TorchBackend.run, torch.Tensor.tril
    for fault in FAULTS.values():
        with pytest.raises(ZeroDivisionError), fault():
            raise ZeroDivisionError
    assert [getattr(backend, name) for name in points] == before
    assert backend.TorchBackend.run is run
    assert torch.Tensor.tril is tril


def test_faults_say_what_they_are() -> None:
    assert len(FAULTS) >= 30
    for fault in FAULTS.values():
        assert fault.about.endswith("."), fault.name


def test_a_violation_says_where_and_what() -> None:
    case = Case(seed=3, lengths=(40,), heads=2)
    with (
        FAULTS["carry_lost_in_one_head"](),
        pytest.raises(AssertionError, match=r"out: .* error .* at sequence 0, head 1"),
    ):
        laws.recurrence(Runner("torch", CPU), Case(seed=3, lengths=(130,), heads=2))
    with FAULTS["checkpoint_of_nothing"](), pytest.raises(AssertionError) as caught:
        laws.checkpoint(Runner("torch", CPU), case, offsets=(0,))
    assert str(caught.value).endswith(repr(case))
