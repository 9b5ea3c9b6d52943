"""What FlashKDA's Python functions and vLLM's operators of it have in common."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kda_jit.api import prefill
from kda_jit.contract.memory import check_scratch
from kda_jit.errors import InputError, InputTypeError
from kda_jit.workspace import STAGE_HEAD_DIM, Spec, Workspace, planned_bytes, workspace_specs


def workspace_bytes(T_total: int, H: int, N: int, *, checkpoints: bool) -> int:
    """Bytes of scratch memory for every call within these bounds, whatever the lengths.

    T_total, N   tokens and sequences of one call
    H            heads of v
    checkpoints  whether a call may store states in mid-sequence

    For bf16 and K = V = 128.
    """
    for name, value in (("T_total", T_total), ("H", H), ("N", N)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InputTypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}.")
        if value < 0:
            raise InputError(f"{name}: expected at least 0, got {value}.")
    return planned_bytes(_specs(T_total, H, N, checkpoints))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    *,
    planned_checkpoints: bool = True,
) -> None:
    """A prefill with the arguments of vLLM's operator, in its order.

    planned_checkpoints  whether the workspace is to be of a size for them; of one for them even
                         where this call has none, so that what is asked for depends on no step
    """
    if lower_bound is None:
        raise InputTypeError(
            "lower_bound: expected a number in [-5, 0), got None. FlashKDA has the bounded gate "
            "only; kda_jit.prefill has both."
        )
    scratch = None
    if workspace is not None:
        scratch = _scratch(workspace, q, v, cu_seqlens, planned_checkpoints)
        if scratch is not None:
            check_scratch(
                workspace,
                {
                    "q": q, "k": k, "v": v, "g": g, "beta": beta, "out": out, "A_log": A_log,
                    "dt_bias": dt_bias, "initial_state": initial_state,
                    "final_state": final_state, "cu_seqlens": cu_seqlens,
                    "checkpoint_state": checkpoint_state, "checkpoint_offsets": checkpoint_offsets,
                },
            )  # fmt: skip
    prefill(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        out=out,
        final_state=final_state,
        checkpoint_state=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
        workspace=scratch,
    )


def _scratch(
    memory: Tensor, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, checkpoints: bool
) -> Workspace | None:
    """The caller's tensor as a workspace; None for arguments that prefill will refuse."""
    if q.dim() != 4 or v.dim() != 4:
        return None
    B, T, HV, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.numel() - 1
    specs = _specs(B * T, HV, N, checkpoints, max(q.shape[3], V), q.dtype)
    hint = f"get_workspace_size({B * T}, {HV}, {N}) says how many, for bf16 and 128 channels."
    return Workspace.on(memory, specs, hint=hint)


@lru_cache(maxsize=1024)  # one step has its sizes in every layer
def _specs(
    tokens: int,
    heads: int,
    sequences: int,
    checkpoints: bool,
    channels: int = STAGE_HEAD_DIM,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Spec]:
    """What a call of these sizes needs; nothing at all is as much as one token or sequence."""
    return workspace_specs(
        max(1, tokens),
        max(1, sequences),
        max(1, heads),
        max(1, channels),
        dtype=dtype,
        checkpoints=checkpoints,
    )
