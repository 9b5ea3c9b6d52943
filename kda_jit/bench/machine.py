"""What a number belongs to: the GPU, the versions under the package, and the code itself."""

from __future__ import annotations

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from kda_jit import __version__
from kda_jit.backends import cuda
from kda_jit.errors import CompileError
from kda_jit.jit import sources
from kda_jit.jit.compiler import nvrtc_version

from .report import CPU

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x")


def facts(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """The head of a run file. `commit`: where this is not a checkout."""
    found = _gpu(device) if device.type == "cuda" else _cpu()
    return {
        "gpu": short_name(found["name"]) if device.type == "cuda" else CPU,
        "date": datetime.date.today().isoformat(),
        "commit": commit or checkout_commit() or "unknown",
        "sources": source_digests(),
        "device": found,
        "versions": versions(),
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver_version(),
    }


def _cpu() -> dict[str, Any]:
    return {"name": platform.machine(), "threads": torch.get_num_threads()}


def short_name(name: str) -> str:
    """A GPU's name as people say it: "NVIDIA H200" -> "H200"."""
    return name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def versions() -> dict[str, str]:
    """Of everything between Python and the driver that decides a time."""
    found = {"kda_jit": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["cuda (torch)"] = str(torch.version.cuda)
    try:
        found["nvrtc"] = ".".join(map(str, nvrtc_version()))
    except CompileError as error:
        found["nvrtc"] = f"none: {error}"
    return found


def source_digests() -> dict[str, str]:
    """The first digits of each schedule's source digest: a commit says less in a changed tree."""
    return {name: sources.read(s.file).digest[:12] for name, s in cuda.SCHEDULES.items()}


def checkout_commit() -> str | None:
    """The commit of this checkout, with a plus where files differ from it; None outside of one."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _output("git", "-C", str(ROOT), "status", "--porcelain") else "")


def driver_version() -> str:
    """Such as 580.159.04; empty where nvidia-smi does not answer."""
    asked = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return asked.partition("\n")[0]


def _output(*command: str) -> str:
    """Standard output of a program; empty where it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
