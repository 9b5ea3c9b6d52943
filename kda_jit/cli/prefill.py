"""`kda-jit run`: one prefill from file to file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError


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
    """Runs one call from file to file.

    INPUTS is a safetensors file with tensors named like the arguments of kda_jit.prefill: q, k, v,
    g, beta, A_log, dt_bias, and where wanted initial_state, cu_seqlens, state_indices,
    has_initial_state, checkpoint_state, checkpoint_offsets. Its metadata may hold scale and
    lower_bound (a number, or none for the unbounded gate; without it -5). A file that
    kda_jit.capture wrote is one, too, also of a call of kda_jit.recurrent; then it is also said
    whether the results are those of the live call, bit for bit.
    """
    import torch
    from safetensors.torch import save_file

    import kda_jit

    from ..callfile import read_call, to_host
    from ..jit.cache import why_not_writable
    from ..replay import replay, same_bits

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if output.is_dir() or not output.parent.is_dir() or output.resolve() == inputs.resolve():
        raise InputError(
            f"output: expected a file other than the inputs, in a folder that exists, got {output}."
        )
    if (why_not := why_not_writable(output.parent)) is not None:
        raise InputError(f"output: expected a place to write to, got {output} ({why_not}).")
    call = read_call(inputs, place)
    results = replay(call, backend)
    launch = kda_jit.last_launch()
    assert launch is not None
    ran = launch.facts()
    save_file({name: to_host(x) for name, x in results.items()}, output, metadata=ran)
    shapes = ", ".join(f"{k} {list(x.shape)} {str(x.dtype)[6:]}" for k, x in results.items())
    typer.echo(f"{output}: {shapes}")
    typer.echo("ran " + ", ".join(f"{key} {value}" for key, value in ran.items() if value))
    for name in filter(results.__contains__, call.results):
        same = same_bits(call, name, results[name], call.results[name])
        typer.echo(f"{name}: {'the same bits as' if same else 'other bits than'} the live call's")
