"""Broken kernels are found out: else the tests beside this one would say nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kda_jit.jit import sources
from kda_jit.testing import Case, assert_close
from kda_jit.testing.runner import rounding_limits
from tests.emulation.conftest import Way
from tests.emulation.emulator import Emulator

#: Orders of events that are tried before a fault counts as missed.
TRIES = 240


@dataclass(frozen=True)
class Mutation:
    """One text for another in a file of kernels_src, and a way that runs it.

    lanes_apart  each lane of a warp goes on by itself, as far as CUDA allows
    """

    name: str
    way: str
    file: str
    old: str
    new: str
    lengths: tuple[int, ...] = (33, 0, 270, 16, 97)
    lanes_apart: bool = False


MUTATIONS = (
    Mutation(
        "a token does not see itself", "hopper", "common/prepare.cuh",
        "2 * tid + e <= gid ? x", "2 * tid + e < gid ? x",
    ),
    Mutation(
        "rows past the last one are stored", "portable_sm80", "sm80/kda_prefill.cu",
        "if (row < chunk.valid)\n", "if (row < kChunk)\n",
    ),
    Mutation(
        "the warps of a chunk do not meet", "portable_sm90", "common/prepare.cuh",
        "    barriers.all();  // T_00 and T_11 are in place\n", "",
    ),
    Mutation(
        "the late block's warps do not meet", "portable_sm90", "common/prepare.cuh",
        "            barriers.late();\n", "",
    ),
    Mutation(
        "lanes do not meet before T overwrites A", "portable_sm80", "common/prepare.cuh",
        "    __syncwarp();  // T goes where A's columns were\n", "",
    ),
    Mutation(
        "cp.async is not waited for", "portable_sm80", "sm80/kda_prefill.cu",
        "cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>",
    ),
    Mutation(
        "the recurrence does not wait for the grid ahead", "portable_sm90", "sm80/kda_prefill.cu",
        "    grid_wait_for_prerequisites();  // the stage images\n", "",
    ),
    Mutation(
        "an accumulator is read in flight", "hopper_single", "sm90/chain.cuh",
        "        wgmma_wait<1>();\n        pin(o);", "        pin(o);",
    ),
    Mutation(
        "a stage is given back before wgmma has read it", "hopper", "sm90/chain.cuh",
        "        wgmma_wait<0>();\n        pin(state.s);\n        __syncwarp();\n"
        "        if (lane == 0) stages.release(here);",
        "        __syncwarp();\n        if (lane == 0) stages.release(here);\n"
        "        wgmma_wait<0>();\n        pin(state.s);",
    ),
    Mutation(
        "the next chunk takes the state before its products are there", "hopper", "sm90/chain.cuh",
        "        wgmma_wait<0>();\n        pin(state.s);",
        "        if (!more) wgmma_wait<0>();\n        pin(state.s);",
    ),
    Mutation(
        "a state is multiplied before it is packed", "hopper_single", "sm90/chain.cuh",
        "        snapshot();\n        multiply_state(spot.image);\n    }",
        "        multiply_state(spot.image);\n        snapshot();\n    }",
    ),
    Mutation(
        "fewer bytes are expected than come", "hopper", "sm90/chain.cuh",
        "mbarrier_arrive_expect_bytes(spot.full, kStageBytes);",
        "mbarrier_arrive_expect_bytes(spot.full, kStageBytes - 64);",
    ),
    Mutation(
        "what lies behind a sequence is prepared with it", "fused", "sm90/kda_fused.cu",
        "        if (valid < kChunk) clear_rows(image, part, valid);\n", "",
    ),
    Mutation(
        "an image is sent before all four warps have made it", "fused", "sm90/kda_fused.cu",
        "            mbarrier_wait(at + kReady, number / kSlots & 1);\n", "",
    ),
    Mutation(
        "an image is sent to a place that is in use", "fused", "sm90/kda_fused.cu",
        "                mbarrier_wait(shared_address(&smem.own[last].freed), round & 1);\n", "",
    ),
    Mutation(
        "a lane still asks a barrier that its own warp lets go on", "fused", "sm90/kda_fused.cu",
        "            if (elect_one()) bulk_copy_to_peer(",
        "            if ((threadIdx.x & 31) == 0) bulk_copy_to_peer(",
        (2400,), lanes_apart=True,
    ),
    Mutation(
        "a cluster takes a state that is not there", "fused", "sm90/kda_fused.cu",
        "        while (__any_sync(0xffffffffu, load_acquire(flag) != args.call)) {}\n", "",
    ),
    Mutation(
        "a CTA ends while its peer needs it", "fused", "sm90/kda_fused.cu",
        "    cluster_sync();  // the peer", "    // the peer",
    ),
    Mutation(
        "an image in the ring is overwritten", "pipeline", "sm90/kda_pipeline.cu",
        "skip_to(base + c + 1)", "skip_to(base + c + 2)",
        (700, 33, 400),
    ),
    Mutation(
        "nobody is told of the last image", "pipeline", "sm90/kda_pipeline.cu",
        "    if (owes) {\n        bulk_store_wait<0>();\n        publish(before());\n    }",
        "    if (owes) bulk_store_wait<0>();",
    ),
)  # fmt: skip


def fault(emulated: Emulator, lengths: tuple[int, ...], tries: int) -> str | None:
    """What is wrong in one of `tries` orders of events, of sequences and a NaN tail."""
    x = Case(seed=3, lengths=lengths, heads=2, padding=20).tensors()
    want = x.reference()
    limits = rounding_limits(x, None, want)
    for _ in range(tries):
        try:
            out, state = emulated.prefill(x)
            assert torch.isfinite(out[:, : sum(lengths)]).all()
            assert torch.isfinite(state).all()
            assert_close("out", out, want.out, limits[0], cu_seqlens=x.cu_seqlens)
            assert_close("final_state", state, want.final_state, limits[1])
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    "way, lengths, lanes_apart", sorted({(m.way, m.lengths, m.lanes_apart) for m in MUTATIONS})
)
def test_kernels_as_they_are_have_no_fault(
    way: str, lengths: tuple[int, ...], lanes_apart: bool
) -> None:
    tries = TRIES // 4 if lanes_apart else 5
    with Way(way)(seed=1, lanes_apart=lanes_apart) as emulated:
        assert fault(emulated, lengths, tries) is None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_kernel_is_found_out(mutation: Mutation, tmp_path: Path) -> None:
    folder = tmp_path / "kernels_src"
    shutil.copytree(sources.root(), folder)
    text = (folder / mutation.file).read_text()
    assert text.count(mutation.old) == 1, "the kernel is written otherwise by now"
    (folder / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    how = {"seed": 1, "folder": folder, "lanes_apart": mutation.lanes_apart}
    with Way(mutation.way)(**how) as emulated:
        assert fault(emulated, mutation.lengths, TRIES), f"not seen in {TRIES} orders of events"
