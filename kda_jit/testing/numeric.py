"""Comparison with the recurrence: the worst block decides, and the message says where it is.

A mean over a whole output hides a wrong tail, a wrong head or a state read from the neighbour's
slot. So errors are relative RMS per (sequence, head, chunk of tokens) for outputs, per (sequence,
head) for states. Limits are relative too, to what plain bf16 arithmetic loses on the same inputs:
nearly equal keys cost any bf16 kernel 1e-2, random ones 3e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kda_jit.reference import RecurrentResult, chunk_kda

from .cases import Case, Inputs

#: A block much quieter than its sequence and head is judged by this part of their RMS.
QUIET = 0.05


class Worst(NamedTuple):
    """The block with the largest error; chunk is -1 for states, element indexes the tensor."""

    error: float
    sequence: int
    head: int
    chunk: int
    element: tuple[int, ...]

    @property
    def place(self) -> str:
        tail = f", chunk {self.chunk}" if self.chunk >= 0 else ""
        return f"sequence {self.sequence}, head {self.head}{tail}"


class Mismatch(AssertionError):
    """Raised by `assert_close`: the worst block, and what it was allowed."""

    def __init__(self, message: str, error: float, allowed: float) -> None:
        super().__init__(message)
        self.error = error
        self.allowed = allowed


class PlainLoss(NamedTuple):
    """Worst block errors of plain arithmetic in low precision, on given inputs."""

    out: float
    state: float


@dataclass(frozen=True)
class Limit:
    """factor x what plain arithmetic loses + slack."""

    plain: float
    factor: float = 2.0
    slack: float = 4e-4
    label: str = "plain torch bf16"

    @property
    def allowed(self) -> float:
        return self.factor * self.plain + self.slack

    def __str__(self) -> str:
        parts = f"{self.factor:g} x {self.label}, {self.plain:.1e}, + {self.slack:.0e}"
        return f"{self.allowed:.1e} ({parts})"


def relative_rms(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| over everything, in float64; inf where got is not finite."""
    want = want.double()
    return _ratio((got.double() - want).square().sum(), want.square().sum()).sqrt().item()


def block_errors(
    got: Tensor, want: Tensor, cu_seqlens: Tensor | None = None, chunk: int = 64
) -> list[Tensor]:
    """Of each sequence of outputs [B, T, HV, V], the relative RMS errors [chunks, HV]."""
    B, T, HV = want.shape[:3]
    bounds = [b * T for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    diff = (got.double() - want.double()).flatten(0, 1)  # [B * T, HV, V]
    want = want.double().flatten(0, 1)
    found = []
    for begin, end in pairwise(bounds):
        chunks = -(-(end - begin) // chunk)
        block = torch.arange(end - begin, device=want.device) // chunk

        def by_block(x: Tensor, block: Tensor = block, chunks: int = chunks) -> Tensor:
            rows = x.square().sum(-1)
            return rows.new_zeros(chunks, HV).index_add_(0, block, rows)

        rows_in = torch.bincount(block, minlength=chunks).unsqueeze(1)
        error = by_block(diff[begin:end]) / rows_in
        power = by_block(want[begin:end])
        floor = QUIET**2 * power.sum(0) / max(end - begin, 1)
        found.append(_ratio(error, torch.maximum(power / rows_in, floor)).sqrt())
    return found


def worst_block_error(
    got: Tensor, want: Tensor, cu_seqlens: Tensor | None = None, chunk: int = 64
) -> Worst:
    """Outputs [B, T, HV, V] by (sequence, head, chunk); rows past cu_seqlens[-1] do not count."""
    B, T, HV = want.shape[:3]
    bounds = [b * T for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    worst = Worst(0.0, -1, -1, -1, ())
    for n, ratio in enumerate(block_errors(got, want, cu_seqlens, chunk)):
        if not ratio.numel():
            continue
        at = int(ratio.argmax())
        if ratio.flatten()[at] > worst.error or worst.sequence < 0:
            c, head = divmod(at, HV)
            first = bounds[n] + c * chunk
            rows = slice(first, min(first + chunk, bounds[n + 1]))
            parts = (x.flatten(0, 1)[rows, head].double() for x in (got, want))
            row, channel = _argmax(next(parts) - next(parts))
            token = first + row
            worst = Worst(
                ratio.flatten()[at].item(), n, head, c, (token // T, token % T, head, channel)
            )
    return worst


def error_along(got: Tensor, want: Tensor, stretch: int = 16) -> tuple[list[int], Tensor]:
    """(tokens, error): the RMS error of a sequence [T, HV, V] in stretches of tokens, all heads.

    In units of the RMS that `want` has over the sequence; a token is the middle of its stretch.
    """
    T, want = want.shape[0], want.double()
    error = (got.double() - want).square().mean((1, 2))
    stretches = [part.mean().sqrt() for part in error.split(stretch)]
    points = [min(stretch * i + stretch // 2, T) for i in range(len(stretches))]
    return points, (torch.stack(stretches) / want.square().mean().sqrt()).cpu()


def state_errors(got: Tensor, want: Tensor) -> Tensor:
    """Of states [N, HV, V, K], the relative RMS errors [N, HV]."""
    want = want.double()
    return _ratio((got.double() - want).square().sum((2, 3)), want.square().sum((2, 3))).sqrt()


def worst_state_error(got: Tensor, want: Tensor) -> Worst:
    """States [N, HV, V, K] by (sequence, head)."""
    want = want.double()
    diff = got.double() - want
    if not diff.numel():
        return Worst(0.0, -1, -1, -1, ())
    ratio = state_errors(got, want)
    n, head = _argmax(ratio)
    return Worst(ratio[n, head].item(), n, head, -1, (n, head, *_argmax(diff[n, head])))


def assert_close(
    name: str,
    got: Tensor,
    want: Tensor,
    limit: Limit | float,
    *,
    cu_seqlens: Tensor | None = None,
    chunk: int = 64,
    per: Literal["chunk", "state"] | None = None,
    case: Case | None = None,
) -> Worst:
    """The worst block of `got`; raises Mismatch, an AssertionError, where it is beyond `limit`.

    per  "chunk": an output, [B, T, HV, V]; "state": states, [N, HV, V, K].
         None: "state" where `name` ends with "state".
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if (per or ("state" if name.endswith("state") else "chunk")) == "state":
        worst = worst_state_error(got, want)
    else:
        worst = worst_block_error(got, want, cu_seqlens, chunk)
    allowed = limit.allowed if isinstance(limit, Limit) else limit
    if worst.error <= allowed:
        return worst
    shown = str(limit) if isinstance(limit, Limit) else f"{limit:.1e}"
    words = (
        f"{name}: relative RMS error {worst.error:.1e} at {worst.place}; allowed {shown}\n"
        f"  worst element {list(worst.element)}: got {got[worst.element].item():.6g}, "
        f"want {want[worst.element].item():.6g}     {case if case is not None else ''}".rstrip()
    )
    raise Mismatch(words, worst.error, allowed)


def plain_loss(
    inputs: Inputs,
    want: RecurrentResult | None = None,
    *,
    operands: torch.dtype = torch.bfloat16,
    chunk: int = 64,
) -> PlainLoss:
    """What the chunked form loses when only its operands and its output are rounded.

    Everything else is float64, so this is the cost of the format and not of an implementation.
    `want` is the recurrence over the same inputs, where it is known already.
    """
    want = inputs.reference() if want is None else want
    plain = plain_result(inputs, operands)
    return PlainLoss(
        worst_block_error(plain.out, want.out, inputs.cu_seqlens, chunk).error,
        worst_state_error(plain.final_state, want.final_state).error,
    )


def plain_result(inputs: Inputs, operands: torch.dtype = torch.bfloat16) -> RecurrentResult:
    """What the chunked form gives when only its operands and its output are rounded."""
    plain = inputs.judge(lambda x: chunk_kda(*x.args, **x.kwargs, operands=operands))
    return plain._replace(out=plain.out.to(operands))


def _ratio(error: Tensor, power: Tensor) -> Tensor:
    """error / power where 0 / 0 is 0, anything else over 0 and NaN are inf."""
    ratio = torch.where(error == 0, 0.0, error / power)
    return torch.nan_to_num(ratio, nan=torch.inf, posinf=torch.inf)


def _argmax(x: Tensor) -> tuple[int, int]:
    """(row, column) of the largest magnitude of a matrix; NaN counts as largest."""
    row, column = divmod(int(torch.nan_to_num(x.abs(), nan=torch.inf).argmax()), x.shape[1])
    return row, column
