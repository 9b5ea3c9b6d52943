"""Environment variables: the table is whole, values are read live, blanks are unset."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kda_jit import settings
from kda_jit.errors import InputError

ACCESSORS: dict[str, tuple[Callable[[], object], object]] = {
    "KDA_JIT_BACKEND": (settings.backend, "auto"),
    "KDA_JIT_ARCH": (settings.arch, None),
    "KDA_JIT_SCHEDULE": (settings.schedule, "auto"),
    "KDA_JIT_KERNELS_SRC": (settings.kernels_src, None),
    "KDA_JIT_FLASHKDA_SO": (settings.flashkda_so, None),
    "KDA_JIT_VLLM": (settings.vllm, False),
    "KDA_JIT_CAPTURE": (settings.capture, None),
    "KDA_JIT_CAPTURE_CALLS": (settings.capture_calls, range(4)),
    "KDA_JIT_CAPTURE_MIB": (settings.capture_bytes, 512 << 20),
}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_table_names_every_variable_that_the_package_mentions() -> None:
    named = {setting.name for setting in settings.SETTINGS}
    assert named == {*ACCESSORS, "KDA_JIT_CACHE_DIR"}
    package = Path(settings.__file__).parent
    for file in package.rglob("*.py"):
        mentioned = set(re.findall(r"KDA_JIT_[A-Z_]+", file.read_text(encoding="utf-8")))
        assert mentioned <= named, f"{file.name} mentions {sorted(mentioned - named)}"


@pytest.mark.parametrize("setting", settings.SETTINGS, ids=lambda s: s.name)
def test_each_setting_says_one_sentence(setting: settings.Setting) -> None:
    assert setting.meaning.endswith(".")
    assert len(setting.meaning.split()) > 4
    assert setting.default


@pytest.mark.parametrize("name", sorted(ACCESSORS))
def test_unset_and_blank_give_the_default(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    accessor, default = ACCESSORS[name]
    assert accessor() == default
    monkeypatch.setenv(name, "  ")
    assert accessor() == default


def test_values_are_read_live_and_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_JIT_BACKEND", " Triton ")
    monkeypatch.setenv("KDA_JIT_ARCH", "SM_80")
    monkeypatch.setenv("KDA_JIT_SCHEDULE", "Split")
    monkeypatch.setenv("KDA_JIT_KERNELS_SRC", "/Some/Where")
    assert settings.backend() == "triton"
    assert settings.arch() == "sm_80"
    assert settings.schedule() == "split"
    assert settings.kernels_src() == Path("/Some/Where")  # a path keeps its case
    monkeypatch.setenv("KDA_JIT_BACKEND", "torch")
    assert settings.backend() == "torch"


@pytest.mark.parametrize("value, meant", [("on", True), ("1", True), ("OFF", False), ("0", False)])
def test_the_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch, value: str, meant: bool) -> None:
    monkeypatch.setenv("KDA_JIT_VLLM", value)
    assert settings.vllm() is meant


def test_a_switch_in_between_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_JIT_VLLM", "maybe")
    with pytest.raises(InputError, match="KDA_JIT_VLLM: expected on, off, 1 or 0, got 'maybe'"):
        settings.vllm()


def test_calls_to_capture_are_a_count_or_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_JIT_CAPTURE_CALLS", "7")
    assert settings.capture_calls() == range(7)
    monkeypatch.setenv("KDA_JIT_CAPTURE_CALLS", "100:104")
    assert settings.capture_calls() == range(100, 104)


@pytest.mark.parametrize(
    "name, accessor",
    [
        ("KDA_JIT_CAPTURE_CALLS", settings.capture_calls),
        ("KDA_JIT_CAPTURE_MIB", settings.capture_bytes),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "4:4", "many", "1.5", "²"])
def test_numbers_of_a_capture_are_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, accessor: Callable[[], object], value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"{name}: expected a .*, got {value!r}"):
        accessor()


def test_a_capture_off_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDA_JIT_CAPTURE", "Off")
    assert settings.capture() is None


def test_cache_dir_prefers_our_variable_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert settings.cache_dir() == Path("/home/someone/.cache/kda_jit")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/void")
    assert settings.cache_dir() == Path("/home/someone/.cache/kda_jit")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    assert settings.cache_dir() == Path("/var/xdg/kda_jit")
    monkeypatch.setenv("KDA_JIT_CACHE_DIR", "~/kernels")
    assert settings.cache_dir() == Path("/home/someone/kernels")


def test_without_a_home_the_cache_is_no_folder_named_like_the_word_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user nobody knows
    assert settings.cache_dir() == Path("/.cache/kda_jit")
