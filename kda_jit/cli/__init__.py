"""The commands behind `kda-jit`; they need the extra `cli`. Each imports what it needs when run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from . import bench, compare, demo, doctor, kernels, machine, prefill, verify

app = typer.Typer(
    name="kda-jit",
    help="Kimi Delta Attention kernels, compiled at run time: look, compile, run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"kda_jit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    pass


# The list of commands has room for 67 characters each, and cuts a first sentence that has more.
app.command(short_help="Says what does not fit here, and what to type.")(doctor.doctor)
app.command(short_help="Prints versions, GPUs with their targets, and folders.")(machine.info)
app.command()(machine.explain)
app.command(short_help="Compiles the kernels; prints registers and spills.")(kernels.compile)
app.add_typer(kernels.cache, name="cache")
app.command()(prefill.run)
app.command(short_help="Makes one call by two backends, and says who is nearer.")(compare.compare)
app.command(short_help="Tries the laws of the operator on a backend.")(verify.verify)
app.command(short_help="Checks results, then times them beside peers.")(bench.bench)
app.command(short_help="Runs a batch of mixed lengths, checks it, draws it.")(demo.demo)


@dataclass(frozen=True)
class Option:
    """An option: its names as typed, its default and its sentence."""

    names: str
    default: str
    help: str


@dataclass(frozen=True)
class CommandHelp:
    """A command as docs/cli.md shows it; what its arguments are, the help says."""

    usage: str
    help: str
    options: tuple[Option, ...]


def describe() -> list[CommandHelp]:
    """Every command in the order of the help, groups flattened ("cache info")."""
    return _describe(typer.main.get_command(app), ())


def _describe(command: Any, path: tuple[str, ...]) -> list[CommandHelp]:
    if hasattr(command, "commands"):
        return [
            entry
            for name, sub in command.commands.items()
            for entry in _describe(sub, (*path, name))
        ]
    arguments = [p.name.upper() for p in command.params if p.param_type_name == "argument"]
    options = tuple(
        Option(", ".join((*p.opts, *p.secondary_opts)), _written(p.default), p.help or "")
        for p in command.params
        if p.param_type_name == "option"
    )
    usage = " ".join((*path, *arguments, *(["[options]"] if options else [])))
    return [CommandHelp(usage, (command.help or "").strip(), options)]


def _written(default: object) -> str:
    """A default as one would type it; empty where there is none."""
    if default is None or default is False or default == "":
        return ""
    return f"`{getattr(default, 'value', default)}`"
