"""A repeated call skips what is known already, and nothing else. No times: see benchmarks."""

import contextlib
import ctypes
import gc
import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch

from kda_jit import settings
from kda_jit.backends import cuda
from kda_jit.backends.base import last_launch
from kda_jit.contract import layout, make_problem
from kda_jit.errors import DeviceError, GradError, InputError, InputTypeError
from kda_jit.jit import module
from kda_jit.jit.launch import TogetherError
from kda_jit.workspace import Workspace

H, D, SLOTS = 2, 128, 5
BF16 = torch.bfloat16


def call(T=32, **changes):
    """A packed call of two sequences, every buffer given."""
    tokens = lambda: torch.zeros(1, T, H, D, dtype=BF16)  # noqa: E731
    return {
        "q": tokens(),
        "k": tokens(),
        "v": tokens(),
        "g": tokens(),
        "beta": torch.zeros(1, T, H, dtype=BF16),
        "A_log": torch.zeros(H),
        "dt_bias": torch.zeros(H * D),
        "cu_seqlens": torch.tensor([0, T // 2, T], dtype=torch.int32),
        "out": tokens(),
        "initial_state": torch.zeros(2, H, D, D),
        "final_state": torch.zeros(2, H, D, D),
    } | changes


def pool_call(**changes):
    pool = torch.zeros(SLOTS, H, D, D)
    more = {"initial_state": pool, "state_indices": torch.tensor([3, 0]), "final_state": None}
    return call(**(more | changes))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(layout, "_layouts", {})
    monkeypatch.setattr(layout, "_places", {})
    for setting in (settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)


@pytest.fixture
def checks(monkeypatch):
    """The layouts that were checked in full, as they come."""
    found = []
    check = layout.check_layout
    monkeypatch.setattr(
        layout, "check_layout", lambda tensors: (found.append(tensors), check(tensors))[1]
    )
    return found


# -- the contract --------------------------------------------------------------------------------


def test_calls_that_differ_in_addresses_and_numbers_are_checked_once(checks):
    first = make_problem(**call())
    second = make_problem(**call(scale=2.0, lower_bound=-1.0))
    third = make_problem(**call(lower_bound=None))
    assert first.layout is second.layout is third.layout
    assert len(checks) == 1
    assert (second.scale, second.lower_bound, third.lower_bound) == (2.0, -1.0, None)


def wide(T=32):
    """The first half of the columns of a projection twice as wide."""
    return torch.zeros(1, T, H, D).bfloat16().repeat(1, 1, 2, 1)[:, :, :H]


@pytest.mark.parametrize(
    "changes",
    [
        {"q": wide()},
        {"out": wide()},
        {"out": None},
        {"g": torch.zeros(1, 32, H, D)},
        {"dt_bias": torch.zeros(H, D)},
        {"final_state": torch.zeros(2, H, D, D, dtype=BF16)},
        {"initial_state": None},
        {"cu_seqlens": torch.tensor([0, 3, 9])},
        {"has_initial_state": torch.tensor([True, False])},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_anything_else_that_differs_is_checked(checks, changes):
    known = make_problem(**call()).layout
    assert make_problem(**call(**changes)).layout is not known
    assert len(checks) == 2


class Duck:
    """All that the look-up reads of a tensor, and no tensor."""

    def __init__(self, x):
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.stride, self.get_device, self.data_ptr = x.stride, x.get_device, x.data_ptr
        self.is_contiguous = x.is_contiguous


def overlapping():
    memory = torch.zeros(1, 33, H, D, dtype=BF16)
    return call(k=memory[:, 1:], out=memory[:, :-1])


@pytest.mark.parametrize(
    "build, error, words",
    [
        (lambda: call(scale=True), InputTypeError, "scale"),
        (lambda: call(scale=float("nan")), InputError, "scale"),
        (lambda: call(lower_bound=0.0), InputError, "lower_bound"),
        (lambda: call(k=Duck(call()["k"])), InputTypeError, r"k: expected a torch\.Tensor"),
        (lambda: call(q=torch.zeros(1, 32, H, D, dtype=BF16, device="meta")), DeviceError, "q"),
        (lambda: call(v=torch.zeros(1, 32, H, D, dtype=BF16, device="meta")), DeviceError, "v"),
        (lambda: call(q=call()["q"].requires_grad_()), GradError, "q"),
        (lambda: call(cu_seqlens=torch.tensor([0, 9, 3]).int()), InputError, "never decrease"),
        (overlapping, InputError, "out: expected memory apart from k"),
        (
            lambda: pool_call(final_state=torch.zeros(SLOTS, H, D, D)),
            InputError,
            "final_state: expected None or the very pool",
        ),
        (lambda: pool_call(final_state=3), InputError, "final_state: expected None or the very"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_known_layout_excuses_nothing(checks, build, error, words):
    legal = (call(), pool_call(), pool_call(final_state=torch.zeros(SLOTS, H, D, D)))
    legal[2]["initial_state"] = legal[2]["final_state"]
    for arguments in legal:
        make_problem(**arguments)
    for _ in range(2):
        with pytest.raises(error, match=words):
            make_problem(**build())


def test_addresses_that_were_apart_may_meet_in_another_layout():
    """The same addresses, but tensors that reach further."""
    memory = torch.zeros(2, 32, H, D, dtype=BF16)
    short = call(T=16, k=memory[:1, :16], out=memory.view(1, 64, H, D)[:, 16:32])
    make_problem(**short)
    with pytest.raises(InputError, match="apart from k"):
        make_problem(**call(k=memory[:1], out=memory.view(1, 64, H, D)[:, 16:48]))
    make_problem(**short)


def test_states_in_place_are_told_from_a_partial_overlap_each_time():
    states = torch.zeros(3, H, D, D)
    for _ in range(2):
        make_problem(**call(initial_state=states[:2], final_state=states[:2]))
        with pytest.raises(InputError, match="partial overlap"):
            make_problem(**call(initial_state=states[:2], final_state=states[1:]))


def test_states_of_two_dtypes_cannot_be_in_place():
    memory = torch.zeros(2 * H * D * D)
    final = memory.view(2, H, D, D)
    initial = memory.view(BF16)[: final.numel()].view(2, H, D, D)
    for _ in range(2):
        with pytest.raises(InputError, match="partial overlap"):
            make_problem(**call(initial_state=initial, final_state=final))


def test_buffers_that_lie_apart_are_not_looked_at_closely(monkeypatch):
    """In place or in a pool, too: what is slow comes only where ranges of addresses meet."""
    states = torch.zeros(2, H, D, D)
    monkeypatch.setattr(layout, "check_aliasing", lambda *a: pytest.fail("looked at closely"))
    for arguments in (call(), pool_call(), call(initial_state=states, final_state=states)):
        make_problem(**arguments)


def test_states_in_place_are_apart_from_the_rest():
    memory = torch.zeros(2 * H * D * D)
    states = memory.view(2, H, D, D)
    inside = memory.view(BF16)[: 32 * H * D].view(1, 32, H, D)
    for _ in range(2):
        make_problem(**call(initial_state=states, final_state=states))
        with pytest.raises(InputError, match="final_state: expected memory apart from v"):
            make_problem(**call(initial_state=states, final_state=states, v=inside))


def test_misalignment_is_found_at_each_address_and_remembered_with_it():
    spare = torch.zeros(32 * H * D + 8, dtype=BF16)
    arguments = call()
    for _ in range(2):
        for shift, names in ((0, ()), (1, ("g",)), (8, ())):
            g = spare[shift : shift + 32 * H * D].view(1, 32, H, D)
            assert make_problem(**(arguments | {"g": g})).misaligned == names


def test_no_argument_is_kept():
    arguments = call()
    make_problem(**arguments)
    gone = [weakref.ref(x) for x in arguments.values()]
    del arguments
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(layout, "MAX_LAYOUTS", 4)
    monkeypatch.setattr(layout, "MAX_PLACES", 3)
    kept = [call() for _ in range(10)]
    for arguments in kept:
        make_problem(**arguments)
        assert 1 <= len(layout._places) <= 3
    for T in range(2, 12):
        make_problem(**call(T=T))
        assert len(layout._layouts) <= 4
    assert make_problem(**call(T=11)).T == 11


def test_threads_with_layouts_of_their_own_do_not_mix(monkeypatch):
    monkeypatch.setattr(layout, "MAX_LAYOUTS", 2)
    wrong = []

    def run(T):
        arguments = call(T=T)
        for _ in range(200):
            p = make_problem(**arguments)
            if (p.T, p.layout.T, p.out) != (T, T, arguments["out"]):
                wrong.append(T)

    threads = [threading.Thread(target=run, args=(T,)) for T in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_addresses_are_those_of_the_problem():
    for arguments in (
        call(),
        pool_call(),
        call(out=None, final_state=None, initial_state=None),
        call(dt_bias=torch.zeros(D, H).t(), A_log=torch.zeros(H, 2)[:, 0]),
    ):
        p = make_problem(**arguments)
        given = [getattr(p, name) for name in layout.TENSORS]
        assert p.addresses == tuple(0 if x is None else x.data_ptr() for x in given)


# -- the CUDA backend, without a GPU -------------------------------------------------------------


class FakeKernel:
    def __init__(self, name, launches):
        self.name, self.launches = name, launches
        self.cooperative = self.overlaps = self.block = self.smem = None  # the last launch

    def launch(self, grid, block, smem, stream, args, *, pdl=False, cooperative=False):
        self.launches.append((self, grid, stream, bytes(args)))
        self.cooperative, self.overlaps = cooperative, pdl
        self.block, self.smem = block, smem

    @contextlib.contextmanager
    def own_context(self):
        yield


@pytest.fixture
def machine(monkeypatch):
    """The backend on CPU tensors: kernels that only note their launches."""
    found = SimpleNamespace(launches=[], loads=[])

    def load(spec, index):
        found.loads.append(spec)
        kernels = {entry: FakeKernel(entry, found.launches) for entry in spec.entries}
        return SimpleNamespace(kernels=kernels)

    monkeypatch.setattr(cuda, "load", load)
    monkeypatch.setattr(cuda, "_target", lambda asked, index: asked or "sm_90a")
    monkeypatch.setattr(cuda, "_sm_count", lambda index: 132)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(module, "_loaded", {})
    cuda._choose.cache_clear()
    workspace = Workspace(device="cpu")
    backend = cuda.CudaBackend()

    def run(**arguments):
        p = make_problem(**arguments)
        backend.run(p, workspace)
        return p

    found.run = run
    yield found
    cuda._choose.cache_clear()


def test_a_repeated_call_is_planned_once_and_packed_anew(machine):
    problems = [machine.run(**call(scale=scale)) for scale in (0.5, 0.25)]
    assert len(machine.loads) == 1
    assert len(machine.launches) == 4
    for p, (_, _, stream, args) in zip(problems, machine.launches[1::2], strict=True):
        fields = cuda._ARGS.unpack_from(args)
        assert fields[:15] == p.addresses
        assert p.scale in fields
        assert stream == 7
    assert machine.launches[0][:2] == machine.launches[2][:2]


def test_a_reload_and_other_sources_are_honoured(machine, tmp_path):
    machine.run(**call())
    usual = machine.launches[-1][0]
    module.reload()
    machine.run(**call())
    reloaded = machine.launches[-1][0]
    assert reloaded is not usual
    with module.use_sources(tmp_path):
        for _ in range(2):
            machine.run(**call())
        inside = machine.launches[-1][0]
        assert inside is machine.launches[-3][0]
    assert inside is not reloaded
    machine.run(**call())
    assert machine.launches[-1][0] is not inside


def test_the_environment_is_read_at_each_call(machine, monkeypatch):
    seen = []
    for name in ("hopper", "portable", None, "portable"):
        if name is None:
            monkeypatch.delenv(settings.SCHEDULE.name)
        else:
            monkeypatch.setenv(settings.SCHEDULE.name, name)
        machine.run(**call())
        seen.append(last_launch().schedule)
    assert seen[0] == "hopper"
    assert seen[1] == seen[3] == "portable"
    monkeypatch.setenv(settings.SCHEDULE.name, "absent")
    with pytest.raises(InputError, match="absent"):
        machine.run(**call())
    monkeypatch.setenv(settings.SCHEDULE.name, "portable")
    monkeypatch.setenv(settings.ARCH.name, "sm_80")
    machine.run(**call())
    assert last_launch().target == "sm_80"


def test_the_ctas_of_a_pipeline_and_of_nothing_else_start_together(machine, monkeypatch):
    for name, together in (("pipeline", True), ("hopper", False), ("hopper_single", False)):
        monkeypatch.setenv(settings.SCHEDULE.name, name)
        machine.run(**call(T=4096))
        assert last_launch().schedule == name
        kernels = [kernel for kernel, *_ in machine.launches[-2:]]
        assert [kernel.cooperative for kernel in kernels] == [False, together]


def test_auto_does_without_a_pipeline_where_its_ctas_cannot_start_together(machine, monkeypatch):
    """MPS may keep SMs from a process."""
    refusals = []
    launch = FakeKernel.launch

    def refuse(self, *args, cooperative=False, **kwargs):
        if cooperative:
            refusals.append(self)
            raise TogetherError("too large")
        launch(self, *args, **kwargs)

    monkeypatch.setattr(FakeKernel, "launch", refuse)
    for _ in range(2):
        machine.run(**call(T=32768))
        assert last_launch().schedule == "hopper_single"
        assert [k.name for k, *_ in machine.launches[-2:]] == list(last_launch().kernels)
    assert len(refusals) == 1, "it is remembered"
    monkeypatch.setenv(settings.SCHEDULE.name, "pipeline")
    with pytest.raises(TogetherError):
        machine.run(**call(T=32768))


def test_sources_of_ones_own_may_be_launched_otherwise(machine, tmp_path):
    tree = module.SourceTree(
        tmp_path, {("sm90/kda_prefill.cu", "kda_recurrence_single"): (640, 99)}
    )
    arguments = call(T=64)

    def launched():
        machine.run(**arguments)
        return [(k.name, k.block, k.smem) for k, *_ in machine.launches[-2:]]

    first, second = cuda.HOPPER_SINGLE.launches
    usual = [(first.entry, first.block, first.smem), (second.entry, second.block, second.smem)]
    assert launched() == usual
    for _ in range(2):
        with tree.active():
            assert launched() == [usual[0], ("kda_recurrence_single", 640, 99)]
        assert launched() == usual


def test_one_fused_kernel_is_all_there_is(machine, monkeypatch):
    monkeypatch.setenv(settings.SCHEDULE.name, "fused")
    monkeypatch.setattr(cuda, "_write_maps", lambda args, p, kernel: None)
    # Four value heads; clusters of two. Three share 4 x 65 slots of chunks, and 3 for each head.
    for sm_count, ctas, share, change in ((132, 8, 0, 3), (6, 6, 91, 3)):
        monkeypatch.setattr(cuda, "_sm_count", lambda index, n=sm_count: n)
        monkeypatch.setattr(layout, "_layouts", {})
        before = len(machine.launches)
        machine.run(**call(T=4096))
        [(kernel, grid, _, args)] = machine.launches[before:]
        assert (kernel.name, grid) == ("kda_fused", (ctas, 1, 1))
        assert not kernel.overlaps, "it does not wait for the kernel ahead of it"
        fused = cuda._FUSED_ARGS.unpack_from(args, cuda.ARGS_BYTES)
        assert (fused[0], fused[2]) == (share, change)
        assert last_launch().kernels == ("kda_fused",)


@pytest.mark.parametrize("tokens", [32 * 66, 10**6, 2**30])
def test_shares_are_counted_in_32_bits_or_there_are_none(tokens):
    """By the kernel: a cluster's number times a share, and the end of the last one's."""
    clusters, N = 66, 3
    p = SimpleNamespace(HV=96, B=1, T=tokens, N=N, checkpoint_state=None)
    share, nbytes = cuda._share(p, clusters)
    slots = p.HV * (tokens // 32 + N * (1 + cuda._CHANGE_SLOTS))
    if tokens < 2**30:
        assert clusters * share >= slots and (clusters + 1) * share < 2**31 and nbytes > 0
    else:
        assert slots > 2**31 and (share, nbytes) == (0, 0)


def test_tensor_maps_are_those_of_the_tensors_and_made_once(machine, monkeypatch):
    made = []

    def encode(driver, destination, address, shape, strides, box):
        assert destination % 64 == 0
        made.append((address, shape, strides, box))
        ctypes.memset(destination, len(made), 128)

    monkeypatch.setenv(settings.SCHEDULE.name, "fused")
    monkeypatch.setattr(cuda, "driver", lambda: None)
    monkeypatch.setattr(cuda.tensor_map, "encode_bf16", encode)
    wide = torch.zeros(1, 64, 3 * H, D, dtype=BF16)
    arguments = call(T=64, q=wide[:, :, H : 2 * H])
    maps = []
    for _ in range(2):
        machine.run(**arguments)
        maps.append(machine.launches[-1][3][cuda._MAPS_AT :])
    assert maps[0] == maps[1] == b"".join(bytes([i]) * 128 for i in (1, 2, 3, 4, 5))
    tensors = [arguments[name] for name in ("q", "k", "g", "v", "out")]
    assert [m[0] for m in made] == [x.data_ptr() for x in tensors]
    assert {m[1:2] + m[3:] for m in made} == {((H * D, 64, 1), (64, 32, 1))}
    assert [m[2][0] for m in made] == [2 * x.stride(1) for x in tensors]
    other = torch.zeros_like(wide)[:, :, H : 2 * H]
    machine.run(**(arguments | {"q": other}))
    machine.run(**arguments)
    machine.run(**(arguments | {"q": other}))
    assert len(made) == 10
    assert machine.launches[-2][3][cuda._MAPS_AT :] == maps[0]
    assert machine.launches[-1][3][cuda._MAPS_AT :] != maps[0]


def test_a_call_without_tokens_has_no_tensor_maps(machine, monkeypatch):
    monkeypatch.setenv(settings.SCHEDULE.name, "fused")
    flags = torch.tensor([True, False])
    machine.run(**pool_call(T=0, has_initial_state=flags))
    assert last_launch().kernels == ("kda_fused",)


@pytest.mark.parametrize("name", "qkvg")
def test_a_row_expanded_to_a_batch_goes_without_tensor_maps(machine, monkeypatch, name):
    """Its stride is 0, which TMA does not take."""
    monkeypatch.setenv(settings.SCHEDULE.name, "fused")
    monkeypatch.setattr(cuda, "_write_maps", lambda args, p, kernel: None)
    batch = call(T=64) | {"cu_seqlens": None}
    for key in ("q", "k", "v", "g", "beta", "out"):
        batch[key] = torch.cat([batch[key]] * 2)
    machine.run(**batch)
    assert last_launch().schedule == "fused"
    machine.run(**(batch | {name: batch[name][:1].expand_as(batch[name])}))
    assert last_launch().schedule == "hopper"


def test_auto_takes_its_schedule_by_the_sizes_of_the_call(machine, monkeypatch):
    """Two sequences of two heads: eight chains."""
    monkeypatch.setattr(cuda, "_write_maps", lambda args, p, kernel: None)
    for sm_count, T, schedule, kernel in (
        (132, 4096, "hopper_single", "kda_recurrence_single"),
        (7, 64, "hopper", "kda_recurrence"),
        (7, 4096, "fused", "kda_fused"),
    ):
        monkeypatch.setattr(cuda, "_sm_count", lambda index, n=sm_count: n)
        cuda._choose.cache_clear()
        monkeypatch.setattr(layout, "_layouts", {})
        machine.run(**call(T=T))
        last = last_launch()
        launched = tuple(kernel.name for kernel, *_ in machine.launches[-len(last.kernels) :])
        assert last.kernels == launched
        assert (last.schedule, last.kernels[-1]) == (schedule, kernel)
    for target in ("sm_80", "sm_100a", "sm_120a"):
        monkeypatch.setenv(settings.ARCH.name, target)
        machine.run(**call(T=4096))
        assert last_launch().schedule == "portable"


def test_a_setting_is_read_from_any_kind_of_environment(monkeypatch):
    assert settings.arch() is None
    monkeypatch.setattr(os, "environ", {settings.ARCH.name: "sm_80"})
    assert settings.arch() == "sm_80"
