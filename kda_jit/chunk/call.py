"""`kda_jit.chunk_kda`: the arguments of fla's function, checked and made into a problem of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kda_jit import api
from kda_jit.backends.base import Backend
from kda_jit.chunk.choice import forms_runner
from kda_jit.chunk.forms import Forms, parameter, tokens, v_major
from kda_jit.contract import KdaProblem, make_problem
from kda_jit.contract.checks import LARGEST, check_cu_seqlens, check_lower_bound
from kda_jit.contract.words import kind_of, refuse_shape
from kda_jit.errors import InputError
from kda_jit.resolver import asked_backend

CHUNK_SIZES = (32, 64)


class ChunkCall(NamedTuple):
    """A call that passed every check: its buffers are there, and who runs it is settled.

    runner              of ``problem``; its ``name`` is the backend's
    output_final_state  whether the final state is returned
    state_v_first       in which layout
    """

    problem: KdaProblem
    runner: Backend
    output_final_state: bool
    state_v_first: bool

    def run(self) -> tuple[Tensor, Tensor | None]:
        """(out, final state or None)."""
        p = self.problem
        api.run_problem(self.runner, p, None)
        if not self.output_final_state:
            return p.out, None
        return p.out, p.final_state if self.state_v_first else p.final_state.mT


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention with the arguments of ``fla.ops.kda.chunk_kda`` (fla-core 0.6).

    Forward only. A change of the import is all that inference code needs:

        from kda_jit import chunk_kda

    q, k         [B, T, H, K]   bf16, fp16 or fp32. Taken as they are, whatever their length,
                                unless use_qk_l2norm_in_kernel.
    v            [B, T, HV, V]  dtype of q. HV is a multiple of H.
    g            [B, T, HV, K]  log decay per token and channel, at most 0 (-inf: forget all), or
                                with use_gate_in_kernel the logits that it is made of.
    beta         [B, T, HV]     from 0 to 1, or up to 2; or with use_beta_sigmoid_in_kernel logits.
                                g and beta may have another 16-bit dtype than q, or fp32.
    scale        finite; None: K ** -0.5.
    initial_state  [N, HV, K, V] or, with state_v_first, [N, HV, V, K]; fp32 or bf16.
    output_final_state  False: None is returned in its place (it is computed all the same).
    use_qk_l2norm_in_kernel  q, k = q / |q|, k / |k|.
    use_gate_in_kernel  g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)) with lower_bound, else
                        g = -exp(A_log) * softplus(g + dt_bias). Otherwise lower_bound, A_log and
                        dt_bias are not looked at.
    use_beta_sigmoid_in_kernel  beta = sigmoid(beta), or with
    allow_neg_eigval            beta = 2 sigmoid(beta): eigenvalues in (-1, 1).
    lower_bound  below 0; within [-5, 0) if
    safe_gate    which is otherwise nothing that these kernels need to be told.
    state_v_first  the layout of both states. The fast one is True, V-major: nothing is transposed.
    cu_seqlens   [N + 1]        int32 or int64 offsets on the device; B must then be 1.
    A_log        [HV], in any shape; None with a bounded gate: zeros.
    dt_bias      [HV * K] or [HV, K]; None: zeros.
    use_graph    every call may be captured and replayed with other contents of cu_seqlens, on cuda
                 and triton; this only checks that cu_seqlens holds
    max_num_seqs sequences, where given.
    backend      "auto", "cuda", "triton" or "torch", as in `kda_jit.prefill`.

    disable_recompute and chunk_size (32 or 64) concern how fla works, not what it computes, and are
    ignored; so is cu_seqlens_cpu, since lengths are read on the device. transpose_state_layout is
    fla's old name for state_v_first. return_intermediate_states and cp_context are refused.

    Returns (out, final_state): out like v; final_state fp32, in the layout of state_v_first. The
    K-major one is a view of a V-major tensor, so that handing it back as initial_state is free; a
    contiguous K-major initial_state is transposed first, by a copy.

    The CUDA kernels take inputs that come raw: all three ``*_in_kernel``, lower_bound in [-5, 0),
    bf16, K = V = 128, no allow_neg_eigval. Triton takes the other forms with no pass of their own,
    else torch does. `kda_jit.last_launch` says what ran; backend="cuda" raises with every reason.

    Raises what `kda_jit.prefill` raises. An unknown keyword is a TypeError. Under torch.compile the
    call breaks the graph, as fla's does; `kda_jit.prefill` does not.
    """
    run = _outside_of_graphs() if is_compiling() else run_now
    return run(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound,
        disable_recompute, return_intermediate_states, state_v_first, cu_seqlens, cu_seqlens_cpu,
        cp_context, use_graph, max_num_seqs, A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size,
        transpose_state_layout=transpose_state_layout, backend=backend,
    )  # fmt: skip


def run_now(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda`, with its arguments."""
    return prepare_chunk(*args, **kwargs).run()


def _outside_of_graphs() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """`run_now`, not to be traced. Marking it imports the compiler, there while it traces."""
    from kda_jit.chunk.uncompiled import run

    return run


def prepare_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    backend: str = "auto",
) -> ChunkCall:
    """Everything of `chunk_kda` (which see) but the launch, which is the result's ``run``."""
    name, _ = asked_backend(backend)
    if return_intermediate_states:
        raise InputError(
            "return_intermediate_states: expected False, got True. The states between chunks are "
            "never in memory here; kda_jit.prefill returns one of each sequence, by "
            "checkpoint_offsets."
        )
    if cp_context is not None:
        raise InputError(
            f"cp_context: expected None, got {kind_of(cp_context)}. Context parallelism is not "
            "supported; carry the states from rank to rank by initial_state."
        )
    if transpose_state_layout is not None:
        if state_v_first:
            raise InputError(
                "transpose_state_layout: expected None along with state_v_first, its new name, got "
                f"{transpose_state_layout!r}."
            )
        warnings.warn(
            "transpose_state_layout is deprecated: fla renamed it state_v_first.",
            DeprecationWarning,
            stacklevel=3,
        )
        state_v_first = transpose_state_layout
    if chunk_size not in CHUNK_SIZES:
        raise InputError(
            f"chunk_size: expected 32 or 64, as fla has it, got {chunk_size!r}. It is ignored here."
        )
    forms = _forms(
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        safe_gate, lower_bound, A_log,
    )  # fmt: skip
    for at, x in (("q", q), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            refuse_shape(at, x, "[B, T, H, K]" if at == "q" else "[B, T, HV, V]", None)
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    N = _check_sequences(B, cu_seqlens, cu_seqlens_cpu, use_graph, max_num_seqs)
    if initial_state is not None and H and HV % H == 0:  # else the contract refuses v
        initial_state = v_major(initial_state, (N, HV, K, V), state_v_first)
    A_log, dt_bias = _parameters(forms, A_log, dt_bias, HV, K, q.device)
    p = make_problem(
        tokens(q),
        tokens(k),
        tokens(v),
        tokens(g, q.dtype),
        tokens(beta, q.dtype),
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=forms.lower_bound if forms.narrow else None,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.contiguous(),
    )
    runner = api.runner_for(p, backend, name) if forms.raw else forms_runner(p, forms, backend)
    return ChunkCall(p, runner, bool(output_final_state), bool(state_v_first))


def _forms(
    normalize: bool,
    gate: bool,
    sigmoid: bool,
    neg_eigval: bool,
    safe_gate: bool,
    lower_bound: object,
    A_log: object,
) -> Forms:
    if neg_eigval and not sigmoid:
        raise InputError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True along with it, got False. "
            "A beta that comes activated may be doubled by the caller."
        )
    beta_scale = 2.0 if neg_eigval else 1.0
    if not gate:
        return Forms(bool(normalize), "log", None, bool(sigmoid), beta_scale)
    if lower_bound is None:
        if safe_gate:
            raise InputError(
                "lower_bound: expected a number in [-5, 0) with safe_gate and use_gate_in_kernel, "
                "got None."
            )
        if A_log is None:
            raise InputError(
                "A_log: expected a tensor [HV] with use_gate_in_kernel, got None. Only the bounded "
                "gate, with lower_bound, can do without."
            )
        return Forms(bool(normalize), "softplus", None, bool(sigmoid), beta_scale)
    bound = check_lower_bound(lower_bound) if safe_gate else _any_bound(lower_bound)
    return Forms(bool(normalize), "bounded", bound, bool(sigmoid), beta_scale)


def _any_bound(value: object) -> float:
    """Without safe_gate fla asks nothing of the bound. A positive one would make states grow."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return check_lower_bound(value)
    if not -LARGEST <= value < 0:  # type: ignore[operator]
        raise InputError(f"lower_bound: expected a finite number below 0 or None, got {value!r}.")
    return float(value)


def _check_sequences(
    B: int,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: object,
    use_graph: bool,
    max_num_seqs: object,
) -> int:
    """N."""
    if cu_seqlens is None:
        return B
    N = check_cu_seqlens(cu_seqlens, B)
    if cu_seqlens_cpu is not None and (
        not isinstance(cu_seqlens_cpu, Tensor) or cu_seqlens_cpu.shape != cu_seqlens.shape
    ):
        refuse_shape(
            "cu_seqlens_cpu", cu_seqlens_cpu, "[N + 1]", (N + 1,), "It is a copy of cu_seqlens."
        )
    if use_graph and max_num_seqs is not None and max_num_seqs != N:
        raise InputError(
            f"max_num_seqs: expected the number of sequences in cu_seqlens, {N}, got "
            f"{max_num_seqs!r}. Pad cu_seqlens with its last offset."
        )
    return N


def _parameters(
    forms: Forms, A_log: Any, dt_bias: Any, HV: int, K: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of the gate, in fp32; zeros for what is not given, anything for what is not read."""
    if forms.gate == "log":
        spare = torch.empty(HV * (K + 1), dtype=torch.float32, device=device)
        return spare[HV * K :], spare[: HV * K]
    if A_log is None or dt_bias is None:
        zeros = torch.zeros(HV * (K + 1), dtype=torch.float32, device=device)
        A_log = zeros[HV * K :] if A_log is None else A_log
        dt_bias = zeros[: HV * K] if dt_bias is None else dt_bias
    return parameter(A_log), parameter(dt_bias)
