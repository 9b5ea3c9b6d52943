"""What KDA_JIT_ARCH, KDA_JIT_SCHEDULE, KDA_JIT_KERNELS_SRC make of a call on the CUDA backend."""

from __future__ import annotations

from kda_jit import settings
from kda_jit.backends.cuda import SCHEDULES, compile_specs
from kda_jit.errors import InputError
from kda_jit.jit import arch_for, arch_named, sources, unavailable_reason


def environment_effects(capability: tuple[int, int]) -> dict[str, str]:
    """What differs from a plain call on such a GPU: variable -> words, of those that are set."""
    found = {}
    own = arch_for(capability)
    if (target := settings.arch()) is not None:
        usual = "" if own is None else f", not for {own.target}"
        found[settings.ARCH.name] = f"builds for {target}{usual}"
    if (schedule := settings.schedule()) != settings.SCHEDULE.default:
        found[settings.SCHEDULE.name] = f"takes the schedule {schedule}, whatever the sizes"
    if (folder := settings.kernels_src()) is not None:
        found[settings.KERNELS_SRC.name] = f"takes the sources in {folder}"
    return found


def environment_problems(capability: tuple[int, int] | None) -> dict[str, str]:
    """Of what these variables ask for, that which cannot be done: variable -> why.

    capability  of the GPU; None: of no GPU in particular
    """
    found = {}
    arch = None if capability is None else arch_for(capability)
    forced = settings.arch()
    if forced is not None:
        try:
            arch = arch_named(forced)
            why_not = None if capability is None else arch.why_not_on(capability)
        except InputError as error:
            arch, why_not = None, str(error).removeprefix("target: ")
        if why_not or (why_not := unavailable_reason(forced)):
            found[settings.ARCH.name] = why_not
    name = settings.schedule()
    if name != settings.SCHEDULE.default:
        if name not in SCHEDULES:
            known = ", ".join((settings.SCHEDULE.default, *SCHEDULES))
            found[settings.SCHEDULE.name] = f"expected one of {known}, got {name!r}"
        elif arch is not None and arch.cc[0] not in (majors := SCHEDULES[name].capabilities):
            runs_on = ", ".join(f"{major}.x" for major in majors)
            found[settings.SCHEDULE.name] = f"{name} runs on {runs_on}, the target is {arch.target}"
    try:
        root = sources.root()
    except InputError as error:
        found[settings.KERNELS_SRC.name] = str(error).removeprefix("kernels_src: ")
    else:
        files = [spec.file for spec in compile_specs(arch.target)] if arch is not None else []
        if missing := [file for file in files if not (root / file).is_file()]:
            found[settings.KERNELS_SRC.name] = f"{root} has no {', '.join(missing)}"
    return found
