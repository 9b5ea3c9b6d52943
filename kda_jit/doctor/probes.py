"""Looks at the machine. No probe raises, whatever is broken: what it met is its `error`."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

from kda_jit import capturing, settings
from kda_jit._version import __version__
from kda_jit.api import prefill
from kda_jit.backends.base import Query, device_capability, last_launch
from kda_jit.backends.environment import environment_problems
from kda_jit.doctor.facts import (
    Cache,
    Choice,
    Cupy,
    Driver,
    Environment,
    Facts,
    Gpu,
    Headers,
    Misfit,
    Nvrtc,
    Packages,
    Torch,
    Trial,
    Triton,
    Version,
)
from kda_jit.errors import InputError, KdaError
from kda_jit.jit import arch_for, cache, sources, unavailable_reason
from kda_jit.jit.driver import driver as open_driver
from kda_jit.resolver import asked_backend, explain, resolve
from kda_jit.testing import Case, Limit, plain_loss, worst_block_error

MODULE_VERSION = Path("/proc/driver/nvidia/version")
#: Other variables that decide what is found here.
RELATED = ("CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME", "TRITON_INTERPRET", "CC")
_EXTRAS = ("", "cuda12", "cuda13", "triton", "cli", "demo")
_TRIAL = Case(seed=0, lengths=(80,), heads=1, regime="random")
HEAD_DIM = 128

T = TypeVar("T")


def gather() -> Facts:
    """Everything. Takes seconds: on a GPU, kernels are built for it and run."""
    found_torch = _caught(torch_facts, Torch)
    cupy = _caught(cupy_facts, Cupy)
    targets = _targets(found_torch)
    nvrtc = Nvrtc()
    if cupy.version is not None and cupy.error is None:
        nvrtc = _caught(lambda: nvrtc_facts(targets), Nvrtc)
    folder, why_no_sources = _sources()
    choice = _caught(choice_facts, Choice)
    return Facts(
        kda_jit=__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        driver=_caught(driver_facts, Driver),
        torch=found_torch,
        cupy=cupy,
        nvrtc=nvrtc,
        headers=_caught(headers_facts, Headers),
        triton=_caught(triton_facts, Triton),
        sources=folder,
        sources_error=why_no_sources,
        cache=_caught(cache_facts, Cache),
        environment=_caught(lambda: environment_facts(found_torch), Environment),
        packages=_caught(packages_facts, Packages),
        choice=choice,
        trial=_caught(trial_facts, Trial) if choice.chosen else Trial(),
    )


def _caught(probe: Callable[[], T], kind: Callable[..., T]) -> T:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each of them is a finding, in better words
            return probe()
    except Exception as error:
        return kind(error=_words(error))


def _words(error: Exception) -> str:
    """An error of ours has its own words; another one its type and first line, too."""
    if isinstance(error, KdaError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(": ")


def driver_facts() -> Driver:
    """Asks libcuda itself, since torch says only whether it can use it."""
    module = None
    if MODULE_VERSION.is_file():
        match = re.search(r"\s(\d{3}\.[\d.]+)\s", MODULE_VERSION.read_text())
        module = match[1] if match else None
    try:
        cuda = open_driver()
        release = cuda.version()
    except KdaError as error:
        return Driver(module, error=str(error))
    count = ctypes.c_int()
    code = cuda.library.cuInit(0) or cuda.library.cuDeviceGetCount(ctypes.byref(count))
    return Driver(module, release, count.value, cuda.error_name(code) if code else None)


def torch_facts() -> Torch:
    version = str(torch.__version__)
    built = _release(torch.version.cuda) if torch.version.cuda else None
    error = None
    if built is not None and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as problem:
            error = _words(problem)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Torch(version, built, tuple(_gpu(index) for index in range(count)), error)


def _gpu(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    arch = arch_for((found.major, found.minor))
    return Gpu(
        found.name,
        (found.major, found.minor),
        None if arch is None else arch.target,
        found.multi_processor_count,
        round(found.total_memory / 2**30, 1),
    )


def cupy_facts() -> Cupy:
    wheels = {
        name: dist.version
        for dist in metadata.distributions()
        if re.fullmatch(r"cupy(-cuda\d+x|-rocm[\w-]+)?", name := dist.metadata["Name"] or "")
    }
    try:
        import cupy
        from cupy.cuda import driver as build
    except Exception as error:
        if not wheels and isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return Cupy()
        return Cupy(wheels, error=_words(error))
    return Cupy(wheels, str(cupy.__version__), int(build.get_build_version()) // 1000)


def _targets(found: Torch) -> list[str]:
    """Of every GPU here; without one, of the portable kernel."""
    targets = [gpu.target for gpu in found.gpus if gpu.target is not None]
    return list(dict.fromkeys(targets)) or ([] if found.gpus else ["sm_80"])


def nvrtc_facts(targets: list[str]) -> Nvrtc:
    """Of the NVRTC that CuPy loads."""
    from kda_jit.jit.compiler import nvrtc_version

    version = nvrtc_version()
    return Nvrtc(version, _loaded("libnvrtc.so"), {t: unavailable_reason(t) for t in targets})


def _loaded(name: str) -> str | None:
    """The file of a library that is in this process; None where there is no such list."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((line.split()[-1] for line in lines if f"/{name}" in line), None)


def headers_facts() -> Headers:
    """By CuPy's own search, that of cuda-pathfinder."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return Headers()
    folder = find_nvidia_header_directory("cudart")
    if folder is None:
        return Headers()
    text = (Path(folder) / "cuda_runtime_api.h").read_text(errors="replace")
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return Headers(folder, None if match is None else _of_number(int(match[1])))


def triton_facts() -> Triton:
    compiler = os.environ.get("CC") or next(
        (found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None
    )
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        version = None
    try:
        import triton
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        known = version is None and absent
        return Triton(version, compiler=compiler, error=None if known else _words(error))
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return Triton(version or str(triton.__version__), interpreted, compiler)


def _sources() -> tuple[str | None, str | None]:
    try:
        return str(sources.root()), None
    except InputError as error:
        return None, str(error)


def cache_facts() -> Cache:
    asked = settings.cache_dir()
    why_not = cache.why_not_writable(asked)
    found = cache.info()
    return Cache(str(asked), str(cache.folder()), why_not, found.entries, found.failed, found.bytes)


def environment_facts(found: Torch) -> Environment:
    """Every variable of ours with the check that a call would make of it."""
    known = {setting.name for setting in settings.SETTINGS}
    ours = {name: text for name, text in sorted(os.environ.items()) if name.startswith("KDA_JIT_")}
    wrong = {name: "is no variable of kda_jit" for name in ours if name not in known}
    checks: dict[str, Callable[[], object]] = {
        settings.BACKEND.name: lambda: asked_backend("auto"),
        settings.VLLM.name: settings.vllm,
        settings.CAPTURE_CALLS.name: settings.capture_calls,
        settings.CAPTURE_MIB.name: settings.capture_bytes,
    }
    for name, check in checks.items():
        try:
            check()
        except KdaError as error:
            wrong[name] = str(error).removeprefix(f"{name}: ")
    library = settings.flashkda_so()
    if library is not None and not os.path.isfile(library):  # a Path raises where it may not look
        wrong[settings.FLASHKDA_SO.name] = f"expected a library, {library} does not exist"
    calls = settings.capture()
    if calls is not None and (why_not := cache.why_not_writable(calls)) is not None:
        wrong[settings.CAPTURE.name] = f"expected a folder to write to, got {calls} ({why_not})"
    capability = found.gpus[0].capability if found.gpus else None
    problems = environment_problems(capability)
    wrong |= {name: why for name, why in problems.items() if name in ours}
    related = {name: os.environ[name] for name in RELATED if name in os.environ}
    return Environment(ours | related, wrong)


def packages_facts() -> Packages:
    """What kda_jit asks for in the extras that matter here, as far as it is installed."""
    from packaging.requirements import Requirement

    misfits = {}
    try:
        lines = metadata.requires("kda_jit") or []
    except metadata.PackageNotFoundError:
        lines = []  # a checkout on the path: nothing was asked for
    for wanted in map(Requirement, lines):
        marker = wanted.marker
        if marker is not None and not any(marker.evaluate({"extra": x}) for x in _EXTRAS):
            continue
        try:
            installed = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            continue
        if not wanted.specifier.contains(installed, prereleases=True):
            misfits[wanted.name] = Misfit(wanted.name, installed, str(wanted.specifier))
    return Packages(tuple(misfits.values()))


def choice_facts() -> Choice:
    query = _query()
    reasons = explain(query)
    try:
        return Choice(str(query.device), resolve(query).backend, reasons)
    except KdaError as error:
        return Choice(str(query.device), None, reasons, str(error))


def trial_facts() -> Trial:
    """Runs it, and holds it against the recurrence in float64."""
    x = _TRIAL.tensors(_query().device, torch.bfloat16, HEAD_DIM)
    with torch.no_grad(), capturing.unseen():
        out, _ = prefill(*x.args, **x.kwargs)
    launch = last_launch()
    want = x.reference()
    worst = worst_block_error(out, want.out, x.cu_seqlens)
    allowed = Limit(plain_loss(x, want).out).allowed
    ran = {} if launch is None else launch.facts()
    return Trial(sum(_TRIAL.lengths), ran, worst.error, allowed)


def _query() -> Query:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Query(
        K=HEAD_DIM,
        V=HEAD_DIM,
        dtype=torch.bfloat16,
        lower_bound=-5.0,
        device=device,
        capability=device_capability(device),
    )


def _release(text: str) -> Version:
    """ "12.9" or "12.9.1" as (12, 9)."""
    major, _, rest = text.partition(".")
    return int(major), int(rest.partition(".")[0] or 0)


def _of_number(number: int) -> Version:
    """12090, as CUDA writes 12.9."""
    return number // 1000, number % 1000 // 10
