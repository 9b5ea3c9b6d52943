"""The disk cache: whole entries or none, for any number of processes, on any folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from kda_jit.errors import CompileError, InputError
from kda_jit.jit import cache
from kda_jit.jit.compiler import compile_spec
from kda_jit.jit.spec import KernelSpec

KEY = "0123456789abcdef"
REPO = Path(__file__).resolve().parents[2]


def test_published_entry_is_found_and_whole(cache_folder: Path) -> None:
    assert cache.lookup(KEY) is None
    entry = cache.publish(KEY, b"binary", "cubin", {"log": "words", "flags": ("a", "b")})
    assert entry.path.read_bytes() == b"binary"
    assert entry.path.parent == cache_folder / KEY
    assert cache.lookup(KEY) == entry
    assert entry.facts == {"log": "words", "flags": ["a", "b"]}  # as JSON gives them back


def test_a_folder_that_is_cleared_under_the_writer_is_no_full_disk(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_replace, cleared = cache._replace, []

    def meanwhile(path: Path, content: bytes) -> None:
        if path.name == "meta.json" and not cleared:
            cleared.append(cache.clear())
        true_replace(path, content)

    monkeypatch.setattr(cache, "_replace", meanwhile)
    assert cache.publish(KEY, b"binary", "cubin", {}).path.parent == cache_folder / KEY
    assert cleared == [1]
    assert cache.lookup(KEY) is not None


def _edit_meta(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cubin one byte short": lambda f: _cut(next(f.glob("*.cubin"))),
    "cubin empty": lambda f: next(f.glob("*.cubin")).write_bytes(b""),
    "cubin one bit off": lambda f: _flip(next(f.glob("*.cubin"))),
    "cubin gone": lambda f: next(f.glob("*.cubin")).unlink(),
    "meta gone": lambda f: (f / "meta.json").unlink(),
    "meta empty": lambda f: (f / "meta.json").write_bytes(b""),
    "meta cut": lambda f: _cut(f / "meta.json"),
    "meta not an object": lambda f: (f / "meta.json").write_text("[1, 2]"),
    "meta too deep": lambda f: (f / "meta.json").write_text("[" * 200_000),
    "meta not text": lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "facts edited": lambda f: _edit_meta(f, lambda m: m.update(facts={"log": ""})),
    "another format": lambda f: _edit_meta(f, lambda m: m.update(format=0)),
    "another key": lambda f: _edit_meta(f, lambda m: m.update(key="f" * 16)),
    "sha of another type": lambda f: _edit_meta(f, lambda m: m.update(sha256=7)),
}


@pytest.mark.parametrize("facts", [{}, {"log": "", "resources": {"add": {"of another": 1}}}])
def test_whole_entry_with_facts_of_another_version_is_recompiled(
    kernels: Path, cache_folder: Path, facts: dict[str, object]
) -> None:
    spec = KernelSpec("sm80/add.cu", ("add",), "sm_80")
    first = compile_spec(spec)
    cache.publish(first.key, first.binary, "cubin", facts)
    again = compile_spec(spec)
    assert not again.from_cache
    assert again.resources == first.resources


@pytest.mark.parametrize("kind", sorted(DAMAGE))
def test_damaged_entry_is_recompiled_not_an_error(
    kernels: Path, cache_folder: Path, kind: str
) -> None:
    spec = KernelSpec("sm80/add.cu", ("add",), "sm_80")
    first = compile_spec(spec)
    good = first.binary
    assert compile_spec(spec).from_cache
    DAMAGE[kind](cache_folder / first.key)
    again = compile_spec(spec)
    assert not again.from_cache
    assert (again.key, again.binary, again.resources) == (first.key, good, first.resources)
    assert compile_spec(spec).from_cache


_RACE = """
import os, sys, time
from hashlib import sha256
from pathlib import Path
from kda_jit.jit.compiler import compile_spec, nvrtc_version
from kda_jit.jit.spec import KernelSpec

base, processes, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec = KernelSpec("sm80/add.cu", ("add",), "sm_80")
nvrtc_version()  # the slow imports, once for all

def run(me):
    for number in range(rounds):
        gate = base / f"gate{number}"
        gate.mkdir(exist_ok=True)
        (gate / me).touch()
        while len(os.listdir(gate)) < processes:
            time.sleep(0.001)
        os.environ["KDA_JIT_CACHE_DIR"] = str(base / f"cache{number}")
        built = compile_spec(spec)
        line = f"{number} {int(built.from_cache)} {sha256(built.binary).hexdigest()}\\n"
        os.write(1, line.encode())

children = []
for me in range(processes):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(str(me))
            code = 0
        finally:
            os._exit(code)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_many_processes_on_an_empty_cache_build_once_and_agree(
    kernels: Path, tmp_path: Path
) -> None:
    processes, rounds = 8, 20
    done = subprocess.run(
        [sys.executable, "-c", _RACE, str(tmp_path), str(processes), str(rounds)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == processes * rounds
    assert len({digest for _, _, digest in lines}) == 1
    for number in range(rounds):
        from_cache = [int(hit) for place, hit, _ in lines if int(place) == number]
        assert from_cache.count(0) == 1, f"round {number}: built {from_cache.count(0)} times"


def test_reader_never_sees_a_half_written_entry(cache_folder: Path) -> None:
    """Four writers, each with bytes of its own, under one key: a reader gets one of them whole."""
    stop = threading.Event()
    contents = [bytes([n]) * (100_000 + n) for n in range(4)]
    cache.publish(KEY, contents[0], "cubin", {"n": 0})

    def write(n: int) -> None:
        while not stop.is_set():
            cache.publish(KEY, contents[n], "cubin", {"n": n})

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    seen = set()
    deadline = time.monotonic() + 1.5
    try:
        while time.monotonic() < deadline:
            entry = cache.lookup(KEY)
            assert entry is not None
            n = entry.facts["n"]
            assert entry.path.read_bytes() == contents[n]
            seen.add(n)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(seen) > 1  # else nothing was raced
    assert not list(cache_folder.glob(f"{KEY}/.*")), "temporary files left behind"


def test_lock_lets_one_in_at_a_time(cache_folder: Path) -> None:
    inside = 0
    most = 0

    def enter() -> None:
        nonlocal inside, most
        with cache.lock(KEY):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_lock_of_a_dead_process_does_not_hold(cache_folder: Path) -> None:
    code = f"""
import os
from kda_jit.jit import cache
manager = cache.lock({KEY!r}); manager.__enter__(); os._exit(1)
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPO, timeout=60, check=False)
    assert (cache_folder / f"{KEY}.lock").exists()
    started = time.monotonic()
    with cache.lock(KEY):
        assert time.monotonic() - started < 5


@pytest.fixture
def own_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr(cache.tempfile, "tempdir", str(place))
    return place


def _unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that nobody can make, root included: its parent is a file."""
    (tmp_path / "file").write_text("")
    asked = tmp_path / "file" / "cache"
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", str(asked))
    return asked


def test_unwritable_folder_falls_back_to_a_private_one_and_warns_once(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = _unwritable(tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning, match="cannot write to the kernel cache") as caught:
        entry = cache.publish(KEY, b"binary", "cubin", {})
    assert len(caught) == 1
    assert str(asked) in str(caught[0].message)
    assert "KDA_JIT_CACHE_DIR" in str(caught[0].message)
    assert entry.path.is_relative_to(own_tmp)
    assert not entry.path.parent.parent.stat().st_mode & 0o077
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.lookup(KEY) == entry
        cache.publish(KEY, b"binary", "cubin", {})


def test_next_process_finds_the_fallback_again(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unwritable(tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning):
        entry = cache.publish(KEY, b"binary", "cubin", {})
    monkeypatch.setattr(cache, "_writable", {})
    with pytest.warns(RuntimeWarning):
        assert cache.lookup(KEY) == entry


@pytest.mark.parametrize("planted", ["symlink", "open to all", "another owner"])
def test_fallback_made_by_somebody_else_is_not_used(
    tmp_path: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    _unwritable(tmp_path, monkeypatch)
    if planted == "another owner":
        stranger = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: stranger)
    place = own_tmp / f"kda_jit-{os.getuid()}"
    trap = tmp_path / "trap"
    trap.mkdir()
    if planted == "symlink":
        place.symlink_to(trap)
    else:
        place.mkdir()
        place.chmod(0o777 if planted == "open to all" else 0o700)
    with pytest.warns(RuntimeWarning):
        entry = cache.publish(KEY, b"binary", "cubin", {})
    assert not entry.path.is_relative_to(place)
    assert not list(trap.iterdir())


def test_read_only_folder_is_still_read(
    cache_folder: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = cache.publish(KEY, b"shipped", "cubin", {})
    monkeypatch.setattr(cache, "_writable", {})
    monkeypatch.setattr(
        cache, "why_not_writable", lambda place: "read-only" if place == cache_folder else None
    )
    with pytest.warns(RuntimeWarning, match="read-only"):
        assert cache.lookup(KEY) == shipped
    other = cache.publish("f" * 16, b"new", "cubin", {})
    assert other.path.is_relative_to(own_tmp)


def test_disk_that_fills_up_moves_to_the_fallback(
    cache_folder: Path, own_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_replace = cache._replace

    def full(path: Path, content: bytes) -> None:
        if path.is_relative_to(cache_folder):
            raise OSError(28, "No space left on device")
        true_replace(path, content)

    monkeypatch.setattr(cache, "_replace", full)
    entry = cache.publish(KEY, b"binary", "cubin", {})
    assert entry.path.is_relative_to(own_tmp)
    assert cache.lookup(KEY) == entry

    def no_room(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_replace", no_room)
    with pytest.raises(CompileError, match=r"No space left.*KDA_JIT_CACHE_DIR"):
        cache.publish(KEY, b"more", "cubin", {})
    assert cache.publish_failed(KEY, "source", "log", {}) is None


def test_folder_deleted_under_a_running_process_is_made_anew(cache_folder: Path) -> None:
    cache.publish(KEY, b"binary", "cubin", {})
    shutil.rmtree(cache_folder)
    assert cache.lookup(KEY) is None
    with cache.lock(KEY):
        entry = cache.publish(KEY, b"binary", "cubin", {})
    assert cache.lookup(KEY) == entry


def test_info_counts_and_clear_removes_only_ours(cache_folder: Path) -> None:
    cache.publish(KEY, b"x" * 1000, "cubin", {})
    cache.publish("f" * 16, b"y" * 500, "ptx", {})
    cache.publish_failed("e" * 16, "source", "log", {"spec": 1})
    with cache.lock(KEY):
        pass
    (cache_folder / "notes.txt").write_text("mine")
    (cache_folder / "folder").mkdir()
    _cut(next((cache_folder / KEY).glob("*.cubin")))
    found = cache.info()
    assert (found.folders, found.entries, found.failed) == ((cache_folder,), 1, 1)
    assert found.bytes > 1499
    assert cache.clear() == 3
    assert sorted(path.name for path in cache_folder.iterdir()) == ["folder", "notes.txt"]
    assert cache.info().entries == 0


def test_failed_build_is_kept_and_unknown_key_says_where_it_looked(cache_folder: Path) -> None:
    place = cache.publish_failed(KEY, "source text", "the log", {"spec": {"file": "a.cu"}})
    assert place == cache_folder / "failed" / KEY
    assert (place / "source.cu").read_text() == "source text"
    assert (place / "log.txt").read_text() == "the log"
    assert cache.failed_facts(KEY) == {"spec": {"file": "a.cu"}}
    with pytest.raises(InputError, match="failed"):
        cache.failed_facts("f" * 16)
