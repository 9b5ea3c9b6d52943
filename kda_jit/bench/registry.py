"""The benchmark cases. A new one is one line here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from kda_jit.errors import InputError
from kda_jit.testing import TABLE_ROWS, Case, Inputs

#: Channels of keys and of values: K = V in every case.
HEAD_DIM = 128
#: Bytes of an element of q, k, v, g, beta, out (bf16) and of a state (fp32).
WIDE, STATE = 2, 4


@dataclass(frozen=True)
class BenchCase:
    """One shape to time: bf16 inputs, K = V = 128, HV = H, fp32 states in and out, packed.

    lengths  tokens of each sequence
    heads    H
    """

    name: str
    lengths: tuple[int, ...]
    heads: int
    suite: str = "flashkda"

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must cross DRAM: q, k, v, g, beta read, out written, states read and written.

        That is 5 * 256 + 2 a token and head, 128 KiB a sequence and head.
        """
        rows = WIDE * (5 * HEAD_DIM + 1) * self.tokens
        states = 2 * STATE * HEAD_DIM**2 * len(self.lengths)
        return self.heads * (rows + states)

    def floor_us(self, bandwidth: float) -> float:
        """The least time, in microseconds, at `bandwidth` bytes per second read plus written."""
        return 1e6 * self.floor_bytes / bandwidth

    def shortened(self, longest: int = 160) -> BenchCase:
        """The same with sequences cut to `longest` tokens, each to another length below it."""
        cut = tuple(min(n, max(1, longest - 7 * i % longest)) for i, n in enumerate(self.lengths))
        return replace(self, lengths=cut)

    def inputs(self, device: torch.device | str, seed: int = 0) -> Inputs:
        """Standard normal q, k, v, g, beta logits and states; A = exp(A_log) is log U(1, 16).

        Drawn on the device, since up to half a billion numbers are; so only equal on equal devices.
        """
        rng = torch.Generator(device).manual_seed(seed)
        T, H, N, D = self.tokens, self.heads, len(self.lengths), HEAD_DIM

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, dtype=dtype, device=device, generator=rng)

        rate = torch.rand(H, device=device, generator=rng) * 15 + 1
        ends = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        return Inputs(
            q=normal(1, T, H, D),
            k=normal(1, T, H, D),
            v=normal(1, T, H, D),
            g=normal(1, T, H, D),
            beta=normal(1, T, H),
            A_log=rate.log(),
            dt_bias=torch.zeros(H, D, device=device),
            lower_bound=-5.0,
            scale=None,
            initial_state=normal(N, H, D, D, dtype=torch.float32),
            cu_seqlens=ends.to(device),
        )


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

#: The inputs whose errors are tabled: T = 4096, H = 8.
ACCURACY: tuple[Case, ...] = tuple(
    Case(seed=1, lengths=(4096,), heads=8, regime=regime) for regime in TABLE_ROWS
)

#: What `--suite` takes.
SUITES = ("flashkda", "accuracy")


def select(
    suites: Sequence[str], patterns: Sequence[str] = ()
) -> tuple[list[BenchCase], list[Case]]:
    """(cases to time, cases to table) of these suites, those whose name fits a pattern if given.

    Raises InputError for a pattern that no case of the suites fits.
    """
    speed = [case for case in SPEED if case.suite in suites]
    accuracy = list(ACCURACY) if "accuracy" in suites else []
    names = [*(case.name for case in speed), *(case.regime for case in accuracy)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"case: expected one of {', '.join(names)}, got {pattern!r}.")

    def wanted(name: str) -> bool:
        return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

    return [c for c in speed if wanted(c.name)], [c for c in accuracy if wanted(c.regime)]
