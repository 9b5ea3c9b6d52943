"""Which schedule for Hopper `auto` takes: a pure function of sizes.

`hopper` runs a head on an SM, both halves of V on the same stage images; `hopper_single` one half,
faster, on twice as many; `pipeline` prepares on some SMs while others run the recurrence, which
pays where the recurrence needs few of them for long. The thresholds lie between cases of
benchmarks/results/h200-2026-11-30-schedules.json, which are named beside them.
"""

from __future__ import annotations

#: Below, a pipeline has hardly begun to flow (1x512_h12).
PIPELINE_TOKENS = 8192


def pipeline_pays(tokens: int, N: int, HV: int, sm_count: int) -> bool:
    """Whether `pipeline` is taken: for a long sequence whose chains need a quarter of the SMs."""
    chains = 2 * HV
    return N == 1 and tokens >= PIPELINE_TOKENS and chains <= sm_count // 4


def one_chain_an_sm(N: int, HV: int, sm_count: int) -> bool:
    """Whether `hopper_single` is taken, not `hopper`."""
    chains = 2 * N * HV  # recurrences of half of V's columns of one (sequence, value head)
    # The chains of one sequence are equally long, and one too many costs a second round. Sequences
    # of unequal lengths make up for a few: 144 chains do well (mixed_8192_h12), 192 of equal
    # lengths do not (8x1024_h12).
    return chains <= (sm_count if N == 1 else sm_count * 9 // 8)
