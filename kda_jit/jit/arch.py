"""Compute capability -> compile target, and which target runs on which device. Plain data, no GPU.

A target is what NVRTC gets as `-arch`:

    sm_80        machine code for 8.0; also runs on later minors of the same major (8.6, 8.9)
    sm_90a       machine code with arch-specific instructions: this exact capability only
    sm_100f      machine code for a family: this minor and later ones of the same major
    compute_80   PTX, which the driver compiles at load: this capability and every later one

Two sizes of shared memory recur: 227 KB per block on data-centre parts (163 KB on 8.0 and 8.7), and
99 KB on the consumer parts (8.6, 8.9, 12.x), so a kernel does not simply fit on all that is newer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kda_jit.errors import InputError

_KIB = 1024
_MMA = frozenset({"mma", "cp_async"})
_TMA = _MMA | {"tma", "cluster", "pdl"}


@dataclass(frozen=True, slots=True)
class Arch:
    """One compile target.

    target           as given to NVRTC, suffix included
    cc               (major, minor) that it is built for
    smem_per_block   bytes of shared memory that one block can have (opt-in limit, static + dynamic)
    features         what code for it may use: mma, cp_async, tma, cluster, pdl, wgmma, tcgen05
    """

    target: str
    cc: tuple[int, int]
    smem_per_block: int
    features: frozenset[str]

    @property
    def is_ptx(self) -> bool:
        """True where the driver compiles the result at load."""
        return self.target.startswith("compute_")

    def why_not_on(self, cc: tuple[int, int]) -> str | None:
        """Why code for this target cannot run on a device of capability `cc`; None if it can."""
        device = f"this device is {cc[0]}.{cc[1]}"
        own = f"{self.cc[0]}.{self.cc[1]}"
        if self.target.endswith("a"):
            return None if cc == self.cc else f"{self.target} runs on {own} alone; {device}"
        if self.is_ptx:
            return None if cc >= self.cc else f"{self.target} runs on {own} and later; {device}"
        if cc[0] == self.cc[0] and cc[1] >= self.cc[1]:
            return None
        return f"{self.target} runs on {own} and later minors of {self.cc[0]}.x; {device}"


_ARCHS: tuple[Arch, ...] = (
    Arch("sm_80", (8, 0), 163 * _KIB, _MMA),
    Arch("sm_86", (8, 6), 99 * _KIB, _MMA),
    Arch("sm_87", (8, 7), 163 * _KIB, _MMA),
    Arch("sm_89", (8, 9), 99 * _KIB, _MMA),
    Arch("sm_90a", (9, 0), 227 * _KIB, _TMA | {"wgmma"}),
    Arch("sm_100a", (10, 0), 227 * _KIB, _TMA | {"tcgen05"}),
    Arch("sm_100f", (10, 0), 227 * _KIB, _TMA | {"tcgen05"}),
    Arch("sm_103a", (10, 3), 227 * _KIB, _TMA | {"tcgen05"}),
    Arch("sm_110a", (11, 0), 227 * _KIB, _TMA | {"tcgen05"}),
    Arch("sm_120a", (12, 0), 99 * _KIB, _TMA),
    Arch("sm_121a", (12, 1), 99 * _KIB, _TMA),
    # The limit is 8.0's; code that must also run on 8.6, 8.9 and 12.x has to stay below theirs.
    Arch("compute_80", (8, 0), 163 * _KIB, _MMA),
)
_BY_TARGET = {arch.target: arch for arch in _ARCHS}
# sm_100f is never picked for a device: where the exact target exists it can do all that f can.
_BY_CC = {arch.cc: arch for arch in _ARCHS if arch.target not in {"sm_100f", "compute_80"}}

TARGETS: tuple[str, ...] = tuple(arch.target for arch in _ARCHS if not arch.is_ptx)
"""Every target that compiles to machine code, in the order of capability."""

PTX_TARGETS: tuple[str, ...] = tuple(arch.target for arch in _ARCHS if arch.is_ptx)
"""Targets that stay PTX until the driver loads them."""


def arch_for(cc: tuple[int, int]) -> Arch | None:
    """The target that a device of capability `cc` gets, or None; `why_no_arch` then says why."""
    return _BY_CC.get((cc[0], cc[1]))


def why_no_arch(cc: tuple[int, int]) -> str | None:
    """Why no target fits capability `cc`, naming those that exist; None where one does."""
    if arch_for(cc) is not None:
        return None
    known = ", ".join(f"{major}.{minor}" for major, minor in sorted(_BY_CC))
    return f"no target for compute capability {cc[0]}.{cc[1]}; there are targets for {known}"


#: What people call a GPU, and its target; for a message.
_PRODUCTS = {
    name: target
    for target, names in {
        "sm_80": "a100 a30",
        "sm_86": "a10 a40 a6000 rtxa6000 rtx3080 rtx3090",
        "sm_89": "l4 l40 l40s rtx4080 rtx4090",
        "sm_90a": "h20 h100 h200 gh200 hopper",
        "sm_100a": "b100 b200 gb200 blackwell",
        "sm_103a": "b300 gb300",
        "sm_120a": "rtx5080 rtx5090 rtxpro6000",
        "sm_121a": "gb10 dgxspark",
    }.items()
    for name in names.split()
}


def arch_named(target: str) -> Arch:
    """The Arch of a target's name. Raises InputError, listing the names, for any other."""
    try:
        return _BY_TARGET[target]
    except KeyError:
        hint = ""
        # Asking for plain sm_90 is the usual slip: it compiles, and lacks wgmma and setmaxnreg.
        asked = target.lower()
        parts = re.fullmatch(r"(?:sm)?_?(\d+)([af]?)", asked)
        for name in (f"sm_{parts[1]}{parts[2]}", f"sm_{parts[1]}a") if parts else ():
            if name in _BY_TARGET:
                hint = f" Meant {name}? The suffix is part of the target."
                break
        product = re.sub(r"nvidia|geforce|tesla|[\W_]", "", asked)
        if product in _PRODUCTS:
            hint = f" That GPU's is {_PRODUCTS[product]}."
        names = ", ".join((*TARGETS, *PTX_TARGETS))
        raise InputError(f"target: expected one of {names}, got {target!r}.{hint}") from None
