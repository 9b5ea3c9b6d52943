"""Ways to run a prefill on this GPU: each CUDA schedule by its name, Triton; poisoned memory.

    way    every one of them; a test with this argument runs once for each
    cuda   the CUDA schedules alone

Both are a `Way`, which asserts after each call that what was asked for is what ran.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit import settings
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.backends.pipeline import plan_pipeline
from kda_jit.reference import RecurrentResult
from kda_jit.testing import Case, Inputs, Limit, assert_close
from kda_jit.testing.runner import Runner, why_not
from kda_jit.workspace import Spec, Workspace, workspace_specs

REPO = Path(__file__).resolve().parents[2]
REDZONE = 4096
_CUDA = torch.device("cuda")


class Poison:
    """A workspace of exactly the planned size in memory full of 0xff: NaN in every float format."""

    def __init__(self, specs: Mapping[str, Spec], device: torch.device) -> None:
        self._specs = specs
        self.workspace = Workspace(specs, device, self._allocate)

    def _allocate(self, nbytes: int, device: torch.device) -> Tensor:
        size = nbytes + 2 * REDZONE
        self._block = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        return self._block[REDZONE:-REDZONE]

    def check(self) -> None:
        """Raises unless every byte outside the planned regions is as it was."""
        rest = self._block.clone()
        for name, spec in self._specs.items():
            begin = self.workspace.address(name, spec.nbytes, caller="test")
            begin -= self._block.data_ptr()
            rest[begin : begin + spec.nbytes] = 0xFF
        written = (rest != 0xFF).nonzero().flatten().tolist()
        assert not written, f"{len(written)} bytes outside the workspace written, from {written[0]}"


@dataclass(frozen=True)
class Way:
    """One backend, and for CUDA one schedule (already forced by the environment)."""

    backend: str
    schedule: str | None = None
    device: torch.device = _CUDA

    def prefill(self, x: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        """(out, final_state). `buffers`: further arguments; they win over those of `x`."""
        arguments = x.kwargs | buffers
        result = kda_jit.prefill(*x.args, **arguments, backend=self.backend)
        launch = kda_jit.last_launch()
        assert launch is not None
        ends = arguments["cu_seqlens"]
        N = x.q.shape[0] if ends is None else ends.shape[0] - 1
        tokens = x.q.shape[0] * x.q.shape[1]
        if launch.backend == "none":
            assert not tokens or not N
        else:
            wanted = self.backend, self.schedule_for(tokens, N, x.v.shape[2])
            assert (launch.backend, launch.schedule) == wanted, launch
        return result

    def schedule_for(self, tokens: int, N: int, HV: int) -> str | None:
        """What must run: a pipeline leaves calls with too little to divide to another schedule."""
        if self.schedule is None or not SCHEDULES[self.schedule].pipelined:
            return self.schedule
        sm_count = torch.cuda.get_device_properties(self.device).multi_processor_count
        return self.schedule if plan_pipeline(tokens, N, HV, sm_count) else "hopper"

    def exact(self, case: Case) -> tuple[Inputs, RecurrentResult]:
        """The case's tensors and the float64 recurrence over them; shared, so not to be written."""
        return _exact(case, self.device)

    def limits(self, x: Inputs, want: RecurrentResult) -> tuple[Limit, Limit]:
        """What out and states may err on these inputs."""
        return _limits(self.backend, x, want)

    def check(self, x: Inputs, want: RecurrentResult, out: Tensor, state: Tensor) -> None:
        """Finite, and every (sequence, head, chunk) near the recurrence."""
        tokens = x.bounds[-1] if x.cu_seqlens is not None else x.q.shape[1]
        assert out[:, :tokens].isfinite().all(), x.case
        assert state.isfinite().all(), x.case
        out_limit, state_limit = self.limits(x, want)
        assert_close("out", out, want.out, out_limit, cu_seqlens=x.cu_seqlens, case=x.case)
        # A bf16 state is rounded once more, at the end.
        rounding = 4e-3 if state.dtype is torch.bfloat16 else 0.0
        limit = state_limit.allowed + rounding
        assert_close("final_state", state, want.final_state, limit, case=x.case)

    def poison(self, x: Inputs, *, checkpoints: bool = False) -> Poison:
        """A workspace that is planned for just this call."""
        B, T, HV, V = x.v.shape
        specs = workspace_specs(max(1, B * T), max(1, x.N), HV, V, checkpoints=checkpoints)
        return Poison(specs, x.q.device)

    def nan_states(self, x: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, HV, V, K] for a call to fill."""
        shape = (x.N, *x.v.shape[2:], x.q.shape[3])
        return torch.full(shape, torch.nan, dtype=dtype, device=x.q.device)


# One process runs every schedule over the same cases.
_shared: dict[Case, tuple[Inputs, RecurrentResult]] = {}
_limits_of: dict[tuple[str, Case], tuple[Limit, Limit]] = {}


def _exact(case: Case, device: torch.device) -> tuple[Inputs, RecurrentResult]:
    if case not in _shared:
        x = case.tensors(device)
        _shared[case] = x, x.reference()
    return _shared[case]


def _limits(backend: str, x: Inputs, want: RecurrentResult) -> tuple[Limit, Limit]:
    runner = Runner(backend, x.q.device)
    case = x.case
    if case is None or case not in _shared or _shared[case][0] is not x:
        return runner.limits(x, want)
    if (backend, case) not in _limits_of:
        _limits_of[backend, case] = runner.limits(x, want)
    return _limits_of[backend, case]


def _way(name: str, patch: pytest.MonkeyPatch) -> Way:
    """`name`: "triton" or a CUDA schedule. Skips, with the reason, what cannot run here."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for setting in (settings.BACKEND, settings.ARCH, settings.SCHEDULE):
        patch.delenv(setting.name, raising=False)
    backend = "triton" if name == "triton" else "cuda"
    reason = why_not(backend, torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    if backend == "triton":
        return Way("triton")
    capability = torch.cuda.get_device_capability()
    majors = SCHEDULES[name].capabilities
    if capability[0] not in majors:
        pytest.skip(f"schedule {name} is for capabilities {majors}, this device is {capability}")
    patch.setenv(settings.SCHEDULE.name, name)
    return Way("cuda", name)


@pytest.fixture(params=[*SCHEDULES, "triton"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    return _way(request.param, monkeypatch)


@pytest.fixture(params=list(SCHEDULES))
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    return _way(request.param, monkeypatch)


@pytest.fixture
def python() -> Callable[..., str]:
    """Runs a script in a fresh process, which must end well, and returns what it prints.

    Keyword arguments go to its environment, on top of this process's own.
    """

    def run(script: str, *, timeout: float = 120.0, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=REPO,
            env=os.environ | {"PYTHONPATH": str(REPO)} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture(autouse=True)
def _faults_show_where_they_happen(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel's fault is the last test's own, and nothing can run in this process after it."""
    yield
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(1)  # reported as the crash of this test; another worker takes over
            reason = f"{request.node.nodeid} lost the CUDA context: {str(error).splitlines()[0]}"
            pytest.exit(reason, returncode=1)
