"""Small calls of every kind, to be run under compute-sanitizer: exits with 1 where one errs.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 \
        python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/gpu/sanitize.py --small
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py --small

--schedule NAME  one CUDA schedule; all that run here otherwise
--small          one call, of 133 tokens in three sequences

API errors are left out: the end of a kernel's list of parameters is told by one. initcheck has no
use here: it tells of the padding of stage images, which is copied along. Torch's caching allocator
is switched off: inside one of its blocks nothing is out of bounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import kda_jit
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.backends.pipeline import plan_pipeline
from kda_jit.reference import RecurrentResult
from kda_jit.testing import Case, Inputs, assert_close
from kda_jit.testing.runner import Runner
from kda_jit.workspace import workspace_specs

Call = tuple[str, Case, dict[str, Any]]


def calls(small: bool) -> Iterator[Call]:
    """(what, case, further arguments on the CPU)."""
    tiny = Case(seed=1, lengths=(70, 0, 60), heads=1, value_heads=2, padding=3)
    if small:
        yield "small", tiny, {"checkpoint_offsets": torch.tensor([16, 0, 0])}
        return
    ragged = Case(seed=2, lengths=(0, 1, 17, 0, 33, 64, 100, 15, 0), heads=2, padding=7)
    yield "ragged", ragged, {}
    yield "no initial state", Case(seed=3, lengths=(31, 0, 2), heads=3, initial=False), {}
    yield (
        "checkpoints",
        Case(seed=4, lengths=(130, 16, 0, 49, 32), heads=2, state_dtype="bfloat16"),
        {"checkpoint_offsets": torch.tensor([48, 16, 0, 8, 32])},
    )
    yield "dense", Case(seed=5, lengths=(65, 65), heads=1, value_heads=2, packed=False), {}
    yield (
        "pool",
        Case(seed=6, lengths=(20, 0, 40, 3), heads=2),
        {
            "state_indices": torch.tensor([3, -1, 0, 5]),
            "has_initial_state": torch.tensor([True, True, False, True]),
        },
    )
    yield "many", Case(seed=7, lengths=tuple(i * 7 % 40 for i in range(40)), heads=1), {}


def run(case: Case, more: dict[str, Any]) -> tuple[Inputs, Tensor, Tensor]:
    """One call on the GPU with every tensor given, so that none has slack behind it."""
    x = case.tensors("cuda")
    more = {name: y.cuda() for name, y in more.items()}
    B, T, HV, V = x.v.shape
    checkpoints = "checkpoint_offsets" in more
    if checkpoints:
        more["checkpoint_state"] = torch.zeros(x.N, HV, V, V, device="cuda")
    if "state_indices" in more:
        assert x.initial_state is not None
        slots = more["state_indices"]
        pool = x.initial_state.new_zeros(6, HV, V, V)
        pool[slots.clamp(min=0)] = x.initial_state
        more["initial_state"] = pool
    else:
        more["final_state"] = torch.zeros(x.N, HV, V, V, device="cuda")
    specs = workspace_specs(B * T, x.N, HV, V, checkpoints=checkpoints)
    more["workspace"] = kda_jit.Workspace(specs, "cuda")
    more["out"] = torch.zeros_like(x.v)
    out, state = kda_jit.prefill(*x.args, **(x.kwargs | more), backend="cuda")
    torch.cuda.synchronize()
    return x, out.cpu(), state.cpu()


def check(case: Case, more: dict[str, Any], out: Tensor, state: Tensor) -> None:
    """Against the recurrence on the CPU, whose kernels the sanitizer need not watch."""
    x = case.tensors("cpu")
    slots = more.get("state_indices")
    if slots is not None:
        assert x.initial_state is not None
        none = (slots < 0) | ~more["has_initial_state"]
        x = x.replace(initial_state=x.initial_state.masked_fill(none.view(-1, 1, 1, 1), 0.0))
    want: RecurrentResult = x.reference()
    out_limit, state_limit = Runner("cuda", torch.device("cpu")).limits(x, want)
    assert_close("out", out, want.out, out_limit, cu_seqlens=x.cu_seqlens, case=case)
    if slots is not None:
        live = slots >= 0
        got, exact = state[slots[live]], want.final_state[live]
    else:
        got, exact = state, want.final_state
    assert_close("final_state", got, exact, state_limit, case=case)


def expected(name: str, x: Inputs) -> str:
    """A pipeline leaves calls with too little to divide to another schedule."""
    B, T, HV, _ = x.v.shape
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    if SCHEDULES[name].pipelined and plan_pipeline(B * T, x.N, HV, sm_count) is None:
        return "hopper"
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=list(SCHEDULES))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    major = torch.cuda.get_device_capability()[0]
    names = [options.schedule] if options.schedule else list(SCHEDULES)
    names = [name for name in names if major in SCHEDULES[name].capabilities]
    failed = not names
    for name in names:
        os.environ["KDA_JIT_SCHEDULE"] = name
        for what, case, more in calls(options.small):
            x, out, state = run(case, more)
            launch = kda_jit.last_launch()
            assert launch is not None
            assert launch.schedule == expected(name, x), launch
            try:
                check(case, more, out, state)
            except AssertionError as error:
                failed = True
                print(f"{name}, {what}: {error}")
            else:
                print(f"{launch.schedule}, {what}: right")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
