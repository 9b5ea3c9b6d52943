"""What the doctor knows of a machine. Plain data; `error` is what a probe met instead of an answer.

Versions are (major, minor), None where there is none; of CUDA they name a release, 12.9.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Version = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch can use. target: what kernels are built for; None where there is none."""

    name: str
    capability: Version
    target: str | None
    sms: int
    memory_gib: float


@dataclass(frozen=True)
class Driver:
    """The CUDA driver.

    module   version of the kernel's part, such as 580.159.04, even where a container has no other
    cuda     the newest CUDA release that it runs
    devices  GPUs that it shows to this process
    """

    module: str | None = None
    cuda: Version | None = None
    devices: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Torch:
    """cuda: the release it is built for; None for a build without."""

    version: str = ""
    cuda: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Cupy:
    """wheels: name -> version of every one installed; generation: the CUDA major of the import."""

    wheels: dict[str, str] = field(default_factory=dict)
    version: str | None = None
    generation: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Nvrtc:
    """targets: what a build for each target of this machine failed with; None where it did not."""

    version: Version | None = None
    path: str | None = None
    targets: dict[str, str | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Headers:
    """CUDA's headers as CuPy would find them, for kernels that are not ours."""

    folder: str | None = None
    cuda: Version | None = None
    error: str | None = None


@dataclass(frozen=True)
class Triton:
    """compiler: the C compiler that its launcher is built with."""

    version: str | None = None
    interpreted: bool = False
    compiler: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Cache:
    """asked: the folder of kernels; folder: the one written to; why_not: why that is another."""

    asked: str = ""
    folder: str = ""
    why_not: str | None = None
    entries: int = 0
    failed: int = 0
    bytes: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Environment:
    """values: every KDA_JIT_ variable that is set, and what else is looked at here.

    wrong    name of a variable -> what is the matter with its value
    """

    values: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Misfit:
    """An installed package that is not of the versions that kda_jit asks for."""

    package: str
    installed: str
    wanted: str


@dataclass(frozen=True)
class Packages:
    """kda_jit's own requirements, held against what is installed."""

    misfits: tuple[Misfit, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Choice:
    """Who would run a prefill with bf16 inputs, K = V = 128 and a bounded gate on `device`.

    reasons  of each backend: why it cannot; () for one that can
    chosen   None where none may; `error` then has the words
    """

    device: str = ""
    chosen: str | None = None
    reasons: dict[str, tuple[str, ...]] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Trial:
    """A small prefill by the chosen backend. Errors are relative, of the worst block of `out`."""

    tokens: int = 0
    ran: dict[str, str] = field(default_factory=dict)
    off: float = 0.0
    allowed: float = 0.0
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is None and self.off <= self.allowed


@dataclass(frozen=True)
class Facts:
    """All of it. sources: the folder of the CUDA sources; None where `sources_error` says why."""

    kda_jit: str
    python: str
    platform: str
    driver: Driver = Driver()
    torch: Torch = Torch()
    cupy: Cupy = Cupy()
    nvrtc: Nvrtc = Nvrtc()
    headers: Headers = Headers()
    triton: Triton = Triton()
    sources: str | None = None
    sources_error: str | None = None
    cache: Cache = Cache()
    environment: Environment = Environment()
    packages: Packages = Packages()
    choice: Choice = Choice()
    trial: Trial = Trial()


def dotted(version: Version | None) -> str:
    """(12, 9) as 12.9."""
    return "none" if version is None else "{}.{}".format(*version)
