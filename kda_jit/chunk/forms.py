"""In which form q, k, g and beta come, and how tensors of fla's shapes become ours.

Views wherever there is one. What has none is copied, and costs that tensor read and written once:

    initial state, K-major     the states, into V-major; a K-major state that this package returned
                               is a view of a V-major one, and read in place
    q k v g beta               only where heads or channels lie apart inside a token
    g, beta                    in a 16-bit dtype other than that of q, into fp32
    A_log, dt_bias             in another dtype than fp32: HV * K elements
    cu_seqlens                 only where strided
    no A_log, no dt_bias       zeros, one fill of HV * K elements
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kda_jit.contract import LOWEST_BOUND
from kda_jit.contract.words import refuse_shape

_NARROW = (torch.bfloat16, torch.float16)


class Forms(NamedTuple):
    """What is left to do with q, k, g and beta before the recurrence.

    normalize    q and k: l2norm; else they are taken as they are, whatever their length
    gate         "log": g is the log decay; "bounded": lower_bound * sigmoid(exp(A_log) * (g +
                 dt_bias)); "softplus": -exp(A_log) * softplus(g + dt_bias)
    lower_bound  of "bounded", below 0; None otherwise
    sigmoid      beta are logits
    beta_scale   what the sigmoid is multiplied by: 2 lets eigenvalues be negative
    """

    normalize: bool
    gate: Literal["log", "bounded", "softplus"]
    lower_bound: float | None
    sigmoid: bool
    beta_scale: float

    @property
    def narrow(self) -> bool:
        """A bounded gate whose sum over 16 tokens keeps within the range of float32."""
        return self.lower_bound is not None and self.lower_bound >= LOWEST_BOUND

    @property
    def raw(self) -> bool:
        """All of it is what `kda_jit.prefill` does itself."""
        return not self.not_raw()

    def not_raw(self) -> list[str]:
        """What differs from a prefill, in words that name the argument."""
        found = []
        if not self.normalize:
            found.append("needs q and k to normalise, got use_qk_l2norm_in_kernel=False")
        if self.gate == "log":
            found.append("needs raw gate logits, got use_gate_in_kernel=False")
        if self.gate == "bounded" and not self.narrow:
            found.append(f"needs lower_bound in [{LOWEST_BOUND:g}, 0), got {self.lower_bound:g}")
        if not self.sigmoid:
            found.append("needs beta logits, got use_beta_sigmoid_in_kernel=False")
        if self.beta_scale != 1.0:
            found.append("needs beta below 1, got allow_neg_eigval=True")
        return found


def tokens(x: Tensor, wide: torch.dtype | None = None) -> Tensor:
    """Dense inside a token, as every backend reads it: x itself, or a copy.

    wide  the dtype of q for g and beta, which may have that one or fp32: another 16-bit dtype is
          widened. What is no such tensor is left for the contract to refuse.
    """
    if not isinstance(x, Tensor) or x.dim() < 3:
        return x
    if wide is not None and x.dtype is not wide and x.dtype in _NARROW:
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    if x.is_contiguous():
        return x
    apart = x.shape[1] < 2 or x.stride(1) >= prod(x.shape[2:])
    return x if apart and _is_dense(x, 2) else x.contiguous()


def parameter(x: Tensor) -> Tensor:
    """A_log or dt_bias, in fp32."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float32:
        return x.float()
    return x


def v_major(x: Tensor, shape: tuple[int, int, int, int], v_first: bool) -> Tensor:
    """An initial state in fla's layout, as ours [N, HV, V, K]; ``shape`` is N, HV, K, V."""
    N, HV, K, V = shape
    want = (N, HV, V, K) if v_first else shape
    if not isinstance(x, Tensor) or x.shape != want:
        axes = "[N, HV, V, K]" if v_first else "[N, HV, K, V]"
        other = "state_v_first=True" if v_first else "state_v_first=False, the default"
        refuse_shape("initial_state", x, axes, want, f"This is the layout of {other}.")
    if not v_first:
        x = x.mT
    return x if _is_dense(x, 1) else x.contiguous()


def _is_dense(x: Tensor, first: int) -> bool:
    """Axes from ``first`` on form one dense row-major block."""
    width = 1
    for axis in range(x.dim() - 1, first - 1, -1):
        if x.shape[axis] > 1 and x.stride(axis) != width:
            return False
        width *= x.shape[axis]
    return True
