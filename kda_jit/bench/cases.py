"""What a case to time is, and the prefills among them: bf16 inputs, K = V = 128, HV = H."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kda_jit.testing import Inputs

#: Channels of keys and of values: K = V in every case.
HEAD_DIM = 128
#: Bytes of an element of q, k, v, g, beta, out (bf16) and of a state (fp32).
WIDE, STATE = 2, 4


class TimedCase(ABC):
    """One shape to time."""

    name: str
    heads: int

    @property
    @abstractmethod
    def floor_bytes(self) -> int:
        """Bytes that must cross DRAM: q, k, v, g, beta read, out written, states read, written."""

    @property
    def parts(self) -> Sequence[TimedCase]:
        """Cases that together do the same; the row says what this costs relative to them."""
        return ()

    @abstractmethod
    def head(self) -> dict[str, Any]:
        """How its row begins."""

    @abstractmethod
    def inputs(self, device: torch.device | str, seed: int = 0) -> Any:
        """What subjects bind."""

    def floor_us(self, bandwidth: float) -> float:
        """The least time, in microseconds, at `bandwidth` bytes per second read plus written."""
        return 1e6 * self.floor_bytes / bandwidth


def moved_bytes(tokens: int, states: int, heads: int) -> int:
    """5 * 256 + 2 bytes a token and head, 64 KiB for every time that a head's state crosses."""
    return heads * (WIDE * (5 * HEAD_DIM + 1) * tokens + STATE * HEAD_DIM**2 * states)


class Draws:
    """Random tensors of a case: standard normal q, k, v, g, beta logits and states.

    Drawn on the device, since up to half a billion numbers are; so only equal on equal devices.
    """

    def __init__(self, device: torch.device | str, seed: int) -> None:
        self._device = device
        self._rng = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=self._device, generator=self._rng)

    def A_log(self, heads: int) -> Tensor:
        """A = exp(A_log) is uniform in [1, 16)."""
        return (torch.rand(heads, device=self._device, generator=self._rng) * 15 + 1).log()


@dataclass(frozen=True)
class BenchCase(TimedCase):
    """One prefill to time: fp32 states in and out, packed.

    lengths  tokens of each sequence
    heads    H
    """

    name: str
    lengths: tuple[int, ...]
    heads: int

    @classmethod
    def of(cls, lengths: Sequence[int], heads: int) -> BenchCase:
        """Named by its shape, equal neighbours together: "8x1024_h16", "300+17+4096_h16"."""
        runs = [(n, len([*same])) for n, same in groupby(lengths)]
        words = [f"{count}x{n}" if count > 1 or len(runs) == 1 else f"{n}" for n, count in runs]
        return cls(f"{'+'.join(words)}_h{heads}", tuple(lengths), heads)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def floor_bytes(self) -> int:
        return moved_bytes(self.tokens, 2 * len(self.lengths), self.heads)

    def head(self) -> dict[str, Any]:
        return {"case": self.name, "lengths": list(self.lengths), "heads": self.heads}

    def shortened(self, longest: int = 160) -> BenchCase:
        """The same with sequences cut to `longest` tokens, each to another length below it."""
        cut = tuple(min(n, max(1, longest - 7 * i % longest)) for i, n in enumerate(self.lengths))
        return replace(self, lengths=cut)

    def inputs(self, device: torch.device | str, seed: int = 0) -> Inputs:
        draw = Draws(device, seed)
        T, H, N, D = self.tokens, self.heads, len(self.lengths), HEAD_DIM
        A_log = draw.A_log(H)
        ends = torch.tensor([0, *self.lengths]).cumsum(0).to(torch.int32)
        return Inputs(
            q=draw.normal(1, T, H, D),
            k=draw.normal(1, T, H, D),
            v=draw.normal(1, T, H, D),
            g=draw.normal(1, T, H, D),
            beta=draw.normal(1, T, H),
            A_log=A_log,
            dt_bias=torch.zeros(H, D, device=device),
            lower_bound=-5.0,
            scale=None,
            initial_state=draw.normal(N, H, D, D, dtype=torch.float32),
            cu_seqlens=ends.to(device),
        )
