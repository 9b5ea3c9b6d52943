"""Compiling variants: what they take, at which lines they fail, and whose binaries are whose."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kda_jit import lab, settings
from kda_jit.backends.cuda import PORTABLE
from kda_jit.errors import CompileError, InputError
from kda_jit.jit import TARGETS, compile_spec, unavailable_reason
from kda_jit.lab.report import compiled

from .conftest import HEADER, needs_nvrtc

pytestmark = needs_nvrtc

OLD = "    return x + kStep;\n"


def changed(new: str, name: str = "mine", **more: object) -> lab.Variant:
    patch = f"<<<<\n{OLD}====\n{new}>>>>\n"
    return lab.variant(name, base=HEADER, patch=patch, first_line=2, **more)


def test_a_kernel_that_is_launched_otherwise_is_shown_so(kernels: Path) -> None:
    first, second = PORTABLE.launches
    made = changed("    return x;\n", launch={first.entry: (96, 4096)})
    rows = {row.entry: row for row in lab.build(made).rows}
    assert (rows[first.entry].threads, rows[first.entry].smem_dynamic) == (96, 4096)
    assert rows[second.entry].threads == second.block


def test_every_kernel_has_a_row_beside_the_shipped_one(kernels: Path) -> None:
    report = lab.build(changed("    float y[40]; for (auto& e : y) e = x; return y[int(x)];\n"))
    assert report.ok
    assert {row.entry for row in report.rows} == set(PORTABLE.spec("sm_80").entries)
    row = report.rows[0]
    launch = {one.entry: one for one in PORTABLE.launches}[row.entry]
    assert (row.threads, row.smem_dynamic) == (launch.block, launch.smem)
    assert row.build.spec.target == "sm_80"
    assert row.resources.stack > row.shipped.stack == 0
    text = str(report)
    assert re.match(rf"mine: {HEADER}, \d+\.\d\d s\n", text)
    change = row.resources.registers - row.shipped.registers
    assert f"{row.resources.registers} ({change:+d})" in text


def test_errors_are_at_the_lines_of_the_cell(kernels: Path) -> None:
    report = lab.build(changed("    float y = x;\n    return z;\n"), ["sm_80", "sm_90a"])
    assert not report.ok
    assert len(report.errors) == 2
    # Line 1 is the magic, 2 to 4 are the mark, the old line and the mark.
    assert '<cell mine>(6): error: identifier "z" is undefined' in str(report.errors[0])
    assert "redo" not in str(report)


def test_errors_in_untouched_lines_are_at_those_of_the_file(kernels: Path) -> None:
    made = lab.variant(
        "mine", base=HEADER, patch="<<<<\nconstexpr float kStep = 2.0f;\n\n====\n\n\n\n\n>>>>\n"
    )
    (error,) = lab.build(made).errors
    line = (kernels / HEADER).read_text().splitlines().index(OLD.rstrip()) + 1
    assert f'kernels_src/{HEADER}({line}): error: identifier "kStep"' in str(error)


def test_errors_in_a_file_of_its_own_are_at_the_lines_of_the_cell(kernels: Path) -> None:
    made = lab.variant("toy", '#include "common/step.cuh"\nnonsense\n', first_line=2)
    (error,) = lab.build(made).errors
    assert "<cell toy>(3): error" in str(error)


def test_binaries_have_keys_of_their_content(kernels: Path) -> None:
    spec = PORTABLE.spec("sm_80")
    before = compile_spec(spec)
    mine = changed("    return x - kStep;\n")
    with mine.active():
        inside = compile_spec(spec)
    assert inside.key == compiled(mine, spec).key != before.key
    assert compiled(changed("    return x - kStep;\n"), spec).from_cache
    after = compile_spec(spec)
    assert (after.key, after.from_cache) == (before.key, True)
    # Files that do not read the change are the shipped ones.
    other = next(s for s in lab.shipped().specs("sm_90a") if s.file != PORTABLE.file)
    assert compiled(mine, other).key == compile_spec(other).key


def test_shipped_kernels_that_do_not_compile_spoil_nothing(kernels: Path) -> None:
    (kernels / HEADER).write_text("#pragma once\nfloat step(float x) { return y; }\n")
    report = lab.build(
        lab.variant("fixed", "#pragma once\nfloat step(float x) { return x; }\n", base=HEADER)
    )
    assert report.ok
    assert report.rows[0].shipped is None


def test_targets(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = changed("    return x;\n")

    def built(arch: object = None) -> list[str]:
        return [build.spec.target for build in lab.build(mine, arch).builds]

    majors = [t for t in TARGETS if unavailable_reason(t) is None and "110" not in t]
    assert built("all") == majors
    assert built(["sm_90a", "sm_80", "sm_90a"]) == ["sm_90a", "sm_80"]
    assert built("compute_80") == ["compute_80"]
    assert "kda_prepare" in str(lab.build(mine, "compute_80"))
    monkeypatch.setenv(settings.ARCH.name, "sm_86")
    assert built() == ["sm_86"]
    monkeypatch.delenv(settings.ARCH.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert built() == ["sm_89"]
    with pytest.raises(InputError, match=r"Meant sm_90a"):
        built("sm_90")


def test_no_target_is_refused(kernels: Path) -> None:
    with pytest.raises(InputError, match=r"arch: expected a target at least, got none"):
        lab.build(lab.shipped(), [])


def test_a_file_of_its_own_is_told_how_it_is_launched(kernels: Path) -> None:
    text = (
        'extern "C" __global__ void toy(float* x) { __shared__ float s[64]; s[threadIdx.x] = *x; '
    )
    text += "__syncthreads(); *x = s[63 - threadIdx.x]; }\n"
    (row,) = lab.build(lab.variant("toy", text), "sm_90a").rows
    assert (row.threads, row.occupancy, row.resources.smem_static) == (None, None, 256)
    (row,) = lab.build(lab.variant("toy", text, launch=(64, 100_000)), "sm_90a").rows
    assert (row.threads, row.smem_dynamic) == (64, 100_000)
    assert row.occupancy == lab.Occupancy(2, 4 / 64, "smem")


def test_warnings_are_shown_once(kernels: Path) -> None:
    report = lab.build(changed("    int unused;\n    return x;\n"), ["sm_80", "sm_86"])
    (warning,) = report.warnings
    assert "<cell mine>(5): warning" in warning
    assert str(report).count("warning") == 1


@pytest.mark.parametrize(
    "target, threads, registers, smem, want",
    [
        # Worked out by hand from the limits in NVIDIA's programming guide.
        ("sm_80", 128, 32, 0, (16, 1.0, "registers, warps")),
        ("sm_80", 128, 255, 0, (2, 0.125, "registers")),
        ("sm_90a", 128, 238, 98176, (2, 0.125, "registers, smem")),
        ("sm_90a", 384, 168, 216064, (1, 12 / 64, "registers, smem")),
        ("sm_86", 32, 16, 0, (16, 16 / 48, "blocks")),
        ("sm_89", 64, 40, 33920, (2, 4 / 48, "smem")),
        ("sm_120a", 1024, 64, 0, (1, 32 / 48, "registers, warps")),
        ("sm_80", 64, 168, 0, (6, 12 / 64, "registers")),
        ("sm_80", 64, 144, 0, (6, 12 / 64, "registers")),  # 14 warps' worth, but 3 a quarter
        ("sm_80", 1024, 80, 0, (0, 0.0, "registers")),
    ],
)
def test_occupancy(target: str, threads: int, registers: int, smem: int, want: tuple) -> None:
    assert lab.occupancy(target, threads=threads, registers=registers, smem=smem) == want


def test_a_target_without_limits_would_be_noticed() -> None:
    for target in TARGETS:
        assert lab.occupancy(target, threads=32, registers=32, smem=0).blocks > 0


def test_compiled_raises_without_the_command_that_would_build_something_else(
    kernels: Path,
) -> None:
    with pytest.raises(CompileError) as caught:
        compiled(changed("    return z;\n"), PORTABLE.spec("sm_80"))
    assert "redo" not in str(caught.value)
    assert caught.value.log
    assert caught.value.folder
