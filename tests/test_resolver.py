"""Who runs a call: a table over capability, dtype, head size, gate and name, without a GPU."""

import itertools
import time

import pytest
import torch

from kda_jit import resolver
from kda_jit.backends import cuda_rules
from kda_jit.backends.base import Query, device_capability
from kda_jit.errors import BackendNameError, InputError, InputTypeError, NoBackendError
from kda_jit.resolver import ORDER, Resolution, explain, resolve, resolve_backend

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CAPABILITIES = [
    None, (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
]  # fmt: skip
CUDA_CAPABILITIES = {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
TRITON_CAPABILITIES = CUDA_CAPABILITIES | {(11, 0)}


class Recording:
    """A backend that answers by a rule and counts the questions."""

    def __init__(self, name, rejects):
        self.name, self.rejects, self.asked = name, self._rejects, 0
        self._rule = rejects

    def _rejects(self, query):
        self.asked += 1
        return self._rule(query)


def forget():
    resolver.rejections.cache_clear()
    resolver._first_that_can.cache_clear()


@pytest.fixture(autouse=True)
def toolchain(monkeypatch):
    """CuPy and NVRTC as if all were well, and no GPU; a test may say otherwise."""
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)
    monkeypatch.setattr(cuda_rules, "unavailable_reason", lambda target: None)
    monkeypatch.setattr(cuda_rules, "device_capability", lambda device: None)
    forget()
    yield
    forget()


def query(capability=(9, 0), dtype=BF16, K=128, lower_bound=-5.0, **more):
    device = CPU if capability is None else GPU
    return Query(K, more.pop("V", K), dtype, lower_bound, device, capability, **more)


def can(name, q):
    """The rules once more, in another form."""
    on_gpu = q.device.type == "cuda"
    if name == "cuda":
        return (
            on_gpu
            and q.capability in CUDA_CAPABILITIES
            and (q.g_dtype or q.dtype) is (q.beta_dtype or q.dtype) is q.dtype is BF16
            and q.K == q.V == 128
            and q.lower_bound is not None
            and not q.misaligned
            and not q.far_tokens
        )
    if name == "triton":
        sizes = all(16 <= size <= 256 for size in (q.K, q.V))
        return on_gpu and q.capability in TRITON_CAPABILITIES and sizes and q.dtype is not F64
    return True


MATRIX = [
    query(capability, dtype, K, lower_bound)
    for capability, dtype, K, lower_bound in itertools.product(
        CAPABILITIES, (BF16, F16, F32, F64), (8, 16, 64, 96, 128, 192, 256, 512), (-5.0, None)
    )
]
MORE = [
    query(V=64),
    query(g_dtype=F32),
    query(beta_dtype=F32),
    query(misaligned=("v",)),
    query(far_tokens=("q",)),
    query((8, 1)),
    query((9, 1)),
    query((13, 0)),
]


@pytest.mark.parametrize("name", ["auto", "cuda", "flashkda", "triton", "torch"])
def test_matrix(name):
    for q in MATRIX:
        wanted = "cuda" if name == "flashkda" else name
        able = [backend for backend in ORDER if can(backend, q)]
        if name == "auto":
            wanted = able[0]
        if wanted in able:
            resolution = resolve(q, name)
            assert resolution.backend == wanted, q
            assert set(resolution.reasons) == set(ORDER) - {wanted}
            assert all(resolution.reasons.values())
        else:
            with pytest.raises(NoBackendError):
                resolve(q, name)


@pytest.mark.parametrize("q", MORE, ids=str)
def test_what_else_cuda_does_not_take(q):
    assert not can("cuda", q)
    assert resolve(q).reasons["cuda"]
    with pytest.raises(NoBackendError):
        resolve(q, "cuda")


def test_auto_gives_the_reasons_of_those_passed_over():
    resolution = resolve(query(lower_bound=None))
    assert resolution.backend == "triton"
    assert "lower_bound = None" in resolution.reasons["cuda"][0]
    assert resolution.reasons["torch"] == ("triton comes first",)


def test_an_explicit_backend_names_every_unmet_condition_and_what_was_found():
    bad = query((7, 5), F16, 64, None, V=32, g_dtype=F32, beta_dtype=F32, misaligned=("q", "out"))
    with pytest.raises(NoBackendError) as caught:
        resolve(bad, "cuda")
    assert isinstance(caught.value, RuntimeError)
    text = str(caught.value)
    for word in (
        "backend='cuda'", "8.x, 9.x, 10.x, 12.x, got 7.5", "q, k, v in torch.bfloat16, got torch.f",
        "g in torch.bfloat16, got torch.float32", "beta in torch.bfloat16, got torch.float32",
        "K = V = 128, got K = 64, V = 32", "lower_bound = None", "16 bytes, got others for q, out",
    ):  # fmt: skip
        assert word in text


def test_cpu_tensors_are_named():
    with pytest.raises(NoBackendError, match="needs a CUDA device, got cpu"):
        resolve(query(None), "cuda")


@pytest.mark.parametrize("name", ["cuda ", "Cuda", "fla", "flash_kda", "reference", ""])
def test_a_misspelt_backend_lists_the_valid_ones(name):
    with pytest.raises(BackendNameError) as caught:
        resolve(query(), name)
    assert isinstance(caught.value, ValueError)
    for valid in ("auto", "cuda", "flashkda", "triton", "torch"):
        assert valid in str(caught.value)
    assert repr(name) in str(caught.value)


def test_a_near_miss_is_guessed():
    with pytest.raises(BackendNameError, match="Did you mean 'flashkda'"):
        resolve(query(), "flashkd")


@pytest.mark.parametrize("name", [None, 1, torch.device("cuda")])
def test_a_backend_that_is_no_string(name):
    with pytest.raises(InputTypeError, match=r"^backend: expected a str, got"):
        resolve(query(), name)


def test_the_environment_decides_for_auto_only(monkeypatch):
    monkeypatch.setenv("KDA_JIT_BACKEND", "triton")
    assert resolve(query()).backend == "triton"
    assert resolve(query(), "cuda").backend == "cuda"
    assert resolve(query(), "torch").backend == "torch"
    monkeypatch.setenv("KDA_JIT_BACKEND", "flashkda")
    assert resolve(query()).backend == "cuda"
    with pytest.raises(NoBackendError, match=r"^KDA_JIT_BACKEND=flashkda: .*got K = 64"):
        resolve(query(K=64))
    monkeypatch.setenv("KDA_JIT_BACKEND", "cudda")
    with pytest.raises(BackendNameError, match=r"^KDA_JIT_BACKEND: .*'cudda'"):
        resolve(query())
    monkeypatch.setenv("KDA_JIT_BACKEND", "")
    assert resolve(query()).backend == "cuda"


# -- probes --------------------------------------------------------------------------------------


def test_a_missing_toolchain_is_a_reason_and_auto_goes_on(monkeypatch):
    words = "NVRTC: CuPy cannot be imported. Install cupy-cuda12x"
    monkeypatch.setattr(cuda_rules, "unavailable_reason", lambda target: f"{words} {target}")
    resolution = resolve(query())
    assert resolution.backend == "triton"
    assert f"{words} sm_90a" in resolution.reasons["cuda"][0]
    with pytest.raises(NoBackendError, match="Install cupy-cuda12x"):
        resolve(query(), "cuda")


def test_the_gpu_is_asked_only_when_the_query_is_about_it_and_all_else_holds(monkeypatch):
    asked = []

    def broken(index):
        asked.append(index)
        return "the driver is too old"

    monkeypatch.setattr(cuda_rules, "device_unavailable_reason", broken)
    assert resolve(query()).backend == "cuda"
    assert asked == []
    forget()
    monkeypatch.setattr(cuda_rules, "device_capability", lambda device: (9, 0))
    assert resolve(query(K=64)).backend == "triton"
    assert asked == []
    resolution = resolve(query())
    assert resolution.backend == "triton"
    assert "the driver is too old" in resolution.reasons["cuda"][0]
    assert asked == [0]


def test_answers_are_remembered(monkeypatch):
    backends = {name: Recording(name, lambda q: ["never"]) for name in ORDER[:-1]}
    backends["torch"] = Recording("torch", lambda q: [])
    monkeypatch.setattr(resolver, "get_backend", backends.__getitem__)
    for _ in range(3):
        assert resolve(query()).backend == "torch"
        explain(query())
    assert [b.asked for b in backends.values()] == [1, 1, 1]


def test_a_backend_that_breaks_is_a_bug_and_not_a_reason(monkeypatch):
    def broken(q):
        raise ZeroDivisionError

    monkeypatch.setattr(resolver, "get_backend", lambda name: Recording(name, broken))
    with pytest.raises(ZeroDivisionError):
        resolve(query())


def test_later_backends_are_not_asked():
    assert resolve(query()).backend == "cuda"
    assert resolver.rejections.cache_info().currsize == 1


def test_ten_thousand_calls_are_quick():
    arguments = {"head_dim": 128, "dtype": BF16, "lower_bound": -5.0, "device": CPU}
    resolve_backend(**arguments)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(2000):
            resolve_backend(**arguments)
        best = min(best, (time.perf_counter() - start) * 5)
    assert best < 0.15, f"10k calls take {best * 1e3:.0f} ms"


# -- the public function -------------------------------------------------------------------------


def test_public_form_is_a_query():
    resolution = resolve_backend(
        "auto", head_dim=128, dtype=BF16, lower_bound=-5.0, device="cuda", capability=(12, 1)
    )
    assert isinstance(resolution, Resolution)
    assert resolution.backend == "cuda"
    assert resolve_backend(
        head_dim=128, value_head_dim=64, dtype=BF16, lower_bound=-5.0, device="cuda:0",
        capability=(9, 0),
    ).backend == "triton"  # fmt: skip
    assert resolve_backend(head_dim=8, dtype=F64, lower_bound=None, device="cpu").backend == "torch"
    with pytest.raises(TypeError, match="head_size"):
        resolve_backend(head_size=128, dtype=BF16, lower_bound=-5.0, device="cpu")


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"lower_bound": -7.0}, InputError, r"^lower_bound: .*-7"),
        ({"lower_bound": float("nan")}, InputError, r"^lower_bound: .*nan"),
        ({"lower_bound": "x"}, InputTypeError, r"^lower_bound: "),
        ({"head_dim": 0}, InputError, r"^head_dim: .*0"),
        ({"head_dim": "128"}, InputError, r"^head_dim: .*'128'"),
        ({"dtype": torch.int8}, InputTypeError, r"^dtype: .*int8"),
        ({"g_dtype": "bf16"}, InputTypeError, r"^g_dtype: .*'bf16'"),
    ],
)
def test_public_form_refuses_what_no_call_may_have(changes, kind, words):
    legal = {"head_dim": 128, "dtype": BF16, "lower_bound": -5.0, "device": "cuda:0"}
    with pytest.raises(kind, match=words):
        resolve_backend(**(legal | {"capability": (9, 0)} | changes))


def test_explain_asks_all():
    answers = explain(query(K=64))
    assert list(answers) == list(ORDER)
    assert "K = 64" in answers["cuda"][0]
    assert answers["triton"] == answers["torch"] == ()


def test_a_device_that_is_not_there_has_no_capability():
    assert device_capability(CPU) is None
    assert device_capability(torch.device("cuda", 99)) is None


@pytest.mark.parametrize("name", ORDER)
def test_every_backend_has_the_protocol(name):
    backend = resolver.get_backend(name)
    assert backend.name == name
    assert isinstance(backend.rejects(query()), list)
    assert callable(backend.run)
    assert resolver.get_backend(name) is backend
