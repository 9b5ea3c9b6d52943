"""Compute capability to target, and which target runs where."""

from __future__ import annotations

import pytest

from kda_jit.errors import InputError
from kda_jit.jit import arch

OWN = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}


@pytest.mark.parametrize("cc", sorted(OWN))
def test_device_gets_the_target_of_its_exact_capability(cc: tuple[int, int]) -> None:
    found = arch.arch_for(cc)
    assert found is not None
    assert (found.target, found.cc) == (OWN[cc], cc)
    assert found.why_not_on(cc) is None
    assert arch.why_no_arch(cc) is None


@pytest.mark.parametrize("cc", [(7, 5), (9, 1), (10, 1), (12, 2), (13, 0)])
def test_unknown_capability_has_no_target_but_a_reason(cc: tuple[int, int]) -> None:
    assert arch.arch_for(cc) is None
    reason = arch.why_no_arch(cc)
    assert reason is not None
    assert f"{cc[0]}.{cc[1]}" in reason
    assert "9.0" in reason
    assert "12.1" in reason


@pytest.mark.parametrize(
    "target, cc, runs",
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_80", (9, 0), False),  # machine code never crosses a major
        ("sm_86", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (12, 0), False),
        ("sm_120a", (12, 1), False),
        ("compute_80", (8, 0), True),
        ("compute_80", (9, 0), True),
        ("compute_80", (12, 1), True),
        ("compute_80", (7, 5), False),
    ],
)
def test_where_a_target_runs(target: str, cc: tuple[int, int], runs: bool) -> None:
    reason = arch.arch_named(target).why_not_on(cc)
    assert (reason is None) == runs
    if reason is not None:
        assert target in reason
        assert f"{cc[0]}.{cc[1]}" in reason


def test_shared_memory_is_what_the_hardware_has() -> None:
    sizes = {name: arch.arch_named(name).smem_per_block for name in arch.TARGETS}
    assert {name for name, size in sizes.items() if size == 232448} == {
        "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_110a",
    }  # fmt: skip
    assert {name for name, size in sizes.items() if size == 101376} == {
        "sm_86", "sm_89", "sm_120a", "sm_121a",
    }  # fmt: skip
    assert {name for name, size in sizes.items() if size == 166912} == {"sm_80", "sm_87"}


def test_wgmma_is_hopper_alone_and_tcgen05_data_centre_blackwell() -> None:
    def having(feature: str) -> set[str]:
        return {name for name in arch.TARGETS if feature in arch.arch_named(name).features}

    assert having("wgmma") == {"sm_90a"}
    assert having("tcgen05") == {"sm_100a", "sm_100f", "sm_103a", "sm_110a"}
    assert having("mma") == set(arch.TARGETS)


def test_target_lists_are_disjoint_and_complete() -> None:
    assert set(OWN.values()) | {"sm_100f"} == set(arch.TARGETS)
    assert arch.PTX_TARGETS == ("compute_80",)
    assert arch.arch_named("compute_80").is_ptx
    assert not any(arch.arch_named(name).is_ptx for name in arch.TARGETS)


@pytest.mark.parametrize(
    "name, target",
    [
        ("h100", "sm_90a"),
        ("NVIDIA H200", "sm_90a"),
        ("RTX 4090", "sm_89"),
        ("dgx-spark", "sm_121a"),
    ],
)
def test_the_name_of_a_gpu_is_answered_with_its_target(name: str, target: str) -> None:
    with pytest.raises(InputError, match=rf"got {name!r}\. That GPU's is {target}\."):
        arch.arch_named(name)


def test_every_target_that_is_answered_exists() -> None:
    assert set(arch._PRODUCTS.values()) <= set(arch.TARGETS)


def test_plain_sm_90_is_refused_with_the_right_name() -> None:
    with pytest.raises(InputError, match=r"got 'sm_90'\. Meant sm_90a\?"):
        arch.arch_named("sm_90")
    for target, meant in (
        ("90a", "sm_90a"),
        ("SM90", "sm_90a"),
        ("100f", "sm_100f"),
        ("80", "sm_80"),
    ):
        with pytest.raises(InputError, match=rf"got '{target}'\. Meant {meant}\?"):
            arch.arch_named(target)
    with pytest.raises(InputError, match=r"sm_80.*compute_80.*got 'sm_75'") as caught:
        arch.arch_named("sm_75")
    assert "Meant" not in str(caught.value)
