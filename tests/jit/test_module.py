"""Loading: once per device, never first in a capture, afresh after an edit or a fork. No GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_jit.errors import CaptureError, InputError, LaunchError
from kda_jit.jit import compiler, module
from kda_jit.jit.compiler import Compiled
from kda_jit.jit.module import Module, load
from kda_jit.jit.spec import KernelSpec

pytestmark = pytest.mark.skipif(
    compiler.unavailable_reason("sm_80") is not None,
    reason=f"needs NVRTC: {compiler.unavailable_reason('sm_80')}",
)

SPEC = KernelSpec("sm80/add.cu", ("add",), "sm_80")


class Machine:
    """Two pretended GPUs of capability 8.0. `sent` lists what went to which device."""

    def __init__(self) -> None:
        self.capturing = False
        self.current = 0
        self.sent: list[tuple[str, int]] = []
        self.delay = threading.Event()

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def to_device(self, compiled: Compiled, index: int, *rest: Any) -> Module:
        assert self.current == index
        self.sent.append((compiled.key, index))
        self.delay.wait(0.05)
        return Module(compiled, index, {}, None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, kernels: Path) -> Machine:
    pretended = Machine()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", pretended.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pretended.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pretended.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: pretended.current, raising=False)
    monkeypatch.setattr(module, "driver", lambda: None)
    monkeypatch.setattr(module, "_to_device", pretended.to_device)
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "_by_key", {})
    return pretended


def test_loads_once_per_device(machine: Machine) -> None:
    first = load(SPEC, 0)
    assert load(SPEC, 0) is first
    other = load(SPEC, 1)
    assert other is not first
    assert [index for _, index in machine.sent] == [0, 1]
    assert machine.current == 0
    machine.current = 1
    assert load(SPEC) is other


def test_first_call_in_a_capture_is_refused_and_later_ones_are_not(machine: Machine) -> None:
    machine.capturing = True
    with pytest.raises(CaptureError, match=r"add for sm_80.*cuda:0.*kda_jit\.warmup"):
        load(SPEC, 0)
    assert machine.sent == []
    assert not module.is_loaded(SPEC, 0)
    machine.capturing = False
    loaded = load(SPEC, 0)
    machine.capturing = True
    assert load(SPEC, 0) is loaded
    assert module.is_loaded(SPEC, 0)
    assert not module.is_loaded(SPEC, 1)


def test_target_of_another_gpu_is_refused_before_compiling(
    machine: Machine, cache_folder: Path
) -> None:
    with pytest.raises(LaunchError, match=r"sm_90a runs on 9\.0 alone; this device is 8\.0"):
        load(dataclasses.replace(SPEC, target="sm_90a"), 0)
    assert not cache_folder.exists()


def test_threads_that_come_together_load_once(machine: Machine) -> None:
    found: list[Module] = []
    threads = [threading.Thread(target=lambda: found.append(load(SPEC, 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.sent) == 1
    assert len(found) == 8
    assert all(each is found[0] for each in found)


def test_edit_is_seen_after_reload_and_not_before(machine: Machine, kernels: Path) -> None:
    first = load(SPEC, 0)
    header = kernels / "common/types.cuh"
    before = header.read_text()
    header.write_text("#pragma once\nusing real = double;\n")
    assert load(SPEC, 0) is first
    module.reload()
    edited = load(SPEC, 0)
    assert edited.compiled.key != first.compiled.key
    header.write_text(before)
    module.reload()
    assert load(SPEC, 0) is first  # unchanged sources are not loaded twice
    assert len(machine.sent) == 2


def test_generation_tells_whether_kept_kernels_are_still_those_of_load(
    machine: Machine, kernels: Path
) -> None:
    first = module.generation()
    load(SPEC, 0)
    load(SPEC, 1)
    assert module.generation() is first
    module.reload()
    second = module.generation()
    assert second is not first
    with module.use_sources(kernels):
        assert module.generation() is not first
        assert module.generation() is not second
    assert module.generation() is second


def test_other_sources_inside_a_block_only(machine: Machine, kernels: Path, tmp_path: Path) -> None:
    usual = load(SPEC, 0)
    other = tmp_path / "other"
    shutil.copytree(kernels, other)
    (other / "common/types.cuh").write_text("#pragma once\nusing real = double;\n")
    with module.use_sources(other):
        changed = load(SPEC, 0)
        assert load(SPEC, 0) is changed
    assert changed.compiled.key != usual.compiled.key
    assert load(SPEC, 0) is usual
    (other / "common/types.cuh").write_text("#pragma once\nusing real = long;\n")
    with module.use_sources(other):
        assert load(SPEC, 0).compiled.key not in (usual.compiled.key, changed.compiled.key)
    with pytest.raises(InputError, match="absent"), module.use_sources(tmp_path / "absent"):
        load(SPEC, 0)
    assert load(SPEC, 0) is usual


@pytest.fixture
def tree(kernels: Path, tmp_path: Path) -> module.SourceTree:
    """A copy of the kernels with another type, so that all that reads it has another key."""
    other = tmp_path / "other"
    shutil.copytree(kernels, other)
    (other / "common/types.cuh").write_text("#pragma once\nusing real = double;\n")
    return module.SourceTree(other)


def test_a_tree_remembers_what_was_loaded_from_it(
    machine: Machine, tree: module.SourceTree
) -> None:
    usual = load(SPEC, 0)
    with tree.active():
        first, generation = load(SPEC, 0), module.generation()
    assert first is not usual
    assert load(SPEC, 0) is usual
    (tree.folder / "common/types.cuh").write_text("#pragma once\nusing real = long;\n")
    with tree.active():
        assert module.generation() is generation
        assert load(SPEC, 0) is first
        module.reload()
        assert load(SPEC, 0).compiled.key not in (first.compiled.key, usual.compiled.key)
    assert load(SPEC, 0) is usual


def test_another_thread_never_notices_a_tree(machine: Machine, tree: module.SourceTree) -> None:
    usual, generation = load(SPEC, 0), module.generation()
    found: list[object] = []

    def look() -> None:
        found.extend((load(SPEC, 0), module.generation()))

    with tree.active():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert load(SPEC, 0) is not usual
    assert found[0] is usual
    assert found[1] is generation


def test_string_kernel_sees_edited_headers_without_reload(machine: Machine, kernels: Path) -> None:
    text = '#include "common/types.cuh"\nextern "C" __global__ void f(real* x) { x[0] = 1; }\n'
    spec = KernelSpec("string.cu", ("f",), "sm_80", text=text)
    first = load(spec, 0)
    assert load(spec, 0) is first
    (kernels / "common/types.cuh").write_text("#pragma once\nusing real = double;\n")
    assert load(spec, 0).compiled.key != first.compiled.key


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_starts_with_no_module_and_a_free_lock(
    machine: Machine, tree: module.SourceTree
) -> None:
    load(SPEC, 0)
    with tree.active():
        load(SPEC, 0)
    held = threading.Event()
    release = threading.Event()

    def hold() -> None:
        with module._lock:
            held.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            fresh = not module.is_loaded(SPEC, 0) and not module._by_key and not tree.loaded
            # In the child nobody would ever release a lock that was held at the fork.
            free = module._lock.acquire(timeout=5)
            if fresh and free:
                load(SPEC, 0)
                verdict = 0 if len(machine.sent) == 3 else 2
        finally:
            os._exit(verdict)
    _, status = os.waitpid(child, 0)
    release.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert module.is_loaded(SPEC, 0)


def test_device_that_no_target_fits_has_a_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.device_unavailable_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (7, 5))
    assert "7.5" in (module.device_unavailable_reason(0) or "")
    module.device_unavailable_reason.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 0))

    def refuse(*_: Any) -> Module:
        raise LaunchError("the driver runs CUDA 11.8 and older")

    monkeypatch.setattr(module, "_to_device", refuse)
    assert "11.8" in (module.device_unavailable_reason(0) or "")
    module.device_unavailable_reason.cache_clear()
