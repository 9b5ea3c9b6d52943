"""Compiling a variant: what each kernel takes, beside the shipped one, or what NVRTC objects to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kda_jit import settings
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.errors import CompileError, InputError
from kda_jit.jit import (
    TARGETS,
    Compiled,
    KernelSpec,
    Resources,
    arch_for,
    compile_spec,
    unavailable_reason,
)

from .occupancy import Occupancy, occupancy
from .shown import Shown
from .variants import Variant


@dataclass(frozen=True)
class Build:
    """One file for one target: `compiled`, or the `error` that says why not.

    before  what is shipped, where that compiles
    """

    spec: KernelSpec
    compiled: Compiled | None
    error: CompileError | None
    before: Compiled | None


@dataclass(frozen=True)
class Row:
    """A kernel of a build.

    shipped         resources of the shipped kernel of that name, if there is one
    threads         per block; None where nobody said how it is launched
    smem_dynamic    bytes per block; likewise
    occupancy       from the limits of the target; likewise
    """

    build: Build
    entry: str
    resources: Resources
    shipped: Resources | None
    threads: int | None
    smem_dynamic: int | None
    occupancy: Occupancy | None


class Report(Shown):
    """What compiling a variant found. Printed, or shown by a notebook, it is a table."""

    def __init__(self, variant: Variant, builds: Sequence[Build], seconds: float) -> None:
        self.variant = variant
        self.builds = tuple(builds)
        self.seconds = seconds  # that all of it took

    @property
    def ok(self) -> bool:
        """Whether everything compiled."""
        return all(build.error is None for build in self.builds)

    @property
    def errors(self) -> tuple[CompileError, ...]:
        """One per build that failed."""
        return tuple(build.error for build in self.builds if build.error is not None)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Of NVRTC and ptxas, each once."""
        every = (w for b in self.builds if b.compiled is not None for w in b.compiled.warnings)
        return tuple(dict.fromkeys(w for w in every if not w.startswith("Remark:")))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Every kernel of every build that compiled to machine code."""
        return tuple(row for build in self.builds for row in self._rows(build))

    def _rows(self, build: Build) -> Iterator[Row]:
        if build.compiled is None:
            return
        for entry, taken in build.compiled.resources.items():
            before = None if build.before is None else build.before.resources.get(entry)
            launch = launch_of(self.variant, build.spec, entry)
            threads, smem = launch or (None, None)
            fits = None
            if launch is not None:
                fits = occupancy(
                    build.spec.target,
                    threads=launch[0],
                    registers=taken.registers,
                    smem=taken.smem_static + launch[1],
                )
            yield Row(build, entry, taken, before, threads, smem, fits)

    def __rich__(self) -> RenderableType:
        table = Table(box=None, pad_edge=False)
        for heading in ("target", "file", "kernel"):
            table.add_column(heading, no_wrap=True)
        for heading in (
            "registers", "spill", "static smem", "dynamic smem", "threads", "blocks an SM",
            "seconds",
        ):  # fmt: skip
            table.add_column(heading, justify="right")
        for build in self.builds:
            for cells in self._cells(build):
                table.add_row(*cells)
        notes = [Text(words, style="yellow") for words in self.warnings]
        failures = [Text(f"CompileError: {error}", style="red") for error in self.errors]
        file = self.variant.file or "kernels_src as it is"
        title = Text(f"{self.variant.name}: {file}, {self.seconds:.2f} s")
        return Group(title, table, *notes, *failures)

    def _cells(self, build: Build) -> Iterator[tuple[str, ...]]:
        """What is the file's stands on its first line."""
        head = (build.spec.target, build.spec.file)
        if build.compiled is None:
            yield (*head, "failed", *[""] * 7)
            return
        took = f"{build.compiled.seconds:.2f}" + (" cached" * build.compiled.from_cache)
        for row in self._rows(build):
            now, was = row.resources, row.shipped
            fits = row.occupancy
            yield (
                *head,
                row.entry,
                _changed(now, was, lambda taken: taken.registers),
                _changed(now, was, lambda taken: taken.spill_stores + taken.spill_loads),
                _changed(now, was, lambda taken: taken.smem_static),
                "" if row.smem_dynamic is None else str(row.smem_dynamic),
                "" if row.threads is None else str(row.threads),
                "" if fits is None else f"{fits.blocks} ({fits.share:.0%}, {fits.bound})",
                took,
            )
            head, took = ("", ""), ""
        if not build.compiled.resources:  # PTX: only the driver knows
            yield (*head, ", ".join(build.compiled.entries), *[""] * 6, took)


def build(variant: Variant, arch: str | Sequence[str] | None = None) -> Report:
    """Compile a variant, and the shipped kernels that it stands beside. Needs no GPU.

    arch  targets such as "sm_90a"; "all": each one that its kernels are for and that this NVRTC
          knows; None: KDA_JIT_ARCH, else the current GPU's, else the first one of all

    A kernel that does not compile is part of the report. Raises InputError for a target that the
    variant has nothing for.
    """
    start = time.perf_counter()
    before = None if variant.stands_alone or variant.file is None else variant.before()
    specs = [spec for target in targets(variant, arch) for spec in variant.specs(target)]
    with ThreadPoolExecutor() as pool:  # NVRTC compiles as many at a time as there are cores
        shipped = [None if before is None else pool.submit(compiled, before, s) for s in specs]
        changed = [pool.submit(compiled, variant, spec) for spec in specs]
        builds = [
            _build(spec, now, was) for spec, now, was in zip(specs, changed, shipped, strict=True)
        ]
    return Report(variant, builds, time.perf_counter() - start)


def compiled(variant: Variant, spec: KernelSpec) -> Compiled:
    """One file of the variant, built or from the cache. Raises CompileError."""
    with variant.active():
        try:
            return compile_spec(spec)
        except CompileError as error:
            # The last line has a command that would build the shipped file again, not this one.
            error.args = (str(error).partition("\n  source, flags and log: ")[0],)
            raise


def targets(variant: Variant, arch: str | Sequence[str] | None) -> list[str]:
    """What `arch` means for a variant, see `build`."""
    if arch is not None and arch != "all":
        asked = [arch] if isinstance(arch, str) else list(dict.fromkeys(arch))
        if not asked:
            raise InputError("arch: expected a target at least, got none.")
        return asked
    every = [target for target in TARGETS if _has(variant, target)]
    if not every:
        variant.specs(TARGETS[0])  # raises, and says why
    if arch == "all":
        # An older NVRTC lacks the newest targets; where there is none at all, it shall say so.
        return [t for t in every if unavailable_reason(t) is None] or every
    here = settings.arch() or _device_target()
    return [here if here is not None and _has(variant, here) else every[0]]


def launch_of(variant: Variant, spec: KernelSpec, entry: str) -> tuple[int, int] | None:
    """(threads, bytes of dynamic shared memory) of a kernel; None where nobody said."""
    if (spec.file, entry) in variant.tree.launches:
        return variant.tree.launches[spec.file, entry]
    for schedule in SCHEDULES.values():
        if schedule.file == spec.file:
            for launch in schedule.launches:
                if launch.entry == entry:
                    return launch.block, launch.smem
    return variant.launch


def _build(spec: KernelSpec, now: Future[Compiled], before: Future[Compiled] | None) -> Build:
    was = None
    if before is not None:
        with suppress(CompileError):  # the shipped file may be someone's edit, too
            was = before.result()
    try:
        return Build(spec, now.result(), None, was)
    except CompileError as error:
        return Build(spec, None, error, was)


def _has(variant: Variant, target: str) -> bool:
    try:
        return bool(variant.specs(target))
    except InputError:
        return False


def _device_target() -> str | None:
    """The current GPU's; None where there is none that has a target."""
    if not torch.cuda.is_available():
        return None
    found = arch_for(torch.cuda.get_device_capability())
    return None if found is None else found.target


def _changed(now: Resources, was: Resources | None, of: Callable[[Resources], int]) -> str:
    """A number, and by how much it differs from the shipped one's."""
    number = of(now)
    change = 0 if was is None else number - of(was)
    return f"{number} ({change:+d})" if change else str(number)
