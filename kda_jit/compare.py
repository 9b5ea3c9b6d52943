"""Two ways to make one call from a file: how far each is from float64, where, and who is nearer.

A way is a backend of ours, another implementation, anybody's function, or what the live call wrote.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends.base import last_launch
from .callfile import Call
from .capturing import unseen
from .errors import InputError
from .replay import as_bytes, exact, fresh, replay, same_bits
from .testing import (
    Inputs,
    Limit,
    Worst,
    block_errors,
    error_along,
    relative_rms,
    worst_block_error,
    worst_state_error,
)
from .testing.numeric import plain_result, state_errors
from .testing.runner import FEATURES, rounding_limit
from .testing.verify import PeerRunner, find_subject

#: The name that stands for what the live call wrote, in place of a backend.
CAPTURED = "captured"
CHUNK = 64  # tokens of a block
#: Worst blocks that differ by less than this factor are called alike.
ALIKE = 1.05


@dataclass(frozen=True)
class Side:
    """One of the two. name: as asked for; ran: the backend, its kernels, schedule and target."""

    name: str
    ran: dict[str, str]
    results: dict[str, Tensor]

    @property
    def title(self) -> str:
        """The name, and the backend that ran where that is another word."""
        ran = self.ran.get("backend", self.name)
        return self.name if ran == self.name else f"{self.name} ({ran})"


class Off(NamedTuple):
    """A distance: of the worst block, where that is, and over all."""

    worst: float
    place: str
    all: float


@dataclass(frozen=True)
class Output:
    """One result. a, b: off float64; apart: b off a.

    allowed   for rounding, of a block; None where nobody knows. Blocks of which plain arithmetic
              loses more than a tenth have limits of their own
    excess_a, excess_b  the largest error of a block by what it is allowed; more than 1 is wrong
    unjudged  blocks where infinities and NaN leave no bound
    """

    name: str
    a: Off
    b: Off
    apart: Off
    same_bits: bool
    allowed: float | None
    excess_a: float = 0.0
    excess_b: float = 0.0
    unjudged: int = 0

    @property
    def nearer(self) -> str | None:
        """ "a", "b", or None where they are alike."""
        low, high = sorted((self.a.worst, self.b.worst))
        if self.same_bits or high <= ALIKE * low:
            return None
        return "a" if self.a.worst < self.b.worst else "b"

    @property
    def passed(self) -> bool:
        return max(self.excess_a, self.excess_b) <= 1


@dataclass(frozen=True)
class Along:
    """The sequence with the worst block of `out`.

    tokens          middles of stretches of 16
    a, b, apart     RMS error there, over all heads, by the RMS of the exact output
    blocks_a, blocks_b  [chunks, HV], relative RMS errors
    """

    sequence: int
    tokens: list[int]
    a: Tensor
    b: Tensor
    apart: Tensor
    blocks_a: Tensor
    blocks_b: Tensor


@dataclass(frozen=True)
class Comparison:
    """What came of it. along: None where no sequence has a token."""

    call: Call
    a: Side
    b: Side
    outputs: tuple[Output, ...]
    along: Along | None

    @property
    def passed(self) -> bool:
        """No result is further from float64 than rounding explains."""
        return all(output.passed for output in self.outputs)


def compare(call: Call, a: str, b: str, *, flashkda: Path | None = None) -> Comparison:
    """Makes the call in two ways, and by float64.

    a, b      a backend of ours; CAPTURED: what the live call wrote; "peer:flashkda" and its like;
              or "module:function", a function with the arguments of kda_jit.prefill
    flashkda  FlashKDA's library; None: where the environment says

    Raises what the function that is called raises, and InputError where there is nothing captured,
    or where that call cannot be made that way.
    """
    # First, since it also checks the call, and a function may write into what it is given.
    with unseen():
        want = exact(call)
        judges = _judges(call, want)
        sides = _side(call, a, flashkda), _side(call, b, flashkda)
    for side in sides:
        _check_results(side, want)
    outputs = tuple(_output(call, name, *sides, want[name], judges.get(name)) for name in want)
    return Comparison(call, *sides, outputs, _along(call, *sides, want["out"]))


def _side(call: Call, name: str, flashkda: Path | None) -> Side:
    if ":" in name:
        results, written = _by_others(call, name, flashkda)
        ran = {"backend": name} | ({"wrote into": ", ".join(written)} if written else {})
        return Side(name, ran, results)
    if name != CAPTURED:
        results = replay(call, name)
        launch = last_launch()
        return Side(name, {} if launch is None else launch.facts(), results)
    if not call.results:
        raised = call.facts.get("error")
        why = "without." if raised is None else f"of a call that raised {raised}"
        raise InputError(
            f"{CAPTURED}: expected a file with the results of a live call, as kda_jit.capture "
            f"writes it, got one {why}"
        )
    keys = ("backend", "kernels", "schedule", "target", "gpu", "date")
    return Side(name, {k: call.facts[k] for k in keys if k in call.facts}, call.results)


def _by_others(call: Call, name: str, flashkda: Path | None) -> tuple[dict[str, Tensor], list[str]]:
    """The results of a prefill by a peer or a function, and inputs that it wrote into."""
    if call.function != "prefill":
        raise InputError(f"{name}: expected a call of prefill, got one of {call.function}.")
    subject = find_subject(name, call.arguments["q"].device, flashkda=flashkda)
    # Copies: what it writes into them is its own affair.
    own = replace(
        call,
        arguments={n: x.clone() if isinstance(x, Tensor) else x for n, x in call.arguments.items()},
    )
    given = fresh(own)
    inputs = _inputs(own)
    if isinstance(subject, PeerRunner):
        sizes = inputs.q.shape[-1], inputs.v.shape[-1]
        dtypes = {getattr(inputs, n).dtype for n in _POSITIONAL}
        if dtypes != {subject.dtype} or sizes != (subject.head_dim, subject.head_dim):
            raise InputError(
                f"{name}: expected {subject.dtype} and K = V = {subject.head_dim}, got "
                f"{', '.join(sorted(map(str, dtypes)))}, K = {sizes[0]}, V = {sizes[1]}."
            )
    for feature in _features(call):
        if reason := subject.lacks.get(feature):
            words = f"{name}: expected a call without {FEATURES[feature]}, got one: {reason}."
            raise InputError(words)
    further = {n: x for n, x in given.items() if n not in inputs.kwargs and n not in _POSITIONAL}
    if "state_indices" in given:
        further["initial_state"] = given["initial_state"]
    else:
        further.pop("has_initial_state", None)  # the states that it clears are cleared already
    try:
        with torch.no_grad():
            result = subject.prefill(inputs, **further)
    except NotImplementedError as error:
        raise InputError(
            f"{name}: expected a call that it can make, got one it refuses: {error}."
        ) from None
    except SystemExit as error:
        raise InputError(f"{name}: expected results, got SystemExit: {error}.") from None
    out, state = _two_tensors(name, result, call.arguments["q"].device)
    found = {"out": out, "final_state": state}
    found |= {n: given[n] for n in ("checkpoint_state",) if n in given}
    written = [
        n for n, x in call.arguments.items()
        if isinstance(x, Tensor) and n not in ("initial_state", "checkpoint_state")
        and not torch.equal(as_bytes(x), as_bytes(own.arguments[n]))
    ]  # fmt: skip
    # Copies: a function may give the same memory again next time.
    return {n: x.detach().clone() for n, x in found.items()}, written


def _two_tensors(name: str, result: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    words = type(result).__name__
    if isinstance(result, tuple | list):
        parts = [
            f"{x.dtype} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
            for x in result
        ]
        words = f"({', '.join(parts)})"
        if len(result) == 2 and all(
            isinstance(x, Tensor)
            and x.is_floating_point()
            and x.layout is torch.strided
            and x.device == device
            for x in result
        ):
            return result[0], result[1]
    raise InputError(
        f"{name}: expected (out, final_state), two dense floating tensors on {device}, got {words}."
    )


_POSITIONAL = ("q", "k", "v", "g", "beta")


def _features(call: Call) -> list[str]:
    """Of FEATURES, those that the call asks for."""
    given = call.arguments
    ends, state = given.get("cu_seqlens"), given.get("initial_state")
    asked = {
        "dense": ends is None,
        "grouped": given["v"].shape[2] != given["q"].shape[2],
        "unbounded": given.get("lower_bound", -5.0) is None,
        "bf16_state": torch.bfloat16 in (call.state_dtype, None if state is None else state.dtype),
        "padding": ends is not None and int(ends[-1]) < given["q"].shape[1],
        "pool": "state_indices" in given,
        "checkpoint": "checkpoint_state" in given,
    }
    return [feature for feature, does in asked.items() if does]


def _check_results(side: Side, want: dict[str, Tensor]) -> None:
    shapes = [{name: list(x.shape) for name, x in found.items()} for found in (side.results, want)]
    if shapes[0] != shapes[1]:
        raise InputError(f"{side.name}: expected results {shapes[1]}, got {shapes[0]}.")


class Judge(NamedTuple):
    """limit: of a result's blocks; allowed: of each, inf where there is no bound, None: limit."""

    limit: Limit
    allowed: Tensor | None


def _output(call: Call, name: str, a: Side, b: Side, want: Tensor, judge: Judge | None) -> Output:
    x, y = a.results[name], b.results[name]
    found = Output(
        name,
        _off(call, name, x, want),
        _off(call, name, y, want),
        _off(call, name, y, x),
        same_bits(call, name, x, y),
        None,
    )
    if judge is None:
        return found
    errors = [_blocks(call, name, side, want) for side in (x, y)]
    allowed = judge.allowed
    if allowed is None:
        known = want[_rows(call, name)].isfinite().flatten(2).all(2).flatten()
        allowed = torch.where(known, judge.limit.allowed, inf)
    if not allowed.isfinite().any():
        return replace(found, unjudged=allowed.numel())
    over = [torch.where(allowed.isfinite(), e / allowed, 0.0).max().item() for e in errors]
    unjudged = int((~allowed.isfinite()).sum())
    return replace(
        found, allowed=judge.limit.allowed, excess_a=over[0], excess_b=over[1], unjudged=unjudged
    )


def _blocks(call: Call, name: str, got: Tensor, want: Tensor) -> Tensor:
    """The error of each block, in a row; none where the call has no token, or writes no state."""
    got, want = _settled(got.double(), want.double())
    if name == "out":
        found = block_errors(got, want, call.arguments.get("cu_seqlens"), CHUNK)
        return torch.cat([x.flatten() for x in found]) if found else got.new_zeros(0)
    rows = _rows(call, name)
    return state_errors(got[rows], want[rows]).flatten()


def _off(call: Call, name: str, got: Tensor, want: Tensor) -> Off:
    got, want = _settled(got.double(), want.double())
    if name == "out":
        ends = call.arguments.get("cu_seqlens")
        worst = worst_block_error(got, want, ends, CHUNK)
        if ends is not None:
            got, want = (x[:, : int(ends[-1])] for x in (got, want))
        return _as_off(worst, worst.place, got, want)
    rows = _rows(call, name)
    got, want = got[rows], want[rows]
    worst = worst_state_error(got, want)
    row = rows[worst.sequence] if rows else -1
    pooled = name == "state_pool" or (name == "final_state" and "state_indices" in call.arguments)
    place = f"slot {call.slots[row]}" if pooled and rows else f"sequence {row}"
    return _as_off(worst, f"{place}, head {worst.head}", got, want)


def _as_off(worst: Worst, place: str, got: Tensor, want: Tensor) -> Off:
    if worst.sequence < 0:
        return Off(0.0, "nothing to compare", 0.0)
    return Off(worst.error, place, relative_rms(got, want))


def _settled(got: Tensor, want: Tensor) -> tuple[Tensor, Tensor]:
    """With zeros where both are the same infinity or NaN: those agree."""
    agree = ~want.isfinite() & ((got == want) | (got.isnan() & want.isnan()))
    return got.masked_fill(agree, 0.0), want.masked_fill(agree, 0.0)


def _rows(call: Call, name: str) -> list[int]:
    """The rows of a result of states that the call writes."""
    given = call.arguments
    if name == "checkpoint_state":
        return [n for n, offset in enumerate(given["checkpoint_offsets"].tolist()) if offset > 0]
    indices = given.get("state_indices")
    if indices is None:
        ends = given.get("cu_seqlens")
        return list(range(given["q"].shape[0] if ends is None else len(ends) - 1))
    size = given["initial_state" if call.function == "prefill" else "state_pool"].shape[0]
    return [slot for slot in indices.unique().tolist() if 0 <= slot < size]


#: Of blocks of which plain arithmetic loses more than this, hardly anything is left: an output
#: where q is nearly orthogonal to all keys. Those are judged by themselves, and by a larger factor,
#: since two roundings of nothing have nothing to do with each other.
ILL = 0.1
ILL_FACTOR = 8.0


def _judges(call: Call, want: dict[str, Tensor]) -> dict[str, Judge]:
    """What rounding explains, of a prefill's results: see `rounding_limit`."""
    if call.function != "prefill":
        return {}
    given, x = call.arguments, _inputs(call)
    operands = torch.float32 if x.q.dtype in (torch.float32, torch.float64) else None
    plain = plain_result(x, operands or torch.bfloat16)
    found = {"out": _judge(_blocks(call, "out", plain.out, want["out"]), operands)}
    exactly = x.reference().final_state
    state = _judge(state_errors(plain.final_state, exactly).flatten(), operands)
    states = {"final_state": call.state_dtype}
    if "state_indices" in given:
        states["final_state"] = given["initial_state"].dtype
    if "checkpoint_state" in given:
        states["checkpoint_state"] = given["checkpoint_state"].dtype
    for name, dtype in states.items():
        # In bf16 it is rounded once more when it is stored, by half of 2**-7 at most.
        more = 2.0**-8 if dtype is torch.bfloat16 else 0.0
        limit = replace(state.limit, slack=state.limit.slack + more)
        each = None if state.allowed is None else state.allowed + more
        # In a pool states stand in another order; a checkpoint is of another time.
        same = name == "final_state" and "state_indices" not in given
        found[name] = Judge(limit, each if same else None)
    return found


def _judge(losses: Tensor, operands: torch.dtype | None) -> Judge:
    """By what plain arithmetic loses of each block."""
    well = losses[losses <= ILL]
    finite = losses[losses.isfinite()]
    typical = well if well.numel() else finite
    limit = rounding_limit(typical.max().item() if typical.numel() else inf, operands)
    allowed = torch.full_like(losses, limit.allowed)
    if well.numel():
        ill = losses > ILL
        allowed = torch.where(ill, ILL_FACTOR * losses + limit.slack, allowed)
    return Judge(limit, torch.where(losses.isfinite(), allowed, inf))


def _inputs(call: Call) -> Inputs:
    given = call.arguments
    return Inputs(
        **{name: given[name] for name in (*_POSITIONAL, "A_log", "dt_bias")},
        lower_bound=given.get("lower_bound", -5.0),
        scale=given.get("scale"),
        initial_state=_initial_states(call),
        cu_seqlens=given.get("cu_seqlens"),
    )


def _initial_states(call: Call) -> Tensor | None:
    """[N, HV, V, K] of each sequence, whether or not they lie in a pool."""
    given = call.arguments
    states, indices = given.get("initial_state"), given.get("state_indices")
    if states is None:
        return None
    has = given.get("has_initial_state")
    keep = None if has is None else has.clone()
    if indices is not None:
        there = (indices >= 0) & (indices < len(states))
        states = states[torch.where(there, indices, 0).long()]
        keep = there if keep is None else keep & there
    return states if keep is None else torch.where(keep.view(-1, 1, 1, 1), states, 0.0)


def _along(call: Call, a: Side, b: Side, want: Tensor) -> Along | None:
    ends = call.arguments.get("cu_seqlens")
    x, y = a.results["out"], b.results["out"]
    blocks = [block_errors(out, want, ends, CHUNK) for out in (x, y)]
    worst = [
        max(p.max().item(), q.max().item()) if p.numel() else -1.0
        for p, q in zip(*blocks, strict=True)
    ]
    if not worst or max(worst) < 0:
        return None
    n = worst.index(max(worst))
    B, T = want.shape[:2]
    bounds = list(pairwise([r * T for r in range(B + 1)] if ends is None else ends.tolist()))
    x, y, want = (out.flatten(0, 1)[slice(*bounds[n])] for out in (x, y, want))
    tokens, off_a = error_along(x, want)
    return Along(
        n, tokens, off_a, error_along(y, want)[1], error_along(y, x)[1],
        blocks[0][n].cpu(), blocks[1][n].cpu(),
    )  # fmt: skip


def as_json(c: Comparison) -> dict[str, Any]:
    """All but the tensors of the call."""
    return {
        "function": c.call.function,
        "facts": c.call.facts,
        "a": {"name": c.a.name, "ran": c.a.ran},
        "b": {"name": c.b.name, "ran": c.b.ran},
        "passed": c.passed,
        "outputs": [
            {
                "name": o.name,
                **{side: getattr(o, side)._asdict() for side in ("a", "b", "apart")},
                "same_bits": o.same_bits,
                "allowed": o.allowed,
                "excess": {"a": o.excess_a, "b": o.excess_b},
                "unjudged": o.unjudged,
                "nearer": o.nearer,
            }
            for o in c.outputs
        ],
        "along": c.along
        and {k: x.tolist() if isinstance(x, Tensor) else x for k, x in asdict(c.along).items()},
    }
