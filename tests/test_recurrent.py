"""Decode and verification: the laws, over the reference and both backends, and the public call.

A `way` is the reference, "torch" or "triton": on the CPU, the last one in Triton's interpreter.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import kda_jit
from kda_jit.backends import recurrent_torch
from kda_jit.backends.base import LaunchRecord
from kda_jit.contract.recurrent import make_recurrent_problem
from kda_jit.errors import (
    BackendNameError,
    CaptureError,
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    NoBackendError,
)
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case, Step, assert_close, run_recurrent_reference
from kda_jit.testing.runner import why_not

K, V = 16, 24
NAN = float("nan")
SENTINEL = 7.0
TOKENS = ("q", "k", "v", "g", "beta")
# In the interpreter, numpy warns of what is on purpose: a sigmoid of 0, and NaN in a whole row.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)


class Way:
    """Runs a step on a device, and knows how exact it has to be."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self.bitwise = name != "reference"
        #: With fp32 inputs and states.
        self.limit = 1e-6 if name == "reference" else 1e-5
        #: With bf16 states. The interpreter rounds to bf16 by cutting off.
        self.bf16_limit = 1e-2 if name == "triton" and device.type == "cpu" else 4e-3

    def arguments(self, step: Step) -> dict[str, Any]:
        return step.arguments(self.device, torch.float32, K, V)

    def __call__(self, arguments: dict[str, Any], **changes: Any) -> Tensor:
        """The output. The pool is written in place; unless given, `out` holds NaN before."""
        arguments = arguments | changes
        arguments.setdefault("out", torch.full_like(arguments["v"], NAN))
        if self.name == "reference":
            run_recurrent_reference(make_recurrent_problem(**arguments))
            return arguments["out"]
        out = kda_jit.recurrent(**arguments, backend=self.name)
        launch = kda_jit.last_launch()
        assert launch is not None
        assert launch.backend in (self.name, "none"), launch
        return out

    def same(self, got: Tensor, want: Tensor) -> bool:
        """Equal bits, or equal to rounding where the way does not promise bits."""
        if self.bitwise:
            return torch.equal(bits(got), bits(want))
        return torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.fixture(scope="module", params=["reference", "torch", "triton"])
def way(request: pytest.FixtureRequest, device: torch.device) -> Way:
    reason = why_not(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    return Way(request.param, device)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: x.clone() if isinstance(x, Tensor) else x for k, x in arguments.items()}


def lengths_of(arguments: dict[str, Any]) -> list[int]:
    return arguments["cu_seqlens"].diff().tolist()


def check(way: Way, step: Step, before: dict[str, Any], after: dict[str, Any], out: Tensor) -> None:
    """Outputs and every slot, against the recurrence; what must not change, bit for bit."""
    begin, N = 0, len(step.case.lengths)
    want_pool = before["state_pool"].clone()
    written: list[int] = []
    table = before["state_indices"].view(N, -1).tolist()
    for n, length in enumerate(step.case.lengths):
        accepted = 1 if step.accepted is None else step.accepted[n]
        if n in step.padded or accepted == 0:
            assert (bits(out[:, begin : begin + length]) == 0).all(), f"rows of sequence {n}"
            begin += length
            continue
        start = before["state_pool"][table[n][accepted - 1]].unsqueeze(0)
        fresh = n in step.fresh
        if fresh:
            start = torch.zeros_like(start)
        for j in range(length):  # cut after each token
            tokens = [before[name][:, begin : begin + j + 1] for name in TOKENS]
            gates = {name: before[name] for name in ("A_log", "dt_bias", "lower_bound", "scale")}
            want = recurrent_kda(*tokens, **gates, initial_state=start)
            if step.columns is not None or j == length - 1:
                slot = table[n][j if step.columns is not None else 0]
                want_pool[slot] = want.final_state[0]
                written.append(slot)
            if fresh:  # a state of few tokens, of which every channel of an output may lose alike
                scale = K**-0.5 if before["scale"] is None else abs(before["scale"])
                lost = (out[0, begin + j] - want.out[0, j]).norm(dim=-1)
                most = way.limit * scale * want.final_state[0].flatten(1).norm(dim=-1)
                assert (lost <= most).all(), f"token {j} of sequence {n}: {lost}, allowed {most}"
        if length and not fresh:
            assert_close("out", out[:, begin : begin + length], want.out, way.limit, chunk=1)
        begin += length
    assert (out[:, begin:].isnan()).all(), "rows past cu_seqlens[-1] were written"
    others = [slot for slot in range(len(want_pool)) if slot not in written]
    pool = after["state_pool"]
    assert torch.equal(bits(pool[others]), bits(want_pool[others])), "a slot of nobody changed"
    if written:
        limit = way.limit if pool.dtype == torch.float32 else way.bf16_limit
        assert_close("state", pool[written], want_pool[written], limit, case=step.case)
    for name, x in after.items():
        if name != "state_pool" and isinstance(x, Tensor):
            assert torch.equal(bits(x), bits(before[name])), f"{name} was modified"


@st.composite
def steps(draw: st.DrawFn) -> Step:
    N = draw(st.integers(1, 4))
    columns = draw(st.sampled_from((None, 1, 2, 5)))
    lengths = tuple(draw(st.integers(0, columns or 3)) for _ in range(N))
    accepted = None
    if draw(st.booleans()):
        accepted = tuple(draw(st.integers(0, columns or 1)) for _ in range(N))
    heads = draw(st.integers(1, 2))
    return Step(
        Case(
            seed=draw(st.integers(0, 999)),
            lengths=lengths,
            heads=heads,
            value_heads=heads * draw(st.sampled_from((1, 1, 3))),
            regime=draw(st.sampled_from(("random", "slow", "zero_rows", "unbounded"))),
            state_dtype=draw(st.sampled_from(("float32", "bfloat16"))),
            padding=draw(st.sampled_from((0, 3))),
        ),
        columns,
        accepted,
        tuple(n for n in range(N) if draw(st.sampled_from((False, False, True)))),
        draw(st.sampled_from((None, 0))),
        tuple(n for n in range(N) if draw(st.sampled_from((False, False, True)))),
    )


VERIFY = Step(
    Case(1, (3, 0, 5, 1, 5, 2, 4), 1, 2, padding=3),
    columns=5,
    accepted=(1, 2, 5, 0, 1, 3, 1),
    padded=(4, 5),
    null_index=0,
)
#: With and without tokens, a column that was accepted, and a slot.
FRESH = replace(VERIFY, fresh=(1, 2, 3, 4, 6))


# -- laws ----------------------------------------------------------------------------------------


@given(step=steps())
@example(step=VERIFY)
@example(step=FRESH)
@example(step=Step(Case(2, (1, 1, 1), 2, padding=2), padded=(1,)))
@example(step=Step(Case(2, (1, 0, 1, 2), 2, padding=2), padded=(3,), fresh=(0, 1, 3)))
def test_a_step_is_the_recurrence(way: Way, step: Step) -> None:
    """Each token's state in its column; the slots of nobody and of padding keep their NaN."""
    before = way.arguments(step)
    after = copied(before)
    check(way, step, before, after, way(after))


@pytest.mark.parametrize("regime", ["random", "unbounded"])
def test_prefill_is_decode_of_one_token_after_the_other(way: Way, regime: str) -> None:
    length, case = 17, Case(3, (17, 17), 1, 2, regime=regime)
    x = case.tensors(way.device, torch.float32, K, V)
    gates = {name: x.kwargs[name] for name in ("A_log", "dt_bias", "lower_bound", "scale")}
    backend = "torch" if way.name == "reference" else way.name
    want, final = kda_jit.prefill(*x.args, **x.kwargs, backend=backend)
    step = Step(Case(3, (1, 1), 1, 2, regime=regime))
    arguments = way.arguments(step) | gates
    slots = arguments["state_indices"].long()
    arguments["state_pool"][slots] = x.initial_state
    for t in range(length):
        rows = [t, length + t]
        tokens = {name: y[:, rows] for name, y in zip(TOKENS, x.args, strict=True)}
        out = way(arguments, **tokens)
        assert_close("out", out, want[:, rows], 2e-5, chunk=1)
    assert_close("state", arguments["state_pool"][slots], final, 2e-5)


@given(data=st.data())
def test_rejected_drafts_leave_no_trace(way: Way, data: st.DataObject) -> None:
    """Rounds of verification with rollback are plain decode of what was accepted."""
    N, columns = 2, 4
    rounds = [
        [data.draw(st.integers(1, columns), label="accepted") for _ in range(N)] for _ in range(3)
    ]
    verified = way.arguments(Step(Case(4, (columns,) * N, 1, 2), columns, (1,) * N))
    gates = {name: verified[name] for name in ("A_log", "dt_bias", "lower_bound", "scale")}
    plain = way.arguments(Step(Case(5, (1,) * N, 1, 2))) | gates
    start = verified["state_indices"][:, 0].long()
    slots = plain["state_indices"].long()
    plain["state_pool"][slots] = verified["state_pool"][start]
    for seed, accepted in enumerate(rounds):
        drafts = way.arguments(Step(Case(6 + seed, (columns,) * N, 1, 2), columns))
        out = way(verified, **{name: drafts[name] for name in TOKENS})
        for j in range(max(accepted)):
            # Decode of those that accepted the token; the others sit this one out.
            live = torch.tensor([j < a for a in accepted], device=way.device)
            rows = [j, columns + j]
            indices = torch.where(live, slots, -1)
            tokens = {name: drafts[name][:, rows] for name in TOKENS}
            decoded = way(plain, **tokens, state_indices=indices)
            assert way.same(decoded[:, live], out[:, rows][:, live]), f"round {seed}, token {j}"
        verified["num_accepted_tokens"] = torch.tensor(accepted, device=way.device)
    last = verified["num_accepted_tokens"].unsqueeze(1) - 1
    kept = verified["state_indices"].long().gather(1, last).squeeze(1)
    assert way.same(verified["state_pool"][kept], plain["state_pool"][slots])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_view_of_a_block_table_is_as_good_as_its_copy(way: Way, dtype: torch.dtype) -> None:
    arguments = way.arguments(VERIFY)
    indices, accepted = arguments["state_indices"], arguments["num_accepted_tokens"]
    wide = torch.full((7, 13), 99, dtype=dtype, device=way.device)
    wide[:, 2:12:2] = indices
    tall = torch.full((5, 9), 99, dtype=dtype, device=way.device)
    tall[:, 1:8] = indices.t()
    rows = torch.full((7, 2), 99, dtype=torch.int32, device=way.device)
    rows[:, 1] = accepted
    plain = copied(arguments)
    out = way(plain)
    for view in (wide[:, 2:12:2], tall[:, 1:8].t()):
        again = copied(arguments)
        assert torch.equal(
            bits(way(again, state_indices=view, num_accepted_tokens=rows[:, 1])), bits(out)
        )
        assert torch.equal(bits(again["state_pool"]), bits(plain["state_pool"]))
    column = arguments["state_indices"][:, 2]
    single = arguments | {"num_accepted_tokens": None, "write_state": False}
    for n in range(7):
        single["state_pool"][column[n]] = 0.5
    assert torch.equal(
        bits(way(single, state_indices=column)),
        bits(way(single, state_indices=column.contiguous())),
    )


@given(step=steps())
@example(step=VERIFY)
@example(step=FRESH)
def test_without_a_write_the_output_is_the_same_and_the_pool_untouched(
    way: Way, step: Step
) -> None:
    arguments = way.arguments(step)
    written = copied(arguments)
    before = arguments["state_pool"].clone()
    assert torch.equal(bits(way(arguments, write_state=False)), bits(way(written)))
    assert torch.equal(bits(arguments["state_pool"]), bits(before))


@pytest.mark.parametrize("garbage", [NAN, float("inf"), SENTINEL])
@pytest.mark.parametrize("write_state", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns, accepted", [(None, None), (3, None), (3, (2, 1, 3, 3))])
def test_a_fresh_sequence_is_one_whose_slot_holds_zeros(
    way: Way,
    columns: int | None,
    accepted: tuple[int, ...] | None,
    state_dtype: str,
    write_state: bool,
    garbage: float,
) -> None:
    """Bit for bit, its neighbours too; all of them with a state is no flags at all."""
    lengths = (1, 1, 1, 1) if columns is None else (3, 1, 2, 3)
    arguments = way.arguments(
        Step(Case(20, lengths, 1, 2, state_dtype=state_dtype), columns, accepted)
    )
    has = torch.tensor([False, True, False, True], device=way.device)
    rows = arguments["state_indices"].view(4, -1).long()
    chosen = torch.tensor(accepted or (1, 1, 1, 1), device=way.device).unsqueeze(1) - 1
    starts = rows.gather(1, chosen).squeeze(1)
    cleared, dirty, plain = copied(arguments), copied(arguments), copied(arguments)
    cleared["state_pool"][starts[~has]] = 0.0
    dirty["state_pool"][starts[~has]] = garbage
    before = dirty["state_pool"].clone()
    want = way(cleared, write_state=write_state)
    got = way(dirty, has_initial_state=has, write_state=write_state)
    assert want.isfinite().all()
    assert torch.equal(bits(got), bits(want))
    written = rows[:, 0] if columns is None else torch.cat(
        [rows[n, : lengths[n]] for n in range(4)]
    )  # fmt: skip
    if write_state:
        found = dirty["state_pool"]
        assert torch.equal(bits(found[written]), bits(cleared["state_pool"][written]))
        others = [slot for slot in range(len(found)) if slot not in written.tolist()]
        assert torch.equal(bits(found[others]), bits(before[others]))
    else:
        assert torch.equal(bits(dirty["state_pool"]), bits(before))

    every = copied(arguments)
    out = way(every, has_initial_state=torch.ones_like(has), write_state=write_state)
    assert torch.equal(bits(out), bits(way(plain, write_state=write_state)))
    assert torch.equal(bits(every["state_pool"]), bits(plain["state_pool"]))


def test_a_fresh_sequence_without_a_start_or_a_token_is_left_alone(way: Way) -> None:
    """No slot, the null index, none accepted, no tokens: as ever."""
    step = Step(
        Case(21, (2, 1, 3, 0), 1, 2), 3, (1, 1, 0, 1), padded=(0, 1), null_index=0,
        fresh=(0, 1, 2, 3),
    )  # fmt: skip
    arguments = way.arguments(step)
    assert arguments["state_indices"][:2, 0].tolist() == [0, -1]
    arguments["state_pool"].fill_(SENTINEL)
    before = arguments["state_pool"].clone()
    out = way(arguments)
    assert (bits(out) == 0).all()
    assert torch.equal(bits(arguments["state_pool"]), bits(before))


def test_flags_may_be_a_part_of_those_of_a_step(way: Way) -> None:
    """A slice, at an address that is aligned to nothing."""
    arguments = way.arguments(Step(Case(22, (1, 1, 1)), fresh=(1,)))
    wide = torch.tensor([False, False, False, True, False, True, False], device=way.device)
    part = copied(arguments) | {"has_initial_state": wide[3:6]}
    assert torch.equal(bits(way(part)), bits(way(arguments)))
    assert torch.equal(bits(part["state_pool"]), bits(arguments["state_pool"]))


def test_a_batch_without_a_write_may_share_a_state(way: Way) -> None:
    """Several drafts from one history, and an index that every sequence repeats."""
    arguments = way.arguments(Step(Case(7, (2, 2, 2))))
    slot = arguments["state_indices"][:1]
    out = way(arguments, state_indices=slot.expand(3), write_state=False)
    for n in range(3):
        arguments["state_pool"][arguments["state_indices"][n]] = arguments["state_pool"][slot[0]]
    assert torch.equal(bits(out), bits(way(arguments)))


@pytest.mark.parametrize("name", [*TOKENS, "state_pool"])
def test_nan_stays_in_its_sequence(way: Way, name: str) -> None:
    step = Step(Case(8, (3, 2, 3), 1, 2), columns=3, accepted=(1, 2, 3))
    arguments = way.arguments(step)
    dirty = copied(arguments)
    if name == "state_pool":
        dirty[name][dirty["state_indices"][1, 1]] = NAN
    else:
        dirty[name][0, 4] = NAN
    clean_out, out = way(arguments), way(dirty)
    rest = [0, 1, 2, 5, 6, 7]
    assert torch.equal(bits(out[:, rest]), bits(clean_out[:, rest]))
    assert out[0, 4].isnan().any(), "the NaN was lost"
    mine = dirty["state_indices"][1].tolist()
    others = [slot for slot in range(len(dirty["state_pool"])) if slot not in mine]
    clean, found = arguments["state_pool"][others], dirty["state_pool"][others]
    assert torch.equal(bits(found), bits(clean))


def test_every_form_of_the_same_step_gives_the_same_bits(way: Way) -> None:
    """Packed, a dense batch, no batch axis; indices [N] and [N, 1]; int64."""
    arguments = way.arguments(Step(Case(9, (1, 1, 1), 1, 2)))
    packed = copied(arguments)
    out = way(packed)
    flat = {name: arguments[name][0] for name in TOKENS}
    dense = {name: arguments[name].transpose(0, 1) for name in TOKENS}
    column = arguments["state_indices"].unsqueeze(1)
    ones = torch.ones(3, dtype=torch.int64, device=way.device)
    forms: list[dict[str, Any]] = [
        flat | {"cu_seqlens": None},
        flat,
        dense | {"cu_seqlens": None},
        {"state_indices": column},
        {"state_indices": column.long(), "num_accepted_tokens": ones},
        {"num_accepted_tokens": ones},
        {"cu_seqlens": arguments["cu_seqlens"].long()},
    ]
    for form in forms:
        again = copied(arguments) | form
        assert torch.equal(bits(way(again).reshape(out.shape)), bits(out)), list(form)
        assert torch.equal(bits(again["state_pool"]), bits(packed["state_pool"])), list(form)


def test_tokens_may_be_columns_of_one_projection_and_slots_lie_apart(way: Way) -> None:
    """NaN in all that lies between, which is neither read nor written."""
    arguments = way.arguments(VERIFY)
    plain = copied(arguments)
    out = way(plain)

    def spread(y: Tensor) -> Tensor:
        width = y[0, 0].numel()
        wide = torch.full((*y.shape[:2], width + 24), NAN, device=way.device)
        columns = wide[..., 8 : 8 + width]
        columns.copy_(y.flatten(2))
        return columns.unflatten(-1, y.shape[2:])

    pool = arguments["state_pool"]
    storage = torch.full((len(pool), pool[0].numel() + 32), NAN, device=way.device)
    apart = storage[:, : pool[0].numel()].unflatten(1, pool.shape[1:]).copy_(pool)
    target = spread(torch.full_like(out, NAN))
    tokens = {name: spread(arguments[name]) for name in TOKENS}
    got = way(arguments, **tokens, state_pool=apart, out=target)
    assert got is target
    assert torch.equal(bits(got), bits(out))
    assert torch.equal(bits(apart), bits(plain["state_pool"]))
    assert storage[:, pool[0].numel() :].isnan().all()
    around = target.as_strided((out.shape[1], 2 * V + 24), (2 * V + 24, 1), 0)
    assert around[:, :8].isnan().all()
    assert around[:, 8 + 2 * V :].isnan().all()


def test_a_column_without_a_slot_takes_no_state(way: Way) -> None:
    arguments = way.arguments(Step(Case(10, (3, 3)), columns=3, accepted=(2, 1), null_index=0))
    whole = copied(arguments)
    out = way(whole)
    arguments["state_indices"][0, 0] = -1
    arguments["state_indices"][0, 2] = 0
    holes = copied(arguments)
    assert torch.equal(bits(way(holes)), bits(out))
    kept = arguments["state_indices"][0, 1]
    assert torch.equal(holes["state_pool"][kept], whole["state_pool"][kept])
    assert holes["state_pool"][0].isnan().all()
    lost = whole["state_indices"][0, [0, 2]].tolist()
    assert holes["state_pool"][lost].isnan().all()


def test_runs_repeat_bit_for_bit_whatever_else_is_in_the_batch(way: Way) -> None:
    step = Step(Case(11, (3, 1, 4), 2, 4), columns=4)
    arguments = way.arguments(step)
    first, second = copied(arguments), copied(arguments)
    out = way(first)
    assert torch.equal(bits(way(second)), bits(out))
    assert torch.equal(bits(first["state_pool"]), bits(second["state_pool"]))
    alone = copied(arguments)
    tokens = {name: arguments[name][:, 3:4] for name in TOKENS}
    ends = torch.tensor([0, 1], device=way.device)
    got = way(alone, **tokens, cu_seqlens=ends, state_indices=arguments["state_indices"][1:2])
    assert way.same(got, out[:, 3:4])
    slot = arguments["state_indices"][1, 0]
    assert way.same(alone["state_pool"][slot], first["state_pool"][slot])


# -- the public call -----------------------------------------------------------------------------


def arguments(**changes: Any) -> dict[str, Any]:
    """A legal call on the CPU, every buffer given: 3 sequences of 2, 0 and 3 tokens."""
    H, HV, N, columns, T = 2, 4, 3, 3, 7
    return {
        "q": torch.randn(1, T, H, K),
        "k": torch.randn(1, T, H, K),
        "v": torch.randn(1, T, HV, V),
        "g": torch.randn(1, T, HV, K),
        "beta": torch.randn(1, T, HV),
        "A_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV, K),
        "state_pool": torch.full((12, HV, V, K), SENTINEL),
        "state_indices": torch.arange(1, 1 + N * columns).view(N, columns),
        "num_accepted_tokens": torch.tensor([1, 3, 2]),
        "cu_seqlens": torch.tensor([0, 2, 2, 5]),
        "out": torch.full((1, T, HV, V), SENTINEL),
    } | changes


def test_signature() -> None:
    parameters = inspect.signature(kda_jit.recurrent).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "scale", "state_pool",
        "state_indices", "num_accepted_tokens", "has_initial_state", "cu_seqlens", "null_index",
        "write_state", "out", "backend",
    ]  # fmt: skip
    kinds = [p.kind for p in parameters.values()]
    assert set(kinds[:5]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[5:]) == {inspect.Parameter.KEYWORD_ONLY}
    theirs = inspect.signature(make_recurrent_problem).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [
        (p.name, p.default) for p in parameters.values() if p.name != "backend"
    ]
    with pytest.raises(TypeError, match="beta_is_raw"):
        kda_jit.recurrent(**arguments(), beta_is_raw=True)


def test_out_is_the_callers_or_a_new_one_of_the_shape_of_v() -> None:
    given_out = arguments()
    assert kda_jit.recurrent(**given_out) is given_out["out"]
    flat = arguments(out=None)
    flat |= {name: flat[name][0] for name in TOKENS}
    first, second = kda_jit.recurrent(**flat), kda_jit.recurrent(**flat)
    assert first.shape == flat["v"].shape
    assert first.data_ptr() != second.data_ptr()
    target = torch.full_like(flat["v"], SENTINEL)
    assert kda_jit.recurrent(**flat | {"out": target}) is target


def test_what_ran_is_recorded() -> None:
    kda_jit.recurrent(**arguments(), backend="torch")
    assert kda_jit.last_launch() == LaunchRecord("torch", ("torch_recurrent",))


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens": torch.tensor([0, 0, 0, 0])},
        {"cu_seqlens": torch.tensor([0]), "state_indices": torch.zeros(0, 3).long(),
         "num_accepted_tokens": torch.zeros(0).long()},
        {name: x[:, :0] for name, x in arguments().items() if name in (*TOKENS, "out")}
        | {"cu_seqlens": torch.tensor([0, 0, 0, 0])},
    ],
    ids=["empty sequences", "no sequences", "no tokens"],
)  # fmt: skip
def test_nothing_to_do_changes_nothing(changes: dict[str, Any]) -> None:
    call = arguments(**changes)
    kda_jit.recurrent(**call)
    launch = kda_jit.last_launch()
    assert launch is not None
    assert (launch.backend == "none") == (changes["cu_seqlens"].numel() == 1 or "q" in changes)
    assert (call["state_pool"] == SENTINEL).all()
    assert (call["out"] == SENTINEL).all()


def test_auto_never_asks_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's "cuda" is for prefills; named in the call it is an error in words."""
    monkeypatch.setenv("KDA_JIT_BACKEND", "flashkda")
    kda_jit.recurrent(**arguments())
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.backend in ("triton", "torch")
    monkeypatch.setenv("KDA_JIT_BACKEND", "torch")
    kda_jit.recurrent(**arguments())
    assert kda_jit.last_launch() == LaunchRecord("torch", ("torch_recurrent",))
    with pytest.raises(NoBackendError, match=r"^backend='cuda': .*'triton' or 'torch'"):
        kda_jit.recurrent(**arguments(), backend="cuda")
    with pytest.raises(BackendNameError, match=r"Did you mean 'triton'"):
        kda_jit.recurrent(**arguments(), backend="tritom")


def test_a_named_backend_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = arguments()
    wide |= {"v": torch.randn(1, 7, 4, 300), "state_pool": torch.zeros(12, 4, 300, K), "out": None}
    with pytest.raises(NoBackendError, match="V = 300"):
        kda_jit.recurrent(**wide, backend="triton")
    monkeypatch.setenv("KDA_JIT_BACKEND", "triton")
    with pytest.raises(NoBackendError, match=r"^KDA_JIT_BACKEND=triton: .*V = 300"):
        kda_jit.recurrent(**wide)
    monkeypatch.delenv("KDA_JIT_BACKEND")
    kda_jit.recurrent(**wide)
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.backend == "torch"


@pytest.mark.parametrize(
    "dtype, limit",
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.float16, 5e-4), (torch.bfloat16, 4e-3)],
)
def test_any_dtype_and_head_size_at_its_own_precision(dtype: torch.dtype, limit: float) -> None:
    for head_dim, value_dim in ((7, 5), (128, 128)):
        case = Case(12, (3, 4), 1, 2)
        call = Step(case, columns=4).arguments("cpu", dtype, head_dim, value_dim)
        x = case.tensors("cpu", dtype, head_dim, value_dim)
        out = kda_jit.recurrent(**call, backend="torch")
        assert out.dtype == dtype
        want = x.reference()
        assert_close("out", out, want.out, limit, cu_seqlens=x.cu_seqlens, chunk=1)
        last = call["state_indices"][[0, 1], [2, 3]].long()
        assert_close("state", call["state_pool"][last], want.final_state, 1e-6)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("regime", ["huge", "tiny", "repeated", "saturated_both", "large_state"])
def test_hard_numbers(way: Way, regime: str, lower_bound: float | None) -> None:
    case = Case(13, (4, 2), 1, 2, regime=regime)
    step = Step(case, columns=4, accepted=(4, 1))
    before = way.arguments(step) | {"lower_bound": lower_bound}
    after = copied(before)
    out = way(after)
    assert out.isfinite().all()
    check(way, step, before, after, out)


def test_beta_and_gate_may_be_fp32_beside_half(way: Way) -> None:
    case = Case(14, (3, 2), 1, 2)
    fine = Step(case).arguments(way.device, torch.float32, K, V)
    call = Step(case).arguments(way.device, torch.float16, K, V) | {
        "g": fine["g"], "beta": fine["beta"],
    }  # fmt: skip
    slots = call["state_indices"].long()
    want = recurrent_kda(
        *(call[name] for name in TOKENS), A_log=call["A_log"], dt_bias=call["dt_bias"],
        initial_state=call["state_pool"][slots], cu_seqlens=call["cu_seqlens"],
    )  # fmt: skip
    way(call)
    assert_close("state", call["state_pool"][slots], want.final_state, way.limit)


@pytest.mark.parametrize("scale", [0.0, -0.1, 2])
def test_scale(way: Way, scale: float) -> None:
    call = way.arguments(Step(Case(15, (2, 1))))
    want = way(copied(call), scale=1.0)
    assert torch.allclose(way(call, scale=scale), scale * want, atol=1e-6)


def test_autocast_is_ignored() -> None:
    want = kda_jit.recurrent(**(call := arguments()), backend="torch").clone()
    call["state_pool"].fill_(SENTINEL)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kda_jit.recurrent(**call, backend="torch"), want)


def test_torch_guards_what_nobody_checked() -> None:
    """Indices on a GPU pass the contract unread. More tokens than columns, counts, slots."""
    call = arguments(null_index=9)
    problem = make_recurrent_problem(**call)
    for changes in (
        {"state_indices": call["state_indices"][:, :1]},
        {"num_accepted_tokens": torch.tensor([4, 1, -1])},
        {"state_indices": table((12, 2, 3), (4, 5, 6), (7, 9, 9))},
    ):
        call["out"].fill_(SENTINEL)
        recurrent_torch.run(problem._replace(**changes))
        assert (call["out"][:, :5] == 0).all()
        assert (call["out"][:, 5:] == SENTINEL).all()
        assert (call["state_pool"] == SENTINEL).all()


def test_torch_refuses_a_capture_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    problem: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(CaptureError, match="'triton'"):
        recurrent_torch.run(problem)


# -- illegal calls -------------------------------------------------------------------------------


def changed(**changes: Any) -> Any:
    return lambda: arguments(**changes)


def aliased(written: str, read: str) -> Any:
    def make() -> dict[str, Any]:
        call = arguments()
        memory = torch.zeros(1 << 15)
        for name in (written, read):
            call[name] = memory[: call[name].numel()].view(call[name].shape)
        return call

    return make


def over_indices(written: str, name: str) -> Any:
    def make() -> dict[str, Any]:
        call = arguments()
        memory = call[written].flatten().view(torch.int64)
        call[name] = memory[: call[name].numel()].view(call[name].shape)
        return call

    return make


def pool_over_flags() -> dict[str, Any]:
    call = arguments()
    call["has_initial_state"] = call["state_pool"].flatten().view(torch.bool)[5:8]
    return call


def meta(name: str) -> Any:
    return lambda: arguments() | {name: arguments()[name].to("meta")}


def table(*rows: tuple[int, ...]) -> Tensor:
    return torch.tensor(rows)


ILLEGAL: dict[str, tuple[Any, type[Exception], str]] = {
    "q rank": (changed(q=torch.randn(7, K)), InputError, r"^q: .*\[B, T, H, K\]"),
    "q list": (changed(q=torch.randn(1, 7, 2, K).tolist()), InputTypeError, r"^q: .*list"),
    "k numpy": (changed(k=torch.randn(1, 7, 2, K).numpy()), InputTypeError, r"^k: .*ndarray"),
    "no batch in v": (changed(v=torch.randn(7, 4, V)), InputError, r"^v: .*\[B, T, HV, V\]"),
    "batch in v alone": (
        changed(q=torch.randn(7, 2, K)), InputError, r"^k: .*\[T, H, K\].*\[1, 7, 2, 16\].*like q",
    ),
    "k dtype": (changed(k=torch.randn(1, 7, 2, K).half()), InputTypeError, r"^k: .*float16"),
    "g per head": (changed(g=torch.randn(1, 7, 4)), InputError, r"^g: .*expand it over K"),
    "beta shape": (changed(beta=torch.randn(1, 7, 2)), InputError, r"^beta: .*\[1, 7, 4\]"),
    "A_log dtype": (changed(A_log=torch.zeros(4).half()), InputTypeError, r"^A_log: .*float32"),
    "dt_bias per head": (changed(dt_bias=torch.zeros(4)), InputError, r"^dt_bias: .*not one per"),
    "lower_bound": (changed(lower_bound=-8.0), InputError, r"^lower_bound: .*-8"),
    "scale": (changed(scale=NAN), InputError, r"^scale: .*finite.*nan"),
    "pool missing": (changed(state_pool=None), InputTypeError, r"^state_pool: .*slots.*None"),
    "pool transposed": (
        changed(state_pool=torch.zeros(12, 4, K, V)), InputError, r"^state_pool: .*V before K",
    ),
    "pool dtype": (
        changed(state_pool=torch.zeros(12, 4, V, K).half()),
        InputTypeError, r"^state_pool: .*float32 or torch.bfloat16.*float16",
    ),
    "pool strided": (
        changed(state_pool=torch.zeros(12, 4, V, K, 2)[..., 0]), InputError, r"^state_pool: .*stri",
    ),
    "pool overlaps itself": (
        changed(state_pool=torch.zeros(1, 4, V, K).expand(12, 4, V, K)),
        InputError, r"^state_pool: .*overlap",
    ),
    "indices list": (changed(state_indices=[[1]]), InputTypeError, r"^state_indices: .*list"),
    "indices rank": (
        changed(state_indices=torch.ones(3, 3, 1).long()),
        InputError, r"^state_indices: .*\[N, 1 \+ num_spec\].*\[3, 3, 1\]",
    ),
    "indices for more": (
        changed(state_indices=torch.arange(8)), InputError, r"^state_indices: .*N = 3.*slice",
    ),
    "indices without columns": (
        changed(state_indices=torch.ones(3, 0).long()), InputError, r"^state_indices: .*\[3, 0\]",
    ),
    "indices dtype": (
        changed(state_indices=torch.ones(3, 3)), InputTypeError, r"^state_indices: .*int64.*float",
    ),
    "accepted shape": (
        changed(num_accepted_tokens=torch.ones(5).long()),
        InputError, r"^num_accepted_tokens: .*\[N\] = \[3\].*\[5\]",
    ),
    "accepted dtype": (
        changed(num_accepted_tokens=torch.ones(3)), InputTypeError, r"^num_accepted_tokens: .*int",
    ),
    "accepted too many": (
        changed(num_accepted_tokens=torch.tensor([1, 1, 4])),
        InputError, r"^num_accepted_tokens: .*0 to 3.*got 4 for sequence 2",
    ),
    "accepted negative": (
        changed(num_accepted_tokens=torch.tensor([-1, 1, 1])),
        InputError, r"^num_accepted_tokens: .*got -1 for sequence 0",
    ),
    "accepted beyond one slot": (
        changed(state_indices=torch.arange(3)),
        InputError, r"^num_accepted_tokens: .*0 to 1.*got 2 for sequence 2",
    ),
    "flags list": (
        changed(has_initial_state=[True] * 3), InputTypeError, r"^has_initial_state: .*list",
    ),
    "flags shape": (
        changed(has_initial_state=torch.ones(2).bool()),
        InputError, r"^has_initial_state: .*\[N\] = \[3\].*\[2\]",
    ),
    "flags dtype": (
        changed(has_initial_state=torch.ones(3).int()),
        InputTypeError, r"^has_initial_state: .*torch.bool.*int32",
    ),
    "flags strided": (
        changed(has_initial_state=torch.ones(6).bool()[::2]),
        InputError, r"^has_initial_state: .*contiguous",
    ),
    "flags elsewhere": (
        changed(has_initial_state=torch.ones(3, device="meta").bool()),
        DeviceError, r"^has_initial_state: .*CPU.*meta",
    ),
    "tokens beyond columns": (
        changed(state_indices=table((1, 2), (3, 4), (5, 6)), num_accepted_tokens=None),
        InputError, r"^state_indices: .*2 columns for sequence 2 of 3 tokens",
    ),
    "slot past the pool": (
        changed(state_indices=table((1, 2, 3), (99, 99, 99), (7, 8, 12))),
        InputError, r"^state_indices: .*below 12.*got 12 for sequence 2",
    ),
    "slot twice": (
        changed(state_indices=table((1, 2, 3), (4, 5, 6), (7, 8, 2))),
        InputError, r"^state_indices: .*slot 2 for sequences 0 and 2",
    ),
    "start is another's": (
        changed(state_indices=table((1, 2, 3), (4, 5, 6), (9, 1, 8))),
        InputError, r"^state_indices: .*slot 1 for sequences 0 and 2",
    ),
    "cu_seqlens with B": (
        lambda: arguments() | {n: x.repeat(2, *[1] * (x.dim() - 1))
                               for n, x in arguments().items() if n in (*TOKENS, "out")},
        InputError, r"^cu_seqlens: .*B = 2",
    ),
    "cu_seqlens decreasing": (
        changed(cu_seqlens=torch.tensor([0, 2, 1, 5])), InputError, r"^cu_seqlens: .*decrease",
    ),
    "cu_seqlens too long": (
        changed(cu_seqlens=torch.tensor([0, 2, 4, 8])), InputError, r"^cu_seqlens: .*T = 7",
    ),
    "null_index": (changed(null_index=0.0), InputTypeError, r"^null_index: .*int or None.*float"),
    "null_index bool": (changed(null_index=True), InputTypeError, r"^null_index: .*bool"),
    "write_state": (changed(write_state=None), InputTypeError, r"^write_state: .*bool.*None"),
    "out dtype": (changed(out=torch.zeros(1, 7, 4, V).half()), InputTypeError, r"^out: .*float16"),
    "out is v": (aliased("out", "v"), InputError, r"^out: .*apart from v"),
    "out in the pool": (aliased("out", "state_pool"), InputError, r"^(out|state_pool): .*apart"),
    "pool is v": (aliased("state_pool", "v"), InputError, r"^state_pool: .*apart from v"),
    "out over indices": (
        over_indices("out", "state_indices"), InputError, r"^out: .*apart from state_indices",
    ),
    "pool over counts": (
        over_indices("state_pool", "num_accepted_tokens"),
        InputError, r"^state_pool: .*apart from num_accepted_tokens",
    ),
    "pool over flags": (
        pool_over_flags, InputError, r"^state_pool: .*apart from has_initial_state",
    ),
    "pool elsewhere": (meta("state_pool"), DeviceError, r"^state_pool: .*CPU.*meta"),
    "indices elsewhere": (meta("state_indices"), DeviceError, r"^state_indices: .*meta"),
    "k elsewhere": (meta("k"), DeviceError, r"^k: .*meta"),
    "grad": (
        lambda: arguments() | {"v": arguments()["v"].requires_grad_()}, GradError, r"^v: .*no_grad",
    ),
    "backend": (changed(backend=3), InputTypeError, r"^backend: .*str.*3"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_calls_are_refused_in_words_and_write_nothing(name: str) -> None:
    make, error, words = ILLEGAL[name]
    call = make()
    buffers = [x for x in (call.get("out"), call["state_pool"]) if isinstance(x, Tensor)]
    before = [x.clone() for x in buffers if not x.is_meta]
    with pytest.raises(error, match=words):
        kda_jit.recurrent(**call)
    after = [x for x in buffers if not x.is_meta]
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


def test_padding_and_shared_reads_are_legal() -> None:
    """Whatever stands in rows that name no slot, have no token, or only read."""
    kda_jit.recurrent(**arguments(state_indices=table((-1, -9, -1), (99, 99, 99), (7, 8, 9)),
                                  num_accepted_tokens=torch.tensor([10**6, 55, 1])))  # fmt: skip
    kda_jit.recurrent(**arguments(state_indices=table((5, 5, 5), (5, 5, 5), (5, 5, 5)),
                                  write_state=False))  # fmt: skip
    one = torch.zeros(1, 4, V, K).expand(12, 4, V, K)
    kda_jit.recurrent(**arguments(state_pool=one, write_state=False))
    kda_jit.recurrent(**aliased("state_pool", "v")(), write_state=False)
    kda_jit.recurrent(**arguments(state_indices=table((1, -9, 2), (3, -9, 4), (7, -9, 8)),
                                  num_accepted_tokens=None))  # fmt: skip
    kda_jit.recurrent(**arguments(state_indices=table((99, 1, 2), (0, 0, 0), (99, 99, 99)),
                                  num_accepted_tokens=torch.tensor([2, 1, 0]),
                                  null_index=99))  # fmt: skip


def test_the_answer_of_the_resolver_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("kda_jit.recurrent")
    kda_jit.recurrent(**arguments())
    monkeypatch.setattr(module, "Query", None)
    kda_jit.recurrent(**arguments())
