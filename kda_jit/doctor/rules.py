"""What the facts mean: findings, each a line and what to type. Pure: nothing is looked at."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kda_jit.doctor.facts import Facts, dotted
from kda_jit.extras import install

#: Since when a driver runs CUDA 13.
DRIVER_FOR_13 = "580"
#: CUDA releases that torch has wheels for, newest first, with the driver's release that each needs.
_TORCH_WHEELS = (("cu130", (13, 0)), ("cu128", (12, 8)), ("cu126", (12, 0)))
_GENERATIONS = (12, 13)
#: What cuInit says -> what it means, what to type.
_DRIVER_ERRORS = {
    "CUDA_ERROR_NO_DEVICE": (
        "the driver is there and shows no GPU to this process",
        "nvidia-smi    # in a container: docker run --gpus all ...",
    ),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "the GPUs of this machine wait for the fabric manager",
        "sudo systemctl start nvidia-fabricmanager",
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda and the kernel module are of different versions, as after an update",
        "sudo reboot    # in a container: start it anew",
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "a libcuda for forward compatibility is found first, which this GPU does not allow",
        "unset LD_LIBRARY_PATH    # or take .../compat out of it",
    ),
    "CUDA_ERROR_UNKNOWN": (
        "the driver does not start",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm    # or reboot",
    ),
}


class Level(enum.StrEnum):
    """How much a finding matters."""

    BROKEN = "broken"  # installed or set, and does not work
    WARNING = "warning"  # works, but not as well as it could, or not everywhere
    NOTE = "note"  # nothing is wrong; it says what more there could be


@dataclass(frozen=True)
class Finding:
    """part: the row of the report that it is about; fix: a command, or what to do."""

    level: Level
    part: str
    words: str
    fix: str


def judge(facts: Facts) -> list[Finding]:
    """Every finding, the worst first."""
    found = [finding for rule in _RULES for finding in rule(facts)]
    found += _unexplained(facts, found)
    return sorted(found, key=lambda finding: list(Level).index(finding.level))


def extra(f: Facts) -> str:
    """cuda12 or cuda13: torch's generation where the driver runs it, else the driver's own."""
    ours = f.torch.cuda[0] if f.torch.cuda else None
    if ours in _GENERATIONS and (f.driver.cuda is None or f.driver.cuda[0] >= ours):
        return f"cuda{ours}"
    if f.driver.cuda is not None:
        return "cuda13" if f.driver.cuda[0] >= 13 else "cuda12"
    return "cuda13" if f.cupy.generation == 13 else "cuda12"


def _install(f: Facts, named: str = "") -> str:
    return install(named or extra(f))


def _anew(f: Facts) -> str:
    """Every CuPy off, the right one on: wheels of CuPy share files, so one alone must not go."""
    wheels = " ".join(f.cupy.wheels)
    return f"pip uninstall -y {wheels} && {_install(f)}" if wheels else _install(f)


def _nvrtc_anew(extra: str) -> str:
    """By its own name: `--upgrade` with an extra leaves alone what the extra allows."""
    wheel = "nvidia-cuda-nvrtc-cu12<13" if extra == "cuda12" else "nvidia-cuda-nvrtc<14"
    return f"pip install --upgrade --force-reinstall '{wheel}'"


def _torch_for(f: Facts) -> str:
    runs = f.driver.cuda or (12, 0)
    wheel = next((name for name, least in _TORCH_WHEELS if runs >= least), "cu126")
    return (
        f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}"
    )


# -- the rules, in the order of the report -------------------------------------------------------


def _driver(f: Facts) -> Iterator[Finding]:
    d = f.driver
    if d.cuda is None and d.module is not None:
        yield Finding(
            Level.BROKEN,
            "driver",
            f"the kernel has NVIDIA's driver {d.module}, but there is no libcuda.so.1 here "
            f"({d.error}): a container that was not given the GPU",
            "docker run --gpus all ...    # needs nvidia-container-toolkit on the host",
        )
    elif d.cuda is not None and d.error is not None:
        name = d.error.partition(" ")[0]
        hidden = f.environment.values.get("CUDA_VISIBLE_DEVICES")
        words, fix = _DRIVER_ERRORS.get(name, ("the driver does not start", "nvidia-smi"))
        if name == "CUDA_ERROR_NO_DEVICE" and hidden is not None:
            words = f"CUDA_VISIBLE_DEVICES={hidden!r} leaves no GPU to this process"
            yield Finding(Level.WARNING, "driver", words, "unset CUDA_VISIBLE_DEVICES")
        else:
            level = Level.WARNING if name == "CUDA_ERROR_NO_DEVICE" else Level.BROKEN
            yield Finding(level, "driver", f"{words}: {d.error}", fix)


def _torch(f: Facts) -> Iterator[Finding]:
    t, d = f.torch, f.driver
    if t.gpus or not d.devices:
        return
    if t.cuda is None:
        yield Finding(
            Level.WARNING,
            "torch",
            f"the driver shows {d.devices} GPU(s), but torch {t.version} is built without CUDA, so "
            "calls run on the CPU",
            _torch_for(f),
        )
    elif d.cuda is not None and t.cuda[0] > d.cuda[0]:
        yield Finding(
            Level.BROKEN,
            "torch",
            f"torch {t.version} is built for CUDA {dotted(t.cuda)}, the driver runs CUDA "
            f"{dotted(d.cuda)} and older: torch finds no GPU",
            f"{_torch_for(f)}    # or update the driver to {DRIVER_FOR_13} or later",
        )
    else:
        yield Finding(
            Level.BROKEN,
            "torch",
            f"the driver shows {d.devices} GPU(s), and torch {t.version} cannot use them: "
            f"{t.error or 'it does not say why'}",
            _torch_for(f),
        )


def _cupy(f: Facts) -> Iterator[Finding]:
    c = f.cupy
    names = ", ".join(f"{name} {version}" for name, version in c.wheels.items())
    if len(c.wheels) > 1:
        level = Level.BROKEN if c.error else Level.WARNING
        yield Finding(
            level, "CuPy", f"{names} are installed over each other; there may be one", _anew(f)
        )
    elif c.error is not None:
        yield Finding(
            Level.BROKEN, "CuPy", f"{names or 'CuPy'} cannot be imported: {c.error}", _anew(f)
        )
    elif c.version is None:
        yield _no_cupy(f)
    elif c.generation is not None:
        yield from _cupy_fits(f, c.generation)


def _no_cupy(f: Facts) -> Finding:
    if f.torch.gpus:
        words = "not installed, so the CUDA kernels, the fastest, cannot be built"
        return Finding(Level.WARNING, "CuPy", words, _install(f))
    words = "not installed; without a GPU only `kda-jit compile` would want it"
    return Finding(Level.NOTE, "CuPy", words, _install(f))


def _cupy_fits(f: Facts, generation: int) -> Iterator[Finding]:
    if f.driver.cuda is not None and generation > f.driver.cuda[0]:
        yield Finding(
            Level.BROKEN,
            "CuPy",
            f"CuPy {f.cupy.version} is built for CUDA {generation}, the driver runs CUDA "
            f"{dotted(f.driver.cuda)} and older",
            _anew(f),
        )
    elif _driver_runs(f) and f.torch.cuda is not None and generation != f.torch.cuda[0]:
        yield Finding(
            Level.WARNING if f.torch.gpus else Level.NOTE,
            "CuPy",
            f"CuPy {f.cupy.version} is built for CUDA {generation}, torch {f.torch.version} for "
            f"CUDA {dotted(f.torch.cuda)}: two generations of CUDA's libraries in one process",
            _anew(f),
        )


def _driver_runs(f: Facts) -> bool:
    """Whether torch is not too new for the driver: else it is torch that has to change."""
    d, t = f.driver.cuda, f.torch.cuda
    return d is None or t is None or t[0] <= d[0]


def _nvrtc(f: Facts) -> Iterator[Finding]:
    n = f.nvrtc
    # CuPy looks for the library of its own generation.
    own = f"cuda{f.cupy.generation}" if f.cupy.generation in _GENERATIONS else extra(f)
    if n.error is not None:
        words = n.error.removeprefix("NVRTC: ")
        yield Finding(Level.BROKEN, "NVRTC", words, _install(f, own))
    for target, why_not in n.targets.items():
        if why_not is not None:
            yield Finding(
                Level.BROKEN,
                "NVRTC",
                f"NVRTC {dotted(n.version)} builds nothing for {target}: {why_not}",
                _nvrtc_anew(own),
            )
    release = f.driver.cuda
    if n.version is not None and release is not None and n.version > release:
        forced = f.environment.values.get("KDA_JIT_ARCH", "")
        if forced.startswith("compute_"):
            yield Finding(
                Level.BROKEN,
                "NVRTC",
                f"KDA_JIT_ARCH={forced} leaves PTX of NVRTC {dotted(n.version)} to a driver that "
                f"runs CUDA {dotted(release)} and older",
                "unset KDA_JIT_ARCH",
            )


def _headers(f: Facts) -> Iterator[Finding]:
    h, n = f.headers, f.nvrtc
    if h.cuda is None or n.version is None or h.cuda == n.version:
        return
    package = "nvidia-cuda-runtime-cu12" if n.version[0] == 12 else "nvidia-cuda-runtime"
    yield Finding(
        Level.WARNING,
        "headers",
        f"those of CUDA {dotted(h.cuda)} in {h.folder} beside NVRTC {dotted(n.version)}. The "
        "kernels of kda_jit include none; CuPy's own, and yours with cuda_bf16.h, may not compile",
        f"pip install '{package}=={dotted(n.version)}.*'",
    )


def _triton(f: Facts) -> Iterator[Finding]:
    t = f.triton
    if t.error is not None:
        yield Finding(
            Level.BROKEN,
            "Triton",
            f"triton {t.version or ''} cannot be imported: {t.error}".replace("  ", " "),
            f"pip uninstall -y triton && {install('triton')}",
        )
    elif not f.torch.gpus:
        return
    elif t.version is None:
        words = "not installed; calls that the CUDA kernels do not take run in torch, slowly"
        yield Finding(Level.WARNING, "Triton", words, _install(f, "triton"))
    elif t.interpreted:
        words = "TRITON_INTERPRET=1 takes its kernels off the GPU"
        yield Finding(Level.WARNING, "Triton", words, "unset TRITON_INTERPRET")
    elif t.compiler is None:
        words = "there is no C compiler (CC, cc, gcc, clang), with which it builds its launcher"
        yield Finding(Level.WARNING, "Triton", words, "sudo apt-get install gcc")


def _sources(f: Facts) -> Iterator[Finding]:
    if f.sources_error is not None and "KDA_JIT_KERNELS_SRC" not in f.environment.wrong:
        fix = "pip install --force-reinstall --no-deps kda_jit    # or '.' in a checkout"
        yield Finding(Level.BROKEN, "sources", f.sources_error, fix)


def _cache(f: Facts) -> Iterator[Finding]:
    c = f.cache
    if c.error is not None:
        yield Finding(Level.BROKEN, "cache", c.error, "kda-jit cache clear")
    elif c.why_not is not None:
        yield Finding(
            Level.WARNING,
            "cache",
            f"cannot write to {c.asked} ({c.why_not}): kernels go to {c.folder}, and are compiled "
            "again once that is cleared",
            "export KDA_JIT_CACHE_DIR=/a/folder/that/you/can/write",
        )


def _environment(f: Facts) -> Iterator[Finding]:
    if f.environment.error is not None:
        yield Finding(Level.BROKEN, "environment", f.environment.error, "env | grep KDA_JIT_")
    for name, words in f.environment.wrong.items():
        unknown = words.startswith("is no variable")
        level = Level.WARNING if unknown else Level.BROKEN
        shown = f"{name} {words}" if unknown else f"{name}: {words}"
        yield Finding(level, "environment", shown, f"unset {name}")


def _packages(f: Facts) -> Iterator[Finding]:
    for misfit in f.packages.misfits:
        yield Finding(
            Level.WARNING,
            "packages",
            f"{misfit.package} {misfit.installed} is installed, kda_jit wants {misfit.wanted}",
            f"pip install '{misfit.package}{misfit.wanted}'",
        )


def _prefill(f: Facts) -> Iterator[Finding]:
    if f.choice.error is not None:
        asked = "KDA_JIT_BACKEND" in f.environment.values
        fix = "unset KDA_JIT_BACKEND" if asked else "python -m kda_jit explain"
        if "KDA_JIT_BACKEND" not in f.environment.wrong:
            yield Finding(Level.BROKEN, "prefill", f"none can run: {f.choice.error}", fix)
    elif f.trial.error is not None:
        words = f"one of {f.choice.chosen} failed: {f.trial.error}"
        yield Finding(Level.BROKEN, "prefill", words, _another_backend(f))
    elif not f.trial.passed:
        words = (
            f"one of {f.choice.chosen} is {f.trial.off:.1e} off in its worst block, allowed is "
            f"{f.trial.allowed:.1e}"
        )
        yield Finding(Level.BROKEN, "prefill", words, f"kda-jit verify --backend {f.choice.chosen}")


def _another_backend(f: Facts) -> str:
    others = [name for name, why in f.choice.reasons.items() if not why and name != f.choice.chosen]
    return (
        f"export KDA_JIT_BACKEND={others[0]}    # until that is mended"
        if others
        else "kda-jit info"
    )


_RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _driver, _torch, _cupy, _nvrtc, _headers, _triton, _sources, _cache, _environment, _packages,
    _prefill,
)  # fmt: skip


def _unexplained(f: Facts, found: list[Finding]) -> list[Finding]:
    """The CUDA backend refuses a GPU that it is made for, and no finding so far says why."""
    reasons = f.choice.reasons.get("cuda", ())
    told = {finding.part for finding in found} & {"driver", "torch", "CuPy", "NVRTC", "environment"}
    supported = any(gpu.target is not None for gpu in f.torch.gpus)
    if not reasons or told or not supported or not any("CuPy and NVRTC" in r for r in reasons):
        return []
    return [Finding(Level.BROKEN, "NVRTC", f"the cuda backend {'; '.join(reasons)}", _anew(f))]
