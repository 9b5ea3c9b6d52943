"""KernelSpec -> machine code, with NVRTC through CuPy. Needs no GPU and no torch.

Our own flags and our own cache stand in for CuPy's: CuPy's path drops the `a` of sm_90a, adds
-ftz=true, and its disk key does not see the text of included headers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kda_jit import settings
from kda_jit.errors import CompileError, InputError
from kda_jit.jit import cache, sources
from kda_jit.jit.arch import arch_for, arch_named, why_no_arch
from kda_jit.jit.sources import SourceSet
from kda_jit.jit.spec import SPEC_FIELDS, KernelSpec

FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-default-device",  # helpers without __device__ are device functions
    "-lineinfo",  # profilers show the source; costs no instruction
    "--fmad=true",
    "--ptxas-options=-v",  # registers, spills and shared memory into the log
)
"""Flags of every build. No -ftz, no fast maths: approximations are spelt out in the sources."""

_EDITS_MET = 3
_SHOWN_ERRORS = 8


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas says one entry takes; bytes where it is no count.

    registers      per thread at entry; setmaxnreg may change it later
    spill_stores   bytes of spill code, in the entry and in every function that was not inlined
    spill_loads    likewise
    stack          per thread, local arrays and calls included
    smem_static    per block; dynamic shared memory comes on top
    const          constant banks, as far as ptxas names them
    barriers       named barriers, per block
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem_static: int
    const: int
    barriers: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """One built kernel file.

    path         the cubin (or PTX) in the cache; the driver loads it from there
    resources    per entry; empty for a PTX target, which only the driver turns into code
    entries      names of all entries that the binary defines
    from_cache   True where nothing was compiled
    seconds      what this call took, cache included
    """

    spec: KernelSpec
    key: str
    path: Path
    log: str
    resources: dict[str, Resources]
    entries: tuple[str, ...]
    nvrtc: tuple[int, int]
    from_cache: bool
    seconds: float

    @property
    def binary(self) -> bytes:
        """The cubin's bytes, or the PTX text's."""
        return self.path.read_bytes()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines of the log that tell of something wrong or slow, such as serialised wgmma."""
        return tuple(line.strip() for line in self.log.splitlines() if _WARNING.search(line))


def flags_for(spec: KernelSpec) -> tuple[str, ...]:
    """The flags of a spec, without the include path, which the key must not depend on."""
    return (f"-arch={spec.target}", *FLAGS, *(f"-D{name}={value}" for name, value in spec.defines))


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that CuPy finds. Raises CompileError where there is none."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


@functools.cache
def unavailable_reason(target: str) -> str | None:
    """Why nothing can be built for `target` here, from building an empty kernel; None if it can.

    Asked once per process and target. Leaves nothing on disk.
    """
    empty = KernelSpec("probe.cu", ("probe",), target, text='extern "C" __global__ void probe() {}')
    nowhere = SourceSet(Path("/"), Path("/probe.cu"), empty.text or "", (), "")
    try:
        _build(empty, nowhere)
    except (CompileError, InputError) as error:
        return str(error)
    return None


def compile_spec(spec: KernelSpec, *, fresh: bool = False) -> Compiled:
    """Build a kernel, or take it from the cache. With `fresh` the cache is written, not read.

    Raises CompileError with NVRTC's words, and InputError for an unknown target or missing file.
    """
    started = time.perf_counter()
    arch_named(spec.target)
    source = sources.read(spec.file, text=spec.text)
    key = _key(spec, source)
    if not fresh and (found := _cached(spec, key, started)):
        return found
    with cache.lock(key):
        # Whoever held the lock before has most likely built just this.
        if not fresh and (found := _cached(spec, key, started)):
            return found
        for _ in range(_EDITS_MET):
            try:
                binary, log = _build(spec, source)
            except _Rejected as rejected:
                raise _compile_error(spec, source, key, rejected.log) from None
            # NVRTC reads headers itself, later than we did: file under the key of what it saw.
            now = sources.read(spec.file, text=spec.text)
            if now.digest == source.digest:
                break
            source, key = now, _key(spec, now)
        else:
            raise CompileError(
                f"{spec.label()}: the sources keep changing while they are compiled."
            )
        resources = parse_resources(log)
        entries = tuple(resources) or tuple(_PTX_ENTRY.findall(binary.decode(errors="replace")))
        missing = [name for name in spec.entries if name not in entries]
        if missing:
            raise CompileError(
                f"{spec.label()}: expected the entries {', '.join(missing)} in {spec.file}, got "
                f'{", ".join(entries) or "none"}. Declare them extern "C" __global__.'
            )
        facts = {
            "spec": {name: getattr(spec, name) for name in SPEC_FIELDS},
            "flags": flags_for(spec),
            "nvrtc": nvrtc_version(),
            "files": source.files,
            "entries": entries,
            "resources": {name: dataclasses.asdict(value) for name, value in resources.items()},
            "log": log,
        }
        suffix = "ptx" if arch_named(spec.target).is_ptx else "cubin"
        return _compiled(spec, key, cache.publish(key, binary, suffix, facts), False, started)


def compile_source(
    source: str | Path,
    *,
    name: str | None = None,
    entries: tuple[str, ...] = (),
    target: str | None = None,
    defines: Mapping[str, object] | None = None,
) -> Compiled:
    """Build a kernel from a string or from any file, for a notebook: same flags, same cache.

    source    CUDA C++ text, or the Path of a file, which is read anew by each call. Either may
              include the headers of kernels_src.
    name      what errors call a string; "sm90/mine.cu" also lets it include what lies in sm90/
    entries   kernels that must be there; none: whatever the text defines
    target    None: KDA_JIT_ARCH, else the current GPU's
    defines   {"CHUNK": 32} is -DCHUNK=32; True and False are 1 and 0

    `kda_jit.jit.load(compiled.spec)` then puts it on the GPU.
    """
    if isinstance(source, Path):
        try:
            text = source.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"source: expected a CUDA file, got {source} ({error.strerror})."
            ) from None
        file = str(source.resolve())
    else:
        text, file = source, name or "string.cu"
    values = tuple(
        (key, str(int(value)) if isinstance(value, bool) else str(value))
        for key, value in (defines or {}).items()
    )
    return compile_spec(KernelSpec(file, entries, target or _default_target(), values, text))


def failed_spec(key: str) -> KernelSpec:
    """The spec of a failed build, by the key that its error named, to build it again alone."""
    stored = cache.failed_facts(key)["spec"]
    stored["entries"] = tuple(stored["entries"])
    stored["defines"] = tuple((name, value) for name, value in stored["defines"])
    return KernelSpec(**stored)


def parse_resources(log: str) -> dict[str, Resources]:
    """Read `--ptxas-options=-v` output, entry by entry, in the log's order."""
    found: dict[str, dict[str, int]] = {}
    called = {"spill_stores": 0, "spill_loads": 0}
    entry: str | None = None
    function: str | None = None
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            entry = match[1]
            found[entry] = dict.fromkeys((f.name for f in dataclasses.fields(Resources)), 0)
        elif match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            if entry is not None and function == entry:
                found[entry].update(stack=stack, spill_stores=stores, spill_loads=loads)
            else:
                # A function that was not inlined: any entry may call it.
                called["spill_stores"] += stores
                called["spill_loads"] += loads
        elif entry is not None and (match := _REGISTERS.search(line)):
            values = found[entry]
            values["registers"] = int(match[1])
            for amount, what in _AMOUNT.findall(line):
                if what == "bytes smem":
                    values["smem_static"] = int(amount)
                elif what == "bytes cumulative stack size":
                    values["stack"] = max(values["stack"], int(amount))
                elif what == "barriers":
                    values["barriers"] = int(amount)
                else:
                    values["const"] += int(amount)
    for values in found.values():
        for name, amount in called.items():
            values[name] += amount
    return {name: Resources(**values) for name, values in found.items()}


_WARNING = re.compile(r"warning|Potential Performance Loss", re.IGNORECASE)
_PTX_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+([A-Za-z_$][\w$]*)", re.MULTILINE)
_COMPILING = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_AMOUNT = re.compile(r"(\d+) (bytes smem|bytes cumulative stack size|barriers|bytes cmem\[\d+\])")
_ERROR = re.compile(r"\berror\b", re.IGNORECASE)
_SUMMARY = re.compile(r"\d+ errors? detected in the compilation|^\s*$")


class _Rejected(CompileError):
    """NVRTC refused a program; `log` has its words, which compile_spec makes a full error of."""


def _nvrtc() -> ModuleType:
    """CuPy's NVRTC bindings, once they are known to work."""
    try:
        from cupy.cuda import nvrtc
    except Exception as error:
        # Not only ImportError: a CuPy wheel for another CUDA fails in its own ways.
        raise CompileError(
            f"NVRTC: CuPy cannot be imported ({type(error).__name__}: {error}). Install the extra "
            "cuda12 or cuda13, whichever the driver supports: CuPy alone brings no NVRTC."
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:
        raise CompileError(
            f"NVRTC: CuPy finds no libnvrtc ({type(error).__name__}: {error}). Install the extra "
            "cuda12 or cuda13 (nvidia-cuda-nvrtc-cu12 for cupy-cuda12x, nvidia-cuda-nvrtc for "
            "cupy-cuda13x)."
        ) from error
    return nvrtc


def _own_cache_off() -> tuple[str, ...]:
    """From 12.9 on NVRTC has a cache of its own, which answers without the log of ptxas."""
    return ("--no-cache",) if nvrtc_version() >= (12, 9) else ()


def _build(spec: KernelSpec, source: SourceSet) -> tuple[bytes, str]:
    """Run NVRTC: (cubin or PTX, log). Raises _Rejected with the log where it refuses."""
    nvrtc = _nvrtc()
    # The name is a whole path: NVRTC searches its folder first, and profilers open it.
    program = nvrtc.createProgram(source.text, str(source.path), (), ())
    try:
        try:
            nvrtc.compileProgram(program, (*flags_for(spec), *_own_cache_off(), f"-I{source.root}"))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip("\0\n ")
            if "--gpu-architecture" in log:
                version = ".".join(map(str, nvrtc_version()))
                reason = f"NVRTC {version} does not know {spec.target}; a newer one may"
                raise CompileError(f"{spec.label()}: {reason}.") from None
            rejected = _Rejected(f"{spec.label()}: {log or error}")
            rejected.log = log or str(error)
            raise rejected from None
        log = nvrtc.getProgramLog(program).strip("\0\n ")
        if arch_named(spec.target).is_ptx:
            return bytes(nvrtc.getPTX(program)), log
        # CuPy takes off a last byte, as if a binary too were a string; the ELF is short without.
        return bytes(nvrtc.getCUBIN(program)) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def _key(spec: KernelSpec, source: SourceSet) -> str:
    return spec.key(flags_for(spec), nvrtc_version(), source.digest)


def _cached(spec: KernelSpec, key: str, started: float) -> Compiled | None:
    """What the cache has; facts that another version of this package wrote are a miss."""
    entry = cache.lookup(key)
    try:
        return None if entry is None else _compiled(spec, key, entry, True, started)
    except (KeyError, TypeError, AttributeError, IndexError):
        return None


def _compiled(
    spec: KernelSpec, key: str, entry: cache.Entry, from_cache: bool, started: float
) -> Compiled:
    facts = entry.facts
    return Compiled(
        spec=spec,
        key=key,
        path=entry.path,
        log=facts["log"],
        resources={name: Resources(**values) for name, values in facts["resources"].items()},
        entries=tuple(facts["entries"]),
        nvrtc=(facts["nvrtc"][0], facts["nvrtc"][1]),
        from_cache=from_cache,
        seconds=time.perf_counter() - started,
    )


def _compile_error(spec: KernelSpec, source: SourceSet, key: str, log: str) -> CompileError:
    """What was built, the compiler's words with file and line, where it lies, how to redo it."""
    facts: dict[str, Any] = {
        "spec": {name: getattr(spec, name) for name in SPEC_FIELDS},
        "flags": flags_for(spec),
        "nvrtc": nvrtc_version(),
        "files": source.files,
    }
    place = cache.publish_failed(key, source.text, log, facts)
    shown = log
    if spec.text is not None and not Path(spec.file).is_absolute():
        shown = shown.replace(str(source.path), f"<string {spec.file}>")
    shown = shown.replace(f"{source.root}/", "kernels_src/")
    lines = [line.strip() for line in shown.splitlines() if not _SUMMARY.search(line)]
    errors = [line for line in lines if _ERROR.search(line)] or lines[-3:]
    if len(errors) > _SHOWN_ERRORS:
        errors[_SHOWN_ERRORS:] = [f"and {len(errors) - _SHOWN_ERRORS} more errors"]
    version = ".".join(map(str, nvrtc_version()))
    text = [f"{spec.label()}, NVRTC {version}", *(f"  {line}" for line in errors)]
    if place is not None:
        redo = f"python -m kda_jit compile --key {key}"
        text.append(f"  source, flags and log: {place}; redo: {redo}")
    error = CompileError("\n".join(text))
    error.log = log
    error.folder = None if place is None else str(place)
    return error


def _default_target() -> str:
    """KDA_JIT_ARCH, else the current GPU's target. Raises InputError where there is neither."""
    forced = settings.arch()
    if forced is not None:
        return forced
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            'target: expected one such as "sm_90a", got None, and there is no GPU to ask.'
        )
    cc = torch.cuda.get_device_capability()
    arch = arch_for(cc)
    if arch is None:
        raise InputError(f"target: {why_no_arch(cc)}.")
    return arch.target
