"""FlashKDA's own functions: their signatures, their results, and a workspace that is enough."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kda_jit
from kda_jit.backends.pipeline import plan_pipeline
from kda_jit.backends.torch import TorchBackend
from kda_jit.backends.triton import config_for
from kda_jit.errors import (
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    WorkspaceError,
)
from kda_jit.integrations import flash_kda
from kda_jit.integrations._flashkda import workspace_bytes
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case, Limit, assert_close
from kda_jit.testing.numeric import plain_loss
from kda_jit.workspace import (
    ALIGNMENT,
    PIPELINE_FLAG_BYTES,
    STAGE_BYTES,
    Workspace,
    planned_bytes,
    stage_slots,
    workspace_specs,
)

D = 128
PAGE = Path(__file__).resolve().parent.parent / "docs" / "integrations" / "flash_kda.md"
RAGGED = Case(seed=3, lengths=(0, 1, 15, 0, 17, 33, 64), heads=2, padding=5)
REDZONE = 512


def call(x, **changes):
    """(arguments by name, out, final_state) of FlashKDA's fwd; results full of NaN."""
    shape = (x.N, *x.v.shape[2:], x.q.shape[3])
    arguments = {
        "q": x.q, "k": x.k, "v": x.v, "g": x.g, "beta": x.beta, "scale": x.q.shape[3] ** -0.5,
        "out": torch.full_like(x.v, torch.nan), "A_log": x.A_log, "dt_bias": x.dt_bias,
        "lower_bound": x.lower_bound, "initial_state": x.initial_state,
        "final_state": torch.full(shape, torch.nan), "cu_seqlens": x.cu_seqlens,
    }  # fmt: skip
    return arguments | changes


def check(x, arguments):
    """Against the float64 recurrence, as exact as the torch backend is elsewhere."""
    want = x.reference()
    loss = plain_loss(x, want)
    case = x.case
    assert_close(
        "out", arguments["out"], want.out, Limit(loss.out), cu_seqlens=x.cu_seqlens, case=case
    )
    state = arguments["final_state"]
    if state is not None:
        rounding = 4e-3 if state.dtype is torch.bfloat16 else 0.0
        assert_close("state", state, want.final_state, Limit(loss.state).allowed + rounding)


def test_signatures_are_those_of_flash_kda():
    shown = {
        name: (parameter.name, parameter.default)
        for name, parameter in inspect.signature(flash_kda.fwd).parameters.items()
    }
    required = ["q", "k", "v", "g", "beta", "scale", "out", "A_log", "dt_bias", "lower_bound"]
    optional = ["initial_state", "final_state", "cu_seqlens"]
    assert list(shown)[:13] == [*required, *optional]
    assert all(shown[name][1] is inspect.Parameter.empty for name in required)
    assert all(shown[name][1] is None for name in optional)
    assert str(inspect.signature(flash_kda.get_workspace_size)).startswith(
        "(T_total: 'int', H: 'int', N: 'int' = 1)"
    )


@pytest.mark.parametrize(
    "case",
    [
        RAGGED,
        RAGGED.replace(initial=False),
        RAGGED.replace(state_dtype="bfloat16"),
        RAGGED.replace(heads=1, value_heads=2),
        Case(seed=4, lengths=(40, 40), heads=2, packed=False),
        Case(seed=5, lengths=(70,), heads=1, regime="near_keys"),
    ],
    ids=lambda case: repr(case)[5:-1],
)
def test_results_are_those_of_the_recurrence(case):
    x = case.tensors()
    arguments = call(x)
    if case.state_dtype == "bfloat16":
        arguments["final_state"] = arguments["final_state"].bfloat16()
    before = {n: y.clone() for n, y in arguments.items() if isinstance(y, torch.Tensor)}
    assert flash_kda.fwd(**arguments) is None
    assert kda_jit.last_launch().backend == "torch"
    check(x, arguments)
    for name, y in before.items():
        if name not in ("out", "final_state"):
            assert torch.equal(arguments[name].nan_to_num(), y.nan_to_num()), f"{name} changed"
    if case.padding:
        assert arguments["out"][:, -case.padding :].isnan().all(), "rows past the last token"


def test_in_float64_only_the_state_is_rounded():
    x = Case(seed=6, lengths=(37, 0, 50), heads=2).tensors(dtype=torch.float64, head_dim=32)
    arguments = call(x)
    flash_kda.fwd(**arguments)
    want = x.reference()
    torch.testing.assert_close(arguments["out"], want.out, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        arguments["final_state"].double(), want.final_state, rtol=1e-5, atol=1e-7
    )


def test_positional_as_people_call_it():
    x = RAGGED.tensors()
    named = call(x)
    flash_kda.fwd(**named)
    again = call(x)
    flash_kda.fwd(*again.values())
    assert torch.equal(again["final_state"], named["final_state"])
    assert torch.equal(again["out"].nan_to_num(), named["out"].nan_to_num())


@pytest.mark.parametrize("given_state", [True, False])
def test_a_final_state_need_not_be_asked_for(given_state):
    x = RAGGED.replace(initial=given_state).tensors()
    arguments = call(x, final_state=None)
    flash_kda.fwd(**arguments)
    check(x, arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_either_width_and_strided_rows(dtype):
    """beta as a column of a wider projection, and so everything else."""
    x = RAGGED.tensors()
    T, H = x.q.shape[1:3]
    wide = torch.full((1, T, 4 * H * D + H + 3), torch.nan, dtype=torch.bfloat16)
    views = []
    for i, y in enumerate(x.args[:4]):
        wide[..., i * H * D : (i + 1) * H * D] = y.flatten(2)
        views.append(wide[..., i * H * D : (i + 1) * H * D].unflatten(-1, (H, D)))
    wide[..., 4 * H * D : -3] = x.beta
    views.append(wide[..., 4 * H * D : -3])
    plain = call(x)
    flash_kda.fwd(**plain)
    names = ("q", "k", "v", "g", "beta")
    strided = call(x, cu_seqlens=x.cu_seqlens.to(dtype), **dict(zip(names, views)))
    flash_kda.fwd(**strided)
    assert torch.equal(strided["out"].nan_to_num(), plain["out"].nan_to_num())
    assert torch.equal(strided["final_state"], plain["final_state"])


def test_scale_and_bound_are_used():
    x = Case(seed=8, lengths=(30,), heads=1).tensors()
    arguments = call(x, scale=0.25, lower_bound=-1.5)
    flash_kda.fwd(**arguments)
    kwargs = x.kwargs | {"scale": 0.25, "lower_bound": -1.5}
    want = recurrent_kda(*x.args, **kwargs)
    assert_close("out", arguments["out"], want.out, 1e-2, cu_seqlens=x.cu_seqlens)


# -- the workspace -------------------------------------------------------------------------------


def size(x):
    return flash_kda.get_workspace_size(x.q.shape[0] * x.q.shape[1], x.v.shape[2], x.N)


@pytest.mark.parametrize("case", [RAGGED, Case(lengths=(20, 20, 20), heads=2, packed=False)])
def test_a_workspace_of_the_size_told_is_enough_and_one_byte_less_is_not(case):
    x = case.tensors()
    memory = torch.full((size(x),), 0xFF, dtype=torch.uint8)
    arguments = call(x, workspace=memory)
    flash_kda.fwd(**arguments)
    check(x, arguments)
    arguments = call(x, workspace=memory[1:])
    tokens, heads = x.q.shape[0] * x.q.shape[1], x.v.shape[2]
    words = (
        rf"^workspace: expected a tensor of at least {size(x)} bytes, got {size(x) - 1}\. "
        rf"get_workspace_size\({tokens}, {heads}, {x.N}\)"
    )
    with pytest.raises(WorkspaceError, match=words):
        flash_kda.fwd(**arguments)
    assert arguments["out"].isnan().all() and arguments["final_state"].isnan().all()


def test_a_workspace_of_another_dtype_and_shape_is_bytes_too():
    x = RAGGED.tensors()
    memory = torch.empty(-(-size(x) // 8), 2)  # fp32
    flash_kda.fwd(**call(x, workspace=memory))
    with pytest.raises(InputError, match="workspace: expected a contiguous tensor, got strides"):
        flash_kda.fwd(**call(x, workspace=torch.empty(2, size(x), dtype=torch.uint8).T))


def test_wider_numbers_need_a_larger_workspace():
    x = RAGGED.tensors(dtype=torch.float32)
    with pytest.raises(WorkspaceError, match="for bf16 and 128 channels"):
        flash_kda.fwd(**call(x, workspace=torch.empty(size(x), dtype=torch.uint8)))


@pytest.mark.parametrize("name", ["q", "beta", "out", "A_log", "final_state", "cu_seqlens"])
def test_a_workspace_that_overlaps_an_argument_is_refused(name):
    x = RAGGED.tensors()
    arguments = call(x)
    y = arguments[name]
    memory = torch.zeros(size(x) + y.nbytes + 64, dtype=torch.uint8)
    for start in (0, size(x) - 64):  # inside, and over the end
        lent = memory[start : start + y.nbytes].view(y.dtype).view(y.shape).copy_(y)
        with pytest.raises(InputError, match=f"workspace: expected memory apart from {name}"):
            flash_kda.fwd(**arguments | {name: lent, "workspace": memory[: size(x)]})
    apart = memory[-y.nbytes :].view(y.dtype).view(y.shape).copy_(y)
    rest = memory[: -y.nbytes]
    flash_kda.fwd(**arguments | {name: apart, "workspace": rest[: size(x)]})
    # The workspace behind the argument, whose last bytes it takes.
    front = memory[: y.nbytes].view(y.dtype).view(y.shape).copy_(y)
    with pytest.raises(InputError, match=f"workspace: expected memory apart from {name}"):
        flash_kda.fwd(**arguments | {name: front, "workspace": memory[y.nbytes - 1 :]})
    flash_kda.fwd(**arguments | {name: front, "workspace": memory[y.nbytes :]})


def test_nothing_else_is_allocated(monkeypatch):
    """Backends are handed a workspace in the caller's memory, inside a capture, too."""
    x = RAGGED.tensors()
    seen = []

    def run(self, p, workspace):
        slots = stage_slots(p.T, p.N, checkpoints=False)
        address = workspace.address("prefill_stages", slots * p.HV * STAGE_BYTES, caller="spy")
        flags = workspace.address("pipeline_flags", PIPELINE_FLAG_BYTES, caller="spy")
        seen.append((address, flags))
        with pytest.raises(WorkspaceError, match="expected spy to stay within the plan"):
            workspace.get("prefill_stages", slots * p.HV * STAGE_BYTES + 1, caller="spy")

    def never(*_):
        raise AssertionError("allocated")

    monkeypatch.setattr(TorchBackend, "run", run)
    monkeypatch.setattr("kda_jit.workspace._torch_empty", never)
    monkeypatch.setattr("kda_jit.workspace.is_capturing", lambda: True)
    memory = torch.empty(size(x), dtype=torch.uint8)
    flash_kda.fwd(**call(x, workspace=memory))
    ((stages, flags),) = seen
    first, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert first <= stages < flags <= end - PIPELINE_FLAG_BYTES


@given(
    lengths=st.lists(st.sampled_from((0, 1, 15, 16, 17, 31, 32, 33)) | st.integers(0, 3000)),
    padding=st.integers(0, 100),
    spare=st.tuples(st.integers(0, 5000), st.integers(0, 50)),
    heads=st.integers(1, 96),
    sm_count=st.sampled_from((8, 108, 132, 160)),
    offset=st.integers(0, ALIGNMENT),
    checkpoints=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_size_is_enough_for_every_ragged_batch_within_the_bounds(
    lengths, padding, spare, heads, sm_count, offset, checkpoints, seed
):
    """What each backend asks for has room, at any address, in what the bounds of a step need."""
    T, N = sum(lengths) + padding, len(lengths)
    bounds = T + spare[0], heads, N + spare[1]
    if checkpoints:
        nbytes = workspace_bytes(*bounds, checkpoints=True)
    else:
        nbytes = flash_kda.get_workspace_size(*bounds)

    # 1. The slots that sequences own: each image of 32 tokens, a checkpoint ending one early.
    rng = torch.Generator().manual_seed(seed)
    start = 0
    for n, length in enumerate(lengths):
        cut = int(torch.randint(length // 16 + 1, (), generator=rng)) * 16 * checkpoints
        images = -(-cut // 32) + -(-(length - cut) // 32)
        first = start // 32 + (1 + checkpoints) * n
        assert first + images <= stage_slots(T, N, checkpoints=checkpoints)
        start += length

    # 2. What backends ask for, in that many bytes, wherever those begin. Only addresses are looked
    #    at, so none of the memory is touched.
    memory = _Range(1 << 20 | offset, nbytes)
    specs = workspace_specs(max(T, 1), max(N, 1), heads, D, checkpoints=checkpoints)
    held = Workspace(specs, "cpu", lambda n, d: memory)
    asked = {
        "portable": stage_slots(T, N, checkpoints=checkpoints) * heads * STAGE_BYTES,
        "triton": sum(config_for(D, D, torch.bfloat16).scratch_bytes((T // 16 + N) * heads)),
    }
    if plan := (plan_pipeline(T, N, heads, sm_count) if T and N else None):
        asked["pipeline"] = plan.ring_bytes
        flags = held.address("pipeline_flags", plan.flag_bytes, caller="pipeline")
        assert flags + plan.flag_bytes <= memory.data_ptr() + nbytes
    for name, size in asked.items():
        address = held.address("prefill_stages", size, caller=name)
        assert memory.data_ptr() <= address and address % ALIGNMENT == 0
        assert address + size <= held.address("pipeline_flags", 1, caller=name)


class _Range:
    """As much of a tensor as a workspace looks at."""

    def __init__(self, start, nbytes):
        self.start, self.nbytes = start, nbytes

    def data_ptr(self):
        return self.start


@given(B=st.integers(1, 200), T=st.integers(1, 200), heads=st.integers(1, 8))
def test_the_size_is_enough_for_dense_batches(B, T, heads):
    nbytes = flash_kda.get_workspace_size(B * T, heads, B)
    specs = workspace_specs(B * T, B, heads, D, checkpoints=False)
    assert nbytes == planned_bytes(specs)
    stages = specs["prefill_stages"].nbytes
    assert stages >= B * -(-T // 32) * heads * STAGE_BYTES
    records = B * -(-T // 16) * heads
    assert stages >= sum(config_for(D, D, torch.bfloat16).scratch_bytes(records))


def test_the_size_grows_with_each_bound():
    base = flash_kda.get_workspace_size(1000, 4, 7)
    for bounds in ((1032, 4, 7), (1000, 5, 7), (1000, 4, 8)):
        assert flash_kda.get_workspace_size(*bounds) > base
    assert flash_kda.get_workspace_size(1000, 4) == flash_kda.get_workspace_size(1000, 4, 1)
    assert flash_kda.get_workspace_size(0, 0, 0) > 0


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [(-1, 1, 1), (1, -1, 1), (1, 1, -1)])
def test_negative_bounds_are_refused(bounds):
    with pytest.raises(InputError, match="expected at least 0, got -1"):
        flash_kda.get_workspace_size(*bounds)
    with pytest.raises(InputTypeError, match="T_total: expected an int, got float"):
        flash_kda.get_workspace_size(1.5, 1)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"lower_bound": None}, InputTypeError, "lower_bound: expected a number"),
        ({"lower_bound": -6.0}, InputError, "lower_bound: expected None or a number"),
        ({"q": torch.zeros(3)}, InputError, r"q: expected \[B, T, H, K\]"),
        ({"beta": torch.zeros(1, 2, 2)}, InputError, "beta: expected"),
        ({"initial_state": torch.zeros(1, 2, D, D)}, InputError, "initial_state: expected"),
        ({"workspace": torch.empty(1 << 24, device="meta")}, DeviceError, "workspace: expected"),
        ({"A_log": torch.zeros(2, requires_grad=True)}, GradError, "A_log: expected requires_grad"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, error, words):
    x = RAGGED.tensors()
    arguments = call(x, workspace=torch.empty(size(x), dtype=torch.uint8)) | changes
    with pytest.raises(error, match=words):
        flash_kda.fwd(**arguments)


# -- the page ------------------------------------------------------------------------------------


def test_code_in_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    scope = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), scope)
    assert scope["flash_kda"] is flash_kda
    assert scope["out"].isfinite().all() and scope["final_state"].isfinite().all()
