"""NVRTC without a GPU: flags, figures, keys, and errors that name file and line."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest

from kda_jit.errors import CompileError, InputError
from kda_jit.jit import cache, compiler, sources
from kda_jit.jit.compiler import Resources, compile_source, compile_spec, parse_resources
from kda_jit.jit.spec import KernelSpec

SPEC = KernelSpec("sm80/add.cu", ("add",), "sm_80")
REPO = Path(__file__).resolve().parents[2]

needs_nvrtc = pytest.mark.skipif(
    compiler.unavailable_reason("sm_80") is not None,
    reason=f"needs NVRTC: {compiler.unavailable_reason('sm_80')}",
)
pytestmark = needs_nvrtc


def test_builds_a_whole_elf_file(kernels: Path) -> None:
    built = compile_spec(SPEC)
    assert built.path.suffix == ".cubin"
    assert built.entries == ("add",)
    assert built.binary[:4] == b"\x7fELF"
    # One of the header tables ends the file; CuPy hands it out one byte short.
    offset, size, count = (
        int.from_bytes(built.binary[start : start + length], "little")
        for start, length in ((0x28, 8), (0x3A, 2), (0x3C, 2))
    )
    ends = [offset + size * count]
    start = 0x20  # program headers may lie behind the section headers
    program = int.from_bytes(built.binary[start : start + 8], "little")
    ends.append(
        program
        + int.from_bytes(built.binary[0x36:0x38], "little")
        * int.from_bytes(built.binary[0x38:0x3A], "little")
    )
    assert len(built.binary) >= max(ends)


def test_second_build_comes_from_the_cache_in_milliseconds(kernels: Path) -> None:
    first = compile_spec(SPEC)
    again = compile_spec(SPEC)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert again.seconds < 0.1
    assert (again.key, again.path, again.log) == (first.key, first.path, first.log)
    assert (again.resources, again.nvrtc) == (first.resources, first.nvrtc)
    assert not compile_spec(SPEC, fresh=True).from_cache


def test_editing_a_header_builds_anew_and_undoing_it_finds_the_old_one(kernels: Path) -> None:
    header = kernels / "common/types.cuh"
    before = header.read_text()
    first = compile_spec(SPEC)
    header.write_text("#pragma once\nusing real = double;\n")
    edited = compile_spec(SPEC)
    assert not edited.from_cache
    assert edited.key != first.key
    assert edited.binary != first.binary
    header.write_text(before)
    back = compile_spec(SPEC)
    assert back.from_cache
    assert back.key == first.key


def test_edit_during_a_build_is_filed_under_what_was_built(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVRTC opens headers after the key is known; an edit in between must not go stale."""
    header = kernels / "common/types.cuh"
    true_build = compiler._build
    builds = 0

    def build(spec: KernelSpec, source: sources.SourceSet) -> tuple[bytes, str]:
        nonlocal builds
        builds += 1
        if builds == 1:
            header.write_text("#pragma once\nusing real = double;\n")
        return true_build(spec, source)

    old_key = compiler._key(SPEC, sources.read(SPEC.file))
    monkeypatch.setattr(compiler, "_build", build)
    built = compile_spec(SPEC)
    assert builds == 2
    assert built.key == compiler._key(SPEC, sources.read(SPEC.file)) != old_key
    assert cache.lookup(old_key) is None


def test_defines_reach_the_kernel_and_the_key(kernels: Path) -> None:
    text = (
        'extern "C" __global__ void f(int* x) { x[0] = VALUE; }\n'
        "static_assert(VALUE == 7 || FLAG == 1);\n"
    )
    seven = compile_source(text, target="sm_80", defines={"VALUE": 7, "FLAG": False})
    other = compile_source(text, target="sm_80", defines={"VALUE": 8, "FLAG": True})
    assert seven.key != other.key
    with pytest.raises(CompileError, match=r"s\.cu for sm_80 \(FLAG=0, VALUE=8\)"):
        compile_source(text, name="s.cu", target="sm_80", defines={"VALUE": 8, "FLAG": False})


def test_no_flag_changes_the_maths() -> None:
    """Denormals stay, divisions are exact, and multiply-adds fuse: the sources rely on that."""
    text = (
        'extern "C" __global__ void f(float* x) { x[0] = x[1] / x[2]; x[3] = x[4] * x[5] + x[6]; }'
    )
    ptx = compile_source(text, target="compute_80").binary.decode()
    assert "div.rn.f32" in ptx
    assert "fma.rn.f32" in ptx
    assert ".ftz" not in ptx


@pytest.mark.parametrize(("version", "asked"), [((12, 8), False), ((12, 9), True), ((13, 0), True)])
def test_nvrtc_is_asked_for_no_cached_answer(
    version: tuple[int, int], asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its own cache answers, the log and with it every register count is missing."""
    given: list[str] = []
    nvrtc = compiler._nvrtc()
    compile_program = nvrtc.compileProgram

    def record(program: int, options: tuple[str, ...]) -> None:
        given.extend(options)
        compile_program(program, tuple(o for o in options if o != "--no-cache"))

    monkeypatch.setattr(nvrtc, "compileProgram", record)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: version)
    compile_source('extern "C" __global__ void f() {}', target="sm_80")
    assert ("--no-cache" in given) is asked


def test_error_names_kernel_compiler_file_line_and_folder(kernels: Path) -> None:
    header = kernels / "common/numerics.cuh"
    header.write_text(header.read_text() + "int broken() { return missing_name; }\n")
    with pytest.raises(CompileError) as caught:
        compile_spec(SPEC)
    first, second, last = str(caught.value).splitlines()
    version = ".".join(map(str, compiler.nvrtc_version()))
    assert first == f"add for sm_80, NVRTC {version}"
    assert second == (
        '  kernels_src/common/numerics.cuh(4): error: identifier "missing_name" is undefined'
    )
    key = Path(caught.value.folder or "").name
    assert last == (
        f"  source, flags and log: {caught.value.folder}; "
        f"redo: python -m kda_jit compile --key {key}"
    )
    assert "missing_name" in caught.value.log
    # The key leads back to the very spec, and after a fix to a cubin.
    assert compiler.failed_spec(key) == SPEC
    header.write_text("#pragma once\nusing real = float;\nreal plus(real x) { return x; }\n")
    assert compile_spec(compiler.failed_spec(key)).entries == ("add",)


def test_error_in_a_string_and_in_a_foreign_file_names_them(kernels: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"  <string mine\.cu>\(2\): error: .*nope"):
        compile_source('\nextern "C" __global__ void f() { nope; }', name="mine.cu", target="sm_80")
    file = tmp_path / "foreign.cu"
    file.write_text('\n\nextern "C" __global__ void f() { nope; }')
    with pytest.raises(CompileError) as caught:
        compile_source(file, target="sm_80")
    assert f"{file}(3): error" in str(caught.value)


def test_long_list_of_errors_is_cut_short_but_kept_in_the_log(kernels: Path) -> None:
    text = "".join(f"int f{n}() {{ return name{n}; }}\n" for n in range(20))
    with pytest.raises(CompileError) as caught:
        compile_source(text, target="sm_80")
    assert len(str(caught.value).splitlines()) == 11
    assert "and 12 more errors" in str(caught.value)
    assert "name19" in caught.value.log


def test_string_kernel_sees_our_headers_and_those_beside_its_name(kernels: Path) -> None:
    text = (
        '#include "common/numerics.cuh"\n#include "private.cuh"\n'
        'extern "C" __global__ void f(real* x) { x[0] = plus(kStep); }\n'
    )
    assert compile_source(text, name="sm80/mine.cu", target="sm_90a").entries == ("f",)
    with pytest.raises(CompileError, match=r"private\.cuh"):
        compile_source(text, name="mine.cu", target="sm_90a")


def test_file_given_by_path_is_read_anew_each_time(kernels: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.cu"
    file.write_text('extern "C" __global__ void first() {}\n')
    assert compile_source(file, target="sm_80").entries == ("first",)
    file.write_text('extern "C" __global__ void second() {}\n')
    assert compile_source(file, target="sm_80").entries == ("second",)
    with pytest.raises(InputError, match=r"absent\.cu"):
        compile_source(tmp_path / "absent.cu", target="sm_80")


def test_missing_entry_says_what_is_there(kernels: Path) -> None:
    text = 'extern "C" __global__ void there() {}\n__global__ void mangled() {}\n'
    with pytest.raises(
        CompileError, match=r"expected the entries mangled .*there.*extern"
    ) as caught:
        compile_source(text, target="sm_80", entries=("there", "mangled"))
    assert "_Z7mangledv" in str(caught.value)


def test_unknown_target_is_refused_before_and_by_nvrtc_with_words(
    kernels: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"Meant sm_90a\?"):
        compile_source("", target="sm_90")
    monkeypatch.setattr(compiler, "arch_named", lambda target: compiler_arch())
    with pytest.raises(CompileError, match=r"NVRTC \d+\.\d+ does not know sm_777; a newer one may"):
        compile_source('extern "C" __global__ void f() {}', target="sm_777")
    assert not (cache_folder / "failed").exists()  # the source is not at fault
    assert "sm_777" in (compiler.unavailable_reason("sm_777") or "")


def compiler_arch() -> object:
    from kda_jit.jit.arch import arch_named

    return arch_named("sm_80")


def test_default_target_is_the_forced_one(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    text = 'extern "C" __global__ void f() {}'
    monkeypatch.setenv("KDA_JIT_ARCH", "sm_86")
    assert compile_source(text).spec.target == "sm_86"
    monkeypatch.delenv("KDA_JIT_ARCH")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 1))
    assert compile_source(text).spec.target == "sm_121a"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(InputError, match=r"7\.5"):
        compile_source(text)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="no GPU"):
        compile_source(text)


def test_ptx_target_gives_ptx_with_its_entries(kernels: Path) -> None:
    built = compile_spec(KernelSpec("sm80/add.cu", ("add",), "compute_80"))
    assert built.path.suffix == ".ptx"
    assert built.entries == ("add",)
    assert built.resources == {}
    assert ".target sm_80" in built.binary.decode()


def test_figures_are_ptxas_own(kernels: Path) -> None:
    text = """
__noinline__ int deep(int x) {
    volatile int b[30];
    for (int i = 0; i < 30; ++i) b[i] = x;
    return b[x];
}
extern "C" __global__ void uses(int* p) {
    __shared__ int s[100];
    s[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[0] = deep(s[3]);
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* p) {
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = p[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i)
#pragma unroll
        for (int j = 0; j < 64; ++j) v[i] = fmaf(v[i], v[j], v[(i + j) % 64]);
#pragma unroll
    for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = v[i];
}
"""
    built = compile_source(text, target="sm_80")
    uses, spills = built.resources["uses"], built.resources["spills"]
    assert uses.smem_static == 400
    assert uses.stack >= 120
    assert (uses.spill_stores, uses.spill_loads) == (0, 0)
    assert uses.barriers == 1
    assert spills.registers == 32
    assert spills.spill_stores > 100
    assert spills.spill_loads > 100
    assert spills.smem_static == 0
    assert (
        built.resources["uses"].const >= 360
    )  # the 352 bytes before the parameters, and a pointer


LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 160 bytes cumulative stack size, \
2048 bytes smem, 528 bytes cmem[0], 8 bytes cmem[2]
ptxas info    : Compile time = 5.038 ms
ptxas info    : Function properties for _Z3fooi
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 20 bytes spill loads
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : (C7508) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers
"""


def test_log_is_read_entry_by_entry_and_shared_functions_count_for_all() -> None:
    assert parse_resources(LOG) == {
        "one": Resources(168, 12, 32, 160, 2048, 536, 9),
        "two": Resources(24, 4, 20, 0, 0, 0, 0),
    }
    assert parse_resources("") == {}


def test_warnings_pick_out_serialised_wgmma_and_compiler_warnings(kernels: Path) -> None:
    built = compile_source('extern "C" __global__ void f() { int unused; }', target="sm_80")
    assert any("unused" in line for line in built.warnings)
    clean = compile_spec(SPEC)
    assert clean.warnings == ()
    noisy = compiler.dataclasses.replace(clean, log=LOG)
    assert [line.split(": ")[1] for line in noisy.warnings] == [
        "(C7508) Potential Performance Loss"
    ]


def test_threads_build_side_by_side(kernels: Path) -> None:
    results: list[str] = []
    specs = [KernelSpec("sm80/add.cu", ("add",), target) for target in ("sm_80", "sm_90a")] * 4

    def build(spec: KernelSpec) -> None:
        results.append(compile_spec(spec).key)

    threads = [threading.Thread(target=build, args=(spec,)) for spec in specs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert len(set(results)) == 2


def test_importing_the_layer_touches_neither_cupy_nor_triton() -> None:
    code = (
        "import sys; import kda_jit.jit; "
        "print([name for name in ('cupy', 'cupy_backends', 'triton') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_second_process_starts_from_the_cache(kernels: Path) -> None:
    digest = sha256(compile_spec(SPEC).binary).hexdigest()
    code = (
        "from kda_jit.jit import compile_spec, KernelSpec; from hashlib import sha256; "
        "built = compile_spec(KernelSpec('sm80/add.cu', ('add',), 'sm_80')); "
        "print(built.from_cache, sha256(built.binary).hexdigest())"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["True", digest], done.stderr
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "hidden, words",
    [("import", "CuPy cannot be imported"), ("library", "CuPy finds no libnvrtc")],
)
def test_missing_cupy_or_nvrtc_is_a_reason_not_a_crash(hidden: str, words: str) -> None:
    hide = {
        "import": "sys.modules['cupy'] = None",
        "library": (
            "from cupy.cuda import nvrtc\n"
            "def gone(): raise RuntimeError('libnvrtc.so.12: cannot open')\n"
            "class Module: getVersion = staticmethod(gone)\n"
            "import cupy.cuda; cupy.cuda.nvrtc = Module"
        ),
    }[hidden]
    code = f"import sys\n{hide}\nfrom kda_jit import jit\nprint(jit.unavailable_reason('sm_80'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert words in done.stdout, done.stderr
    assert "extra cuda12 or cuda13" in done.stdout
