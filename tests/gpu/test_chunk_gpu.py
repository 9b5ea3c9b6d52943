"""`kda_jit.chunk_kda`, and fla's through its dispatch, on a GPU: who runs, and what comes out.

fla-core is used where it can be imported; the judge is the float64 recurrence all the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit import settings
from kda_jit.errors import NoBackendError
from kda_jit.integrations import fla as ours
from kda_jit.testing.cases import REGIMES, Case
from kda_jit.testing.chunk import FORMS, Form, exact_chunk_kda
from kda_jit.testing.numeric import assert_close
from kda_jit.testing.runner import why_not

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

MIXED = (0, 1, 15, 0, 16, 17, 31, 33, 64, 100, 257, 0)
#: Relative RMS errors of the worst block. 16-bit outputs are rounded once, to 2^-9 (bf16).
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 8e-3}
GATES = ("random", "slow", "saturated_both", "repeated", "near_keys", "unbounded_real")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in (settings.BACKEND, settings.ARCH, settings.SCHEDULE):
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.delenv(ours.ENV_VAR, raising=False)


def expected_backend(form: Form, call: dict[str, Any]) -> str:
    """CUDA for a bf16 prefill of 128 channels with a bounded gate, Triton for the rest."""
    q, v = call["q"], call["v"]
    fits = (
        form.raw
        and all(call[name].dtype is torch.bfloat16 for name in ("q", "g", "beta"))
        and q.shape[-1] == v.shape[-1] == 128
        and call.get("lower_bound") is not None
    )
    return "cuda" if fits and why_not("cuda", torch.device("cuda")) is None else "triton"


def check(function: Any, form: Form, call: dict[str, Any], limit: float | None = None) -> None:
    out, state = function(**call)
    launch = kda_jit.last_launch()
    assert launch is not None
    assert launch.backend == expected_backend(form, call), launch
    if launch.backend == "triton":
        assert ("forms" in launch.kernels[0]) is not form.raw
    want = exact_chunk_kda(**call)
    dtype = call["q"].dtype
    assert out.dtype is dtype
    ends = call["cu_seqlens"]
    live = out.shape[1] if ends is None else int(ends[-1])
    assert out[:, :live].isfinite().all()
    limit = LIMITS[dtype] if limit is None else limit
    assert_close("out", out[:, :live], want.out[:, :live], limit, cu_seqlens=ends)
    assert_close("final_state", state, want.final_state, limit)


# -- our own function -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form(form: Form, dtype: torch.dtype) -> None:
    x = Case(1, MIXED, 2, 4, padding=5).tensors("cuda", dtype)
    check(kda_jit.chunk_kda, form, form.arguments(x))


@pytest.mark.parametrize("regime", sorted(REGIMES))
@pytest.mark.parametrize(
    "form", [FORMS[0], Form(beta="negative"), Form(False, False, "given", False)], ids=str
)
def test_every_regime(form: Form, regime: str) -> None:
    """In fp32, where a wrong term can't hide behind a rounding."""
    x = Case(2, (200, 77), 2, regime=regime).tensors("cuda", torch.float32)
    reflects = form.beta == "negative"
    check(kda_jit.chunk_kda, form, form.arguments(x), 1e-3 if reflects else 2e-4)


@pytest.mark.parametrize("K, V", [(60, 60), (64, 64), (100, 128), (16, 256), (256, 64)])
@pytest.mark.parametrize("form", [FORMS[0], FORMS[15]], ids=str)
def test_head_sizes(form: Form, K: int, V: int) -> None:
    x = Case(3, (63, 500), 3).tensors("cuda", torch.float16, K, V)
    check(kda_jit.chunk_kda, form, form.arguments(x))


@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("regime", GATES)
def test_a_prefill_in_both_layouts(regime: str, v_first: bool) -> None:
    x = Case(4, (130, 66), 4, regime=regime).tensors("cuda")
    form = Form(v_first=v_first)
    call = form.arguments(x)
    check(kda_jit.chunk_kda, form, call, 2e-2)


def test_a_gate_without_parameters() -> None:
    x = Case(5, (300,), 4).tensors("cuda")
    call = Form().arguments(x) | {"A_log": None, "dt_bias": None}
    check(kda_jit.chunk_kda, Form(), call)


def test_long_keys_do_not_meet_the_range_of_fp16() -> None:
    x = Case(6, (90, 40), 2).tensors("cuda", torch.float32)
    form = Form(False, False, "given")
    call = form.arguments(x)
    length = torch.logspace(-2, 4, 130, device="cuda").view(1, -1, 1, 1)
    for name, factor in (("q", length.flip(1) / 100), ("k", length), ("v", length)):
        call[name] = (call[name] * factor).bfloat16()
    call["beta"] = call["beta"] / length.squeeze(-1).square()
    check(kda_jit.chunk_kda, form, call, 2e-2)


def test_cuda_by_name_says_why_not() -> None:
    x = Case(7, (20,), 1).tensors("cuda")
    with pytest.raises(NoBackendError, match="allow_neg_eigval"):
        kda_jit.chunk_kda(**Form(beta="negative").arguments(x), backend="cuda")


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[13]], ids=str)
def test_a_warm_call_waits_for_nothing(form: Form) -> None:
    call = form.arguments(Case(8, (70, 5), 2).tensors("cuda"))
    kda_jit.chunk_kda(**call)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda_jit.chunk_kda(**call)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], FORMS[13], FORMS[16]], ids=str)
def test_a_captured_call_follows_other_lengths(form: Form) -> None:
    """use_graph: padded with sequences without tokens, replayed with other offsets and values."""
    x = Case(9, (40, 24, 0), 2).tensors("cuda")
    call = form.arguments(x) | {"use_graph": True, "max_num_seqs": 3}
    kda_jit.chunk_kda(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, state = kda_jit.chunk_kda(**call)
    for ends in ((0, 40, 64, 64), (0, 1, 33, 50), (0, 64, 64, 64)):
        call["cu_seqlens"].copy_(torch.tensor(ends))
        call["v"].mul_(-0.5)
        graph.replay()
        want, want_state = kda_jit.chunk_kda(**call)
        assert out[:, : ends[-1]].equal(want[:, : ends[-1]])
        assert state.equal(want_state)


def test_strided_columns_are_read_in_place() -> None:
    T, H, D = 96, 2, 128
    wide = torch.randn(1, T, 4 * H * D + 8, device="cuda", dtype=torch.bfloat16)
    q, k, v, g = (wide[..., i * H * D : (i + 1) * H * D].unflatten(-1, (H, D)) for i in range(4))
    call: dict[str, Any] = Form().arguments(Case(10, (T,), H).tensors("cuda"))
    call |= {"q": q, "k": k, "v": v, "g": g, "beta": wide[..., -8 : -8 + H]}
    check(kda_jit.chunk_kda, Form(), call)
    dense = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in call.items()}
    assert kda_jit.chunk_kda(**dense)[0].equal(kda_jit.chunk_kda(**call)[0])


# -- fla's function, through its dispatch ---------------------------------------------------------


@pytest.fixture
def theirs() -> Iterator[Any]:
    """fla.ops.kda.chunk_kda with ours registered."""
    try:
        function = importlib.import_module("fla.ops.kda").chunk_kda
        ours.register()
    except (ImportError, kda_jit.KdaError) as error:
        pytest.skip(f"no fla-core 0.6 to dispatch from: {error}")
    yield function
    ours.unregister()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_their_dispatch_runs_ours(theirs: Any, form: Form) -> None:
    x = Case(11, (63, 200, 17), 2, 4).tensors("cuda")
    with torch.inference_mode():
        check(theirs, form, form.arguments(x))


@pytest.mark.parametrize("regime", GATES)
def test_their_dispatch_in_every_gate(theirs: Any, regime: str) -> None:
    x = Case(12, (100, 100), 2, regime=regime, packed=False).tensors("cuda", torch.float16, 64)
    form = Form(beta="given", v_first=False)
    check(theirs, form, form.arguments(x), 2e-2)


def test_gradients_are_left_to_fla(theirs: Any) -> None:
    call = Form(v_first=False).arguments(Case(13, (64,), 2).tensors("cuda"))
    call["cu_seqlens"] = call["cu_seqlens"].long()
    call["v"] = call["v"].clone().requires_grad_()
    out, _ = theirs(**call)
    launch = kda_jit.last_launch()
    assert launch is not None and launch.backend == "fla"
    assert out.requires_grad  # that fla can go back is its own affair, and minutes of autotuning


def test_only_cuda_if_asked_for(theirs: Any) -> None:
    """And what is left to fla comes out alike, within the rounding of either."""
    ours.register(backend="cuda")
    form = Form(beta="given", v_first=False)
    call = form.arguments(Case(14, (130,), 2).tensors("cuda"))
    call["cu_seqlens"] = call["cu_seqlens"].long()
    out, _ = theirs(**call)
    launch = kda_jit.last_launch()
    assert launch is not None and launch.backend == "fla"
    want = exact_chunk_kda(**call)
    assert_close("out", out, want.out, 2e-2, cu_seqlens=call["cu_seqlens"])
