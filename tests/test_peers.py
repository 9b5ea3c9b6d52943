"""What is done to other packages before they are judged."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kda_jit.bench.peers import Fla, take_first_configurations


@pytest.fixture
def package(monkeypatch):
    tuner = SimpleNamespace(configs=[1, 2, 3], fn=SimpleNamespace(fn=len))
    heuristic = SimpleNamespace(fn=tuner)
    modules = {name: ModuleType(name) for name in ("pack", "pack.inner", "packed")}
    modules["pack.inner"].kernel = heuristic
    modules["pack"].kernel = heuristic  # imported from there
    modules["packed"].kernel = SimpleNamespace(configs=[1, 2], fn=None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_a_package_is_left_with_the_first_configuration_of_each_kernel(package):
    assert take_first_configurations("pack") == 1
    assert package["pack"].kernel.fn.configs == [1]
    assert package["packed"].kernel.configs == [1, 2], "another package"


def test_a_report_says_that_fla_was_not_tuned(monkeypatch):
    monkeypatch.setattr("kda_jit.bench.peers.metadata.version", lambda package: "0.6.0")
    assert Fla().version == "fla-core 0.6.0"
    assert Fla(tuned=False).version == "fla-core 0.6.0, first configuration of each kernel"
