"""How many blocks of a kernel fit on one multiprocessor, from the limits of its target. No GPU."""

from __future__ import annotations

from typing import NamedTuple

from kda_jit.jit import arch_named

#: Of every capability from 8.0 on.
REGISTERS = 65536
WARP = 32
_PARTS = 4  # of a multiprocessor; each has its own registers, and a warp stays in its part
_REGISTERS_AT_ONCE = 256  # a warp gets registers in pieces of this many
_SMEM_AT_ONCE = 128
_SMEM_RESERVED = 1024  # bytes of every block that are the system's own

#: (warps, blocks) that one multiprocessor holds at most, by capability.
_MOST: dict[tuple[int, int], tuple[int, int]] = {
    (8, 0): (64, 32),
    (8, 6): (48, 16),
    (8, 7): (48, 16),
    (8, 9): (48, 24),
    (9, 0): (64, 32),
    (10, 0): (64, 32),
    (10, 3): (64, 32),
    (11, 0): (48, 24),
    (12, 0): (48, 24),
    (12, 1): (48, 24),
}


class Occupancy(NamedTuple):
    """Of one multiprocessor.

    blocks   that it holds at a time
    share    of the warps that it could hold
    bound    what allows no further block: registers, smem, warps, blocks, or several of them
    """

    blocks: int
    share: float
    bound: str


def occupancy(target: str, *, threads: int, registers: int, smem: int) -> Occupancy:
    """What the target's limits allow.

    threads    per block
    registers  per thread, at launch
    smem       bytes per block, static and dynamic
    """
    arch = arch_named(target)
    most_warps, most_blocks = _MOST[arch.cc]
    warps = -(-threads // WARP)
    per_warp = _round_up(max(1, registers) * WARP, _REGISTERS_AT_ONCE)
    # A multiprocessor has what the largest block can have, and the system's part of that block.
    smem_there = arch.smem_per_block + _SMEM_RESERVED
    allowed = {
        "registers": _PARTS * (REGISTERS // _PARTS // per_warp) // warps,
        "smem": smem_there // _round_up(smem + _SMEM_RESERVED, _SMEM_AT_ONCE),
        "warps": most_warps // warps,
        "blocks": most_blocks,
    }
    blocks = min(allowed.values())
    bound = ", ".join(name for name, count in allowed.items() if count == blocks)
    return Occupancy(blocks, blocks * warps / most_warps, bound)


def _round_up(amount: int, piece: int) -> int:
    return -(-amount // piece) * piece
