"""The Triton kernel of decode and verification, compiled ahead of time for GPUs not there."""

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

from kda_jit.backends.recurrent_triton import GRID_N, config_for
from kda_jit.triton_kernels.recurrent import kda_recurrent
from tests.compile.triton_aot import NAMES, SHARED_BYTES, build, resources

HEADS = [
    (128, 128, torch.bfloat16),
    (256, 256, torch.float32),
    (96, 80, torch.float16),
    (16, 24, torch.bfloat16),
]


@pytest.fixture(autouse=True)
def cold_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build_recurrent(
    K: int,
    V: int,
    dtype: torch.dtype,
    sm: int,
    *,
    bounded: bool = True,
    state: str = "fp32",
    index: str = "i32",
    absent: tuple[str, ...] = (),
    group: int = 1,
    few: bool = False,
) -> Any:
    config = config_for(K)
    types = dict.fromkeys(("q", "k", "v", "g", "beta", "out"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("A_log", "dt_bias"), "*fp32")
    types |= dict.fromkeys(("state_indices", "num_accepted_tokens", "cu_seqlens"), f"*{index}")
    types |= {"state_pool": f"*{state}", "lower_bound": "fp32", "scale": "fp32"}
    types |= {"has_initial_state": "*i1"}
    constants: dict[str, Any] = {
        "K": K, "V": V, "BK": config.BK, "BV": config.BV, "GRID_N": GRID_N, "BOUNDED": bounded,
        "FEW": few,
    }  # fmt: skip
    constants |= dict.fromkeys(absent)
    if group == 1:
        constants["group"] = 1  # which a launch compiles in
    return build(kda_recurrent, types, constants, sm, num_warps=1)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
@pytest.mark.parametrize("few", [False, True])
def test_every_architecture(sm: int, state: str, few: bool) -> None:
    """The common head: no spills, and little enough of everything to fill a GPU."""
    kernel = build_recurrent(128, 128, torch.bfloat16, sm, state=state, few=few)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= 2048
    registers, spills = resources(kernel, sm)
    assert spills == 0
    assert registers <= 128  # 16 warps an SM


def test_many_decodes_have_24_warps_an_sm() -> None:
    """As `kda_recurrent` says of `few`: what makes 1,024 decodes as fast as they are."""
    absent = ("num_accepted_tokens", "has_initial_state")
    many = build_recurrent(128, 128, torch.bfloat16, 90, absent=absent)
    assert resources(many, 90) == (80, 0)


@pytest.mark.parametrize("K, V, dtype", HEADS)
@pytest.mark.parametrize("bounded", [True, False])
def test_every_head(K: int, V: int, dtype: torch.dtype, bounded: bool) -> None:
    kernel = build_recurrent(K, V, dtype, 90, bounded=bounded, index="i64")
    assert kernel.metadata.shared <= SHARED_BYTES
    assert resources(kernel, 90)[1] == 0


@pytest.mark.parametrize(
    "absent", [("cu_seqlens",), ("num_accepted_tokens",), ("has_initial_state",)]
)
def test_every_optional_argument(absent: tuple[str, ...]) -> None:
    build_recurrent(128, 128, torch.bfloat16, 90, absent=absent)


def test_states_move_16_bytes_at_a_time() -> None:
    """Alignment gets through all the 64-bit addressing. 32 elements a thread, read once, and stored
    where the state after a token goes."""
    ptx = build_recurrent(128, 128, torch.bfloat16, 90).asm["ptx"]
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= 8
    assert len(re.findall(r"st\.global\S*\.v4\.b32", ptx)) == 8


def test_no_number_of_a_step_is_compiled_in() -> None:
    fixed = {p.name for p in kda_recurrent.params if p.do_not_specialize}
    assert fixed >= {
        "N", "T", "num_slots", "columns", "null_index", "write", "write_each", "index_stride",
        "column_stride", "accepted_stride",
    }  # fmt: skip
