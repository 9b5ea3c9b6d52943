"""What the torch backend promises beyond the laws: any size, dtype and gate, and exact bits."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit.backends import torch as torch_backend
from kda_jit.backends.base import Query, last_launch
from kda_jit.backends.torch import CHUNK, GROUPS, TorchBackend
from kda_jit.contract import CHECKPOINT_GRANULE, make_problem
from kda_jit.errors import CaptureError, InputError
from kda_jit.testing import Case, Inputs, assert_close, relative_rms, worst_block_error


def run(x: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
    problem = make_problem(*x.args, **(x.kwargs | buffers))
    TorchBackend().run(problem, None)
    return problem.out, problem.final_state


# Long enough to reach the second of the largest groups, with a ragged end.
LONG = (sum(GROUPS) + GROUPS[-1] + 2) * CHUNK + 5


@pytest.mark.parametrize("K, V", [(128, 128), (64, 128), (16, 32), (96, 96), (7, 5), (256, 1)])
def test_any_head_size(K: int, V: int) -> None:
    case = Case(seed=1, lengths=(LONG, 0, 19), heads=2, value_heads=4)
    x = case.tensors(dtype=torch.float32, head_dim=K, value_dim=V)
    out, state = run(x)
    want = x.reference()
    assert_close("out", out, want.out, 5e-6, cu_seqlens=x.cu_seqlens, case=case)
    assert_close("final_state", state, want.final_state, 5e-6, case=case)


@pytest.mark.parametrize(
    "dtype, allowed",
    [
        (torch.float64, 1e-13),
        (torch.float32, 2e-6),
        # What is left is the rounding of the output.
        (torch.float16, 5e-4),
        (torch.bfloat16, 3e-3),
    ],
)
def test_any_dtype_at_its_own_precision(dtype: torch.dtype, allowed: float) -> None:
    x = Case(seed=2, lengths=(LONG,), heads=2).tensors(dtype=dtype, head_dim=64)
    out, state = run(x)
    want = x.reference()
    assert out.dtype == dtype
    assert worst_block_error(out, want.out, x.cu_seqlens).error < allowed
    assert state.dtype == torch.float32
    assert relative_rms(state, want.final_state) < 2e-6


def test_gate_and_beta_logits_may_be_float32_beside_bf16() -> None:
    x = Case(seed=3, lengths=(40,), heads=2).tensors(head_dim=32)
    fine = Case(seed=3, lengths=(40,), heads=2).tensors(dtype=torch.float32, head_dim=32)
    x = x.replace(g=fine.g, beta=fine.beta)
    out, state = run(x)
    want = x.reference()
    assert_close("out", out, want.out, 3e-3)
    assert_close("final_state", state, want.final_state, 2e-6)


@pytest.mark.parametrize("rate", [1e-3, 1.0, 200.0, math.exp(88.5), math.exp(300.0)])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_gate_overflows(rate: float, lower_bound: float | None) -> None:
    """Both ends of the gate inside one chunk, and exactly the middle of it."""
    x = Case(seed=4, lengths=(50,), heads=2).tensors(dtype=torch.float32, head_dim=32)
    ends = torch.tensor([-300.0, -10.0, 0.0, 10.0, 300.0, 3e37])
    g = ends[torch.randint(6, x.g.shape, generator=torch.Generator().manual_seed(0))]
    x = x.replace(g=g, lower_bound=lower_bound, A_log=torch.full_like(x.A_log, math.log(rate)))
    x.dt_bias.zero_()
    out, state = run(x)
    assert out.isfinite().all()
    assert state.isfinite().all()
    if rate < 1e30:  # beyond, float32 and float64 round different logits to saturation
        want = x.reference()
        assert_close("out", out, want.out, 5e-6)
        assert_close("final_state", state, want.final_state, 5e-6)


def test_a_violent_gate_costs_later_tokens_no_digits() -> None:
    """After a log decay of -2000, decays of -0.001 must still be exact: no difference of sums."""
    x = Case(seed=5, lengths=(16,), initial=False).tensors(dtype=torch.float32, head_dim=32)
    g = torch.full_like(x.g, -7.0)
    g[:, 3] = 2000.0
    x = x.replace(g=g, lower_bound=None, A_log=torch.zeros(1))
    x.dt_bias.zero_()
    out, state = run(x)
    want = x.reference()
    assert worst_block_error(out, want.out, chunk=1).error < 1e-6
    assert_close("final_state", state, want.final_state, 1e-6)


def test_finite_inputs_of_any_size_are_normalised() -> None:
    """|q|^2 is beyond float32 long before q is."""
    x = Case(seed=6, lengths=(20,), heads=2).tensors(head_dim=32)
    x = x.replace(q=(x.q.double() * 1e37).bfloat16(), k=(x.k.double() * 1e-30).bfloat16())
    out, state = run(x)
    want = x.reference()
    assert_close("out", out, want.out, 3e-3)
    assert_close("final_state", state, want.final_state, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_checkpoint_is_the_cut_sequence_bit_for_bit(dtype: torch.dtype) -> None:
    x = Case(seed=7, lengths=(LONG,), heads=3).tensors(dtype=dtype)
    for offset in range(CHECKPOINT_GRANULE, LONG + 1, CHECKPOINT_GRANULE):
        checkpoint = torch.full((1, 3, 128, 128), torch.nan)
        run(x, checkpoint_state=checkpoint, checkpoint_offsets=torch.tensor([offset]))
        cut_out, cut_state = run(x.pack([(0, 0, offset)]))
        assert torch.equal(checkpoint, cut_state), f"offset {offset}"
    out, _ = run(x)
    assert torch.equal(cut_out, out[:, :offset])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neighbours_change_no_bit(threads: int) -> None:
    """Also where the thread count divides nothing."""
    x = Case(seed=8, lengths=(LONG, 1, 33, 0, 70), heads=3).tensors(dtype=torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, state = run(x)
        for n in range(x.N):
            alone_out, alone_state = run(x.sequence(n))
            assert torch.equal(alone_out, out[:, x.bounds[n] : x.bounds[n + 1]])
            assert torch.equal(alone_state, state[n : n + 1])
    finally:
        torch.set_num_threads(before)


def test_autocast_is_ignored() -> None:
    x = Case(seed=9, lengths=(20,)).tensors(dtype=torch.float32, head_dim=32)
    want, _ = run(x)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = run(x)
    assert torch.equal(got, want)


def test_out_and_states_may_be_strided_and_updated_in_place() -> None:
    x = Case(seed=10, lengths=(9, 30), heads=2).tensors(dtype=torch.float32, head_dim=16)
    want_out, want_state = run(x)
    wide = torch.full((1, 39, 2 * 16 + 8), 7.0)
    out = wide[..., :32].unflatten(-1, (2, 16))
    slots = torch.full((2, 2 * 16 * 16 + 8), 7.0)
    state = slots[:, :512].view(2, 2, 16, 16)
    assert x.initial_state is not None
    state.copy_(x.initial_state)
    run(x.replace(initial_state=state), out=out, final_state=state)
    assert torch.equal(out, want_out)
    assert torch.equal(state, want_state)
    assert bool((wide[..., 32:] == 7.0).all())
    assert bool((slots[:, 512:] == 7.0).all())


def test_it_rejects_nothing_and_says_that_it_ran() -> None:
    query = Query(
        K=7,
        V=5,
        dtype=torch.float64,
        lower_bound=None,
        device=torch.device("cpu"),
        capability=None,
    )
    assert TorchBackend().rejects(query) == []
    run(Case(lengths=(1,)).tensors(head_dim=8))
    launch = last_launch()
    assert launch is not None
    assert launch.backend == "torch"
    assert launch.kernels


@pytest.mark.parametrize(
    "name", ["cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets"]
)
def test_host_reads_during_a_capture_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    names = ("cu_seqlens", "state_indices", "has_initial_state", "checkpoint_offsets")
    problem: Any = SimpleNamespace(device=torch.device("cuda"), **dict.fromkeys(names))
    torch_backend._refuse_capture(problem)
    setattr(problem, name, torch.zeros(1))
    with pytest.raises(CaptureError, match=name):
        torch_backend._refuse_capture(problem)


def test_four_thousand_tokens_take_seconds_at_most() -> None:
    x = Case(seed=11, lengths=(1024,) * 4, heads=4).tensors()
    begin = time.perf_counter()
    run(x)
    assert time.perf_counter() - begin < 6.0


@pytest.mark.parametrize("name", ["out", "final_state"])
def test_tensor_of_inference_mode_is_refused_before_anything_is_written(name: str) -> None:
    x = Case(seed=9, lengths=(5,), heads=1).tensors(head_dim=16)
    buffers = {"out": torch.full_like(x.v, 7.0), "final_state": torch.full((1, 1, 16, 16), 7.0)}
    with torch.inference_mode():
        buffers[name] = buffers[name].clone()
    arguments = dict(zip(("q", "k", "v", "g", "beta"), x.args, strict=True)) | x.kwargs | buffers
    with pytest.raises(InputError, match=f"^{name}: .*inference_mode"):
        kda_jit.prefill(**arguments, backend="torch")
    assert all((buffer == 7.0).all() for buffer in buffers.values())
    with torch.inference_mode():
        kda_jit.prefill(**arguments, backend="torch")
