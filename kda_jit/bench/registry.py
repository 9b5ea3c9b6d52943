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


def _of_speed(*names: str) -> tuple[BenchCase, ...]:
    return tuple(case for case in SPEED if case.name in names)


#: Sequences that take a while, whatever runs beside them.
LONG: tuple[BenchCase, ...] = (
    BenchCase("1x4096_h16", (4096,), 16),
    *_of_speed("1x16384_h16", "1x65536_h16", "1x16384_h64"),
    BenchCase("2x32768_h16", (32768,) * 2, 16),
    BenchCase("1x131072_h16", (131072,), 16),
)

#: Sequences of unequal lengths: none longer than the rest, one far longer, empty ones and ones.
RAGGED: tuple[BenchCase, ...] = (
    *_of_speed("mixed_8192_h96", "mixed_8192_h12"),
    BenchCase("mixed_8192_h16", _MIXED, 16),
    BenchCase("long_and_63_short_h16", (8192, *(64,) * 63), 16),
    BenchCase("odd_lengths_h16", (1, 0, 17, 300, 33, 1000, 0, 2047, 31, 65), 16),
)

#: What a machine without a GPU can do in seconds.
SMALL: tuple[BenchCase, ...] = (
    BenchCase("1x64_h2", (64,), 2),
    BenchCase("1x256_h2", (256,), 2),
    BenchCase("4x64_h2", (64,) * 4, 2),
    BenchCase("mixed_210_h2", (100, 0, 17, 1, 92), 2),
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

#: What `--suite` takes, beside "accuracy".
SUITES: dict[str, tuple[TimedCase, ...]] = {
    "seed": _of_speed("8x2048_h16", "4x8192_h16", "1x16384_h16"),
    "flashkda": SPEED,
    "flashinfer-h12": tuple(case for case in SPEED if case.heads == 12),
    "long": LONG,
    "ragged": RAGGED,
    "decode": DECODE,
    "layer": LAYER,
    "small": SMALL,
}
SUITE_NAMES = (*SUITES, "accuracy")
#: Those that README's table is made of.
FRONT = ("flashkda", "accuracy")


def select(
    suites: Sequence[str], patterns: Sequence[str] = ()
) -> tuple[list[TimedCase], list[Case]]:
    """(cases to time, cases to table) of these suites, those whose name fits a pattern if given.

    Raises InputError for a suite that there is not, and a pattern that no case of the suites fits.
    """
    for suite in suites:
        if suite not in SUITE_NAMES:
            raise InputError(f"suite: expected one of {', '.join(SUITE_NAMES)}, got {suite!r}.")
    speed = {case.name: case for suite in suites for case in SUITES.get(suite, ())}
    accuracy = {case.regime: case for case in ACCURACY} if "accuracy" in suites else {}
    names = [*speed, *accuracy]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"case: expected one of {', '.join(names)}, got {pattern!r}.")

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    return (
        [case for name, case in speed.items() if wanted(name)],
        [case for name, case in accuracy.items() if wanted(name)],
    )


def cases_of(lens: Sequence[str], heads: int) -> list[TimedCase]:
    """A case of each of `lens`, lengths with commas between: "300,17,4096".

    Raises InputError for anything else, for no token at all, and for no head.
    """
    if heads < 1:
        raise InputError(f"heads: expected at least 1, got {heads}.")
    found: list[TimedCase] = []
    for text in lens:
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise InputError(f"lens: expected lengths such as 300,17,4096, got {text!r}.")
        lengths = list(map(int, parts))
        if not any(lengths):
            raise InputError(f"lens: expected a token at least, got {text!r}.")
        found.append(BenchCase.of(lengths, heads))
    return found
