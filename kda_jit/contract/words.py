"""How a refusal reads: name, what was expected, what was got, the likely cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kda_jit.errors import DeviceError, InputError, InputTypeError


def shape_of(x: Tensor) -> str:
    return "[" + ", ".join(map(str, x.shape)) + "]"


def kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {shape_of(value)}"
    return f"{value!r}" if value is None else f"{type(value).__name__} {value!r:.60}"


def refuse_shape(
    name: str, x: object, axes: str, want: Sequence[object] | None, hint: str = ""
) -> NoReturn:
    wanted = axes if want is None else f"{axes} = [{', '.join(map(str, want))}]"
    if not isinstance(x, Tensor):
        raise InputTypeError(f"{name}: expected a torch.Tensor {wanted}, got {kind_of(x)}.")
    got = tuple(x.shape)
    if not hint and want is not None and len(want) >= 3:
        if name == "g" and len(got) == 3:
            hint = (
                "It holds one gate per key channel; for one gate per head, expand it over K first."
            )
        elif len(got) == len(want) and (got[0], *got[2:]) == (want[0], *want[2:]):
            hint = f"All inputs hold the same tokens as q; slice {name}[:, :{want[1]}]."
        elif len(got) == len(want) and got[:2] == want[:2] and name in ("g", "beta"):
            hint = (
                "It has the heads of v (HV), not those of q (H), and K channels where it has any."
            )
    raise InputError(f"{name}: expected {wanted}, got {shape_of(x)}. {hint}".rstrip())


def refuse_dtype(name: str, x: Tensor, want: Sequence[torch.dtype], hint: str = "") -> NoReturn:
    names = " or ".join(dict.fromkeys(str(d) for d in want))
    raise InputTypeError(f"{name}: expected {names}, got {x.dtype}. {hint}".rstrip())


def refuse_device(name: str, x: Tensor, index: int) -> NoReturn:
    device = "the CPU" if index < 0 else f"cuda:{index}"
    raise DeviceError(
        f"{name}: expected a tensor on {device}, where q is, got one on {x.device}. Nothing is "
        "copied between devices here; move it once, outside the step."
    )


def refuse_stride(name: str, x: Tensor, want: str, hint: str = "") -> NoReturn:
    raise InputError(
        f"{name}: expected {want}, got strides {tuple(x.stride())} for shape {shape_of(x)}. "
        f"{hint or 'Call .contiguous() on it.'}"
    )
