"""CuPy's arrays on a GPU: no copy, on CuPy's stream, the bits of a call with tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kda_jit
from kda_jit import api, arrays
from kda_jit.errors import InputError
from kda_jit.testing import Case, Inputs

cupy = pytest.importorskip("cupy", reason="needs CuPy")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ONE_GPU = torch.cuda.device_count() < 2
TOKENS = ("q", "k", "v", "g", "beta")
NAN = float("nan")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def x(request: pytest.FixtureRequest) -> Inputs:
    """bf16 goes to "cuda" where that can run, the others to "triton"."""
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="CuPy's bfloat16 is in ml_dtypes")
    else:
        pytest.importorskip("triton")
    case = Case(seed=400, lengths=(100, 0, 33), heads=2, value_heads=4)
    return case.tensors("cuda", getattr(torch, request.param))


def array(x: Tensor) -> Any:
    """A CuPy array over the tensor's memory."""
    if x.dtype is torch.bfloat16:
        import ml_dtypes

        return cupy.from_dlpack(x.view(torch.uint16)).view(ml_dtypes.bfloat16)
    if x.dtype is torch.bool:
        return cupy.from_dlpack(x.view(torch.uint8)).view(cupy.bool_)
    return cupy.from_dlpack(x)


def given(x: Inputs) -> dict[str, Any]:
    tensors = dict(zip(TOKENS, x.args, strict=True)) | x.kwargs
    return {name: array(y) if isinstance(y, Tensor) else y for name, y in tensors.items()}


def tensor(x: Any) -> Tensor:
    if str(x.dtype) == "bfloat16":
        return torch.from_dlpack(x.view(cupy.uint16)).view(torch.bfloat16)
    return torch.from_dlpack(x)


def same(got: Any, want: Tensor) -> bool:
    torch.cuda.synchronize()
    return tensor(got).dtype is want.dtype and torch.equal(tensor(got), want)


def external(stream: torch.cuda.Stream) -> Any:
    """The same stream for CuPy."""
    return cupy.cuda.ExternalStream(stream.cuda_stream)


def busy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1.7e6))


# -- kind, bits, memory --------------------------------------------------------------------------


def test_cupy_in_cupy_out_with_the_bits_of_a_call_with_tensors(
    x: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    ran = kda_jit.last_launch()
    problems = []
    make = api.make_problem
    monkeypatch.setattr(
        api, "make_problem", lambda *a, **k: problems.append(make(*a, **k)) or problems[-1]
    )
    arguments = given(x)
    out, state = kda_jit.prefill(**arguments)
    assert kda_jit.last_launch() == ran
    assert ran is not None and ran.backend in ("cuda", "triton")
    assert type(out) is type(state) is cupy.ndarray
    assert out.dtype == arguments["q"].dtype
    assert same(out, want)
    assert same(state, want_state)
    (p,) = problems
    for name in (*TOKENS, "A_log", "dt_bias", "cu_seqlens", "initial_state"):
        assert getattr(p, name).data_ptr() == arguments[name].data.ptr, name
    assert out.data.ptr == p.out.data_ptr()
    assert state.data.ptr == p.final_state.data_ptr()


def test_arrays_that_cupy_allocated_itself(x: Inputs) -> None:
    arguments = {
        name: y.copy() if isinstance(y, cupy.ndarray) else y for name, y in given(x).items()
    }
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    out, state = kda_jit.prefill(**arguments)
    assert pool.used_bytes() == before, "results are torch's memory, not another pool's"
    assert same(out, want)
    assert same(state, want_state)


def test_results_keep_their_memory(x: Inputs) -> None:
    want, _ = kda_jit.prefill(*x.args, **x.kwargs)
    out, state = kda_jit.prefill(**given(x))
    del state
    for _ in range(20):
        torch.full_like(want, NAN)
    assert same(out, want)


def test_buffers_and_pools_are_written_in_place(x: Inputs) -> None:
    slots = torch.tensor([4, 0, 2], device="cuda")
    fresh = torch.tensor([True, False, False], device="cuda")
    pools = [torch.randn(6, *x.initial_state.shape[1:], device="cuda") for _ in range(2)]
    pools[1].copy_(pools[0])
    more = x.kwargs | {"initial_state": pools[0]}
    want, _ = kda_jit.prefill(*x.args, **more, state_indices=slots, has_initial_state=fresh)
    out, pool = array(torch.zeros_like(want)), array(pools[1])
    got = kda_jit.prefill(
        **(given(x) | {"initial_state": pool}),
        state_indices=array(slots),
        has_initial_state=array(fresh),
        out=out,
    )
    assert got[0] is out and got[1] is pool
    assert same(out, want)
    assert torch.equal(pools[1], pools[0])


def test_recurrent_takes_cupy_too() -> None:
    pytest.importorskip("triton")
    x = Case(seed=401, lengths=(1, 1, 1), heads=2).tensors("cuda", torch.float32)
    pools = [torch.randn(5, *x.initial_state.shape[1:], device="cuda") for _ in range(2)]
    pools[1].copy_(pools[0])
    arguments = given(x)
    del arguments["initial_state"]
    slots = torch.tensor([4, -1, 0], device="cuda")
    kwargs = {name: y for name, y in x.kwargs.items() if name != "initial_state"}
    want = kda_jit.recurrent(*x.args, **kwargs, state_pool=pools[0], state_indices=slots)
    pool = array(pools[1])
    out = kda_jit.recurrent(**arguments, state_pool=pool, state_indices=array(slots))
    assert type(out) is cupy.ndarray
    assert same(out, want)
    assert torch.equal(pools[1], pools[0])

    has = torch.tensor([False, True, True], device="cuda")
    kwargs |= {"state_indices": slots, "has_initial_state": has}
    want = kda_jit.recurrent(*x.args, **kwargs, state_pool=pools[0])
    arguments |= {"state_indices": array(slots), "has_initial_state": array(has)}
    assert same(kda_jit.recurrent(**arguments, state_pool=pool), want)
    assert torch.equal(pools[1], pools[0])


def test_columns_of_a_wider_array_are_read_in_place(x: Inputs) -> None:
    arguments = given(x)
    H = x.q.shape[2]
    wide = array(torch.cat([x.q, x.k], 2))
    want, _ = kda_jit.prefill(*x.args, **x.kwargs)
    out, _ = kda_jit.prefill(**(arguments | {"q": wide[:, :, :H], "k": wide[:, :, H:]}))
    assert same(out, want)


def test_a_negative_stride_is_an_error_and_not_the_end_of_the_process(x: Inputs) -> None:
    arguments = given(x)
    with pytest.raises(InputError, match=r"^g: expected strides of 0 or more"):
        kda_jit.prefill(**(arguments | {"g": arguments["g"][..., ::-1]}))


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False], ids=["new results", "the caller's buffers"])
def test_a_call_runs_on_cupys_stream_and_on_no_other(x: Inputs, fresh: bool) -> None:
    """Inputs arrive late on CuPy's stream, and results are consumed there without waiting."""
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    arguments = given(x)
    late = arguments | {"q": cupy.zeros_like(arguments["q"])}
    buffers = {} if fresh else {
        "out": cupy.zeros_like(array(want)), "final_state": cupy.zeros_like(array(want_state)),
    }  # fmt: skip
    side = torch.cuda.Stream()
    with external(side):  # whatever a first call on a stream allocates, and CuPy compiles
        late["q"][...] = arguments["q"]
        _ = [y.copy() for y in kda_jit.prefill(**late, **buffers)]
        late["q"][...] = 0
    torch.cuda.synchronize()
    with external(side):
        with torch.cuda.stream(side):
            busy(100)
        late["q"][...] = arguments["q"]
        out, state = kda_jit.prefill(**late, **buffers)
        copies = out.copy(), state.copy()
        waiting = not side.query()
    side.synchronize()
    assert waiting, "the call waited for the GPU, or ran elsewhere"
    assert same(copies[0], want)
    assert same(copies[1], want_state)


def test_torch_tensors_among_the_arguments_come_from_torchs_stream(x: Inputs) -> None:
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    arguments = given(x)
    g, final = torch.zeros_like(x.g), torch.full_like(want_state, NAN)
    torch.cuda.synchronize()
    mine, theirs = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(mine), external(theirs):
        busy(100)
        g.copy_(x.g)  # late, on torch's stream
        out, returned = kda_jit.prefill(**(arguments | {"g": g}), final_state=final)
        copy = final.clone()  # on torch's stream again
    assert returned is final
    assert same(out, want)
    assert torch.equal(copy, want_state)


def test_on_torchs_own_stream_a_call_can_be_captured_and_replayed(x: Inputs) -> None:
    arguments = given(x)
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    buffers = {"out": torch.zeros_like(want), "final_state": torch.zeros_like(want_state)}
    wrapped = {name: array(y) for name, y in buffers.items()}
    q = arguments["q"].copy()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), external(torch.cuda.current_stream()):
        kda_jit.prefill(**(arguments | {"q": q} | wrapped))
    q[...] = 0
    graph.replay()
    assert not torch.equal(buffers["out"], want)
    q[...] = arguments["q"]
    graph.replay()
    assert same(wrapped["out"], want)
    assert torch.equal(buffers["final_state"], want_state)


class Unknown:
    """An array of a library whose stream nobody can ask for."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.streams, self.dtype, self.shape = x, [], x.dtype, x.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.x.get_device())

    def __dlpack__(self, *, stream: int | None = None, **more: Any) -> Any:
        self.streams.append(stream)
        return self.x.__dlpack__(stream=stream, **more)


def test_memory_of_an_unknown_library_is_held_until_it_was_read(
    x: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays._held.clear()
    monkeypatch.setattr(Unknown, "__array_namespace__", lambda self: torch, raising=False)
    want, _ = kda_jit.prefill(*x.args, **x.kwargs)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy(100)
        q = Unknown(x.q)
        out, _ = kda_jit.prefill(q, *x.args[1:], **x.kwargs)
    assert q.streams == [side.cuda_stream]
    (held,) = [views for _, views in arrays._held if views[0].data_ptr() == x.q.data_ptr()]
    assert len(held) == 1
    side.synchronize()
    assert torch.equal(out, want)
    kda_jit.prefill(Unknown(x.q), *x.args[1:], **x.kwargs)
    assert len(arrays._held) == 1, "what is done is let go at the next call"


@pytest.mark.skipif(ONE_GPU, reason="needs two CUDA devices")
def test_arrays_of_another_device_stay_there(x: Inputs) -> None:
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    with cupy.cuda.Device(1):
        arguments = {
            name: cupy.asarray(cupy.asnumpy(y)) if isinstance(y, cupy.ndarray) else y
            for name, y in given(x).items()
        }
    torch_device, cupy_device = torch.cuda.current_device(), cupy.cuda.Device().id
    out, state = kda_jit.prefill(**arguments)
    assert (torch.cuda.current_device(), cupy.cuda.Device().id) == (torch_device, cupy_device)
    assert out.device.id == state.device.id == 1
    assert torch.equal(tensor(out).to("cuda:0"), want)
    assert torch.equal(tensor(state).to("cuda:0"), want_state)


def test_jax_in_jax_out_with_the_bits_of_a_call_with_tensors(
    x: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX computes on streams of its own and hands out what is still under way."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="needs jax")
    if jax.default_backend() != "gpu":
        pytest.skip("needs jax with CUDA")
    want, want_state = kda_jit.prefill(*x.args, **x.kwargs)
    ran = kda_jit.last_launch()
    tensors = dict(zip(TOKENS, x.args, strict=True)) | x.kwargs
    arguments = {
        name: jax.numpy.copy(jax.numpy.from_dlpack(y)) if isinstance(y, Tensor) else y
        for name, y in tensors.items()
    }
    late = jax.numpy.ones((4096, 4096))
    for _ in range(50):
        late = late @ late * 0
    arguments["q"] = arguments["q"] + late[0, 0].astype(arguments["q"].dtype)
    out, state = kda_jit.prefill(**arguments)
    assert kda_jit.last_launch() == ran
    assert isinstance(out, jax.Array) and isinstance(state, jax.Array)
    assert out.devices() == state.devices() == set(jax.devices("gpu")[:1])
    assert torch.equal(torch.from_dlpack(out), want)
    assert torch.equal(torch.from_dlpack(state), want_state)
    with pytest.raises(InputError, match=r"^out: .*JAX's arrays cannot be written"):
        kda_jit.prefill(**arguments, out=out)
