"""Which schedule for Hopper `auto` takes: a pure function of sizes.

`hopper` runs a head on an SM, both halves of V on the same stage images; `hopper_single` one half,
faster, on twice as many. The threshold lies between cases of
benchmarks/results/h200-2026-11-30-schedules.json, which are named beside it.

`pipeline` is not taken: it is faster at most where one long sequence has few heads (1x16384_h16, a
tenth by times of different runs), and waits until every SM is free (docs/notes/hopper.md).
"""

from __future__ import annotations


def one_chain_an_sm(N: int, HV: int, sm_count: int) -> bool:
    """Whether `hopper_single` is taken, not `hopper`."""
    chains = 2 * N * HV  # recurrences of half of V's columns of one (sequence, value head)
    # The chains of one sequence are equally long, and one too many costs a second round. Sequences
    # of unequal lengths make up for a few: 144 chains do well (mixed_8192_h12), 192 of equal
    # lengths do not (8x1024_h12).
    return chains <= (sm_count if N == 1 else sm_count * 9 // 8)
