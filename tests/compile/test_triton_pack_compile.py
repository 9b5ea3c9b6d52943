"""The Triton kernels of a mixed step, compiled ahead of time for GPUs that are not there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

from kda_jit.pack import BLOCK
from kda_jit.triton_kernels.pack import kda_pack, kda_scatter
from tests.compile.triton_aot import build, resources

INDICES = ("first_tokens", "second_tokens", "first_count", "second_count")


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build_each(sm: int, dtype: str = "bf16", index: str = "i32", heads: int = 12) -> dict[str, Any]:
    """Both, for heads of 128 channels."""
    inputs = ("q", "k", "v", "g", "beta")
    types = dict.fromkeys([*inputs, *(f"{x}_packed" for x in inputs), "packed", "out"], f"*{dtype}")
    types |= dict.fromkeys(INDICES, f"*{index}")
    pack = {"QK_WIDTH": heads * 128, "V_WIDTH": heads * 128, "G_WIDTH": heads * 128}
    widths = {
        kda_pack: pack | {"BETA_WIDTH": heads},
        kda_scatter: {"WIDTH": heads * 128},
    }
    return {
        kernel.__name__: build(kernel, types, {"BLOCK": BLOCK, **sizes}, sm, num_warps=4)
        for kernel, sizes in widths.items()
    }


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
def test_every_architecture(sm: int) -> None:
    for name, kernel in build_each(sm).items():
        assert kernel.asm["cubin"], name
        assert kernel.metadata.shared <= 2 * BLOCK, name  # of beta, which is not aligned
        registers, spills = resources(kernel, sm)
        assert spills == 0, name
        assert registers <= 64, f"{name}: too many for 8 blocks of 128 threads an SM"


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_every_dtype(dtype: str) -> None:
    for kernel in build_each(90, dtype, "i64").values():
        assert kernel.asm["cubin"]


def test_addresses_are_64_bit_and_accesses_wide() -> None:
    """Token times stride is a 64-bit product; rows move 16 bytes a thread at a time."""
    for name, kernel in build_each(90).items():
        ptx = kernel.asm["ptx"]
        assert re.search(r"mul\.lo\.s64|mad\.lo\.s64", ptx), name
    ptx = build_each(90)["kda_scatter"].asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", ptx)


def test_sizes_of_a_step_are_not_compiled_in() -> None:
    for kernel, names in (
        (kda_pack, {"first_rows", "num_tokens", "beta_stride"}),
        (kda_scatter, {"first_rows", "num_tokens"}),
    ):
        assert names <= {p.name for p in kernel.params if p.do_not_specialize}
