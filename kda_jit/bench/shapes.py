"""What pictures need of a run file's rows: points of a case and a subject."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .report import Run


class Point(NamedTuple):
    """A time.

    sequences  that the case holds, empty ones too
    length     tokens of each of them; None where they differ
    tokens     of all of them
    us, low, high
               median, 10th and 90th percentile
    """

    case: str
    subject: str
    heads: int
    sequences: int
    length: int | None
    tokens: int
    us: float
    low: float
    high: float
    floor_us: float

    @property
    def speed(self) -> float:
        """Tokens times heads, in millions a second."""
        return self.tokens * self.heads / self.us

    @property
    def share(self) -> float:
        """Of the floor in the time; 1 is as fast as a copy of the same bytes."""
        return self.floor_us / self.us


def points(run: Run) -> list[Point]:
    """Of every case that has times and every subject, without a step's parts run alone."""
    return [point for row in run["rows"] if "timings" in row for point in _points(row)]


def _points(row: dict[str, Any]) -> Iterator[Point]:
    lengths = _lengths(row)
    (length,) = {*lengths} if len({*lengths}) == 1 else (None,)
    for subject, found in row["timings"].items():
        if ", its " not in subject:
            yield Point(
                row["case"], subject, row["heads"], len(lengths), length, sum(lengths),
                found["us"], found["p10"], found["p90"], row["floor_us"],
            )  # fmt: skip


def _lengths(row: dict[str, Any]) -> list[int]:
    """Tokens of each sequence, of a prefill or of a step."""
    if "lengths" in row:
        return list(row["lengths"])
    return [1] * row["decodes"] + row["prefills"] + [1 + row["drafts"]] * row["verified"]
