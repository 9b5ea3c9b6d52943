"""`kda_jit.chunk_kda` against the float64 recurrence: forms, layouts, gates, refusals.

On the CPU torch runs; with TRITON_INTERPRET=1 (a process of its own) the same tests run Triton's
kernels in its interpreter, over fewer cases.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import kda_jit
from kda_jit.chunk import prepare_chunk
from kda_jit.chunk.by_triton import config_of_forms
from kda_jit.chunk.forms import tokens, v_major
from kda_jit.errors import DeviceError, GradError, InputError, InputTypeError, NoBackendError
from kda_jit.reference import activated_kda, l2norm, recurrent_kda
from kda_jit.testing.cases import REGIMES, Case
from kda_jit.testing.chunk import FORMS, Form, exact_chunk_kda
from kda_jit.testing.numeric import assert_close

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKEND = "triton" if INTERPRETED else "torch"
# exp2 of a saturated gate is inf, on purpose: its sigmoid is 0.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
torch_only = pytest.mark.skipif(INTERPRETED, reason="one backend is enough for what this holds")

LIMIT = 3e-5 if INTERPRETED else 1e-5
K, V = (16, 16) if INTERPRETED else (32, 24)
LENGTHS = (0, 17, 1, 33) if INTERPRETED else (0, 1, 15, 0, 16, 17, 33, 70, 0)
NASTY = ("repeated", "unbounded_real", "huge") if INTERPRETED else tuple(sorted(REGIMES))


@pytest.fixture(autouse=True, params=[BACKEND])
def environment(monkeypatch):
    """Its parameter puts the backend into the names of the tests, by which they are picked."""
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)


def inputs(**changes: Any):
    case = Case(seed=5, lengths=LENGTHS, heads=2, value_heads=4).replace(**changes)
    return case.tensors(dtype=torch.float32, head_dim=K, value_dim=V)


def check(call: dict[str, Any], limit: float = LIMIT, kernel: str | None = None) -> None:
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    out, state = kda_jit.chunk_kda(**call)
    launch = kda_jit.last_launch()
    assert launch.backend == BACKEND
    if kernel is not None:
        assert kernel in launch.kernels[0]
    want = exact_chunk_kda(**call)
    assert out.dtype is call["q"].dtype
    ends = call["cu_seqlens"]
    live = out.shape[1] if ends is None else int(ends[-1])
    assert_close("out", out[:, :live], want.out[:, :live], limit, cu_seqlens=ends, chunk=16)
    assert state.dtype is torch.float32
    assert_close("final_state", state, want.final_state, limit)
    for name, x in before.items():
        torch.testing.assert_close(call[name], x, rtol=0, atol=0, equal_nan=True)


# -- against the recurrence ----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("regime", ["random", "unbounded"])
def test_every_form_matches_the_recurrence(form: Form, regime: str) -> None:
    call = form.arguments(inputs(regime=regime, padding=3))
    check(call, kernel=None if form.raw else "forms")
    assert ("forms" in kda_jit.last_launch().kernels[0]) is not form.raw


@pytest.mark.parametrize("regime", NASTY)
@pytest.mark.parametrize(
    "form",
    [Form(beta="negative"), Form(False, False, "given", False), Form(True, False, "doubled")],
    ids=str,
)
def test_nasty_inputs_in_other_forms(form: Form, regime: str) -> None:
    call = form.arguments(inputs(regime=regime))
    # A reflection forgets nothing, nor the roundings of earlier tokens.
    reflects = form.beta in ("negative", "doubled")
    check(call, 1e-4 if reflects else 5e-5 if INTERPRETED else 2e-5)


@torch_only
@pytest.mark.parametrize("form", [FORMS[0], FORMS[4], FORMS[15]], ids=str)
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_dense_batches_and_no_initial_state(form: Form, initial: bool, state_dtype: str) -> None:
    x = inputs(lengths=(37, 37), packed=False, initial=initial, state_dtype=state_dtype, scale=0.3)
    check(form.arguments(x))


@pytest.mark.parametrize(
    "given, form",
    [
        ({"A_log": None}, FORMS[0]),
        ({"A_log": None, "dt_bias": None, "lower_bound": -2.0}, FORMS[3]),
        ({"dt_bias": None, "lower_bound": None}, FORMS[0]),
        ({"dt_bias": None, "lower_bound": None}, FORMS[2]),
        ({"lower_bound": -40.0}, FORMS[0]),
        ({"lower_bound": -6e4}, FORMS[0]),
        ({"lower_bound": -5, "safe_gate": True}, FORMS[1]),
        ({"safe_gate": True, "lower_bound": None, "A_log": None}, FORMS[6]),
    ],
    ids=lambda x: None if isinstance(x, Form) else ",".join(f"{k}={v}" for k, v in x.items()),
)
def test_gates(given: dict[str, Any], form: Form) -> None:
    check(form.arguments(inputs()) | given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_and_queries_are_used_as_they_are_without_the_norm(dtype: torch.dtype) -> None:
    """Long and short ones, with products beyond any fp16; betas make the recurrence a tame one."""
    x = inputs()
    call = Form(False, False, "given").arguments(x)
    length = torch.logspace(-2, 4, x.q.shape[1]).view(1, -1, 1, 1)
    call["k"] = (call["k"] * length).to(dtype)
    call["q"] = (call["q"] * length.flip(1) / 100).to(dtype)
    call["v"] = (call["v"] * length).to(dtype)
    call["beta"] = call["beta"] / length.squeeze(-1).square()
    check(call, 1e-4 if dtype is torch.float32 else 4e-3)


def test_the_judge_agrees_with_a_prefill_that_it_can_be_written_as() -> None:
    """k of length n, beta and v are a unit k with beta n^2 and v / n; and q's length is out's."""
    x = inputs(lengths=(40,))
    n, m = 0.5 + torch.rand(2, 1, 40, 2, 1, dtype=torch.float64)
    beta = 0.3 * torch.rand(1, 40, 4, dtype=torch.float64)
    q, k, v, g, _ = (y.double() for y in x.args)
    q, k = l2norm(q), l2norm(k)
    log_decay = -torch.nn.functional.softplus(g)
    got = activated_kda(q * m, k * n, v, log_decay, beta, initial_state=x.initial_state)
    long = n.repeat_interleave(2, 2)
    want = recurrent_kda(
        q, k, v / long, g, torch.logit(beta * long.squeeze(-1).square()),
        A_log=torch.zeros(4), dt_bias=torch.zeros(4 * K), lower_bound=None,
        initial_state=x.initial_state,
    )  # fmt: skip
    want_out = want.out * m.repeat_interleave(2, 2)
    # The epsilon under the root of a unit vector is 5e-7 of it.
    torch.testing.assert_close(got.out, want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.final_state, want.final_state, rtol=1e-5, atol=1e-5)


@torch_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[1], FORMS[12]], ids=str)
def test_dtypes_of_the_output(form: Form, dtype: torch.dtype) -> None:
    x = Case(2, (50, 3), 2).tensors(dtype=dtype, head_dim=K)
    check(form.arguments(x), 1e-6 if dtype is torch.float64 else 8e-3)


@pytest.mark.parametrize(
    "name, dtype", [("g", torch.bfloat16), ("beta", torch.float16), ("A_log", torch.bfloat16)]
)
def test_narrow_gates_betas_and_parameters_are_widened(name: str, dtype: torch.dtype) -> None:
    call = FORMS[0].arguments(inputs())
    check(call | {name: call[name].to(dtype)})


def test_decays_of_minus_infinity_forget_all_and_nan_stays_in_its_sequence() -> None:
    x = inputs(lengths=(20, 20, 20))
    call = FORMS[6].arguments(x)
    call["g"][0, 5] = -torch.inf
    call["v"][0, 30] = torch.nan
    out, state = kda_jit.chunk_kda(**call)
    want = exact_chunk_kda(**call)
    for rows in (slice(0, 20), slice(40, 60)):
        torch.testing.assert_close(out[:, rows].double(), want.out[:, rows], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[::2].double(), want.final_state[::2], rtol=1e-4, atol=1e-5)
    assert bool(state[1].isnan().any())


# -- states ---------------------------------------------------------------------------------------


def test_no_final_state_unless_asked_for() -> None:
    call = FORMS[3].arguments(inputs(lengths=(5,)))
    assert kda_jit.chunk_kda(**(call | {"output_final_state": False}))[1] is None


@pytest.mark.parametrize("v_first", [True, False])
def test_a_sequence_in_two_calls_is_one_and_its_state_is_not_copied(v_first: bool) -> None:
    x = inputs(lengths=(48,), initial=False)
    call = Form(True, True, "given", v_first).arguments(x)
    first, rest = dict(call), dict(call)
    for name in ("q", "k", "v", "g", "beta"):
        first[name], rest[name] = call[name][:, :32], call[name][:, 32:]
    for part, end in ((first, 32), (rest, 16), (call, 48)):
        part["cu_seqlens"] = torch.tensor([0, end])
    out, state = kda_jit.chunk_kda(**call)
    out_1, state_1 = kda_jit.chunk_kda(**first)
    prepared = prepare_chunk(**(rest | {"initial_state": state_1}))
    assert prepared.problem.initial_state.data_ptr() == state_1.data_ptr()
    out_2, state_2 = prepared.run()
    assert torch.cat([out_1, out_2], 1).equal(out)
    assert state_2.equal(state)
    assert state.shape == ((1, 4, V, K) if v_first else (1, 4, K, V))


def test_without_tokens_states_are_the_initial_ones() -> None:
    x = inputs(lengths=(0, 0))
    out, state = kda_jit.chunk_kda(**FORMS[5].arguments(x))
    assert out.shape == (1, 0, 4, V)
    assert state.equal(x.initial_state.mT if not FORMS[5].v_first else x.initial_state)
    assert kda_jit.last_launch().backend == "none"


# -- what is read in place ------------------------------------------------------------------------


def test_views_that_backends_can_read_are_not_copied() -> None:
    wide = torch.randn(2, 9, 3 * 64)
    columns = wide[..., 64:128].unflatten(-1, (4, 16))
    assert tokens(columns) is columns
    assert tokens(columns[:, :1]).data_ptr() == columns.data_ptr()
    assert tokens(wide[..., 3:7]).data_ptr() == wide[..., 3:7].data_ptr()
    one = torch.randn(1, 9, 4, 16)
    assert tokens(one.expand(2, -1, -1, -1)).data_ptr() == one.data_ptr()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),  # heads before tokens
        lambda x: x[..., ::2],
        lambda x: x[:, :1].expand(-1, 9, -1, -1),  # tokens in one place
    ],
    ids=["heads", "channels", "tokens"],
)
def test_other_views_are_copied(view) -> None:
    x = view(torch.randn(2, 9, 4, 16))
    dense = tokens(x)
    assert dense.is_contiguous()
    assert dense.equal(x)


def test_strided_inputs_give_the_bits_of_dense_ones() -> None:
    call = FORMS[4].arguments(inputs(lengths=(17, 4)))
    want, _ = kda_jit.chunk_kda(**call)
    strided = dict(call)
    for name in ("q", "k", "v", "g"):
        strided[name] = call[name].transpose(1, 2).contiguous().transpose(1, 2)
    strided["beta"] = torch.stack([call["beta"]] * 2, -1)[..., 0]
    strided["cu_seqlens"] = torch.stack([call["cu_seqlens"]] * 2, -1)[:, 0]
    assert kda_jit.chunk_kda(**strided)[0].equal(want)


def test_a_k_major_state_is_transposed_by_one_copy_at_most() -> None:
    state = torch.randn(3, 2, 8, 16)
    assert v_major(state.mT, (3, 2, 16, 8), False).data_ptr() == state.data_ptr()
    assert v_major(state, (3, 2, 16, 8), True) is state
    copied = v_major(state, (3, 2, 8, 16), False)
    assert copied.is_contiguous() and copied.equal(state.mT)


def test_the_range_of_fp16_is_used_only_where_something_bounds_what_lies_there() -> None:
    half = torch.float16
    assert config_of_forms(128, 128, torch.bfloat16, True).stage is half
    wide = config_of_forms(128, 128, torch.bfloat16, False)
    assert (wide.stage, wide.precision) == (torch.float32, "tf32")
    assert config_of_forms(128, 128, torch.float32, False).precision == "tf32x3"


# -- what is refused ------------------------------------------------------------------------------

NEG = {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False}


@torch_only
@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"return_intermediate_states": True}, InputError, "^return_intermediate_states: .*True"),
        ({"cp_context": object()}, InputError, "^cp_context: expected None"),
        ({"chunk_size": 16}, InputError, "^chunk_size: expected 32 or 64.*got 16"),
        (NEG, InputError, "^allow_neg_eigval: .*use_beta_sigmoid_in_kernel"),
        ({"lower_bound": None, "safe_gate": True}, InputError, r"^lower_bound: .*\[-5, 0\)"),
        ({"lower_bound": -6.0, "safe_gate": True}, InputError, "^lower_bound: .*got -6"),
        ({"lower_bound": 0.5}, InputError, "^lower_bound: .*below 0.*0.5"),
        ({"lower_bound": float("nan")}, InputError, "^lower_bound: .*nan"),
        ({"lower_bound": "-5"}, InputTypeError, "^lower_bound: .*'-5'"),
        ({"lower_bound": None, "A_log": None}, InputError, "^A_log: .*lower_bound"),
        ({"A_log": torch.zeros(3)}, InputError, "^A_log: .*got"),
        ({"dt_bias": torch.zeros(4)}, InputError, "^dt_bias: .*got"),
        ({"scale": float("inf")}, InputError, "^scale: "),
        ({"q": None}, InputTypeError, "^q: "),
        ({"q": torch.zeros(3, 4)}, InputError, "^q: "),
        ({"v": torch.zeros(1, 12, 3, V)}, InputError, "^v: .*multiple of H"),
        ({"g": torch.zeros(1, 12, 4)}, InputError, "^g: .*one gate per"),
        ({"beta": None}, InputTypeError, "^beta: "),
        ({"k": torch.zeros(1, 12, 2, K).half()}, InputTypeError, "^k: .*float16"),
        ({"beta": torch.zeros(1, 12, 4, dtype=torch.float64)}, InputTypeError, "^beta: .*float64"),
        ({"g": torch.zeros(1, 12, 4, K, device="meta")}, DeviceError, "^g: .*meta"),
        ({"v": torch.zeros(1, 12, 4, V).requires_grad_()}, GradError, "^v: .*no_grad"),
        ({"A_log": torch.zeros(4).requires_grad_()}, GradError, "^A_log: "),
        (
            {"initial_state": torch.zeros(2, 4, K, V)},
            InputError,
            r"^initial_state: .*V, K\].*first",
        ),
        ({"initial_state": torch.zeros(1, 4, V, K)}, InputError, "^initial_state: "),
        ({"initial_state": torch.zeros(2, 4, V, K).half()}, InputTypeError, "^initial_state: "),
        ({"initial_state": 3.0}, InputTypeError, "^initial_state: "),
        ({"cu_seqlens": torch.tensor([0, 9, 5])}, InputError, "^cu_seqlens: .*9 then 5"),
        ({"cu_seqlens": [0, 5, 12]}, InputTypeError, "^cu_seqlens: "),
        ({"cu_seqlens_cpu": torch.tensor([0, 12])}, InputError, "^cu_seqlens_cpu: .*copy of"),
        ({"use_graph": True, "max_num_seqs": 5}, InputError, "^max_num_seqs: .*2, got 5"),
        ({"transpose_state_layout": True}, InputError, "^transpose_state_layout: .*state_v_first"),
        ({"backend": "cuda"}, NoBackendError, "CUDA device, got cpu"),
        ({"backend": 3}, InputTypeError, "^backend: "),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else None,
)
def test_a_refused_call_names_the_argument_and_launches_nothing(changes, error, words) -> None:
    call = FORMS[0].arguments(inputs(lengths=(5, 7)))
    kda_jit.chunk_kda(**FORMS[0].arguments(inputs(lengths=(0,))))
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error, match=words):
        kda_jit.chunk_kda(**(call | changes))
    assert kda_jit.last_launch().backend == "none"
    for name, x in before.items():
        assert call[name].equal(x)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="head_first"):
        kda_jit.chunk_kda(**FORMS[0].arguments(inputs()), head_first=False)


def test_what_cuda_cannot_do_is_said_in_the_words_of_the_call() -> None:
    x = inputs(lengths=(4,))
    call = Form(False, False, "given").arguments(x)
    with pytest.raises(NoBackendError) as caught:
        kda_jit.chunk_kda(**call, backend="flashkda")
    for word in (
        "'cuda'", "use_qk_l2norm_in_kernel=False", "use_gate_in_kernel=False",
        "use_beta_sigmoid_in_kernel=False", "CUDA device", "bfloat16", "K = V = 128",
    ):  # fmt: skip
        assert word in str(caught.value)
    assert "lower_bound" not in str(caught.value)
    call = Form(beta="negative").arguments(x) | {"lower_bound": -9.0}
    with pytest.raises(NoBackendError, match=r"lower_bound in \[-5, 0\), got -9.*allow_neg_eigval"):
        kda_jit.chunk_kda(**call, backend="cuda")


def test_the_environment_variable_counts(monkeypatch) -> None:
    call = Form(False).arguments(inputs(lengths=(4,)))
    monkeypatch.setenv("KDA_JIT_BACKEND", "cuda")
    with pytest.raises(NoBackendError, match=r"^KDA_JIT_BACKEND=cuda"):
        kda_jit.chunk_kda(**call)
    monkeypatch.setenv("KDA_JIT_BACKEND", "torch")
    kda_jit.chunk_kda(**call)
    assert kda_jit.last_launch().backend == "torch"


def test_the_old_name_of_the_layout() -> None:
    call = FORMS[0].arguments(inputs(lengths=(4,)))
    want = kda_jit.chunk_kda(**call)[1]
    del call["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        got = kda_jit.chunk_kda(**call, transpose_state_layout=True)[1]
    assert got.equal(want)


def test_what_only_concerns_how_fla_works_changes_nothing() -> None:
    call = FORMS[0].arguments(inputs())
    want = kda_jit.chunk_kda(**call)[0]
    more = {
        "disable_recompute": True, "chunk_size": 32, "use_graph": True,
        "max_num_seqs": len(LENGTHS), "cu_seqlens_cpu": call["cu_seqlens"], "safe_gate": True,
    }  # fmt: skip
    assert kda_jit.chunk_kda(**call, **more)[0].equal(want)


@torch_only
@pytest.mark.parametrize("form", [FORMS[0], FORMS[5]], ids=str)
def test_a_compiled_caller_gets_the_same_and_goes_on(form: Form) -> None:
    @torch.compile(backend="eager")
    def layer(call):
        q = call["q"] * 1.0
        out, state = kda_jit.chunk_kda(**(call | {"q": q}))
        return out * 2.0, state

    call = form.arguments(inputs(lengths=(20, 5)))
    for _ in range(2):
        out, state = layer(call)
        want, want_state = kda_jit.chunk_kda(**call)
        assert out.equal(want * 2.0)
        assert state.equal(want_state)
