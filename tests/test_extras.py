"""What to type for an extra."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_jit import extras

HERE = Path(__file__).resolve().parent.parent


def test_of_a_checkout_it_is_the_folder() -> None:
    assert extras.install("cuda12") == f"pip install -e '{HERE}[cuda12]'"


def test_elsewhere_it_is_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "_ROOT", tmp_path)
    assert extras.install("cli") == "pip install 'kda_jit[cli]'"
