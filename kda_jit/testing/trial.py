"""What a law is made of: its name and sentence, the cases it wants, and a Trial of one of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cases import BOUNDED, EDGE_LENGTHS, UNBOUNDED, Case, Inputs
from .numeric import Limit, Mismatch, assert_close, relative_rms
from .runner import Subject

GRANULE = 16  # tokens: offsets of checkpoints are multiples, chunks of every backend, too
TOKEN_INPUTS = ("q", "k", "v", "g", "beta")

#: Kinds of numbers on which comparing two runs is fair: elsewhere the law would hold too, but the
#: limit would be so wide that nothing could break it.
MILD = ("random", "slow", "mixed", "saturated_both", "zero_rows", "shallow")
EVERY = BOUNDED + UNBOUNDED
NOT_WORTH_TRYING = "says little about such numbers"


class Measured(NamedTuple):
    """The comparison that came nearest to its limit. Equal bits: both are 0."""

    error: float
    allowed: float
    what: str

    @property
    def ratio(self) -> float:
        """error / allowed, where 0 / 0 is 0."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.allowed if self.allowed else float("inf")


@dataclass(frozen=True)
class Law:
    """One law. Called as law(subject, case), or with its free choices by name.

    name       of the function
    about      one sentence
    needs      features (runner.FEATURES) without which there is nothing to try
    regimes    where it is worth trying
    sequences  at most, in a case that is drawn
    initial    whether there must be an initial state; None: either
    packed     packed cases only; grouped: HV > H, too
    unavailable  why it can be tried on nobody; None if it can
    """

    name: str
    about: str
    body: Callable[..., None]
    needs: tuple[str, ...] = ()
    regimes: tuple[str, ...] = EVERY
    sequences: int = 3
    initial: bool | None = None
    packed: bool = False
    grouped: bool = True
    unavailable: Callable[[], str | None] | None = None

    def __call__(self, subject: Subject, case: Case, **choices: Any) -> Measured:
        trial = Trial(subject, case)
        self.body(trial, **choices)
        return trial.worst

    def why_not(self, subject: Subject, regime: str) -> str | None:
        """Why this subject is not tried on this law; None if it is."""
        if regime not in self.regimes:
            return NOT_WORTH_TRYING
        return self.cannot(subject, regime)

    def cannot(self, subject: Subject, regime: str) -> str | None:
        """Why this subject cannot be tried, worth it or not; None if it can."""
        needs = (*self.needs, "unbounded") if regime in UNBOUNDED else self.needs
        reasons = [subject.lacks[feature] for feature in needs if feature in subject.lacks]
        if self.unavailable is not None and (reason := self.unavailable()):
            reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons)) or None

    def draw(self, rng: random.Random, subject: Subject, regime: str, index: int = 0) -> Case:
        """The index-th case of a regime: the first few have the edges that break most kernels."""
        lacks, sequences = subject.lacks, self.sequences
        fixed: Sequence[tuple[int, ...]] = ((17, 0, 48), (65,), (0, 1, 33), (130, 15))
        if sequences == 1:
            fixed = ((17,), (65,), (130,))
        packed = self.packed or "dense" in lacks or index % 3 != 2
        if index < len(fixed) and packed:
            lengths = fixed[index][:sequences]
        elif packed:
            count = rng.randint(1, sequences)
            lengths = tuple(
                rng.choice(EDGE_LENGTHS) if rng.random() < 0.7 else rng.randint(0, 130)
                for _ in range(count)
            )
        else:
            lengths = (rng.choice([n for n in EDGE_LENGTHS if n]),) * rng.randint(1, 2)
        heads = rng.randint(1, 2)
        group = rng.choice((1, 2)) if self.grouped and "grouped" not in lacks else 1
        initial = rng.random() < 0.7 if self.initial is None else self.initial
        padding = rng.choice((0, 0, 1, 16, 50)) if packed and "padding" not in lacks else 0
        return Case(
            seed=rng.randint(0, 999_999),
            lengths=lengths,
            heads=heads,
            value_heads=None if group == 1 else group * heads,
            regime=regime,
            state_dtype=rng.choice(
                ("float32",) if "bf16_state" in lacks else ("float32", "bfloat16")
            ),
            initial=initial,
            packed=packed,
            padding=padding,
        )


class Trial:
    """One law on one case: the inputs, the subject, and the comparisons made so far."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject = subject
        self.case = case
        self.rng = random.Random(case.seed)
        self.worst = Measured(0.0, 0.0, "")

    @cached_property
    def x(self) -> Inputs:
        return self.tensors(self.case)

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.case.lengths

    @property
    def device(self) -> torch.device:
        return self.subject.device

    def tensors(self, case: Case) -> Inputs:
        return case.tensors(self.subject.device, self.subject.dtype, self.subject.head_dim)

    def run(self, x: Inputs, **buffers: Any) -> tuple[Tensor, Tensor]:
        """(out, final_state) of the subject; of out, the rows that belong to a sequence."""
        out, state = self.subject.prefill(x, **buffers)
        self.holds(out.shape == x.v.shape, f"out: shape {tuple(out.shape)}")
        return out[:, : live_rows(x)], state

    def close(
        self, name: str, got: Tensor, want: Tensor, limit: Limit | float, x: Inputs | None = None
    ) -> None:
        """By worst block: a state where `name` ends with "state", else an output of `x`."""
        ends = None if x is None else x.cu_seqlens
        allowed = limit.allowed if isinstance(limit, Limit) else limit
        try:
            found = assert_close(name, got, want, limit, cu_seqlens=ends, case=self.case)
        except Mismatch as mismatch:
            self._note(Measured(mismatch.error, mismatch.allowed, name))
            raise
        self._note(Measured(found.error, allowed, name))

    def twice(self, x: Inputs) -> tuple[Limit, Limit]:
        """What two runs over `x`, each within its limits, may differ by: (out, state)."""
        out, state = self.subject.limits(x)
        return (
            replace(out, factor=2 * out.factor, slack=2 * out.slack),
            replace(state, factor=2 * state.factor, slack=2 * state.slack),
        )

    def same(self, name: str, got: Tensor, want: Tensor, x: Inputs) -> None:
        """Equal bits, or equal to rounding where the subject does not promise bits.

        x  finite inputs of such a run; it says where the sequences of an output are
        """
        if self.subject.bitwise:
            self.equal(name, got, want)
        elif got.numel():
            found = self.twice(x)
            self.close(name, got, want, found[1 if name.endswith("state") else 0], x)

    def equal(self, name: str, got: Tensor, want: Tensor) -> None:
        """Equal bits."""
        if torch.equal(got, want):
            return
        self._note(Measured(relative_rms(got, want), 0.0, name))
        differ = got != want
        self.fail(
            f"{name}: {int(differ.sum())} of {got.numel()} elements differ, by up to "
            f"{(got.double() - want.double()).abs().max().item():.1e}; equal bits are promised"
        )

    def holds(self, condition: bool, words: str) -> None:
        if not condition:
            self.fail(words)

    def fail(self, words: str) -> None:
        raise AssertionError(f"{words}     {self.case}")

    def _note(self, measured: Measured) -> None:
        if not self.worst.what or measured.ratio > self.worst.ratio:
            self.worst = measured


def live_rows(x: Inputs) -> int:
    """Rows of each batch row that belong to a sequence."""
    return x.q.shape[1] if x.cu_seqlens is None else x.bounds[-1]


#: Every law by its name, in the order of a report.
LAWS: dict[str, Law] = {}


def law(**fields: Any) -> Callable[[Callable[..., None]], Law]:
    """Makes a Law of a function over a Trial; its first line of documentation is the sentence."""

    def make(body: Callable[..., None]) -> Law:
        about = (body.__doc__ or "").partition("\n")[0]
        LAWS[body.__name__] = found = Law(body.__name__, about, body, **fields)
        return found

    return make
