"""`%%kda_kernel` in a shell of IPython's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit import lab

from .conftest import HEADER, needs_nvrtc

interactive = pytest.importorskip(
    "IPython.core.interactiveshell", reason="the magic needs the package ipython"
)
pytestmark = needs_nvrtc

PATCH = """\
<<<<
    return x + kStep;
====
    return x * {};
>>>>
"""


@pytest.fixture
def shell(kernels: Path):
    found = interactive.InteractiveShell()
    found.run_line_magic("load_ext", "kda_jit.lab")
    yield found
    interactive.InteractiveShell.clear_instance()


def test_a_cell_becomes_a_variant_under_its_name(shell) -> None:
    cell = f"%%kda_kernel mine --base {HEADER} --arch sm_80 sm_90a\n{PATCH.format('kStep')}"
    done = shell.run_cell(cell)
    assert done.success
    assert [build.spec.target for build in done.result.builds] == ["sm_80", "sm_90a"]
    made = shell.user_ns["mine"]
    assert isinstance(made, lab.Variant)
    assert (made.file, made.schedule) == (HEADER, None)


def test_a_cell_may_change_how_its_kernels_are_launched(shell) -> None:
    line = f"%%kda_kernel mine --base {HEADER} --arch sm_80 --launch kda_prepare=96,4096"
    done = shell.run_cell(f"{line}\n{PATCH.format('kStep')}")
    assert done.success
    launches = {("sm80/kda_prefill.cu", "kda_prepare"): (96, 4096)}
    assert shell.user_ns["mine"].tree.launches == launches
    rows = {row.entry: row for row in done.result.rows}
    assert (rows["kda_prepare"].threads, rows["kda_prepare"].smem_dynamic) == (96, 4096)


def test_an_error_has_the_line_of_the_cell_and_no_traceback(shell, capsys) -> None:
    cell = f"%%kda_kernel mine --base {HEADER} --arch sm_80\n{PATCH.format('z')}"
    done = shell.run_cell(cell)
    assert not done.success
    shown = capsys.readouterr().out
    number = cell.splitlines().index("    return x * z;") + 1
    assert f'<cell mine>({number}): error: identifier "z" is undefined' in shown
    assert "Traceback" not in shown
    assert "mine" in shell.user_ns  # to look at


def test_a_patch_that_does_not_fit_has_the_line_of_the_cell(shell, capsys) -> None:
    done = shell.run_cell(f"%%kda_kernel mine --base {HEADER}\n<<<<\nno\n====\n>>>>\n")
    assert not done.success
    shown = capsys.readouterr().out
    assert "InputError: patch, line 3: expected the old lines once" in shown
    assert "Traceback" not in shown
    assert "mine" not in shell.user_ns


def test_options_that_make_no_sense_have_no_traceback(shell, capsys) -> None:
    for line in (
        'toy "', "toy --nope", "--arch sm_80 toy", "toy --threads 0", "toy --launch kda_prepare=96",
        f"toy --base {HEADER} --whole --launch kda_fused=96,0",
        f"toy --base {HEADER} --whole --launch kda_prepare=96,0 --launch kda_prepare=64,0",
        f"toy --base {HEADER} --whole --launch kda_prepare=96,0 --threads 96",
    ):  # fmt: skip
        done = shell.run_cell(f'%%kda_kernel {line}\nextern "C" __global__ void toy() {{}}\n')
        assert not done.success
        shown = "".join(capsys.readouterr())
        assert "Error: " in shown
        assert "Traceback" not in shown


def test_whole_files_and_files_of_their_own(shell, kernels: Path) -> None:
    text = (kernels / HEADER).read_text()
    whole = f"%%kda_kernel whole --base {HEADER} --whole --schedule portable\n{text}"
    assert shell.run_cell(whole).success
    assert shell.user_ns["whole"].text == text
    assert shell.user_ns["whole"].schedule == "portable"
    toy = "%%kda_kernel toy --threads 64 --smem 1024 --arch sm_80\n"
    toy += 'extern "C" __global__ void toy() {}\n'
    (row,) = shell.run_cell(toy).result.rows
    assert (row.entry, row.threads, row.smem_dynamic) == ("toy", 64, 1024)
