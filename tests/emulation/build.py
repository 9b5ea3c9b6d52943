"""Compiles the emulated machine and translated kernels with the C++ compiler of this computer.

Libraries lie in a temporary folder under a name that says what they were made of: a second process
finds them, or waits for the one that is at it.
"""

from __future__ import annotations

import fcntl
import functools
import getpass
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.emulation.sources import HERE, SUFFIXES, entry_table, write_tree

#: No contraction: a product and a sum are two roundings, wherever a function was inlined.
_FLAGS = (
    "-std=c++17", "-shared", "-fPIC", "-g1", "-ffp-contract=off", "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter",
)  # fmt: skip
_MACHINE = sorted((HERE / "simt").glob("*.cpp"))


class BuildError(Exception):
    """The compiler's own words."""


@functools.cache
def unavailable_reason() -> str | None:
    """Why nothing can be built here, None if it can."""
    if sys.platform != "linux":
        return f"emulated kernels need Linux, this is {sys.platform}"
    compiler = _compiler()
    if shutil.which(compiler) is None:
        return f"emulated kernels need a C++ compiler (g++ 12), there is no {compiler}"
    probe = "#include <cmath>\n_Float16 half(float x) { return static_cast<_Float16>(x); }\n"
    command = [compiler, "-std=c++17", "-x", "c++", "-", "-fsyntax-only"]
    ran = subprocess.run(command, input=probe, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return f"emulated kernels need C++17 with _Float16 (g++ 12), {compiler} has it not"
    return None


@functools.cache
def machine_library() -> Path:
    """The machine itself; kernels are linked against it. One a process, whose files may change."""
    inputs = [path.read_bytes() for path in sorted((HERE / "simt").iterdir())]

    def build(folder: Path, target: Path) -> None:
        flags = (*_FLAGS, *_native(), "-O3", "-fno-trapping-math")
        _run([_compiler(), *flags, *map(str, _MACHINE), "-ldl", "-o", str(target)])

    return _cached("machine", [*inputs, *_identity()], build)


def kernel_library(folder: Path, file: str, entries: Sequence[str], arch: int) -> Path:
    """`file` of the kernels_src `folder`, for code that asks for __CUDA_ARCH__ `arch`."""
    machine = machine_library()
    inputs = [repr((folder.name, file, tuple(entries), arch, machine.name)).encode()]
    for path in sorted(folder.rglob("*")):
        if path.suffix in SUFFIXES:
            inputs += (str(path.relative_to(folder)).encode(), path.read_bytes())
    inputs += [p.read_bytes() for p in (*sorted((HERE / "ptx").iterdir()), HERE / "sources.py")]

    def build(scratch: Path, target: Path) -> None:
        write_tree(folder, scratch / "kernels")
        text = (folder / file).read_text()
        whole = scratch / "whole.cpp"
        lines = ['#include "simt/device.hpp"', f'#include "{file}"', entry_table(text, entries)]
        whole.write_text("\n".join(lines))
        include = (f"-I{scratch / 'kernels'}", f"-I{HERE}", f"-ffile-prefix-map={Path.cwd()}=.")
        # Hidden: a kernel may have the name of a function of libc, or of another library's kernel.
        own = ("-O1", "-fvisibility=hidden", f"-D__CUDA_ARCH__={arch}")
        flags = (*_FLAGS, *_native(), *own, *include)
        _run([_compiler(), *flags, str(whole), str(machine), "-Wl,-z,defs", "-o", str(target)])

    return _cached(Path(file).stem, [*inputs, *_identity()], build)


def source_line(library: str, offset: str) -> str:
    """Where in the kernels that is, the innermost of inlined functions first; "" if unknown."""
    if shutil.which("addr2line") is None:
        return ""
    command = ["addr2line", "-i", "-e", library, offset]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    places = [line.split(" (")[0].removeprefix("./") for line in ran.stdout.splitlines()]
    return " < ".join(p for p in places if not p.startswith("??") and "/emulation/" not in p)


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _native() -> tuple[str, ...]:
    """Instructions of this very processor, for 16-bit floats, if the compiler knows the word."""
    command = [_compiler(), "-march=native", "-x", "c++", "-", "-fsyntax-only"]
    ran = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    return ("-march=native",) if ran.returncode == 0 else ()


@functools.cache
def _identity() -> tuple[bytes, ...]:
    """The compiler and what it makes of -march=native: a folder may be shared by computers."""
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    command = [_compiler(), *_native(), "-E", "-dM", "-x", "c++", "/dev/null"]
    macros = subprocess.run(command, capture_output=True, check=True).stdout
    return version, macros, Path(__file__).read_bytes()


def _run(command: Sequence[str]) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{ran.stdout}{ran.stderr}")


@functools.cache
def _home() -> Path:
    folder = Path(tempfile.gettempdir()) / f"kda_jit-emulation-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to somebody else")
    return folder


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    with (_home() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cached(name: str, inputs: Sequence[bytes], build: Callable[[Path, Path], None]) -> Path:
    """The library made of `inputs`; build(scratch folder, target) makes it where there is none."""
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in inputs))
    key = f"{name}-{digest.hexdigest()[:16]}"
    target = _home() / f"lib{key}.so"
    if not target.exists():
        with _only_one(key):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=_home()) as scratch:
                    made = Path(scratch) / target.name
                    build(Path(scratch), made)
                    made.rename(target)
    return target
