"""The Triton kernels, compiled ahead of time for GPUs that need not be there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

from kda_jit.backends.triton import config_for
from kda_jit.triton_kernels.prefill import kda_prepare, kda_recurrence
from tests.compile.triton_aot import NAMES, SHARED_BYTES, build, resources

HEADS = [
    (128, 128, torch.bfloat16),
    (128, 128, torch.float32),
    (256, 256, torch.float32),
    (256, 256, torch.float16),
    (96, 80, torch.float16),
    (16, 16, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build_prepare(
    K: int, dtype: torch.dtype, sm: int, *, bounded: bool = True, varlen: bool = True
) -> Any:
    config = config_for(K, K, dtype)
    types = dict.fromkeys(("q", "k", "g", "beta"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("A_log", "dt_bias", "totals"), "*fp32")
    types |= {"cu_seqlens": "*i32", "stages": f"*{NAMES[config.stage]}", "lower_bound": "fp32"}
    constants: dict[str, Any] = {"K": K, "BK": config.BK, "BOUNDED": bounded}
    if not varlen:
        constants["cu_seqlens"] = None
    return build(kda_prepare, types, constants, sm, num_warps=config.prepare_warps, num_stages=1)


def build_recurrence(
    K: int, V: int, dtype: torch.dtype, sm: int, *, options: bool = False, state: str = "fp32"
) -> Any:
    """options: with a pool, has_initial_state and checkpoints; else without any of them."""
    config = config_for(K, V, dtype)
    types = dict.fromkeys(("v", "out"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("initial_state", "final_state", "checkpoint_state"), f"*{state}")
    types |= {
        "totals": "*fp32", "stages": f"*{NAMES[config.stage]}", "scale": "fp32",
        "cu_seqlens": "*i32", "state_indices": "*i64", "has_initial_state": "*i1",
        "checkpoint_offsets": "*i64",
    }  # fmt: skip
    constants: dict[str, Any] = {
        "K": K, "V": V, "BK": config.BK, "BV": config.BV, "PRECISION": config.precision,
    }  # fmt: skip
    if not options:
        absent = (
            "initial_state", "state_indices", "has_initial_state", "checkpoint_state",
            "checkpoint_offsets",
        )  # fmt: skip
        constants |= dict.fromkeys(absent)
    return build(
        kda_recurrence, types, constants, sm,
        num_warps=config.recurrence_warps, num_stages=config.recurrence_stages,
    )  # fmt: skip


@pytest.mark.parametrize("K, V, dtype", HEADS)
@pytest.mark.parametrize("sm", [86, 90])
def test_every_head_fits_every_gpu(K: int, V: int, dtype: torch.dtype, sm: int) -> None:
    for kernel in (
        build_prepare(K, dtype, sm, bounded=True),
        build_prepare(K, dtype, sm, bounded=False),
        build_recurrence(K, V, dtype, sm),
    ):
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("sm", [80, 100, 120])
def test_every_architecture(sm: int) -> None:
    for kernel in (
        build_prepare(128, torch.bfloat16, sm),
        build_recurrence(128, 128, torch.bfloat16, sm),
    ):
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_BYTES


def test_every_optional_argument_compiles() -> None:
    build_prepare(128, torch.bfloat16, 90, varlen=False)
    kernel = build_recurrence(128, 128, torch.bfloat16, 90, options=True, state="bf16")
    assert kernel.metadata.shared <= SHARED_BYTES


def test_registers_of_the_common_head() -> None:
    """K = V = 128, 16-bit: the recurrence spills nothing, the other kernel a few registers."""
    recurrence = build_recurrence(128, 128, torch.bfloat16, 90)
    assert resources(recurrence, 90)[1] == 0
    prepare = build_prepare(128, torch.bfloat16, 90)
    assert resources(prepare, 90)[1] <= 256
    unbounded = build_prepare(128, torch.bfloat16, 90, bounded=False)
    assert resources(unbounded, 90)[1] == 0


def test_loads_are_wide_and_ahead_of_their_use() -> None:
    """Alignment gets through all the 64-bit addressing, and the pipeline is really built."""
    prepare = build_prepare(128, torch.bfloat16, 90).asm["ptx"]
    wide = len(re.findall(r"ld\.global\S*\.v4\.b32", prepare))
    assert wide >= 6, "q, k and g are not loaded 16 bytes at a time"
    recurrence = build_recurrence(128, 128, torch.bfloat16, 90).asm["ptx"]
    assert len(re.findall(r"cp\.async\.c\w\.shared", recurrence)) >= 24
    assert "mma.sync" in recurrence
    assert "tf32" in recurrence


def test_sizes_of_a_step_are_not_compiled_in() -> None:
    for kernel, names in (
        (kda_prepare, {"T", "N", "HV", "beta_batch_stride", "search_steps"}),
        (kda_recurrence, {"T", "N", "HV", "num_slots"}),
    ):
        assert names <= {p.name for p in kernel.params if p.do_not_specialize}
