"""Options, devices and the backends over which laws are parametrised."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from kda_jit.testing.runner import RUNNERS, Runner, why_not

CI_EXAMPLES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda_jit")
    group.addoption(
        "--kda-examples",
        type=int,
        default=None,
        metavar="N",
        help=f"random cases per law; the default is the same {CI_EXAMPLES} each time",
    )
    group.addoption(
        "--kda-device",
        choices=("cpu", "cuda"),
        default=None,
        help="where laws run; the default is cuda if there is one",
    )


def pytest_configure(config: pytest.Config) -> None:
    examples = config.getoption("--kda-examples")
    # An interpreted Triton kernel is a thousand times slower than a compiled one.
    default = 2 if os.environ.get("TRITON_INTERPRET") == "1" else CI_EXAMPLES
    settings.register_profile(
        "kda",
        max_examples=examples or default,
        derandomize=examples is None,
        database=None,
        deadline=None,
        print_blob=True,
    )
    settings.load_profile("kda")
    # The tensors are small, and two busy processes on two cores would wait at every barrier.
    torch.set_num_threads(1)


def _device(config: pytest.Config) -> torch.device:
    name = config.getoption("--kda-device")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    device = _device(config)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU in use"
    lines = [f"kda_jit: laws on {device} ({gpu}), torch {torch.__version__}"]
    for name in RUNNERS:
        reason = why_not(name, device)
        lines.append(f"kda_jit: {name:9s} {'runs' if reason is None else 'skipped: ' + reason}")
    return lines


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `backend: Runner` runs once for each runner there is.

    Not a fixture: Hypothesis would have to be told that it may be shared between examples.
    """
    if "backend" not in metafunc.fixturenames:
        return
    if any("backend" in _names(mark) for mark in metafunc.definition.iter_markers("parametrize")):
        return  # another test's own idea of a backend
    device = _device(metafunc.config)
    runners = []
    for name in RUNNERS:
        reason = why_not(name, device)
        marks = [] if reason is None else [pytest.mark.skip(reason=reason)]
        runners.append(pytest.param(Runner(name, device), id=name, marks=marks))
    metafunc.parametrize("backend", runners)


def _names(mark: pytest.Mark) -> list[str]:
    argnames = mark.args[0] if mark.args else mark.kwargs["argnames"]
    return [n.strip() for n in argnames.split(",")] if isinstance(argnames, str) else argnames


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that this run is for: `--kda-device`, or CUDA where there is one."""
    return _device(request.config)
