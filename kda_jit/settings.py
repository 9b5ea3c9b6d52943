"""Every environment variable that kda_jit reads: its name, default, and one sentence about it.

Values are read when asked for, never at import, so a notebook or a test may change one between two
calls. An empty value counts as unset. An argument of a call always wins over the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kda_jit.errors import InputError


@dataclass(frozen=True)
class Setting:
    """One environment variable. `default` says what an unset one means, as a value or in words."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        """The variable's value, stripped; "" where it is unset or blank."""
        # os.environ.get takes 0.7 us to say that a name is absent, for every setting of every
        # call. The dictionary behind it is asked first, where this Python has one.
        table = getattr(os.environ, "_data", None)
        if table is not None and self._key not in table:
            return ""
        return os.environ.get(self.name, "").strip()

    @cached_property
    def _key(self) -> object:
        return os.environ.encodekey(self.name)


BACKEND = Setting(
    "KDA_JIT_BACKEND",
    "auto",
    'Backend that backend="auto" stands for: auto, cuda (or flashkda), triton, torch.',
)
CACHE_DIR = Setting(
    "KDA_JIT_CACHE_DIR",
    "~/.cache/kda_jit",
    "Folder of compiled kernels; a temporary folder takes its place where it is not writable.",
)
ARCH = Setting(
    "KDA_JIT_ARCH",
    "the device's own",
    "Target to build for instead of the device's own, such as sm_80 or compute_80 for the portable "
    "kernel.",
)
SCHEDULE = Setting(
    "KDA_JIT_SCHEDULE",
    "auto",
    "CUDA schedule to use whatever the shape, by its name.",
)
KERNELS_SRC = Setting(
    "KDA_JIT_KERNELS_SRC",
    "the package's own",
    "Folder to take the CUDA sources from, laid out like kernels_src.",
)
FLASHKDA_SO = Setting(
    "KDA_JIT_FLASHKDA_SO",
    "none",
    "Shared library of FlashKDA (_flashkda_C.abi3.so) for benchmarks to measure against.",
)
VLLM = Setting(
    "KDA_JIT_VLLM",
    "off",
    "Whether the plugin that vLLM loads registers this package as FlashKDA "
    "(torch.ops._flashkda_C): on (or 1) or off (or 0).",
)
CAPTURE = Setting(
    "KDA_JIT_CAPTURE",
    "off",
    "Folder that the first calls of a process are written to, as kda_jit.capture does; read once, "
    "at the first call.",
)
CAPTURE_CALLS = Setting(
    "KDA_JIT_CAPTURE_CALLS",
    "4",
    "How many calls KDA_JIT_CAPTURE writes; first:end, such as 100:104, leaves out earlier ones.",
)
CAPTURE_MIB = Setting(
    "KDA_JIT_CAPTURE_MIB",
    "512",
    "Largest file that KDA_JIT_CAPTURE writes, in MiB; a larger call is left out with a warning.",
)

SETTINGS: tuple[Setting, ...] = (
    BACKEND, CACHE_DIR, ARCH, SCHEDULE, KERNELS_SRC, FLASHKDA_SO, VLLM, CAPTURE, CAPTURE_CALLS,
    CAPTURE_MIB,
)  # fmt: skip
"""The whole table, in the order of docs/environment.md."""

_SWITCH = {"on": True, "1": True, "off": False, "0": False}


def backend() -> str:
    """Backend name to use for "auto". Not checked here: the resolver knows the valid names."""
    return BACKEND.read().lower() or BACKEND.default


def cache_dir() -> Path:
    """Folder that the user asks for, else the user's cache. It need not exist or be writable."""
    asked = CACHE_DIR.read()
    if asked:
        return Path(os.path.abspath(os.path.expanduser(asked)))
    # A relative XDG_CACHE_HOME is void by the XDG specification.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        home = Path(os.path.expanduser("~"))
        # Without HOME a user whom the system does not know has none: as for shells, it is then /.
        base = (home if home.is_absolute() else Path("/")) / ".cache"
    return base / "kda_jit"


def arch() -> str | None:
    """Forced target such as "sm_80"; None for the device's own. Checked by `jit.arch`."""
    return ARCH.read().lower() or None


def schedule() -> str:
    """Forced schedule of the CUDA backend, "auto" for its own choice. Checked by that backend."""
    return SCHEDULE.read().lower() or SCHEDULE.default


def kernels_src() -> Path | None:
    """Folder of CUDA sources that replaces the package's own, or None."""
    asked = KERNELS_SRC.read()
    return Path(os.path.expanduser(asked)) if asked else None


def flashkda_so() -> Path | None:
    """FlashKDA's shared library, or None."""
    asked = FLASHKDA_SO.read()
    return Path(os.path.expanduser(asked)) if asked else None


def vllm() -> bool:
    """Whether the plugin in vLLM registers FlashKDA's operators."""
    asked = VLLM.read().lower() or VLLM.default
    if asked not in _SWITCH:
        raise InputError(f"{VLLM.name}: expected on, off, 1 or 0, got {asked!r}.")
    return _SWITCH[asked]


def capture() -> Path | None:
    """Folder that calls are written to, or None."""
    asked = CAPTURE.read()
    return Path(os.path.expanduser(asked)) if asked.lower() not in ("", "off") else None


def capture_calls() -> range:
    """The calls to write, counted from 0 at the first call of the process."""
    asked = CAPTURE_CALLS.read() or CAPTURE_CALLS.default
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", asked)
    found = range(int(match[1] or 0), int(match[2])) if match else range(0)
    if not found:
        raise InputError(
            f"{CAPTURE_CALLS.name}: expected a count such as 4, or first:end such as 100:104, got "
            f"{asked!r}."
        )
    return found


def capture_bytes() -> int:
    """Bytes of the largest call to write."""
    asked = CAPTURE_MIB.read() or CAPTURE_MIB.default
    if not (asked.isascii() and asked.isdigit() and int(asked)):
        raise InputError(
            f"{CAPTURE_MIB.name}: expected a number of MiB such as 512, got {asked!r}."
        )
    return int(asked) << 20
