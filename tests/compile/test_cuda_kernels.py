"""What the CUDA backend ships, compiled for every target without a GPU, and its one argument.

Python packs that argument and sizes the scratch; the sources declare both. Here the compiler itself
holds the two sides against each other.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from ctypes import create_string_buffer
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kda_jit import settings, workspace
from kda_jit.backends import cuda, pipeline
from kda_jit.backends.cuda import SCHEDULES, Schedule, compile_specs
from kda_jit.contract import make_problem
from kda_jit.contract.checks import CHECKPOINT_GRANULE
from kda_jit.errors import CompileError
from kda_jit.jit import cache, compiler, sources
from kda_jit.jit.arch import PTX_TARGETS, TARGETS, arch_named
from kda_jit.jit.compiler import Compiled, compile_source, compile_spec
from kda_jit.testing import Case

ALL = (*TARGETS, *PTX_TARGETS)
#: Registers of a multiprocessor, and how many a warp is given at a time.
REGISTERS, GRANULE = 65536, 256
#: Blocks that a multiprocessor should hold at least, where they are to hide each other's latency.
RESIDENT = {
    ("sm80/kda_prefill.cu", "kda_prepare"): 6,
    ("sm80/kda_prefill.cu", "kda_recurrence"): 2,
    ("sm90/kda_prefill.cu", "kda_prepare"): 6,
}
#: What the system keeps of shared memory, per block.
SYSTEM_SMEM = 1024
#: How the sources say what dynamic shared memory a kernel uses; others use none.
SMEM_OF = {
    "kda_prepare": "sizeof(PrepareSmem)",
    "kda_recurrence": "sizeof(RecurrenceSmem)",
    "kda_recurrence_single": "sizeof(RecurrenceSmem)",
    "kda_pipeline": "kPipelineSmem",
    "kda_fused": "sizeof(FusedSmem)",
}

#: struct KdaArgs, in order.
FIELDS = (
    *("q", "k", "v", "g", "beta", "out", "A_log", "dt_bias"),
    *("initial_state", "final_state", "checkpoint_state"),
    *("cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets", "workspace"),
    *("q_token", "k_token", "v_token", "g_token", "beta_token", "out_token"),
    *("q_batch", "k_batch", "v_batch", "g_batch", "beta_batch", "out_batch"),
    *("initial_slot", "final_slot", "checkpoint_slot", "state_indices_stride"),
    *("N", "T", "H", "HV", "scale", "lower_bound", "flags", "num_state_slots"),
)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for setting in settings.SETTINGS:
            patch.delenv(setting.name, raising=False)
        patch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_writable", {})
        yield


def skip_unless_known(target: str) -> None:
    reason = compiler.unavailable_reason(target)
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True)
class Build:
    """One schedule for one target."""

    schedule: Schedule
    target: str

    def __str__(self) -> str:
        return f"{self.target}-{self.schedule.name}"

    def compile(self) -> Compiled:
        skip_unless_known(self.target)
        return compile_spec(self.schedule.spec(self.target))


BUILDS = [
    Build(schedule, target)
    for target in ALL
    for schedule in SCHEDULES.values()
    if arch_named(target).cc[0] in schedule.capabilities
]
each_build = pytest.mark.parametrize("build", BUILDS, ids=str)
each_binary = pytest.mark.parametrize("build", [b for b in BUILDS if b.target in TARGETS], ids=str)


# -- what ptxas says -----------------------------------------------------------------------------


@each_build
def test_every_kernel_of_a_schedule_is_there_and_nobody_warns(build: Build) -> None:
    built = build.compile()
    assert {launch.entry for launch in build.schedule.launches} <= set(built.entries)
    assert built.warnings == ()
    # C7510 and its like: wgmma that ptxas serialises, for one accumulator touched too early.
    assert not re.search(r"C75\d\d|serializ", built.log, re.IGNORECASE), built.log


@each_binary
def test_nothing_spills_and_nothing_lives_in_local_memory(build: Build) -> None:
    for entry, taken in build.compile().resources.items():
        assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0), (entry, taken)


@each_binary
def test_warps_ask_for_no_more_registers_than_their_launch_has(build: Build) -> None:
    """setmaxnreg.inc waits for registers that others give back: for ever, if there are too few."""
    text = (sources.root() / build.schedule.file).read_text()
    asked = re.findall(r"(?:raise|lower)_registers<(\w+)>", text)
    if not asked:
        return
    ((terms, *of),) = re.findall(r"// ([\dx +]+) registers, of (\d+) x (\d+)", text)
    parts = [[int(x) for x in term.split(" x ")] for term in terms.split(" + ")]
    threads, registers = map(int, of)
    assert asked == [str(part[-1]) for part in parts]
    assert sum(map(math.prod, parts)) <= threads * registers
    assert sum(math.prod(part[:-1]) for part in parts) == threads
    # Registers are those of one of the SM's four parts: whoever asks has as many warps on each.
    assert all(math.prod(part[:-1]) % 128 == 0 for part in parts)
    for launch in build.schedule.launches:
        if launch.block == threads:
            assert build.compile().resources[launch.entry].registers == registers


@each_binary
def test_every_launch_fits_a_multiprocessor_of_its_target(build: Build) -> None:
    built = build.compile()
    arch = arch_named(build.target)
    for launch in build.schedule.launches:
        taken = built.resources[launch.entry]
        assert launch.block % 32 == 0
        assert launch.block <= 1024
        assert taken.smem_static + launch.smem <= arch.smem_per_block, (launch, taken)
        warp = -(-32 * taken.registers // GRANULE) * GRANULE
        by_registers = REGISTERS // (warp * (launch.block // 32))
        # The whole of a multiprocessor is a kilobyte more than what one block can have.
        whole = arch.smem_per_block + SYSTEM_SMEM
        by_smem = whole // (taken.smem_static + launch.smem + SYSTEM_SMEM)
        wanted = RESIDENT.get((build.schedule.file, launch.entry), 1)
        assert by_registers >= wanted, f"{launch.entry}: {taken.registers} registers"
        if arch.smem_per_block > 200 * 1024:
            assert by_smem >= wanted, f"{launch.entry}: {launch.smem} bytes of shared memory"
        else:
            assert by_smem >= 1


@each_binary
def test_blocks_have_the_threads_that_the_kernels_are_bound_to(build: Build) -> None:
    """__launch_bounds__ is the block that a kernel is written for, by its roles and barriers."""
    binary = build.compile().binary
    for launch in build.schedule.launches:
        assert max_threads(binary, launch.entry) == launch.block, launch


def max_threads(cubin: bytes, entry: str) -> int | None:
    """EIATTR_MAX_THREADS (format 0x04, code 0x05) of an entry, from its section of the ELF file."""
    table, count, names = (
        struct.unpack_from(code, cubin, at)[0]
        for code, at in (("<Q", 0x28), ("<H", 0x3C), ("<H", 0x3E))
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    for name, _, _, _, start, size in sections:
        label = cubin[sections[names][4] + name :].split(b"\0", 1)[0]
        if label == f".nv.info.{entry}".encode():
            at = cubin.find(b"\x04\x05\x0c\x00", start, start + size)
            return None if at < 0 else int(struct.unpack_from("<I", cubin, at + 4)[0])
    return None


def test_every_spec_of_a_target_belongs_to_a_schedule_that_runs_there() -> None:
    for target in ALL:
        specs = compile_specs(target)
        names = [build.schedule for build in BUILDS if build.target == target]
        assert specs == list(dict.fromkeys(schedule.spec(target) for schedule in names))
        if arch_named(target).cc[0] in (8, 9, 10, 12):
            assert SCHEDULES["portable"].spec(target) in specs


def test_hopper_target_has_the_schedules_for_hopper_and_no_other_target_has() -> None:
    for schedule in SCHEDULES.values():
        if schedule.file.startswith("sm90/"):
            targets = {build.target for build in BUILDS if build.schedule is schedule}
            assert targets == {"sm_90a"}, schedule.name


# -- numbers that both sides know ----------------------------------------------------------------


def check_by_compiler(includes: str, *facts: str) -> None:
    """Each fact is a constant expression that must be true on the device side."""
    skip_unless_known("sm_80")
    asserts = "\n".join(f'static_assert({fact}, "");' for fact in facts)
    text = f'{includes}\n{asserts}\nextern "C" __global__ void facts() {{}}'
    compile_source(text, name="sm80/facts.cu", entries=("facts",), target="sm_80")


def test_stage_image_has_the_size_that_the_workspace_plans() -> None:
    check_by_compiler(
        '#include "common/stage.cuh"',
        f"kStageBytes == {workspace.STAGE_BYTES}",
        f"kChunk == {workspace.STAGE_TOKENS}",
        f"kHeadDim == {workspace.STAGE_HEAD_DIM}",
        f"kBlock == {CHECKPOINT_GRANULE}",
        "kStageBytes % 16 == 0",
    )


def test_a_wrong_size_does_not_compile() -> None:
    """Guards the test above."""
    with pytest.raises(CompileError, match="static assertion"):
        check_by_compiler(
            '#include "common/stage.cuh"', f"kStageBytes == {workspace.STAGE_BYTES + 16}"
        )


def offsets() -> dict[str, int]:
    """Where Python puts each field."""
    codes = re.sub(r"(\d+)(\w)", lambda m: int(m[1]) * m[2], cuda._ARGS.format.lstrip("@"))
    assert len(codes) == len(FIELDS)
    places = {}
    for i, name in enumerate(FIELDS):
        places[name] = struct.calcsize("@" + codes[: i + 1]) - struct.calcsize("@" + codes[i])
    return places


def test_fields_of_the_argument_are_where_python_packs_them() -> None:
    places = offsets()
    assert cuda._ARGS.size == cuda.ARGS_BYTES
    check_by_compiler(
        '#include "common/kda_args.cuh"',
        f"sizeof(KdaArgs) == {cuda.ARGS_BYTES}",
        # NVRTC has no offsetof; this is what its front end makes of one.
        *(f"__INTADDR__(&((KdaArgs*)0)->{name}) == {at}" for name, at in places.items()),
        f"kCuSeqlens64 == {cuda._CU_SEQLENS_64}",
        f"kStateIndices64 == {cuda._STATE_INDICES_64}",
        f"kOffsets64 == {cuda._OFFSETS_64}",
        f"kInitialBf16 == {cuda._INITIAL_BF16}",
        f"kFinalBf16 == {cuda._FINAL_BF16}",
        f"kCheckpointBf16 == {cuda._CHECKPOINT_BF16}",
    )


def test_packed_argument_holds_every_number_in_its_field() -> None:
    """Dense and packed calls in which no two numbers are equal."""
    x = Case(seed=1, lengths=(9, 9, 9), heads=2, value_heads=6, packed=False).tensors()

    def wide(y: torch.Tensor, columns: int) -> torch.Tensor:
        flat = y.flatten(2)
        memory = flat.new_zeros(y.shape[0], y.shape[1] + columns, flat.shape[2] + 8 * columns)
        view = memory[:, : y.shape[1], : flat.shape[2]]
        return view.copy_(flat).unflatten(2, y.shape[2:])

    tensors = {name: wide(getattr(x, name), i + 1) for i, name in enumerate(FIELDS[:5])}
    states = {
        name: torch.zeros(3, 7 + i, 128, 128, dtype=dtype)[:, :6]
        for i, (name, dtype) in enumerate(
            (
                ("initial_state", torch.float32),
                ("final_state", torch.bfloat16),
                ("checkpoint_state", torch.float32),
            )
        )
    }
    out = wide(x.v, 9)
    more: dict[str, Any] = {
        "out": out,
        "A_log": x.A_log,
        "dt_bias": x.dt_bias,
        "has_initial_state": torch.ones(3, dtype=torch.bool),
        "checkpoint_offsets": torch.zeros(3, dtype=torch.int64),
    }
    problem = make_problem(**tensors, **states, **more, scale=0.75, lower_bound=-2.5)
    got = unpacked(problem, 12345 << 8)
    named = {**tensors, **states, **more}
    for name in FIELDS[:16]:
        if name in ("cu_seqlens", "state_indices"):
            assert got[name] == 0
        elif name == "workspace":
            assert got[name] == 12345 << 8
        else:
            assert got[name] == named[name].data_ptr(), name
    for name in ("q", "k", "v", "g", "beta", "out"):
        assert got[f"{name}_token"] == named[name].stride(1), name
        assert got[f"{name}_batch"] == named[name].stride(0), name
    for name in ("initial", "final", "checkpoint"):
        assert got[f"{name}_slot"] == states[f"{name}_state"].stride(0), name
    assert (got["N"], got["T"], got["H"], got["HV"]) == (3, 9, 2, 6)
    assert (got["scale"], got["lower_bound"], got["num_state_slots"]) == (0.75, -2.5, 3)
    assert got["flags"] == cuda._FINAL_BF16 | cuda._OFFSETS_64


def test_packed_argument_of_a_pool() -> None:
    x = Case(seed=2, lengths=(5, 0, 3), heads=1).tensors()
    pool = torch.zeros(9, 1, 128, 128, dtype=torch.bfloat16)
    table = torch.tensor([[4, 7, 7], [2, 7, 7], [-1, 7, 7]])
    arguments = x.kwargs | {"initial_state": pool, "state_indices": table[:, 0]}
    assert x.cu_seqlens is not None
    arguments["cu_seqlens"] = x.cu_seqlens.long()
    problem = make_problem(*x.args, **arguments)
    got = unpacked(problem, 0)
    assert got["initial_state"] == got["final_state"] == pool.data_ptr()
    assert got["initial_slot"] == got["final_slot"] == 128 * 128
    assert got["state_indices"] == table.data_ptr()
    assert got["state_indices_stride"] == 3
    assert got["num_state_slots"] == 9
    assert got["cu_seqlens"] == arguments["cu_seqlens"].data_ptr()
    assert got["checkpoint_state"] == got["has_initial_state"] == 0
    wanted = cuda._INITIAL_BF16 | cuda._FINAL_BF16 | cuda._STATE_INDICES_64 | cuda._CU_SEQLENS_64
    assert got["flags"] == wanted


def unpacked(problem: Any, workspace_address: int) -> dict[str, Any]:
    buffer = create_string_buffer(cuda.ARGS_BYTES)
    cuda._pack(buffer, problem, workspace_address)
    return dict(zip(FIELDS, cuda._ARGS.unpack_from(buffer)))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=lambda schedule: schedule.name)
def test_launches_ask_for_the_shared_memory_that_the_kernels_use(schedule: Schedule) -> None:
    target = next(t for t in TARGETS if arch_named(t).cc[0] in schedule.capabilities)
    skip_unless_known(target)
    facts = [
        f'static_assert({SMEM_OF[launch.entry]} == {launch.smem}, "{launch.entry}");'
        for launch in schedule.launches
        if launch.entry in SMEM_OF
    ]
    assert all(launch.smem == 0 for launch in schedule.launches if launch.entry not in SMEM_OF)
    assert facts
    text = f'#include "{schedule.file}"\n' + "\n".join(facts)
    folder = schedule.file.rpartition("/")[0]
    compile_source(text, name=f"{folder}/facts.cu", target=target)


def test_tensor_maps_lie_where_the_fused_kernel_looks_for_them() -> None:
    skip_unless_known("sm_90a")
    facts = [
        f"sizeof(FusedArgs) == {cuda.FUSED_ARGS_BYTES}",
        f"__INTADDR__(&((FusedArgs*)0)->share) == {cuda.ARGS_BYTES}",
        f"__INTADDR__(&((FusedArgs*)0)->call) == {cuda.ARGS_BYTES + 8}",
        f"sizeof(HandedState) == {cuda._HANDED_BYTES}",
    ]
    for i, name in enumerate("qkgv"):
        at = cuda._MAPS_AT + i * cuda.tensor_map.NBYTES
        facts.append(f"__INTADDR__(&((FusedArgs*)0)->{name}) == {at}")
    asserts = "\n".join(f'static_assert({fact}, "");' for fact in facts)
    text = f'#include "{SCHEDULES["fused"].file}"\n{asserts}'
    compile_source(text, name="sm90/facts.cu", target="sm_90a")


def test_pipeline_divides_as_its_kernel_does() -> None:
    skip_unless_known("sm_90a")
    names = ("flags", "groups", "heads_beside", "ring", "consumers", "chains_per_cta", "reserved")
    assert pipeline.PipelinePlan._fields == names[1:-1]
    facts = [
        f"sizeof(PipelineArgs) == {cuda.PIPELINE_ARGS_BYTES}",
        f"kChains == {pipeline.MAX_CHAINS_PER_SM}",
        f"kMaxGroups == {pipeline.MAX_GROUPS}",
        f"4 * kLineWords == {pipeline._LINE_BYTES}",
    ]
    at = cuda.ARGS_BYTES
    for name, code in zip(names, "P" + 6 * "i"):
        facts.append(f"__INTADDR__(&((PipelineArgs*)0)->{name}) == {at}")
        at += struct.calcsize(code)
    assert at == cuda.PIPELINE_ARGS_BYTES
    asserts = "\n".join(f'static_assert({fact}, "");' for fact in facts)
    text = f'#include "{SCHEDULES["pipeline"].file}"\n{asserts}'
    compile_source(text, name="sm90/facts.cu", target="sm_90a")


@pytest.mark.parametrize("sm_count", [16, 78, 114, 132, 144])
def test_pipeline_stays_within_what_a_workspace_plans(sm_count: int) -> None:
    plans = 0
    for HV in (1, 2, 3, 6, 12, 16, 24, 32, 48, 64, 96, 128):
        for N in (1, 2, 3, 7, 8, 33, 64, 65, 500):
            for tokens in (1, 31, 64, 128, 130, 1000, 4096, 65536, 1_000_000):
                plan = pipeline.plan_pipeline(tokens, N, HV, sm_count)
                if plan is None:
                    continue
                plans += 1
                specs = workspace.workspace_specs(tokens, N, HV, 128, checkpoints=False)
                assert plan.ring_bytes <= specs["prefill_stages"].nbytes, (tokens, N, HV, plan)
                assert plan.flag_bytes <= specs["pipeline_flags"].nbytes, (tokens, N, HV, plan)
                assert 1 <= plan.groups <= min(N, pipeline.MAX_GROUPS)
                assert 1 <= plan.chains_per_cta <= pipeline.MAX_CHAINS_PER_SM
                assert plan.ring >= pipeline.MIN_RING
                assert 1 <= plan.heads_beside <= HV
                # Every chain has a consumer, and there are producers left.
                assert plan.consumers * plan.chains_per_cta >= 2 * plan.lanes
                assert plan.consumers < sm_count
    assert plans
