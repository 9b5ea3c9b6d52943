"""The Triton backend on a CPU: what it accepts, and its kernels in Triton's interpreter.

The interpreter is slow, so heads are 16 to 48 channels wide. It rounds to bf16 by cutting off, so
exact limits are held with fp32 and fp16 inputs.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_jit.backends.base import Query, last_launch
from kda_jit.backends.triton import TritonBackend, config_for
from kda_jit.contract import KdaProblem, make_problem
from kda_jit.testing.cases import Case, Inputs
from kda_jit.testing.numeric import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels run in Triton's interpreter only: set TRITON_INTERPRET=1"
)
compiler = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 leaves nothing to compile")
# exp2 of a saturated gate is inf, on purpose: its sigmoid is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

MIXED = (0, 1, 15, 0, 0, 16, 17, 31, 33, 64, 100, 0)
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
NAN = float("nan")


def run(x: Inputs, workspace: Any = None, **buffers: Any) -> KdaProblem:
    """Runs the backend over outputs that hold NaN, so that whatever is not written shows."""
    buffers.setdefault("out", torch.full_like(x.v, NAN))
    if "state_indices" not in buffers:
        N, HV, V, K = x.N, x.v.shape[2], x.v.shape[3], x.k.shape[3]
        buffers.setdefault("final_state", torch.full((N, HV, V, K), NAN))
    problem = make_problem(*x.args, **(x.kwargs | buffers))
    TritonBackend().run(problem, workspace)
    return problem


def check(x: Inputs, problem: KdaProblem, limit: float | None = None) -> None:
    want = x.reference()
    limit = LIMITS[x.q.dtype] if limit is None else limit
    assert_close(
        "out", problem.out, want.out, limit, cu_seqlens=x.cu_seqlens, chunk=16, case=x.case
    )
    assert_close("final_state", problem.final_state, want.final_state, limit, case=x.case)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# -- against the recurrence ----------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("regime", ["random", "unbounded"])
@pytest.mark.parametrize(
    "K, V, heads, value_heads, dtype",
    [
        (32, 32, 1, 2, torch.float32),
        (16, 48, 2, 2, torch.float16),
        (40, 20, 1, 1, torch.float32),
        (32, 16, 1, 1, torch.bfloat16),
    ],
)
def test_mixed_lengths_match_the_recurrence(
    regime: str, K: int, V: int, heads: int, value_heads: int, dtype: torch.dtype
) -> None:
    """Empty sequences first, last and in a row; NaN in every row past the last token."""
    case = Case(1, MIXED, heads, value_heads, regime=regime, padding=19)
    x = case.tensors(dtype=dtype, head_dim=K, value_dim=V)
    problem = run(x)
    check(x, problem)
    assert problem.out[:, sum(MIXED) :].isnan().all(), "rows past cu_seqlens[-1] were written"
    launch = last_launch()
    assert launch is not None
    assert launch.backend == "triton"


@interpreter
@pytest.mark.parametrize(
    "regime",
    [
        "slow", "saturated_both", "correlated", "repeated", "tiny", "zero_rows", "huge",
        "large_state", "unbounded_real", "table_9_keep_near_keys",
    ],
)  # fmt: skip
def test_hard_numbers_stay_accurate(regime: str) -> None:
    x = Case(2, (17, 32), regime=regime).tensors(dtype=torch.float32, head_dim=32)
    check(x, run(x), 1e-4)


@interpreter
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_both_ends_of_the_gate_in_one_chunk(lower_bound: float | None) -> None:
    """exp(A_log) = 200: decays of 0 and of 1, which a difference of their sums must survive."""
    x = Case(3, (16, 40), regime="saturated_both").tensors(dtype=torch.float32, head_dim=32)
    x = x.replace(A_log=torch.full((1,), 200.0).log(), lower_bound=lower_bound)
    assert (x.g.abs() == 200).all()
    check(x, run(x), 1e-4)


@interpreter
@pytest.mark.parametrize("A_log", [90.0, -90.0])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_extreme_rates_stay_finite(A_log: float, lower_bound: float | None) -> None:
    """Past fp32's range, with gate logits of exactly 0, where inf * 0 lies in wait."""
    x = Case(4, (20,)).tensors(dtype=torch.float32, head_dim=16)
    g = torch.where(torch.arange(20).view(1, 20, 1, 1) % 3 == 0, 0.0, x.g)
    x = x.replace(g=g, A_log=torch.full((1,), A_log), dt_bias=torch.zeros(1, 16))
    check(x.replace(lower_bound=lower_bound), run(x.replace(lower_bound=lower_bound)))


@interpreter
def test_norms_beyond_the_range_of_fp32_squares() -> None:
    x = Case(5, (20,)).tensors(dtype=torch.float32, head_dim=16)
    x = x.replace(q=x.q * 1e30, k=x.k * 3e37)
    check(x, run(x))


@interpreter
@pytest.mark.parametrize("T", [1, 15, 16, 17, 33])
def test_dense_batch_over_strided_tokens(T: int) -> None:
    """Column slices of one projection, NaN in its other columns and after the last token."""
    x = Case(6, (T, T), 1, 2, packed=False).tensors(dtype=torch.float32, head_dim=16)

    def spread(y: Tensor) -> Tensor:
        wide = torch.full((2, T + 9, y[0, 0].numel() + 24), NAN)
        columns = wide[:, :T, 8 : 8 + y[0, 0].numel()]
        columns.copy_(y.reshape(2, T, -1))
        return columns.unflatten(-1, y.shape[2:])

    q, k, v, g, beta = (spread(y) for y in x.args)
    assert not q.is_contiguous()
    problem = run(x.replace(q=q, k=k, v=v, g=g, beta=beta), out=spread(torch.full_like(x.v, NAN)))
    check(x, problem)
    around = problem.out.as_strided((2, T + 9, 24 + 32), (problem.out.stride(0), 24 + 32, 1), 0)
    assert around[:, T:].isnan().all()
    assert around[:, :, :8].isnan().all()
    assert around[:, :, 40:].isnan().all()


@interpreter
def test_gate_and_beta_in_fp32_with_half_inputs() -> None:
    x = Case(7, (5, 20)).tensors(dtype=torch.float16, head_dim=16)
    y = Case(7, (5, 20)).tensors(dtype=torch.float32, head_dim=16)
    x = x.replace(g=y.g, beta=y.beta)
    assert x.g.dtype != x.q.dtype
    check(x, run(x))


@interpreter
@pytest.mark.parametrize("scale", [0.0, -0.1, None])
def test_scale(scale: float | None) -> None:
    x = Case(8, (20,), scale=scale).tensors(dtype=torch.float32, head_dim=16)
    check(x, run(x))


@interpreter
def test_offsets_beyond_32_bits() -> None:
    """Tokens 2^27 elements apart: the last ones lie past 2^31. Untouched pages cost no memory."""
    T, stride = 18, 1 << 27
    x = Case(9, (T,)).tensors(dtype=torch.float16, head_dim=16)
    memory = torch.empty(T * stride, dtype=torch.float16)

    def far(y: Tensor, column: int) -> Tensor:
        apart = memory.as_strided(y.shape, (T * stride, stride, *y.stride()[2:]), column)
        return apart.copy_(y)

    args = [far(y, 64 * i) for i, y in enumerate(x.args)]
    problem = run(
        x.replace(**dict(zip(("q", "k", "v", "g", "beta"), args, strict=True))),
        out=far(torch.full_like(x.v, NAN), 512),
    )
    check(x, problem)


# -- states --------------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("final", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("initial", [None, "float32", "bfloat16"])
def test_every_pair_of_state_dtypes(initial: str | None, final: torch.dtype) -> None:
    case = Case(10, (0, 18), initial=initial is not None, state_dtype=initial or "float32")
    x = case.tensors(dtype=torch.float32, head_dim=16)
    problem = run(x, final_state=torch.full((2, 1, 16, 16), NAN, dtype=final))
    check(x, problem, 1e-5 if final == torch.float32 else 1e-2)
    if initial != "float32" or final == torch.float32:  # nothing to round
        kept = torch.zeros(1, 16, 16) if x.initial_state is None else x.initial_state[0]
        assert same_bits(problem.final_state[0], kept.to(final)), "an empty sequence lost its state"


@interpreter
def test_final_state_over_initial_state() -> None:
    x = Case(11, (20, 3)).tensors(dtype=torch.float32, head_dim=16)
    want = run(x).final_state
    state = x.initial_state.clone()  # type: ignore[union-attr]
    run(x.replace(initial_state=state), final_state=state)
    assert same_bits(state, want)


@interpreter
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_pool_is_read_and_written_by_slot_only(index_dtype: torch.dtype) -> None:
    """Padded, fresh and continued sequences over a pool whose other slots hold NaN."""
    x = Case(12, (17, 3, 20, 0, 5), 1, 2).tensors(dtype=torch.float32, head_dim=16)
    storage = torch.full((8, 2 * 2 * 16 * 16), NAN)
    pool = storage[:, : 2 * 16 * 16].unflatten(1, (2, 16, 16))
    table = torch.full((5, 3), 99, dtype=index_dtype)
    indices = table[:, 1]  # a column of a block table
    indices.copy_(torch.tensor([6, -1, 0, 2, 7]))
    has = torch.tensor([True, True, False, False, False])
    assert x.initial_state is not None
    pool[6] = x.initial_state[0]
    before = storage.clone()
    problem = run(x.replace(initial_state=pool), state_indices=indices, has_initial_state=has)
    fresh = x.initial_state.clone()
    fresh[1:] = 0
    x = x.replace(initial_state=fresh)
    want = x.reference()
    assert_close("out", problem.out, want.out, 1e-5, cu_seqlens=x.cu_seqlens)
    for n, slot in enumerate(indices.tolist()):
        if slot >= 0:
            assert_close("state", pool[slot : slot + 1], want.final_state[n : n + 1], 1e-5)
            before[slot, : 2 * 16 * 16] = pool[slot].flatten()
    assert same_bits(storage, before), "memory outside the named slots changed"
    none = run(x.replace(initial_state=None))
    assert same_bits(problem.out[:, 20:40], none.out[:, 20:40]), "a fresh sequence is not from zero"


@interpreter
def test_a_slot_past_the_pool_is_no_slot() -> None:
    """On a GPU nobody looks at the indices before the kernel does."""
    x = Case(13, (17, 4)).tensors(dtype=torch.float32, head_dim=16)
    storage = torch.full((4, 1, 16, 16), NAN)
    storage[:2] = x.initial_state
    pool = storage[:2]
    indices = torch.tensor([1, 0])
    problem = make_problem(*x.args, **(x.kwargs | {"initial_state": pool}), state_indices=indices)
    before = storage.clone()
    TritonBackend().run(problem._replace(state_indices=torch.tensor([2, 0])), None)
    assert same_bits(storage[1:], before[1:])
    assert problem.out.isfinite().all()
    assert not same_bits(storage[0], before[0])


@interpreter
@pytest.mark.parametrize("regime", ["random", "unbounded"])
def test_checkpoint_is_the_final_state_of_the_cut_sequence(regime: str) -> None:
    x = Case(14, (40, 0, 32, 17, 50), regime=regime).tensors(dtype=torch.float16, head_dim=16)
    offsets = torch.tensor([16, 0, 32, 0, 48], dtype=torch.int32)
    saved = torch.full((5, 1, 16, 16), NAN)
    problem = run(x, checkpoint_state=saved, checkpoint_offsets=offsets)
    check(x, problem)
    cut = run(x.pack([(n, 0, int(m)) for n, m in enumerate(offsets)]))
    taken = offsets > 0
    assert same_bits(saved[taken], cut.final_state[taken])
    assert saved[~taken].isnan().all()
    without = run(x)
    assert same_bits(problem.out, without.out)
    assert same_bits(problem.final_state, without.final_state)


@interpreter
def test_checkpoints_that_cannot_be_are_not_written() -> None:
    x = Case(15, (40, 20, 20)).tensors(dtype=torch.float32, head_dim=16)
    saved = torch.full((3, 1, 16, 16), NAN)
    problem = make_problem(
        *x.args, **x.kwargs, checkpoint_state=saved,
        checkpoint_offsets=torch.tensor([16, 0, 0]),
    )  # fmt: skip
    TritonBackend().run(problem._replace(checkpoint_offsets=torch.tensor([24, 32, -16])), None)
    assert saved.isnan().all()
    check(x, problem)


# -- independence --------------------------------------------------------------------------------


@interpreter
@pytest.mark.parametrize("regime", ["random", "unbounded"])
def test_bits_depend_on_neither_neighbours_nor_later_tokens(regime: str) -> None:
    x = Case(16, (33, 5, 18), regime=regime).tensors(dtype=torch.float32, head_dim=16)
    packed = run(x)
    alone = run(x.sequence(2))
    assert same_bits(packed.out[:, 38:], alone.out)
    assert same_bits(packed.final_state[2:], alone.final_state)
    for cut in (1, 16, 21):
        assert same_bits(run(x.pack([(0, 0, cut)])).out, packed.out[:, :cut])


@interpreter
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_nan_stays_in_its_sequence(lower_bound: float | None) -> None:
    x = Case(17, (20, 18, 20)).tensors(dtype=torch.float32, head_dim=16)
    x = x.replace(lower_bound=lower_bound)
    clean = run(x)
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        dirty = getattr(x, name).clone()
        (dirty[1] if name == "initial_state" else dirty[0, 25])[:] = NAN
        got = run(x.replace(**{name: dirty}))
        for part in (slice(0, 20), slice(38, 58)):
            assert same_bits(got.out[:, part], clean.out[:, part]), name
        assert same_bits(got.final_state[::2], clean.final_state[::2]), name
        assert got.out[0, 25].isnan().any(), f"{name}: the NaN was lost"


@interpreter
def test_inputs_are_left_alone_and_runs_repeat() -> None:
    x = Case(18, (20, 18)).tensors(dtype=torch.float16, head_dim=16)
    before = [y.clone() for y in (*x.args, x.initial_state)]
    first, second = run(x), run(x)
    assert all(same_bits(a, b) for a, b in zip(before, (*x.args, x.initial_state), strict=True))
    assert same_bits(first.out, second.out)
    assert first.out.data_ptr() != second.out.data_ptr()


class RedzoneWorkspace:
    """Hands out garbage (NaN in every format) and keeps what lies after it."""

    def get(self, name: str, nbytes: int, *, caller: str) -> Tensor:
        self.memory = torch.full((nbytes + 4096,), 0xFF, dtype=torch.uint8)
        self.asked = nbytes
        return self.memory[:nbytes]


@interpreter
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("A_log, logit", [(100.0, -200.0), (100.0, 0.0), (-120.0, 3e38)])
def test_gates_whose_factors_overflow_are_no_nan(
    lower_bound: float | None, A_log: float, logit: float
) -> None:
    x = Case(22, (20,)).tensors(dtype=torch.float32, head_dim=16)
    x.g.fill_(logit)
    x.A_log.fill_(A_log)
    x.dt_bias.fill_(0.0 if logit <= 0.0 else logit)
    x = x.replace(lower_bound=lower_bound)
    check(x, run(x))


@interpreter
@pytest.mark.parametrize("lengths", [(1,) * 9, (17,) * 4, (0, 0, 16, 0), (15, 1, 31)])
def test_scratch_is_written_before_it_is_read_and_no_further(lengths: tuple[int, ...]) -> None:
    x = Case(19, lengths, regime="unbounded").tensors(dtype=torch.float32, head_dim=16)
    workspace = RedzoneWorkspace()
    check(x, run(x, workspace))
    assert (workspace.memory[workspace.asked :] == 0xFF).all()
    records = sum(lengths) // 16 + len(lengths)
    assert workspace.asked == sum(config_for(16, 16, torch.float32).scratch_bytes(records))


@interpreter
@pytest.mark.parametrize("ends", [[0, 30, 10, 20], [0, 5, 500, 20], [-40, 5, 9, 300]])
def test_broken_lengths_write_inside_the_buffers(ends: list[int]) -> None:
    """cu_seqlens on a GPU cannot be checked before the launch; wrong ones must not corrupt."""
    x = Case(20, (5, 5, 10), padding=12).tensors(dtype=torch.float32, head_dim=16)
    workspace = RedzoneWorkspace()
    storage = torch.full((1, 32 + 16, 1, 16), 7.0)
    out = storage[:, 8:40]
    problem = make_problem(*x.args, **x.kwargs, out=out)
    TritonBackend().run(problem._replace(cu_seqlens=torch.tensor(ends)), workspace)  # type: ignore[arg-type]
    assert (storage[:, :8] == 7).all()
    assert (storage[:, 40:] == 7).all()
    assert (workspace.memory[workspace.asked :] == 0xFF).all()


# -- what it accepts -----------------------------------------------------------------------------


def query(**changes: Any) -> Query:
    facts: dict[str, Any] = {
        "K": 128,
        "V": 128,
        "dtype": torch.bfloat16,
        "lower_bound": -5.0,
        "device": torch.device("cuda", 0),
        "capability": (9, 0),
    }
    return Query(**(facts | changes))


@compiler
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"K": 16, "V": 256, "dtype": torch.float16},
        {"K": 96, "V": 80, "dtype": torch.float32, "capability": (8, 0)},
        {"lower_bound": None, "capability": (12, 1), "g_dtype": torch.float32},
        {"misaligned": ("q",)},
    ],
)
def test_accepts(changes: dict[str, Any]) -> None:
    assert TritonBackend().rejects(query(**changes)) == []


@compiler
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"K": 8}, "K = 8"),
        ({"V": 512}, "V = 512"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"capability": (7, 5)}, "7.5"),
        ({"device": torch.device("cpu"), "capability": None}, "cpu"),
    ],
)
def test_rejects_with_what_it_found(changes: dict[str, Any], words: str) -> None:
    (reason,) = TritonBackend().rejects(query(**changes))
    assert words in reason


@compiler
def test_every_reason_is_named_at_once() -> None:
    reasons = TritonBackend().rejects(query(K=8, V=300, dtype=torch.float64, capability=(7, 0)))
    assert len(reasons) == 4


@interpreter
def test_the_interpreter_takes_the_cpu_and_no_gpu() -> None:
    cpu = query(device=torch.device("cpu"), capability=None)
    assert TritonBackend().rejects(cpu) == []
    (reason,) = TritonBackend().rejects(query())
    assert "TRITON_INTERPRET" in reason
