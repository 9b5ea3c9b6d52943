"""Arrays of other libraries on the CPU: one memory in and out, the same kind, the same bits."""

import itertools
import re
import sys
import types
from collections import deque
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

import kda_jit
from kda_jit import arrays, ops
from kda_jit.errors import DeviceError, InputError, InputTypeError
from kda_jit.reference import recurrent_kda

H, HV, D = 2, 4, 16
T = 22
TOKENS = ("q", "k", "v", "g", "beta")


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)


def tensors(seed=0, dtype=torch.float32):
    """Arguments of a packed call of two sequences."""
    torch.manual_seed(seed)
    return {
        "q": torch.randn(1, T, H, D, dtype=dtype),
        "k": torch.randn(1, T, H, D, dtype=dtype),
        "v": torch.randn(1, T, HV, D, dtype=dtype),
        "g": torch.randn(1, T, HV, D, dtype=dtype),
        "beta": torch.randn(1, T, HV, dtype=dtype),
        "A_log": torch.randn(HV) * 0.1,
        "dt_bias": torch.randn(HV, D) * 0.1,
        "cu_seqlens": torch.tensor([0, 5, T], dtype=torch.int32),
    }


def numpys(**more):
    return {name: x.numpy() for name, x in tensors().items()} | more


def zeros(*shape):
    return np.zeros(shape, np.float32)


def same(got, want):
    assert torch.from_numpy(got).equal(want)


class Foreign:
    """An array of a library that nobody knows: a NumPy array behind the protocol alone."""

    def __init__(self, data, **export):
        self.data, self.export, self.asked = np.asarray(data), export, []
        self.dtype, self.shape = self.data.dtype, self.data.shape

    def __dlpack_device__(self):
        return self.export.get("device", (1, 0))

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append((stream, max_version, copy))
        return self.data.__dlpack__(max_version=max_version)

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=lambda x: Foreign(np.from_dlpack(x)))


class Old(Foreign):
    """From before DLPack 1.0: no max_version, capsules without flags."""

    def __dlpack__(self, stream=None):
        return self.data.__dlpack__()


# -- the same kind, memory and bits ----------------------------------------------------------------


def test_numpy_in_numpy_out_with_the_bits_of_a_call_with_tensors():
    out, state = kda_jit.prefill(**numpys())
    want, want_state = kda_jit.prefill(**tensors())
    assert type(out) is type(state) is np.ndarray
    assert out.flags.writeable and state.flags.writeable
    assert out.dtype == state.dtype == np.float32
    same(out, want)
    same(state, want_state)
    assert kda_jit.last_launch().backend == "torch"
    exact = recurrent_kda(**tensors())
    np.testing.assert_allclose(out, exact.out.numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state, exact.final_state.numpy(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def problems(monkeypatch):
    """What reaches the contract."""
    from kda_jit import api

    found = []
    make = api.make_problem
    monkeypatch.setattr(
        api, "make_problem", lambda *a, **k: found.append(make(*a, **k)) or found[-1]
    )
    return found


def address(x):
    return x.__array_interface__["data"][0]


def test_nothing_is_copied_on_the_way_in_or_out(problems):
    given = numpys(out=zeros(1, T, HV, D), initial_state=zeros(2, HV, D, D))
    out, state = kda_jit.prefill(**given)
    (p,) = problems
    for name in (*TOKENS, "A_log", "dt_bias", "cu_seqlens", "out", "initial_state"):
        assert getattr(p, name).data_ptr() == address(given[name]), name
    assert out is given["out"]
    assert address(state) == p.final_state.data_ptr()
    fresh, _ = kda_jit.prefill(**numpys())
    assert address(fresh) == problems[-1].out.data_ptr()


def test_results_outlive_everything_else(problems):
    out, _ = kda_jit.prefill(**numpys())
    problems.clear()
    want, _ = kda_jit.prefill(**tensors())
    for _ in range(20):
        np.full(out.shape, 7, np.float32)
    same(out, want)


def test_buffers_of_the_caller_are_written_and_come_back_themselves():
    out, final = zeros(1, T, HV, D), zeros(2, HV, D, D)
    got = kda_jit.prefill(**numpys(out=out, final_state=final))
    assert got[0] is out and got[1] is final
    want, want_state = kda_jit.prefill(**tensors())
    same(out, want)
    same(final, want_state)


def test_a_state_in_place_and_a_pool_in_place():
    start = torch.randn(4, HV, D, D)
    state = start[:2].numpy().copy()
    want, want_state = kda_jit.prefill(**tensors(), initial_state=start[:2])
    out, returned = kda_jit.prefill(**numpys(initial_state=state, final_state=state))
    assert returned is state
    same(out, want)
    same(state, want_state)

    pool, slots = start.numpy().copy(), np.array([3, 1])
    out, returned = kda_jit.prefill(**numpys(initial_state=pool, state_indices=slots))
    assert returned is pool
    by_torch = start.clone()
    kda_jit.prefill(**tensors(), initial_state=by_torch, state_indices=torch.tensor([3, 1]))
    same(pool, by_torch)


def test_recurrent_takes_arrays_too():
    start = torch.randn(5, HV, D, D)
    x = {n: t.transpose(0, 1)[:3].contiguous() for n, t in tensors().items() if n in TOKENS}
    x |= {name: tensors()[name] for name in ("A_log", "dt_bias")}
    n = {name: t.numpy() for name, t in x.items()}
    pool, slots = start.numpy().copy(), np.array([4, -1, 0])
    by_torch = start.clone()
    want = kda_jit.recurrent(**x, state_pool=by_torch, state_indices=torch.from_numpy(slots))
    frozen = start.numpy().copy()
    frozen.flags.writeable = False
    same(kda_jit.recurrent(**n, state_pool=frozen, state_indices=slots, write_state=False), want)
    with pytest.raises(InputError, match=r"^state_pool: expected an array that may be written"):
        kda_jit.recurrent(**n, state_pool=frozen, state_indices=slots)
    out = zeros(3, 1, HV, D)
    assert kda_jit.recurrent(**n, state_pool=pool, state_indices=slots, out=out) is out
    same(out, want)
    same(pool, by_torch)
    flat = {name: x[:, 0] if name in TOKENS else x for name, x in n.items()}
    got = kda_jit.recurrent(**flat, state_pool=start.numpy().copy(), state_indices=slots)
    same(got, want[:, 0])

    has = np.array([False, True, True])
    by_torch = start.clone()
    want = kda_jit.recurrent(
        **x, state_pool=by_torch, state_indices=torch.from_numpy(slots),
        has_initial_state=torch.from_numpy(has),
    )  # fmt: skip
    pool = start.numpy().copy()
    pool[4] = np.nan
    same(kda_jit.recurrent(**n, state_pool=pool, state_indices=slots, has_initial_state=has), want)
    same(pool, by_torch)
    with pytest.raises(InputError, match=r"^has_initial_state: .*\[3\]"):
        kda_jit.recurrent(**n, state_pool=pool, state_indices=slots, has_initial_state=has[:2])


def test_columns_and_every_other_token_are_read_where_they_lie(problems):
    given = numpys()
    wide = np.concatenate([given["q"], given["k"]], 2)
    spread = np.repeat(given["v"], 2, 1)
    strided = {"q": wide[:, :, :H], "k": wide[:, :, H:], "v": spread[:, ::2]}
    out, _ = kda_jit.prefill(**(given | strided))
    same(out, kda_jit.prefill(**tensors())[0])
    assert problems[0].k.data_ptr() == address(wide) + wide.strides[2] * H


def test_read_only_arrays_may_be_read():
    given = numpys(initial_state=zeros(2, HV, D, D))
    for x in given.values():
        x.flags.writeable = False
    same(kda_jit.prefill(**given)[0], kda_jit.prefill(**tensors())[0])


def test_bool_and_int64_arguments():
    start = torch.randn(2, HV, D, D)
    flags = torch.tensor([True, False])
    got = kda_jit.prefill(
        **(numpys(initial_state=start.numpy(), has_initial_state=flags.numpy())
           | {"cu_seqlens": np.array([0, 5, T])})
    )  # fmt: skip
    want = kda_jit.prefill(**tensors(), initial_state=start, has_initial_state=flags)
    same(got[0], want[0])
    same(got[1], want[1])


def test_arrays_and_tensors_may_be_mixed_and_q_decides():
    x = tensors()
    out, state = kda_jit.prefill(**(numpys() | {"g": x["g"], "cu_seqlens": x["cu_seqlens"]}))
    assert type(out) is type(state) is np.ndarray
    mine = torch.zeros(1, T, HV, D)
    out, _ = kda_jit.prefill(**numpys(), out=mine)
    assert out is mine
    with pytest.raises(InputTypeError, match=r"^g: expected a torch\.Tensor .* got ndarray"):
        kda_jit.prefill(**(x | {"g": x["g"].numpy()}))


@pytest.mark.parametrize("kind", [Foreign, Old])
def test_any_array_with_the_protocol_will_do(kind):
    given = {name: kind(x) for name, x in numpys().items()}
    out, state = kda_jit.prefill(**given)
    assert isinstance(out, Foreign) and isinstance(state, Foreign)
    want, want_state = kda_jit.prefill(**tensors())
    same(out.data, want)
    same(state.data, want_state)
    for x in given.values():
        # No stream on the CPU, and nobody asks for a copy.
        assert all(asked == (None, (1, 0), None) for asked in x.asked)


def test_a_library_without_a_namespace_is_asked_by_its_package(monkeypatch):
    class Bare:
        __module__ = "bare_arrays.core"

        def __init__(self, data):
            self.data = data

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **more):
            return self.data.__dlpack__(**more)

    package = types.ModuleType("bare_arrays")
    package.from_dlpack = lambda x: Bare(np.from_dlpack(x))
    given = numpys()
    with pytest.raises(InputTypeError, match=r"^q: expected an array whose library has from_dlp"):
        kda_jit.prefill(**(given | {"q": Bare(given["q"])}))
    monkeypatch.setitem(sys.modules, "bare_arrays", package)
    out, _ = kda_jit.prefill(**(given | {"q": Bare(given["q"])}))
    assert type(out) is Bare
    same(out.data, kda_jit.prefill(**tensors())[0])


class Bits(Foreign):
    """A bfloat16 array like those of ml_dtypes: no export but as integers."""

    __module__ = "numpy"
    dtype = "bfloat16"

    def __init__(self, bits):
        super().__init__(bits)
        self.dtype = "bfloat16"

    def view(self, dtype):
        return self.data.view(dtype)

    def __dlpack__(self, **more):
        raise BufferError("DLPack only supports signed/unsigned integers, float and complex.")


def test_bits_of_bfloat16_travel_as_integers(monkeypatch, problems):
    x = tensors(dtype=torch.bfloat16)
    given = {n: Bits(t.view(torch.uint16).numpy()) if n in TOKENS else t for n, t in x.items()}
    views = []

    class Imported(np.ndarray):
        def view(self, dtype):
            views.append(dtype)
            return np.asarray(self)

    monkeypatch.setattr(np, "from_dlpack", lambda t, real=np.from_dlpack: real(t).view(Imported))
    out, state = kda_jit.prefill(**given)
    assert views == ["bfloat16"]
    want, want_state = kda_jit.prefill(**x)
    assert torch.from_numpy(np.asarray(out)).view(torch.bfloat16).equal(want)
    same(np.asarray(state), want_state)
    assert problems[0].q.data_ptr() == address(given["q"].data)


def test_bfloat16_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="NumPy's bfloat16 is in ml_dtypes")
    x = tensors(dtype=torch.bfloat16)
    given = {
        n: t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if n in TOKENS else t.numpy()
        for n, t in x.items()
    }
    out, state = kda_jit.prefill(**given)
    want, want_state = kda_jit.prefill(**x)
    assert out.dtype == ml_dtypes.bfloat16
    same(state, want_state)
    assert torch.from_numpy(out.view(np.uint16)).view(torch.bfloat16).equal(want)
    buffer = np.zeros(out.shape, ml_dtypes.bfloat16)
    assert kda_jit.prefill(**given, out=buffer)[0] is buffer
    assert np.array_equal(buffer, out)


def test_jax_round_trip():
    jax = pytest.importorskip("jax", reason="needs jax")
    jnp = jax.numpy
    for dtype in (torch.float32, torch.bfloat16):
        x = tensors(dtype=dtype)
        given = {name: jnp.from_dlpack(t) for name, t in x.items()}
        out, state = kda_jit.prefill(**given)
        want, want_state = kda_jit.prefill(**x)
        assert isinstance(out, jax.Array) and isinstance(state, jax.Array)
        assert torch.from_dlpack(out).equal(want) and torch.from_dlpack(state).equal(want_state)
        with pytest.raises(InputError, match=r"^out: .*JAX's arrays cannot be written"):
            kda_jit.prefill(**given, out=out)


# -- streams, without a GPU ------------------------------------------------------------------------


class Stream:
    """A stream that notes whom it waits for."""

    def __init__(self, handle, log):
        self.cuda_stream, self.log = handle, log

    def wait_stream(self, other):
        self.log.append(f"{self.cuda_stream} waits for {other.cuda_stream}")


@pytest.fixture
def streams(monkeypatch):
    """Torch's current stream is 7; CuPy's is `handle`. What happens goes to `log`."""
    log = []
    found = types.SimpleNamespace(log=log, handle=5, done=False, capturing=False)

    @contextmanager
    def use(stream):
        log.append(f"on {stream.cuda_stream}")
        yield
        log.append(f"off {stream.cuda_stream}")

    class Event:
        def record(self, stream):
            log.append(f"event on {stream.cuda_stream}")

        def query(self):
            return found.done

    for name, stand_in in {
        "current_stream": lambda device: Stream(7, log),
        "default_stream": lambda device: Stream(0, log),
        "ExternalStream": lambda handle, device: Stream(handle or "no handle", log),
        "is_current_stream_capturing": lambda: found.capturing,
        "device_count": lambda: 1,
        "device": nullcontext,
        "stream": use,
        "Event": Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    cuda = types.SimpleNamespace(
        get_current_stream=lambda index: types.SimpleNamespace(ptr=found.handle)
    )
    package = types.SimpleNamespace(cuda=cuda, from_dlpack=lambda x: ("cupy", x))
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setattr(arrays, "_held", deque())
    return found


@pytest.mark.parametrize(
    "handle, log",
    [
        (5, ["5 waits for 7", "on 5", "call", "off 5", "7 waits for 5"]),
        (7, ["call"]),
        (0, ["0 waits for 7", "on 0", "call", "off 0", "7 waits for 0"]),
        (1, ["0 waits for 7", "on 0", "call", "off 0", "7 waits for 0"]),
    ],
)
def test_a_call_with_cupy_runs_on_its_stream(streams, handle, log):
    streams.handle = handle
    kind = type("ndarray", (Foreign,), {"__module__": "cupy"})
    with arrays._visit(kind(zeros(3), device=(2, 0))) as (_, give):
        streams.log.append("call")
        assert give(torch.zeros(1))[0] == "cupy"
    assert streams.log == log
    assert not arrays._held


def test_memory_of_a_library_without_a_stream_is_held_until_it_was_read(streams):
    for turn in range(3):
        streams.done = turn == 2
        with arrays._visit(Foreign(zeros(3), device=(2, 0))) as (take, _):
            take.views.append(torch.zeros(turn))
        assert len(arrays._held) == (1, 2, 1)[turn]
    assert streams.log == ["event on 7"] * 3
    assert [views[0].numel() for _, views in arrays._held] == [2]
    streams.done, streams.capturing = False, True
    with arrays._visit(Foreign(zeros(3), device=(2, 0))):
        pass
    assert len(arrays._held) == 1


def test_a_producer_on_a_gpu_is_told_the_stream(streams, monkeypatch):
    for current, told in ((7, 7), (0, 1)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda d, c=current: Stream(c, []))
        x = Foreign(zeros(3), device=(2, 0))
        arrays._to_tensor("q", x, False)
        assert x.asked == [(told, (1, 0), None)]


# -- what is refused -------------------------------------------------------------------------------


def read_only(*shape):
    x = zeros(*shape)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    "name, more",
    [
        ("out", {"out": read_only(1, T, HV, D)}),
        ("final_state", {"final_state": read_only(2, HV, D, D)}),
        (
            "initial_state",
            {"initial_state": read_only(3, HV, D, D), "state_indices": np.array([0, 2])},
        ),
        (
            "checkpoint_state",
            {
                "checkpoint_state": read_only(2, HV, D, D),
                "checkpoint_offsets": np.array([0, 16]),
            },
        ),
        # Without flags of its own, what the capsule says counts.
        ("out", {"out": Foreign(read_only(1, T, HV, D))}),
    ],
    ids=["out", "final_state", "pool", "checkpoint_state", "capsule"],
)
def test_read_only_arrays_are_never_written(name, more):
    with pytest.raises(InputError, match=rf"^{name}: expected an array that may be written"):
        kda_jit.prefill(**numpys(**more))
    x = more[name]
    assert not (x.data if isinstance(x, Foreign) else x).any()


def test_an_immutable_kind_is_refused_by_its_name():
    kind = type("ArrayImpl", (Foreign,), {"__module__": "jaxlib._jax"})
    buffer = kind(zeros(1, T, HV, D))
    with pytest.raises(InputError, match=r"^out: .*ArrayImpl .*JAX's arrays cannot be written\.$"):
        kda_jit.prefill(**numpys(out=buffer))
    same(kda_jit.prefill(**(numpys() | {"g": kind(numpys()["g"])}))[0],
         kda_jit.prefill(**tensors())[0])  # fmt: skip


@pytest.mark.parametrize(
    "name, change, error, words",
    [
        (
            "g",
            lambda x: x[..., ::-1],
            InputError,
            r"strides of 0 or more, got \(1408, 64, 16, -1\)",
        ),
        ("q", lambda x: x[:, ::-1], InputError, "strides of 0 or more, got"),
        ("v", lambda x: x.astype(">f4"), InputTypeError, r"numpy\.ndarray \(dtype >f4.*byte order"),
        ("beta", lambda x: x.astype(object), InputTypeError, "exported through DLPack.*object"),
        ("q", lambda x: x.astype(np.int32), InputTypeError, "got torch.int32"),
        ("k", lambda x: x[:, :7], InputError, r"expected \[B, T, H, K\].*got \[1, 7, 2, 16\]"),
        ("beta", lambda x: "text", InputTypeError, "expected a torch.Tensor or.*__dlpack__.*str"),
        ("beta", lambda x: None, InputTypeError, "got None"),
        ("g", lambda x: Foreign(x, device=(13, 0)), DeviceError, "a device of type 13"),
        ("g", lambda x: Foreign(x, device=(2, 77)), DeviceError, "torch sees.*got CUDA device 77"),
        ("q", lambda x: Foreign(x, device=(2, 77)), DeviceError, "torch sees.*got CUDA device 77"),
    ],
)
def test_errors_name_the_argument_and_what_was_found(name, change, error, words):
    given = numpys()
    given[name] = change(given[name])
    with pytest.raises(error, match=rf"^{name}: .*{words}"):
        kda_jit.prefill(**given)


def test_a_negative_stride_gone_wrong_is_one_still():
    """What CuPy 14 exports: torch's own importer would abort the process."""

    class Unsigned(Foreign):
        def __dlpack__(self, **more):
            capsule = super().__dlpack__(**more)
            pointer = arrays._capsule_pointer(capsule, arrays._capsule_name(capsule))
            tensor = arrays._Versioned.from_address(pointer).tensor
            tensor.strides[3] = (2**64 - 4) // 4
            return capsule

    given = numpys()
    with pytest.raises(InputError, match=rf"^g: expected strides of 0 or more.*{2**62 - 1}"):
        kda_jit.prefill(**(given | {"g": Unsigned(given["g"])}))


def test_a_producer_that_fails_is_named():
    class Broken(Foreign):
        def __dlpack__(self, **more):
            raise RuntimeError("the buffer was donated")

    given = numpys()
    with pytest.raises(InputTypeError, match=r"^dt_bias: .*Broken .*the buffer was donated"):
        kda_jit.prefill(**(given | {"dt_bias": Broken(given["dt_bias"])}))


def test_lists_and_numbers_are_refused_as_ever():
    given = numpys()
    with pytest.raises(InputTypeError, match=r"^q: expected a torch\.Tensor \[B, T, H, K\]"):
        kda_jit.prefill(**(given | {"q": given["q"].tolist()}))


# -- what tensors pay ------------------------------------------------------------------------------


def test_tensors_never_come_here(monkeypatch):
    for module, name in itertools.product((arrays, ops), ("prefill", "recurrent")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("a detour"))
    x = tensors()
    kda_jit.prefill(**x)
    kda_jit.prefill(**(x | {"q": torch.nn.Parameter(x["q"], requires_grad=False)}))
    alias = x["q"].as_subclass(type("Tagged", (torch.Tensor,), {}))
    kda_jit.prefill(**(x | {"q": alias}))


def test_code_of_the_page_runs(capsys):
    page = Path(__file__).resolve().parent.parent / "docs" / "integrations" / "dlpack.md"
    line, example = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    scope = {}
    exec(compile(example + line, page.name, "exec"), scope)
    assert type(scope["out"]) is np.ndarray
    assert capsys.readouterr().out.split() == ["torch"]
    # The error that the page quotes is the one that is raised.
    given = numpys()
    with pytest.raises(InputError) as caught:
        kda_jit.prefill(**(given | {"g": given["g"][..., ::-1]}))
    assert str(caught.value) in page.read_text()
