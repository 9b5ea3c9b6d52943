"""Every notebook runs from top to bottom, and is committed as it ran."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

import pytest

from kda_jit import settings
from kda_jit.jit import unavailable_reason

pytest.importorskip("nbclient", reason="needs the package nbclient")
pytest.importorskip("matplotlib", reason="needs the package matplotlib")
pytest.importorskip("ipykernel", reason="needs the package ipykernel")
import nbformat

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAY_FAIL = "raises-exception"
NEED_NVRTC = ("03", "04")


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = _runner()


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failures(notebook: nbformat.NotebookNode) -> list[bool]:
    return [
        any(output.output_type == "error" for output in cell.outputs)
        for cell in code_cells(notebook)
    ]


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = unavailable_reason("sm_80")
    if path.name.startswith(NEED_NVRTC) and reason is not None:
        pytest.skip(f"needs NVRTC: {reason}")
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.setenv(settings.CACHE_DIR.name, str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    done = run.execute(path)
    meant = [MAY_FAIL in cell.metadata.get("tags", []) for cell in code_cells(done)]
    assert failures(done) == meant, "a cell that should fail did not, or the reverse"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert failures(notebook) == [MAY_FAIL in cell.metadata.get("tags", []) for cell in cells]
    assert notebook.metadata["language_info"] == {"name": "python"}
    shown = "".join(str(cell.outputs) for cell in cells)
    places = {str(FOLDER.parent), str(Path.home()), "/tmp/", os.sep + "site-packages"}
    assert not [place for place in places if place in shown], "a path of this machine in an output"


def test_names_select_notebooks_by_their_beginning() -> None:
    assert run.select() == NOTEBOOKS
    assert [path.stem[:2] for path in run.select(["06", "02"])] == ["02", "06"]
    with pytest.raises(SystemExit, match=re.escape("got '99'")):
        run.select(["99"])


def test_a_failing_notebook_is_named_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in ("print('fine')", "1 / 0")]
    path = tmp_path / "01_wrong.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    before = path.read_bytes()
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    assert run.main(["--save"]) == 1
    assert "01_wrong.ipynb: failed" in capsys.readouterr().err
    assert path.read_bytes() == before
