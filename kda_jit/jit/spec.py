"""KernelSpec: what is compiled, as plain data. Hashable, picklable, buildable without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Compile-time half of a kernel: everything that selects one cubin.

    file      path under kernels_src, such as "sm80/kda_prefill.cu"; for a string, a name
    entries   `extern "C"` kernels that the file must define
    target    "sm_90a", "compute_80", ...: see `jit.arch`
    defines   ((name, value), ...), passed as -Dname=value; sorted here, so order never matters
    text      the source itself, for a kernel that is a string; None for a file
    """

    file: str
    entries: tuple[str, ...]
    target: str
    defines: tuple[tuple[str, str], ...] = ()
    text: str | None = field(default=None, repr=False)
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "defines", tuple(sorted(self.defines)))
        own = (self.file, self.entries, self.target, self.defines, self.text)
        object.__setattr__(self, "_hash", hash(own))

    def __hash__(self) -> int:
        # A launch looks its module up by spec: hashing five fields each time would cost half of it.
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # String hashes differ between processes, so the stored hash must not travel.
        return KernelSpec, (self.file, self.entries, self.target, self.defines, self.text)

    @property
    def name(self) -> str:
        """Short name for messages: the first entry, or the file where no entry is given."""
        return self.entries[0] if self.entries else self.file

    def label(self) -> str:
        """The spec in one line: "kda_prefill for sm_90a (CHUNK=16)"."""
        defines = ", ".join(f"{name}={value}" for name, value in self.defines)
        return f"{self.name} for {self.target}" + (f" ({defines})" if defines else "")

    def key(self, flags: tuple[str, ...], nvrtc: tuple[int, int], sources: str) -> str:
        """16 hex digits that change with anything that changes the cubin.

        flags     compiler flags, without the include path: where sources lie does not matter
        nvrtc     (major, minor) of the compiler
        sources   `SourceSet.digest`
        """
        parts = [repr(self), *flags, repr(nvrtc), sources]
        return sha256("\0".join(parts).encode()).hexdigest()[:16]


SPEC_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(KernelSpec) if f.init)
"""Names of the fields that make up a spec, for writing one to a file and reading it back."""
