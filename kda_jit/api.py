"""The functions that users call: contract -> resolver -> backend."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kda_jit import capturing
from kda_jit.backends.base import (
    Backend,
    LaunchRecord,
    Query,
    device_capability,
    record_launch,
)
from kda_jit.contract import KdaProblem, make_problem
from kda_jit.contract.checks import check_place
from kda_jit.errors import InputTypeError
from kda_jit.resolver import Resolution, asked_backend, get_backend, resolve, resolve_backend
from kda_jit.workspace import Workspace, current_stream, default_workspace


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = -5.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    workspace: Workspace | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention over whole prompts (prefill), forward only.

    Per sequence and value head, with a state S [K, V] and for every token:

        q, k = l2norm(q), l2norm(k)              x * rsqrt(sum(x^2) + 1e-6)
        S    = diag(exp(g)) S                    g as below
        u    = sigmoid(beta) * (v - S^T k)
        S    = S + k u^T
        out  = scale * S^T q

    q, k         [B, T, H, K]   bf16, fp16 or fp32 (fp64 on "torch"), before normalisation.
    v            [B, T, HV, V]  dtype of q. HV is a multiple of H: each q/k head serves HV / H.
    g            [B, T, HV, K]  dtype of q or fp32. Raw gate logits, before activation:
                                g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), or
                                g = -exp(A_log) * softplus(g + dt_bias) for lower_bound=None;
                                natural log per token, so g = -5 keeps 0.7 % of the state.
    beta         [B, T, HV]     dtype of q or fp32. Raw logits, before the sigmoid.
    A_log        [HV]           fp32.
    dt_bias      [HV, K] or [HV * K]  fp32.
    lower_bound  in [-5, 0), or None for the unbounded gate.
    scale        finite; None: K ** -0.5. 0.0 is zero.
    initial_state  [N, HV, V, K]  fp32 or bf16, V before K; None: zero. N is the number of
                                sequences: B, or the length of cu_seqlens less one.
    cu_seqlens   [N + 1]        int32 or int64 token offsets from 0; B must then be 1. Rows of out
                                past the last offset are not written.
    out          [B, T, HV, V]  dtype of v; written. None: allocated.
    final_state  [N, HV, V, K]  fp32 or bf16; written; may be initial_state. None: allocated, fp32.
    state_indices  [N]          int32 or int64. initial_state is then a pool [slots, HV, V, K]:
                                sequence n reads and overwrites slot state_indices[n]. A negative
                                index has no slot: nothing is read or written, the state is zero
                                at first. Two sequences must not share a slot.
    has_initial_state  [N]      bool. False: starts from zero, whatever bytes its state holds.
    checkpoint_state  [N, HV, V, K]  fp32 or bf16; written: the state after the first
    checkpoint_offsets  [N]     tokens of each sequence, int32 or int64, multiples of 16; the row of
                                a 0 is not written, nor (on a GPU, where offsets are not checked)
                                that of an offset that is no multiple of 16 or beyond the sequence.
    workspace    scratch memory; None: one is kept per device and stream.
    backend      "auto", "cuda" (alias "flashkda"), "triton" or "torch".

    q, k, v, g, beta and out may have any token and batch stride, so column slices of one wide
    projection are read in place; inside a token they are dense. Inputs are never modified, nothing
    waits for the GPU, and all work goes to torch's current stream of q's device.

    Where q is an array of another library with ``__dlpack__`` (CuPy, JAX, NumPy on the CPU), any
    argument may be one, and results are arrays of q's library over the same memory. Compiled by
    torch.compile or exported, a call is one operator, ``torch.ops.kda_jit.prefill``.

    Returns (out, final_state); with state_indices, final_state is the pool.

    Raises, before anything is launched or written: InputError (ValueError) for a wrong shape,
    stride, value or overlap; InputTypeError (TypeError) for a wrong dtype or type; DeviceError,
    NoBackendError, WorkspaceError, CaptureError or GradError (all RuntimeError) for tensors on
    several devices, an explicit backend that cannot run this (with every reason), a workspace that
    is too small, a first call inside a CUDA graph capture, tensors that require grad.
    """
    if type(q) is not Tensor or is_compiling():
        other = another_way(q)
        if other is not None:
            return other.prefill(
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
                state_indices=state_indices,
                has_initial_state=has_initial_state,
                checkpoint_state=checkpoint_state,
                checkpoint_offsets=checkpoint_offsets,
                workspace=workspace,
                backend=backend,
            )
    name, _ = asked_backend(backend)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise InputTypeError(
            f"workspace: expected a kda_jit.Workspace or None, got {type(workspace).__name__}."
        )
    p = make_problem(
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
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        checkpoint_state=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
    )
    run_problem(runner_for(p, backend, name), p, workspace)
    return p.out, p.final_state


def another_way(q: object) -> ModuleType | None:
    """The module whose functions take this call: being traced, or with arrays of another library.

    None for whatever is as good as a plain tensor, and for what the contract has to refuse.
    """
    traced = is_compiling()
    if isinstance(q, Tensor):
        # FakeTensor and the like have no memory to hand to a kernel; a Parameter has.
        traced = traced or type(q).__torch_dispatch__ is not Tensor.__torch_dispatch__
    elif hasattr(q, "__dlpack__") and not traced:
        from kda_jit import arrays

        return arrays
    if traced:
        from kda_jit import ops

        return ops
    return None


#: (backend asked for, device index, dtypes, K, V, bounded, misaligned, far) -> what runs it.
_runners: dict[tuple[object, ...], Backend] = {}


def runner_for(p: KdaProblem, backend: str, name: str) -> Backend:
    """The resolver's answer, remembered under a key that is cheaper to build than a query."""
    bounded = p.lower_bound is not None
    key = (
        name, p.q.get_device(), p.q.dtype, p.g.dtype, p.beta.dtype, p.K, p.V, bounded, p.misaligned,
        p.layout.far_tokens,
    )  # fmt: skip
    found = _runners.get(key)
    if found is None:
        device = p.device
        query = Query(
            K=p.K,
            V=p.V,
            dtype=p.q.dtype,
            # Only whether there is one matters, so that all bounds share what is remembered.
            lower_bound=-5.0 if bounded else None,
            device=device,
            capability=device_capability(device),
            g_dtype=p.g.dtype,
            beta_dtype=p.beta.dtype,
            misaligned=p.misaligned,
            far_tokens=p.layout.far_tokens,
        )
        found = get_backend(resolve(query, backend).backend)
        _runners[key] = found
    return found


def run_problem(backend: Backend, p: KdaProblem, workspace: Workspace | None) -> None:
    """On the problem's device, whatever the current one, and torch's current stream there."""
    if (tap := capturing.recorder) is not None:
        backend = tap.tapped(backend)
    q = p.q
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            _run(backend, p, workspace)
    else:
        _run(backend, p, workspace)


def _run(backend: Backend, p: KdaProblem, workspace: Workspace | None) -> None:
    """With the problem's device current."""
    if p.is_empty and _settle_empty(p):
        record_launch(LaunchRecord("none"))
        return
    device = p.layout.device
    if device.type == "cuda":
        stream = current_stream(device)
        capturing = torch.cuda.is_current_stream_capturing()
        if workspace is None:
            workspace = default_workspace(device, stream, capturing)
        workspace.acquire(device, stream, capturing)
        try:
            backend.run(p, workspace)
        finally:
            workspace.release()
    elif workspace is None:
        backend.run(p, None)
    else:
        with workspace.in_use(device):
            backend.run(p, workspace)


def _settle_empty(p: KdaProblem) -> bool:
    """Final states of sequences without tokens, where no kernel of ours is needed for that.

    False for fresh sequences in a pool: which slots to clear only the device knows, and torch can
    clear them neither without waiting for it nor without touching others.
    """
    if p.N == 0:
        return True
    if p.is_pool:
        return p.has_initial_state is None
    with torch.no_grad():
        if p.initial_state is None:
            p.final_state.zero_()
        elif p.has_initial_state is None:
            p.final_state.copy_(p.initial_state)
        else:
            kept = p.has_initial_state.view(-1, 1, 1, 1)
            p.final_state.copy_(torch.where(kept, p.initial_state, 0.0))
    return True


def warmup(
    device: torch.device | str | None = None,
    *,
    backend: str = "auto",
    num_heads: int = 1,
    num_value_heads: int | None = None,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    lower_bound: float | None = -5.0,
    state_dtype: torch.dtype = torch.float32,
) -> Resolution:
    """Compiles and loads what later calls of this kind need, so that none is a first call.

    A CUDA graph capture must not be the first to need a kernel; call this before. For the CUDA
    backend the device alone matters. Triton compiles by option, too: dense and packed batches, with
    and without states, and pools are run once each on a few tokens of zeros; for anything rarer
    (checkpoints, strided inputs) run the very call once instead.

    device           None: the current GPU, or the CPU where there is none
    num_heads        H; num_value_heads, HV: the same unless given
    state_dtype      fp32 or bf16, of states in and out

    Returns what ``resolve_backend`` says for it, and raises what that raises; DeviceError for a
    device that torch cannot use.
    """
    place = check_place(device)
    resolution = resolve_backend(
        backend, head_dim=head_dim, dtype=dtype, lower_bound=lower_bound, device=place
    )
    if resolution.backend == "cuda":
        from kda_jit.backends import cuda

        with torch.cuda.device(place):
            cuda.warmup(place)
    elif resolution.backend == "triton":
        _run_each_option(
            place,
            num_heads,
            num_value_heads or num_heads,
            head_dim,
            dtype,
            lower_bound,
            state_dtype,
        )
    return resolution


def _run_each_option(
    device: torch.device,
    H: int,
    HV: int,
    D: int,
    dtype: torch.dtype,
    lower_bound: float | None,
    state_dtype: torch.dtype,
) -> None:
    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    T = 64
    ends = torch.tensor([0, T // 2, T], dtype=torch.int32, device=device)
    slots = torch.tensor([0, 1], dtype=torch.int32, device=device)
    fresh = torch.zeros(2, dtype=torch.bool, device=device)
    states = zeros(2, HV, D, D, dtype=state_dtype)
    final = torch.zeros_like(states)
    options: tuple[dict[str, Tensor], ...] = (
        {},
        {"initial_state": states[:1], "final_state": final[:1]},
        {"cu_seqlens": ends},
        {"cu_seqlens": ends, "initial_state": states, "final_state": final},
        {"cu_seqlens": ends, "initial_state": states, "state_indices": slots},
        {
            "cu_seqlens": ends,
            "initial_state": states,
            "state_indices": slots,
            "has_initial_state": fresh,
        },
    )
    for option in options:
        prefill(
            zeros(1, T, H, D),
            zeros(1, T, H, D),
            zeros(1, T, HV, D),
            zeros(1, T, HV, D),
            zeros(1, T, HV),
            A_log=zeros(HV, dtype=torch.float32),
            dt_bias=zeros(HV * D, dtype=torch.float32),
            lower_bound=lower_bound,
            backend="triton",
            **option,  # type: ignore[arg-type]
        )
