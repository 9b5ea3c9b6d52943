"""Running a variant on a GPU: under which schedule, and whether its own kernels were what ran."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_jit import settings
from kda_jit.backends.base import LaunchRecord, last_launch
from kda_jit.backends.cuda import SCHEDULES
from kda_jit.bench.gate import WrongResult
from kda_jit.bench.subject import Call, Ours, schedules_for
from kda_jit.errors import DeviceError, InputError
from kda_jit.jit import is_loaded, load
from kda_jit.testing import Inputs
from kda_jit.testing.runner import Runner, why_not

from .report import compiled
from .variants import Variant


def need_gpu(caller: str) -> torch.device:
    """The current GPU. Raises DeviceError where the cuda backend cannot run."""
    if not torch.cuda.is_available():
        raise DeviceError(
            f"{caller}: expected a CUDA GPU that torch can use, got none. What needs no GPU: "
            "lab.build, lab.sass, lab.diff."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_not("cuda", device):
        raise DeviceError(f"{caller}: {reason}")
    return device


def schedules_here(variant: Variant, device: torch.device, asked: str | None) -> list[str]:
    """Schedules that run on this GPU and read what the variant changes; of these the asked one.

    Raises InputError where there is none.
    """
    if variant.stands_alone:
        raise InputError(
            f"variant: expected one with a base, which the cuda backend can launch, got "
            f"{variant!r}, a file of its own."
        )
    major = torch.cuda.get_device_capability(device)[0]
    found = [name for name in schedules_for(major) if name in variant.schedules]
    wanted = asked or variant.schedule
    if not found or wanted not in (None, *found):
        raise InputError(
            f"schedule: expected one that runs on this GPU and reads {variant.file} "
            f"({', '.join(found) or 'there is none'}), got {wanted!r}."
        )
    return found if wanted is None else [wanted]


@contextmanager
def forced(schedule: str) -> Iterator[None]:
    """Calls of this process use the schedule inside the block."""
    before = os.environ.get(settings.SCHEDULE.name)
    os.environ[settings.SCHEDULE.name] = schedule
    try:
        yield
    finally:
        if before is None:
            del os.environ[settings.SCHEDULE.name]
        else:
            os.environ[settings.SCHEDULE.name] = before


def not_its_own(variant: Variant, launch: LaunchRecord | None, device: torch.device) -> str | None:
    """Why what ran in the variant's block was not the variant; None where it was."""
    if launch is None or launch.backend != "cuda" or launch.target is None:
        return f"{variant.name}: expected the cuda backend to run, {launch} did"
    name = launch.schedule or ""
    if name not in variant.schedules:
        readers = ", ".join(variant.schedules)
        return f"schedule {name} ran, which does not read {variant.file}; {readers} would"
    spec = SCHEDULES[name].spec(launch.target)
    with variant.active():
        if not is_loaded(spec, device.index):
            return f"{variant.name}: {spec.file} was not loaded from the variant's sources"
    return None


def binary(variant: Variant, launch: LaunchRecord, device: torch.device) -> str:
    """Cache key of what ran. Raises WrongResult where that is not what the sources compile to."""
    spec = SCHEDULES[launch.schedule or ""].spec(launch.target or "")
    with variant.active():
        key = load(spec, device.index).compiled.key
    wanted = compiled(variant, spec).key
    if key != wanted:
        raise WrongResult(f"{variant.name}: {key} of {spec.file} ran, its sources are {wanted}")
    return key


@dataclass(frozen=True)
class VariantRunner(Runner):
    """The cuda backend with the variant's kernels, to try laws on.

    What another schedule's kernels compute is not the variant's: such a case it does not claim.
    """

    variant: Variant

    def prefill(self, inputs: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        with self.variant.active():
            result = super().prefill(inputs, **buffers)
        launch = last_launch()
        if launch is not None and launch.schedule is not None:  # else no token, no launch
            if launch.schedule not in self.variant.schedules:
                raise NotImplementedError(not_its_own(self.variant, launch, self.device))
            assert (why := not_its_own(self.variant, launch, self.device)) is None, why
        return result


class Ran(NamedTuple):
    """What a call launched, and why that is not the variant (None: it is)."""

    launch: LaunchRecord | None
    reason: str | None

    @property
    def kernels(self) -> tuple[str, ...]:
        return () if self.launch is None else self.launch.kernels


@dataclass(frozen=True)
class Contestant:
    """A variant as a subject of a benchmark. Which schedule runs, the environment says."""

    variant: Variant
    device: torch.device

    @property
    def name(self) -> str:
        return self.variant.name

    def activate(self) -> None:
        """Nothing: each call enters and leaves the variant for itself."""

    def bind(self, inputs: Inputs) -> Call:
        call = Ours("cuda").bind(inputs)

        def inside() -> tuple[Tensor, Tensor]:
            with self.variant.active():
                return call()

        return inside

    def record(self, call: Call) -> Ran:
        launch = last_launch()
        return Ran(launch, not_its_own(self.variant, launch, self.device))

    def misnamed(self, record: Ran) -> str | None:
        return record.reason

    def facts(self, record: Ran) -> dict[str, str | None]:
        schedule = None if record.launch is None else record.launch.schedule
        return {"variant": self.name, "schedule": schedule}
