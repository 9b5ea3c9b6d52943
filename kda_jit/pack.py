"""Gathers the tokens of a mixed step into two groups, and puts their outputs back: a launch each.

All five inputs go by one and the same index, so that no gate can end up beside another token's key.
In Triton the live counts are read on the device and nothing waits for it; in torch, for devices
without Triton, one group and tensor goes after the other, and the host reads the counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kda_jit.backends.base import LaunchRecord
from kda_jit.backends.triton import _ColdCaptureGuard, _triton_state
from kda_jit.errors import CaptureError

#: Columns that one program copies of each tensor.
BLOCK = 1024


class Group(NamedTuple):
    """Some tokens of a step, and their place in the packed buffers.

    tokens     [at least rows]  int32 or int64: tokens of the step. What lies past the live count,
                                or names no token of the step, is ignored.
    start_loc  [N + 1]          int32 or int64: the live count is the last entry
    rows       of the packed buffers; none is used past them
    """

    tokens: Tensor
    start_loc: Tensor
    rows: int


class PackInputs(NamedTuple):
    """q, k [1, T, H, K], v [1, T, HV, V], g [1, T, HV, K], beta [1, T, HV]; of a step or packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def rows(self, first: int, end: int) -> PackInputs:
        if first == 0 and end == self.q.shape[1]:
            return self
        return PackInputs(*[x[:, first:end] for x in self])


def triton_can_pack(device: torch.device) -> bool:
    """Whether Triton's kernels run on tensors of this device."""
    missing, interpreted = _triton_state()
    return not missing and interpreted == (device.type != "cuda")


def pack(
    inputs: PackInputs, packed: PackInputs, first: Group, second: Group, *, triton: bool
) -> LaunchRecord:
    """packed[:, i] = inputs[:, first.tokens[i]], and so on for `second` from row first.rows on.

    packed  contiguous, of the dtypes of `inputs`; rows past a live count are not written
    triton  whether to run Triton's kernel; see `triton_can_pack`
    """
    if not triton:
        for group, row in ((first, 0), (second, first.rows)):
            rows, tokens = _live(group, row, inputs.q.shape[1])
            for x, y in zip(inputs, packed, strict=True):
                y[0, rows] = x[0, tokens]
        return LaunchRecord("torch", ("torch_pack",))

    from kda_jit.triton_kernels.pack import kda_pack

    q, k, v, g, beta = inputs
    widths = [x.shape[2:].numel() for x in (q, v, g, beta)]
    with _ColdCaptureGuard(q.device, "pack"):
        kda_pack[_grid(first, second, max(widths))](
            *inputs, *packed, first.tokens, second.tokens, first.start_loc[-1:],
            second.start_loc[-1:], first.rows, q.shape[1],
            q.stride(1), k.stride(1), v.stride(1), g.stride(1), beta.stride(1),
            QK_WIDTH=widths[0], V_WIDTH=widths[1], G_WIDTH=widths[2], BETA_WIDTH=widths[3],
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return LaunchRecord("triton", ("kda_pack",))


def scatter(
    packed: Tensor, out: Tensor, first: Group, second: Group, *, triton: bool
) -> LaunchRecord:
    """out[:, first.tokens[i]] = packed[:, i], and so on for `second` from row first.rows on.

    packed, out  [1, rows or T, HV, V]; packed is contiguous, out may be token-strided. No other row
                 of out is written.
    """
    if not triton:
        for group, row in ((first, 0), (second, first.rows)):
            rows, tokens = _live(group, row, out.shape[1])
            out[0, tokens] = packed[0, rows]
        return LaunchRecord("torch", ("torch_scatter",))

    from kda_jit.triton_kernels.pack import kda_scatter

    width = out.shape[2:].numel()
    with _ColdCaptureGuard(out.device, "scatter"):
        kda_scatter[_grid(first, second, width)](
            packed, out, first.tokens, second.tokens, first.start_loc[-1:], second.start_loc[-1:],
            first.rows, out.shape[1], out.stride(1),
            WIDTH=width, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return LaunchRecord("triton", ("kda_scatter",))


def _grid(first: Group, second: Group, width: int) -> tuple[int, int]:
    return first.rows + second.rows, -(-width // BLOCK)


def _live(group: Group, first_row: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Packed rows of a group and the tokens they belong to, by way of the host."""
    _refuse_capture(group.tokens)
    tokens = group.tokens[: min(int(group.start_loc[-1]), group.rows)].long()
    (rows,) = torch.where((tokens >= 0) & (tokens < num_tokens))
    return rows + first_row, tokens[rows]


def _refuse_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "KDACore: expected Triton during a CUDA graph capture, got backend='torch'. It reads "
            "numbers of tokens on the host; capture 'triton' or 'cuda' instead."
        )
