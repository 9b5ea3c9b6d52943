"""Machine code: found, read, sought through and counted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from kda_jit import lab
from kda_jit.errors import InputError
from kda_jit.lab import disassembler, listing

from .conftest import HEADER, PORTABLE, needs_nvrtc


def _why_none() -> str | None:
    try:
        disassembler.find()
    except lab.DisassemblerError as error:
        return str(error)
    return None


needs_nvdisasm = pytest.mark.skipif(_why_none() is not None, reason=str(_why_none()))

LISTING = """\
//--------------------- .text.first      --------------------------
\t.section\t.text.first,"ax",@progbits
first:
.text.first:
\t//## File "/somewhere/common/step.cuh", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 IMAD.WIDE.U32 R2, R5, 0x4, R2 ;
.L_x_0:
\t//## File "/cwd/<cell mine>", line 7
\t//## File "/somewhere/common/step.cuh", line 9
        /*0020*/         @!UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0030*/                   BRA `(.L_x_0);
\t.section\t.text.second,"ax",@progbits
        /*0000*/                   { HMMA.16816.F32 R4, R8, R12, R4  ;
"""

TOY = """\
extern "C" __global__ void toy(float* x) {
    x[threadIdx.x] = MORE;
}
"""


def toy(more: str, name: str = "toy") -> lab.Variant:
    return lab.variant(name, TOY.replace("MORE", more), first_line=2)


def test_a_listing_is_read_by_kernel_with_its_source_lines() -> None:
    code = listing.parse(LISTING, lambda file: file.rpartition("/")[2])
    assert [i.opcode for i in code["first"]] == ["LDC", "IMAD", "UIADD3", "BRA"]
    assert [i.where for i in code["first"]] == ["step.cuh:3"] * 2 + ["step.cuh:9"] * 2
    assert [i.address for i in code["first"]] == [0, 16, 32, 48]
    assert [(i.opcode, i.where) for i in code["second"]] == [("HMMA", "")]


@needs_nvrtc
@needs_nvdisasm
def test_sass_names_the_lines_of_the_cell(kernels: Path) -> None:
    code = lab.sass(toy("exp2f(x[threadIdx.x])"), arch="sm_90a")
    assert set(code.entries) == {"toy"}
    assert code.mix()["MUFU"] == 1
    (one,) = code.grep("MUFU").entries["toy"]
    assert (one.text.split()[0], one.where) == ("MUFU.EX2", "<cell toy>:3")
    assert set(code.grep("<cell toy>:3").mix()) >= {"MUFU", "LDG", "STG"}
    assert "<cell toy>:3" in str(lab.sass(toy("1"), arch="sm_90a", grep="STG"))


@needs_nvrtc
@needs_nvdisasm
def test_lines_of_kernels_src_are_named_by_their_path_there(kernels: Path) -> None:
    made = lab.variant("mine", (kernels / PORTABLE).read_text() + "// end\n", base=PORTABLE)
    for _ in range(2):  # the second time the binary is from the cache, and of another copy
        found = lab.sass(made, "kda_prepare", arch="sm_80").grep(re.escape(HEADER))
        (one,) = (i for i in found.entries["kda_prepare"] if i.opcode == "FADD")
        assert one.where == f"kernels_src/{HEADER}:5"
        made = lab.variant("mine", made.text, base=PORTABLE)


@needs_nvrtc
@needs_nvdisasm
def test_diff_counts_both_and_begins_with_the_largest_change(kernels: Path) -> None:
    plain, more = toy("x[0]", "plain"), toy("exp2f(x[0]) + exp2f(x[1]) * 3", "more")
    mix = lab.diff(plain, more, arch="sm_90a")
    assert mix.names == ("plain", "more")
    assert mix.counts["MUFU"] == (0, 2)
    assert mix.total == (sum(mix_of(plain).values()), sum(mix_of(more).values()))
    changes = [abs(b - a) for a, b in mix.counts.values()]
    assert changes == sorted(changes, reverse=True)
    assert re.search(r"MUFU +0 +2 +\+2", str(mix))


def mix_of(made: lab.Variant) -> dict[str, int]:
    return lab.sass(made, arch="sm_90a").mix()


@needs_nvrtc
@needs_nvdisasm
def test_diff_of_one_is_with_what_is_shipped(kernels: Path) -> None:
    patch = "<<<<\n    return x + kStep;\n====\n    return exp2f(x);\n>>>>\n"
    mix = lab.diff(lab.variant("mine", base=HEADER, patch=patch), entry="kda_prepare")
    assert mix.names == ("shipped", "mine")
    assert mix.entries == ("kda_prepare",)
    assert mix.counts["MUFU"] == (0, 1)
    with pytest.raises(InputError, match=r"entry: expected one of .*kda_prepare.*, got 'no'"):
        lab.sass(lab.shipped(), "no")
    with pytest.raises(InputError, match=r"compute_80.*PTX"):
        lab.sass(lab.shipped(), arch="compute_80")


def test_without_a_disassembler_there_is_the_command_that_installs_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(disassembler, "_of_wheel", lambda: None)
    monkeypatch.setattr(disassembler, "_of_triton", lambda: Path("/absent"))
    with pytest.raises(lab.DisassemblerError, match=r"pip install nvidia-cuda-nvdisasm"):
        disassembler.find()


def test_the_path_comes_first_then_the_wheel_then_triton(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = "path", "wheel", "triton"
    path, wheel, triton = (tmp_path / name for name in names)
    for each in (path, wheel, triton):
        each.touch()
    monkeypatch.setattr(shutil, "which", lambda name: str(path) if path.exists() else None)
    monkeypatch.setattr(disassembler, "_of_wheel", lambda: wheel)
    monkeypatch.setattr(disassembler, "_of_triton", lambda: triton)
    for each in (path, wheel, triton):
        assert disassembler.find() == each
        each.unlink()


def test_what_a_disassembler_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvdisasm"
    program.write_text("#!/bin/sh\necho 'fatal : unknown arch' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(disassembler, "find", lambda: program)
    with pytest.raises(lab.DisassemblerError, match=r"does not take .*unknown arch"):
        disassembler.disassemble(tmp_path / "x.cubin")
