"""`torch.ops.kda_jit.prefill` and `.recurrent`: what torch.compile and torch.export see of a call.

A kernel launched behind torch's back is invisible to a tracer, so while a call is traced the public
functions come here and put one opaque operator into the graph. Otherwise they never do: an operator
costs microseconds of dispatch, and nobody but a tracer needs it.

An operator must say what it writes, and must not return what it was given. The optional buffers of
`kda_jit.prefill` would break both rules, hence overloads, told apart by their keywords:

    prefill           makes its results and writes nothing that it was given
    prefill.inplace   returns nothing and writes output, final_state, state, checkpoint_state
    recurrent         makes its output and writes state_pool
    recurrent.inplace returns nothing and writes output, too

A pure call stays pure in the graph: the compiler may move, share or drop it, and needs no copies to
undo the mutation of buffers that nobody asked for. With the caller's own buffers in the schema,
functionalisation knows which memory changes, and Inductor writes them without a copy. Since a
schema cannot say "written only if", what is read and written has an argument of its own: ``state``
for `prefill.inplace`, ``state_pool`` against ``read_only_pool`` for `recurrent`. And ``out`` is
called ``output``, because Dynamo takes any argument called out for one of ATen's, which may be
resized and must be contiguous.

The operators run the same code as an eager call, checks included, so a wrong argument raises the
same error when the compiled code runs. While tracing, nothing is compared: it would put guards into
graphs, and lengths that only the run will know could not be traced. Scratch memory lives for one
call (torch's allocator makes that cheap): CUDA graph trees accept none that outlives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from kda_jit.api import run_problem, runner_for
from kda_jit.contract import make_problem
from kda_jit.contract.checks import check_grad
from kda_jit.contract.recurrent import make_recurrent_problem
from kda_jit.contract.words import kind_of, refuse_shape
from kda_jit.errors import InputError, InputTypeError
from kda_jit.recurrent import asked, run_recurrent
from kda_jit.resolver import asked_backend
from kda_jit.workspace import Workspace, default_workspace

_TOKENS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, *, Tensor A_log, Tensor dt_bias, "
    "float? lower_bound=-5.0, float? scale=None"
)
_POOL = (
    "Tensor(a!)? state_pool=None, Tensor? read_only_pool=None, Tensor state_indices, "
    "Tensor? num_accepted_tokens=None, Tensor? cu_seqlens=None, int? null_index=None, "
    "Tensor? has_initial_state=None"
)
SCHEMAS = (
    (
        f"prefill({_TOKENS}, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
        'Tensor? has_initial_state=None, str backend="auto") -> (Tensor, Tensor)'
    ),
    (
        f"prefill.inplace({_TOKENS}, Tensor? initial_state=None, Tensor? cu_seqlens=None, "
        "Tensor(a!) output, Tensor(b!)? final_state=None, Tensor(c!)? state=None, "
        "Tensor? state_indices=None, Tensor? has_initial_state=None, "
        "Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None, "
        'str backend="auto") -> ()'
    ),
    f'recurrent({_TOKENS}, {_POOL}, str backend="auto") -> Tensor',
    f'recurrent.inplace({_TOKENS}, {_POOL}, Tensor(b!) output, str backend="auto") -> ()',
)


# -- the public functions while they are traced --------------------------------------------------


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor | None,
    final_state: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    checkpoint_state: Tensor | None,
    checkpoint_offsets: Tensor | None,
    workspace: Workspace | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`kda_jit.prefill` as one operator; which overload depends on the buffers given."""
    _check_traceable(q)
    if workspace is not None:
        raise InputError(
            "workspace: expected None in code that is compiled or exported, got one. An operator "
            "takes tensors only; here scratch memory comes from torch's allocator, in each call."
        )
    buffers = (out, final_state, state_indices, checkpoint_state, checkpoint_offsets)
    if all(x is None for x in buffers):
        return torch.ops.kda_jit.prefill.default(
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
            has_initial_state=has_initial_state,
            backend=backend,
        )
    state = None
    if state_indices is not None:
        if final_state is not None and final_state is not initial_state:
            raise InputError(
                "final_state: expected None or the very pool given as initial_state, since "
                "state_indices makes the pool be updated in place, got another tensor. In compiled "
                "code a second view of the pool counts as another."
            )
        state, initial_state, final_state = initial_state, None, None
    elif final_state is not None and final_state is initial_state:
        state, initial_state, final_state = initial_state, None, None
    if state is None and final_state is None:
        final_state = _new_state(q, v, cu_seqlens)
    if out is None:
        out = _new_out(v)
    torch.ops.kda_jit.prefill.inplace(
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
        output=out,
        final_state=final_state,
        state=state,
        state_indices=state_indices,
        has_initial_state=has_initial_state,
        checkpoint_state=checkpoint_state,
        checkpoint_offsets=checkpoint_offsets,
        backend=backend,
    )
    written = final_state if state is None else state
    assert written is not None
    return out, written


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float | None,
    state_pool: Tensor,
    state_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    has_initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    null_index: int | None,
    write_state: bool,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    """`kda_jit.recurrent` as one operator."""
    _check_traceable(q)
    if not isinstance(write_state, bool):
        raise InputTypeError(f"write_state: expected a bool, got {kind_of(write_state)}.")
    written, read = (state_pool, None) if write_state else (None, state_pool)
    if out is None:
        return torch.ops.kda_jit.recurrent.default(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
            scale=scale,
            state_pool=written,
            read_only_pool=read,
            state_indices=state_indices,
            num_accepted_tokens=num_accepted_tokens,
            cu_seqlens=cu_seqlens,
            null_index=null_index,
            has_initial_state=has_initial_state,
            backend=backend,
        )
    torch.ops.kda_jit.recurrent.inplace(
        q,
        k,
        v,
        g,
        beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        state_pool=written,
        read_only_pool=read,
        state_indices=state_indices,
        num_accepted_tokens=num_accepted_tokens,
        cu_seqlens=cu_seqlens,
        null_index=null_index,
        has_initial_state=has_initial_state,
        output=out,
        backend=backend,
    )
    return out


def _check_traceable(q: object) -> None:
    if not isinstance(q, Tensor):
        raise InputTypeError(
            f"q: expected a torch.Tensor in code that is compiled or exported, got "
            f"{type(q).__name__}. Other arrays are for eager calls."
        )


# -- what the operators run ----------------------------------------------------------------------


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    backend: str = "auto",
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    name, _ = asked_backend(backend)
    p = make_problem(q, k, v, g, beta, **rest)
    workspace = default_workspace(q.device, 0, True) if q.is_cuda else None  # for this call alone
    run_problem(runner_for(p, backend, name), p, workspace)
    return p.out, p.final_state


def _prefill_inplace(
    *tokens: Tensor,
    output: Tensor,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    state: Tensor | None = None,
    state_indices: Tensor | None = None,
    **rest: Any,
) -> None:
    if state is None:
        if final_state is None and state_indices is None:
            _refuse_choice("final_state", "state")
    elif final_state is not None or initial_state is not None:
        raise InputError(
            "state: expected neither initial_state nor final_state along with it, got one. It is "
            "both: what is read at first and written at last."
        )
    else:
        initial_state, final_state = state, None if state_indices is not None else state
    _prefill(
        *tokens,
        out=output,
        initial_state=initial_state,
        final_state=final_state,
        state_indices=state_indices,
        **rest,
    )


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    state_pool: Tensor | None = None,
    read_only_pool: Tensor | None = None,
    backend: str = "auto",
    **rest: Any,
) -> Tensor:
    pool = read_only_pool if state_pool is None else state_pool
    if pool is None or (state_pool is not None and read_only_pool is not None):
        _refuse_choice("state_pool", "read_only_pool")
    name = asked(backend)
    p = make_recurrent_problem(
        q,
        k,
        v,
        g,
        beta,
        state_pool=pool,
        write_state=state_pool is not None,
        **rest,
    )
    run_recurrent(p, name, backend)
    return p.out.view(v.shape)


def _recurrent_inplace(*tokens: Tensor, output: Tensor, **rest: Any) -> None:
    _recurrent(*tokens, out=output, **rest)


def _refuse_choice(one: str, other: str) -> NoReturn:
    raise InputError(f"{one}, {other}: expected one of the two, got both or neither.")


# -- what a tracer is told -----------------------------------------------------------------------


def _fake_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, Tensor]:
    _check_no_grad(q, k, v, g, beta, rest)
    return _new_out(v), _new_state(q, v, cu_seqlens)


def _fake_prefill_inplace(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: object
) -> None:
    _check_no_grad(q, k, v, g, beta, rest)


def _fake_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: object
) -> Tensor:
    _check_no_grad(q, k, v, g, beta, rest)
    return _new_out(v)


_fake_recurrent_inplace = _fake_prefill_inplace


def _new_out(v: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _new_state(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[N, HV, V, K]"""
    if q.dim() != 4:
        refuse_shape("q", q, "[B, T, H, K]", None)
    if v.dim() != 4:
        refuse_shape("v", v, "[B, T, HV, V]", None)
    if cu_seqlens is not None and cu_seqlens.dim() != 1:
        refuse_shape("cu_seqlens", cu_seqlens, "[N + 1]", None)
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return q.new_empty((N, v.shape[2], v.shape[3], q.shape[3]), dtype=torch.float32)


def _check_no_grad(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, rest: dict[str, object]
) -> None:
    """Compiled code runs without grad mode and could not tell: a tracer is the last that can."""
    if torch.is_grad_enabled():
        named = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | {
            name: x for name, x in rest.items() if isinstance(x, Tensor)
        }
        check_grad(list(named), list(named.values()))


# -- registration --------------------------------------------------------------------------------

#: Strides may be refused, and decide which schedules can run: a compiler must leave them alone.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def _register() -> None:
    """Once per process; again, with what is new, where a notebook reloads or imports us anew."""
    namespace: Any = torch.ops.kda_jit
    former = getattr(namespace, "library", None)
    if former is not None:
        former._destroy()
    # The operators live as long as this object.
    library = namespace.library = torch.library.Library("kda_jit", "DEF")
    runs = (_prefill, _prefill_inplace, _recurrent, _recurrent_inplace)
    fakes: tuple[Callable[..., object], ...] = (
        _fake_prefill,
        _fake_prefill_inplace,
        _fake_recurrent,
        _fake_recurrent_inplace,
    )
    for schema, run, fake in zip(SCHEMAS, runs, fakes, strict=True):
        name = schema.partition("(")[0]
        library.define(schema, tags=_TAGS)
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kda_jit::{name}", fake, lib=library)


_register()
