"""Finds kernels_src, reads a kernel with all that it includes, and digests it. No GPU, no torch.

The digest covers the file and, recursively, every header that it names and that is found, so an
edit to any of them gives a new key, and an edit elsewhere does not. Headers in `#if 0` count too:
that costs a needless rebuild, never a stale kernel.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kda_jit import settings
from kda_jit.errors import InputError

_INCLUDE = re.compile(rb'(?:#|%:)[ \t\f\v]*include[ \t\f\v]*(?:"([^"\n]+)"|<([^>\n]+)>|(\S+))')
_SUFFIXES = frozenset({".cu", ".cuh", ".h", ".hpp"})

_override: ContextVar[Path | None] = ContextVar("kda_jit_kernels_src", default=None)


@dataclass(frozen=True, slots=True)
class SourceSet:
    """One kernel's text as it was read.

    root     folder that is NVRTC's include path
    path     the file's own path; errors and line tables name it. It need not exist for a string.
    text     the file's text
    files    (path under root, digest) of the file and of every header found, sorted
    digest   sha256 over all of `files`, in hex
    """

    root: Path
    path: Path
    text: str
    files: tuple[tuple[str, str], ...]
    digest: str


def root() -> Path:
    """The kernels_src folder in use: that of `using`, the environment, the wheel or the checkout.

    Raises InputError where it does not exist.
    """
    package = Path(__file__).resolve().parent.parent
    asked = _override.get() or settings.kernels_src()
    if asked is not None:
        if not os.path.isdir(asked):  # a Path raises where it may not look
            raise InputError(f"kernels_src: expected a folder of CUDA sources, got {asked}.")
        return asked.resolve()
    # The wheel's own comes first: beside an installed package, ../kernels_src is someone else's.
    candidates = (package / "kernels_src", package.parent / "kernels_src")
    for folder in candidates:
        if folder.is_dir():
            return folder
    looked = " and ".join(map(str, candidates))
    raise InputError(f"kernels_src: not found in {looked}. Set {settings.KERNELS_SRC.name} to it.")


@contextlib.contextmanager
def using(folder: str | Path | None) -> Iterator[None]:
    """Take kernels from `folder` inside the block (None: the usual ones), in this thread alone."""
    token = _override.set(None if folder is None else Path(folder))
    try:
        yield
    finally:
        _override.reset(token)


def read(file: str, *, folder: Path | None = None, text: str | None = None) -> SourceSet:
    """Read `file` (a path under kernels_src, such as "sm80/kda_prefill.cu") and its headers.

    With `text` that string is the file's content, and `file` only names it in errors; its includes
    are looked up beside that name and then under kernels_src, as for a file.
    """
    base = root() if folder is None else folder.resolve()
    path = base / file
    if text is None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(
                f"file: expected a kernel under {base}, got {file!r} ({error.strerror})."
            ) from None
    else:
        content = text.encode()
    found: dict[str, str] = {}
    _visit(base, path.parent, path, content, found)
    try:
        shown = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"file: expected {path} to be UTF-8, got {error}.") from None
    files = tuple(sorted(found.items()))
    digest = sha256("\0".join(f"{name}\0{value}" for name, value in files).encode()).hexdigest()
    return SourceSet(base, path, shown, files, digest)


def _visit(base: Path, home: Path, path: Path, content: bytes, found: dict[str, str]) -> None:
    """Add `path` and what it includes to `found`, depth first, each file once.

    `home` is the folder of the kernel itself, which NVRTC searches too. Where a name fits several
    folders all of them count, so the digest need not know the order of NVRTC's search.
    """
    found[_name(base, path)] = sha256(content).hexdigest()
    for match in _INCLUDE.finditer(re.sub(rb"\\\r?\n", b"", content)):
        quoted, angled, computed = match.groups()
        if computed is not None:
            # A macro names the header; which one is not ours to work out, so all of them count.
            headers = [file for file in sorted(base.rglob("*")) if file.suffix in _SUFFIXES]
        else:
            name = (quoted or angled).decode()
            headers = [place / name for place in (path.parent, home, base)]
        for header in headers:
            # Resolved, so that "a/../b.cuh" and "b.cuh" are one file and a cycle ends.
            header = header.resolve()
            if header.is_file() and _name(base, header) not in found:
                _visit(base, home, header, header.read_bytes(), found)


def _name(base: Path, path: Path) -> str:
    """Path under the root where it lies there, so that a checkout may move without a new key."""
    try:
        return path.relative_to(base).as_posix()
    except ValueError:
        return path.as_posix()
