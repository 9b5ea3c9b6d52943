"""How the pipeline schedule divides a GPU: pure functions of sizes, no tensor and no device.

kernels_src/sm90/kda_pipeline.cu has producer SMs, which prepare chunks, and consumer SMs, which run
chains: a chain is the recurrence of half of V's columns of one lane, and a lane is a head of a
group of sequences.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kda_jit.workspace import STAGE_BYTES, STAGE_TOKENS

#: Chains that one consumer SM runs side by side (kChains there).
MAX_CHAINS_PER_SM = 2
#: Groups that the kernel has room for (kMaxGroups there).
MAX_GROUPS = 64
#: Images that a consumer asks for before it returns one (kStages there), and two to work ahead.
MIN_RING = 8
#: The ring should stay in L2 beside what streams through it.
RING_BYTES = 24 << 20
_LINE_BYTES = 128

# SM cycles a token, measured on an H200 (docs/notes/hopper.md): of a chain alone on its SM or of
# two side by side, and of preparing for a value head.
_CHAIN_CYCLES = {1: 33.0, 2: 66.0}
_PREPARE_CYCLES = 115.0


class PipelinePlan(NamedTuple):
    """PipelineArgs without its pointers.

    groups          of sequences, about equal in tokens
    heads_beside    heads of a group that run beside each other; the others follow in the same lanes
    ring            stage images a lane
    consumers       CTAs, of `sm_count`
    chains_per_cta  of a consumer
    """

    groups: int
    heads_beside: int
    ring: int
    consumers: int
    chains_per_cta: int

    @property
    def lanes(self) -> int:
        return self.groups * self.heads_beside

    @property
    def ring_bytes(self) -> int:
        return self.lanes * self.ring * STAGE_BYTES

    @property
    def flag_bytes(self) -> int:
        """A line for the ticket, a line a lane, a word an image."""
        return _LINE_BYTES * (1 + self.lanes) + 4 * self.lanes * self.ring


@lru_cache(maxsize=1024)
def plan_pipeline(tokens: int, N: int, HV: int, sm_count: int) -> PipelinePlan | None:
    """The division with the least predicted time; None where there is too little work to divide.

    tokens, N   of the whole call; sequences are taken to be equally long
    """
    best: tuple[float, PipelinePlan] | None = None
    for groups in {1, 2, 4, 8, 16, 32, 64, min(N, MAX_GROUPS)}:
        if groups > min(N, MAX_GROUPS):
            continue
        for deep in (1, 2, 3, 4):
            heads_beside = -(-HV // deep)
            if deep > 1 and heads_beside == -(-HV // (deep - 1)):
                continue
            lanes = groups * heads_beside
            for chains in range(1, MAX_CHAINS_PER_SM + 1):
                consumers = -(-2 * lanes // chains)
                producers = sm_count - consumers
                if producers < 8:
                    continue
                per_lane = tokens / groups * deep
                time = max(
                    per_lane * _CHAIN_CYCLES[chains],
                    tokens * HV * _PREPARE_CYCLES / producers,
                )
                images = tokens // STAGE_TOKENS * HV // lanes
                ring = min(64, images, RING_BYTES // (lanes * STAGE_BYTES))
                if ring < MIN_RING:
                    continue
                plan = PipelinePlan(groups, heads_beside, ring, consumers, chains)
                if best is None or time < best[0]:
                    best = (time, plan)
    return best[1] if best is not None else None
