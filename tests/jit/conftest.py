"""Every test of the JIT layer has a cache of its own, and no setting from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit import settings
from kda_jit.jit import cache


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in use."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_writable", {})
    return folder


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small kernels_src, in use: sm80/add.cu -> common/numerics.cuh -> types.cuh beside it."""
    root = tmp_path / "kernels_src"
    files = {
        "sm80/add.cu": (
            '#include "common/numerics.cuh"\n'
            '#include "private.cuh"\n'
            'extern "C" __global__ void add(real* x) { x[threadIdx.x] += plus(kStep); }\n'
        ),
        "sm80/private.cuh": "#pragma once\nconstexpr float kStep = 2.0f;\n",
        "common/numerics.cuh": (
            '#pragma once\n#include "types.cuh"\nreal plus(real x) { return x + 1.0f; }\n'
        ),
        "common/types.cuh": "#pragma once\nusing real = float;\n",
        "common/unused.cuh": "#pragma once\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", str(root))
    return root
