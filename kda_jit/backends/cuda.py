"""The CUDA backend: which kernels for which GPU, how their one argument is packed, the launches.

A *schedule* is a way to lay the work out over the GPU. All of them compute the same stage images
and the same recurrence (kernels_src/common); results agree to rounding.
"""

from __future__ import annotations

import struct
import threading
from ctypes import Array, c_char, create_string_buffer
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kda_jit import settings
from kda_jit.backends.base import LaunchRecord, Query, device_capability, record_launch
from kda_jit.backends.cuda_rules import cuda_rejections
from kda_jit.backends.pipeline import PipelinePlan, plan_pipeline
from kda_jit.backends.policy import one_chain_an_sm
from kda_jit.errors import InputError
from kda_jit.jit import KernelSpec, arch_for, arch_named, load
from kda_jit.jit.launch import Kernel
from kda_jit.jit.module import generation
from kda_jit.workspace import STAGE_BYTES, Workspace, default_workspace, stage_slots

if TYPE_CHECKING:
    from kda_jit.contract import KdaProblem

#: struct KdaArgs of kernels_src/common/kda_args.cuh, and what PipelineArgs of
#: sm90/kda_pipeline.cu adds; both assert their sizes on their side.
_ARGS = struct.Struct("@16P16q4i2f2I")
_PIPELINE_ARGS = struct.Struct("@P6i")
ARGS_BYTES = _ARGS.size
PIPELINE_ARGS_BYTES = _ARGS.size + _PIPELINE_ARGS.size

_CU_SEQLENS_64 = 1 << 0
_STATE_INDICES_64 = 1 << 1
_OFFSETS_64 = 1 << 2
_INITIAL_BF16 = 1 << 3
_FINAL_BF16 = 1 << 4
_CHECKPOINT_BF16 = 1 << 5


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a schedule: its block, and its dynamic shared memory in bytes."""

    entry: str
    block: int
    smem: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A file of kernels_src, the two kernels it launches in order, and where it runs.

    capabilities   major compute capabilities; the target is the device's own
    ctas_a_head    of the second kernel, where it runs the recurrence
    pipelined      the second kernel does everything, divided by `plan_pipeline`; else the first
                   prepares all stage images, and the second runs the recurrence
    """

    name: str
    file: str
    launches: tuple[Launch, Launch]
    capabilities: tuple[int, ...]
    ctas_a_head: int = 2
    pipelined: bool = False

    def spec(self, target: str) -> KernelSpec:
        """The file with all its entries: schedules that share it share the build."""
        entries = [
            launch.entry
            for schedule in SCHEDULES.values()
            if schedule.file == self.file
            for launch in schedule.launches
        ]
        return KernelSpec(self.file, tuple(dict.fromkeys(entries)), target)


PORTABLE = Schedule(
    "portable",
    "sm80/kda_prefill.cu",
    (Launch("kda_prepare", 64, 33920), Launch("kda_recurrence", 128, 98176)),
    (8, 9, 10, 12),
)
HOPPER = Schedule(
    "hopper",
    "sm90/kda_prefill.cu",
    (Launch("kda_prepare", 64, 33920), Launch("kda_recurrence", 384, 216064)),
    (9,),
    ctas_a_head=1,
)
#: For so few chains that most have an SM to themselves (backends/policy.py).
HOPPER_SINGLE = Schedule(
    "hopper_single",
    "sm90/kda_prefill.cu",
    (Launch("kda_prepare", 64, 33920), Launch("kda_recurrence_single", 160, 216064)),
    (9,),
)
PIPELINE = Schedule(
    "pipeline",
    "sm90/kda_pipeline.cu",
    (Launch("kda_pipeline_begin", 1024, 0), Launch("kda_pipeline", 384, 217088)),
    (9,),
    pipelined=True,
)
SCHEDULES = {schedule.name: schedule for schedule in (PORTABLE, HOPPER, HOPPER_SINGLE, PIPELINE)}


def compile_specs(target: str) -> list[KernelSpec]:
    """Everything that ships for a target, buildable without a GPU."""
    major = arch_named(target).cc[0]
    specs = [s.spec(target) for s in SCHEDULES.values() if major in s.capabilities]
    return list(dict.fromkeys(specs))


class _Frame(threading.local):
    """The packed arguments: one buffer a thread, since a launch copies it before it returns."""

    def __init__(self) -> None:
        self.buffer: Array[c_char] = create_string_buffer(ARGS_BYTES)
        self.pipeline_buffer: Array[c_char] = create_string_buffer(PIPELINE_ARGS_BYTES)


class CudaBackend:
    """The kernels of kernels_src, compiled for the GPU at hand."""

    name = "cuda"

    def __init__(self) -> None:
        self._frame = _Frame()

    def rejects(self, query: Query) -> list[str]:
        return cuda_rejections(query)

    def run(self, problem: KdaProblem, workspace: Workspace | None) -> None:
        p = problem
        stream = torch._C._cuda_getCurrentRawStream(p.q.get_device())
        if workspace is None:
            workspace = default_workspace(p.device, stream)
        asked = ("cuda", settings.arch(), settings.schedule())
        plan: _Plan | None = p.layout.memo.get(asked)
        if plan is None or plan.generation is not generation():
            plan = p.layout.memo[asked] = _plan(p)
        images = workspace.address(
            "prefill_stages", plan.image_bytes, caller="cuda prefill", stream=stream
        )
        if plan.pipeline is None:
            args = self._frame.buffer
        else:
            args = self._frame.pipeline_buffer
            flags = workspace.address(
                "pipeline_flags", plan.pipeline.flag_bytes, caller="cuda prefill", stream=stream
            )
            _PIPELINE_ARGS.pack_into(args, ARGS_BYTES, flags, *plan.pipeline, 0)
        _pack(args, p, images)
        a, b = plan.schedule.launches
        if plan.grids[0][0]:
            plan.first.launch(plan.grids[0], a.block, a.smem, stream, args)
        # The CTAs of a pipeline wait for each other.
        plan.second.launch(
            plan.grids[1], b.block, b.smem, stream, args,
            pdl=plan.overlaps, cooperative=plan.pipeline is not None,
        )  # fmt: skip
        record_launch(plan.record)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the calls of one layout have in common, besides the numbers that `_pack` remembers.

    generation   of the kernels: the plan is good as long as it is the current one
    image_bytes  of the workspace
    grids        of the first and the second kernel
    """

    generation: object
    schedule: Schedule
    pipeline: PipelinePlan | None
    first: Kernel
    second: Kernel
    image_bytes: int
    grids: tuple[tuple[int, int, int], tuple[int, int, int]]
    overlaps: bool
    record: LaunchRecord


def _plan(p: KdaProblem) -> _Plan:
    # Asked first: a reload meanwhile makes the plan outdated, not the kernels in it look new.
    current = generation()
    index = p.q.get_device()
    target = _target(settings.arch(), index)
    checkpoints = p.checkpoint_state is not None
    schedule, pipeline = _choose(
        settings.schedule(), target, index, p.B * p.T, p.N, p.HV, checkpoints
    )
    first, second = _kernels(schedule, target, index)
    if pipeline is not None:
        image_bytes = pipeline.ring_bytes
        grids = (1, _sm_count(index))
    else:
        slots = stage_slots(p.B * p.T, p.N, checkpoints=checkpoints)
        image_bytes = slots * p.HV * STAGE_BYTES
        grids = (slots * p.HV, p.N * p.HV * schedule.ctas_a_head)
    return _Plan(
        current, schedule, pipeline, first, second, image_bytes,
        ((grids[0], 1, 1), (grids[1], 1, 1)), _overlaps(target),
        LaunchRecord("cuda", (first.name, second.name), schedule.name, target),
    )  # fmt: skip


def warmup(device: torch.device) -> None:
    """Compiles and loads every kernel that a call on `device` may need."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    target = _target(settings.arch(), index)
    major = arch_named(target).cc[0]
    for schedule in SCHEDULES.values():
        if major in schedule.capabilities:
            _kernels(schedule, target, index)


def _kernels(schedule: Schedule, target: str, device_index: int) -> tuple[Kernel, Kernel]:
    kernels = load(_spec(schedule, target), device_index).kernels
    return kernels[schedule.launches[0].entry], kernels[schedule.launches[1].entry]


@lru_cache(maxsize=64)
def _spec(schedule: Schedule, target: str) -> KernelSpec:
    return schedule.spec(target)


@lru_cache(maxsize=4096)
def _choose(
    asked: str, target: str, device_index: int, tokens: int, N: int, HV: int, checkpoints: bool
) -> tuple[Schedule, PipelinePlan | None]:
    """The schedule that the environment asks for by name, else the best one for the sizes."""
    if asked == "auto":
        asked = _best(target, device_index, N, HV).name
    if asked not in SCHEDULES:
        raise InputError(
            f"{settings.SCHEDULE.name}: expected auto, {', '.join(SCHEDULES)}, got {asked!r}."
        )
    schedule = SCHEDULES[asked]
    if not schedule.pipelined:
        return schedule, None
    plan = plan_pipeline(tokens, N, HV, _sm_count(device_index))
    return (schedule, plan) if plan is not None else (HOPPER, None)


def _best(target: str, device_index: int, N: int, HV: int) -> Schedule:
    if arch_named(target).cc[0] not in HOPPER.capabilities:
        return PORTABLE
    single = one_chain_an_sm(N, HV, _sm_count(device_index))
    return HOPPER_SINGLE if single else HOPPER


@lru_cache(maxsize=64)
def _sm_count(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@lru_cache(maxsize=64)
def _target(asked: str | None, device_index: int) -> str:
    if asked is not None:
        return asked
    capability = device_capability(torch.device("cuda", device_index))
    assert capability is not None, "the resolver let a device without a capability pass"
    arch = arch_for(capability)
    assert arch is not None, "the resolver let an unknown architecture pass"
    return arch.target


@lru_cache(maxsize=64)
def _overlaps(target: str) -> bool:
    """Programmatic dependent launch, which the kernels compile in from sm_90 on."""
    return arch_named(target).cc >= (9, 0)


def _pack(args: Array[c_char], p: KdaProblem, workspace: int) -> None:
    numbers = p.layout.memo.get("cuda numbers")
    if numbers is None:
        numbers = p.layout.memo["cuda numbers"] = _numbers(p)
    strides_and_sizes, flags_and_slots = numbers
    _ARGS.pack_into(
        args, 0, *p.addresses, workspace, *strides_and_sizes, p.scale, p.lower_bound,
        *flags_and_slots,
    )  # fmt: skip


def _numbers(p: KdaProblem) -> tuple[tuple[int, ...], tuple[int, int]]:
    """What KdaArgs has before the scalars, and after: the same throughout a layout."""
    q, k, v, g, beta, out = p.q, p.k, p.v, p.g, p.beta, p.out
    initial, final, checkpoint = p.initial_state, p.final_state, p.checkpoint_state
    cu_seqlens, indices, offsets = p.cu_seqlens, p.state_indices, p.checkpoint_offsets
    flags = 0
    if cu_seqlens is not None and cu_seqlens.dtype is torch.int64:
        flags |= _CU_SEQLENS_64
    if indices is not None and indices.dtype is torch.int64:
        flags |= _STATE_INDICES_64
    if offsets is not None and offsets.dtype is torch.int64:
        flags |= _OFFSETS_64
    if initial is not None and initial.dtype is torch.bfloat16:
        flags |= _INITIAL_BF16
    if final.dtype is torch.bfloat16:
        flags |= _FINAL_BF16
    if checkpoint is not None and checkpoint.dtype is torch.bfloat16:
        flags |= _CHECKPOINT_BF16
    strides_and_sizes = (
        q.stride(1), k.stride(1), v.stride(1), g.stride(1), beta.stride(1), out.stride(1),
        q.stride(0), k.stride(0), v.stride(0), g.stride(0), beta.stride(0), out.stride(0),
        0 if initial is None else initial.stride(0),
        final.stride(0),
        0 if checkpoint is None else checkpoint.stride(0),
        0 if indices is None else indices.stride(0),
        p.N, p.T, p.H, p.HV,
    )  # fmt: skip
    return strides_and_sizes, (flags, final.shape[0])
