"""The laws of Kimi Delta Attention: what every prefill obeys, whoever wrote it.

    from kda_jit.testing import Case, laws
    from kda_jit.testing.runner import Runner

    laws.split(Runner("torch", torch.device("cpu")), Case(seed=1, lengths=(65,)), cut=17)

A law takes a Subject (kda_jit.testing.runner) and a Case, makes the case's tensors, and raises an
AssertionError whose words end with the case. What it is free to choose beyond that, such as where
to cut, may be given by name; left out, it follows from the case's seed, so that a case alone says
all that is needed to see a failure again. A law that holds returns what it measured.

The float64 reference is a Subject, too: a law that it breaks is a wrong law.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from kda_jit.reference import l2norm

from .cases import Inputs
from .numeric import relative_rms
from .trial import (
    EVERY,
    GRANULE,
    LAWS,
    MILD,
    NOT_WORTH_TRYING,
    TOKEN_INPUTS,
    Law,
    Measured,
    Trial,
    law,
    live_rows,
)

__all__ = ["EVERY", "GRANULE", "LAWS", "MILD", "NOT_WORTH_TRYING", "Law", "Measured", "Trial"]


def _bits(x: Tensor) -> Tensor:
    """For comparing tensors that hold NaN."""
    return x.contiguous().view(torch.uint8)


def _nan_states(x: Inputs, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, HV, V, K] for a call to fill."""
    shape = (x.N, *x.v.shape[2:], x.q.shape[3])
    return torch.full(shape, torch.nan, dtype=dtype, device=x.q.device)


def _rms_log_decay(initial: Tensor, final: Tensor) -> float:
    """How often e-fold what is left has decayed, in the sequence and head where it is most."""
    initial, final = initial.double(), final.double()
    left = final.square()
    # A state of rounded numbers may be zero somewhere, and even the least beta writes to it.
    folds = torch.where((left > 0) & (initial != 0), (final / initial).log(), 0.0)
    share = (left * folds.square()).sum((-2, -1)) / left.sum((-2, -1)).clamp_min(1e-300)
    return share.max().sqrt().item()


# -- against the recurrence ----------------------------------------------------------------------


@law(sequences=4)
def recurrence(t: Trial) -> None:
    """Outputs and final states are finite and those of the token loop in float64."""
    x = t.x
    want = x.reference()
    out, state = t.run(x)
    t.holds(bool(torch.isfinite(out).all()), "out: not finite")
    t.holds(bool(torch.isfinite(state).all()), "final_state: not finite")
    out_limit, state_limit = t.subject.limits(x, want)
    t.close("out", out, want.out[:, : out.shape[1]], out_limit, x)
    t.close("final_state", state, want.final_state, state_limit)


# -- one run against another ---------------------------------------------------------------------


@law(regimes=(*MILD, "unbounded"), sequences=1, packed=True)
def split(t: Trial, *, cut: int | None = None) -> None:
    """Running [0, cut), then [cut, T) from its final state, is running [0, T)."""
    x, T = t.x, t.lengths[0]
    cut = t.rng.choice([t.rng.randint(0, T), GRANULE, GRANULE + 1]) if cut is None else cut
    cut = min(cut, T)
    out, state = t.run(x)
    first_out, middle = t.run(x.pack([(0, 0, cut)]))
    rest_out, end = t.run(x.pack([(0, cut, T)]).replace(initial_state=middle))
    out_limit, state_limit = t.twice(x)
    t.close("out", torch.cat([first_out, rest_out], 1), out, out_limit, x)
    t.close("final_state", end, state, state_limit)


@law(needs=("checkpoint",), sequences=4)
def checkpoint(t: Trial, *, offsets: Sequence[int] | None = None) -> None:
    """A checkpoint is, bit for bit, the final state of the sequence cut there; all else stays.

    What follows a checkpoint may be rounded otherwise: it may begin a chunk.

    offsets  one per sequence, multiples of 16; 0 for none
    """
    x = t.x
    if offsets is None:
        counts = [n // GRANULE for n in t.lengths]
        offsets = [GRANULE * t.rng.choice((n, t.rng.randint(0, n))) for n in counts]
    kept = _nan_states(x)
    out, state = t.run(
        x,
        checkpoint_state=kept,
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32, device=t.device),
    )
    plain_out, plain_state = t.run(x)
    out_limit, state_limit = t.twice(x)
    t.close("out", out, plain_out, out_limit, x)
    t.close("final_state", state, plain_state, state_limit)
    for n, offset in enumerate(offsets):
        if offset:
            cut = x.pack([(n, 0, offset)])
            t.same("checkpoint_state", kept[n : n + 1], t.run(cut)[1], cut)
        else:
            t.holds(bool(kept[n].isnan().all()), f"row {n}, without a checkpoint, was written")


@law(regimes=("slow", "mixed", "saturated_open", "large_state"), sequences=2, initial=True)
def decay(t: Trial) -> None:
    """With beta = 0 nothing is learnt: the state only decays, whatever the keys and values.

    Log decays may be rounded to 11 bits, as f16 and tf32 have: by 2^-12 of themselves, and by as
    much of their sum the state errs relative to what is left of it.
    """
    x = t.x.replace(beta=torch.full_like(t.x.beta, -200.0))
    _, state = t.run(x)
    want = x.reference()
    assert x.initial_state is not None
    limit = t.subject.limits(x, want)[1]
    log_decay = _rms_log_decay(x.initial_state, want.final_state)
    allowed = replace(limit, slack=limit.slack + 2.0**-12 * log_decay)
    t.close("final_state", state, want.final_state, allowed)
    other = x.replace(k=x.k.roll(1, -1), v=-x.v)
    t.equal("final_state", t.run(other)[1], state)


@law(regimes=("random", "slow", "mixed", "shallow"), sequences=2, initial=True)
def linear(t: Trial) -> None:
    """Output and final state are linear in the values and the initial state together.

    Values are small integers, so that 2 v1 - v2 is exact in every dtype.
    """
    x = t.x
    assert x.initial_state is not None

    def integers(like: Tensor, seed: int, scale: float) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return (torch.randint(-8, 9, like.shape, generator=g) * scale).to(like)

    v1, v2 = integers(x.v, 1, 1.0), integers(x.v, 2, 1.0)
    s1, s2 = integers(x.initial_state, 3, 0.0625), integers(x.initial_state, 4, 0.0625)
    both = x.replace(v=2 * v1 - v2, initial_state=2 * s1 - s2)
    o1, f1 = t.run(x.replace(v=v1, initial_state=s1))
    o2, f2 = t.run(x.replace(v=v2, initial_state=s2))
    out, state = t.run(both)
    out_limit, state_limit = t.twice(both)
    t.close("out", out, 2 * o1.double() - o2.double(), out_limit, x)
    t.close("final_state", state, 2 * f1.double() - f2.double(), state_limit)


@law(regimes=MILD, sequences=1, packed=True)
def causal(t: Trial, *, cut: int | None = None, seed: int | None = None) -> None:
    """Tokens from `cut` on do not matter to what comes before them; to what follows, they do."""
    x, T = t.x, t.lengths[0]
    cut = min(t.rng.randint(0, max(0, T - 1)) if cut is None else cut, T)
    seed = t.case.seed + 1 if seed is None else seed
    y = t.tensors(t.case.replace(seed=1000 + seed))
    changed = x.replace(
        **{
            name: torch.cat([getattr(x, name)[:, :cut], getattr(y, name)[:, cut:]], 1)
            for name in TOKEN_INPUTS
        }
    )
    out, other = t.run(x)[0], t.run(changed)[0]
    before = x.pack([(0, 0, cut)])
    t.same("out", other[:, :cut], out[:, :cut], before)
    heard = other[:, cut:T].ne(out[:, cut:T]).any()
    if cut < T and not heard:  # as it should be where queries or values are all zero
        same = torch.equal(x.reference().out[:, cut:T], changed.reference().out[:, cut:T])
        t.holds(same, "out: deaf to its own tokens")


@law(sequences=4, packed=True)
def company(t: Trial, *, order: random.Random | None = None) -> None:
    """A sequence alone is the same sequence among others, in any order, with empty ones between."""
    x = t.x
    places = list(range(x.N)) * 2  # each twice, in different company
    (order or t.rng).shuffle(places)
    pieces = [(n, 0, t.lengths[n]) for n in places]
    empty = (t.rng.randrange(x.N), 0, 0)
    pieces = [*pieces[:1], empty, empty, *pieces[1:], empty]
    mixed = x.pack(pieces)
    out, state = t.run(mixed)
    alone = {n: t.run(x.sequence(n)) for n in set(places)}
    for i, (n, _, length) in enumerate(pieces):
        if length != t.lengths[n]:
            continue  # one of those without tokens
        one = x.sequence(n)
        got = out[:, mixed.bounds[i] : mixed.bounds[i + 1]]
        t.same("out", got, alone[n][0], one)
        t.same("final_state", state[i : i + 1], alone[n][1], one)


@law(sequences=4, packed=True, initial=True)
def poison(t: Trial, *, victim: int | None = None, what: str | None = None) -> None:
    """NaN in one sequence stays in that sequence.

    what  "all": in its tokens and its initial state; "state": in its initial state only
    """
    x = t.x
    victim = t.rng.randrange(x.N) if victim is None else min(victim, x.N - 1)
    what = t.rng.choice(("all", "state")) if what is None else what
    out, state = t.run(x)
    begin, end = x.bounds[victim : victim + 2]
    assert x.initial_state is not None
    bad = {"initial_state": x.initial_state.clone()}
    bad["initial_state"][victim] = torch.nan
    if what == "all":
        bad |= {name: getattr(x, name).clone() for name in TOKEN_INPUTS}
        for name in TOKEN_INPUTS:
            bad[name][:, begin:end] = torch.nan
    bad_out, bad_state = t.run(x.replace(**bad))
    for n in range(x.N):
        if n != victim:
            rows = slice(x.bounds[n], x.bounds[n + 1])
            one = x.sequence(n)
            t.same("final_state", bad_state[n : n + 1], state[n : n + 1], one)
            t.same("out", bad_out[:, rows], out[:, rows], one)
    t.holds(bool(bad_state[victim].isnan().all()), "final_state: the poison had no effect")


@law(regimes=("random", "shallow"), sequences=2)
def overwrite(t: Trial) -> None:
    """With no decay and beta 1, the state answers a repeated key with the last value written."""
    x = t.x
    key = x.k[:1, :1] if live_rows(x) else x.k.new_ones(1, 1, *x.k.shape[2:])
    x = x.replace(
        k=key.expand_as(x.k).contiguous(),
        g=torch.full_like(x.g, -200.0),
        beta=torch.full_like(x.beta, 200.0),
    )
    _, state = t.run(x)
    group = x.v.shape[2] // x.k.shape[2]
    unit = l2norm(key.double())[0, 0].repeat_interleave(group, 0)  # [HV, K]
    values = x.v.flatten(0, 1)
    limit = 2 * t.subject.limits(x)[1].allowed
    for n, (begin, end) in enumerate(pairwise(x.bounds)):
        if begin < end:
            recalled = torch.einsum("hvk,hk->hv", state[n].double(), unit)
            t.close("recalled", recalled[None, None], values[end - 1][None, None], limit)


@law(regimes=("random", "saturated_both", "large_state", "unbounded"), packed=True)
def closed(t: Trial) -> None:
    """With the gate closed only the last tokens are remembered: e^-80 of all before 16 of them."""
    x = t.x.replace(g=torch.full_like(t.x.g, 200.0), A_log=torch.zeros_like(t.x.A_log))
    if x.lower_bound is not None:
        x = x.replace(lower_bound=-5.0)
    out, state = t.run(x)
    last = [max(0, n - GRANULE) for n in t.lengths]
    fresh = x.initial_state
    if fresh is not None:  # a sequence of no more than 16 tokens keeps its initial state
        fresh = fresh.clone()
        fresh[[first > 0 for first in last]] = 0.0
    tail = x.pack([(n, first, t.lengths[n]) for n, first in enumerate(last)])
    tail = tail.replace(initial_state=fresh)
    tail_out, tail_state = t.run(tail)
    out_limit, state_limit = t.twice(tail)
    t.close("final_state", state, tail_state, state_limit)
    rows = [
        row for n, first in enumerate(last) for row in range(x.bounds[n] + first, x.bounds[n + 1])
    ]
    # The first of the 16 still sees e^-5 of what was before.
    settled = torch.ones(len(rows), dtype=torch.bool)
    for n, first in enumerate(last):
        if first:
            settled[tail.bounds[n] : tail.bounds[n] + GRANULE // 2] = False
    keep = settled.nonzero().flatten().to(out.device)
    if len(keep):
        got = out[:, torch.tensor(rows, device=out.device)]
        t.close("out", got[:, keep], tail_out[:, keep], out_limit)


@law(regimes=("random", "slow", "uneven"), packed=True, initial=True)
def layout(t: Trial) -> None:
    """A state is [V, K]: one token writes v k^T, and reads S q. With K = V no shape shows it."""
    x = t.x
    some = [n for n, length in enumerate(t.lengths) if length]
    if not some:
        return
    one = x.pack([(n, 0, 1) for n in some])
    one = one.replace(g=torch.full_like(one.g, -200.0))
    q, k = (
        l2norm(y[0].double()).repeat_interleave(x.v.shape[2] // x.q.shape[2], 1)
        for y in (one.q, one.k)
    )
    write = one.replace(beta=torch.full_like(one.beta, 200.0), initial_state=None)
    read = one.replace(beta=torch.full_like(one.beta, -200.0))
    assert read.initial_state is not None
    written = one.v[0].double().unsqueeze(-1) * k.unsqueeze(-2)  # [n, HV, V, K]
    scale = x.q.shape[-1] ** -0.5 if x.scale is None else x.scale
    recalled = scale * torch.einsum("nhvk,nhk->nhv", read.initial_state.double(), q)
    t.close("written_state", t.run(write)[1], written, t.subject.limits(write)[1])
    t.close("out", t.run(read)[0], recalled.unsqueeze(0), t.subject.limits(read)[0], read)

    # A subject that is blind to the state it is given would pass as well without this.
    out, state = t.run(x)
    flipped = x.replace(initial_state=read_transposed(x))
    other_out, other_state = t.run(flipped)
    if t.case.regime == "slow":
        for name, got, want in (("out", other_out, out), ("state", other_state, state)):
            t.holds(
                relative_rms(got, want) > 0.01,
                f"{name}: a transposed initial state changes nothing",
            )


def read_transposed(x: Inputs) -> Tensor:
    """The initial state with K and V exchanged: the same shape where K = V."""
    assert x.initial_state is not None
    return x.initial_state.mT.contiguous()


@law(regimes=("random", "slow", "shallow"), sequences=2)
def scale(t: Trial, *, value: float | None = None) -> None:
    """scale multiplies the output and nothing else; None is K^-0.5, and 0.0 is zero."""
    x = t.x
    value = t.rng.choice((1.0, -0.1, 0.5, 3.0)) if value is None else value
    out, state = t.run(x.replace(scale=None))
    factor = value * x.q.shape[-1] ** 0.5
    scaled, scaled_state = t.run(x.replace(scale=value))
    out_limit, _ = t.twice(x)
    t.close("out", scaled, factor * out.double(), out_limit, x)
    t.same("final_state", scaled_state, state, x)
    nothing, nothing_state = t.run(x.replace(scale=0.0))
    t.holds(not nothing.any(), "out: scale 0.0 is not zero")
    t.same("final_state", nothing_state, state, x)


@law(regimes=("random", "slow", "mixed", "saturated_both", "uneven"))
def unit(t: Trial, *, power: int | None = None) -> None:
    """q and k count by their direction: 2^n times as long ones give the same."""
    x = t.x
    power = t.rng.randint(1, 6) if power is None else power
    out, state = t.run(x)
    longer_out, longer_state = t.run(x.replace(q=x.q * 2.0**power, k=x.k * 2.0**power))
    out_limit, state_limit = t.twice(x)
    t.close("out", longer_out, out, out_limit, x)
    t.close("final_state", longer_state, state, state_limit)


@law(sequences=3)
def empty(t: Trial) -> None:
    """A sequence without tokens keeps its initial state, or has zero; first, last and in a row."""
    case = t.case
    if case.packed:
        case = case.replace(lengths=(0, *case.lengths, 0, 0))
    else:
        case = case.replace(lengths=(0,) * len(case.lengths))
    x = t.tensors(case)
    _, state = t.run(x)
    for n, length in enumerate(case.lengths):
        if length == 0:
            want = torch.zeros_like(state[n]) if x.initial_state is None else x.initial_state[n]
            t.equal(f"sequence {n}, final_state", state[n], want.to(state.dtype))


# -- other ways to say the same ------------------------------------------------------------------


@law(needs=("pool",), sequences=4, packed=True, initial=True)
def pool(
    t: Trial, *, slots: Sequence[int] | None = None, kinds: Sequence[str] | None = None
) -> None:
    """Slots of a pool are dense states in place; -1 is no slot; fresh sequences read no old bytes.

    slots  of each sequence, in a pool of three more than there are sequences, all else NaN
    kinds  of each sequence: "old", it has an initial state; "fresh", it has none; "none", no slot
    """
    x, N = t.x, t.x.N
    assert x.initial_state is not None
    slots = t.rng.sample(range(N + 3), N) if slots is None else slots
    if kinds is None:
        kinds = [t.rng.choice(("old", "old", "fresh", "none")) for _ in range(N)]
        kinds[t.rng.randrange(N)] = "fresh"
    states = torch.full((N + 3, *x.initial_state.shape[1:]), torch.nan, device=t.device)
    states = states.to(x.initial_state.dtype)
    dense = torch.zeros_like(x.initial_state)
    for n, kind in enumerate(kinds):
        if kind == "old":
            states[slots[n]] = dense[n] = x.initial_state[n]
    index = [-1 if kind == "none" else slot for kind, slot in zip(kinds, slots, strict=True)]
    before = states.clone()
    final = torch.empty_like(dense)
    want_out, _ = t.run(x.replace(initial_state=dense), final_state=final)
    out, returned = t.run(
        x.replace(initial_state=states),
        state_indices=torch.tensor(index, dtype=torch.int32, device=t.device),
        has_initial_state=torch.tensor([k == "old" for k in kinds], device=t.device),
    )
    t.holds(returned.data_ptr() == states.data_ptr(), "final_state: not the pool")
    t.equal("out", out, want_out)
    for n, slot in enumerate(index):
        if slot >= 0:
            t.equal(f"sequence {n}, slot {slot}", states[slot], final[n])
    for slot in set(range(N + 3)) - {slot for slot in index if slot >= 0}:
        unchanged = torch.equal(_bits(states[slot]), _bits(before[slot]))
        t.holds(unchanged, f"slot {slot}, of no sequence, was written")


@law(
    needs=("pool", "checkpoint"),
    regimes=(*MILD, "unbounded"),
    sequences=4,
    packed=True,
    initial=True,
)
def resume(t: Trial) -> None:
    """A checkpoint, moved to another slot of another pool, continues to the same outputs and state.

    Sequences that have no checkpoint, being shorter than 16 tokens, start over as fresh ones.
    """
    x = t.x
    offsets = [GRANULE * t.rng.randint(min(n // GRANULE, 1), n // GRANULE) for n in t.lengths]
    kept = _nan_states(x)
    x = x.replace(initial_state=None)
    out, state = t.run(
        x,
        checkpoint_state=kept,
        checkpoint_offsets=torch.tensor(offsets, dtype=torch.int32, device=t.device),
    )
    slots = t.rng.sample(range(x.N + 2), x.N)
    states = torch.full((x.N + 2, *kept.shape[1:]), torch.nan, device=t.device)
    states[slots] = kept
    rest = x.pack([(n, offset, t.lengths[n]) for n, offset in enumerate(offsets)])
    rest_out, _ = t.run(
        rest.replace(initial_state=states),
        state_indices=torch.tensor(slots, dtype=torch.int64, device=t.device),
        has_initial_state=torch.tensor([offset > 0 for offset in offsets], device=t.device),
    )
    out_limit, state_limit = t.twice(x)
    whole = torch.cat(
        [
            torch.cat([out[:, x.bounds[n] : x.bounds[n] + offset], _piece(rest_out, rest, n)], 1)
            for n, offset in enumerate(offsets)
        ],
        1,
    )
    packed = x.pack([(n, 0, length) for n, length in enumerate(t.lengths)])
    t.close("out", whole, out, out_limit, packed)
    t.close("final_state", states[slots], state, state_limit)


def _piece(out: Tensor, x: Inputs, n: int) -> Tensor:
    """The rows of `out` that belong to sequence n of `x`."""
    return out[:, x.bounds[n] : x.bounds[n + 1]]


@law(needs=("dense",))
def dense(t: Trial) -> None:
    """A batch without cu_seqlens is the packed batch of the same sequences."""
    case = t.case
    if case.packed:
        length = max(case.lengths, default=0)
        case = case.replace(lengths=(length,) * len(case.lengths), packed=False, padding=0)
    x = t.tensors(case)
    packed = x.pack([(n, 0, length) for n, length in enumerate(case.lengths)])
    out, state = t.run(x)
    want_out, want_state = t.run(packed)
    t.same("out", out.flatten(0, 1).unsqueeze(0), want_out, packed)
    t.same("final_state", state, want_state, packed)


@law(needs=("strided",))
def strided(t: Trial) -> None:
    """Column slices of one wide projection, NaN between them, are contiguous inputs."""
    x = t.x
    flat = torch.cat([y.flatten(2) for y in x.args], -1)
    width = -(-flat.shape[-1] // 8) * 8 + 8  # rows stay multiples of 16 bytes apart
    wide = flat.new_full((*flat.shape[:2], width), torch.nan)
    wide[..., : flat.shape[-1]] = flat
    views, column = {}, 0
    for name, y in zip(TOKEN_INPUTS, x.args, strict=True):
        size = y.shape[2:].numel()
        views[name] = wide[..., column : column + size].unflatten(-1, y.shape[2:])
        column += size
    out, state = t.run(x)
    strided_out, strided_state = t.run(x.replace(**views))
    t.same("out", strided_out, out, x)
    t.same("final_state", strided_state, state, x)


@law(needs=("padding",), packed=True)
def padded(t: Trial, *, padding: int | None = None) -> None:
    """Rows past the last sequence are neither read, NaN as they are, nor written."""
    padding = t.rng.choice((1, 15, 31, 60)) if padding is None else padding
    bare, x = (t.tensors(t.case.replace(padding=n)) for n in (0, padding))
    end = x.bounds[-1]
    buffers = {}
    if "buffers" not in t.subject.lacks:
        buffers["out"] = torch.full_like(x.v, 7.0)
    out, state = t.subject.prefill(x, **buffers)
    if buffers:
        t.holds(out.data_ptr() == buffers["out"].data_ptr(), "out: not the caller's buffer")
        t.holds(bool((out[:, end:] == 7.0).all()), "out: padded rows were written")
    bare_out, bare_state = t.run(bare)
    t.same("out", out[:, :end], bare_out, bare)
    t.same("final_state", state, bare_state, bare)


@law(needs=("grouped",), regimes=MILD, sequences=2, grouped=False)
def grouped(t: Trial, *, group: int | None = None) -> None:
    """Grouped value heads are query and key heads repeated."""
    group = t.rng.choice((2, 3)) if group is None else group
    x = t.tensors(t.case.replace(heads=2, value_heads=group * 2))
    repeated = x.replace(q=x.q.repeat_interleave(group, 2), k=x.k.repeat_interleave(group, 2))
    out, state = t.run(x)
    want_out, want_state = t.run(repeated)
    t.same("out", out, want_out, x)
    t.same("final_state", state, want_state, x)


@law(regimes=(*MILD, "uneven"), sequences=2)
def heads(t: Trial, *, head: int | None = None) -> None:
    """A head alone is the same head among others: a tensor-parallel rank has its slice of all."""
    group = t.case.HV // t.case.heads
    x = t.tensors(t.case.replace(heads=3, value_heads=3 * group))
    head = t.rng.randrange(3) if head is None else head
    out, state = t.run(x)
    mine = slice(head * group, (head + 1) * group)
    alone = x.replace(
        q=x.q[:, :, head : head + 1].contiguous(),
        k=x.k[:, :, head : head + 1].contiguous(),
        v=x.v[:, :, mine].contiguous(),
        g=x.g[:, :, mine].contiguous(),
        beta=x.beta[:, :, mine].contiguous(),
        A_log=x.A_log[mine].clone(),  # a slice may lie where a kernel cannot load it
        dt_bias=x.dt_bias[mine].clone(),
        initial_state=None if x.initial_state is None else x.initial_state[:, mine].contiguous(),
    )
    want_out, want_state = t.run(alone)
    out_limit, state_limit = t.twice(alone)
    t.close("out", out[:, :, mine], want_out, out_limit, alone)
    t.close("final_state", state[:, mine], want_state, state_limit)


@law(needs=("buffers", "bf16_state"), regimes=("random", "slow", "mixed"))
def dtypes(t: Trial) -> None:
    """Initial and final state may each be fp32 or bf16; the caller's buffer is what is returned."""
    for initial in ("float32", "bfloat16"):
        x = t.tensors(t.case.replace(state_dtype=initial, initial=True))
        want = x.reference()
        out_limit, state_limit = t.subject.limits(x, want)
        for final in (torch.float32, torch.bfloat16):
            buffer = _nan_states(x, final)
            out, returned = t.run(x, final_state=buffer)
            t.holds(returned.data_ptr() == buffer.data_ptr(), "final_state: not the caller's")
            rounding = 4e-3 if final is torch.bfloat16 else 0.0
            t.close("out", out, want.out[:, : out.shape[1]], out_limit, x)
            limit = state_limit.allowed + rounding
            t.close("final_state", buffer, want.final_state, limit)


@law()
def repeat(t: Trial) -> None:
    """Inputs are only read, results are the caller's own, and a second run gives the same bits."""
    x = t.x
    named = [
        y for y in (*x.args, x.A_log, x.dt_bias, x.initial_state, x.cu_seqlens) if y is not None
    ]
    before = [y.clone() for y in named]
    out, state = t.run(x)
    kept_out, kept_state = out.clone(), state.clone()
    again_out, again_state = t.run(x)
    for y, old in zip(named, before, strict=True):
        t.holds(torch.equal(_bits(y), _bits(old)), "an input was written")
    t.equal("out, again", again_out, kept_out)
    t.equal("final_state, again", again_state, kept_state)
    t.equal("out, after the second run", out, kept_out)
    t.equal("final_state, after the second run", state, kept_state)
    if out.numel():
        t.holds(out.data_ptr() != again_out.data_ptr(), "out: two runs share it")


@law(needs=("graph", "buffers"), regimes=("random", "slow"), sequences=4, packed=True)
def graph(t: Trial) -> None:
    """A captured run replays on other inputs and lengths, bit for bit as an eager one."""
    x = t.x
    y = t.tensors(t.case.replace(seed=t.case.seed + 1, lengths=t.lengths[::-1]))
    out, final = torch.full_like(x.v, torch.nan), _nan_states(x)
    static = x.replace(
        **{name: getattr(x, name).clone() for name in (*TOKEN_INPUTS, "cu_seqlens")},
        initial_state=None if x.initial_state is None else x.initial_state.clone(),
        A_log=y.A_log,
        dt_bias=y.dt_bias,
    )
    side = torch.cuda.Stream(t.device)
    side.wait_stream(torch.cuda.current_stream(t.device))
    with torch.cuda.stream(side):
        t.subject.prefill(static, out=out, final_state=final)
    torch.cuda.current_stream(t.device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        t.subject.prefill(static, out=out, final_state=final)
    for source in (x.replace(A_log=y.A_log, dt_bias=y.dt_bias), y):
        for name in (*TOKEN_INPUTS, "cu_seqlens", "initial_state"):
            if (buffer := getattr(static, name)) is not None:
                buffer.copy_(getattr(source, name))
        out.fill_(torch.nan)
        final.fill_(torch.nan)
        captured.replay()
        got_out, got_state = out[:, : live_rows(source)].clone(), final.clone()
        want_out, want_state = t.run(source)
        t.equal("out", got_out, want_out)
        t.equal("final_state", got_state, want_state)


def find_recurrent() -> Callable[..., Tensor] | str:
    """`kda_jit.recurrent`, or why there is none."""
    try:
        found: Callable[..., Tensor] = importlib.import_module("kda_jit.recurrent").recurrent
    except (ImportError, AttributeError):
        return "this kda_jit has no recurrent"
    return found


def _no_recurrent() -> str | None:
    return found if isinstance(found := find_recurrent(), str) else None


@law(regimes=(*MILD, "unbounded"), packed=True, unavailable=_no_recurrent)
def recurrent(t: Trial) -> None:
    """Prefill is kda_jit.recurrent over the same tokens, outputs and states."""
    step = find_recurrent()
    if isinstance(step, str):
        raise NotImplementedError(step)
    x = t.x.pack([(n, 0, length) for n, length in enumerate(t.lengths)])
    states = torch.zeros(x.N, *x.v.shape[2:], x.q.shape[3], device=t.device)
    if x.initial_state is not None:
        states.copy_(x.initial_state)
    want_out = step(
        *x.args,
        A_log=x.A_log,
        dt_bias=x.dt_bias,
        lower_bound=x.lower_bound,
        scale=x.scale,
        cu_seqlens=x.cu_seqlens,
        state_pool=states,
        state_indices=torch.arange(x.N, dtype=torch.int32, device=t.device),
    )
    out, state = t.run(x)
    out_limit, state_limit = t.twice(x)
    t.close("out", out, want_out, out_limit, x)
    t.close("final_state", state, states, state_limit)
