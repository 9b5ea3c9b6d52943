"""A Step is a Case for `kda_jit.recurrent`: its tokens, and where in a pool its states lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .cases import Case

#: What stands in num_accepted_tokens of a padded sequence.
GARBAGE = 1_065_369_473


@dataclass(frozen=True)
class Step:
    """One decode or verification step.

    case        the tokens; its initial states are what lies in the slots that sequences start from
    columns     1 + num_spec, so that state_indices is [N, columns]; None: it is [N]
    accepted    num_accepted_tokens of each sequence; None: not given
    padded      sequences that name no slot, and whose tokens hold NaN
    null_index  what the padded sequences with an even number name; None: -1, like the odd ones
    fresh       sequences without an initial state; NaN lies where they would find one
    """

    case: Case
    columns: int | None = None
    accepted: tuple[int, ...] | None = None
    padded: tuple[int, ...] = ()
    null_index: int | None = None
    fresh: tuple[int, ...] = ()

    def arguments(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        head_dim: int = 128,
        value_dim: int | None = None,
    ) -> dict[str, Any]:
        """Arguments of `kda_jit.recurrent`, all but `out` and `backend`.

        The pool holds NaN but for the slots that sequences start from, and every second slot
        belongs to nobody, so that a step to a neighbour shows.
        """
        x = self.case.tensors("cpu", dtype, head_dim, value_dim)
        assert x.initial_state is not None
        N, width = x.N, self.columns or 1
        rng = torch.Generator().manual_seed(self.case.seed)
        first = 0 if self.null_index is None else 1
        indices = first + 2 * torch.randperm(N * width, generator=rng).view(N, width)
        pool = x.initial_state.new_full((1 + 2 * N * width, *x.initial_state.shape[1:]), torch.nan)
        accepted = list(self.accepted or [1] * N)
        for n in range(N):
            if n in self.padded:
                null = -1 if n % 2 or self.null_index is None else self.null_index
                indices[n] = null
                accepted[n] = GARBAGE
                for y in x.args:
                    y.flatten(0, 1)[x.bounds[n] : x.bounds[n + 1]] = torch.nan
            elif accepted[n] > 0 and n not in self.fresh:
                pool[indices[n, accepted[n] - 1]] = x.initial_state[n]
        has = torch.tensor([n not in self.fresh for n in range(N)]) if self.fresh else None
        names = ("q", "k", "v", "g", "beta")
        arguments = dict(zip(names, x.args, strict=True)) | {
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            "lower_bound": x.lower_bound,
            "scale": x.scale,
            "state_pool": pool,
            "state_indices": indices.int() if self.columns else indices[:, 0].int(),
            "num_accepted_tokens": None if self.accepted is None else torch.tensor(accepted),
            "has_initial_state": has,
            "cu_seqlens": x.cu_seqlens,
            "null_index": self.null_index,
        }
        return {
            name: y.to(device) if isinstance(y, torch.Tensor) else y
            for name, y in arguments.items()
        }
