"""How the site shows our docstrings; an extension of Griffe, which mkdocs.yml names.

A paragraph with columns, which help() shows as it is written, would run together as Markdown: it
becomes preformatted. Roles of Sphinx become code.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_COLUMNS = re.compile(r"\S {2,}\S")
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Docstrings(Extension):
    """Rewrites each docstring as it is collected."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """`text` with its paragraphs of aligned columns fenced."""
    paragraphs = re.split(r"\n\s*\n", _ROLE.sub(r"`\1`", text).strip())
    return "\n\n".join(map(_fenced, paragraphs))


def _fenced(paragraph: str) -> str:
    lines = paragraph.splitlines()
    indented = all(line.startswith("    ") for line in lines)  # is preformatted as it is
    if indented or not any(_COLUMNS.search(line) for line in lines):
        return paragraph
    return f"```text\n{paragraph}\n```"
