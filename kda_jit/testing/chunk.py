"""The judge of `kda_jit.chunk_kda`, and its arguments in every form that a prefill's can take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kda_jit import reference
from kda_jit.reference import RecurrentResult
from kda_jit.testing.cases import Inputs


def exact_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **ignored: Any,
) -> RecurrentResult:
    """What a call must return, by the float64 recurrence; states in the layout of state_v_first."""
    q, k, g, beta = (x.double() for x in (q, k, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = reference.l2norm(q), reference.l2norm(k)
    if use_gate_in_kernel:
        heads, K = g.shape[-2:]
        none = g.new_zeros(heads * K)
        A_log = none[:heads] if A_log is None else A_log
        dt_bias = none if dt_bias is None else dt_bias
        g = reference.gate(g, A_log, dt_bias, lower_bound)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
    if initial_state is not None and not state_v_first:
        initial_state = initial_state.mT
    result = reference.activated_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens
    )
    return result if state_v_first else result._replace(final_state=result.final_state.mT)


@dataclass(frozen=True)
class Form:
    """How the inputs of a prefill are handed to `chunk_kda`.

    normalize  q and k as they are, to be normalised inside; else normalised already
    gate       raw logits, else their log decay in fp32
    beta       "logits"; "negative", the same doubled inside; "given", activated, in fp32; "doubled"
    v_first    layout of the states
    """

    normalize: bool = True
    gate: bool = True
    beta: str = "logits"
    v_first: bool = True

    @property
    def raw(self) -> bool:
        """A prefill as it is."""
        return self.normalize and self.gate and self.beta == "logits"

    def __str__(self) -> str:
        words = ("norm" if self.normalize else "unit", "raw" if self.gate else "log", self.beta)
        return "-".join([*words, "vk" if self.v_first else "kv"])

    def arguments(self, x: Inputs) -> dict[str, Any]:
        """Of `chunk_kda`, with the final state asked for."""
        q, k, v, g, beta = x.args
        if not self.normalize:
            q, k = (reference.l2norm(y.double()).to(y.dtype) for y in (q, k))
        if not self.gate:
            g = reference.gate(g.double(), x.A_log, x.dt_bias, x.lower_bound).float()
        if self.beta in ("given", "doubled"):
            beta = (torch.sigmoid(beta.double()) * (1 + (self.beta == "doubled"))).float()
        state = x.initial_state
        if state is not None and not self.v_first:
            state = state.mT.contiguous()
        found = {
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "beta": beta,
            "scale": x.scale,
            "initial_state": state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": self.normalize,
            "use_gate_in_kernel": self.gate,
            "use_beta_sigmoid_in_kernel": self.beta in ("logits", "negative"),
            "allow_neg_eigval": self.beta == "negative",
            "state_v_first": self.v_first,
            "cu_seqlens": x.cu_seqlens,
        }
        if self.gate:
            found |= {"A_log": x.A_log, "dt_bias": x.dt_bias, "lower_bound": x.lower_bound}
        return found


_BETAS = ("logits", "negative", "given", "doubled")
#: Every form, each in one layout, and the first also in the other.
FORMS = tuple(
    Form(normalize, gate, beta, v_first=i % 2 == 0)
    for i, (normalize, gate, beta) in enumerate(product((True, False), (True, False), _BETAS))
)
FORMS += (replace(FORMS[0], v_first=False),)
