"""One allocation, disjoint regions, no forbidden growth, no freed address in a graph."""

import gc
import threading
import weakref

import pytest
import torch

from kda_jit import workspace as module
from kda_jit.backends import triton as triton_backend
from kda_jit.errors import DeviceError, InputError, InputTypeError, WorkspaceError
from kda_jit.workspace import (
    ALIGNMENT,
    STAGE_BYTES,
    Spec,
    Workspace,
    default_workspace,
    planned_bytes,
    stage_slots,
    workspace_specs,
)

CPU = torch.device("cpu")
REDZONE = 64
SPECS = {
    "stages": Spec((3, 100), torch.float32),
    "flags": Spec((5,), torch.uint8),
    "out": Spec((2, 7), torch.bfloat16),
}


class Redzones:
    """An allocator that poisons what it hands out and sees writes beyond it."""

    def __init__(self):
        self.memory = []

    def __call__(self, nbytes, device):
        block = torch.full((nbytes + 2 * REDZONE,), 0xFF, dtype=torch.uint8, device=device)
        self.memory.append(block)
        return block[REDZONE:-REDZONE]

    def intact(self):
        return all(
            bool((block[:REDZONE] == 0xFF).all() and (block[-REDZONE:] == 0xFF).all())
            for block in self.memory
        )


@pytest.fixture
def capturing(monkeypatch):
    """Switches the CUDA graph capture that the code believes in."""

    def switch(on):
        monkeypatch.setattr(module, "is_capturing", lambda: on)

    return switch


@pytest.fixture(autouse=True)
def no_defaults():
    module.release_default_workspaces()
    yield
    module.release_default_workspaces()


# -- plans ---------------------------------------------------------------------------------------


def needed_slots(lengths, checkpoints):
    """Slots of these sequences' chunks, where each owns those from start // 32 + n * per on."""
    per, start, end = (2 if checkpoints else 1), 0, 0
    for n, length in enumerate(lengths):
        base = start // 32 + n * per
        assert base >= end, "two sequences share a slot"
        chunks = -(-length // 32)
        if checkpoints:  # the worst one: it ends a chunk half way
            chunks = max(-(-m // 32) + -(-(length - m) // 32) for m in range(0, length + 1, 16))
        end = base + chunks
        start += length
    return end


@pytest.mark.parametrize("checkpoints", [False, True])
def test_stage_slots_are_enough_for_every_mix_of_lengths(checkpoints):
    generator = torch.Generator().manual_seed(0)
    mixes = [[0], [1], [33], [0, 0, 0], [31, 1], [16, 17, 15], [64] * 5, [0, 129, 0, 0, 1]]
    mixes += [torch.randint(0, 140, (9,), generator=generator).tolist() for _ in range(200)]
    for lengths in mixes:
        planned = stage_slots(sum(lengths), len(lengths), checkpoints=checkpoints)
        assert needed_slots(lengths, checkpoints) <= planned, lengths


def test_the_plan_is_known_before_the_workspace_is_built():
    specs = workspace_specs(1024, 8, 4, 128)
    assert specs["prefill_stages"].nbytes == (1024 // 32 + 16) * 4 * STAGE_BYTES
    asked = []

    def allocator(nbytes, device):
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    ws = Workspace(specs, "cpu", allocator)
    assert asked == [planned_bytes(specs)] == [ws.nbytes]
    ws.get("prefill_stages", specs["prefill_stages"].nbytes, caller="a step")
    assert len(asked) == 1


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, seqs", [(1, 1), (31, 2), (1000, 1), (4096, 300), (5, 5)])
def test_the_plan_is_enough_for_triton(head_dim, dtype, tokens, seqs):
    config = triton_backend.config_for(head_dim, head_dim, dtype)
    records = (tokens // triton_backend.CHUNK + seqs) * 3  # its slots, packed or dense
    stages, totals = triton_backend._scratch(records, config, torch.device("meta"), None)
    needed = stages.nbytes + totals.nbytes
    for checkpoints in (False, True):
        specs = workspace_specs(tokens, seqs, 3, head_dim, dtype=dtype, checkpoints=checkpoints)
        assert needed <= specs["prefill_stages"].nbytes


@pytest.mark.parametrize(
    "arguments, error, name",
    [
        ((0, 1, 1, 128), InputError, "max_num_batched_tokens"),
        ((1, -1, 1, 128), InputError, "max_num_seqs"),
        ((1, 1, 2.0, 128), InputTypeError, "num_heads"),
        ((1, 1, 1, True), InputTypeError, "head_dim"),
    ],
)
def test_a_plan_of_nothing_is_refused(arguments, error, name):
    with pytest.raises(error, match=f"^{name}: expected .* got"):
        workspace_specs(*arguments)


# -- regions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [SPECS, None], ids=["planned", "growing"])
def test_regions_are_aligned_disjoint_and_inside_the_allocation(specs):
    allocator = Redzones()
    ws = Workspace(specs, "cpu", allocator)
    ws.reserve({name: spec.nbytes for name, spec in SPECS.items()})
    views = [ws.view(name, spec.shape, spec.dtype, caller="test") for name, spec in SPECS.items()]
    assert len(allocator.memory) == 1
    for i, x in enumerate(views):
        assert x.data_ptr() % ALIGNMENT == 0
        assert x.shape == tuple(SPECS.values())[i].shape
        x.fill_(i + 1)
    for i, x in enumerate(views):
        assert bool((x == i + 1).all())
    assert allocator.intact()


def test_a_region_keeps_its_address_until_it_grows():
    ws = Workspace(device="cpu")
    first = ws.address("a", 100, caller="test")
    assert ws.address("a", 100, caller="test") == first
    assert ws.address("a", 1, caller="test") == first
    assert ws.get("a", 100, caller="test").data_ptr() == first
    ws.address("a", 2 * module.GROWTH_STEP, caller="test")
    assert ws.nbytes >= 2 * module.GROWTH_STEP


def test_growth_keeps_the_other_regions_and_never_shrinks_one():
    ws = Workspace(device="cpu")
    ws.reserve({"a": 1000, "b": 10})
    ws.reserve({"b": module.GROWTH_STEP})
    ws.locked()
    a = ws.address("a", 1000, caller="test")
    b = ws.address("b", module.GROWTH_STEP, caller="test")
    assert a + 1000 <= b or b + module.GROWTH_STEP <= a


def test_a_short_allocation_is_an_error():
    with pytest.raises(WorkspaceError, match="allocator to return"):
        Workspace(SPECS, "cpu", lambda n, d: torch.empty(n // 2, dtype=torch.uint8, device=d))


# -- bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, size", [("stages", 1201), ("unheard_of", 1)])
def test_a_request_beyond_the_plan_names_caller_size_and_plan(name, size):
    ws = Workspace(SPECS, "cpu")
    before = ws.address("stages", 1200, caller="test")
    with pytest.raises(WorkspaceError) as caught:
        ws.address(name, size, caller="layer 3 prefill")
    text = str(caught.value)
    planned = "1200" if name == "stages" else "none"
    for word in ("layer 3 prefill", f"{size} bytes", repr(name), f"planned: {planned}"):
        assert word in text
    assert ws.address("stages", 1200, caller="test") == before


def test_a_locked_workspace_serves_what_it_holds_and_grows_no_more():
    ws = Workspace(device="cpu")
    ws.reserve({"a": 1 << 22})
    held = ws.nbytes
    ws.locked()
    assert ws.is_locked
    ws.address("a", 1 << 22, caller="test")
    ws.address("a", 8, caller="test")
    with pytest.raises(WorkspaceError, match=r"locked.* by step.*4194305 bytes of 'a'.*4194304"):
        ws.address("a", (1 << 22) + 1, caller="step")
    with pytest.raises(WorkspaceError, match=r"locked.* by step.*1 bytes of 'b'.*holds 0"):
        ws.address("b", 1, caller="step")
    assert ws.nbytes == held


def test_locked_as_a_block_ends_with_it():
    ws = Workspace(device="cpu")
    with ws.locked(), pytest.raises(WorkspaceError, match="locked"):
        ws.reserve({"a": 1})
    assert not ws.is_locked
    ws.reserve({"a": 1})


def test_a_planned_workspace_may_be_locked():
    ws = Workspace(SPECS, "cpu")
    ws.locked()
    ws.address("stages", 1200, caller="test")


# -- captures ------------------------------------------------------------------------------------


def test_an_address_that_a_graph_may_hold_is_never_freed(capturing):
    ws = Workspace(device="cpu")
    ws.reserve({"a": 100})
    capturing(True)
    with ws.in_use(CPU):
        in_graph = ws.get("a", 100, caller="test")
    in_graph.fill_(17)
    address = in_graph.data_ptr()
    del in_graph
    capturing(False)
    before = ws.nbytes
    with ws.in_use(CPU):
        moved = ws.address("a", 8 * module.GROWTH_STEP, caller="test")
    assert moved != address
    # The old allocation is still ours: it counts, and a new tensor cannot get its memory.
    assert ws.nbytes >= before + 8 * module.GROWTH_STEP
    assert len(ws._retired) == 1
    old = ws._retired[0]
    assert old.data_ptr() <= address < old.data_ptr() + old.nbytes
    assert bool((old[address - old.data_ptr() :][:100] == 17).all())


def test_without_a_capture_growth_frees_the_old_allocation_after_the_call():
    ws = Workspace(device="cpu")
    sizes = []
    with ws.in_use(CPU):
        ws.address("a", 100, caller="test")
        old = weakref.ref(ws._buffer)
        ws.address("a", 4 * module.GROWTH_STEP, caller="test")
        gc.collect()
        assert old() is not None, "a launch of this call may still be to come"
    gc.collect()
    assert old() is None
    for step in range(5, 10):
        with ws.in_use(CPU):
            ws.address("a", step * module.GROWTH_STEP, caller="test")
        sizes.append(ws.nbytes)
    assert sizes[-1] <= 11 * module.GROWTH_STEP


def test_growth_during_a_capture_is_refused(capturing):
    ws = Workspace(device="cpu")
    ws.reserve({"a": 100})
    capturing(True)
    ws.address("a", 100, caller="test")
    with pytest.raises(WorkspaceError, match=r"capture.*by step.*Call reserve"):
        ws.address("a", 1 << 30, caller="step")


def test_a_capture_without_a_workspace_gets_a_fresh_one(capturing):
    usual = default_workspace(CPU, 0)
    capturing(True)
    first = default_workspace(CPU, 0, capturing=True)
    assert first is not usual
    assert default_workspace(CPU, 0, capturing=True) is not first
    first.acquire(CPU, 0, True)
    first.address("a", 100, caller="test")
    first.address("b", 100, caller="test")
    first.release()
    capturing(False)
    assert default_workspace(CPU, 0) is usual


# -- streams, devices, threads -------------------------------------------------------------------


def test_default_workspaces_are_per_device_and_stream_and_shared_by_threads():
    here = default_workspace(CPU, 0)
    assert default_workspace(CPU, 0) is here
    assert default_workspace(CPU, 7) is not here
    found = []
    thread = threading.Thread(target=lambda: found.append(default_workspace(CPU, 0)))
    thread.start()
    thread.join()
    assert found == [here]


def test_release_gives_the_default_workspaces_back():
    ws = default_workspace(CPU, 0)
    ws.reserve({"a": 100})
    assert module.release_default_workspaces() == ws.nbytes
    assert default_workspace(CPU, 0) is not ws


def test_one_workspace_serves_one_stream():
    ws = Workspace(device="cpu")
    ws.acquire(CPU, 5, False)
    ws.release()
    ws.acquire(CPU, 6, True)  # a capture is ordered where its graph is replayed
    ws.release()
    with pytest.raises(WorkspaceError, match=r"stream 0x5.*got .*stream 0x6"):
        ws.acquire(CPU, 6, False)
    assert not ws._mutex._is_owned(), "a refused call must not keep the workspace"
    with pytest.raises(WorkspaceError, match="stream 0x5"):
        ws.address("a", 1, caller="test", stream=6)
    ws.acquire(CPU, 5, False)
    ws.release()


def test_one_workspace_serves_one_device():
    ws = Workspace(SPECS)
    assert ws.device is None
    with ws.in_use(CPU):
        ws.address("stages", 1200, caller="test")
    assert ws.device == CPU
    with pytest.raises(DeviceError, match=r"expected one on meta.*got one on cpu"):
        ws.acquire(torch.device("meta"), 0, False)


def test_a_workspace_without_a_device_says_so():
    with pytest.raises(WorkspaceError, match="device="):
        Workspace().reserve({"a": 1})


def test_another_thread_waits_until_the_call_is_over():
    ws = Workspace(device="cpu")
    order, started = [], threading.Event()

    def other():
        started.set()
        with ws.in_use(CPU):
            order.append("other")

    thread = threading.Thread(target=other)
    with ws.in_use(CPU):
        thread.start()
        started.wait(5)
        thread.join(0.1)
        order.append("this")
    thread.join(5)
    assert order == ["this", "other"]


def test_the_workspace_is_released_after_an_error():
    ws = Workspace(device="cpu")
    with pytest.raises(RuntimeError, match="kernel"), ws.in_use(CPU):
        raise RuntimeError("kernel")
    assert not ws._mutex._is_owned()


def test_a_forked_child_starts_afresh():
    default_workspace(CPU, 0)
    module._forget_parent()
    assert module._defaults == {}
    with module._defaults_mutex:
        pass


# -- memory of the caller's ----------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 255])
def test_lent_memory_holds_all_regions_and_nothing_beside_them(offset):
    block = torch.full((planned_bytes(SPECS) + 600,), 0xFF, dtype=torch.uint8)
    memory = block[offset : offset + planned_bytes(SPECS)]
    lent = Workspace.on(memory, SPECS)
    for name, spec in SPECS.items():
        lent.view(name, *spec, caller="test").fill_(0)
    assert lent.nbytes == memory.nbytes
    assert (block[:offset] == 0xFF).all() and (block[offset + memory.nbytes :] == 0xFF).all()
    assert (memory == 0).sum() == sum(spec.nbytes for spec in SPECS.values())


def test_lent_memory_of_another_dtype_and_shape_is_bytes_too():
    memory = torch.empty(-(-planned_bytes(SPECS) // 8), 2)  # fp32
    stages = Workspace.on(memory, SPECS).view("stages", *SPECS["stages"], caller="test")
    stages.fill_(7.0)
    assert (memory.view(torch.uint8) == torch.tensor(0x40)).sum() >= 300  # of 7.0, 0x40e00000


def test_lent_memory_that_does_not_fit_is_refused():
    needed = planned_bytes(SPECS)
    memory = torch.empty(needed + 8, dtype=torch.uint8)
    with pytest.raises(WorkspaceError, match=rf"least {needed} bytes, got {needed - 1}\. Ask\.$"):
        Workspace.on(memory[: needed - 1], SPECS, hint="Ask.")
    with pytest.raises(InputError, match="contiguous tensor, got strides"):
        Workspace.on(memory[::2], {})
    with pytest.raises(InputTypeError, match="contiguous tensor, got bytes"):
        Workspace.on(b"1", SPECS)
    lent = Workspace.on(memory, SPECS)
    with pytest.raises(WorkspaceError, match="stay within the plan"):
        lent.get("flags", 6, caller="test")
    with pytest.raises(DeviceError, match="expected one on meta"):
        lent.acquire(torch.device("meta"), 0, False)
