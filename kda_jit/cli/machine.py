"""`kda-jit info` and `kda-jit explain`: what is here, and who would run a call."""

from __future__ import annotations

import enum
import os
import platform
import re
from importlib import metadata
from typing import Annotated

import typer

from ..errors import CompileError, InputError, KdaError

PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "numpy")


class Dtype(enum.StrEnum):
    """Names of the dtypes that explain knows."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"


def info() -> None:
    """Prints versions, GPUs with the target each would get, and where sources and cache lie."""
    import torch

    from .. import __version__, settings
    from ..jit import cache, sources
    from ..jit.arch import arch_for, why_no_arch
    from ..jit.compiler import nvrtc_version

    lines = [("kda_jit", __version__), ("python", platform.python_version())]
    for package in PACKAGES:
        try:
            lines.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    try:
        lines.append(("nvrtc", ".".join(map(str, nvrtc_version()))))
    except CompileError as error:
        lines.append(("nvrtc", f"none: {error}"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        cc = (found.major, found.minor)
        arch = arch_for(cc)
        target = arch.target if arch else why_no_arch(cc)
        size = f"{found.multi_processor_count} SMs, {found.total_memory / 2**30:.0f} GiB"
        name = f"{found.name}, compute capability {cc[0]}.{cc[1]}, {size}"
        lines.append((f"cuda:{index}", f"{name}; target {target}"))
    if not count:
        lines.append(("gpu", "none that torch can use"))
    try:
        lines.append(("kernels_src", str(sources.root())))
    except InputError as error:
        lines.append(("kernels_src", f"none: {error}"))
    stored = cache.info()
    lines.append(("cache", f"{stored.folders[-1]}, {stored.entries} kernels, {stored.bytes} bytes"))
    lines += [(s.name, os.environ[s.name]) for s in settings.SETTINGS if s.name in os.environ]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        typer.echo(f"{name:<{width}}  {value}")


def explain(
    head_dim: Annotated[int, typer.Option(help="K, channels of keys.")] = 128,
    value_head_dim: Annotated[int, typer.Option(help="V; 0: the same as K.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k, v, g and beta.")] = Dtype.bf16,
    lower_bound: Annotated[float, typer.Option(help="Of the bounded gate.")] = -5.0,
    unbounded: Annotated[bool, typer.Option("--unbounded", help="The softplus gate.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty: a GPU if there is one.")] = "",
    capability: Annotated[
        str, typer.Option(help="Answer for a GPU of this compute capability, such as 9.0.")
    ] = "",
    backend: Annotated[str, typer.Option(help="What the call asks for.")] = "auto",
) -> None:
    """Says for each backend whether it can run a call, and if not, why.

    Then names the backend that the call gets, and what KDA_JIT_ARCH, KDA_JIT_SCHEDULE and
    KDA_JIT_KERNELS_SRC make of it there, where that is cuda and they are set. Exits with 1 when the
    call gets no backend, or when one of these asks for what cannot be done on that GPU.
    """
    import torch

    from ..backends.base import Query, device_capability
    from ..backends.environment import environment_effects, environment_problems
    from ..contract.checks import check_lower_bound
    from ..resolver import explain as answers
    from ..resolver import resolve

    if head_dim < 1 or value_head_dim < 0:
        raise InputError(
            "head_dim, value_head_dim: expected at least 1 (V = 0: the same as K), got "
            f"{head_dim}, {value_head_dim}."
        )
    available = torch.cuda.is_available()
    try:
        place = torch.device(device or ("cuda" if available or capability else "cpu"))
    except RuntimeError as error:
        raise InputError(f"device: expected cpu, cuda or cuda:N, got {device!r}: {error}") from None
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device() if available else 0)
    query = Query(
        K=head_dim,
        V=value_head_dim or head_dim,
        dtype={
            Dtype.bf16: torch.bfloat16,
            Dtype.fp16: torch.float16,
            Dtype.fp32: torch.float32,
            Dtype.fp64: torch.float64,
        }[dtype],
        lower_bound=None if unbounded else check_lower_bound(lower_bound),
        device=place,
        capability=_capability(capability) if capability else device_capability(place),
    )
    for name, reasons in answers(query).items():
        typer.echo(f"{name:<7} {'no ' if reasons else 'yes'}  {'; '.join(reasons)}".rstrip())
    try:
        chosen = resolve(query, backend).backend
    except KdaError as error:
        typer.echo(f"{type(error).__name__}: {error}")
        raise typer.Exit(1) from None
    typer.echo(f"backend {chosen}")
    if chosen == "cuda" and query.capability is not None:
        effects = environment_effects(query.capability)
        problems = environment_problems(query.capability)
        for name, words in (effects | problems).items():
            typer.echo(f"{name}: {'the call would fail: ' if name in problems else ''}{words}")
        if problems:
            raise typer.Exit(1)


def _capability(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)\.(\d+)", text)):
        raise InputError(f"capability: expected major.minor such as 9.0, got {text!r}.")
    return int(match[1]), int(match[2])
