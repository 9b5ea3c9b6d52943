"""The CUDA backend: which kernels for which GPU, how their one argument is packed, the launches.

A *schedule* is a way to lay the work out over the GPU. All of them compute the same stage images
and the same recurrence (kernels_src/common); results agree to rounding.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
from ctypes import Array, addressof, c_char, create_string_buffer, memmove
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kda_jit import settings
from kda_jit.backends.base import LaunchRecord, Query, device_capability, record_launch
from kda_jit.backends.cuda_rules import cuda_rejections
from kda_jit.backends.pipeline import PipelinePlan, plan_pipeline
from kda_jit.backends.policy import hopper_schedule
from kda_jit.errors import InputError
from kda_jit.jit import KernelSpec, arch_for, arch_named, load, tensor_map
from kda_jit.jit.driver import driver
from kda_jit.jit.launch import Kernel, TogetherError
from kda_jit.jit.module import Launches, changed_launches, generation
from kda_jit.workspace import STAGE_BYTES, Workspace, default_workspace, stage_slots

if TYPE_CHECKING:
    from kda_jit.contract import KdaProblem

#: struct KdaArgs of kernels_src/common/kda_args.cuh, and what PipelineArgs of
#: sm90/kda_pipeline.cu adds; both assert their sizes on their side.
_ARGS = struct.Struct("@16P16q4i2f2I")
_PIPELINE_ARGS = struct.Struct("@P6i")
ARGS_BYTES = _ARGS.size
PIPELINE_ARGS_BYTES = _ARGS.size + _PIPELINE_ARGS.size
#: FusedArgs of sm90/kda_fused.cu: share, call and change, then tensor maps of q, k, g, v and out.
_FUSED_ARGS = struct.Struct("@qQq8x")
_MAPS_AT = _ARGS.size + _FUSED_ARGS.size
_MAPS_BYTES = 5 * tensor_map.NBYTES
FUSED_ARGS_BYTES = _MAPS_AT + _MAPS_BYTES
#: As many chunks as it costs a cluster to load and store the state of a value head of a sequence.
_CHANGE_SLOTS = 3
#: Channels and tokens of a tile.
_BOX = (64, 32, 1)
#: Sets of maps remembered for a layout: the layers of a model share one.
_MAX_MAPS = 256

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

    def changed(self, file: str, launches: Launches) -> Launch:
        """As other sources than the usual ones want it: the kernel of that file."""
        numbers = launches.get((file, self.entry))
        return self if numbers is None else Launch(self.entry, *numbers)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A file of kernels_src, the kernels it launches in order, and where it runs.

    The first kernel prepares all stage images, the second runs the recurrence, unless:

    pipelined      the second does everything, divided by `plan_pipeline`
    clustered      there is one, and each cluster of two CTAs takes a value head after another

    capabilities   major compute capabilities; the target is the device's own
    ctas_a_head    of the kernel that runs the recurrence
    """

    name: str
    file: str
    launches: tuple[Launch, ...]
    capabilities: tuple[int, ...]
    ctas_a_head: int = 2
    pipelined: bool = False
    clustered: bool = False

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
    (Launch("kda_prepare", 128, 32640), Launch("kda_recurrence", 128, 98176)),
    (8, 9, 10, 12),
)
HOPPER = Schedule(
    "hopper",
    "sm90/kda_prefill.cu",
    (Launch("kda_prepare", 128, 32640), Launch("kda_recurrence", 384, 216064)),
    (9,),
    ctas_a_head=1,
)
#: For so few chains that most have an SM to themselves (backends/policy.py).
HOPPER_SINGLE = Schedule(
    "hopper_single",
    "sm90/kda_prefill.cu",
    (Launch("kda_prepare", 128, 32640), Launch("kda_recurrence_single", 192, 216064)),
    (9,),
)
PIPELINE = Schedule(
    "pipeline",
    "sm90/kda_pipeline.cu",
    (Launch("kda_pipeline_begin", 1024, 0), Launch("kda_pipeline", 384, 217088)),
    (9,),
    pipelined=True,
)
FUSED = Schedule(
    "fused",
    "sm90/kda_fused.cu",
    (Launch("kda_fused", 640, 227328),),
    (9,),
    clustered=True,
)
SCHEDULES = {
    schedule.name: schedule for schedule in (PORTABLE, HOPPER, HOPPER_SINGLE, PIPELINE, FUSED)
}


def compile_specs(target: str) -> list[KernelSpec]:
    """Everything that ships for a target, buildable without a GPU."""
    major = arch_named(target).cc[0]
    specs = [s.spec(target) for s in SCHEDULES.values() if major in s.capabilities]
    return list(dict.fromkeys(specs))


#: A HandedState of sm90/kda_fused.cu: what a cluster gives to the next one.
_HANDED_BYTES = 69696
#: Numbers of calls, which nothing that lies in the workspace is: the upper half is a NaN that no
#: kernel makes and differs from one process to another, the lower half counts.
_calls = itertools.count((0x7FD00000 | secrets.randbits(20)) << 32)


class _Frame(threading.local):
    """The packed arguments: one buffer a thread, since a launch copies it before it returns."""

    def __init__(self) -> None:
        self.buffer: Array[c_char] = create_string_buffer(ARGS_BYTES)
        self.pipeline_buffer: Array[c_char] = create_string_buffer(PIPELINE_ARGS_BYTES)
        # Aligned, since maps are written in place.
        memory = create_string_buffer(FUSED_ARGS_BYTES + tensor_map.ALIGNMENT)
        offset = -addressof(memory) % tensor_map.ALIGNMENT
        self.fused_buffer: Array[c_char] = (c_char * FUSED_ARGS_BYTES).from_buffer(memory, offset)


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
        images = 0
        if plan.image_bytes:
            images = workspace.address(
                "prefill_stages", plan.image_bytes, caller="cuda prefill", stream=stream
            )
        if plan.clustered:
            args = self._frame.fused_buffer
            _FUSED_ARGS.pack_into(args, ARGS_BYTES, plan.share, next(_calls), _CHANGE_SLOTS)
            _write_maps(args, p, plan.launches[0][0])
        elif plan.pipeline is None:
            args = self._frame.buffer
        else:
            args = self._frame.pipeline_buffer
            flags = workspace.address(
                "pipeline_flags", plan.pipeline.flag_bytes, caller="cuda prefill", stream=stream
            )
            _PIPELINE_ARGS.pack_into(args, ARGS_BYTES, flags, *plan.pipeline, 0)
        _pack(args, p, images)
        try:
            for kernel, grid, launch, overlaps, together in plan.launches:
                kernel.launch(
                    grid, launch.block, launch.smem, stream, args, pdl=overlaps,
                    cooperative=together,
                )  # fmt: skip
        except TogetherError:
            if asked[2] != "auto":
                raise
            p.layout.memo[asked] = _plan(p, HOPPER_SINGLE.name)
            self.run(problem, workspace)
        else:
            record_launch(plan.record)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the calls of one layout have in common, besides the numbers that `_pack` remembers.

    generation   of the kernels: the plan is good as long as it is the current one
    image_bytes  of the workspace
    share        slots of a cluster; 0: clusters take whole value heads in turn
    launches     (kernel, grid, block and smem, whether it may start before the one ahead of it has
                 ended, whether all its CTAs start together)
    """

    generation: object
    clustered: bool
    pipeline: PipelinePlan | None
    image_bytes: int
    share: int
    launches: tuple[tuple[Kernel, tuple[int, int, int], Launch, bool, bool], ...]
    record: LaunchRecord


def _plan(p: KdaProblem, asked: str | None = None) -> _Plan:
    """For the schedule `asked`, else for the one of the environment."""
    # Asked first: a reload meanwhile makes the plan outdated, not the kernels in it look new.
    current = generation()
    index = p.q.get_device()
    target = _target(settings.arch(), index)
    checkpoints = p.checkpoint_state is not None
    schedule, pipeline = _choose(
        asked or settings.schedule(), target, index, p.B * p.T, p.N, p.HV, _has_maps(p)
    )
    kernels = _kernels(schedule, target, index)
    share = 0
    grids: tuple[int, ...]
    if pipeline is not None:
        image_bytes = pipeline.ring_bytes
        grids = (1, _sm_count(index))
    elif schedule.clustered:
        clusters = min(p.N * p.HV, _sm_count(index) // 2)
        share, image_bytes = _share(p, clusters)
        grids = (2 * clusters,)
    else:
        slots = stage_slots(p.B * p.T, p.N, checkpoints=checkpoints)
        image_bytes = slots * p.HV * STAGE_BYTES
        grids = (slots * p.HV, p.N * p.HV * schedule.ctas_a_head)
    overlaps = _overlaps(target)
    changed = changed_launches()
    launches = tuple(
        # The CTAs of a pipeline wait for each other.
        (
            kernel,
            (grid, 1, 1),
            launch.changed(schedule.file, changed),
            i > 0 and overlaps,
            i > 0 and pipeline is not None,
        )
        for i, (kernel, grid, launch) in enumerate(
            zip(kernels, grids, schedule.launches, strict=True)
        )
        if grid
    )
    names = tuple(kernel.name for kernel in kernels)
    return _Plan(
        current, schedule.clustered, pipeline, image_bytes, share, launches,
        LaunchRecord("cuda", names, schedule.name, target),
    )  # fmt: skip


def warmup(device: torch.device) -> None:
    """Compiles and loads every kernel that a call on `device` may need."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    target = _target(settings.arch(), index)
    major = arch_named(target).cc[0]
    for schedule in SCHEDULES.values():
        if major in schedule.capabilities:
            _kernels(schedule, target, index)


def _kernels(schedule: Schedule, target: str, device_index: int) -> tuple[Kernel, ...]:
    kernels = load(_spec(schedule, target), device_index).kernels
    return tuple(kernels[launch.entry] for launch in schedule.launches)


@lru_cache(maxsize=64)
def _spec(schedule: Schedule, target: str) -> KernelSpec:
    return schedule.spec(target)


@lru_cache(maxsize=4096)
def _choose(
    asked: str, target: str, device_index: int, tokens: int, N: int, HV: int, maps: bool
) -> tuple[Schedule, PipelinePlan | None]:
    """The schedule that the environment asks for by name, else the best one for the sizes.

    What a schedule cannot run goes to `hopper`: to `pipeline`, too little work; to `fused`, tensors
    without maps.
    """
    if asked == "auto":
        asked = _best(target, device_index, tokens, N, HV).name
    if asked not in SCHEDULES:
        raise InputError(
            f"{settings.SCHEDULE.name}: expected auto, {', '.join(SCHEDULES)}, got {asked!r}."
        )
    schedule = SCHEDULES[asked]
    if schedule.clustered and not maps:
        return HOPPER, None
    if not schedule.pipelined:
        return schedule, None
    plan = plan_pipeline(tokens, N, HV, _sm_count(device_index))
    return (schedule, plan) if plan is not None else (HOPPER, None)


def _best(target: str, device_index: int, tokens: int, N: int, HV: int) -> Schedule:
    if arch_named(target).cc[0] not in HOPPER.capabilities:
        return PORTABLE
    return SCHEDULES[hopper_schedule(N, tokens, HV, _sm_count(device_index))]


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


def _share(p: KdaProblem, clusters: int) -> tuple[int, int]:
    """Slots of a cluster, and bytes for the states that go from one to the next; or 0, 0.

    Divided where there are more value heads than clusters, where a workspace as planned for any
    schedule has room for the states, and where the kernel can count all slots in 32 bits.
    """
    slots = p.HV * stage_slots(p.B * p.T, p.N, checkpoints=p.checkpoint_state is not None)
    share = -(-(slots + p.HV * p.N * _CHANGE_SLOTS) // clusters)
    nbytes = clusters * _HANDED_BYTES
    if clusters >= p.N * p.HV or nbytes > slots * STAGE_BYTES or (clusters + 1) * share >= 2**31:
        return 0, 0
    return share, nbytes


def _has_maps(p: KdaProblem) -> bool:
    """Whether inputs can have tensor maps: a row expanded to several has a stride of 0."""
    return p.B == 1 or all(x.stride(0) > 0 for x in (p.q, p.k, p.g, p.v))


def _write_maps(args: Array[c_char], p: KdaProblem, kernel: Kernel) -> None:
    """Tensor maps of q, k, g, v and out into FusedArgs. Those of known addresses are copied."""
    if not p.T:
        return  # nothing to copy, and the driver refuses tensors of no size
    tensors = (p.q, p.k, p.g, p.v, p.out)
    addresses = tuple([x.data_ptr() for x in tensors])
    known: dict[tuple[int, ...], bytes] = p.layout.memo.setdefault("tensor maps", {})
    at = addressof(args) + _MAPS_AT
    if addresses in known:
        memmove(at, known[addresses], _MAPS_BYTES)
        return
    with kernel.own_context():
        for i, (x, address) in enumerate(zip(tensors, addresses, strict=True)):
            B, T, heads, channels = x.shape
            token = heads * channels if T == 1 else x.stride(1)
            row = token * T if B == 1 else x.stride(0)
            strides = (token * x.element_size(), row * x.element_size())
            shape = (heads * channels, T, B)
            destination = at + i * tensor_map.NBYTES
            tensor_map.encode_bf16(driver(), destination, address, shape, strides, _BOX)
    if len(known) >= _MAX_MAPS:
        known.clear()
    known[addresses] = args.raw[_MAPS_AT:]


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
