"""FlashKDA's Python functions, on kda_jit's kernels.

    from kda_jit.integrations import flash_kda        # instead of: import flash_kda

Arguments and their order are FlashKDA's. What it takes, this takes; beyond that q, k, v, g, beta
and out may be token-strided, v may have more heads than q, and whatever the CUDA kernels cannot do
goes to another backend (`kda_jit.last_launch()` names it).
"""

from __future__ import annotations

from torch import Tensor

from kda_jit.integrations._flashkda import forward, workspace_bytes

__all__ = ["fwd", "get_workspace_size"]


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes of scratch memory for every call within these bounds, whatever the lengths.

    T_total  tokens of one call, all sequences together
    H        heads of v
    N        sequences of one call

    For bf16 and K = V = 128.
    """
    return workspace_bytes(T_total, H, N, checkpoints=False)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """A KDA prefill; writes `out` and, where there is one, `final_state`.

    q, k         [B, T, H, K]   bf16, before normalisation
    v, out       [B, T, HV, V]  bf16
    g            [B, T, HV, K]  bf16, raw gate logits
    beta         [B, T, HV]     bf16, raw logits
    A_log        [HV]           fp32
    dt_bias      [HV, K]        fp32
    lower_bound  in [-5, 0)
    initial_state, final_state  [N, HV, V, K]  fp32 or bf16; N is B, or the sequences in cu_seqlens.
                 Without a final_state one is allocated and dropped.
    cu_seqlens   [N + 1]        int32 or int64 token offsets; B must then be 1
    workspace    bytes for the kernels, `get_workspace_size(B * T, HV, N)` of them; None: kda_jit's
                 own, kept per device and stream

    Raises what `kda_jit.prefill` raises, before anything is launched.
    """
    forward(
        q, k, v, g, beta, scale, out, workspace, A_log, dt_bias, lower_bound, initial_state,
        final_state, cu_seqlens, planned_checkpoints=False,
    )  # fmt: skip
