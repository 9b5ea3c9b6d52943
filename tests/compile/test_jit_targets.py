"""Every target builds without a GPU: a probe of our own, then all that the CUDA backend builds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from kda_jit import settings
from kda_jit.jit import cache, compiler
from kda_jit.jit.arch import PTX_TARGETS, TARGETS, arch_named
from kda_jit.jit.compiler import compile_source, compile_spec
from kda_jit.jit.spec import KernelSpec

PROBE = """
struct Args { const float* x; float* y; float scale[40]; int count; };
extern "C" __global__ void __launch_bounds__(128, 1) probe(const __grid_constant__ Args args) {
    __shared__ float tile[128];
    const int i = blockIdx.x * 128 + threadIdx.x;
    tile[threadIdx.x] = i < args.count ? args.x[i] * args.scale[threadIdx.x % 40] : 0.0f;
    __syncthreads();
    if (i < args.count) args.y[i] = tile[127 - threadIdx.x];
#ifdef HOPPER
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    asm volatile("wgmma.fence.sync.aligned;");
#endif
}
"""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for setting in settings.SETTINGS:
            patch.delenv(setting.name, raising=False)
        patch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_writable", {})
        yield


def _skip_unless_known(target: str) -> None:
    reason = compiler.unavailable_reason(target)
    if reason is not None:
        pytest.skip(reason)


def _backend_specs() -> list[KernelSpec]:
    if importlib.util.find_spec("kda_jit.backends.cuda") is None:
        return []
    from kda_jit.backends.cuda import compile_specs

    return [spec for target in (*TARGETS, *PTX_TARGETS) for spec in compile_specs(target)]


@pytest.mark.parametrize("target", TARGETS)
def test_probe_builds_to_machine_code_of_that_target(target: str) -> None:
    _skip_unless_known(target)
    hopper = {"HOPPER": 1} if "wgmma" in arch_named(target).features else {}
    built = compile_source(PROBE, target=target, entries=("probe",), defines=hopper)
    taken = built.resources["probe"]
    assert 8 <= taken.registers <= 255
    assert (taken.spill_stores, taken.spill_loads, taken.stack) == (0, 0, 0)
    assert taken.smem_static == 512
    assert built.warnings == ()
    # e_flags of the ELF header: the capability is in one of its two lowest bytes, by ABI version.
    flags = int.from_bytes(built.binary[0x30:0x34], "little")
    major, minor = arch_named(target).cc
    assert 10 * major + minor in (flags & 0xFF, flags >> 8 & 0xFF)


@pytest.mark.parametrize("target", PTX_TARGETS)
def test_probe_builds_to_ptx(target: str) -> None:
    _skip_unless_known(target)
    built = compile_source(PROBE, target=target, entries=("probe",))
    assert f".target {target.replace('compute', 'sm')}" in built.binary.decode()


def test_every_target_but_the_newest_is_known_to_this_compiler() -> None:
    """A skip above must mean "this NVRTC is older than the target", never "nothing was tried"."""
    if compiler.unavailable_reason("sm_80") is not None:
        pytest.skip(str(compiler.unavailable_reason("sm_80")))
    since = {"sm_100a": (12, 8), "sm_120a": (12, 8), "sm_110a": (13, 0)}
    since |= dict.fromkeys(("sm_100f", "sm_103a", "sm_121a"), (12, 9))
    for target in (*TARGETS, *PTX_TARGETS):
        known = compiler.nvrtc_version() >= since.get(target, (12, 0))
        reason = compiler.unavailable_reason(target)
        assert (reason is None) == known, reason
        if reason is not None:
            assert f"{target}: NVRTC" in reason
            assert "does not know" in reason


def test_hopper_instructions_need_the_suffix() -> None:
    """Guards the probe itself: without sm_90a's `a` the same text must not build."""
    _skip_unless_known("sm_90a")
    with pytest.raises(compiler.CompileError, match=r"setmaxnreg|wgmma"):
        compile_source(PROBE, target="sm_80", defines={"HOPPER": 1})


@pytest.mark.parametrize("spec", _backend_specs(), ids=lambda spec: f"{spec.target}-{spec.name}")
def test_backend_kernel_builds_without_spills(spec: KernelSpec) -> None:
    _skip_unless_known(spec.target)
    built = compile_spec(spec)
    assert built.entries
    assert built.warnings == ()
    limit = min(48 * 1024, arch_named(spec.target).smem_per_block)
    for name, taken in built.resources.items():
        assert (taken.spill_stores, taken.spill_loads) == (0, 0), f"{name}: {taken}"
        assert taken.registers <= 255
        assert taken.smem_static <= limit


@pytest.mark.skipif(not _backend_specs(), reason="needs kda_jit.backends.cuda")
def test_backend_has_kernels_for_every_target() -> None:
    assert {spec.target for spec in _backend_specs()} >= {"sm_80", "sm_90a", "compute_80"}


def test_package_sources_are_where_the_specs_say() -> None:
    root = compiler.sources.root()
    for spec in _backend_specs():
        assert Path(root, spec.file).is_file()
