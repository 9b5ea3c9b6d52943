"""Pack and scatter: Triton's kernels in its interpreter, and the torch path beside them."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from kda_jit import KDACore
from kda_jit.pack import Group, PackInputs, pack, scatter, triton_can_pack
from kda_jit.testing.serving import GARBAGE, Engine, Work

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")
NAN = float("nan")

#: Whether to run Triton's kernel; on a CPU that takes the interpreter.
paths = pytest.mark.parametrize(
    "triton",
    [
        pytest.param(False, id="torch"),
        pytest.param(
            True,
            id="triton",
            marks=pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1"),
        ),
    ],
)


def inputs(T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> PackInputs:
    torch.manual_seed(0)
    shapes = ((H, K), (H, K), (HV, V), (HV, K), (HV,))
    return PackInputs(*(torch.randn(1, T, *shape).to(dtype) for shape in shapes))


def group(tokens: list[int], rows: int, dtype: torch.dtype, sequences: int = 2) -> Group:
    """Live tokens, then garbage up to the capacity and beyond; empty sequences at the end."""
    garbage = [GARBAGE, -GARBAGE, 0] * rows
    ends = [0, *[len(tokens)] * sequences]
    return Group(
        torch.tensor([*tokens, *garbage], dtype=dtype), torch.tensor(ends, dtype=dtype), rows
    )


def buffers(x: PackInputs, rows: int) -> PackInputs:
    return PackInputs(*(y.new_full((1, rows, *y.shape[2:]), NAN) for y in x))


SIZES = [
    (1, 1, 8, 8, torch.float32),
    (1, 2, 16, 48, torch.bfloat16),
    (12, 12, 128, 128, torch.bfloat16),
    (3, 3, 40, 20, torch.float16),
]
GROUPS = [
    ([0, 4, 5, 6], [1, 2, 3]),
    ([6, 5, 4, 3, 2, 1, 0], []),
    ([], [3]),
    ([], []),
    ([2], [6, 0]),
]


@paths
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("first, second", GROUPS)
@pytest.mark.parametrize("H, HV, K, V, dtype", SIZES)
def test_pack_and_scatter_by_token(
    H: int, HV: int, K: int, V: int, dtype: torch.dtype,
    first: list[int], second: list[int], index_dtype: torch.dtype, triton: bool,
) -> None:  # fmt: skip
    x = inputs(7, H, HV, K, V, dtype)
    groups = group(first, 8, index_dtype), group(second, 5, index_dtype)
    packed = buffers(x, 13)
    record = pack(x, packed, *groups, triton=triton)
    assert record.kernels == (("kda_pack",) if triton else ("torch_pack",))
    for y, z in zip(x, packed):
        assert torch.equal(z[:, : len(first)], y[:, first])
        assert torch.equal(z[:, 8 : 8 + len(second)], y[:, second])
        assert z[:, len(first) : 8].isnan().all()
        assert z[:, 8 + len(second) :].isnan().all()

    out = torch.full_like(x.v, NAN)
    record = scatter(packed.v, out, *groups, triton=triton)
    assert record.kernels == (("kda_scatter",) if triton else ("torch_scatter",))
    listed = first + second
    assert torch.equal(out[:, listed], x.v[:, listed])
    others = [t for t in range(7) if t not in listed]
    assert out[:, others].isnan().all()


@paths
def test_columns_of_a_projection_are_read_in_place(triton: bool) -> None:
    x = inputs(7, 2, 2, 16, 16, torch.bfloat16)
    wide = torch.full((1, 7, 4 * 32 + 2 + 50), NAN, dtype=torch.bfloat16)
    columns, at = [], 8
    for y in x:
        flat = wide[..., at : at + y[0, 0].numel()]
        columns.append(flat.unflatten(2, y.shape[2:]).copy_(y))
        at += y[0, 0].numel() + 8
    groups = group([1, 6], 3, torch.int32), group([4], 2, torch.int32)
    packed = buffers(x, 5)
    pack(PackInputs(*columns), packed, *groups, triton=triton)
    for y, z in zip(x, packed):
        assert torch.equal(z[:, [0, 1, 3]], y[:, [1, 6, 4]])
    out = torch.full((1, 9, 2 * 16 + 8), NAN, dtype=torch.bfloat16)
    view = out[:, 1:8, 8:].unflatten(2, (2, 16))
    scatter(packed.v, view, *groups, triton=triton)
    assert torch.equal(view[:, [1, 6, 4]], x.v[:, [1, 6, 4]])
    assert int(out.isfinite().sum()) == 3 * 32


@paths
def test_tokens_outside_the_step_are_ignored(triton: bool) -> None:
    """A wrong index inside the live part costs its own row and nothing else."""
    x = inputs(7, 1, 1, 8, 8, torch.float32)
    groups = group([0, 7, 2], 3, torch.int32), group([-1, 5], 2, torch.int32)
    packed = buffers(x, 5)
    pack(x, packed, *groups, triton=triton)
    assert torch.equal(packed.g[:, [0, 2, 4]], x.g[:, [0, 2, 5]])
    assert packed.g[:, [1, 3]].isnan().all()
    out = torch.full((1, 9, 1, 8), NAN)
    scatter(packed.v, out[:, 1:8], *groups, triton=triton)
    assert torch.equal(out[:, [1, 3, 6]], x.v[:, [0, 2, 5]])
    assert out[:, [0, 2, 4, 5, 7, 8]].isnan().all()


@paths
def test_a_live_count_beyond_the_capacity_stops_there(triton: bool) -> None:
    x = inputs(7, 1, 1, 8, 8, torch.float32)
    first = Group(torch.arange(7), torch.tensor([0, 7]), 3)
    second = Group(torch.tensor([6]), torch.tensor([0, 1]), 1)
    packed = buffers(x, 6)
    pack(x, packed, first, second, triton=triton)
    assert torch.equal(packed.q[:, [0, 1, 2, 3]], x.q[:, [0, 1, 2, 6]])
    assert packed.q[:, 4:].isnan().all()


def test_triton_packs_where_its_kernels_run() -> None:
    assert triton_can_pack(CPU) == INTERPRETED
    assert triton_can_pack(torch.device("cuda", 0)) != INTERPRETED


@pytest.mark.skipif(not INTERPRETED, reason="set TRITON_INTERPRET=1")
# exp2 of a saturated gate is inf, on purpose: its sigmoid is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("apart", [False, True])
def test_triton_layer_serves_every_kind_of_step(apart: bool) -> None:
    """The whole layer on Triton's kernels: what ran is asserted, all else the engine checks."""
    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_spec": 2}
    core = KDACore(
        1, 16, -5.0, **sizes, dtype=torch.float32, device="cpu", num_value_heads=2,
        backend="triton", decodes_apart=apart,
    )  # fmt: skip
    assert (core.backend, core.recurrent_backend) == ("triton", "triton")
    engine = Engine(core, slots=16, limit=1e-4)
    a, b, c = engine.add(18), engine.add(1), engine.add(20)

    def kernels(*work: Work, **options: Any) -> tuple[str, ...]:
        record = engine.step(work, **options)
        assert {launch.backend for launch in record.launches} == {"triton"}
        return record.kernels

    prefill = ("kda_prepare", "kda_recurrence")
    assert kernels(Work(a, "prefill", 17, checkpoint=16), padding=3) == prefill
    decodes = ("kda_recurrent",) if apart else ()
    got = kernels(Work(b, "decode"), Work(a, "prefill", 1), strided=True, idle_rows=2)
    assert got == prefill + decodes
    assert kernels(Work(a, "speculative", 3, 2), Work(b, "speculative", 2, 0)) == ("kda_recurrent",)
    got = kernels(
        Work(a, "speculative", 2, 1), Work(b, "decode"), Work(c, "prefill", 20, checkpoint=16),
        padding=2, idle_sequences=1, strided=True, index_dtype=torch.int64,
    )  # fmt: skip
    assert got == ("kda_pack", *prefill, *decodes, "kda_recurrent", "kda_scatter")
    assert kernels(Work(a, "decode"), Work(c, "decode"), idle_sequences=2) == ("kda_recurrent",)
    engine.preempt(c)
    d = engine.resume(c, 0, 3)
    assert kernels(Work(d, "prefill", 3)) == prefill


def test_the_engine_sees_what_a_pack_gets_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of other tokens, as when only q, k and v are gathered: the comparison must fail."""
    from kda_jit import layer

    def wrong(x: PackInputs, packed: PackInputs, *groups: Group, triton: bool) -> Any:
        record = pack(x, packed, *groups, triton=triton)
        packed.g[:, : x.g.shape[1]] = x.g[:, : packed.g.shape[1]]
        return record

    sizes: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_spec": 2}
    core = KDACore(1, 16, -5.0, **sizes, dtype=torch.float32, device="cpu", backend="torch")
    engine = Engine(core, slots=16)
    a, b = engine.add(9), engine.add(4)
    engine.step([Work(a, "prefill", 9)])
    monkeypatch.setattr(layer, "pack", wrong)
    with pytest.raises(AssertionError, match="relative RMS error"):
        engine.step([Work(a, "speculative", 3, 2), Work(b, "prefill", 4)])
