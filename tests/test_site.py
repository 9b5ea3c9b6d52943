"""The site: its navigation and links agree with the files, and it builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kda_jit

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NEEDS = ("material", "mkdocs", "mkdocstrings", "nbconvert", "latex2mathml", "matplotlib")


def needs_site(function: object) -> object:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    reason = f"needs the extra docs: no {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)(function)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nav() -> list[str]:
    _, _, text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    return re.findall(r"(\S+\.md)$", text, re.M)


def source_of(page: str) -> Path:
    """The file behind a page of the navigation."""
    if page == "index.md":
        return ROOT / "README.md"
    if page.startswith("notebooks/"):
        return (ROOT / page).with_suffix(".ipynb")
    return DOCS / page if (DOCS / page).exists() else ROOT / page


def test_the_navigation_is_the_files() -> None:
    listed = [source_of(page) for page in nav()]
    assert [path for path in listed if not path.is_file()] == []
    assert len(set(listed)) == len(listed)
    there = {*DOCS.rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "README.md"}
    assert sorted(there - set(listed)) == []


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    named = set(re.findall(r"^::: kda_jit\.(\S+)$", text, re.M))
    errors = {name for name in kda_jit.__all__ if hasattr(kda_jit.errors, name)}
    assert {"errors", "lab", "reference", "testing"} <= named
    assert set(kda_jit.__all__) - errors - {"__version__"} <= named
    assert named - {"errors", "lab", "testing"} <= set(kda_jit.__all__)


def test_code_of_the_quick_start_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("rich", reason="kda_jit.lab needs the package rich")
    pytest.importorskip("safetensors", reason="captured calls are safetensors")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "quickstart.md").read_text(), re.S)
    assert len(blocks) == 3
    scope: dict = {}
    for code in blocks:
        exec(compile(code, "quickstart.md", "exec"), scope)
    assert scope["out"].shape == (2, 1, 2, 128)
    pool = scope["pool"]
    assert [slot for slot in range(8) if pool[slot].any()] == [2, 5]
    text = capsys.readouterr().out
    assert text.count("torch.Size") == 2
    assert "\ntanh_sigmoid: common/numerics.cuh, " in text
    assert len(list(Path("calls").glob("prefill-*.safetensors"))) == 1


@needs_site
@pytest.mark.parametrize(
    "link, source, uri, moved",
    [
        ("docs/layer.md", "README.md", "index.md", "layer.md"),
        ("notebooks", "README.md", "index.md", "notebooks.md"),
        ("LICENSE", "README.md", "index.md", "LICENSE"),
        ("../README.md", "docs/quickstart.md", "quickstart.md", "index.md"),
        ("maths.md", "docs/kernels/prepare.md", "kernels/prepare.md", "maths.md"),
        ("../cli.md", "docs/api/lab.md", "api/lab.md", "../cli.md"),
        ("../benchmarks/results/x.json", "docs/benchmarks.md", "benchmarks.md",
         "benchmarks/results/x.json"),
        ("../notebooks/01_a.ipynb", "docs/notebooks.md", "notebooks.md", "notebooks/01_a.md"),
        ("01_a_files/x.png", "notebooks/01_a.ipynb", "notebooks/01_a.md", "01_a_files/x.png"),
        ("https://a.b/c.md", "README.md", "index.md", "https://a.b/c.md"),
    ],
)  # fmt: skip
def test_links_lead_to_where_files_lie_in_the_site(
    link: str, source: str, uri: str, moved: str
) -> None:
    assert load("site_hooks").moved(link, source, uri) == moved


@needs_site
def test_columns_of_a_docstring_stay_under_each_other() -> None:
    text = (
        "Sums, see :func:`a.b`.\n\nx    [N]  one\nlong [N]  two\n\n    indented  as  code\n\nEnd."
    )
    assert load("docstrings").as_markdown(text) == (
        "Sums, see `a.b`.\n\n```text\nx    [N]  one\nlong [N]  two\n```\n\n"
        "    indented  as  code\n\nEnd."
    )


@needs_site
def test_the_site_builds_without_a_warning_and_shows_what_it_should(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in nav():
        assert (tmp_path / page).with_suffix(".html").is_file(), page
    shown = {x.relative_to(tmp_path).as_posix(): x.read_text() for x in tmp_path.rglob("*.html")}
    for page, text in shown.items():
        parts = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="([^"]+)"', text)
        assert [part for part in parts if part.startswith("http")] == [], page
        images = re.findall(r'<img [^>]*src="([^"#:]+)"', text)
        folder = (tmp_path / page).parent
        assert [x for x in images if not (folder / x).is_file()] == [], page

    pictures = re.findall(r'src="pictures/[^"]+-(\w+)\.png"', shown["benchmarks.html"])
    assert {"length", "batch", "roofline", "floor"} <= set(pictures)
    notebook = shown["notebooks/01_recurrence.html"]
    assert notebook.count("<math") > 10
    assert "<mtable" in notebook
    assert "$$" not in notebook
    assert "<img" in notebook
    prefill = shown["api/prefill.html"]
    assert 'id="kda_jit.prefill"' in prefill
    assert re.search(r"lower_bound  in \[-5, 0\), or None", prefill), "columns ran together"
    assert "InputTypeError" in shown["api/errors.html"]
    assert 'id="kda_jit.testing.assert_close"' in shown["api/testing.html"]
    assert 'id="kda_jit.lab.variant"' in shown["api/lab.html"]
