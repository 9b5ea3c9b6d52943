"""KernelSpec: plain data, and a key that misses nothing that changes a cubin."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from kda_jit.jit.spec import KernelSpec

SPEC = KernelSpec("sm80/add.cu", ("add",), "sm_80", (("CHUNK", "32"), ("ABC", "1")))
KEY = SPEC.key(("-O3",), (12, 9), "digest")


@pytest.mark.parametrize(
    "change",
    [
        {"file": "sm90/add.cu"},
        {"entries": ("add", "more")},
        {"target": "sm_120a"},
        {"target": "sm_121a"},
        {"defines": (("CHUNK", "16"), ("ABC", "1"))},
        {"defines": ()},
    ],
)
def test_every_field_is_in_the_key(change: dict[str, object]) -> None:
    assert dataclasses.replace(SPEC, **change).key(("-O3",), (12, 9), "digest") != KEY  # type: ignore[arg-type]


def test_flags_compiler_and_sources_are_in_the_key() -> None:
    assert SPEC.key(("-O2",), (12, 9), "digest") != KEY
    assert SPEC.key(("-O3", "-g"), (12, 9), "digest") != KEY
    assert SPEC.key(("-O3",), (13, 0), "digest") != KEY
    assert SPEC.key(("-O3",), (12, 9), "other") != KEY
    assert len(KEY) == 16
    assert int(KEY, 16) >= 0


def test_order_of_defines_does_not_matter() -> None:
    turned = KernelSpec(SPEC.file, SPEC.entries, SPEC.target, SPEC.defines[::-1])
    assert (turned, hash(turned)) == (SPEC, hash(SPEC))
    assert turned.key(("-O3",), (12, 9), "digest") == KEY


def test_specs_that_differ_are_unequal_and_text_counts() -> None:
    other = dataclasses.replace(SPEC, text="void f();")
    assert other != SPEC
    assert hash(other) != hash(SPEC)
    assert "void" not in repr(other)  # a whole kernel has no place in a message


def test_pickled_spec_is_found_again_in_another_process() -> None:
    """String hashes differ between processes; a spec that came by pickle must still be a key."""
    code = (
        "import pickle, sys; from kda_jit.jit.spec import KernelSpec; "
        "spec = pickle.loads(sys.stdin.buffer.read()); "
        "same = KernelSpec('sm80/add.cu', ('add',), 'sm_80', (('CHUNK', '32'), ('ABC', '1'))); "
        "sys.exit(spec != same or {spec: 1}.get(same) != 1)"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pickle.dumps(SPEC), cwd=root, timeout=60, check=False)
    assert done.returncode == 0


def test_label_reads_as_a_sentence_part() -> None:
    assert SPEC.label() == "add for sm_80 (ABC=1, CHUNK=32)"
    assert KernelSpec("s.cu", (), "sm_80").label() == "s.cu for sm_80"
