"""A kernels_src of the tests' own: the files that schedules name, each with its entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit import settings
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.jit import cache, unavailable_reason

pytest.importorskip("rich", reason="kda_jit.lab needs the package rich")

PORTABLE = SCHEDULES["portable"].file
HEADER = "common/step.cuh"
HEADER_TEXT = """\
#pragma once
constexpr float kStep = 2.0f;

float step(float x) {
    return x + kStep;
}
"""
UNREAD = "common/unread.cuh"

needs_nvrtc = pytest.mark.skipif(
    unavailable_reason("sm_80") is not None, reason=f"needs NVRTC: {unavailable_reason('sm_80')}"
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in use; no other setting."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv(settings.CACHE_DIR.name, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_writable", {})
    return tmp_path / "cache"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, in use. The portable file reads HEADER; nobody reads UNREAD."""
    root = tmp_path / "kernels_src"
    texts = {HEADER: HEADER_TEXT, UNREAD: "#pragma once\n"}
    for schedule in SCHEDULES.values():
        include = f'#include "{HEADER}"\n' if schedule.file == PORTABLE else ""
        body = "x[threadIdx.x] = step(x[threadIdx.x]);" if include else ""
        entries = schedule.spec("sm_90a").entries
        texts[schedule.file] = include + "".join(
            f'extern "C" __global__ void {entry}(float* x) {{ {body} }}\n' for entry in entries
        )
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv(settings.KERNELS_SRC.name, str(root))
    return root
