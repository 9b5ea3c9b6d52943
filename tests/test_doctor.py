"""`kda-jit doctor`: a line and a fix for whatever is wrong, an exit code, and never a traceback."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer", reason="the command needs typer")
pytest.importorskip("rich", reason="the command needs rich")

from typer.testing import CliRunner

from kda_jit import capturing, doctor, extras, settings
from kda_jit.cli import app
from kda_jit.doctor import Facts, judge, probes
from kda_jit.doctor.facts import (
    Cache,
    Choice,
    Cupy,
    Driver,
    Environment,
    Gpu,
    Headers,
    Misfit,
    Nvrtc,
    Packages,
    Torch,
    Trial,
    Triton,
)
from kda_jit.errors import InputError, LaunchError
from kda_jit.jit.compiler import unavailable_reason

NEEDS_NVRTC = pytest.mark.skipif(
    unavailable_reason("sm_80") is not None, reason="no NVRTC: nothing to hide"
)
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")

H200 = Gpu("NVIDIA H200", (9, 0), "sm_90a", 132, 139.8)
HEALTHY = Facts(
    kda_jit="0.1.0",
    python="3.12.1",
    platform="Linux x86_64",
    driver=Driver("580.65.06", (13, 0), 1),
    torch=Torch("2.13.0+cu130", (13, 0), (H200,)),
    cupy=Cupy({"cupy-cuda13x": "14.2.0"}, "14.2.0", 13),
    nvrtc=Nvrtc((13, 0), "/site/libnvrtc.so.13", {"sm_90a": None}),
    headers=Headers("/site/include", (13, 0)),
    triton=Triton("3.7.1", False, "/usr/bin/cc"),
    sources="/site/kda_jit/kernels_src",
    cache=Cache("/home/a/.cache/kda_jit", "/home/a/.cache/kda_jit", None, 3, 0, 3 << 20),
    choice=Choice("cuda:0", "cuda", {"cuda": (), "triton": (), "torch": ()}),
    trial=Trial(80, {"backend": "cuda", "kernels": "kda_prepare"}, 2e-3, 6e-3),
)
NO_GPU = dataclasses.replace(
    HEALTHY,
    driver=Driver(error="CUDA driver: cannot be opened. Is this a GPU machine?"),
    torch=Torch("2.13.0+cpu"),
    cupy=Cupy(),
    nvrtc=Nvrtc(),
    choice=Choice("cpu", "torch", {"cuda": ("needs a CUDA device, got cpu",), "torch": ()}),
    trial=Trial(80, {"backend": "torch"}, 2e-3, 6e-3),
)
BLIND = {"torch": Torch("2.13.0+cu130", (13, 0), (), "RuntimeError: no GPU")}
ON_CPU = {"choice": NO_GPU.choice, "trial": NO_GPU.trial}
CUDA_12 = {
    "driver": Driver("560.35.03", (12, 6), 1),
    "torch": Torch("2.9.0+cu126", (12, 6), (H200,)),
    "cupy": Cupy({"cupy-cuda12x": "14.2.0"}, "14.2.0", 12),
    "nvrtc": Nvrtc((12, 9), None, {"sm_90a": None}),
    "headers": Headers("/site/include", (12, 9)),
}
ANEW_13 = "pip uninstall -y cupy-cuda12x && pip install 'kda_jit[cuda13]'"
WHEELS = "https://download.pytorch.org/whl/"


@pytest.fixture(autouse=True)
def _from_an_index(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "_ROOT", tmp_path)


@pytest.fixture
def call(monkeypatch):
    """call(facts, *options) -> (exit code, text) of the command about such a machine."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(facts, *options):
        monkeypatch.setattr(doctor, "gather", lambda: facts)
        words = ["doctor", *map(str, options)]
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        return result.exit_code, result.stdout

    return run


def test_a_healthy_machine(call):
    code, text = call(HEALTHY)
    assert code == 0
    lines = [line.split(maxsplit=2) for line in text.splitlines()[2:14]]
    assert [(status, part) for status, part, _ in lines] == [
        ("-" if part == "environment" else "ok", part)
        for part in (
            "GPU", "driver", "torch", "CuPy", "NVRTC", "headers", "Triton", "sources", "cache",
            "environment", "packages", "prefill",
        )
    ]  # fmt: skip
    assert "NVIDIA H200, compute capability 9.0, 132 SMs, 140 GiB, target sm_90a" in text
    assert "580.65.06, runs CUDA 13.0 and older" in text
    assert "13.0, /site/libnvrtc.so.13, builds sm_90a" in text
    assert "cuda    taken\n  triton  could\n" in text
    assert text.endswith("A prefill runs, by cuda on cuda:0: nothing to mend.\n")


def test_a_machine_without_a_gpu_has_nothing_broken(call):
    code, text = call(NO_GPU)
    assert code == 0
    assert "none: CUDA driver: cannot be opened. Is this a GPU machine?" in text
    assert "cuda    no: needs a CUDA device, got cpu" in text
    tried = Nvrtc((12, 9), "/site/libnvrtc.so.12", {"sm_80": None})
    _, with_nvrtc = call(dataclasses.replace(NO_GPU, nvrtc=tried))
    assert "12.9, /site/libnvrtc.so.12, builds sm_80, tried without a GPU\n" in with_nvrtc
    assert "1. note, CuPy: not installed; without a GPU only `kda-jit compile` would want" in text
    assert "A prefill runs, by torch on cpu: 1 note." in text


SITUATIONS = {
    "CuPy is missing on a GPU": (
        {"cupy": Cupy(), "nvrtc": Nvrtc()},
        "warning, CuPy: not installed, so the CUDA kernels, the fastest, cannot be built",
        "pip install 'kda_jit[cuda13]'",
    ),
    "CuPy is missing beside a torch older than the driver": (
        {"torch": CUDA_12["torch"], "cupy": Cupy(), "nvrtc": Nvrtc()},
        "warning, CuPy: not installed",
        "pip install 'kda_jit[cuda12]'",
    ),
    "CuPy cannot be imported": (
        {"cupy": Cupy({"cupy-cuda12x": "14.2.0"}, error="ImportError: no"), "nvrtc": Nvrtc()},
        "broken, CuPy: cupy-cuda12x 14.2.0 cannot be imported: ImportError: no",
        ANEW_13,
    ),
    "two CuPys": (
        {"cupy": Cupy({"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.1.0"}, "14.2.0", 12)},
        "warning, CuPy: cupy-cuda12x 14.2.0, cupy-cuda13x 14.1.0 are installed over each other",
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install 'kda_jit[cuda13]'",
    ),
    "CuPy of another generation than torch": (
        {"cupy": CUDA_12["cupy"], "nvrtc": CUDA_12["nvrtc"], "headers": CUDA_12["headers"]},
        "warning, CuPy: CuPy 14.2.0 is built for CUDA 12, torch 2.13.0+cu130 for CUDA 13.0: two",
        ANEW_13,
    ),
    "CuPy newer than the driver": (
        CUDA_12 | {"cupy": HEALTHY.cupy},
        "broken, CuPy: CuPy 14.2.0 is built for CUDA 13, the driver runs CUDA 12.6 and older",
        "pip uninstall -y cupy-cuda13x && pip install 'kda_jit[cuda12]'",
    ),
    "no NVRTC": (
        {"nvrtc": Nvrtc(error="NVRTC: CuPy finds no libnvrtc (RuntimeError: libnvrtc.so.13)")},
        "broken, NVRTC: CuPy finds no libnvrtc (RuntimeError: libnvrtc.so.13)",
        "pip install 'kda_jit[cuda13]'",
    ),
    "NVRTC without its builtins": (
        CUDA_12 | {"nvrtc": Nvrtc((12, 9), None, {"sm_90a": "cannot open builtins"})},
        "broken, NVRTC: NVRTC 12.9 builds nothing for sm_90a: cannot open builtins",
        "pip install --upgrade --force-reinstall 'nvidia-cuda-nvrtc-cu12<13'",
    ),
    "NVRTC older than the GPU": (
        {"nvrtc": Nvrtc((13, 0), None, {"sm_121a": "invalid value for --gpu-architecture"})},
        "broken, NVRTC: NVRTC 13.0 builds nothing for sm_121a: invalid value",
        "pip install --upgrade --force-reinstall 'nvidia-cuda-nvrtc<14'",
    ),
    "PTX for an older driver": (
        CUDA_12 | {"environment": Environment({"KDA_JIT_ARCH": "compute_80"})},
        "broken, NVRTC: KDA_JIT_ARCH=compute_80 leaves PTX of NVRTC 12.9 to a driver that runs",
        "unset KDA_JIT_ARCH",
    ),
    "headers of another release": (
        {"headers": Headers("/usr/local/cuda/include", (12, 4))},
        "warning, headers: those of CUDA 12.4 in /usr/local/cuda/include beside NVRTC 13.0. The",
        "pip install 'nvidia-cuda-runtime==13.0.*'",
    ),
    "a driver too old for torch": (
        BLIND | ON_CPU | {"driver": CUDA_12["driver"], "cupy": CUDA_12["cupy"]},
        "broken, torch: torch 2.13.0+cu130 is built for CUDA 13.0, the driver runs CUDA 12.6 and",
        f"pip install --force-reinstall torch --index-url {WHEELS}cu126    # or update the driver",
    ),
    "torch without CUDA": (
        ON_CPU | {"torch": Torch("2.13.0+cpu")},
        "warning, torch: the driver shows 1 GPU(s), but torch 2.13.0+cpu is built without CUDA",
        f"pip install --force-reinstall torch --index-url {WHEELS}cu130",
    ),
    "torch that cannot use the GPU": (
        BLIND | ON_CPU,
        "broken, torch: the driver shows 1 GPU(s), and torch 2.13.0+cu130 cannot use them: Runtime",
        f"pip install --force-reinstall torch --index-url {WHEELS}cu130",
    ),
    "a container without the GPU": (
        BLIND | ON_CPU | {"driver": Driver("580.65.06", error="cannot be opened")},
        "broken, driver: the kernel has NVIDIA's driver 580.65.06, but there is no libcuda.so.1",
        "docker run --gpus all ...",
    ),
    "no fabric manager": (
        BLIND
        | ON_CPU
        | {"driver": Driver("580.65.06", (13, 0), 0, "CUDA_ERROR_SYSTEM_NOT_READY (802)")},
        "broken, driver: the GPUs of this machine wait for the fabric manager: CUDA_ERROR_SYSTEM",
        "sudo systemctl start nvidia-fabricmanager",
    ),
    "a hidden GPU": (
        BLIND
        | ON_CPU
        | {
            "driver": Driver("580.65.06", (13, 0), 0, "CUDA_ERROR_NO_DEVICE (100)"),
            "environment": Environment({"CUDA_VISIBLE_DEVICES": ""}),
        },
        "warning, driver: CUDA_VISIBLE_DEVICES='' leaves no GPU to this process",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    "Triton is missing on a GPU": (
        {"triton": Triton()},
        "warning, Triton: not installed; calls that the CUDA kernels do not take run in torch",
        "pip install 'kda_jit[triton]'",
    ),
    "Triton cannot be imported": (
        {"triton": Triton("3.7.1", error="ImportError: libtriton.so")},
        "broken, Triton: triton 3.7.1 cannot be imported: ImportError: libtriton.so",
        "pip uninstall -y triton && pip install 'kda_jit[triton]'",
    ),
    "Triton interprets": (
        {"triton": Triton("3.7.1", True, "/usr/bin/cc")},
        "warning, Triton: TRITON_INTERPRET=1 takes its kernels off the GPU",
        "unset TRITON_INTERPRET",
    ),
    "no C compiler": (
        {"triton": Triton("3.7.1")},
        "warning, Triton: there is no C compiler",
        "sudo apt-get install gcc",
    ),
    "no sources": (
        {"sources": None, "sources_error": "kernels_src: not found in /a and /b."},
        "broken, sources: kernels_src: not found in /a and /b.",
        "pip install --force-reinstall --no-deps kda_jit",
    ),
    "an unwritable cache": (
        {"cache": Cache("/ro", "/tmp/kda_jit-0", "Permission denied")},
        "warning, cache: cannot write to /ro (Permission denied): kernels go to /tmp/kda_jit-0",
        "export KDA_JIT_CACHE_DIR=/a/folder/that/you/can/write",
    ),
    "a cache that cannot be read": (
        {"cache": Cache(error="PermissionError: [Errno 13]")},
        "broken, cache: PermissionError: [Errno 13]",
        "kda-jit cache clear",
    ),
    "a variable with a wrong value": (
        {"environment": Environment({"KDA_JIT_VLLM": "x"}, {"KDA_JIT_VLLM": "expected on, got"})},
        "broken, environment: KDA_JIT_VLLM: expected on, got",
        "unset KDA_JIT_VLLM",
    ),
    "a version that does not fit": (
        {"packages": Packages((Misfit("triton", "3.2.0", ">=3.5"),))},
        "warning, packages: triton 3.2.0 is installed, kda_jit wants >=3.5",
        "pip install 'triton>=3.5'",
    ),
    "a backend that cannot run": (
        {
            "choice": Choice(
                "cpu", None, {"cuda": ("needs a CUDA device",)}, "KDA_JIT_BACKEND=cuda"
            ),
            "trial": Trial(),
            "environment": Environment({"KDA_JIT_BACKEND": "cuda"}),
        },
        "broken, prefill: none can run: KDA_JIT_BACKEND=cuda",
        "unset KDA_JIT_BACKEND",
    ),
    "a prefill that fails": (
        {"trial": Trial(error="LaunchError: out of memory")},
        "broken, prefill: one of cuda failed: LaunchError: out of memory",
        "export KDA_JIT_BACKEND=triton",
    ),
    "a prefill that is wrong": (
        {"trial": Trial(80, {"backend": "cuda"}, 0.5, 6e-3)},
        "broken, prefill: one of cuda is 5.0e-01 off in its worst block, allowed is 6.0e-03",
        "kda-jit verify --backend cuda",
    ),
    "a GPU that the kernels do not load on": (
        {
            "choice": Choice(
                "cuda:0", "triton", {"cuda": ("needs CuPy and NVRTC to build: bad ELF",)}
            )
        },
        "broken, NVRTC: the cuda backend needs CuPy and NVRTC to build: bad ELF",
        "pip uninstall -y cupy-cuda13x && pip install 'kda_jit[cuda13]'",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_is_one_line_with_a_fix(call, name):
    changes, words, fix = SITUATIONS[name]
    facts = dataclasses.replace(HEALTHY, **changes)
    code, text = call(facts)
    assert f"\n1. {words}" in text
    assert f"\n   {fix}" in text
    level, _, part = words.partition(":")[0].partition(", ")
    (status,) = [line.split()[0] for line in text.splitlines()[2:14] if line.split()[1] == part]
    assert status == level
    assert code == (1 if level == "broken" else 0)
    found = judge(facts)
    assert len(found) == 1, "one fault, one finding"


def test_the_worst_comes_first(call):
    facts = dataclasses.replace(
        HEALTHY, cache=Cache("/ro", "/tmp/x", "read-only"), nvrtc=Nvrtc(error="NVRTC: gone")
    )
    code, text = call(facts)
    assert code == 1
    assert text.index("1. broken, NVRTC: gone") < text.index("2. warning, cache")
    assert text.endswith("A prefill runs, by cuda on cuda:0: 1 broken, 1 warning.\n")


def test_json_has_facts_and_findings(call, tmp_path):
    facts = dataclasses.replace(HEALTHY, triton=Triton())
    code, text = call(facts, "--json", tmp_path / "report.json")
    assert (code, "1. warning, Triton" in text) == (0, True)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["runs"] is True
    assert found["findings"][0]["part"] == "Triton"
    assert found["facts"]["torch"]["gpus"][0]["capability"] == [9, 0]
    code, text = call(facts, "--json", "-")
    assert json.loads(text) == found


def test_a_report_that_cannot_be_written_is_refused(call, tmp_path):
    with pytest.raises(InputError, match="json: expected a file that can be written, got"):
        call(HEALTHY, "--json", tmp_path)


# -- the probes ----------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch, tmp_path):
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "name", [name for name in vars(probes) if name.endswith("_facts")], ids=lambda name: name
)
def test_a_probe_that_fails_is_a_fact(clean, call, monkeypatch, name):
    def fail(*args):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(probes, name, fail)
    facts = probes.gather()
    part = facts.choice if name == "choice_facts" else getattr(facts, name.removesuffix("_facts"))
    if name != "nvrtc_facts" or facts.cupy.version is not None:
        assert part.error == "RuntimeError: first line"
    call(facts)  # and is shown without another failure


def _library(code=0, count=2):
    def device_count(pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = count
        return 0

    return SimpleNamespace(cuInit=lambda flags: code, cuDeviceGetCount=device_count)


def test_driver_of_the_kernel_and_of_the_process(monkeypatch, tmp_path):
    module = tmp_path / "version"
    module.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Rel\n")
    monkeypatch.setattr(probes, "MODULE_VERSION", module)
    driver = SimpleNamespace(
        library=_library(),
        version=lambda: (13, 0),
        error_name=lambda code: f"CUDA_ERROR_X ({code})",
    )
    monkeypatch.setattr(probes, "open_driver", lambda: driver)
    assert probes.driver_facts() == Driver("580.65.06", (13, 0), 2)
    driver.library = _library(code=802)
    assert probes.driver_facts() == Driver("580.65.06", (13, 0), 0, "CUDA_ERROR_X (802)")

    def none():
        raise LaunchError("CUDA driver: cannot be opened")

    monkeypatch.setattr(probes, "open_driver", none)
    assert probes.driver_facts() == Driver("580.65.06", error="CUDA driver: cannot be opened")


def test_every_cupy_wheel_is_found_and_a_missing_one_is_no_error(monkeypatch):
    def dist(name, version):
        return SimpleNamespace(metadata={"Name": name}, version=version)

    wheels = [dist("cupy-cuda12x", "14.0"), dist("cupy-cuda13x", "14.1"), dist("cupy-stubs", "1")]
    monkeypatch.setattr(metadata, "distributions", lambda: wheels)
    monkeypatch.setitem(sys.modules, "cupy", None)
    found = probes.cupy_facts()
    assert found.wheels == {"cupy-cuda12x": "14.0", "cupy-cuda13x": "14.1"}
    assert found.error.startswith("ModuleNotFoundError")
    monkeypatch.setattr(metadata, "distributions", list)
    assert probes.cupy_facts() == Cupy()


def test_a_cache_that_cannot_be_written(clean, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = probes.gather().cache
    assert found.why_not == "Not a directory"
    assert Path(found.folder).parent == tmp_path
    assert found.asked == str(tmp_path / "file" / "below")


def test_every_variable_is_checked(clean, monkeypatch, tmp_path):
    values = {
        "KDA_JIT_BACKEND": "tritn",
        "KDA_JIT_ARCH": "sm_90",
        "KDA_JIT_SCHEDULE": "hoper",
        "KDA_JIT_KERNELS_SRC": str(tmp_path / "nowhere"),
        "KDA_JIT_FLASHKDA_SO": str(tmp_path / "nowhere.so"),
        "KDA_JIT_VLLM": "maybe",
        "KDA_JIT_CAPTURE": str(tmp_path / "file" / "below"),
        "KDA_JIT_CAPTURE_CALLS": "0",
        "KDA_JIT_CAPTURE_MIB": "much",
        "KDA_JIT_BACKND": "cuda",
    }
    (tmp_path / "file").write_text("")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    found = probes.environment_facts(Torch(gpus=(H200,)))
    assert found.wrong.keys() == values.keys()
    assert found.wrong["KDA_JIT_BACKEND"].endswith("Did you mean 'triton'?")
    assert found.wrong["KDA_JIT_ARCH"].endswith("Meant sm_90a? The suffix is part of the target.")
    assert found.wrong["KDA_JIT_BACKND"] == "is no variable of kda_jit"
    assert found.values["KDA_JIT_VLLM"] == "maybe"


def test_a_path_that_may_not_be_looked_at_is_one_that_is_not_there(clean, monkeypatch):
    monkeypatch.setenv("KDA_JIT_FLASHKDA_SO", "a" * 5000)
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", "a" * 5000)
    found = probes.environment_facts(Torch())
    assert found.wrong.keys() == {"KDA_JIT_FLASHKDA_SO", "KDA_JIT_KERNELS_SRC"}
    assert probes._sources()[0] is None


def test_its_own_trial_is_not_captured(clean, monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_JIT_CAPTURE", str(tmp_path))
    monkeypatch.setattr(capturing, "recorder", capturing._AsTheEnvironmentSays())
    assert probes.trial_facts().passed
    assert list(tmp_path.iterdir()) == []


def test_packages_that_nobody_could_look_at_are_not_called_right(call, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["no requirement !"])
    assert re.search(r"-  +packages +none looked at: InvalidRequirement", call(probes.gather())[1])


def test_installed_versions_are_held_against_what_is_asked_for(monkeypatch):
    lines = ["torch>=99", "numpy>=2.0", "absent>1", "rich>=99; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    (misfit,) = probes.packages_facts().misfits
    assert (misfit.package, misfit.wanted) == ("torch", ">=99")

    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    assert probes.packages_facts() == Packages()


def test_headers_are_those_that_cupy_would_take(monkeypatch, tmp_path):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="comes with CuPy")
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13010\n")
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: str(tmp_path))
    assert probes.headers_facts() == Headers(str(tmp_path), (13, 1))
    monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
    assert probes.headers_facts() == Headers()


# -- the command itself --------------------------------------------------------------------------

BLOCK_CUPY = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "cupy":
            raise ImportError("libcublas.so.12: hidden by a test")
sys.meta_path.insert(0, Blocker())
"""
HIDE_NVRTC = """
import cuda.pathfinder as pathfinder
def gone(name, *rest):
    raise pathfinder.DynamicLibNotFoundError(f"{name}: hidden by a test")
pathfinder.load_nvidia_dynamic_lib = gone
"""


@NEEDS_NVRTC
@CPU_ONLY
@pytest.mark.parametrize(
    "code, line",
    [
        (BLOCK_CUPY, r"1. broken, CuPy: cupy-cuda1"),
        (HIDE_NVRTC, r"1. broken, NVRTC: CuPy finds no libnvrtc ("),
        ("", None),
    ],
    ids=["CuPy hidden", "NVRTC hidden", "as it is"],
)
def test_the_command_in_a_process_of_its_own(tmp_path, code, line):
    (tmp_path / "sitecustomize.py").write_text(code)
    env = {name: text for name, text in os.environ.items() if not name.startswith("KDA_JIT_")}
    root = str(Path(__file__).resolve().parent.parent)
    env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "KDA_JIT_CACHE_DIR": str(tmp_path / "c")}
    command = [sys.executable, "-m", "kda_jit", "doctor"]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.strip() == ""
    assert "A prefill runs, by torch on cpu" in done.stdout
    if line is None:
        assert "broken" not in done.stdout
        assert done.returncode == 0
    else:
        assert line in done.stdout
        assert "hidden by a test" in done.stdout
        assert "\n   pip " in done.stdout
        assert done.returncode == 1
