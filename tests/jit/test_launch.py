"""Kernel.launch against a stand-in for libcuda: what reaches the driver, byte by byte. No GPU."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import pytest

from kda_jit.errors import LaunchError
from kda_jit.jit.driver import Driver
from kda_jit.jit.launch import Kernel, TogetherError

FUNCTION = 0xF00D
CONTEXT = 0xC0
FUNCTION_ATTRIBUTES = {
    0: 384,
    1: 1024,
    3: 16,
    4: 168,
}  # by cuda.h: threads, static smem, local, registers
_INT = ctypes.c_int
_PTR = ctypes.c_void_p


class FakeCuda:
    """libcuda's entry points as C callbacks. Reads structs by cuda.h's offsets, not our classes."""

    def __init__(self, sizes: tuple[int, ...] = (136,)) -> None:
        self.sizes = sizes
        self.launches: list[dict[str, Any]] = []
        self.contexts: list[int] = [CONTEXT]
        self.answers: list[int] = []  # return codes of the next launches; 0 once used up
        self.attributes_set: list[tuple[int, int, int]] = []
        self.seen_by: list[tuple[int, int]] = []
        table = {
            "cuLaunchKernelEx": (self._launch, (_PTR, _PTR, _PTR, _PTR)),
            "cuGetErrorName": (self._name, (_INT, _PTR)),
            "cuFuncGetAttribute": (
                lambda out, what, function: self._write(out, FUNCTION_ATTRIBUTES[what]),
                (_PTR, _INT, _PTR),
            ),
            "cuFuncSetAttribute": (self._set, (_PTR, _INT, _INT)),
            "cuFuncGetParamInfo": (self._parameter, (_PTR, ctypes.c_size_t, _PTR, _PTR)),
            "cuDeviceGet": (lambda out, ordinal: self._write(out, ordinal), (_PTR, _INT)),
            "cuDeviceGetAttribute": (
                lambda out, what, device: self._write(out, 232448 if what == 97 else -1),
                (_PTR, _INT, _INT),
            ),
            "cuCtxSetCurrent": (self._set_context, (_PTR,)),
            "cuCtxPushCurrent_v2": (self._push, (_PTR,)),
            "cuCtxPopCurrent_v2": (self._pop, (_PTR,)),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
                lambda out, function, block, smem: self._write(
                    out, 2048 // block if self.contexts[-1] == CONTEXT else -1
                ),
                (_PTR, _PTR, _INT, ctypes.c_size_t),
            ),
        }
        for name, (function, kinds) in table.items():
            setattr(self, name, ctypes.CFUNCTYPE(_INT, *kinds)(function))
        self._unknown = ctypes.c_char_p(b"CUDA_ERROR_INVALID_VALUE")

    def _write(self, address: int, value: int) -> int:
        _INT.from_address(address).value = value
        return 0

    def _name(self, code: int, out: int) -> int:
        _PTR.from_address(out).value = ctypes.cast(self._unknown, _PTR).value
        return 0

    def _set(self, function: int, what: int, value: int) -> int:
        self.attributes_set.append((function, what, value))
        return 0

    def _parameter(self, function: int, index: int, offset: int, size: int) -> int:
        if index >= len(self.sizes):
            return 1
        ctypes.c_size_t.from_address(offset).value = sum(self.sizes[:index])
        ctypes.c_size_t.from_address(size).value = self.sizes[index]
        return 0

    def _set_context(self, context: int) -> int:
        self.contexts[-1] = context
        return 0

    def _push(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _pop(self, out: int) -> int:
        _PTR.from_address(out).value = self.contexts.pop()
        return 0

    def _launch(self, config: int, function: int, params: int, extra: int | None) -> int:
        if self.contexts[-1] == 0:
            return 201
        if self.answers:
            return self.answers.pop(0)
        *sizes, stream, attributes, count = struct.unpack("<7I4xQQI", ctypes.string_at(config, 52))
        pointer = _PTR.from_address(params).value
        size = sum(self.sizes)
        self.launches.append(
            {
                "grid": tuple(sizes[:3]),
                "block": tuple(sizes[3:6]),
                "smem": sizes[6],
                "stream": stream,
                "attributes": [
                    struct.unpack("<I4xi", ctypes.string_at(attributes + 72 * n, 12))
                    for n in range(count)
                ],
                "function": function,
                "args": ctypes.string_at(pointer, size) if size else b"",
                "extra": extra,
                "context": self.contexts[-1],
            }
        )
        self.seen_by.append((threading.get_ident(), config))
        return 0


def make(library: FakeCuda, current: int = 0) -> Kernel:
    return Kernel(
        "kda",
        "kda for sm_90a on cuda:0",
        FUNCTION,
        driver=Driver(library),
        context=CONTEXT,
        device_index=0,
        current_device=lambda: current,
    )


ARGS = bytes(range(136))


def test_every_field_arrives_and_the_struct_whole() -> None:
    library = FakeCuda()
    buffer = ctypes.create_string_buffer(ARGS, len(ARGS))
    make(library).launch((3, 4, 5), 384, 200_000, 0x7F00DEADBEEF, buffer)
    assert library.launches == [
        {
            "grid": (3, 4, 5),
            "block": (384, 1, 1),
            "smem": 200_000,
            "stream": 0x7F00DEADBEEF,
            "attributes": [],
            "function": FUNCTION,
            "args": ARGS,
            "extra": None,
            "context": CONTEXT,
        }
    ]


def test_bytes_and_structures_are_taken_alike() -> None:
    class Args(ctypes.Structure):
        _fields_ = [("pointer", ctypes.c_void_p), ("rest", ctypes.c_float * 32)]

    library = FakeCuda()
    kernel = make(library)
    args = Args(0x1234)
    args.rest[31] = 0.0883883
    kernel.launch((1, 1, 1), 32, 0, 0, args)
    kernel.launch((1, 1, 1), 32, 0, 0, bytes(args))
    assert library.launches[0]["args"] == library.launches[1]["args"] == bytes(args)
    assert struct.unpack("<f", library.launches[0]["args"][-4:])[0] == pytest.approx(0.0883883)


def test_pdl_is_an_attribute_of_that_launch_alone() -> None:
    library = FakeCuda()
    kernel = make(library)
    for pdl in (False, True, False):
        kernel.launch((1, 1, 1), 32, 0, 0, ARGS, pdl=pdl)
    assert [launch["attributes"] for launch in library.launches] == [[], [(6, 1)], []]


@pytest.mark.parametrize("args", [b"", ARGS[:-1], ARGS + b"\0", None])
def test_struct_of_another_size_never_reaches_the_driver(args: bytes | None) -> None:
    library = FakeCuda()
    with pytest.raises(LaunchError, match="expected 136 bytes of arguments, got"):
        make(library).launch((1, 1, 1), 32, 0, 0, args)
    assert library.launches == []


def test_repeated_launch_reads_its_struct_and_every_change_anew() -> None:
    library = FakeCuda()
    kernel = make(library)
    buffer = ctypes.create_string_buffer(ARGS, len(ARGS))
    other = ctypes.create_string_buffer(ARGS[::-1], len(ARGS))
    usual: tuple[Any, ...] = ((1, 2, 3), 32, 64, 7)
    kernel.launch(*usual, buffer)
    buffer[0] = b"\xff"
    kernel.launch(*usual, buffer)
    kernel.launch(*usual, other)
    kernel.launch(*usual, buffer)
    assert [launch["args"] for launch in library.launches] == [
        ARGS,
        b"\xff" + ARGS[1:],
        ARGS[::-1],
        b"\xff" + ARGS[1:],
    ]
    for changed in (((1, 2, 4), 32, 64, 7), ((1, 2, 3), 33, 64, 7), ((1, 2, 3), 32, 65, 7)):
        kernel.launch(*changed, buffer)
        kernel.launch(*usual, buffer)
        found, again = library.launches[-2:]
        assert (found["grid"], found["block"][0], found["smem"], found["stream"]) == changed
        assert (again["grid"], again["block"][0], again["smem"], again["stream"]) == usual
    kernel.launch(*usual[:3], 8, buffer)
    assert library.launches[-1]["stream"] == 8


def test_launch_that_fails_half_way_leaves_nothing_behind() -> None:
    library = FakeCuda()
    kernel = make(library)
    good = ctypes.create_string_buffer(ARGS, len(ARGS))
    short = ctypes.create_string_buffer(135)
    for _ in range(2):
        kernel.launch((1, 2, 3), 32, 64, 7, good)
        with pytest.raises(TypeError):
            kernel.launch((9, 9, 9), 32, "many", 7, good)  # type: ignore[arg-type]
        with pytest.raises(LaunchError, match="got 135"):
            kernel.launch((1, 2, 3), 32, 64, 7, short)
    assert [launch["grid"] for launch in library.launches] == [(1, 2, 3), (1, 2, 3)]
    assert {launch["args"] for launch in library.launches} == {ARGS}


def test_kernel_without_parameters_is_launched_without() -> None:
    library = FakeCuda(sizes=())
    kernel = make(library)
    assert kernel.args_bytes == 0
    kernel.launch((1, 1, 1), 32, 0, 0)
    assert library.launches[0]["args"] == b""
    with pytest.raises(LaunchError, match="expected 0 bytes of arguments, got 136"):
        kernel.launch((1, 1, 1), 32, 0, 0, ARGS)


def test_kernel_with_several_parameters_is_refused_with_advice() -> None:
    """Its second pointer would be read from behind our array of one."""
    library = FakeCuda(sizes=(8, 128))
    with pytest.raises(LaunchError, match=r"got one with several\. Put them into a struct"):
        make(library).launch((1, 1, 1), 32, 0, 0, ARGS)
    assert library.launches == []


def test_driver_too_old_for_parameter_sizes_launches_unchecked() -> None:
    library = FakeCuda()
    del library.cuFuncGetParamInfo
    kernel = make(library)
    assert kernel.args_bytes is None
    kernel.launch((1, 1, 1), 32, 0, 0, ARGS)
    assert library.launches[0]["args"] == ARGS


def test_attributes_are_read_and_shared_memory_set_to_the_most_once() -> None:
    library = FakeCuda()
    kernel = make(library)
    assert (kernel.max_threads, kernel.smem_static, kernel.local_bytes, kernel.registers) == (
        384,
        1024,
        16,
        168,
    )
    assert kernel.smem_dynamic == 232448 - 1024
    kernel.launch((1, 1, 1), 32, 232448 - 1024, 0, ARGS)
    assert library.attributes_set == [(FUNCTION, 8, 232448 - 1024), (FUNCTION, 9, 100)]


def test_error_has_the_drivers_name_and_what_was_asked() -> None:
    library = FakeCuda()
    library.answers = [1]
    with pytest.raises(LaunchError) as caught:
        make(library).launch((7, 1, 1), 512, 999_999, 0, ARGS)
    for words in (
        "kda for sm_90a on cuda:0: CUDA_ERROR_INVALID_VALUE (1)",
        "grid (7, 1, 1)",
        "block 512 of at most 384",
        "999999 bytes",
        str(232448 - 1024),
    ):
        assert words in str(caught.value)


def test_too_few_multiprocessors_for_a_cooperative_launch_are_told_apart() -> None:
    library = FakeCuda()
    library.answers = [720, 1]
    kernel = make(library)
    with pytest.raises(TogetherError, match=r"\(720\)"):
        kernel.launch((132, 1, 1), 384, 0, 0, ARGS, cooperative=True)
    with pytest.raises(LaunchError) as caught:
        kernel.launch((132, 1, 1), 384, 0, 0, ARGS, cooperative=True)
    assert caught.type is LaunchError


def test_thread_without_a_context_gets_the_kernels_own() -> None:
    library = FakeCuda()
    kernel = make(library)
    library.contexts = [0]
    kernel.launch((1, 1, 1), 32, 0, 0, ARGS)
    assert library.contexts == [CONTEXT]
    assert [launch["context"] for launch in library.launches] == [CONTEXT]


def test_other_current_device_is_left_as_it_was() -> None:
    library = FakeCuda()
    kernel = make(library, current=1)
    library.contexts = [0xC1]
    kernel.launch((1, 1, 1), 32, 0, 0, ARGS)
    assert library.launches[0]["context"] == CONTEXT
    assert library.contexts == [0xC1]
    library.answers = [1]
    with pytest.raises(LaunchError):
        kernel.launch((1, 1, 1), 32, 0, 0, ARGS)
    assert library.contexts == [0xC1]


def test_occupancy_is_asked_in_the_kernels_own_context() -> None:
    library = FakeCuda()
    kernel = make(library, current=1)
    library.contexts = [0xC1]
    assert kernel.max_active_blocks(256, 1000) == 8
    assert library.contexts == [0xC1]


def test_threads_never_mix_their_launches() -> None:
    """One kernel, eight threads, each with its own grid, stream and struct: they stay together."""
    library = FakeCuda()
    kernel = make(library)
    rounds = 300
    all_done = threading.Barrier(8)  # so that no thread's number is used again

    def run(me: int) -> None:
        buffer = ctypes.create_string_buffer(bytes([me]) * 136, 136)
        for _ in range(rounds):
            kernel.launch((me + 1, 1, 1), 32 * (me + 1), me, 1000 + me, buffer, pdl=me % 2 == 1)
        all_done.wait(60)

    threads = [threading.Thread(target=run, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launches) == 8 * rounds
    for launch in library.launches:
        me = launch["grid"][0] - 1
        assert launch["block"] == (32 * (me + 1), 1, 1)
        assert (launch["smem"], launch["stream"]) == (me, 1000 + me)
        assert launch["args"] == bytes([me]) * 136
        assert len(launch["attributes"]) == me % 2
    configs = {
        thread: {c for t, c in library.seen_by if t == thread} for thread, _ in library.seen_by
    }
    assert all(len(found) == 1 for found in configs.values())  # built once per thread ...
    assert len(set.union(*configs.values())) == 8  # ... and never shared


def test_driver_without_launch_ex_says_what_it_needs() -> None:
    library = FakeCuda()
    del library.cuLaunchKernelEx
    with pytest.raises(LaunchError, match=r"cuLaunchKernelEx; 11\.8"):
        Driver(library)
