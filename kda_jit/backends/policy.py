"""Which schedule for Hopper `auto` takes: a pure function of sizes.

- `fused` never writes stage images to memory, and shares chunks out evenly, but a chunk takes its
  chain longer: for many heads.
- `hopper_single` has the fastest chain, half of a head's columns on an SM: for few heads.
- `pipeline` is that chain, while other SMs prepare: for few heads that are long, since it waits
  until every SM is free.
- `hopper` runs both halves on the same images: for many short sequences.

Thresholds lie between cases of benchmarks/results/development/2026-11-30-which-schedule-2.txt.
"""

from __future__ import annotations

_CHUNK = 32  # tokens


def hopper_schedule(N: int, tokens: int, HV: int, sm_count: int) -> str:
    """A name in `kda_jit.backends.cuda.SCHEDULES`, for N sequences of `tokens` tokens in all.

    Lengths are on the device, so it takes them to be equal: where one of a few sequences is much
    longer than the others, `fused` may be a tenth slower than `hopper_single` (mixed_8192_h12).
    """
    heads, clusters = N * HV, sm_count // 2  # heads of sequences; pairs of SMs
    chunks = tokens * HV // _CHUNK
    # `fused` takes as long for two thirds of the heads as for a head a cluster. It needs a few
    # chunks a head, to fill its stages, and a few a cluster.
    many = 8 * heads >= 5 * clusters and chunks >= 12 * clusters
    if clusters and many and tokens >= 256 * N:
        return "fused"
    # Preparing binds `pipeline` where heads are more than a fifth of the SMs. With very few heads
    # `hopper_single` prepares in no time, too.
    if 5 * heads <= sm_count and tokens >= (4096 if 12 * heads >= sm_count else 8192) * N:
        return "pipeline"
    chains = 2 * heads  # recurrences of half of V's columns
    # The chains of one sequence are equally long, and one too many costs a second round. Sequences
    # of unequal lengths make up for a few.
    single = chains <= (sm_count if N == 1 else sm_count * 9 // 8)
    return "hopper_single" if single else "hopper"
