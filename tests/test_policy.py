"""What `auto` takes on Hopper, against what was measured there."""

import json
from pathlib import Path

import pytest

from kda_jit.backends.policy import one_chain_an_sm

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
RUN = json.loads((RESULTS / "h200-2026-11-30-schedules.json").read_text())
SMS = RUN["device"]["sms"]


@pytest.mark.parametrize("row", RUN["rows"], ids=lambda row: row["case"])
def test_what_is_taken_is_within_5_percent_of_the_faster(row):
    us = {name: row["timings"][f"cuda/{name}"]["us"] for name in ("hopper", "hopper_single")}
    lengths = row["lengths"]
    single = one_chain_an_sm(len(lengths), row["heads"], SMS)
    taken = "hopper_single" if single else "hopper"
    assert us[taken] <= 1.05 * min(us.values()), (taken, us)


@pytest.mark.parametrize(
    "N, HV, sm_count, single",
    [
        (1, 66, 132, True),
        (1, 67, 132, False),
        (2, 33, 132, True),
        (2, 37, 132, True),
        (2, 38, 132, False),
        (1, 64, 114, False),
        (1, 1, 1, False),
        (20_000, 1, 132, False),
    ],
)
def test_where_it_turns(N, HV, sm_count, single):
    """At one chain an SM, an eighth more for several sequences."""
    assert one_chain_an_sm(N, HV, sm_count) is single
