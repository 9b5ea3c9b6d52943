"""One call in one file: safetensors named like the arguments, numbers and origin as metadata.

    q, k, ..., state_indices      the tensors that were given, dense, under their arguments' names
    result.out, ...               what the call wrote, where the file was captured from a live one
    metadata, all of it text      function (prefill or recurrent; without it prefill); its numbers;
                                  anything else is a fact about where the call came from

Of a pool of states only the slots that the call names are kept, and its indices count those.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kda_jit.errors import DeviceError, InputError

RESULT = "result."
_TOKENS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
#: function -> (tensors that it must have, tensors that it may have)
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prefill": (
        _TOKENS,
        (
            "initial_state",
            "cu_seqlens",
            "state_indices",
            "has_initial_state",
            "checkpoint_state",
            "checkpoint_offsets",
        ),
    ),
    "recurrent": (
        (*_TOKENS, "state_pool", "state_indices"),
        ("num_accepted_tokens", "has_initial_state", "cu_seqlens"),
    ),
}
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """A call of `kda_jit.prefill` or `kda_jit.recurrent`, ready to be made again.

    function     "prefill" or "recurrent"
    arguments    its keyword arguments: tensors and numbers
    results      what the live call wrote: out, then final_state and checkpoint_state, or
                 state_pool; empty where the file has none
    state_dtype  of a prefill's final_state, where it is no pool
    facts        the rest of the metadata, such as the backend that ran
    """

    function: str
    arguments: dict[str, Any]
    results: dict[str, Tensor] = field(default_factory=dict)
    state_dtype: torch.dtype = torch.float32
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> list[int]:
        """The slots that the rows of the pool had in the pool of the live call."""
        pool = "initial_state" if self.function == "prefill" else "state_pool"
        rows = self.arguments[pool].shape[0]
        text = self.facts.get("slots")
        if text is None:
            return list(range(rows))
        found = [int(slot) for slot in text.split(",") if slot.isdecimal()]
        if len(found) != rows:
            raise InputError(
                f"slots: expected a number for each of the {rows} rows of {pool} in the metadata, "
                f"got {text!r}."
            )
        return found


def write_call(path: Path, call: Call) -> None:
    """Writes the file in one step: it is not there, or it is whole. Tensors may lie anywhere."""
    from safetensors.torch import save_file

    tensors = {name: x for name, x in call.arguments.items() if isinstance(x, Tensor)}
    numbers = {name: x for name, x in call.arguments.items() if not isinstance(x, Tensor)}
    tensors |= {RESULT + name: x for name, x in call.results.items()}
    metadata = {name: "none" if x is None else str(x) for name, x in numbers.items()}
    if call.function == "prefill":
        metadata["state_dtype"] = str(call.state_dtype).removeprefix("torch.")
    part = path.with_name(f".{path.name}.part")
    try:
        save_file(
            {name: to_host(x) for name, x in tensors.items()},
            part,
            metadata=call.facts | metadata | {"function": call.function},
        )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def to_host(x: Tensor) -> Tensor:
    """A dense copy on the CPU that shares memory with nothing."""
    return x.detach().contiguous().to("cpu", copy=True)


def read_call(path: Path, device: str) -> Call:
    """The call in a safetensors file, with its tensors on `device`.

    Raises InputError for a file that is not one, or that holds other tensors than the call takes;
    DeviceError for a device that torch cannot use.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata: dict[str, str] = file.metadata() or {}
    except FileNotFoundError:
        raise InputError(f"inputs: expected a safetensors file, {path} does not exist.") from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"inputs: expected a safetensors file, got {path}: {error}") from None
    try:
        # A copy on the CPU, too: where a tensor begins in the file may be aligned to nothing.
        tensors = {name: x.to(device, copy=True) for name, x in tensors.items()}
    except (RuntimeError, AssertionError) as error:  # torch has no such device
        raise DeviceError(
            f"device: expected one that torch can use, got {device}: {error}"
        ) from None
    function = metadata.pop("function", "prefill")
    if function not in TENSORS:
        raise InputError(
            f"function: expected {' or '.join(TENSORS)} in the metadata, got {function!r}."
        )
    results = {
        name.removeprefix(RESULT): tensors.pop(name)
        for name in sorted(tensors)
        if name.startswith(RESULT)
    }
    _check_names(path, *TENSORS[function], tensors)
    state_dtype = metadata.pop("state_dtype", "float32")
    if state_dtype not in _STATE_DTYPES:
        raise InputError(
            f"state_dtype: expected {' or '.join(_STATE_DTYPES)} in the metadata, got "
            f"{state_dtype!r}."
        )
    return Call(
        function,
        tensors | _numbers(function, metadata),
        results,
        _STATE_DTYPES[state_dtype],
        metadata,
    )


def _check_names(
    path: Path, required: tuple[str, ...], optional: tuple[str, ...], found: Mapping[str, Tensor]
) -> None:
    missing = [name for name in required if name not in found]
    unknown = sorted(found.keys() - {*required, *optional})
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"also has {', '.join(unknown)}"] if unknown else []
        raise InputError(
            f"inputs: expected the tensors {', '.join(required)} and maybe {', '.join(optional)}; "
            f"{path} {' and '.join(parts)}."
        )


def _numbers(function: str, metadata: dict[str, str]) -> dict[str, float | bool | None]:
    """Takes the numbers among the arguments out of the metadata."""
    found: dict[str, float | bool | None] = {
        name: _number(name, metadata.pop(name))
        for name in ("lower_bound", "scale")
        if name in metadata
    }
    if function == "recurrent" and (text := metadata.pop("write_state", None)) is not None:
        if text not in ("True", "False"):
            raise InputError(f"write_state: expected True or False in the metadata, got {text!r}.")
        found["write_state"] = text == "True"
    return found


def _number(name: str, text: str) -> float | None:
    """A metadata value; "none" is None."""
    if text.strip().lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"{name}: expected a number or none in the metadata, got {text!r}."
        ) from None
