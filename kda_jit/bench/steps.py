"""Steps of an engine to time: decodes, prefills and verifications over a pool of states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from kda_jit import StepMetadata
from kda_jit.pack import PackInputs

from .cases import HEAD_DIM, Draws, TimedCase, moved_bytes


@dataclass(frozen=True)
class StepInputs:
    """The arguments of one step. Slot 0 of the pool is nobody's: vLLM takes it for padding.

    qkv       [1, T, 3 * H * D]  one projection: q, k and v are its column slices, as engines have
    metadata  token indices are int64, as index_copy_ needs them, other indices int32
    """

    qkv: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float
    pool: Tensor
    metadata: StepMetadata

    @property
    def tokens(self) -> PackInputs:
        """q, k, v, g, beta of the step."""
        return PackInputs(*split(self.qkv, self.beta.shape[2]), self.g, self.beta)

    @property
    def device(self) -> torch.device:
        return self.qkv.device

    def fresh_out(self) -> Tensor:
        """[1, T, H, D] of NaN, so that a row which is left out shows."""
        return torch.full_like(self.g, torch.nan)


def split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [1, T, H, D] where they lie in a projection."""
    q, k, v = (x.unflatten(2, (heads, HEAD_DIM)) for x in qkv.chunk(3, 2))
    return q, k, v


@dataclass(frozen=True)
class StepCase(TimedCase):
    """One step to time: a pool of fp32 states in random order, updated in place.

    decodes   sequences of one token, all with a state
    prefills  tokens of each prompt; the first is fresh, every second one goes on from a state
    verified  sequences of 1 + drafts tokens, of which any number were accepted before

    In a step with verified sequences and others, sequences come in random order.
    """

    name: str
    heads: int
    suite: str = "layer"
    decodes: int = 0
    prefills: tuple[int, ...] = ()
    verified: int = 0
    drafts: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + sum(self.prefills) + self.verified * (1 + self.drafts)

    @property
    def sequences(self) -> int:
        return self.decodes + len(self.prefills) + self.verified

    @property
    def floor_bytes(self) -> int:
        prefills = len(self.prefills) + len(self.prefills) // 2  # a fresh one reads no state
        states = 2 * self.decodes + prefills + self.verified * (2 + self.drafts)
        return moved_bytes(self.tokens, states, self.heads)

    @property
    def parts(self) -> Sequence[StepCase]:
        """Its decodes and its prefills, where it has both and nothing else."""
        if not (self.decodes and self.prefills) or self.verified:
            return ()
        return (
            replace(self, name="its decodes", prefills=()),
            replace(self, name="its prefills", decodes=0),
        )

    def head(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "decodes": self.decodes,
            "prefills": list(self.prefills),
            "verified": self.verified,
            "drafts": self.drafts,
            "heads": self.heads,
        }

    def inputs(self, device: torch.device | str, seed: int = 0) -> StepInputs:
        draw, rng = Draws(device, seed), torch.Generator().manual_seed(seed)
        T, H, D, columns = self.tokens, self.heads, HEAD_DIM, 1 + self.drafts
        N, S = self.decodes + len(self.prefills), self.verified
        size = N + S * columns
        slots = 1 + torch.randperm(size, generator=rng)
        accepted = torch.randint(1, columns + 1, (S,), generator=rng)

        def index(x: Tensor | Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.as_tensor(x).to(device, dtype)

        found: dict[str, Any] = {}
        lengths = [1] * self.decodes + list(self.prefills) + [columns] * S
        if N:
            found |= {
                "num_decodes": self.decodes,
                "num_prefills": len(self.prefills),
                "non_spec_query_start_loc": index(_ends(lengths[:N])),
                "non_spec_state_indices": index(slots[:N]),
            }
        if self.prefills:
            has = [True] * self.decodes + [i % 2 == 1 for i in range(len(self.prefills))]
            found["has_initial_state"] = index(has, torch.bool)
        if S:
            found |= {
                "num_spec_decodes": S,
                "spec_query_start_loc": index(_ends(lengths[N:])),
                "spec_state_indices": index(slots[N:].view(S, columns)),
                "num_accepted_tokens": index(accepted),
            }
        if N and S:
            order = torch.randperm(N + S, generator=rng).tolist()
            starts = dict(zip(order, _ends([lengths[n] for n in order])))
            rows = [range(starts[n], starts[n] + lengths[n]) for n in range(N + S)]
            found |= {
                "non_spec_token_indx": index([*chain(*rows[:N])], torch.int64),
                "spec_token_indx": index([*chain(*rows[N:])], torch.int64),
            }
        return StepInputs(
            qkv=draw.normal(1, T, 3 * H * D),
            g=draw.normal(1, T, H, D),
            beta=draw.normal(1, T, H),
            A_log=draw.A_log(H),
            dt_bias=torch.zeros(H, D, device=device),
            lower_bound=-5.0,
            pool=draw.normal(1 + size, H, D, D, dtype=torch.float32),
            metadata=StepMetadata(T, **found),
        )


def _ends(lengths: Sequence[int]) -> list[int]:
    """Where each begins, and the end of the last."""
    return list(accumulate(lengths, initial=0))
