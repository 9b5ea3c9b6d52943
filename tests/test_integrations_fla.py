"""fla's dispatch runs ours: with fla-core where it can be imported, else with a stand-in alone.

The stand-in has what `kda_jit.integrations.fla` uses of fla-core 0.6: an entry point wrapped by a
registry that asks its backends in the order of priority whether they take a call.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import kda_jit
from kda_jit.backends.base import record_launch
from kda_jit.chunk import chunk_kda, prepare_chunk
from kda_jit.errors import BackendNameError, IntegrationError, NoBackendError
from kda_jit.integrations import fla as ours
from kda_jit.testing.cases import Case
from kda_jit.testing.chunk import FORMS, Form, exact_chunk_kda

ROOT = Path(__file__).resolve().parent.parent
#: Where a wheel to measure against may lie; nothing is installed from there.
WHEELS = sorted((ROOT / ".peers").glob("fla_core-0.6*.whl"))
#: What fla takes out of its **kwargs.
FROM_KWARGS = {
    "A_log": None,
    "dt_bias": None,
    "chunk_size": 64,
    "transpose_state_layout": None,
}


def why_no_fla() -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed"
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "import fla.backends, fla.ops.kda as k; k.chunk_kda",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else f"fla cannot be imported: {done.stderr[-200:]}"


@pytest.fixture(scope="module")
def real() -> Any:
    """fla.ops.kda"""
    reason = why_no_fla()
    if reason is not None:
        pytest.skip(reason)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.ops.kda as module
    return module


class TheirOwn(Exception):
    """Stands for fla's own kernels having been reached."""


def stand_in() -> dict[str, types.ModuleType]:
    class BaseBackend:
        env_var = None
        priority = 5

        def is_available(self):
            return True

        def is_enabled(self):
            import os

            return os.environ.get(self.env_var or "", "1") != "0"

    class Registry:
        def __init__(self):
            self._backends = {}

        def register(self, backend):
            self._backends[backend.backend_type] = backend

    def entry(*args, **kwargs):
        raise TheirOwn

    registry = Registry()

    @functools.wraps(entry)
    def chunk_kda(*args, **kwargs):
        for backend in sorted(registry._backends.values(), key=lambda b: b.priority):
            if not (backend.is_available() and backend.is_enabled()):
                continue
            try:
                taken, _ = backend.chunk_kda_verifier(*args, **kwargs)
            except Exception:
                taken = False
            if taken:
                return backend.chunk_kda(*args, **kwargs)
        return entry(*args, **kwargs)

    modules = {name: types.ModuleType(name) for name in ("fla", "fla.backends", "fla.ops.kda")}
    modules["fla.backends"].BaseBackend = BaseBackend
    modules["fla.backends"]._function_registries = {entry: registry}
    modules["fla.ops.kda"].chunk_kda = chunk_kda
    return modules


@pytest.fixture(params=["fla", "stand-in"])
def theirs(request, monkeypatch):
    """fla's chunk_kda; ours is not registered before and not after."""
    monkeypatch.delenv("KDA_JIT_BACKEND", raising=False)
    monkeypatch.delenv("FLA_KDA_JIT", raising=False)
    if request.param == "fla":
        function = request.getfixturevalue("real").chunk_kda
    else:
        modules = stand_in()
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        function = modules["fla.ops.kda"].chunk_kda
    assert not ours.is_registered()
    yield function
    ours.unregister()
    assert not ours.is_registered()


def call_of(form: Form = FORMS[0]) -> dict[str, Any]:
    x = Case(3, (33, 0, 20), 2, 4).tensors(dtype=torch.float32, head_dim=32)
    return form.arguments(x)


def left_to_them(function, call) -> bool:
    """Whether fla went on by itself, where on a CPU it can only fail, and nothing of ours ran."""
    record_launch(kda_jit.LaunchRecord("before"))
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(**call)
    ours_raised = isinstance(caught.value, kda_jit.KdaError)
    return not ours_raised and kda_jit.last_launch().backend in ("before", "fla")


# -- the dispatch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_once_registered_every_form_runs_here(theirs, form) -> None:
    ours.register()
    call = call_of(form)
    out, state = theirs(**call)
    assert kda_jit.last_launch().backend == "torch"
    want = exact_chunk_kda(**call)
    torch.testing.assert_close(out.double(), want.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), want.final_state, rtol=1e-4, atol=1e-5)
    again, _ = chunk_kda(**call)
    assert again.equal(out)


def test_register_and_unregister_as_often_as_you_like(theirs) -> None:
    ours.unregister()
    assert left_to_them(theirs, call_of())
    for _ in range(2):
        ours.register()
        assert ours.is_registered()
        theirs(**call_of())
        assert kda_jit.last_launch().backend == "torch"
    for _ in range(2):
        ours.unregister()
        assert not ours.is_registered()
    assert left_to_them(theirs, call_of())


def test_ours_is_asked_before_their_flashkda(theirs) -> None:
    rival = ours._adapter("torch")
    rival.__class__.priority, rival.__class__.backend_type = 3, "rival"
    rival.__class__.chunk_kda = lambda *args, **kwargs: pytest.fail("asked first")
    registry = ours._registry()
    registry.register(rival)
    try:
        ours.register()
        theirs(**call_of())
    finally:
        del registry._backends["rival"]


def test_a_call_is_prepared_once(theirs, monkeypatch) -> None:
    prepared = []
    monkeypatch.setattr(
        ours,
        "prepare_chunk",
        lambda *a, **k: prepared.append(prepare_chunk(*a, **k)) or prepared[-1],
    )
    ours.register()
    call = call_of()
    out, _ = theirs(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    assert len(prepared) == 1
    assert prepared[0].problem.out is out
    assert ours._pending.call is None


def test_a_call_that_was_not_verified_is_prepared(theirs) -> None:
    adapter = ours._adapter("auto")
    call, other = call_of(), call_of(FORMS[4])
    assert adapter.chunk_kda_verifier(**other) == (True, None)
    out, _ = adapter.chunk_kda(**call)
    assert out.equal(chunk_kda(**call)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"return_intermediate_states": True},
        {"cp_context": object()},
        {"v": torch.zeros(1, 53, 4, 32, requires_grad=True)},
        {"head_first": False},
        {"lower_bound": 3.0},
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_only_they_can_do_is_left_to_them(theirs, changes) -> None:
    ours.register()
    theirs(**call_of())
    assert left_to_them(theirs, call_of() | changes)
    assert kda_jit.last_launch().backend == "fla"


def test_only_what_a_named_backend_can_run(theirs) -> None:
    ours.register(backend="cuda")
    assert left_to_them(theirs, call_of())
    ours.register(backend="torch")
    theirs(**call_of())
    assert kda_jit.last_launch().backend == "torch"
    with pytest.raises(BackendNameError, match="cudda"):
        ours.register(backend="cudda")


def test_torch_is_slower_than_they_are_on_a_gpu(theirs, monkeypatch) -> None:
    call = prepare_chunk(**call_of())
    q = types.SimpleNamespace(is_cuda=True)
    on_gpu = call._replace(problem=call.problem._replace(q=q))
    monkeypatch.setattr(ours, "prepare_chunk", lambda *a, **k: on_gpu)
    taken, reason = ours._adapter("auto").chunk_kda_verifier()
    assert not taken and "torch" in reason
    assert ours._adapter("torch").chunk_kda_verifier() == (True, None)


def test_their_variable_switches_it_off(theirs, monkeypatch) -> None:
    ours.register()
    monkeypatch.setenv("FLA_KDA_JIT", "0")
    assert left_to_them(theirs, call_of())


def test_a_dispatch_that_is_switched_off_is_said(theirs, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["fla.backends"], "_DISPATCH_DISABLED", True, raising=False)
    with pytest.raises(IntegrationError, match="FLA_DISABLE_BACKEND_DISPATCH"):
        ours.register()
    assert not ours.is_registered()


def test_another_fla_is_refused_with_its_version(theirs, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["fla.backends"], "_function_registries", {})
    with pytest.raises(IntegrationError, match=r"^fla: expected a registry.*got fla "):
        ours.register()


def test_without_fla(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    assert not ours.is_registered()
    ours.unregister()
    with pytest.raises(IntegrationError, match=r"^fla: expected fla-core 0\.6"):
        ours.register()


def test_importing_the_integration_imports_no_fla() -> None:
    code = (
        "import sys, kda_jit.integrations.fla as ours; assert not ours.is_registered();"
        "ours.unregister(); assert not {'fla', 'triton'} & (set(sys.modules) - before)"
    )
    command = [sys.executable, "-c", f"import sys, torch; before = set(sys.modules); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_named_backends_still_raise_in_our_own_function() -> None:
    with pytest.raises(NoBackendError):
        chunk_kda(**call_of(), backend="cuda")


# -- the signature --------------------------------------------------------------------------------


def signature_in(source: str) -> dict[str, Any]:
    """Parameters of chunk_kda and their defaults, without running the file."""
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "chunk_kda"
    )
    names = [a.arg for a in function.args.args]
    defaults = [ast.literal_eval(x) for x in function.args.defaults]
    required = len(names) - len(defaults)
    assert not function.args.kwonlyargs
    empty = inspect.Parameter.empty
    return dict(zip(names, [empty] * required + defaults))


def their_signature() -> dict[str, Any]:
    if why_no_fla() is None:
        source = importlib.util.find_spec("fla").submodule_search_locations[0]
        return signature_in((Path(source) / "ops" / "kda" / "chunk.py").read_text())
    if not WHEELS:
        pytest.skip("no fla-core 0.6, neither installed nor as a wheel in .peers")
    return signature_in(zipfile.ZipFile(WHEELS[-1]).read("fla/ops/kda/chunk.py").decode())


def test_parameters_and_defaults_are_theirs_in_their_order() -> None:
    parameters = inspect.signature(chunk_kda).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    theirs = their_signature()
    assert list(positional) == list(theirs)
    assert positional == theirs
    rest = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert rest == FROM_KWARGS | {"backend": "auto"}


def test_both_of_our_functions_take_the_same_and_explain_it() -> None:
    ours_ = inspect.signature(chunk_kda).parameters
    prepared = inspect.signature(prepare_chunk).parameters
    assert list(ours_.values()) == list(prepared.values())
    assert [name for name in ours_ if name not in chunk_kda.__doc__] == []


# -- the page -------------------------------------------------------------------------------------


def test_code_on_the_page_runs(theirs) -> None:
    scope: dict[str, Any] = {}
    page = (ROOT / "docs" / "integrations" / "fla.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(code, "fla.md", "exec"), scope)
    assert scope["out"].shape == scope["v"].shape
    assert scope["final_state"].shape == (1, 2, 128, 128)
    assert ours.is_registered()
