"""The Triton kernel of `chunk_kda`'s other forms, compiled for GPUs that are not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

from kda_jit.chunk.by_triton import config_of_forms
from kda_jit.triton_kernels.forms import kda_prepare_forms
from kda_jit.triton_kernels.prefill import kda_recurrence
from tests.compile.triton_aot import NAMES, SHARED_BYTES, build


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    "normalize, gate, sigmoid",
    [
        (True, "narrow", False),
        (True, "bounded", True),
        (True, "softplus", False),
        (False, "log", False),
    ],
)
@pytest.mark.parametrize(
    "D, dtype, sm",
    [
        (128, torch.bfloat16, 90),
        (256, torch.float32, 86),
        (96, torch.float16, 80),
        (16, torch.bfloat16, 120),
    ],
)
def test_every_form_fits_every_gpu(
    normalize: bool, gate: str, sigmoid: bool, D: int, dtype: torch.dtype, sm: int
) -> None:
    config = config_of_forms(D, D, dtype, normalize and sigmoid)
    types = dict.fromkeys(("q", "k"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("g", "beta", "A_log", "dt_bias", "totals"), "*fp32")
    types |= {"cu_seqlens": "*i64", "stages": f"*{NAMES[config.stage]}"}
    types |= {"lower_bound": "fp32", "beta_scale": "fp32"}
    constants = {
        "K": D, "BK": config.BK, "NORMALIZE": normalize, "LOG_GATE": gate == "log",
        "BOUNDED": gate in ("narrow", "bounded"), "NARROW": gate == "narrow", "SIGMOID": sigmoid,
    }  # fmt: skip
    kernel = build(
        kda_prepare_forms, types, constants, sm, num_warps=config.prepare_warps, num_stages=1
    )
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_BYTES


@pytest.mark.parametrize("D", [128, 256])
def test_the_recurrence_fits_with_wide_stages(D: int) -> None:
    """16-bit tensors around fp32 stages: a mix that no prefill has."""
    config = config_of_forms(D, D, torch.bfloat16, False)
    types = dict.fromkeys(("v", "out"), "*bf16")
    names = ("initial_state", "final_state", "totals", "stages")
    types |= dict.fromkeys(names, "*fp32") | {"scale": "fp32", "cu_seqlens": "*i64"}
    absent = ("checkpoint_state", "state_indices", "has_initial_state", "checkpoint_offsets")
    constants = {"K": D, "V": D, "BK": config.BK, "BV": config.BV, "PRECISION": config.precision}
    kernel = build(
        kda_recurrence, types, constants | dict.fromkeys(absent), 86,
        num_warps=config.recurrence_warps, num_stages=config.recurrence_stages,
    )  # fmt: skip
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_BYTES
