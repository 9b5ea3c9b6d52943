"""Triton kernels built ahead of time, for GPUs that need not be there."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
#: What one block may take on sm_86, sm_89 and sm_12x, the least of all: one table serves every GPU.
SHARED_BYTES = 99 << 10


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], sm: int, **options: int):
    """Compiles as a launch would: aligned pointers and strides, but for those never looked at."""
    signature, fixed, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            fixed[(i,)] = constants[name]
            continue
        assert not parameter.is_constexpr, f"{name} is compiled in: it needs a constant"
        signature[name] = types.get(name, "i32")
        aligned = signature[name][0] == "*" and not parameter.do_not_specialize_on_alignment
        if aligned or (name.endswith("_stride") and not parameter.do_not_specialize):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, attributes)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def resources(kernel: Any, sm: int) -> tuple[int, int]:
    """(registers, bytes of spill stores), from ptxas over the kernel's PTX."""
    backend = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptx = kernel.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    ptxas = backend / ("ptxas-blackwell" if sm >= 100 else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        log = subprocess.run(
            [ptxas, "-v", f"-arch={target[1]}", file.name, "-o", os.devnull],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None
    assert spills is not None
    return int(registers[1]), int(spills[1])
