"""A run against an earlier one: what became slower, by more than either run's own spread.

Two runs are two machines, or one on two days. What peers took in both, whose code did not change,
shows how much of a ratio is the machine's; they are compared like ours, and never a regression.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import exp, fsum, log
from typing import Any, NamedTuple

from kda_jit.errors import InputError

from .report import Run, aligned, show_us

#: What of a row is its shape; rows of other shapes are other cases, whatever they are called.
_SHAPE = ("lengths", "heads", "decodes", "prefills", "verified", "drafts")


class Change(NamedTuple):
    """What became of one subject on one case.

    ours    of this package; else a peer's, whose ratio is the machine's
    ratio   new over old: above 1, it is slower now
    beyond  whether the 10th to 90th percentiles of both runs lie apart
    """

    case: str
    subject: str
    ours: bool
    old_us: float
    new_us: float
    ratio: float
    beyond: bool

    @property
    def words(self) -> str:
        if not self.beyond:
            return "within the spread"
        return "slower" if self.ratio > 1.0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    lost     cases that had a time, with the reason why they have none now
    missing  cases of one run alone, which are not compared
    limit    how much slower ours may be, as a share, before it is a regression
    """

    changes: tuple[Change, ...]
    lost: dict[str, str]
    missing: tuple[str, ...]
    limit: float

    @property
    def regressions(self) -> list[Change]:
        """Ours that are slower by more than the limit, and by more than the spread."""
        return [c for c in self.changes if c.ours and c.beyond and c.ratio > 1.0 + self.limit]

    @property
    def passed(self) -> bool:
        return not (self.regressions or self.lost)


def compare(new: Run, old: Run, limit: float = 0.05) -> Comparison:
    """Every case and subject that both runs have.

    Raises InputError where the two are on other GPUs, measured something else, or share no time.
    """
    if limit < 0:
        raise InputError(f"limit: expected a share of at least 0, got {limit}.")
    for key in ("gpu", "conditions"):
        if new.get(key) != old.get(key):
            raise InputError(
                f"against: expected a run with the {key} {new.get(key)!r}, got {old.get(key)!r}; "
                "times of the two say nothing of each other."
            )
    before, after = ({_key(row): row for row in run["rows"]} for run in (old, new))
    both = [key for key in after if key in before]
    peers = new.get("peers", ())
    changes = tuple(c for key in both for c in _changes(before[key], after[key], peers))
    lost = {
        after[key]["case"]: after[key]["failed"]
        for key in both
        if "failed" in after[key] and "us" in before[key]
    }
    if not changes and not lost:
        raise InputError("against: expected a run with a case and a subject of this one, got none.")
    alone = [run[key]["case"] for run in (before, after) for key in run if key not in both]
    return Comparison(changes, lost, tuple(alone), limit)


def text(found: Comparison) -> str:
    """The comparison for a terminal."""
    worse = found.regressions
    lines = [["case", "subject", "old us", "new us", "new / old", ""]]
    for c in found.changes:
        words = "regression" if c in worse else c.words
        times = show_us(c.old_us), show_us(c.new_us)
        lines.append([c.case, c.subject, *times, f"{c.ratio:.3f}", words])
    parts = [aligned(lines, left=(0, 1, 5))] if found.changes else []
    parts += [f"{case}: had a time, has none now: {reason}" for case, reason in found.lost.items()]
    if found.missing:
        parts.append(f"In one run alone, not compared: {', '.join(found.missing)}")
    parts.append("\n".join(_means(found.changes)))
    limit = f"slower by more than {100 * found.limit:g} % and more than the spread"
    count = f"{len(worse) or 'none'} of ours {limit}"
    parts.append(f"{count}; {len(found.lost)} lost" if found.lost else count)
    return "\n\n".join(part for part in parts if part)


def _key(row: dict[str, Any]) -> str:
    return repr([row["case"], *(row.get(name) for name in _SHAPE)])


def _changes(old: dict[str, Any], new: dict[str, Any], peers: Container[str]) -> Iterator[Change]:
    befores, afters = old.get("timings", {}), new.get("timings", {})
    for subject, after in afters.items():
        if (before := befores.get(subject)) is None:
            continue
        apart = after["p10"] > before["p90"] or after["p90"] < before["p10"]
        times = before["us"], after["us"]
        yield Change(new["case"], subject, subject not in peers, *times, times[1] / times[0], apart)


def _means(changes: tuple[Change, ...]) -> Iterator[str]:
    """Of each subject, the geometric mean of its ratios in words."""
    for name, ours in dict.fromkeys((c.subject, c.ours) for c in changes):
        ratios = [c.ratio for c in changes if c.subject == name]
        mean = exp(fsum(map(log, ratios)) / len(ratios))
        yield f"{name}{'' if ours else ', a peer'}: geomean {mean:.3f} of the old time"
