"""What is done to other packages before they are judged."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kda_jit.bench.peers import Fla, take_first_configurations

triton = pytest.importorskip("triton")


@pytest.fixture
def tuned():
    """A kernel of three configurations."""
    configs = [triton.Config({}, num_warps=n) for n in (1, 2, 4)]

    @triton.heuristics({"even": lambda args: True})
    @triton.autotune(configs=configs, key=[])
    @triton.jit
    def kernel(x, even: triton.language.constexpr):
        pass

    return kernel


@pytest.fixture
def package(monkeypatch, tuned):
    modules = {name: ModuleType(name) for name in ("pack", "pack.inner", "packed")}
    modules["pack.inner"].kernel = tuned
    modules["pack"].kernel = tuned  # imported from there
    modules["pack"].other = SimpleNamespace(fn=tuned, configs=(1, 2))
    modules["packed"].kernel = SimpleNamespace(configs=[1, 2], fn=None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_a_package_is_left_with_the_first_configuration_of_each_kernel(package):
    assert take_first_configurations("pack") == 1
    assert [c.num_warps for c in package["pack"].kernel.fn.configs] == [1]
    assert package["pack"].other.configs == (1, 2), "no tuner of Triton's"


def test_a_report_says_that_fla_was_not_tuned(monkeypatch):
    monkeypatch.setattr("kda_jit.bench.peers.metadata.version", lambda package: "0.6.0")
    monkeypatch.setattr(Fla, "_untuned", False)
    assert Fla().version == "fla-core 0.6.0"
    assert Fla(tuned=False).version == "fla-core 0.6.0, first configuration of each kernel"
    monkeypatch.setattr(Fla, "_untuned", True)
    assert "first configuration" in Fla().version, "its kernels have only one left"
