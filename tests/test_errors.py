"""The tree of errors: each is a KdaError and the built-in that a stranger would catch."""

from __future__ import annotations

import inspect
import pickle

import pytest

from kda_jit import errors

BUILT_IN = {
    "InputError": ValueError,
    "InputTypeError": TypeError,
    "BackendNameError": ValueError,
    "DeviceError": RuntimeError,
    "NoBackendError": RuntimeError,
    "GradError": RuntimeError,
    "WorkspaceError": RuntimeError,
    "OutputConflictError": RuntimeError,
    "IntegrationError": RuntimeError,
    "CaptureError": RuntimeError,
    "CompileError": RuntimeError,
    "LaunchError": RuntimeError,
}


def _leaves() -> dict[str, type[BaseException]]:
    found = inspect.getmembers(errors, inspect.isclass)
    return {
        name: kind
        for name, kind in found
        if issubclass(kind, errors.KdaError) and kind is not errors.KdaError
    }


def test_every_error_has_its_built_in_base() -> None:
    leaves = _leaves()
    assert set(leaves) == set(BUILT_IN)
    for name, kind in leaves.items():
        assert issubclass(kind, BUILT_IN[name]), name
        wrong = {ValueError, TypeError, RuntimeError} - {BUILT_IN[name]}
        assert not issubclass(kind, tuple(wrong)), name


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_docstring_draws_the_error(name: str) -> None:
    line = next(line for line in (errors.__doc__ or "").splitlines() if f" {name} " in line)
    assert f"({BUILT_IN[name].__name__})" in line


def test_compile_error_survives_pickling_with_its_log() -> None:
    error = errors.CompileError("kda_prefill for sm_90a")
    error.log = "line 3: error"
    error.folder = "/somewhere"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.log, copy.folder) == (str(error), error.log, error.folder)
