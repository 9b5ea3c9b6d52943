"""Disk cache of compiled kernels, shared by all processes of a user.

    <cache>/<key>/<digest>.cubin     the binary (.ptx for a PTX target), named by its own content
    <cache>/<key>/meta.json          names that file, its sha256, the log and the facts about it
    <cache>/<key>.lock               held while a process compiles that key, so that others wait
    <cache>/failed/<key>/            source, spec, flags and log of what did not compile

An entry exists when its meta.json does: that file is written last, under a temporary name, and
moved into place in one step. A reader therefore sees a whole entry or none. Whatever does not check
out (truncated, edited, of another format) is a miss, and the next compile replaces it.

Where the folder cannot be written, entries go to a temporary folder of this user instead; what the
unwritable folder already holds is still read, so an image may ship a filled, read-only cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kda_jit import settings
from kda_jit.errors import CompileError, InputError

try:
    import fcntl
except ImportError:  # not a POSIX system: processes then compile side by side, which is only slower
    fcntl = None  # type: ignore[assignment]

_FORMAT = 1
_KEY = re.compile(r"[0-9a-f]{16}")
_LOCK_PATIENCE_S = 60.0

_writable: dict[Path, Path] = {}
"""Asked-for folder -> folder that is written; filled on first use, so the warning comes once."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One verified entry: the binary's path, and the facts stored with it (plain JSON data)."""

    path: Path
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Info:
    """What `python -m kda_jit cache info` prints. `entries` counts whole ones."""

    folders: tuple[Path, ...]
    entries: int
    failed: int
    bytes: int


def folder() -> Path:
    """The folder that new entries go to. Warns once where that is not the one asked for."""
    asked = settings.cache_dir()
    if asked not in _writable:
        reason = why_not_writable(asked)
        if reason is None:
            _writable[asked] = asked
        else:
            _writable[asked] = _temporary()
            warnings.warn(
                f"kda_jit: cannot write to the kernel cache {asked} ({reason}); kernels are cached "
                f"in {_writable[asked]} instead. Set {settings.CACHE_DIR.name} to another folder.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _writable[asked]


def lookup(key: str) -> Entry | None:
    """The entry of `key`, with every byte checked, or None for a miss."""
    for place in _places():
        entry = _read(place / key, key)
        if entry is not None:
            return entry
    return None


def publish(key: str, binary: bytes, suffix: str, facts: Mapping[str, Any]) -> Entry:
    """Store an entry and return it as a reader would see it. Safe beside any number of writers.

    suffix   "cubin" or "ptx"
    facts    JSON data: log, resources, spec, versions
    """
    try:
        try:
            return _write(folder() / key, key, binary, suffix, facts)
        except FileNotFoundError:  # cleared meanwhile
            return _write(folder() / key, key, binary, suffix, facts)
    except OSError as error:
        # Full, or taken away since it was checked: one more try, in the temporary folder.
        spare = _temporary()
        try:
            entry = _write(spare / key, key, binary, suffix, facts)
        except OSError:
            raise CompileError(
                f"kernel cache: cannot write {folder() / key} nor {spare / key} "
                f"({error.strerror}). Is the disk full? {settings.CACHE_DIR.name} names another."
            ) from error
        _writable[settings.cache_dir()] = spare
        return entry


def publish_failed(key: str, source: str, log: str, facts: Mapping[str, Any]) -> Path | None:
    """Keep what did not compile, for a look and a second try. None where that cannot be written."""
    try:
        place = folder() / "failed" / key
        place.mkdir(parents=True, exist_ok=True)
        _replace(place / "source.cu", source.encode())
        _replace(place / "log.txt", log.encode())
        _replace(place / "facts.json", json.dumps(facts, indent=1).encode())
    except OSError:
        return None  # the compile error itself must not be lost to a full disk
    return place


def failed_facts(key: str) -> dict[str, Any]:
    """What `publish_failed` stored about `key`. Raises InputError where there is nothing."""
    for place in _places():
        try:
            facts = json.loads((place / "failed" / key / "facts.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict):
            return facts
    where = " or ".join(str(place / "failed") for place in _places())
    raise InputError(f"key: expected that of a failed build in {where}, got {key!r}.")


@contextlib.contextmanager
def lock(key: str) -> Iterator[None]:
    """Hold the right to compile `key`; waits while another process or thread has it.

    It only saves work, and correctness never hangs on it: without file locks, or after a minute of
    waiting, the caller goes ahead.
    """
    descriptor = -1
    if fcntl is not None:
        with contextlib.suppress(OSError):
            descriptor = os.open(
                folder() / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
    try:
        if descriptor >= 0:
            _wait_for(descriptor)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def info() -> Info:
    """Count what the cache holds. Reads every entry."""
    places = _places()
    entries = failed = size = 0
    for place in places:
        for path in _keys_in(place):
            entries += _read(path, path.name) is not None
            size += sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        failed += len(_keys_in(place / "failed"))
    return Info(tuple(places), entries, failed, size)


def clear() -> int:
    """Delete every entry and failed build, and nothing else that lies there; return how many."""
    removed = 0
    for place in _places():
        for path in (*_keys_in(place), *_keys_in(place / "failed")):
            shutil.rmtree(path, ignore_errors=True)
            removed += not path.exists()
        for path in place.glob("*.lock"):
            if _KEY.fullmatch(path.stem):
                with contextlib.suppress(OSError):
                    path.unlink()
        with contextlib.suppress(OSError):
            (place / "failed").rmdir()
    return removed


def _places() -> list[Path]:
    """Folders to read from: the one asked for, then the one written to if that is another."""
    return list(dict.fromkeys((settings.cache_dir(), folder())))


def _keys_in(place: Path) -> list[Path]:
    try:
        return sorted(
            path for path in place.iterdir() if _KEY.fullmatch(path.name) and path.is_dir()
        )
    except OSError:
        return []


def why_not_writable(place: Path) -> str | None:
    """The reason, from making the folder and a file in it; None where both can be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def _temporary() -> Path:
    """A folder for this user under the system's temporary one.

    Its name is predictable so that later processes find it, hence the check that nobody else made
    it first: code from it runs on the GPU.
    """
    uid = os.getuid() if hasattr(os, "getuid") else 0
    place = Path(tempfile.gettempdir()) / f"kda_jit-{uid}"
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        found = place.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == uid
        if ours and not found.st_mode & 0o022 and why_not_writable(place) is None:
            return place
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="kda_jit-"))


def _read(place: Path, key: str) -> Entry | None:
    try:
        meta = json.loads((place / "meta.json").read_bytes())
        facts = meta["facts"]
        if (meta["format"], meta["key"], meta["facts_sha256"]) != (_FORMAT, key, _digest(facts)):
            return None
        path = place / f"{meta['sha256'][:16]}.{meta['suffix']}"
        if sha256(path.read_bytes()).hexdigest() != meta["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Entry(path, facts)


def _write(place: Path, key: str, binary: bytes, suffix: str, facts: Mapping[str, Any]) -> Entry:
    plain = json.loads(json.dumps(facts))  # as a reader gets it: tuples become lists now, not later
    digest = sha256(binary).hexdigest()
    meta = {
        "format": _FORMAT,
        "key": key,
        "suffix": suffix,
        "sha256": digest,
        "facts": plain,
        "facts_sha256": _digest(plain),
    }
    place.mkdir(parents=True, exist_ok=True)
    # Named by content: a second writer whose bytes differ cannot spoil the first one's entry.
    path = place / f"{digest[:16]}.{suffix}"
    _replace(path, binary)
    _replace(place / "meta.json", json.dumps(meta, indent=1).encode())
    return Entry(path, plain)


def _digest(facts: object) -> str:
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, content: bytes) -> None:
    """Put `content` at `path` in one step: readers see the old file or the new one, whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide a shared cache from its other readers
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _wait_for(descriptor: int) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            return  # a file system without locks
