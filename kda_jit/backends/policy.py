"""Which schedule for Hopper `auto` takes: a pure function of sizes.

- `fused` never writes stage images to memory, and shares chunks out evenly, but a chunk takes its
  chain longer, and a cluster begins with nothing to do: for many heads.
- `hopper_single` has the fastest chain, half of a head's columns on an SM: for few heads.
- `pipeline` is that chain, while other SMs prepare: for few heads that are long, since it waits
  until every SM is free.
- `hopper` runs both halves on the same images: for many short sequences.

Thresholds lie between cases of benchmarks/results/development/2026-12-01-which-schedule-3.txt.
"""

from __future__ import annotations

import math


def hopper_schedule(N: int, tokens: int, HV: int, sm_count: int) -> str:
    """A name in `kda_jit.backends.cuda.SCHEDULES`, for N sequences of `tokens` tokens in all.

    Lengths are on the device, so it takes them to be equal. Where one of a few sequences is much
    longer than the others, `fused` may be a fifth slower than `hopper_single`, whose chains take
    half as long.
    """
    heads = N * HV  # of sequences
    if sm_count >= 2 and tokens >= _least_fused(N, heads, sm_count) * N:
        return "fused"
    # Preparing binds `pipeline` where heads are more than a fifth of the SMs. With very few heads
    # `hopper_single` prepares in no time, too.
    if 14 * heads <= 3 * sm_count and tokens >= (4096 if 12 * heads >= sm_count else 8192) * N:
        return "pipeline"
    # Half a head an SM, while there are SMs for all of them: one too many costs a second round.
    return "hopper_single" if 2 * heads <= sm_count else "hopper"


def _least_fused(N: int, heads: int, sm_count: int) -> float:
    """Tokens a sequence from which `fused` is the fastest; its clusters are pairs of SMs."""
    if 10 * heads < 3 * sm_count:
        return math.inf  # its chains wait for two SMs that prepare, others for all of them
    if 2 * heads <= sm_count:
        # Of several sequences one is the longest, which twelve chunks a cluster make up for.
        return 128 if N == 1 else 192 * sm_count / heads
    if heads > sm_count:
        return 64  # the others need a second round for what is left
    # Between a head a cluster and nearly two, states go from one cluster to the next.
    return 256 if 10 * heads < 9 * sm_count else 128
