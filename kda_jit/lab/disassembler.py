"""Finds nvdisasm and runs it. The CUDA toolkit has one, a wheel of its own, and Triton's wheel."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from kda_jit.errors import KdaError

_WHEEL = "nvidia-cuda-nvdisasm"
_PATIENCE_S = 120.0


class DisassemblerError(KdaError, RuntimeError):
    """There is no nvdisasm, or it does not take a binary."""


def find() -> Path:
    """nvdisasm: that of the PATH, of its wheel, or of Triton's wheel.

    Raises DisassemblerError, with the command that installs one, where there is none.
    """
    found = shutil.which("nvdisasm")
    if found is not None:
        return Path(found)
    for place in (_of_wheel(), _of_triton()):
        if place is not None and place.is_file():
            return place
    raise DisassemblerError(
        f"nvdisasm: expected it on the PATH, in the package {_WHEEL} or in triton, found it in "
        f"none. Install it: pip install {_WHEEL}"
    )


def disassemble(cubin: Path) -> str:
    """SASS of every kernel of a cubin, with the source lines that -lineinfo left in it."""
    program = find()
    ran = subprocess.run(
        [str(program), "--print-code", "--print-line-info", str(cubin)],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    if ran.returncode != 0:
        words = (ran.stderr or ran.stdout).strip().partition("\n")[0]
        raise DisassemblerError(
            f"{program}: does not take {cubin} ({words}). It may be older than the target."
        )
    return ran.stdout


def _of_wheel() -> Path | None:
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.stem == "nvdisasm"), None)


def _of_triton() -> Path | None:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
