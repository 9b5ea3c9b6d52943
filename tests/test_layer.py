"""The layer core: who runs what, where it writes, what it refuses (numbers: test_layer_machine)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kda_jit
from kda_jit import (
    BackendNameError,
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    KDACore,
    NoBackendError,
    OutputConflictError,
    StepMetadata,
    Workspace,
    WorkspaceError,
    WorkspaceLanes,
    layer,
    planned_bytes,
    recurrent,
    resolver,
    settings,
)
from kda_jit.backends import base
from kda_jit.pack import PackInputs
from kda_jit.resolver import ORDER
from kda_jit.step import Limits, Part, StepPlan, check_each_row_once, decodes_pay_apart, plan_step
from kda_jit.testing.numeric import Mismatch
from kda_jit.testing.serving import GARBAGE, Engine, Work

H, HV, D = 1, 2, 8
SIZES: dict[str, Any] = {
    "num_heads": H,
    "num_value_heads": HV,
    "head_dim": D,
    "max_num_batched_tokens": 96,
    "max_num_seqs": 8,
    "num_spec": 3,
    "dtype": torch.float32,
}
NAN = float("nan")


def build(**changes: Any) -> KDACore:
    arguments = SIZES | {"lower_bound": -5.0, "device": "cpu", "backend": "torch"} | changes
    return KDACore(**arguments)


def engine_of(**changes: Any) -> Engine:
    return Engine(build(**changes), slots=24)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# -- steps of every kind, built by hand ----------------------------------------------------------


class Step:
    """The arguments of `forward` for one of each kind of step, over random numbers.

    Tokens of a mixed step: decode 0, draft verification 1 to 3, prefill 4 to 8, verification 9.
    """

    def __init__(self, kind: str, padding: int = 3) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def index(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        groups: dict[str, Any] = {}
        if kind in ("decode", "prefill", "decode and prefill"):
            ends = {"decode": (0, 1, 2), "prefill": (0, 3, 8), "decode and prefill": (0, 1, 6)}
            groups = {
                "num_decodes": {"decode": 2, "prefill": 0, "decode and prefill": 1}[kind],
                "num_prefills": {"decode": 0, "prefill": 2, "decode and prefill": 1}[kind],
                "non_spec_query_start_loc": index(*ends[kind]),
                "non_spec_state_indices": index(0, 1),
            }
            T = ends[kind][-1]
        if kind in ("speculative", "mixed", "decode and speculative"):
            groups |= {
                "num_spec_decodes": 2,
                "spec_query_start_loc": index(0, 3, 4),
                "spec_state_indices": index(2, 3, 4, 5, 6, 7, 8, 9).view(2, 4),
                "num_accepted_tokens": index(2, 1),
            }
            T = 4
        if kind == "mixed":
            groups |= {
                "num_decodes": 1,
                "num_prefills": 1,
                "non_spec_query_start_loc": index(0, 1, 6),
                "non_spec_state_indices": index(0, 1),
                "has_initial_state": torch.tensor([True, False]),
                "non_spec_token_indx": index(0, 4, 5, 6, 7, 8, GARBAGE),
                "spec_token_indx": index(1, 2, 3, 9, GARBAGE),
            }
            T = 10
        if kind == "decode and speculative":
            groups |= {
                "num_decodes": 1,
                "non_spec_query_start_loc": index(0, 1),
                "non_spec_state_indices": index(0),
                "non_spec_token_indx": index(4, GARBAGE),
                "spec_token_indx": index(0, 1, 2, 3, GARBAGE),
            }
            T = 5
        rows = T + padding
        self.metadata = StepMetadata(T, **groups)
        self.inputs = PackInputs(
            random(1, rows, H, D),
            random(1, rows, H, D),
            random(1, rows, HV, D),
            random(1, rows, HV, D),
            random(1, rows, HV),
        )
        self.A_log, self.dt_bias = random(HV), random(HV, D)
        self.pool = random(12, HV, D, D)
        self.out = torch.full((1, rows, HV, D), NAN)

    def change(self, **metadata: Any) -> Step:
        self.metadata = replace(self.metadata, **metadata)
        return self

    def run(self, core: KDACore, **changes: Any) -> kda_jit.StepRecord:
        arguments = self.inputs._asdict() | {
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "state_pool": self.pool,
            "metadata": self.metadata,
            "core_attn_out": self.out,
        }
        return core.forward(**(arguments | changes))


KINDS = (
    "prefill", "decode", "speculative", "decode and prefill", "mixed", "decode and speculative",
)  # fmt: skip


# -- dispatch: backend x reason x kind of step ---------------------------------------------------

#: Kernels of a step of each kind: P prefill, R recurrent; packed ones between pack and scatter.
CALLS = {
    "prefill": ["P"],
    "decode": ["R"],
    "speculative": ["R"],
    "decode and prefill": ["P", "R"],
    "mixed": ["pack", "P", "R", "R", "scatter"],
    "decode and speculative": ["pack", "R", "R", "scatter"],
}
REASONS = {
    "all backends run": {},
    "no CUDA device": {"cuda": "needs a CUDA device, got cpu"},
    "head_dim": {"cuda": "needs K = V = 128, got K = 8, V = 8"},
    "dtype": {"cuda": "needs q, k, v in torch.bfloat16, got torch.float32"},
    "unbounded": {"cuda": "needs a bounded gate, got lower_bound = None"},
    "no GPU at all": {
        "cuda": "needs a CUDA device, got cpu",
        "triton": "needs a CUDA device (or TRITON_INTERPRET=1), got cpu",
    },
}


@pytest.fixture
def support(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Decides what each backend says to the resolver."""

    def install(reasons: dict[str, str]) -> None:
        def rejections(name: str, query: base.Query) -> tuple[str, ...]:
            return (reasons[name],) if name in reasons else ()

        monkeypatch.setattr(resolver, "rejections", rejections)
        monkeypatch.setattr(layer, "rejections", rejections)
        resolver._first_that_can.cache_clear()

    monkeypatch.delenv(settings.BACKEND.name, raising=False)
    yield install
    resolver._first_that_can.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """(what was called, with which backend, address written); torch runs them all."""
    seen: list[tuple[str, str, int]] = []

    def spy(name: str, label: str, function: Callable[..., Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            if label in ("P", "R"):
                seen.append((label, kwargs["backend"], kwargs["out"].data_ptr()))
                kwargs["backend"] = "torch"
            else:
                seen.append((label, "", args[1].data_ptr() if label == "scatter" else 0))
            return function(*args, **kwargs)

        monkeypatch.setattr(layer, name, call)

    spy("prefill", "P", layer.prefill)
    spy("recurrent", "R", layer.recurrent)
    spy("pack", "pack", layer.pack)
    spy("scatter", "scatter", layer.scatter)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("asked", ["auto", "cuda", "flashkda", "triton", "torch"])
def test_dispatch(
    asked: str, reason: str, kind: str, support: Any, calls: list[tuple[str, str, int]]
) -> None:
    """Which backend a step of each kind gets, which calls that makes, and where each writes."""
    support(REASONS[reason])
    name = {"flashkda": "cuda"}.get(asked, asked)
    if name in REASONS[reason]:
        with pytest.raises(NoBackendError) as refused:
            build(backend=asked)
        assert REASONS[reason][name] in str(refused.value)
        return
    core = build(backend=asked)
    runs = next(b for b in ORDER if b not in REASONS[reason]) if asked == "auto" else name
    assert core.backend == runs

    step = Step(kind)
    record = step.run(core)
    assert [label for label, _, _ in calls] == CALLS[kind]
    # There is no recurrent kernel but Triton's and torch's.
    recurrent = "torch" if runs == "torch" or "triton" in REASONS[reason] else "triton"
    backends = {"P": runs, "R": recurrent, "pack": "", "scatter": ""}
    assert [backend for _, backend, _ in calls] == [backends[label] for label in CALLS[kind]]

    packed = "pack" in CALLS[kind]
    assert record.route == ("scatter" if packed else "direct")
    start, end = step.out.data_ptr(), step.out.data_ptr() + step.out.nbytes
    for label, _, address in calls:
        if label == "scatter":
            assert address == start
        elif label in ("P", "R"):
            assert (start <= address < end) != packed
    if not packed:
        assert min(address for _, _, address in calls) == start
    T = step.metadata.num_actual_tokens
    assert step.out[:, :T].isfinite().all()
    assert step.out[:, T:].isnan().all()


def test_an_argument_wins_over_the_config_and_that_over_the_environment(
    support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    support({})
    config = {"kda_prefill_backend": "triton"}
    auto = {"kda_prefill_backend": "auto"}
    monkeypatch.setenv(settings.BACKEND.name, "torch")
    assert build(backend="cuda", additional_config=config).backend == "cuda"
    assert build(backend="auto", additional_config=config).backend == "triton"
    assert build(backend="auto", additional_config=auto).backend == "torch"
    assert build(backend="auto", additional_config={"other": 1}).backend == "torch"
    assert build(backend="auto").backend == "torch"
    monkeypatch.delenv(settings.BACKEND.name)
    assert build(backend="auto", additional_config=auto).backend == "cuda"


@pytest.mark.parametrize(
    "value, error, words",
    [
        ("flashkdaa", BackendNameError, 'additional_config["kda_prefill_backend"]: expected one'),
        ("cuda", NoBackendError, "additional_config[\"kda_prefill_backend\"]='cuda': expected"),
        (3, InputTypeError, 'additional_config["kda_prefill_backend"]: expected a str, got int 3'),
        (None, InputTypeError, 'additional_config["kda_prefill_backend"]: expected a str'),
    ],
)
def test_a_bad_config_is_named_when_the_layer_is_built(
    value: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as refused:
        build(backend="auto", additional_config={"kda_prefill_backend": value})
    assert words in str(refused.value)


def test_the_backend_is_settled_when_the_layer_is_built(
    support: Any, calls: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    support({})
    core = build(backend="auto")
    monkeypatch.setenv(settings.BACKEND.name, "nonsense")
    Step("prefill").run(core)
    assert calls[0][1] == "cuda"


# -- one writer per row --------------------------------------------------------------------------


@given(
    decodes=st.integers(0, 5),
    prefills=st.integers(0, 5),
    spec=st.integers(0, 5),
    extra=st.integers(0, 9),
    apart=st.booleans(),
)
def test_every_plan_writes_each_row_once(
    decodes: int, prefills: int, spec: int, extra: int, apart: bool
) -> None:
    non_spec = decodes + extra if decodes + prefills else 0
    rows = (non_spec, 3 * spec)
    plan = plan_step(decodes, prefills, spec, rows, apart)
    check_each_row_once(plan)
    covered = [r for p in plan.parts for r in range(p.first_row, p.end_row)]
    assert sorted(covered) == list(range(sum(rows)))
    both = decodes + prefills > 0 and spec > 0
    assert plan.route == ("scatter" if both else "direct" if plan.parts else "none")
    sequences = [s for p in plan.parts if p.kind != "speculative" for s in range(p.first, p.end)]
    assert sorted(sequences) == list(range(decodes + prefills))


@pytest.mark.parametrize(
    "parts",
    [
        (Part("prefill", 0, 2, 0, 6), Part("decode", 0, 1, 5, 6)),
        (Part("prefill", 0, 2, 0, 6), Part("speculative", 0, 1, 0, 6)),
        (Part("prefill", 0, 2, 0, 3),),
        (Part("prefill", 0, 2, 1, 6),),
        (Part("prefill", 0, 2, 4, 3), Part("decode", 0, 2, 0, 6)),
    ],
)
def test_two_writers_of_a_row_are_refused_before_any_launch(
    parts: tuple[Part, ...],
    calls: list[tuple[str, str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer, "plan_step", lambda *_: StepPlan("direct", parts, (6, 0)))
    step = Step("decode and prefill")
    with pytest.raises(OutputConflictError):
        step.run(build())
    assert not calls
    assert step.out.isnan().all()


@pytest.mark.parametrize("name, kind", [("prefill", "mixed"), ("recurrent", "speculative")])
def test_a_kernel_that_writes_elsewhere_is_an_error_and_nothing_is_scattered(
    name: str,
    kind: str,
    calls: list[tuple[str, str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backend that took the layer's output for itself would meet the scatter there."""
    step = Step(kind)
    elsewhere = step.out if kind == "mixed" else step.out.clone()
    monkeypatch.setattr(
        layer, name, lambda *_, **__: (elsewhere, None) if name == "prefill" else elsewhere
    )
    with pytest.raises(OutputConflictError, match="expected its output in the rows given"):
        step.run(build())
    assert "scatter" not in [label for label, _, _ in calls]


# -- what is refused, with nothing launched and nothing written ----------------------------------


def refused(
    step: Step,
    core: KDACore,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    **changes: Any,
) -> str:
    """The words of the error; asserts that nothing ran and nothing changed."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    for name in ("prefill", "recurrent", "pack", "scatter"):
        monkeypatch.setattr(layer, name, never)
    pool = step.pool.clone()
    with pytest.raises(error) as found:
        step.run(core, **changes)
    assert step.out.isnan().all()
    assert same_bits(pool, step.pool)
    return str(found.value)


@pytest.mark.parametrize(
    "kind, limits, words",
    [
        ("prefill", {"max_num_batched_tokens": 7}, "num_actual_tokens to be at most max_num_bat"),
        ("mixed", {"max_num_batched_tokens": 9}, "max_num_batched_tokens = 9, as planned, got 10"),
        ("decode", {"max_num_seqs": 1}, "sequences of the step to be at most max_num_seqs = 1"),
        ("mixed", {"max_num_seqs": 3}, "max_num_seqs = 3, as planned, got 4"),
        ("speculative", {"num_spec": 2}, "at most num_spec = 2, as planned, got 3"),
        ("mixed", {"num_spec": 1}, "drafts (columns of spec_state_indices, less one) to be"),
        ("speculative", {"num_spec": 0}, "num_spec_decodes to be at most num_spec = 0"),
    ],
)  # fmt: skip
def test_a_step_beyond_the_plan_is_refused(
    kind: str, limits: dict[str, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(Step(kind), build(**limits), monkeypatch, WorkspaceError)
    assert words in said
    assert said.startswith("KDACore: ")


@pytest.mark.parametrize("padding", [0, 5])
def test_a_step_at_the_plan_runs(padding: int) -> None:
    core = build(max_num_batched_tokens=10, max_num_seqs=4)
    step = Step("mixed", padding)
    assert step.run(core).route == "scatter"
    assert step.out[:, :10].isfinite().all()


def wider(x: Tensor, axis: int = 2) -> Tensor:
    return torch.cat([x, x], axis)


BAD: dict[str, tuple[str, type[Exception], Callable[[Step], dict[str, Any]], str]] = {
    "more heads": (
        "mixed", InputError, lambda s: {"q": wider(s.inputs.q)}, "q: expected [1, T, H, K]"),
    "more value heads": (
        "prefill", InputError, lambda s: {"v": wider(s.inputs.v)}, "v: expected [1, T, HV, V]"),
    "gates per head": (
        "decode", InputError, lambda s: {"g": s.inputs.g[..., 0]}, "g: expected [1, T, HV, K]"),
    "two rows": ("decode", InputError, lambda s: {"q": wider(s.inputs.q, 0)}, "q: expected"),
    "fewer tokens": (
        "mixed", InputError, lambda s: {"beta": s.inputs.beta[:, :9]}, "beta: expected"),
    "no tensor": ("mixed", InputTypeError, lambda s: {"k": None}, "k: expected a torch.Tensor"),
    "dtype": ("mixed", InputTypeError, lambda s: {"k": s.inputs.k.half()}, "k: expected torch.f"),
    "g dtype": ("decode", InputTypeError, lambda s: {"g": s.inputs.g.half()}, "g: expected"),
    "transposed channels": (
        "prefill", InputError,
        lambda s: {"q": s.inputs.q.transpose(1, 3).contiguous().transpose(1, 3)}, "q: expected"),
    "small output": (
        "mixed", InputError, lambda s: {"core_attn_out": s.out[:, :9]}, "core_attn_out: expected"),
    "output dtype": (
        "mixed", InputTypeError, lambda s: {"core_attn_out": s.out.half()}, "core_attn_out:"),
    "output that repeats": (
        "mixed", InputError,
        lambda s: {"core_attn_out": s.out[:, :1].expand(1, 13, HV, D)}, "core_attn_out:"),
    "output over an input": (
        "mixed", InputError, lambda s: {"core_attn_out": s.inputs.v}, "memory apart from v"),
    "another device": (
        "mixed", DeviceError, lambda s: {"k": s.inputs.k.to("meta")}, "k: expected a tensor on"),
    "A_log": ("mixed", InputError, lambda s: {"A_log": s.A_log[:1]}, "A_log: expected [HV]"),
    "A_log dtype": ("mixed", InputTypeError, lambda s: {"A_log": s.A_log.half()}, "A_log:"),
    "dt_bias per head": (
        "mixed", InputError, lambda s: {"dt_bias": s.dt_bias[:, 0]}, "dt_bias: expected"),
    "pool layout": (
        "mixed", InputError, lambda s: {"state_pool": s.pool[:, :1]}, "state_pool: expected"),
    "pool dtype": (
        "mixed", InputTypeError, lambda s: {"state_pool": s.pool.bfloat16()}, "state_pool:"),
    "grad": (
        "mixed", GradError, lambda s: {"q": s.inputs.q.clone().requires_grad_()}, "q: expected"),
    "no metadata": ("mixed", InputTypeError, lambda s: {"metadata": None}, "metadata: expected a"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_tensor_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, error, change, words = BAD[name]
    step = Step(kind)
    assert words in refused(step, build(), monkeypatch, error, **change(step))


def at(*values: int) -> Tensor:
    return torch.tensor(values)


BAD_METADATA: dict[str, tuple[str, type[Exception], dict[str, Any], str]] = {
    "count": ("decode", InputError, {"num_decodes": -1}, "num_decodes: expected at least 0"),
    "count type": ("decode", InputTypeError, {"num_decodes": 2.0}, "num_decodes: expected an int"),
    "no start_loc": (
        "decode", InputTypeError, {"non_spec_query_start_loc": None}, "non_spec_query_start_loc:"),
    "no indices": (
        "prefill", InputTypeError, {"non_spec_state_indices": None}, "non_spec_state_indices:"),
    "no accepted": (
        "speculative", InputTypeError, {"num_accepted_tokens": None}, "num_accepted_tokens:"),
    "no table": ("speculative", InputTypeError, {"spec_state_indices": None}, "spec_state_indices"),
    "flat table": (
        "speculative", InputError, {"spec_state_indices": at(1, 2)}, "spec_state_indices: expect"),
    "no token index": (
        "mixed", InputTypeError, {"spec_token_indx": None}, "spec_token_indx: expected"),
    "float index": (
        "mixed", InputTypeError, {"non_spec_token_indx": torch.ones(6)}, "non_spec_token_indx:"),
    "short start_loc": (
        "prefill", InputError, {"non_spec_query_start_loc": at(0, 8)}, "non_spec_query_start_loc"),
    "token twice in a group": (
        "mixed", InputError, {"spec_token_indx": at(1, 2, 2, 9)}, "expected each token once"),
    "token in both groups": (
        "mixed", InputError, {"spec_token_indx": at(1, 2, 3, 4)}, "non_spec_token_indx holds"),
    "token past the step": (
        "mixed", InputError, {"spec_token_indx": at(1, 2, 3, 10)}, "tokens of the step, 0 to 9"),
    "negative token": ("mixed", InputError, {"spec_token_indx": at(1, 2, 3, -1)}, "got -1"),
    "index too short": ("mixed", InputError, {"spec_token_indx": at(1, 2, 3)}, "at most at T = 3"),
    "decode of two": (
        "decode and prefill", InputError, {"non_spec_query_start_loc": at(0, 2, 6)},
        "expected one token for each of the first 1 sequences"),
    "decodes last": (
        "mixed", InputError, {"non_spec_query_start_loc": at(0, 5, 6)}, "(num_decodes), got 5"),
    "slot twice": (
        "prefill", InputError, {"non_spec_state_indices": at(4, 4)}, "one slot per sequence"),
    "slot of both groups": (
        "mixed", InputError, {"non_spec_state_indices": at(0, 3)}, "got slot 3, which"),
    "slot past the pool": (
        "decode", InputError, {"non_spec_state_indices": at(0, 12)}, "slots below 12"),
    "draft slot past the pool": (
        "speculative", InputError,
        {"spec_state_indices": at(2, 3, 12, 5, 6, 7, 8, 9).view(2, 4)}, "slots below 12"),
    "accepted": (
        "mixed", InputError, {"num_accepted_tokens": at(2, 5)}, "expected 0 to 4, got 5"),
    "more drafts than columns": (
        "speculative", InputError,
        {"spec_state_indices": at(2, 3, 6, 7).view(2, 2)}, "expected at most 2 tokens"),
    "decreasing": (
        "prefill", InputError, {"non_spec_query_start_loc": at(0, 9, 8)}, "never decrease"),
    "one checkpoint argument": (
        "prefill", InputError, {"checkpoint_offsets": at(0, 0)}, "expected both or neither"),
    "checkpoint offset": (
        "prefill", InputError,
        {"checkpoint_offsets": at(0, 8), "checkpoint_state": torch.zeros(2, HV, D, D)},
        "multiples of 16"),
    "checkpoint shape": (
        "prefill", InputError,
        {"checkpoint_offsets": at(0, 0), "checkpoint_state": torch.zeros(2, HV, D, D + 1)},
        "checkpoint_state: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_METADATA)
def test_bad_metadata_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, error, changes, words = BAD_METADATA[name]
    step = Step(kind).change(**changes)
    assert words in refused(step, build(), monkeypatch, error)


def test_one_metadata_serves_layers_of_several_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are looked at once per kind of layer; contents, which may change, every time."""
    step = Step("mixed")
    core = build()
    step.run(core)
    step.run(build(decodes_apart=False))
    assert step.metadata.spec_token_indx is not None
    step.metadata.spec_token_indx[0] = 4
    with pytest.raises(InputError, match="expected each token once"):
        step.run(core)
    step.out.fill_(NAN)
    said = refused(step, build(max_num_batched_tokens=9), monkeypatch, WorkspaceError)
    assert "max_num_batched_tokens = 9, as planned, got 10" in said


def test_checkpoints_that_were_not_planned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"checkpoint_offsets": at(0, 0), "checkpoint_state": torch.zeros(2, HV, D, D)}
    step = Step("prefill").change(**saved)
    said = refused(step, build(checkpoints=False), monkeypatch, InputError)
    assert "checkpoints=False" in said


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"lower_bound": -6.0}, InputError, "lower_bound: expected None or a number in"),
        ({"lower_bound": 0.0}, InputError, "lower_bound"),
        ({"scale": NAN}, InputError, "scale: expected a finite number"),
        ({"num_heads": 0}, InputError, "num_heads: expected at least 1, got 0"),
        ({"num_heads": 2, "num_value_heads": 3}, InputError, "a multiple of num_heads = 2, got 3"),
        ({"num_spec": -1}, InputError, "num_spec: expected at least 0, got -1"),
        ({"num_spec": 1.5}, InputTypeError, "num_spec: expected an int"),
        ({"max_num_seqs": 0}, InputError, "max_num_seqs: expected at least 1, got 0"),
        ({"state_dtype": torch.float16}, InputTypeError, "state_dtype: expected torch.float32"),
        ({"lanes": 0}, InputError, "lanes: expected at least 1, got 0"),
        ({"lanes": "2"}, InputTypeError, "lanes: expected an int"),
        ({"workspace": 5}, InputTypeError, "workspace: expected a kda_jit.Workspace"),
        ({"workspace": Workspace(), "lanes": 2}, InputError, "lanes: expected 1 along with a"),
        ({"workspace": Workspace({}, "meta")}, DeviceError, "expected one on cpu, got one on meta"),
        (
            {"device": "cuda:99"},
            DeviceError,
            "device: expected one that torch can use, got cuda:99",
        ),
        ({"device": "gpu"}, DeviceError, "device: expected cpu, cuda or cuda:N, got 'gpu'"),
        ({"backend": "cuda"}, NoBackendError, "needs a CUDA device, got cpu"),
        ({"backend": "cudda"}, BackendNameError, "Did you mean 'cuda'?"),
    ],
)
def test_a_layer_that_cannot_work_is_not_built(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as refused:
        build(**changes)
    assert words in str(refused.value)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("num_spec", [0, 3])
def test_the_bytes_are_known_before_the_layer_is_built(num_spec: int, lanes: int) -> None:
    sizes = SIZES | {"num_spec": num_spec}
    planned = KDACore.planned_bytes(**sizes, lanes=lanes)
    core = build(num_spec=num_spec, lanes=lanes)
    assert core.workspace.nbytes == planned == lanes * planned_bytes(KDACore.specs(**sizes))
    for kind in KINDS if num_spec else KINDS[:2]:
        Step(kind).run(core)
    assert core.workspace.nbytes == planned


def test_packed_buffers_are_planned_for_padded_index_buffers() -> None:
    assert Limits(1000, 10, 3).packed_rows == 1000 + 40
    assert Limits(30, 10, 3).packed_rows == 60
    assert Limits(1000, 10, 0).packed_rows == 0


def test_layers_share_a_workspace() -> None:
    first = build()
    second = build(workspace=first.workspace, max_num_batched_tokens=50)
    assert second.workspace is first.workspace
    for core in (first, second):
        Step("mixed").run(core)
    assert first.workspace.nbytes == KDACore.planned_bytes(**SIZES)


def test_a_plan_that_is_too_small_is_refused_when_the_layer_is_built() -> None:
    specs = KDACore.specs(**SIZES)
    asked, planned = specs["layer_out"].nbytes, KDACore.specs(**SIZES | {"num_spec": 1})
    with pytest.raises(WorkspaceError) as refused:
        build(workspace=Workspace(planned, "cpu"))
    said = str(refused.value)
    assert "KDACore" in said
    small = Workspace(specs | {"layer_out": specs["layer_out"]._replace(shape=(1,))}, "cpu")
    with pytest.raises(WorkspaceError) as refused:
        build(workspace=small)
    assert f"{asked} bytes of 'layer_out', planned: 4" in str(refused.value)
    with pytest.raises(WorkspaceError, match="planned: none"):
        build(workspace=Workspace({}, "cpu"))


def test_a_growing_workspace_grows_when_the_layer_is_built() -> None:
    workspace = Workspace(device="cpu")
    core = build(workspace=workspace)
    held = workspace.nbytes
    with workspace.locked():
        for kind in KINDS:
            Step(kind).run(core)
    assert workspace.nbytes == held


def test_lanes_are_apart_and_counted(calls: list[tuple[str, str, int]]) -> None:
    core = build(lanes=2)
    step = Step("mixed")
    for lane in (0, 1, 0):
        step.run(core, lane=lane)
    first, second, again = (address for label, _, address in calls if label == "P")
    assert first == again != second
    with pytest.raises(WorkspaceError) as refused:
        step.run(core, lane=2)
    assert "expected KDACore to use one of the lanes planned, 2" in str(refused.value)
    assert "got lane 2" in str(refused.value)
    assert isinstance(core.workspace, WorkspaceLanes)
    a, b = (core.workspace.lane(i).get("layer_out", 64, caller="test") for i in (0, 1))
    assert abs(a.data_ptr() - b.data_ptr()) >= 64
    one = build(workspace=Workspace(KDACore.specs(**SIZES), "cpu"))
    with pytest.raises(WorkspaceError, match="one of the lanes planned, 1, counted from 0, got"):
        step.run(one, lane=1)


# -- laws of a step ------------------------------------------------------------------------------


def test_all_five_inputs_are_gathered_by_the_same_index() -> None:
    """A token before three drafts, five after them, three drafts more: gates stay with keys."""
    engine = engine_of()
    a, b, c, d = (engine.add(prompt) for prompt in (30, 7, 12, 9))
    engine.step([Work(r, "prefill", r.pending - (1 if r is a else 0)) for r in (a, b, d)])
    record = engine.step(
        [Work(a, "decode"), Work(b, "speculative", 3, 2), Work(c, "prefill", 5),
         Work(d, "speculative", 3, 1)],
        padding=4,
    )  # fmt: skip
    assert record.route == "scatter"
    assert record.kernels[0] == "torch_pack"
    assert record.kernels[-1] == "torch_scatter"


def test_order_of_tokens_does_not_matter_to_a_request() -> None:
    """The same work in two orders of the step's tokens: bitwise equal pools."""
    pools = []
    for reverse in (False, True):
        engine = engine_of()
        requests = [engine.add(prompt) for prompt in (20, 8, 3, 17)]
        engine.step([Work(r, "prefill", r.pending) for r in requests[:3]])
        work = [
            Work(requests[0], "speculative", 4, 3),
            Work(requests[1], "decode"),
            Work(requests[2], "speculative", 2, 2),
            Work(requests[3], "prefill", 17),
        ]
        order = [3, 2, 1, 0] if reverse else [0, 1, 2, 3]
        new = {w: engine._new_tokens(w) for w in work}  # drawn in one order for both
        engine._new_tokens = new.__getitem__  # type: ignore[method-assign]
        engine.step([work[i] for i in order], padding=2)
        pools.append(engine.pool)
    assert same_bits(*pools)


def test_more_tokens_than_sequences() -> None:
    """72 sequences of 4 tokens: what is per sequence is not as long as what is per token."""
    engine = Engine(build(max_num_batched_tokens=320, max_num_seqs=80), slots=72 * 4)
    requests = [engine.add(1) for _ in range(72)]
    engine.step([Work(r, "decode") for r in requests])
    engine.step([Work(r, "speculative", 4, 1 + i % 4) for i, r in enumerate(requests)])
    engine.step([Work(r, "speculative", 4, i % 4) for i, r in enumerate(requests)])


@pytest.mark.parametrize("accepted", [(0, 1), (4, 0), (1, 4), (2, 3)])
def test_acceptance_rolls_back_by_choosing_a_column(accepted: tuple[int, int]) -> None:
    engine = engine_of()
    a, b = engine.add(5), engine.add(6)
    engine.step([Work(a, "prefill", 5), Work(b, "prefill", 6)])
    for _ in range(3):
        engine.step([Work(r, "speculative", 4, n) for r, n in zip((a, b), accepted)])
    engine.step([Work(a, "decode"), Work(b, "speculative", 1, 1)], idle_sequences=2)


@pytest.mark.parametrize("apart", [False, True])
def test_fresh_requests_of_one_token_start_from_zero(apart: bool) -> None:
    """Their slots hold NaN, or what the last owner left; a scheduler counts them as decodes."""
    engine = engine_of(decodes_apart=apart)
    old, running = engine.add(3), engine.add(40)
    engine.step([Work(old, "prefill", 3), Work(running, "prefill", 20)])
    owned = old.slots
    engine.preempt(old)
    engine.free.sort()
    reused, fresh = engine.add(1), engine.add(1)
    assert reused.slots == owned
    kernels = engine.step([Work(fresh, "decode"), Work(running, "prefill", 20)]).kernels
    assert ("torch_recurrent" in kernels) == apart
    engine.step([Work(reused, "decode"), Work(running, "speculative", 2, 1)])


@pytest.mark.parametrize("flagged", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_only_decodes_are_told_which_sequences_are_fresh(
    kind: str, flagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the step's own flags, where it has any; and nothing else is launched for it."""
    seen: list[Tensor | None] = []

    def told(*args: Any, **options: Any) -> Tensor:
        seen.append(options["has_initial_state"])
        return recurrent(*args, **options)

    monkeypatch.setattr(layer, "recurrent", told)
    flags = torch.tensor([False, True])
    step = Step(kind).change(has_initial_state=flags if flagged else None)
    decodes, verified = step.metadata.num_decodes, step.metadata.num_spec_decodes
    step.pool[0] = NAN if flagged and decodes else 1.0
    record = step.run(build(decodes_apart=True))
    assert record.kernels.count("torch_recurrent") == (decodes > 0) + (verified > 0)
    assert {*record.kernels} <= {"torch_pack", "torch_chunk16", "torch_recurrent", "torch_scatter"}
    for part in ["decode"] * (decodes > 0) + ["speculative"] * (verified > 0):
        found = seen.pop(0)
        if part == "speculative" or not flagged:
            assert found is None
        else:
            assert found is not None
            assert (found.data_ptr(), len(found)) == (flags.data_ptr(), decodes)
    assert seen == []
    assert step.out[:, : step.metadata.num_actual_tokens].isfinite().all()


def test_a_decode_without_a_token_leaves_its_slot_alone() -> None:
    """Padding of a step of decodes, whatever its flag says."""
    step = Step("decode")
    idle = torch.tensor([0, 1, 1], dtype=torch.int32)
    step.pool[1] = NAN
    step.change(
        num_actual_tokens=1,
        non_spec_query_start_loc=idle,
        has_initial_state=torch.tensor([True, False]),
    ).run(build())
    assert step.pool[1].isnan().all()
    assert step.pool[0].isfinite().all()


def test_decodes_apart_have_the_bits_of_a_pure_decode() -> None:
    def decoded(others: bool) -> Tensor:
        engine = engine_of(decodes_apart=True)
        a, b = engine.add(20), engine.add(30)
        engine.step([Work(a, "prefill", 20)])
        new = engine._draw(1)
        a.tokens = PackInputs(*(torch.cat(x, 1) for x in zip(a.tokens, new)))
        engine.step([Work(a, "decode"), *([Work(b, "prefill", 30)] if others else [])])
        return engine.pool[a.slots[0]]

    assert same_bits(decoded(True), decoded(False))


@pytest.mark.parametrize("heads, sms, threshold", [(32, 132, 13), (4, 132, 104), (32, 0, 1)])
def test_the_policy_sends_many_decodes_apart(heads: int, sms: int, threshold: int) -> None:
    choices = [decodes_pay_apart(n, heads, sms) for n in range(2 * threshold)]
    assert choices.index(True) == threshold
    assert all(choices[threshold:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_computes_its_slice_of_the_full_layer(kind: str) -> None:
    """Two ranks of half the heads against one of all of them."""
    full = Step(kind)
    sizes: dict[str, Any] = {"num_heads": 2, "num_value_heads": 4}
    full.inputs = PackInputs(*(wider(x) * torch.arange(1, 1 + 2 * x.shape[2]).view(
        1, 1, -1, *[1] * (x.dim() - 3)) for x in full.inputs))  # fmt: skip
    full.A_log = torch.cat([full.A_log, full.A_log - 1.0])
    full.dt_bias = torch.cat([full.dt_bias, 0.5 * full.dt_bias])
    full.pool, full.out = wider(full.pool, 1), wider(full.out)
    full.pool[:, 2:] *= 2.0
    ranks = []
    for rank in (0, 1):
        part = Step(kind)
        q, v = slice(rank, rank + 1), slice(2 * rank, 2 * rank + 2)
        i = full.inputs
        part.inputs = PackInputs(i.q[:, :, q], i.k[:, :, q], i.v[:, :, v], i.g[:, :, v],
                                 i.beta[:, :, v])  # fmt: skip
        part.A_log, part.dt_bias = full.A_log[v], full.dt_bias[v]
        part.pool = full.pool[:, v].clone()
        part.run(build())
        ranks.append(part)
    full.run(build(**sizes))
    T = full.metadata.num_actual_tokens
    out = torch.cat([r.out for r in ranks], 2)
    torch.testing.assert_close(full.out[:, :T], out[:, :T], rtol=1e-5, atol=1e-6)
    pool = torch.cat([r.pool for r in ranks], 1)
    torch.testing.assert_close(full.pool, pool, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beside", ["nothing", "decode", "speculative", "both"])
def test_a_checkpoint_is_the_state_of_the_cut_prompt(beside: str) -> None:
    """At 128 of 130 tokens; a request that resumes there goes on as if it had computed them."""
    engine = Engine(build(max_num_batched_tokens=256), slots=24)
    long, cut, a, b = engine.add(130), engine.add(0), engine.add(3), engine.add(1)
    cut.tokens = long.tokens.rows(0, 128)
    engine.step([Work(a, "prefill", 3)])
    others = {"speculative": Work(a, "speculative", 2, 1), "decode": Work(b, "decode")}
    chosen = [w for kind, w in others.items() if beside in (kind, "both")]
    engine.step([*chosen, Work(long, "prefill", 130, checkpoint=128)], idle_sequences=1)
    engine.step([Work(cut, "prefill", 128)])
    ((computed, saved, _),) = long.checkpoints
    assert computed == 128
    assert same_bits(saved, engine.pool[cut.slots[0]])
    engine.preempt(long)
    resumed = engine.resume(long, 0, 20)
    engine.step([Work(resumed, "prefill", 20)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_may_be_a_strided_view_of_something_larger(kind: str) -> None:
    want = Step(kind)
    want.run(build())
    step = Step(kind)
    rows = step.out.shape[1]
    wide = torch.full((1, rows + 4, HV * D + 24), NAN)
    view = wide[:, 2 : rows + 2, 8 : 8 + HV * D].unflatten(-1, (HV, D))
    step.run(build(), core_attn_out=view)
    assert same_bits(view, want.out)
    view.fill_(NAN)
    assert wide.isnan().all(), "something around the output was written"


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_past_the_live_entries_is_not_looked_at(kind: str) -> None:
    want, step = Step(kind), Step(kind)
    want.run(build())
    names = ("non_spec_query_start_loc", "non_spec_state_indices", "spec_query_start_loc",
             "num_accepted_tokens", "spec_state_indices", "has_initial_state",
             "non_spec_token_indx", "spec_token_indx")  # fmt: skip
    longer = {}
    for name in names:
        x = getattr(step.metadata, name)
        if x is not None:
            fill = False if x.dtype == torch.bool else GARBAGE
            longer[name] = torch.cat([x, torch.full((5, *x.shape[1:]), fill, dtype=x.dtype)])
    step.change(**longer).run(build())
    assert same_bits(step.out, want.out)
    assert same_bits(step.pool, want.pool)


def test_an_empty_step_does_nothing() -> None:
    engine = engine_of()
    assert engine.step([], padding=4).launches == ()
    step = Step("decode")
    record = step.run(build(), metadata=StepMetadata(0))
    assert record == ("none", ())
    assert step.out.isnan().all()


def test_a_layer_built_in_inference_mode_runs_outside_of_it() -> None:
    with torch.inference_mode():
        core = build()
        Step("mixed").run(core)
    Step("mixed").run(core)


def test_code_in_the_page_runs() -> None:
    """docs/layer.md, one block after the other."""
    page = Path(__file__).resolve().parent.parent / "docs" / "layer.md"
    scope: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(compile(code, page.name, "exec"), scope)
    assert scope["ran"].route == "scatter"
    assert bool(scope["core_attn_out"][:, :9].any(-1).all())
    assert not scope["core_attn_out"][:, 9:].any()


def test_an_engine_allows_what_rounding_loses_and_no_more(monkeypatch):
    """A limit far below bf16 holds nothing up; a tenth more than there should be does."""
    core = build(dtype=torch.bfloat16)
    engine = Engine(core, slots=24, limit=1e-5)
    a, b = engine.add(1), engine.add(7)
    engine.step([Work(a, "prefill", 1), Work(b, "prefill", 7)])
    forward = core.forward

    def a_tenth_more(*args: Any, **options: Any) -> Any:
        record = forward(*args, **options)
        args[9].mul_(1.1)  # out
        return record

    monkeypatch.setattr(core, "forward", a_tenth_more)
    with pytest.raises(Mismatch, match="plain torch bf16"):
        engine.step([Work(engine.add(5), "prefill", 5)])
