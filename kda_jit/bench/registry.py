"""The benchmark cases. A new one is one line here."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from kda_jit.errors import InputError
from kda_jit.testing import TABLE_ROWS, Case

from .cases import BenchCase, TimedCase
from .steps import StepCase

_MIXED = (1300, 547, 2048, 963, 271, 3063)

#: The shapes for which FlashKDA's and fla's times are known.
SPEED: tuple[BenchCase, ...] = (
    BenchCase("8x2048_h16", (2048,) * 8, 16),
    BenchCase("4x8192_h16", (8192,) * 4, 16),
    BenchCase("1x16384_h16", (16384,), 16),
    BenchCase("1x65536_h16", (65536,), 16),
    BenchCase("1x8192_h96", (8192,), 96),
    BenchCase("mixed_8192_h96", _MIXED, 96),
    BenchCase("8x1024_h96", (1024,) * 8, 96),
    BenchCase("1x8192_h64", (8192,), 64),
    BenchCase("8x1024_h64", (1024,) * 8, 64),
    BenchCase("1x16384_h64", (16384,), 64),
    BenchCase("32x512_h12", (512,) * 32, 12),
    BenchCase("8x128_h12", (128,) * 8, 12),
    BenchCase("1x512_h12", (512,), 12),
    BenchCase("1x8192_h12", (8192,), 12),
    BenchCase("mixed_8192_h12", _MIXED, 12),
    BenchCase("8x1024_h12", (1024,) * 8, 12),
    BenchCase("1x64_h16", (64,), 16),
)

#: Steps of decode and of verification alone, for the recurrent kernel.
DECODE: tuple[StepCase, ...] = (
    *(StepCase(f"decode_{n}_h16", 16, "decode", decodes=n) for n in (1, 16, 64, 256, 1024)),
    *(StepCase(f"verify_64_k{k}_h16", 16, "decode", verified=64, drafts=k) for k in (1, 3, 7)),
)


def _layer_steps(heads: int) -> tuple[StepCase, ...]:
    """The kinds of step that a layer meets. "900_and_1x4096": 900 single tokens and one prompt."""

    def step(name: str, **sequences: Any) -> StepCase:
        return StepCase(f"step_{name}_h{heads}", heads, **sequences)

    return (
        step("prefill_1x4096", prefills=(4096,)),
        step("prefill_8x1024", prefills=(1024,) * 8),
        step("prefill_8x2048", prefills=(2048,) * 8),
        step("decode_64", decodes=64),
        step("decode_256", decodes=256),
        *(step(f"verify_64_k{k}", verified=64, drafts=k) for k in (1, 3, 7)),
        step("900_and_1x4096", decodes=900, prefills=(4096,)),
        step("64_and_2x1024", decodes=64, prefills=(1024,) * 2),
        *(
            step(f"2x1024_and_verify_64_k{k}", prefills=(1024,) * 2, verified=64, drafts=k)
            for k in (1, 3, 7)
        ),
        step(
            "32_and_1x2048_and_verify_64_k3",
            decodes=32, prefills=(2048,), verified=64, drafts=3,
        ),
    )  # fmt: skip


#: Steps of a whole layer.
LAYER: tuple[StepCase, ...] = (*_layer_steps(16), *_layer_steps(12))

#: The inputs whose errors are tabled: T = 4096, H = 8.
ACCURACY: tuple[Case, ...] = tuple(
    Case(seed=1, lengths=(4096,), heads=8, regime=regime) for regime in TABLE_ROWS
)

#: What `--suite` takes.
SUITES = ("flashkda", "accuracy", "decode", "layer")
#: Those that README's table is made of.
FRONT = ("flashkda", "accuracy")


def select(
    suites: Sequence[str], patterns: Sequence[str] = ()
) -> tuple[list[TimedCase], list[Case]]:
    """(cases to time, cases to table) of these suites, those whose name fits a pattern if given.

    Raises InputError for a pattern that no case of the suites fits.
    """
    every: tuple[TimedCase, ...] = (*SPEED, *DECODE, *LAYER)
    speed = [case for case in every if case.suite in suites]
    accuracy = list(ACCURACY) if "accuracy" in suites else []
    names = [*(case.name for case in speed), *(case.regime for case in accuracy)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"case: expected one of {', '.join(names)}, got {pattern!r}.")

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    return [c for c in speed if wanted(c.name)], [c for c in accuracy if wanted(c.regime)]
