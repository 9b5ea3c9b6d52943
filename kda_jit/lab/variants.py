"""A variant: kernels_src as it is, but for one file. Frozen, and nobody's default."""

from __future__ import annotations

import contextlib
import difflib
import keyword
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kda_jit.backends.cuda import SCHEDULES
from kda_jit.errors import InputError
from kda_jit.jit import TARGETS, KernelSpec, SourceTree, arch_named, sources

from . import patch as patches
from .patch import Patched

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FOLDER = "kda_jit_lab-"  # how the names of copies begin
_MOST_THREADS = 1024  # of a block
_MOST_SMEM = max(arch_named(target).smem_per_block for target in TARGETS)


@dataclass(frozen=True, eq=False)
class Variant:
    """Kernels with one file changed. Made by `variant` and `shipped`.

    name      what reports call it
    file      path under kernels_src of the file it changes, or of one it adds; None: no change
    base      what that file held, with line ends of one character; None where there was none
    changed   what it holds now; None: no change
    schedule  the schedule of the cuda backend that it is for; None: every one that reads the file
    origin    the kernels_src that was copied
    tree      the copy with the change. Edits to kernels_src do not reach it
    launch    threads and bytes of dynamic shared memory for entries that no schedule launches;
              those of others that are launched otherwise than shipped are the tree's
    """

    name: str
    file: str | None
    base: str | None
    changed: Patched | None
    schedule: str | None
    origin: Path
    tree: SourceTree
    launch: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Variant({self.name!r}, {self.file or 'kernels_src as it is'})"

    @contextlib.contextmanager
    def active(self) -> Iterator[Variant]:
        """Calls inside the block run these kernels; those of other threads do not."""
        with self.tree.active():
            yield self

    @property
    def text(self) -> str:
        """The changed file as one would write it; empty where nothing is changed."""
        return "" if self.changed is None else self.changed.text

    @property
    def diff(self) -> str:
        """From the shipped file to this one, unified; empty where they are equal."""
        name = f"kernels_src/{self.file}"
        lines = difflib.unified_diff(
            [f"{line}\n" for line in patches.lines_of(self.base or "")],
            [f"{line}\n" for line in patches.lines_of(self.text)],
            name if self.base is not None else "/dev/null",
            name,
        )
        return "".join(lines)

    def before(self) -> Variant:
        """The kernels that this was made from, to compare it with; they are called shipped."""
        if self.stands_alone:
            raise InputError(
                f"variant: expected one with a base in kernels_src, got {self!r}. There is nothing "
                "shipped to compare it with; name another variant."
            )
        copy = _copy(self.tree.folder)
        made = Variant("shipped", None, None, None, self.schedule, self.origin, copy)
        if self.file is not None:
            (made.tree.folder / self.file).write_bytes((self.base or "").encode())
        return made

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Schedules of the cuda backend that read the file (all, where nothing is changed)."""
        if self.file is None:
            return tuple(SCHEDULES)
        return tuple(name for name in SCHEDULES if self._reads(name))

    @property
    def stands_alone(self) -> bool:
        """True for a file of its own, which the cuda backend knows nothing of."""
        return self.file is not None and self.base is None

    def specs(self, target: str) -> list[KernelSpec]:
        """What there is to build for a target. Raises InputError where nothing is."""
        if self.file is not None and self.stands_alone:
            return [KernelSpec(self.file, (), arch_named(target).target)]
        if not self.schedules:
            raise InputError(
                f"base: expected a file that is built, but no schedule reads {self.file}."
            )
        major = arch_named(target).cc[0]
        wanted = self.schedules if self.schedule is None else (self.schedule,)
        found = [SCHEDULES[name] for name in wanted if major in SCHEDULES[name].capabilities]
        if not found:
            raise InputError(
                f"arch: expected one on which {' or '.join(wanted)} runs, got {target!r}."
            )
        return list(dict.fromkeys(schedule.spec(target) for schedule in found))

    def called(self, file: str) -> str:
        """A source file as reports call it.

        A binary from the cache may name the folder of another copy, and what a #line directive
        calls a file comes behind the folder that the compiler was started in.
        """
        if "<cell " in file:
            return file[file.index("<cell ") :]
        parts = Path(file).parts
        for i in range(len(parts)):
            if (self.tree.folder / Path(*parts[i:])).is_file() and not Path(parts[i]).is_absolute():
                return Path("kernels_src", *parts[i:]).as_posix()
        return file

    def _reads(self, schedule: str) -> bool:
        read = sources.read(SCHEDULES[schedule].file, folder=self.tree.folder)
        return self.file in dict(read.files)


def variant(
    name: str,
    source: str | None = None,
    *,
    base: str | None = None,
    patch: str | None = None,
    schedule: str | None = None,
    launch: tuple[int, int] | Mapping[str, tuple[int, int]] | None = None,
    first_line: int = 1,
) -> Variant:
    """A variant of the kernels in use. Nothing is compiled yet.

    name      a Python identifier; errors call lines of the text `<cell name>`
    source    the whole text of a file: in place of `base`, else of a file of its own, NAME.cu,
              which may include the headers of kernels_src
    base      the file of kernels_src to change, such as "sm80/kda_prefill.cu"
    patch     instead of a source: blocks of `<<<<`, old lines, `====`, new lines, `>>>>`
    schedule  the schedule to build, check and time; None: those that read the file
    launch    (threads, bytes of dynamic shared memory), plain ints, of the kernels of a file of
              its own; with a base, by entry, where it is another number than shipped. An entry that
              several files have takes a schedule, too
    first_line  the number of the text's first line, in messages

    Raises InputError where the patch does not fit, or a name is none, and inside the block of
    another variant.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise InputError(f"name: expected an identifier such as fewer_stages, got {name!r}.")
    _check_schedule(schedule)
    if (source is None) == (patch is None):
        raise InputError("source, patch: expected one of them, got both or none.")
    origin = _origin()
    file = base or f"{name}.cu"
    text = _read(origin, file) if base is not None else None
    cell = f"<cell {name}>"
    if patch is None:
        changed = patches.whole(source or "", cell, first_line)
    elif text is None:
        raise InputError("base: expected a file of kernels_src for the patch to change, got None.")
    else:
        blocks = patches.parse(patch, first_line)
        changed = patches.apply(text, blocks, file=f"kernels_src/{file}", cell=cell)
    if base is None and schedule is not None:
        raise InputError(f"schedule: expected None for a file of its own, got {schedule!r}.")
    by_entry = {} if launch is None else _check_launches(launch, base)
    own = launch if isinstance(launch, tuple) else None
    made = Variant(name, file, text, changed, schedule, origin, _copy(origin), own)
    (made.tree.folder / file).write_bytes(changed.with_lines.encode())
    if base is not None and schedule not in (None, *made.schedules):
        raise InputError(
            f"schedule: expected one that reads {file} ({', '.join(made.schedules) or 'none'}), "
            f"got {schedule!r}."
        )
    made.tree.launches = _in_files(by_entry, made)
    return made


def shipped(schedule: str | None = None) -> Variant:
    """The kernels in use as they are now, to look at or to compare a variant with.

    schedule  this one alone

    Raises InputError inside the block of a variant.
    """
    _check_schedule(schedule)
    origin = _origin()
    return Variant("shipped", None, None, None, schedule, origin, _copy(origin))


def _check_schedule(schedule: str | None) -> None:
    if schedule not in (None, *SCHEDULES):
        raise InputError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {schedule!r}.")


def _in_files(
    by_entry: Mapping[str, tuple[int, int]], variant: Variant
) -> dict[tuple[str, str], tuple[int, int]]:
    """Which kernels they are, of those that the variant's schedules launch."""
    files: dict[str, set[str]] = {}
    for name in variant.schedules if variant.schedule is None else (variant.schedule,):
        for launch in SCHEDULES[name].launches:
            files.setdefault(launch.entry, set()).add(SCHEDULES[name].file)
    if absent := by_entry.keys() - files.keys():
        whose = f"schedules that read {variant.file}"
        raise InputError(
            f"launch: expected entries of {variant.schedule or whose} "
            f"({', '.join(sorted(files))}), got {', '.join(sorted(absent))}."
        )
    for entry in by_entry:
        if len(files[entry]) > 1:
            raise InputError(
                f"launch: expected an entry of one file, or a schedule, got {entry}, which is in "
                f"{' and in '.join(sorted(files[entry]))}."
            )
    return {(file, entry): numbers for entry, numbers in by_entry.items() for file in files[entry]}


def _check_launches(launch: object, base: str | None) -> Mapping[str, tuple[int, int]]:
    """By entry; empty for a file of its own, whose kernels are all launched alike."""
    if base is None:
        _check_launch(launch)
        return {}
    if not isinstance(launch, Mapping) or not all(isinstance(entry, str) for entry in launch):
        raise InputError(
            "launch: expected numbers by entry with a base, such as {'kda_prepare': (128, 33408)}, "
            f"got {launch}."
        )
    for one in launch.values():
        _check_launch(one)
    return launch


def _check_launch(launch: object) -> None:
    pair = isinstance(launch, tuple) and [type(number) for number in launch] == [int, int]
    threads, smem = launch if isinstance(launch, tuple) and pair else (0, 0)
    if not (1 <= threads <= _MOST_THREADS and 0 <= smem <= _MOST_SMEM):
        raise InputError(
            f"launch: expected 1 to {_MOST_THREADS} threads and 0 to {_MOST_SMEM} bytes of dynamic "
            f"shared memory, as plain ints, got {launch!r}."
        )


def _origin() -> Path:
    """The kernels_src in use. A variant's is not: it goes with the variant, and has its marks."""
    found = sources.root()
    if found.name.startswith(_FOLDER):
        raise InputError(
            f"kernels_src: expected the usual one, got {found}, a copy that belongs to a variant. "
            "Make this one outside of the other's active()."
        )
    return found


def _read(origin: Path, file: str) -> str:
    """A source under `origin`, by the name that it has there and by no other."""
    names = sorted(path.relative_to(origin).as_posix() for path in origin.rglob("*.cu*"))
    if file not in names:
        raise InputError(f"base: expected one of {', '.join(names)}, got {file!r}.")
    return sources.read(file, folder=origin).text.replace("\r\n", "\n")


def _copy(origin: Path) -> SourceTree:
    """A copy of kernels_src, which goes when nobody holds the tree any more."""
    folder = tempfile.mkdtemp(prefix=_FOLDER)
    tree = SourceTree(folder)
    weakref.finalize(tree, _remove, folder, os.getpid())
    try:
        # An editor's lock file is a link to nowhere.
        shutil.copytree(origin, folder, dirs_exist_ok=True, ignore_dangling_symlinks=True)
    except OSError as error:
        raise InputError(f"kernels_src: expected to be copied, got {error} in {origin}.") from None
    return tree


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child shares the folder, but must not take it away
        shutil.rmtree(folder, ignore_errors=True)
