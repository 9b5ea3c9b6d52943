"""Runs schedules of a kernels_src on the emulated machine, for work on a kernel.

    python -m tests.emulation --schedule fused --seeds 20
    python -m tests.emulation --kernels /tmp/changed/kernels_src --against kernels_src

Each line is a schedule: a digest of all outputs and states of a batch, the same in every order of
events, and how near they are to the recurrence. With --against, whether another folder's kernels
give the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kda_jit.jit import sources
from kda_jit.testing import Case, Mismatch, assert_close
from kda_jit.testing.cases import BOUNDED
from kda_jit.testing.runner import rounding_limits
from tests.emulation import build
from tests.emulation.conftest import WAYS
from tests.emulation.emulator import Emulator
from tests.emulation.machine import EmulationError

LENGTHS = (33, 0, 270, 16, 1, 97, 400)


class Found(NamedTuple):
    """digests: of each order of events; words: the first fault, else the errors."""

    digests: frozenset[str]
    words: str


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--kernels", type=Path, default=sources.root(), help="a kernels_src; the usual one")
    add("--against", type=Path, help="another one, whose bits are to be the same")
    add("--schedule", action="append", choices=WAYS, help="may be repeated; all")
    add("--case", type=Case.parse, action="append", help="as it is printed; mixed batches")
    add("--seeds", type=int, default=10, help="orders of events a case")
    add("--first-seed", type=int, default=1)
    add("--lanes-apart", action="store_true", help="let lanes fall behind their warps")
    given = parser.parse_args()
    reason = build.unavailable_reason()
    if reason is not None:
        sys.exit(reason)
    torch.set_num_threads(1)
    cases = given.case or [
        Case(seed=i, lengths=LENGTHS, heads=1, value_heads=2, regime=regime)
        for i, regime in enumerate(BOUNDED)
    ]
    bad = 0
    for name in given.schedule or WAYS:
        begun = time.monotonic()
        found = run(name, given.kernels, cases, given)
        words = found.words
        if given.against is not None:
            other = run(name, given.against, cases, given)
            words += "  same bits" if other.digests == found.digests else "  OTHER BITS"
            bad += other.digests != found.digests
        one = len(found.digests) == 1
        bad += not one
        count = len(found.digests) or "no"
        shown = next(iter(found.digests)) if one else f"{count} different results"
        print(f"{name:14s} {shown:16s} {words}  ({time.monotonic() - begun:.1f} s)", flush=True)
    return 1 if bad else 0


def run(name: str, folder: Path, cases: list[Case], given: argparse.Namespace) -> Found:
    """Every case in every order of events."""
    digests: dict[int, hashlib._Hash] = {}
    worst = 0.0
    for case in cases:
        x = case.tensors()
        want = x.reference()
        limits = rounding_limits(x, None, want)
        for seed, out, state, fault in results(name, folder, case, given):
            if fault:
                return Found(frozenset(), f"FAULT {case}\n{fault}")
            digest = digests.setdefault(seed, hashlib.sha256())
            for tensor in (out, state):
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            try:
                errors = (
                    assert_close("out", out, want.out, limits[0], cu_seqlens=x.cu_seqlens),
                    assert_close("final_state", state, want.final_state, limits[1]),
                )
            except Mismatch as mismatch:
                return Found(frozenset(), f"WRONG {case}\n{mismatch}")
            shares = [e.error / limit.allowed for e, limit in zip(errors, limits, strict=True)]
            worst = max(worst, *shares)
    found = frozenset(digest.hexdigest()[:16] for digest in digests.values())
    return Found(found, f"error at most {worst:.2f} of what is allowed")


def results(
    name: str, folder: Path, case: Case, given: argparse.Namespace
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, str]]:
    """(seed, out, final_state, what went wrong) of each order of events."""
    schedule, options = WAYS[name]
    x = case.tensors()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        options = options | {"lanes_apart": given.lanes_apart, "folder": folder}
        with Emulator(schedule, seed=1000 * seed, **options) as emulator:
            try:
                yield seed, *emulator.prefill(x), ""
            except (EmulationError, AssertionError) as error:
                yield seed, x.v, x.v, str(error)


if __name__ == "__main__":
    sys.exit(main())
