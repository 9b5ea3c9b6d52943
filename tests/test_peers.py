"""Other packages: how they are called, and what is done to them before they are judged."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kda_jit.bench.peers import (
    LACKED,
    PEERS,
    Cula,
    Fla,
    FlashKDAPackage,
    find_peers,
    take_first_configurations,
)
from kda_jit.errors import InputError
from kda_jit.reference import recurrent_kda
from kda_jit.testing import Case
from kda_jit.testing.verify import PeerRunner

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


# -- packages that are not here: stand-ins that take what those take -------------------------------

CASES = (
    Case(1, lengths=(5, 0, 33), heads=2),
    Case(2, lengths=(7,), heads=1, initial=False),
    Case(3, lengths=(16, 16), heads=2, packed=False),
)


def by_reference(q, k, v, g, beta, A_log, dt_bias, lower_bound, initial, cu_seqlens):
    """Outputs and states of raw inputs, in float64."""
    found = recurrent_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        initial_state=initial, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    return found.out, found.final_state


def flash_kda_module():
    module = ModuleType("flash_kda")

    def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None,
            final_state=None, cu_seqlens=None):  # fmt: skip
        H, D = q.shape[2:]
        assert scale == D**-0.5
        assert A_log.shape == (H,)
        assert dt_bias.shape == (H, D)
        assert cu_seqlens is None or cu_seqlens.dtype is torch.int64
        found = by_reference(
            q, k, v, g, beta, A_log, dt_bias, lower_bound, initial_state, cu_seqlens
        )
        out.copy_(found[0])
        final_state.copy_(found[1])

    module.fwd = fwd
    module.__version__ = "1"
    return {"flash_kda": module}


def cula_modules():
    package, utils = ModuleType("cula"), ModuleType("cula.utils")

    def prefill(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, safe_gate, lower_bound, cu_seqlens, A_log, dt_bias,
    ):  # fmt: skip
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert use_gate_in_kernel
        assert safe_gate
        assert scale is None
        assert dt_bias.shape == (q.shape[2] * q.shape[3],)
        assert cu_seqlens is None or cu_seqlens.dtype is torch.int32
        assert ((beta > 0) & (beta < 1)).all(), "beta is activated before"
        raw = torch.logit(beta.double()).float()
        return by_reference(q, k, v, g, raw, A_log, dt_bias, lower_bound, initial_state, cu_seqlens)

    utils.get_kda_fused_fwd = lambda device=None: prefill
    package.__version__ = "2"
    return {"cula": package, "cula.utils": utils}


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize(
    "peer, modules", [(FlashKDAPackage(), flash_kda_module), (Cula(), cula_modules)], ids=type
)
def test_a_package_gets_what_it_takes(peer, modules, case, monkeypatch):
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    assert peer.why_not() is None
    assert peer.version.endswith(("1", "2"))
    x = case.tensors(dtype=torch.bfloat16)
    out, final = PeerRunner(peer, torch.device("cpu")).prefill(x)
    want = x.reference()
    assert (out - want.out).abs().max() <= 1e-2 * want.out.abs().max()
    assert (final - want.final_state).abs().max() <= 1e-4 * want.final_state.abs().max()


def test_a_package_that_is_not_here_says_so(monkeypatch):
    for name in ("flash_kda", "cula", "cula.utils", "fla", "fla.ops.kda"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("flash_kda", "cula", "fla"):
        with pytest.raises(InputError, match=f"peer: expected one that runs here, got '{name}'"):
            find_peers([name])


def test_cula_may_have_nothing_for_a_gpu(monkeypatch):
    modules = cula_modules()

    def refuse(device=None):
        raise RuntimeError("Unsupported CUDA compute capability sm_80.")

    modules["cula.utils"].get_kda_fused_fwd = refuse
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert Cula().why_not() == (
        "cuLA has no prefill for this GPU: Unsupported CUDA compute capability sm_80."
    )


def test_peers_are_found_by_their_names():
    assert [peer.name for peer in (find_peers([]) or [])] == []
    for peer in (FlashKDAPackage(), Cula(), Fla()):
        assert peer.name in PEERS
        assert set(LACKED) <= set(peer.lacks)
