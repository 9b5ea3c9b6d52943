"""What MkDocs does not know of this repository; hooks that mkdocs.yml names.

Pages that lie outside of docs/ become part of the site, notebooks as Markdown with their outputs;
links are followed by where a file lies in the repository, and lead to where it lies in the site;
the pictures of saved runs are drawn where docs/benchmarks.md leaves room for them.

    in the repository            in the site
    docs/layer.md                layer.md
    README.md                    index.md
    notebooks                    notebooks.md
    notebooks/01_....ipynb       notebooks/01_....md
    anything else                the same
"""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import latex2mathml.converter
import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

from kda_jit.bench import plot, report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
#: What the site takes from outside of docs/.
OUTSIDE = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "LICENSE",
    "benchmarks/results/**/*.json", "notebooks/*.ipynb",
)  # fmt: skip
#: How docs/generate.py marks the place for the pictures of a run file.
PICTURES = re.compile(r"<!-- pictures of (\S+)\.json -->")
_CAPTIONS = {
    "length": "Speed against the length of sequences",
    "batch": "Speed against the number of sequences",
    "roofline": "Time against the bytes that must move",
    "floor": "Share of the floor in the time",
}
_LINK = re.compile(r"(?<=\]\()[^)#\s]+")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.S)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Adds what lies outside of docs/, and what is drawn."""
    for path in outside():
        if path.suffix == ".ipynb":
            for uri, content in _notebook(path):
                files.append(File.generated(config, uri, content=content))
        else:
            uri = in_site(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    for stem in PICTURES.findall((ROOT / "docs" / "benchmarks.md").read_text()):
        for name, image in pictures(stem).items():
            files.append(File.generated(config, _picture(stem, name), content=image))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Shows pictures, and leads links to where files lie in the site."""
    markdown = PICTURES.sub(_shown_pictures, markdown)
    uri = page.file.src_uri
    source = _sources().get(uri, f"docs/{uri}")
    return _LINK.sub(lambda link: moved(link[0], source, uri), markdown)


def moved(link: str, source: str, uri: str) -> str:
    """A link as the page at `uri` of the site writes it; `source`: where the page lies here."""
    if "://" in link or link.startswith("mailto:"):
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return posixpath.relpath(in_site(path), posixpath.dirname(uri) or ".")


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    known = {"README.md": "index.md", "notebooks": "notebooks.md"}
    found = known.get(path, path.removeprefix("docs/"))
    return found.removesuffix(".ipynb") + ".md" if found.endswith(".ipynb") else found


def outside() -> list[Path]:
    """The files of OUTSIDE."""
    return sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern))


@cache
def _sources() -> dict[str, str]:
    paths = [path.relative_to(ROOT).as_posix() for path in outside()]
    return {in_site(path): path for path in paths}


def _notebook(path: Path) -> Iterator[tuple[str, str | bytes]]:
    """(uri, content) of a page, and of every picture on it."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _FORMULA.sub(_mathml, cell.source)
    body, resources = MarkdownExporter().from_notebook_node(
        notebook, {"output_files_dir": f"{path.stem}_files"}
    )
    page = in_site(path.relative_to(ROOT).as_posix())
    yield page, body
    for name, image in resources["outputs"].items():
        yield posixpath.join(posixpath.dirname(page), name), image


def _mathml(formula: re.Match[str]) -> str:
    """Browsers draw MathML by themselves."""
    block, inline = formula.groups()
    if inline is not None:
        return latex2mathml.converter.convert(inline)
    text = latex2mathml.converter.convert(block.replace("{aligned}", "{align*}"), display="block")
    return f"\n\n{text}\n\n"


@cache
def pictures(stem: str) -> dict[str, bytes]:
    """The pictures of a run file, by name."""
    with tempfile.TemporaryDirectory() as folder:
        found = plot.draw(report.load(RESULTS / f"{stem}.json"), Path(folder))
        return {name: path.read_bytes() for name, path in found.items()}


def _picture(stem: str, name: str) -> str:
    return f"pictures/{stem}-{name}.png"


def _shown_pictures(marker: re.Match[str]) -> str:
    stem = marker[1]
    return "\n\n".join(f"![{_CAPTIONS[name]}]({_picture(stem, name)})" for name in pictures(stem))
