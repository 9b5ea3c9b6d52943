"""The public functions, end to end on the CPU: who runs, what is returned, what is refused."""

import inspect
import threading

import pytest
import torch

import kda_jit
from kda_jit import api, contract
from kda_jit.backends.base import LaunchRecord
from kda_jit.errors import (
    BackendNameError,
    DeviceError,
    GradError,
    InputError,
    InputTypeError,
    NoBackendError,
    WorkspaceError,
)
from kda_jit.reference import recurrent_kda

H, HV, D = 2, 4, 32
SENTINEL = 7.0
NONE = LaunchRecord("none")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)


def inputs(*lengths, T=None, seed=0, **more):
    """Arguments of a packed call; T tokens, at least as many as the sequences have."""
    torch.manual_seed(seed)
    T = sum(lengths) if T is None else T
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {
        "q": torch.randn(1, T, H, D),
        "k": torch.randn(1, T, H, D),
        "v": torch.randn(1, T, HV, D),
        "g": torch.randn(1, T, HV, D),
        "beta": torch.randn(1, T, HV),
        "A_log": torch.randn(HV) * 0.1,
        "dt_bias": torch.randn(HV, D) * 0.1,
        "cu_seqlens": ends,
    } | more


def sentinels(*shape):
    return torch.full(shape, SENTINEL)


def expected(arguments):
    given = {k: x for k, x in arguments.items() if k not in ("out", "final_state")}
    return recurrent_kda(**given)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


class Spy:
    """A backend that only looks."""

    name = "torch"

    def __init__(self, fail=None):
        self.calls, self.fail = [], fail

    def run(self, problem, workspace):
        self.calls.append((problem, workspace))
        if self.fail:
            raise self.fail


@pytest.fixture
def spy(monkeypatch):
    found = Spy()
    monkeypatch.setattr(api, "runner_for", lambda p, backend, name: found)
    return found


# -- the surface ---------------------------------------------------------------------------------


def test_prefill_has_the_signature_of_the_specification():
    parameters = inspect.signature(kda_jit.prefill).parameters
    assert list(parameters) == [
        "q", "k", "v", "g", "beta", "A_log", "dt_bias", "lower_bound", "scale", "initial_state",
        "cu_seqlens", "out", "final_state", "state_indices", "has_initial_state",
        "checkpoint_state", "checkpoint_offsets", "workspace", "backend",
    ]  # fmt: skip
    kinds = [p.kind for p in parameters.values()]
    assert kinds[:5] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 5
    assert set(kinds[5:]) == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["lower_bound"].default == -5.0
    assert parameters["backend"].default == "auto"


def test_contract_and_api_agree_on_names_and_defaults():
    ours = inspect.signature(kda_jit.prefill).parameters
    theirs = inspect.signature(contract.make_problem).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [
        (p.name, p.default) for p in ours.values() if p.name not in ("workspace", "backend")
    ]


def test_no_public_function_takes_any_keyword():
    functions = [x for x in vars(kda_jit).values() if inspect.isfunction(x)]
    assert kda_jit.prefill in functions
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, function


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="beta_is_raw"):
        kda_jit.prefill(**inputs(5), beta_is_raw=True)


def test_every_public_name_exists_and_every_parameter_is_documented():
    for name in kda_jit.__all__:
        assert getattr(kda_jit, name) is not None
    for name in inspect.signature(kda_jit.prefill).parameters:
        assert name in kda_jit.prefill.__doc__


# -- what it computes ----------------------------------------------------------------------------


def test_packed_prefill_is_the_recurrence_and_says_who_ran():
    arguments = inputs(33, 0, 1, 16)
    out, final_state = kda_jit.prefill(**arguments)
    want = expected(arguments)
    close(out, want.out)
    close(final_state, want.final_state)
    assert out.dtype is torch.float32
    assert kda_jit.last_launch().backend == "torch"


def test_caller_buffers_are_written_and_returned_and_inputs_are_not():
    arguments = inputs(9, 20, T=40)
    arguments |= {"out": sentinels(1, 40, HV, D), "final_state": sentinels(2, HV, D, D)}
    arguments["initial_state"] = torch.randn(2, HV, D, D)
    before = {k: x.clone() for k, x in arguments.items()}
    out, final_state = kda_jit.prefill(**arguments)
    assert out is arguments["out"]
    assert final_state is arguments["final_state"]
    assert bool((out[:, 29:] == SENTINEL).all())
    assert bool((out[:, :29] != SENTINEL).all())
    for name in before.keys() - {"out", "final_state"}:
        assert arguments[name].equal(before[name])
    again, _ = kda_jit.prefill(**(arguments | {"out": None, "final_state": None}))
    assert again[:, :29].equal(out[:, :29])


def test_a_pool_is_updated_in_place_and_only_in_the_slots_of_the_call():
    arguments = inputs(5, 7, 3)
    states = torch.randn(6, HV, D, D)
    states[2] = float("nan")
    before = states.clone()
    indices = torch.tensor([4, -1, 2])
    fresh = torch.tensor([True, False, False])
    out, final_state = kda_jit.prefill(
        **arguments, initial_state=states, state_indices=indices, has_initial_state=fresh
    )
    assert final_state is states
    start = torch.stack([before[4], torch.zeros(HV, D, D), torch.zeros(HV, D, D)])
    want = recurrent_kda(**arguments, initial_state=start)
    close(out, want.out)
    close(states[4], want.final_state[0])
    close(states[2], want.final_state[2])
    for slot in (0, 1, 3, 5):
        assert states[slot].equal(before[slot])


# -- calls without a token -----------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_without_tokens_states_are_the_initial_ones(packed, given):
    arguments = inputs(0, 0, 0)
    if not packed:
        arguments["cu_seqlens"] = None
        for name in ("q", "k", "v", "g", "beta"):
            arguments[name] = arguments[name].expand(3, *arguments[name].shape[1:])
    arguments["final_state"] = sentinels(3, HV, D, D) if given else None
    out, final_state = kda_jit.prefill(**arguments)
    assert out.shape == arguments["v"].shape
    assert bool((final_state == 0).all())
    assert kda_jit.last_launch() == NONE
    initial = torch.randn(3, HV, D, D).bfloat16()
    _, final_state = kda_jit.prefill(**arguments, initial_state=initial)
    assert final_state.equal(initial.float())
    initial[1] = float("nan")
    fresh = torch.tensor([True, False, True])
    _, final_state = kda_jit.prefill(**arguments, initial_state=initial, has_initial_state=fresh)
    assert final_state[0].equal(initial[0].float())
    assert bool((final_state[1] == 0).all())


def test_without_tokens_in_place():
    initial = torch.randn(2, HV, D, D)
    before = initial.clone()
    kda_jit.prefill(**inputs(0, 0), initial_state=initial, final_state=initial)
    assert initial.equal(before)
    fresh = torch.tensor([False, True])
    arguments = {"initial_state": initial, "final_state": initial, "has_initial_state": fresh}
    kda_jit.prefill(**inputs(0, 0), **arguments)
    assert bool((initial[0] == 0).all())
    assert initial[1].equal(before[1])


def test_without_tokens_a_pool_keeps_its_slots_but_for_fresh_sequences():
    states = torch.randn(5, HV, D, D)
    before = states.clone()
    arguments = inputs(0, 0, 0) | {
        "initial_state": states,
        "state_indices": torch.tensor([3, -1, 0]),
    }
    assert kda_jit.prefill(**arguments)[1] is states
    assert states.equal(before)
    assert kda_jit.last_launch() == NONE
    kda_jit.prefill(**arguments, has_initial_state=torch.tensor([True, False, False]))
    assert bool((states[0] == 0).all())
    assert states[1:].equal(before[1:])
    assert kda_jit.last_launch().backend == "torch"


def test_without_sequences_nothing_is_written():
    arguments = inputs(T=8, out=sentinels(1, 8, HV, D))
    out, final_state = kda_jit.prefill(**arguments)
    assert bool((out == SENTINEL).all())
    assert final_state.shape == (0, HV, D, D)
    assert kda_jit.last_launch() == NONE


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, error, builtin, words",
    [
        ({"backend": "cuda"}, NoBackendError, RuntimeError, "'cuda'.*CUDA device, got cpu"),
        ({"backend": "flashkda"}, NoBackendError, RuntimeError, "'flashkda'.*got cpu"),
        ({"backend": "cudda"}, BackendNameError, ValueError, "flashkda.*'cudda'"),
        ({"backend": None}, InputTypeError, TypeError, "^backend: expected a str, got NoneType"),
        ({"workspace": 1 << 20}, InputTypeError, TypeError, "^workspace: expected .* got int"),
        ({"lower_bound": -6.0}, InputError, ValueError, "^lower_bound: .*got -6"),
        ({"scale": float("nan")}, InputError, ValueError, "^scale: .*got nan"),
        ({"v": torch.randn(1, 12, HV, D).requires_grad_()}, GradError, RuntimeError, "^v: .*no_gr"),
        ({"g": torch.randn(1, 12, HV, D, device="meta")}, DeviceError, RuntimeError, "^g: .*meta"),
        ({"beta": torch.randn(1, 12, HV).half()}, InputTypeError, TypeError, "^beta: .*float16"),
        (
            {"state_indices": torch.tensor([0, 9])},
            InputError,
            ValueError,
            "^state_indices: .*got 9",
        ),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_a_refused_call_writes_nothing(changes, error, builtin, words):
    pooled = "state_indices" in changes
    arguments = inputs(5, 7, out=sentinels(1, 12, HV, D)) | {
        "initial_state" if pooled else "final_state": sentinels(2, HV, D, D),
        "checkpoint_state": sentinels(2, HV, D, D),
        "checkpoint_offsets": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(error, match=words) as caught:
        kda_jit.prefill(**(arguments | changes))
    assert isinstance(caught.value, builtin)
    for name in ("out", "final_state", "initial_state", "checkpoint_state"):
        if name in arguments:
            assert bool((arguments[name] == SENTINEL).all()), name


def test_the_environment_variable_counts_in_a_call(monkeypatch):
    kda_jit.prefill(**inputs(5))
    monkeypatch.setenv("KDA_JIT_BACKEND", "cuda")
    with pytest.raises(NoBackendError, match=r"^KDA_JIT_BACKEND=cuda"):
        kda_jit.prefill(**inputs(5))
    kda_jit.prefill(**inputs(5), backend="torch")


# -- backend and workspace -----------------------------------------------------------------------


def test_the_choice_is_made_once_per_kind_of_call(monkeypatch):
    asked = []
    resolve = api.resolve
    monkeypatch.setattr(api, "_runners", {})
    monkeypatch.setattr(api, "resolve", lambda q, b: (asked.append(q), resolve(q, b))[1])
    for length in (3, 4, 5):
        kda_jit.prefill(**inputs(length))
        kda_jit.prefill(**inputs(length), lower_bound=-1.0, scale=2.0)
    assert len(asked) == 1
    kda_jit.prefill(**inputs(3), lower_bound=None)
    assert [q.lower_bound for q in asked] == [-5.0, None]
    arguments = inputs(3)
    arguments["g"] = torch.zeros(1, 3, HV, D + 2)[..., :D].contiguous().view(-1)
    spare = torch.zeros(3 * HV * D + 1)[1:].view(1, 3, HV, D)
    kda_jit.prefill(**(arguments | {"g": spare}))
    assert asked[-1].misaligned == ("g",)


def test_the_workspace_is_held_while_the_backend_runs(spy):
    ws = kda_jit.Workspace()
    held = []
    spy.run = lambda p, w: held.append((w, ws._mutex._is_owned()))
    kda_jit.prefill(**inputs(5), workspace=ws)
    assert held == [(ws, True)]
    assert not ws._mutex._is_owned()
    assert ws.device == torch.device("cpu")


def test_the_workspace_is_released_when_the_backend_fails(spy):
    spy.fail = RuntimeError("kernel")
    ws = kda_jit.Workspace()
    with pytest.raises(RuntimeError, match="kernel"):
        kda_jit.prefill(**inputs(5), workspace=ws)
    assert not ws._mutex._is_owned()


def test_a_workspace_of_another_device_is_refused_before_the_backend_runs(spy):
    ws = kda_jit.Workspace(device="meta")
    with pytest.raises(DeviceError, match=r"^workspace: expected one on cpu.*got one on meta"):
        kda_jit.prefill(**inputs(5), workspace=ws)
    assert spy.calls == []


def test_too_small_a_plan_is_refused(spy):
    specs = kda_jit.workspace_specs(16, 1, HV, 128)
    ws = kda_jit.Workspace(specs, "cpu")
    size = specs["prefill_stages"].nbytes + 1
    spy.run = lambda p, w: w.address("prefill_stages", size, caller="spy")
    with pytest.raises(WorkspaceError, match=rf"spy .*{size} bytes.*planned: {size - 1}"):
        kda_jit.prefill(**inputs(5), workspace=ws)


def test_last_launch_belongs_to_its_thread():
    kda_jit.prefill(**inputs(5))
    here = kda_jit.last_launch()
    seen = []

    def other():
        seen.append(kda_jit.last_launch())
        kda_jit.prefill(**inputs(0))
        seen.append(kda_jit.last_launch())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [None, NONE]
    assert kda_jit.last_launch() is here


def test_threads_get_the_results_of_their_own_calls():
    cases = [inputs(17, 5, seed=seed) for seed in range(4)]
    alone = [kda_jit.prefill(**case) for case in cases]
    results = [None] * len(cases)

    def run(i):
        results[i] = [kda_jit.prefill(**cases[i]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (out, state), repeats in zip(alone, results, strict=True):
        for again, again_state in repeats:
            assert again.equal(out)
            assert again_state.equal(state)


# -- warm-up -------------------------------------------------------------------------------------


def test_warmup_on_the_cpu_is_torch_and_runs_nothing(spy):
    assert kda_jit.warmup("cpu").backend == "torch"
    assert spy.calls == []
    with pytest.raises(NoBackendError, match="got cpu"):
        kda_jit.warmup("cpu", backend="cuda")


def test_warmup_where_torch_cannot_work_says_so():
    with pytest.raises(DeviceError, match="device: expected one that torch can use, got cuda:99"):
        kda_jit.warmup("cuda:99")


def test_warmup_runs_each_option_of_triton_once(spy, monkeypatch):
    resolution = kda_jit.Resolution("triton", {})
    monkeypatch.setattr(api, "resolve_backend", lambda *a, **k: resolution)
    got = kda_jit.warmup("cpu", num_heads=2, num_value_heads=4, head_dim=32, lower_bound=None)
    assert got is resolution
    problems = [p for p, _ in spy.calls]
    assert {(p.H, p.HV, p.K, p.V, p.lower_bound) for p in problems} == {(2, 4, 32, 32, None)}
    kinds = {
        (p.is_varlen, p.is_pool, p.initial_state is not None, p.has_initial_state is not None)
        for p in problems
    }
    assert len(kinds) == len(problems) == 6
