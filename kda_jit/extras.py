"""What to type for an extra of this package, from an index or from the checkout that runs."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def install(extra: str) -> str:
    """A pip command. No index knows the package of a checkout, whose folder it names instead."""
    if (_ROOT / "pyproject.toml").is_file():
        return f"pip install -e '{_ROOT}[{extra}]'"
    return f"pip install 'kda_jit[{extra}]'"
