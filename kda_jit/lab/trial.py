"""The laws of the operator on a variant: a quick look, not the whole of `kda-jit verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from kda_jit.testing.verify import Report, verify

from .running import VariantRunner, forced, need_gpu, schedules_here
from .shown import Shown
from .variants import Variant

#: Kinds of numbers on which faults of a kernel show soonest: gates of every size, keys that are
#: nearly one, rows of zeros, magnitudes that overflow.
QUICK_REGIMES = ("random", "mixed", "saturated_both", "near_keys", "zero_rows", "huge")


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """What the laws said. `reports`: by schedule."""

    variant: Variant
    reports: dict[str, Report]

    @property
    def passed(self) -> bool:
        """Whether every schedule was tried on something, and nothing broke."""
        return all(report.passed for report in self.reports.values())

    def __rich__(self) -> RenderableType:
        lines = []
        for schedule, report in self.reports.items():
            verdict = (
                "holds every law"
                if report.passed
                else f"breaks {len(report.broken)} of {report.tried} cells"
            )
            if not report.tried:
                reasons = {cell.words for cell in report.cells}
                verdict = f"was not tried: {'; '.join(sorted(reasons))}"
            lines.append(f"{self.variant.name}, {schedule}: {verdict}")
            lines.append(f"  {report.headline()}")
            lines += [f"  {c.law} x {c.regime}: {c.words}  {c.case}" for c in report.broken]
        return Group(*map(Text, lines))


def check(
    variant: Variant,
    *,
    laws: Sequence[str] = (),
    regimes: Sequence[str] = QUICK_REGIMES,
    examples: int = 1,
    schedule: str | None = None,
    seed: int = 0,
) -> Check:
    """Try the laws on a variant, under each schedule that reads what it changes. Needs a GPU.

    laws, regimes, examples, seed  as for `kda_jit.testing.verify.verify`; no laws: all
    schedule                       this one alone

    Raises DeviceError without a GPU, CompileError, and InputError for a variant that no schedule
    of this GPU reads.
    """
    device = need_gpu("lab.check")
    reports = {}
    for name in schedules_here(variant, device, schedule):
        subject = VariantRunner("cuda", device, variant)
        with forced(name):
            reports[name] = verify(
                subject, laws=laws, regimes=regimes, examples=examples, seed=seed
            )
    return Check(variant, reports)
