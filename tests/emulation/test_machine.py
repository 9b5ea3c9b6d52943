"""The emulated machine by itself: number formats, products, copies, and errors that it must see."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kda_jit.jit import KernelSpec, sources, tensor_map
from tests.emulation import machine
from tests.emulation.machine import EmulatedKernel, EmulationError

PROBES = Path(__file__).parent / "probes" / "probe.cu"
ENTRIES = tuple(
    re.findall(r"__global__ void (?:__cluster_dims__\(.*?\) )?(\w+)\(", PROBES.read_text())
)
ARGS = struct.Struct("@PPPq")
SMEM = 32768

Run = Callable[..., None]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EmulatedKernel]:
    folder = tmp_path_factory.mktemp("probes") / "kernels_src"
    shutil.copytree(sources.root() / "common", folder / "common")
    shutil.copy(PROBES, folder)
    return machine.load(KernelSpec(PROBES.name, ENTRIES, "sm_90a"), folder)


@pytest.fixture
def run(kernels: dict[str, EmulatedKernel]) -> Run:
    """One kernel, one CTA of a warp unless said otherwise, with a schedule of its own each time."""

    def enqueue_and_run(
        name: str,
        given: Tensor | None,
        out: Tensor | None = None,
        *,
        number: int = 0,
        flags: Tensor | None = None,
        block: int = 32,
        grid: int = 1,
        smem: int = SMEM,
        more: bytes = b"",
        seed: int | None = None,
    ) -> None:
        pointers = (0 if x is None else x.data_ptr() for x in (given, out, flags))
        args = ARGS.pack(*pointers, number) + more
        kernels[name].launch((grid, 1, 1), block, smem, 0, args)
        machine.synchronize(random.randrange(1 << 30) if seed is None else seed)

    return enqueue_and_run


def odd_floats() -> Tensor:
    """Ordinary and extreme ones of either sign, ties between two of f16 and bf16, inf and NaN."""
    g = torch.Generator().manual_seed(1)
    some = torch.randn(2000, generator=g) * torch.exp2(
        torch.randint(-130, 128, (2000,), generator=g)
    )
    f16 = torch.arange(0, 0x7C00, 7, dtype=torch.int16).view(torch.float16).float()
    bf16 = torch.arange(0, 0x7F80, 7, dtype=torch.int16).view(torch.bfloat16).float()
    ties = [(x[:-1].double() + x[1:].double()).div(2).float() for x in (f16, bf16)]
    ends = torch.tensor([0.0, 65504.0, 65519.9, 65520.0, 3.4e38, torch.inf, torch.nan, 6e-8, 1e-45])
    found = torch.cat([some, f16, bf16, *ties, ends])
    return torch.cat([found, -found])


def same_numbers(got: Tensor, want: Tensor) -> bool:
    """Equal, zeros of either sign and all NaN being one."""
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num(0.0, torch.inf, -torch.inf), want.nan_to_num(0.0, torch.inf, -torch.inf)
    )


def test_conversions_round_to_nearest_even(run: Run) -> None:
    x = odd_floats()
    x = x[: len(x) // 2 * 2]
    out = torch.empty(x.numel(), dtype=torch.int32)
    run("convert", x, out, number=x.numel() // 2)
    words = out.view(-1, 2)
    assert same_numbers(words[:, 0].contiguous().view(torch.float16), x.half())
    assert same_numbers(words[:, 1].contiguous().view(torch.bfloat16), x.bfloat16())


def test_approximations_are_near_and_flush(run: Run) -> None:
    x = odd_floats()
    out = torch.empty(x.numel(), 3)
    run("approximate", x, out, number=x.numel())
    tiny = 2.0**-126
    flushed = torch.where(x.abs() < tiny, torch.zeros_like(x).copysign(x), x).double()
    for got, want in zip(out.unbind(1), (flushed.exp2(), flushed.reciprocal(), flushed.rsqrt())):
        want = torch.where(want.abs() < tiny, 0.0, want).float()
        assert torch.equal(got.isnan(), want.isnan())
        close = torch.isclose(got, want, rtol=2.0**-22, atol=0.0, equal_nan=True)
        assert close.all(), x[~close]


def test_a_nan_loses_against_a_number(run: Run) -> None:
    g = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31 - 1, (4000, 2), generator=g, dtype=torch.int32)
    out = torch.empty_like(words)
    run("largest", words, out, number=len(words))
    positive = (words[:, 0] & 0x7FFF7FFF, words[:, 1] & 0x7FFF7FFF)
    for column, dtype in enumerate((torch.float16, torch.bfloat16)):
        first, second = (x.contiguous().view(dtype).float() for x in positive)
        got = out[:, column].contiguous().view(dtype).float()
        # Not fmax: of a signalling NaN and a number it makes a NaN.
        want = torch.where(first.isnan(), second, torch.maximum(first, second))
        assert same_numbers(got, torch.where(second.isnan(), first, want))


def test_products_of_a_warp(run: Run) -> None:
    g = torch.Generator().manual_seed(3)
    a, b = torch.randn(16, 16, generator=g).half(), torch.randn(8, 16, generator=g).half()
    x, y = torch.randn(16, 8, generator=g), torch.randn(8, 8, generator=g)
    given = torch.cat(
        [a.flatten(), b.flatten(), *(z.view(torch.float16).flatten() for z in (x, y))]
    )
    out = torch.empty(2, 16, 8)
    run("multiply", given, out)
    base = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(2, 1, 1, 2).expand(2, 8, 4, 2).reshape(16, 8)
    assert torch.equal(out[0], (base.double() + a.double() @ b.double().T).float())
    tf32 = [(z.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for z in (x, y)]
    assert torch.equal(out[1], (tf32[0] @ tf32[1].T).float())
    assert not torch.equal(out[1], (x.double() @ y.double().T).float())


@pytest.mark.parametrize("seed", range(4))
def test_products_of_a_warpgroup_are_there_after_the_wait(run: Run, seed: int) -> None:
    g = torch.Generator().manual_seed(4)
    a, rows, columns = (
        torch.randn(*s, generator=g).half() for s in ((64, 16), (64, 16), (16, 128))
    )
    given = torch.cat([x.flatten() for x in (a, rows, columns)])
    out = torch.empty(64, 192)
    run("multiply_by_warpgroup", given, out, block=128, seed=seed)
    want = torch.cat([a.double() @ rows.double().T, a.double() @ columns.double()], 1)
    assert torch.equal(out, want.float())
    run("multiply_by_warpgroup", given, out, block=128, number=1, seed=seed)
    assert out.isnan().all()
    with pytest.raises(EmulationError, match="A of a product in flight"):
        run("multiply_by_warpgroup", given, out, block=128, number=2, seed=seed)


def test_a_copy_is_nan_until_it_is_waited_for(run: Run) -> None:
    x, out = torch.randn(64), torch.empty(64)
    early = []
    for seed in range(12):
        run("copy_by_lanes", x, out, seed=seed)
        assert torch.equal(out, x)
        run("copy_by_lanes", x, out, number=1, seed=seed)
        early.append(int(out.isnan().sum()))
    assert max(early) == 64, "some schedule lands all of them late"
    assert min(early) < 64, "and another one lands some at once"


def test_copies_through_a_peer_and_bytes_that_never_come(run: Run) -> None:
    x = torch.randn(64)
    for seed in range(8):
        out = torch.empty(64)
        run("copy_by_peers", x, out, grid=2, seed=seed)
        assert torch.equal(out, x)
    with pytest.raises(EmulationError, match=r"deadlock(.|\n)* 1\.0  copy_by_peers: .* mbarrier"):
        run("copy_by_peers", x, torch.empty(64), grid=2, number=16)


@pytest.mark.parametrize("token", [0, 7, -3, 100])
def test_tiles_are_swizzled_and_zero_outside_of_the_tensor(run: Run, token: int) -> None:
    T, wide = 40, torch.randn(1, 40, 3, 128).bfloat16()
    x = wide[:, :, 1:2]
    buffer = ctypes.create_string_buffer(128 + 64)
    at = ctypes.addressof(buffer)
    at += -at % 64
    shape, strides = (128, T, 1), (2 * x.stride(1), 2 * x.stride(1) * T)
    tensor_map.encode_bf16(machine.driver(), at, x.data_ptr(), shape, strides, (64, 32, 1))
    out = torch.empty(32, 8, 8, dtype=torch.bfloat16)
    more = bytes(32) + ctypes.string_at(at, 128)
    run("copy_tile", None, out, number=token, more=more)
    want = torch.zeros(32, 64, dtype=torch.bfloat16)
    for row in range(32):
        if 0 <= token + row < T:
            want[row] = x[0, token + row, 0, 64:]
    pieces = want.view(32, 8, 8)
    swizzled = torch.stack([pieces[r][[p ^ (r & 7) for p in range(8)]] for r in range(32)])
    assert torch.equal(out, swizzled)


@pytest.mark.parametrize(
    "number, words",
    [
        (
            0,
            r"deadlock.*\n  0\.0  err: for barrier 1, 32 of 64 .* kernels_src/probe\.cu:\d+",
        ),
        (1, r"not initialised.*\n  in err, CTA 0, warp \d, lane \d+ at kernels_src/probe\.cu:\d+"),
        (2, "outside of the CTA's"),
        (3, "no multiple of 16"),
        (4, "where no memory is"),
        (5, r"deadlock(.|\n)*a flag in global memory that is 0"),
        (6, "ends with copies from or to its shared memory in flight"),
        (7, "after some of its lanes have ended|while others of its warp wait"),
        (8, "past the end of its shared memory"),
        (9, "some lanes of a warp"),
        (10, "steps without any that others could wait for"),
    ],
)
def test_what_has_no_meaning_is_an_error_with_its_place(run: Run, number: int, words: str) -> None:
    flags, out = torch.zeros(4, dtype=torch.int32), torch.zeros(64)
    with pytest.raises(EmulationError, match=words):
        run("err", None, out, number=number, flags=flags, block=64, smem=1024)
    run("err", None, out, number=-1, flags=flags, block=64, smem=1024)  # and the machine goes on


@pytest.mark.parametrize("value", [5, 5 << 32, (1 << 62) + 1])
def test_all_of_a_flag_of_64_bits_counts(run: Run, value: int) -> None:
    for seed in range(20):
        flags, out = torch.zeros(2, dtype=torch.int64), torch.zeros(32, dtype=torch.int32)
        flags[1] = value ^ 1 << (40 if seed % 2 else 20)  # what one half alone would be taken for
        run("hand_over", None, out, flags=flags, number=value, grid=2, seed=seed)
        assert bool((out == 7).all())
        assert int(flags[1]) == value


def test_an_overlapping_grid_sees_what_it_waited_for(kernels: dict[str, EmulatedKernel]) -> None:
    seen = set()
    for seed in range(40):
        for number in (0, 1):
            flags = torch.zeros(2, dtype=torch.int32)
            args = ARGS.pack(0, 0, flags.data_ptr(), number)
            kernels["write_late"].launch((3, 1, 1), 32, 0, 0, args)
            kernels["read_early"].launch((1, 1, 1), 32, 0, 0, args, pdl=True)
            machine.synchronize(seed)
            assert int(flags[0]) == 7
            seen.add((number, int(flags[1])))
    assert seen == {(0, 7), (1, 7), (1, 0)}
