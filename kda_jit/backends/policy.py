"""Which of the two-kernel schedules for Hopper `auto` takes: a pure function of sizes.

`hopper` runs two chains on an SM side by side, `hopper_single` one, faster, and the next after it.
A chain is the recurrence of half of V's columns of one (sequence, value head). The thresholds lie
between cases of benchmarks/results/h200-2026-11-29-schedules.json, which are named beside them.
"""

from __future__ import annotations

from kda_jit.workspace import STAGE_TOKENS

# `hopper` is faster with 512 tokens (1x512_h12), `hopper_single` with 1365 (mixed_8192_h12). The
# shortest call (1x64_h16) loses its time between the kernels, which take 5.5 and 5.3 us in both
# schedules, while the call takes 3 us longer in `hopper_single`.
_LONG = 32 * STAGE_TOKENS


def one_chain_an_sm(tokens: int, N: int, HV: int, sm_count: int) -> bool:
    """Whether `hopper_single` is taken, not `hopper`.

    tokens, N   of the whole call; how long each sequence is, the host does not know
    """
    chains = 2 * N * HV
    # The chains of one sequence are equally long, and one too many should cost a second round (no
    # case has just one too many; the recurrence of 1x8192_h96, 192 chains on 132 SMs, takes 1.8
    # times that of 1x8192_h64, 128). Sequences of unequal lengths make up for a few: 144 chains do
    # well (mixed_8192_h12), 192 of equal lengths do not (8x1024_h12).
    most = sm_count if N == 1 else sm_count * 9 // 8
    return chains <= most and tokens >= N * _LONG
