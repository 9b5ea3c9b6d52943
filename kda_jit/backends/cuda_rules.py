"""When the CUDA backend can run: a pure function of a query, and a probe of what is installed."""

from __future__ import annotations

import torch

from kda_jit.backends.base import Query, device_capability
from kda_jit.jit import arch_for, device_unavailable_reason, unavailable_reason, why_no_arch

#: Major compute capabilities that the kernels are built for. 11 is left out: nobody has run it.
CAPABILITY_MAJORS = (8, 9, 10, 12)
#: K and V of the kernels.
HEAD_DIM = 128


def cuda_rejections(query: Query) -> list[str]:
    """Every unmet condition with what was found instead; [] if the CUDA backend can run.

    The toolchain (CuPy, NVRTC) is asked once per process and target, the GPU once per device; the
    latter only if all else holds and the query is about a GPU of this machine.
    """
    reasons = rule_rejections(query)
    arch = None if query.capability is None else arch_for(query.capability)
    if arch is not None:
        missing = unavailable_reason(arch.target)
        if missing is None and not reasons and _is_here(query):
            missing = device_unavailable_reason(query.device.index or 0)
        if missing is not None:
            reasons.append(f"needs CuPy and NVRTC to build for {arch.target}: {missing}")
    return reasons


def rule_rejections(query: Query) -> list[str]:
    """The conditions on the call and the GPU's kind. Pure: nothing is imported, asked or built."""
    reasons = []
    if query.device.type != "cuda":
        reasons.append(f"needs a CUDA device, got {query.device}")
    elif query.capability is None:
        reasons.append(f"needs a CUDA device, got {query.device}, which torch cannot use here")
    elif query.capability[0] not in CAPABILITY_MAJORS:
        majors = ", ".join(f"{major}.x" for major in CAPABILITY_MAJORS)
        found = "{}.{}".format(*query.capability)
        reasons.append(f"needs compute capability {majors}, got {found}")
    else:
        unknown = why_no_arch(query.capability)
        if unknown is not None:
            reasons.append(unknown)
    for name, dtype in (
        ("q, k, v", query.dtype),
        ("g", query.g_dtype or query.dtype),
        ("beta", query.beta_dtype or query.dtype),
    ):
        if dtype is not torch.bfloat16:
            reasons.append(f"needs {name} in torch.bfloat16, got {dtype}")
    if (query.K, query.V) != (HEAD_DIM, HEAD_DIM):
        reasons.append(f"needs K = V = {HEAD_DIM}, got K = {query.K}, V = {query.V}")
    if query.lower_bound is None:
        reasons.append("needs a bounded gate, lower_bound in [-5, 0), got lower_bound = None")
    if query.misaligned:
        reasons.append(
            "needs addresses and strides that are multiples of 16 bytes, got others for "
            + ", ".join(query.misaligned)
        )
    if query.far_tokens:
        reasons.append(
            "needs tokens less than 2**30 elements apart, got others for "
            + ", ".join(query.far_tokens)
        )
    return reasons


def _is_here(query: Query) -> bool:
    """Whether the query is about a GPU of this machine, not about one that is only described."""
    return device_capability(query.device) == query.capability
