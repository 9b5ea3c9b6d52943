"""`kda-jit run`: one prefill from file to file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DeviceError, InputError

REQUIRED = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
OPTIONAL = (
    "initial_state",
    "cu_seqlens",
    "state_indices",
    "has_initial_state",
    "checkpoint_state",
    "checkpoint_offsets",
)


def run(
    inputs: Annotated[Path, typer.Argument(help="A safetensors file.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File to write: out and final_state.")
    ] = Path("outputs.safetensors"),
    backend: Annotated[str, typer.Option(help="auto, cuda, triton or torch.")] = "auto",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ...; empty: a GPU if there is one.")
    ] = "",
) -> None:
    """Runs one prefill from file to file.

    INPUTS is a safetensors file with tensors named like the arguments of kda_jit.prefill: q, k, v,
    g, beta, A_log, dt_bias, and where wanted initial_state, cu_seqlens, state_indices,
    has_initial_state, checkpoint_state, checkpoint_offsets. Its metadata may hold scale and
    lower_bound (a number, or none for the unbounded gate; without it -5).
    """
    import torch
    from safetensors.torch import save_file

    import kda_jit

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if output.is_dir() or not output.parent.is_dir() or output.resolve() == inputs.resolve():
        raise InputError(
            f"output: expected a file other than the inputs, in a folder that exists, got {output}."
        )
    arguments = read_inputs(inputs, place)
    with torch.no_grad():
        out, final_state = kda_jit.prefill(**arguments, backend=backend)
    tensors = {"out": out, "final_state": final_state}
    if "checkpoint_state" in arguments:
        tensors["checkpoint_state"] = arguments["checkpoint_state"]
    launch = kda_jit.last_launch()
    assert launch is not None
    ran = {"backend": launch.backend, "kernels": ", ".join(launch.kernels)}
    ran |= {k: v for k, v in (("schedule", launch.schedule), ("target", launch.target)) if v}
    save_file({k: t.contiguous().cpu() for k, t in tensors.items()}, output, metadata=ran)
    shapes = ", ".join(f"{k} {list(t.shape)} {str(t.dtype)[6:]}" for k, t in tensors.items())
    typer.echo(f"{output}: {shapes}")
    typer.echo("ran " + ", ".join(f"{key} {value}" for key, value in ran.items() if value))


def read_inputs(path: Path, device: str) -> dict[str, Any]:
    """Keyword arguments of `kda_jit.prefill` from a safetensors file, on `device`.

    Raises InputError for a file that is not one, or that holds other tensors than the call takes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device=device) as file:
            arguments: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise InputError(f"inputs: expected a safetensors file, {path} does not exist.") from None
    except RuntimeError as error:  # torch has no such device
        raise DeviceError(
            f"device: expected one that torch can use, got {device}: {error}"
        ) from None
    except (OSError, SafetensorError) as error:
        raise InputError(f"inputs: expected a safetensors file, got {path}: {error}") from None
    missing = [name for name in REQUIRED if name not in arguments]
    unknown = sorted(arguments.keys() - {*REQUIRED, *OPTIONAL})
    if missing or unknown:
        found = [f"lacks {', '.join(missing)}"] if missing else []
        found += [f"also has {', '.join(unknown)}"] if unknown else []
        raise InputError(
            f"inputs: expected the tensors {', '.join(REQUIRED)} and maybe {', '.join(OPTIONAL)}; "
            f"{path} {' and '.join(found)}."
        )
    for name in ("lower_bound", "scale"):
        if name in metadata:
            arguments[name] = _number(name, metadata[name])
    return arguments


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
