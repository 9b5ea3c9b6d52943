"""Token by token: what users call for decode and for the verification of drafts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from kda_jit import capturing
from kda_jit.api import another_way
from kda_jit.backends import recurrent_torch, recurrent_triton
from kda_jit.backends.base import LaunchRecord, Query, device_capability, record_launch
from kda_jit.contract.recurrent import RecurrentProblem, make_recurrent_problem
from kda_jit.errors import NoBackendError
from kda_jit.resolver import asked_backend, rejections, resolve


def recurrent(
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
    state_pool: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    null_index: int | None = None,
    write_state: bool = True,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Kimi Delta Attention for a few tokens of each sequence, in place on a pool of states.

    The same recurrence as :func:`kda_jit.prefill`, one token after the other: plain decode (one
    token per sequence) and speculative verification (1 + num_spec). Forward only.

    q, k         [B, T, H, K]   bf16, fp16 or fp32 (fp64 on "torch"), before normalisation.
    v            [B, T, HV, V]  dtype of q. HV is a multiple of H: each q/k head serves HV / H.
    g            [B, T, HV, K]  dtype of q or fp32. Raw gate logits, before activation.
    beta         [B, T, HV]     dtype of q or fp32. Raw logits, before the sigmoid.
                                All five, and out, may come without their batch axis: [T, H, K] is
                                [1, T, H, K] with cu_seqlens and [T, 1, H, K], T sequences of one
                                token, without.
    A_log        [HV]           fp32.
    dt_bias      [HV, K] or [HV * K]  fp32.
    lower_bound  in [-5, 0), or None for the unbounded gate.
    scale        finite; None: K ** -0.5. 0.0 is zero.
    state_pool   [slots, HV, V, K]  fp32 or bf16, V before K; read and written in place.
    state_indices  [N] or [N, 1 + num_spec]  int32 or int64, any strides, such as columns of a block
                                table. [N]: sequence n starts from the state in its slot, and the
                                state after its last token goes back there. [N, 1 + num_spec]: the
                                state after its token j goes to the slot in column j, so that a
                                later rejection rolls back by choosing a column; a sequence has no
                                more tokens than there are columns. Two sequences must not share a
                                slot that is written.
    num_accepted_tokens  [N]    int32 or int64, any positive stride. Sequence n starts from the
                                state in column num_accepted_tokens[n] - 1, the last one that the
                                step before accepted; None: from column 0. 0 keeps the state:
                                nothing is read or written, and the output rows are zero.
    has_initial_state  [N]      bool, contiguous. False: starts from zero, whatever bytes lie in the
                                slot that it would start from; without such a slot it is padding as
                                any other. None: all have a state.
    cu_seqlens   [N + 1]        int32 or int64 token offsets from 0 (an engine's query_start_loc); B
                                must then be 1. None: each of the B rows is a sequence. Rows of out
                                past the last offset are not written; a sequence without tokens
                                keeps what its slot holds.
    null_index   an index that means no slot, as every negative one does; None: no other does. A
                 sequence that would start from no slot is padding: nothing of it is read or
                 written, and its output rows are zero. A column without a slot takes no state.
    write_state  False: verify without touching the pool; the output is the same, bit for bit.
    out          [B, T, HV, V]  dtype of v; written. None: allocated.
    backend      "auto", "triton" or "torch". There is no CUDA kernel for this, so that where the
                 environment asks for "cuda", "auto" still takes the first of the two that can.

    Tensors per token may have any token and batch stride. Gates and beta are computed in float32,
    the state is kept in float32 from the first token to the last and rounded where it is stored.
    Inputs are never modified; "triton" never waits for the GPU and can be captured in a CUDA graph;
    all work goes to torch's current stream of q's device. The contents of index tensors on a GPU
    are not checked: there a sequence with more tokens than columns, with a count of accepted tokens
    that no column answers to, or with a slot outside the pool, is treated as padding.

    Arrays of other libraries, torch.compile and torch.export: as for :func:`kda_jit.prefill`.

    Returns out. Raises what :func:`kda_jit.prefill` raises, before anything is launched or written.
    """
    if type(q) is not Tensor or is_compiling():
        other = another_way(q)
        if other is not None:
            return other.recurrent(
                q,
                k,
                v,
                g,
                beta,
                A_log=A_log,
                dt_bias=dt_bias,
                lower_bound=lower_bound,
                scale=scale,
                state_pool=state_pool,
                state_indices=state_indices,
                num_accepted_tokens=num_accepted_tokens,
                has_initial_state=has_initial_state,
                cu_seqlens=cu_seqlens,
                null_index=null_index,
                write_state=write_state,
                out=out,
                backend=backend,
            )
    name = asked(backend)
    p = make_recurrent_problem(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        state_pool=state_pool,
        state_indices=state_indices,
        num_accepted_tokens=num_accepted_tokens,
        has_initial_state=has_initial_state,
        cu_seqlens=cu_seqlens,
        null_index=null_index,
        write_state=write_state,
        out=out,
    )
    run_recurrent(p, name, backend)
    if out is not None:
        return out
    return p.out if v.dim() == 4 else p.out.view(v.shape)


def asked(backend: str) -> str:
    """The name of the backend asked for, or "auto"."""
    name, source = asked_backend(backend)
    if name != "cuda":
        return name
    if backend != "auto":
        raise NoBackendError(
            f"{source}: expected 'auto', 'triton' or 'torch', got {backend!r}. The CUDA "
            "kernels are for whole prompts; decode and verification run in Triton."
        )
    return "auto"


def run_recurrent(p: RecurrentProblem, name: str, backend: str) -> None:
    """A legal call. `name` is what `asked(backend)` says."""
    run = _runner(p, backend, name)
    if (tap := capturing.recorder) is not None:
        run = tap.tapped_recurrent(run)
    if p.is_empty:
        record_launch(LaunchRecord("none"))
    elif p.q.is_cuda and p.q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(p.q.device):
            run(p)
    else:
        run(p)


_Run = Callable[[RecurrentProblem], None]

#: (backend asked for, device index, dtypes, K, V) -> what runs it.
_runners: dict[tuple[object, ...], _Run] = {}


def _runner(p: RecurrentProblem, backend: str, name: str) -> _Run:
    """The answer of the resolver and its backends, which take here what they take in a prefill."""
    key = (name, p.q.get_device(), p.q.dtype, p.g.dtype, p.beta.dtype, p.K, p.V)
    found = _runners.get(key)
    if found is None:
        query = Query(
            K=p.K,
            V=p.V,
            dtype=p.q.dtype,
            lower_bound=-5.0,  # neither backend minds the gate
            device=p.device,
            capability=device_capability(p.device),
            g_dtype=p.g.dtype,
            beta_dtype=p.beta.dtype,
        )
        if name == "auto":
            name = "torch" if rejections("triton", query) else "triton"
        else:
            resolve(query, backend)  # refuses, with every reason, what cannot run
        found = recurrent_triton.run if name == "triton" else recurrent_torch.run
        _runners[key] = found
    return found
