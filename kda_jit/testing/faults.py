"""Faults put into the torch backend on purpose, to see that the laws notice each of them.

    with FAULTS["transposed_state"]():
        laws.layout(Runner("torch", cpu), case)      # raises

A law that has never failed is not known to work. Each fault is of a kind that kernels have had, and
is made by replacing a named function of kda_jit.backends.torch for as long as the context lasts;
the backend itself knows nothing of it. Not for use beside other threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kda_jit.backends import torch as backend
from kda_jit.contract import KdaProblem

from .cases import Case
from .laws import LAWS, Law
from .numeric import Mismatch
from .runner import Runner

C = backend.CHUNK


#: What a fault is shown: of the recurrence all of these regimes, of any other law the first two
#: that are worth trying; of each regime two cases by turns.
PROBES = (
    "random", "mixed", "tiny", "shallow", "zero_rows", "near_keys", "large_state", "slow",
    "saturated_both", "unbounded_real",
)  # fmt: skip
PROBE_CASES = ((0, 2), (3, 1))
#: A law notices a fault clearly where an error is this many times what is allowed.
CLEARLY = 10.0


@dataclass(frozen=True)
class Fault:
    """A fault by its name. Called, a context in which the torch backend has it.

    about      what the faulty kernel does, in a sentence
    caught_by  the laws that notice it
    perhaps    laws that notice it clearly or not, as the roundings of a machine fall
    """

    name: str
    about: str
    caught_by: tuple[str, ...]
    perhaps: tuple[str, ...]
    make: Callable[[], Any]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.make():
            yield


#: Every fault by its name.
FAULTS: dict[str, Fault] = {}


def fault(caught_by: str, perhaps: str = "") -> Callable[[Callable[[], Any]], Fault]:
    """Makes a Fault of a function that returns a context manager. Both are names of laws."""

    def register(make: Callable[[], Any]) -> Fault:
        about = (make.__doc__ or "").strip()
        laws = tuple(caught_by.split()), tuple(perhaps.split())
        FAULTS[make.__name__] = found = Fault(make.__name__, about, *laws, make)
        return found

    return register


def laws_that_notice(names: Sequence[str] = tuple(LAWS)) -> dict[str, float]:
    """Of each law that the torch backend breaks as it is now: the error over what is allowed.

    Infinity where bits differ, a number is not finite, or a call raises.
    """
    subject = Runner("torch", torch.device("cpu"))
    found: dict[str, float] = {}
    for law in (LAWS[name] for name in names):
        regimes = [name for name in PROBES if law.why_not(subject, name) is None]
        if law.name != "recurrence":
            regimes = regimes[:2]
        for turn, regime in enumerate(regimes):
            rng = random.Random(f"{law.name}/{regime}")
            for index in PROBE_CASES[turn % 2]:
                if found.get(law.name, 0.0) > CLEARLY:
                    break
                ratio = _violation(law, subject, law.draw(rng, subject, regime, index))
                if ratio:
                    found[law.name] = max(found.get(law.name, 0.0), ratio)
    return found


def _violation(law: Law, subject: Runner, case: Case) -> float:
    """By how much the law breaks, 0 where it holds."""
    try:
        law(subject, case)
    except Mismatch as error:
        return error.error / error.allowed if error.allowed else inf
    except Exception:
        return inf
    return 0.0


# -- named points --------------------------------------------------------------------------------


def _around(name: str, wrap: Callable[..., Any]) -> Any:
    """Replaces a function of the module by wrap(original, *arguments)."""
    original = getattr(backend, name)
    return patch.object(backend, name, lambda *args: wrap(original, *args))


def _around_run(wrap: Callable[[Callable[[KdaProblem], None], KdaProblem], None]) -> Any:
    """Replaces the run of the backend by wrap(run, problem)."""
    original = backend.TorchBackend.run

    def run(self: backend.TorchBackend, problem: KdaProblem, workspace: Any) -> None:
        with torch.no_grad():
            wrap(lambda p: original(self, p, workspace), problem)

    return patch.object(backend.TorchBackend, "run", run)


@contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


def _problem(change: Callable[[KdaProblem], dict[str, Any]]) -> Any:
    """The backend sees a problem that differs in these fields."""
    return _around_run(lambda run, p: run(p._replace(**change(p))))


def _log_decay(p: KdaProblem, row: int, start: int, stop: int, size: int) -> Tensor:
    """[size, HV, C, K], zero past the end: what `_prepare` sums up."""
    x = p.g.new_zeros((size * C, *p.g.shape[2:]), dtype=torch.float32)
    x[: stop - start] = p.g[row, start:stop]
    g = backend.gate(p, x.view(size, C, *p.g.shape[2:]).transpose(1, 2))
    live = (torch.arange(size * C, device=g.device) < stop - start).view(size, 1, C, 1)
    return torch.where(live, g, 0.0)


# -- gates, norms, betas -------------------------------------------------------------------------


@fault("recurrence decay dtypes recurrent")
def bf16_decay() -> Any:
    """The decay of a token is rounded to bf16, where 0.9999 is 1."""
    return _around("gate", lambda gate, p, x: gate(p, x).exp().bfloat16().to(x.dtype).log())


@fault("recurrence decay dtypes recurrent")
def clamped_softplus() -> Any:
    """The bounded gate is a softplus cut off at the bound: right at both ends, wrong between."""

    def clamped(gate: Callable[..., Tensor], p: KdaProblem, x: Tensor) -> Tensor:
        if p.lower_bound is None:
            return gate(p, x)
        return gate(p._replace(lower_bound=None), x).clamp_min(p.lower_bound)

    return _around("gate", clamped)


@fault("recurrence")
def bound_of_five() -> Any:
    """The lower bound of the gate is -5 whatever the call says."""
    return _problem(lambda p: {} if p.lower_bound is None else {"lower_bound": -5.0})


@fault("recurrence decay heads dtypes recurrent")
def bias_of_first_head() -> Any:
    """dt_bias is read as one row for all heads."""
    return _problem(lambda p: {"dt_bias": p.dt_bias.view(p.HV, p.K)[:1].repeat(p.HV, 1).ravel()})


@fault("recurrence")
def eps_on_the_mean() -> Any:
    """l2norm adds its epsilon to the mean of the squares, so that it is K times too large."""
    return _around(
        "l2norm",
        lambda l2norm, x: (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * x.shape[-1] ** -0.5
        ),
    )


@fault(
    "recurrence split checkpoint linear company overwrite layout scale unit resume dense "
    "strided dtypes repeat recurrent"
)
def no_normalisation() -> Any:
    """q and k are used as they come."""
    return _around("l2norm", lambda l2norm, x: x)


@fault(
    "recurrence split checkpoint decay linear causal company poison overwrite closed layout "
    "scale unit pool resume dense strided padded grouped heads dtypes repeat recurrent"
)
def nan_of_zero_rows() -> Any:
    """l2norm has no epsilon: a row of zeros becomes NaN."""
    return _around("l2norm", lambda l2norm, x: x / x.norm(dim=-1, keepdim=True))


@fault("recurrence decay layout dtypes recurrent")
def dropped_beta() -> Any:
    """beta is 1 for every token."""
    return _problem(lambda p: {"beta": torch.full_like(p.beta, 200.0)})


@fault("recurrence decay dtypes recurrent")
def bf16_beta() -> Any:
    """beta goes through bf16 after the sigmoid."""
    return _problem(
        lambda p: {"beta": p.beta.double().sigmoid().bfloat16().double().logit(1e-30).to(p.beta)}
    )


@fault("recurrence linear dtypes recurrent")
def clipped_values() -> Any:
    """Values are clipped to 4, as by a format of few bits."""
    return _problem(lambda p: {"v": p.v.clamp(-4.0, 4.0)})


@fault("scale")
def scale_zero_is_default() -> Any:
    """A scale of 0 is taken for none."""
    return _problem(lambda p: {"scale": p.scale or p.K**-0.5})


@fault("scale")
def scale_of_first_call() -> Any:
    """The scale is compiled in and no part of the key: every call has the default."""
    return _problem(lambda p: {"scale": p.K**-0.5})


# -- inside a chunk ------------------------------------------------------------------------------


@fault("recurrence split dtypes recurrent")
def neumann_inverse() -> Any:
    """(I + L)^-1 is the product (I - L)(I + L^2)(I + L^4)(I + L^8) in half precision."""

    def neumann(A: Tensor, B: Tensor, **_: Any) -> Tensor:
        L = A.half().float()
        eye = torch.eye(A.shape[-1])
        inverse, power = eye - L, L
        for _step in range(3):
            power = (power @ power).half().float()
            inverse = (inverse @ (eye + power)).half().float()
        return inverse.to(B.dtype) @ B

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        with patch.object(torch.linalg, "solve_triangular", neumann):
            original(p)

    return _around_run(run)


@fault("recurrence split causal closed dtypes recurrent")
def sees_the_next_token() -> Any:
    """The mask inside a chunk is off by one: a token sees the one after it."""

    def tril(x: Tensor, diagonal: int | None = None) -> Tensor:
        return torch.tril(x, 1 if diagonal is None else diagonal)

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        with patch.object(torch.Tensor, "tril", tril):
            original(p)

    return _around_run(run)


@fault("recurrence split decay closed dtypes recurrent")
def decay_without_last_row() -> Any:
    """The decay of a partial chunk stops one token before the last valid one."""

    def prepare(original: Callable[..., Any], *args: Any) -> Any:
        p, row, start, stop, size = args
        c = original(*args)
        if (stop - start) % C:
            g = _log_decay(p, row, start, stop, size)
            chunk, last = divmod(stop - start - 1, C)
            c.g_total[chunk] = g[chunk, :, :last].sum(1, keepdim=True).exp()
        return c

    return _around("_prepare", prepare)


@fault(
    "recurrence split checkpoint decay linear company poison overwrite closed layout scale "
    "unit pool resume dense strided padded grouped heads dtypes repeat recurrent"
)
def missing_tail_mask() -> Any:
    """A partial chunk reads on into the rows after the sequence."""

    def prepare(original: Callable[..., Any], *args: Any) -> Any:
        p, row, start, _, size = args
        return original(p, row, start, min(start + size * C, p.T), size)

    return _around("_prepare", prepare)


@fault("recurrence")
def split_exponent() -> Any:
    """exp(G_i - G_j) is made as exp(G_i) exp(-G_j): infinity times 0 where the gate is steep."""

    def prepare(original: Callable[..., Any], *args: Any) -> Any:
        c = original(*args)
        G = _log_decay(*args).cumsum(2)
        return c._replace(k_decayed=c.k_decayed * (G.exp() * (-G).exp()))

    return _around("_prepare", prepare)


# -- from chunk to chunk -------------------------------------------------------------------------


@fault("recurrence split decay resume heads dtypes recurrent")
def carry_lost_in_one_head() -> Any:
    """The last head forgets its state at every fourth chunk boundary."""

    def prepare(original: Callable[..., Any], *args: Any) -> Any:
        c = original(*args)
        c.g_total[1:, -1] = 0.0
        return c

    return _around("_prepare", prepare)


# q and k twice as long give other roundings of fp32, which now and then fall to another bf16.
@fault("recurrence split decay linear closed resume dtypes recurrent", perhaps="unit")
def bf16_carry() -> Any:
    """From one group of chunks to the next the state is kept in bf16."""
    states: list[Tensor] = []

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        states[:] = [args[4]]
        original(*args)

    def groups(original: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        for i, group in enumerate(original(*args)):
            if i:
                states[0].copy_(states[0].bfloat16())
            yield group

    return _both(_around("_run_sequence", sequence), _around("_groups", groups))


@fault("recurrence split checkpoint closed resume dtypes recurrent")
def last_token_lost() -> Any:
    """A sequence of a length that is a multiple of 16 ends one token early."""

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        p, row, begin, end, *rest = args
        short = end > begin and (end - begin) % C == 0
        original(p, row, begin, end - short, *rest)
        if short:
            p.out[row, end - 1] = 0.0

    return _around("_run_sequence", sequence)


@fault("checkpoint decay company poison scale empty pool dense strided padded grouped repeat")
def random_order_of_sums() -> Any:
    """Sums in an order that changes from run to run, as with atomic adds."""

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        original(*args)
        args[4].mul_(1 + 1e-7 * torch.randn_like(args[4]))

    return _around("_run_sequence", sequence)


# -- states, slots, checkpoints ------------------------------------------------------------------


@fault("recurrence checkpoint decay overwrite layout resume dtypes recurrent")
def transposed_state() -> Any:
    """States are read and written [K, V]: at one with itself, and with nobody else."""

    def initial(original: Callable[..., Tensor], *args: Any) -> Tensor:
        return original(*args).mT.contiguous()

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        original(*args)
        args[4].copy_(args[4].mT.clone())

    return _both(_around("_initial_state", initial), _around("_run_sequence", sequence))


@fault("recurrence split decay company layout empty resume dtypes recurrent")
def transposed_initial_state() -> Any:
    """States are read [K, V] and written [V, K]."""
    return _around("_initial_state", lambda original, *args: original(*args).mT.contiguous())


@fault("recurrence split decay company closed layout empty resume dtypes recurrent")
def fp16_initial_state() -> Any:
    """The initial state is staged in fp16, where 65536 is infinity."""
    return _around("_initial_state", lambda original, *args: original(*args).half().float())


@fault("pool resume")
def nan_times_zero() -> Any:
    """A fresh sequence multiplies the bytes in its slot by 0 instead of selecting zero."""

    def initial(original: Callable[..., Tensor], p: KdaProblem, slot: int, keep: bool) -> Tensor:
        return original(p, slot, True) * float(keep)

    return _around("_initial_state", initial)


@fault("pool resume")
def fresh_is_ignored() -> Any:
    """has_initial_state is not looked at."""
    return _problem(lambda p: {"has_initial_state": None})


@fault(
    "recurrence checkpoint decay company poison closed layout empty pool resume dtypes recurrent"
)
def slot_minus_one() -> Any:
    """The state is read from the slot before: the neighbour's, inside the same allocation."""

    def initial(original: Callable[..., Tensor], p: KdaProblem, slot: int, keep: bool) -> Tensor:
        slots = 0 if p.initial_state is None else p.initial_state.shape[0]
        return original(p, (slot - 1) % slots if slots and slot >= 0 else slot, keep)

    return _around("_initial_state", initial)


@fault("pool")
def no_slot_is_the_last() -> Any:
    """A sequence without a slot writes its state to index -1."""

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        original(p)
        if p.state_indices is not None and bool((p.state_indices < 0).any()):
            p.final_state[-1] = 0.0

    return _around_run(run)


@fault("pool resume")
def pool_by_position() -> Any:
    """States are read by slot and written by the position in the batch."""

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        if p.state_indices is None:
            return original(p)
        pool = p.final_state.clone()
        original(p._replace(final_state=pool))
        for n, slot in enumerate(p.state_indices.tolist()):
            if slot >= 0:
                p.final_state[n] = pool[slot]
        return None

    return _around_run(run)


@fault("recurrence decay company poison empty pool resume dtypes recurrent")
def empty_is_the_one_before() -> Any:
    """A sequence without tokens ends in the state of the sequence before it."""

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        original(p)
        if p.cu_seqlens is not None and p.state_indices is None:
            for n, (begin, end) in enumerate(pairwise(p.cu_seqlens.tolist())):
                if begin == end:
                    p.final_state[n] = p.final_state[n - 1]

    return _around_run(run)


@fault("checkpoint resume")
def checkpoint_one_chunk_early() -> Any:
    """A checkpoint is taken one chunk before its offset."""

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        *front, offset = args
        original(*front, max(0, offset - C))

    return _around("_run_sequence", sequence)


@fault("checkpoint resume")
def checkpoint_is_the_end() -> Any:
    """The final state is handed out as the checkpoint."""

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        p, _, _, _, S, n, offset = args
        original(*args)
        if offset:
            p.checkpoint_state[n] = S

    return _around("_run_sequence", sequence)


@fault("checkpoint")
def checkpoint_of_nothing() -> Any:
    """The row of a sequence that asks for no checkpoint is written, too."""

    def sequence(original: Callable[..., Any], *args: Any) -> Any:
        p, _, _, _, S, n, offset = args
        if p.checkpoint_state is not None and not offset:
            p.checkpoint_state[n] = S
        original(*args)

    return _around("_run_sequence", sequence)


# -- rows, heads, strides ------------------------------------------------------------------------


@fault("padded")
def padding_is_zeroed() -> Any:
    """Rows past the last sequence are written."""

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        original(p)
        if p.cu_seqlens is not None:
            p.out[:, int(p.cu_seqlens[-1]) :] = 0.0

    return _around_run(run)


@fault(
    "recurrence split checkpoint decay linear poison overwrite closed scale unit empty pool "
    "resume strided padded grouped heads dtypes repeat"
)
def padding_is_the_last_sequence() -> Any:
    """Rows past the last sequence are taken for tokens of it."""

    def ends(p: KdaProblem) -> dict[str, Any]:
        if p.cu_seqlens is None:
            return {}
        cu_seqlens = p.cu_seqlens.clone()
        cu_seqlens[-1] = p.T
        return {"cu_seqlens": cu_seqlens}

    return _problem(ends)


@fault("recurrence dense")
def batch_is_first_row() -> Any:
    """Of a batch without cu_seqlens every row reads the first one's keys."""

    def keys(p: KdaProblem) -> dict[str, Any]:
        return {} if p.cu_seqlens is not None else {"k": p.k[:1].expand_as(p.k)}

    return _problem(keys)


@fault("strided")
def strides_are_ignored() -> Any:
    """The values are read as if they were contiguous."""

    def values(p: KdaProblem) -> dict[str, Any]:
        dense = torch.empty(p.v.shape, device="meta").stride()
        return {"v": p.v.as_strided(p.v.shape, dense)} if p.v.numel() else {}

    return _problem(values)


@fault("recurrence layout grouped heads recurrent")
def heads_in_turn() -> Any:
    """Value head h uses query head h % H instead of h // (HV // H)."""

    def repeated(p: KdaProblem) -> dict[str, Any]:
        group = p.HV // p.H
        return {"q": p.q.repeat(1, 1, group, 1), "k": p.k.repeat(1, 1, group, 1), "H": p.HV}

    return _problem(repeated)


@fault(
    "split checkpoint poison overwrite closed scale unit pool resume grouped heads dtypes repeat"
)
def values_hold_the_output() -> Any:
    """The buffer of the values is used again for the output."""

    def run(original: Callable[[KdaProblem], None], p: KdaProblem) -> None:
        original(p)
        p.v.copy_(p.out)

    return _around_run(run)
