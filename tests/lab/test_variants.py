"""A variant is a copy with one change: named, checked, frozen, and active where it is asked for."""

from __future__ import annotations

import gc
import pickle
import re
import shutil
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

from kda_jit import lab
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.errors import InputError
from kda_jit.jit import sources
from kda_jit.jit.module import changed_launches

from .conftest import HEADER, HEADER_TEXT, PORTABLE, UNREAD, needs_nvrtc

PATCH = "<<<<\nconstexpr float kStep = 2.0f;\n====\nconstexpr float kStep = 3.0f;\n>>>>\n"
PATCHED = HEADER_TEXT.replace("2.0f", "3.0f")


@pytest.fixture
def changed(kernels: Path) -> lab.Variant:
    return lab.variant("three", base=HEADER, patch=PATCH)


def test_a_patch_changes_the_copy_and_not_the_source(changed: lab.Variant, kernels: Path) -> None:
    assert changed.text == PATCHED
    assert changed.base == (kernels / HEADER).read_text() == HEADER_TEXT
    assert "kStep = 3.0f" in (changed.tree.folder / HEADER).read_text()
    assert (changed.tree.folder / PORTABLE).read_text() == (kernels / PORTABLE).read_text()
    assert changed.diff.startswith(f"--- kernels_src/{HEADER}\n")
    assert "-constexpr float kStep = 2.0f;\n+constexpr float kStep = 3.0f;\n" in changed.diff


def test_a_whole_text_takes_the_place_of_its_base(kernels: Path) -> None:
    made = lab.variant("whole", PATCHED, base=HEADER, first_line=2)
    assert made.text == PATCHED
    assert (made.tree.folder / HEADER).read_text() == f'#line 2 "<cell whole>"\n{PATCHED}'


def test_later_edits_of_the_sources_do_not_reach_it(changed: lab.Variant, kernels: Path) -> None:
    (kernels / PORTABLE).write_text("// gone\n")
    assert "gone" not in (changed.tree.folder / PORTABLE).read_text()


def test_it_is_active_in_its_block_in_its_thread(changed: lab.Variant, kernels: Path) -> None:
    seen: list[Path] = []
    with changed.active() as same:
        assert same is changed
        assert sources.root() == changed.tree.folder.resolve()
        thread = threading.Thread(target=lambda: seen.append(sources.root()))
        thread.start()
        thread.join()
    assert seen == [sources.root()] == [kernels]


def test_schedules_are_those_that_read_the_file(changed: lab.Variant, kernels: Path) -> None:
    portable = tuple(name for name, s in SCHEDULES.items() if s.file == PORTABLE)
    assert changed.schedules == portable
    assert [spec.file for spec in changed.specs("sm_90a")] == [PORTABLE]
    assert lab.shipped().schedules == tuple(SCHEDULES)
    hopper = SCHEDULES["hopper"].file
    other = lab.variant("other", (kernels / hopper).read_text(), base=hopper)
    with pytest.raises(InputError, match=r"arch: .*hopper.* runs, got 'sm_80'"):
        other.specs("sm_80")


def test_before_is_what_it_was_made_from(changed: lab.Variant, kernels: Path) -> None:
    (kernels / HEADER).write_text("#pragma once\n")
    before = changed.before()
    assert (before.tree.folder / HEADER).read_text() == HEADER_TEXT
    assert (before.name, before.file, before.text, before.diff) == ("shipped", None, "", "")


def test_what_is_made_inside_the_block_of_another_would_be_lost_with_it(
    changed: lab.Variant,
) -> None:
    for make in (lab.shipped, lambda: lab.variant("x", base=HEADER, patch=PATCH)):
        with changed.active(), pytest.raises(InputError, match=r"a copy that belongs to a variant"):
            make()


def test_a_link_to_nowhere_is_left_out(kernels: Path) -> None:
    (kernels / ".#step.cuh").symlink_to("nobody@nowhere.1234")
    assert not (lab.shipped().tree.folder / ".#step.cuh").is_symlink()


def test_a_copy_that_fails_leaves_nothing_and_says_why(
    changed: lab.Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(changed.tree.folder)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "kernels_src"))
    before = sorted((tmp_path / "kernels_src").iterdir())
    with pytest.raises(InputError, match=r"kernels_src: expected to be copied, got .*No such file"):
        changed.before()
    gc.collect()
    assert sorted((tmp_path / "kernels_src").iterdir()) == before


def test_a_source_that_is_not_utf8_is_refused(kernels: Path) -> None:
    (kernels / HEADER).write_bytes(b"// caf\xe9\n")
    with pytest.raises(InputError, match=rf"file: expected .*{HEADER} to be UTF-8"):
        lab.variant("x", base=HEADER, patch=PATCH)


@needs_nvrtc
def test_the_example_of_the_module_compiles() -> None:
    patch = re.search(r"^ +<<<<$.*?^ +>>>>$", lab.__doc__, re.M | re.S)[0]
    made = lab.variant(
        "tanh_sigmoid",
        base="common/numerics.cuh",
        patch=textwrap.dedent(patch),
        schedule="portable",
    )
    assert lab.build(made, ["sm_80", "sm_90a"]).ok


@needs_nvrtc
def test_another_number_of_stages_takes_another_launch() -> None:
    """The second example of the module."""
    smem = int(re.search(r'launch={"kda_recurrence": \(384, (\d+)\)}', lab.__doc__)[1])
    patch = "<<<<\n{}\n====\n{}\n>>>>\n".format
    stages = patch("constexpr int kStages = 6;", "constexpr int kStages = 5;")
    old = "static_assert(sizeof(RecurrenceSmem) == {}, ".format
    held = "<<<<\n{0}{2}\n====\n{1}{2}\n>>>>\n".format(
        old(216064), old(smem), '"keep kda_jit/backends/cuda.py in step");'
    )
    made = lab.variant(
        "five_stages",
        base="sm90/kda_prefill.cu",
        patch=stages + held,
        launch={"kda_recurrence": (384, smem)},
    )
    report = lab.build(made, "sm_90a")
    assert report.ok, report
    assert {row.entry: row.smem_dynamic for row in report.rows}["kda_recurrence"] == smem


def test_what_it_loaded_does_not_travel_with_it(changed: lab.Variant) -> None:
    changed.tree.loaded["spec", 0] = threading.Lock()  # no more to be pickled than a module
    copy = pickle.loads(pickle.dumps(changed))
    assert copy.tree.folder == changed.tree.folder
    assert copy.tree.loaded == {}
    assert copy.diff == changed.diff


def test_its_folder_goes_with_it(changed: lab.Variant) -> None:
    made = lab.shipped()
    folder = made.tree.folder
    assert folder.is_dir()
    del made
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"name": "two words", "source": ""}, r"name: expected an identifier"),
        ({"name": "x"}, r"expected one of them, got both or none"),
        ({"name": "x", "source": "", "patch": PATCH}, r"expected one of them, got both or none"),
        ({"name": "x", "patch": PATCH}, r"base: expected a file of kernels_src"),
        ({"name": "x", "base": "sm80/no.cu", "source": ""}, rf"base: .*{HEADER}.*'sm80/no\.cu'"),
        ({"name": "x", "base": "../kernels_src/" + HEADER, "source": ""}, r"base: .*'\.\./kernels"),
        ({"name": "x", "base": HEADER, "source": "", "schedule": "no"}, r"schedule: .*portable"),
        (
            {"name": "x", "base": UNREAD, "source": "", "schedule": "portable"},
            r"schedule: expected one that reads common/unread\.cuh \(none\)",
        ),
        ({"name": "x", "source": "", "schedule": "portable"}, r"schedule: expected None"),
        (
            {"name": "x", "base": HEADER, "source": "", "launch": (32, 0)},
            r"launch: expected numbers by entry with a base",
        ),
        (
            {"name": "x", "base": HEADER, "source": "", "launch": {"kda_fused": (32, 0)}},
            r"launch: expected entries .* \(kda_prepare, kda_recurrence\), got kda_fused",
        ),
        (
            {"name": "x", "base": HEADER, "source": "", "launch": {"kda_prepare": (0, 0)}},
            r"launch: expected 1 to 1024 threads",
        ),
        ({"name": "class", "source": ""}, r"name: expected an identifier .*, got 'class'"),
        ({"name": None, "source": ""}, r"name: expected an identifier .*, got None"),
        ({"name": "x", "source": "", "launch": (0, 0)}, r"launch: expected 1 to 1024 threads"),
        ({"name": "x", "source": "", "launch": (32, -1)}, r"launch: expected 1 to 1024 threads"),
        ({"name": "x", "source": "", "launch": 32}, r"launch: expected 1 to 1024 .* got 32"),
        ({"name": "x", "source": "", "launch": (32, 10**6)}, r"launch: .* 0 to \d+ bytes"),
        ({"name": "x", "source": "", "launch": (True, 0)}, r"as plain ints, got \(True, 0\)"),
        (
            {"name": "x", "base": HEADER, "source": "", "launch": {None: (32, 0), "a": (32, 0)}},
            r"launch: expected numbers by entry",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(kernels: Path, arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        lab.variant(**arguments)


def test_launches_are_part_of_a_variant_and_of_its_copies(kernels: Path) -> None:
    made = lab.variant("x", base=HEADER, patch=PATCH, launch={"kda_prepare": (96, 4096)})
    launch = {("sm80/kda_prefill.cu", "kda_prepare"): (96, 4096)}
    assert made.tree.launches == launch
    assert made.launch is None
    assert pickle.loads(pickle.dumps(made)).tree.launches == launch
    assert made.before().tree.launches == {}
    with made.active():
        assert changed_launches() == launch
    assert changed_launches() == {}


def test_an_entry_that_several_files_have_is_launched_otherwise_in_one() -> None:
    """Of the real kernels: a header that portable and hopper read, both with a kda_recurrence."""
    header = "common/prepare.cuh"
    text = sources.read(header).text
    launch = {"kda_recurrence": (96, 4096)}
    words = r"got kda_recurrence, which is in sm80/kda_prefill\.cu and in sm90/kda_prefill\.cu"
    with pytest.raises(InputError, match=words):
        lab.variant("x", text, base=header, launch=launch)
    for schedule in ("portable", "hopper"):
        made = lab.variant("x", text, base=header, launch=launch, schedule=schedule)
        with made.active():
            changed = {
                name
                for name, of in SCHEDULES.items()
                for one in of.launches
                if one.changed(of.file, changed_launches()) != one
            }
        assert changed == {schedule}
    with pytest.raises(InputError, match=r"expected entries of hopper \(.*\), got kda_fused"):
        lab.variant("x", text, base=header, launch={"kda_fused": (96, 0)}, schedule="hopper")


def test_a_file_of_its_own_has_nothing_shipped_beside_it(kernels: Path) -> None:
    made = lab.variant("toy", "// nothing\n")
    assert made.stands_alone
    assert [spec.file for spec in made.specs("sm_80")] == ["toy.cu"]
    with pytest.raises(InputError, match=r"nothing shipped"):
        made.before()


def test_a_header_that_nobody_reads_builds_nothing(kernels: Path) -> None:
    made = lab.variant("x", "#pragma once\n", base=UNREAD)
    with pytest.raises(InputError, match=rf"no schedule reads {UNREAD}"):
        lab.build(made)
