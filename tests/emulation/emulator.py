"""The real CUDA backend on CPU tensors: its kernels run on the emulated machine.

    with Emulator("fused", seed=3) as emulator:
        out, final_state = emulator.prefill(Case(lengths=(70, 0, 33)).tensors())

Host code, planning and packing of arguments included, is that of a call on a GPU, down to the
launch; the kernels are those of a kernels_src.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit.api import run_problem
from kda_jit.backends import cuda
from kda_jit.backends.base import Query, last_launch
from kda_jit.backends.pipeline import MAX_CHAINS_PER_SM, MAX_GROUPS, MIN_RING, PipelinePlan
from kda_jit.contract import KdaProblem, make_problem
from kda_jit.contract import problem as contract
from kda_jit.jit import KernelSpec, module, sources
from kda_jit.reference import RecurrentResult
from kda_jit.testing import Inputs, Limit
from kda_jit.testing.runner import rounding_limits
from kda_jit.workspace import Spec, Workspace, current_stream, workspace_specs
from tests.emulation import machine


class Emulator:
    """The CUDA backend with one schedule, while it is entered. A Subject of kda_jit.testing.

    schedule   a name in kda_jit.backends.cuda.SCHEDULES
    seed       of the order of warps and of delays: each call takes the next number
    folder     a kernels_src; None: the one in use
    sm_count   of the device that there is none of
    target     as the backend would have it of a device: sm_80 or sm_90a
    any_plan   let a pipeline divide any call, in a way drawn from the seed: else what is too little
               to divide goes to another schedule
    lanes_apart  see tests.emulation.machine.synchronize
    """

    device = torch.device("cpu")
    dtype = torch.bfloat16
    head_dim = 128
    bitwise = True

    def __init__(
        self,
        schedule: str,
        *,
        seed: int = 0,
        folder: Path | None = None,
        sm_count: int = 6,
        target: str = "sm_90a",
        any_plan: bool = False,
        lanes_apart: bool = False,
    ) -> None:
        self.name = f"emulated {schedule}"
        self.lacks = {
            "graph": "there is no CUDA",
            "unbounded": "the cuda backend has a bounded gate only",
        }
        self.schedule = schedule
        self.seed = seed
        self._sm_count = sm_count
        self._target = target
        self._any_plan = any_plan
        self._lanes_apart = lanes_apart
        self._tree = module.SourceTree(sources.root() if folder is None else folder.resolve())
        self._loaded: dict[KernelSpec, SimpleNamespace] = {}
        self._backend = cuda.CudaBackend()
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Emulator:
        patches: list[contextlib.AbstractContextManager[Any]] = [
            # A plan is remembered with its layout, but as one of a tree: this one is nobody else's.
            self._tree.active(),
            mock.patch.dict(os.environ, {settings.SCHEDULE.name: self.schedule}),
            # As on a GPU, whose memory the host does not look at.
            mock.patch.object(contract, "check_contents"),
            mock.patch.object(cuda, "load", self._load),
            mock.patch.object(cuda, "driver", machine.driver),
            mock.patch.object(cuda, "_target", return_value=self._target),
            mock.patch.object(cuda, "_sm_count", return_value=self._sm_count),
            mock.patch.object(
                torch._C,
                "_cuda_getCurrentRawStream",
                create=True,
                return_value=current_stream(self.device),
            ),
        ]
        if self._any_plan:
            patches.append(mock.patch.object(cuda, "plan_pipeline", self._draw_plan))
        self._entered.callback(cuda._choose.cache_clear)
        for patch in patches:
            self._entered.enter_context(patch)
        cuda._choose.cache_clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.close()

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        """(out, final_state). `buffers`: further arguments of kda_jit.prefill, which win.

        Results, unless given, and the workspace are NaN before, and what lies around them must stay
        as it is. Asserts that the schedule asked for is what ran.
        """
        arguments = inputs.kwargs | buffers
        guards = Guards()
        if arguments.get("out") is None:
            arguments["out"] = guards.tensor(inputs.v.shape, inputs.v.dtype)
        if arguments.get("final_state") is None and arguments.get("state_indices") is None:
            shape = (inputs.N, *inputs.v.shape[2:], inputs.q.shape[3])
            arguments["final_state"] = guards.tensor(shape, torch.float32)
        workspace = arguments.pop("workspace", None)
        problem = make_problem(*inputs.args, **arguments)
        if workspace is None:
            specs = None if self._any_plan else _planned(problem)
            workspace = Workspace(specs, self.device, guards.memory)
        run_problem(self, problem, workspace)
        guards.check()
        launch = last_launch()
        assert launch is not None
        assert launch.schedule == self.schedule or launch.backend == "none", launch
        return problem.out, problem.final_state

    def rejects(self, query: Query) -> list[str]:
        return []

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        """As a backend: what is launched has ended, since the workspace may free memory next."""
        self._backend.run(problem, workspace)
        self.seed += 1
        machine.synchronize(self.seed, lanes_apart=self._lanes_apart)

    def limits(self, inputs: Inputs, want: RecurrentResult | None = None) -> tuple[Limit, Limit]:
        """What out and state may err: as on a GPU."""
        return rounding_limits(inputs, None, want)

    def _load(self, spec: KernelSpec, device_index: int) -> SimpleNamespace:
        if spec not in self._loaded:
            kernels = machine.load(spec, sources.root())
            self._loaded[spec] = SimpleNamespace(kernels=kernels)
        return self._loaded[spec]

    def _draw_plan(self, tokens: int, N: int, HV: int, sm_count: int) -> PipelinePlan:
        """A division that the kernel can run on so few SMs, whether or not it is worth it."""
        rng = random.Random(repr((self.seed, tokens, N, HV)))
        while True:
            groups, beside = rng.randint(1, min(N, MAX_GROUPS)), rng.randint(1, HV)
            chains = rng.randint(1, MAX_CHAINS_PER_SM)
            consumers = -(-2 * groups * beside // chains)
            if consumers < sm_count:
                return PipelinePlan(groups, beside, MIN_RING + rng.randint(0, 3), consumers, chains)


class Guards:
    """Memory full of NaN in every format, and more around it that nobody may write."""

    #: Bytes on each side. More than a chunk of tokens that are many heads wide.
    _AROUND = 1 << 18

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def memory(self, nbytes: int, device: torch.device | None = None) -> Tensor:
        block = torch.full((nbytes + 2 * self._AROUND,), 0xFF, dtype=torch.uint8)
        self._blocks.append(block)
        return block[self._AROUND : -self._AROUND]

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape)
        return self.memory(size.numel() * dtype.itemsize).view(dtype).view(size)

    def check(self) -> None:
        for block in self._blocks:
            around = torch.stack([block[: self._AROUND], block[-self._AROUND :]])
            written = int((around != 0xFF).sum())
            assert not written, f"{written} bytes beside a result or the workspace were written"


def _planned(p: KdaProblem) -> dict[str, Spec]:
    """What a workspace planned for just this call has room for."""
    checkpoints = p.checkpoint_state is not None
    return workspace_specs(max(1, p.B * p.T), max(1, p.N), p.HV, p.V, checkpoints=checkpoints)
