"""Importing the package touches neither CuPy, Triton nor a GPU (who imports whom: test_layers)."""

import subprocess
import sys

import pytest

# torch itself may import triton: only what the package adds to torch counts.
PROGRAM = """
import sys
import torch
before = set(sys.modules)
{statement}
added = {{name.partition(".")[0] for name in set(sys.modules) - before}}
assert not added & {{"cupy", "cupy_backends", "triton", "numba", "typer", "rich"}}, added
assert "kda_jit" in added
assert not torch.cuda.is_initialized()
"""
USE = """
import kda_jit
x = torch.zeros(1, 3, 1, 16)
kda_jit.prefill(x, x, x, x, x[..., 0], A_log=x[0, 0, :, 0], dt_bias=x[0, 0], backend="torch")
assert kda_jit.last_launch().backend == "torch"
"""


@pytest.mark.parametrize(
    "statement",
    [
        "import kda_jit",
        "import kda_jit.reference",
        "import kda_jit.jit",
        "import kda_jit.backends.cuda",
        "import kda_jit.backends.triton",
        "import kda_jit.testing",
        USE,
    ],
)
def test_importing_touches_neither_cupy_triton_nor_the_gpu(statement):
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
