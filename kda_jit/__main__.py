"""The command `kda-jit`, also `python -m kda_jit`."""

from __future__ import annotations

import sys

from .errors import KdaError
from .extras import install


def main() -> None:
    """Runs the command line; an error of ours is printed in one paragraph, without a traceback."""
    try:
        from .cli import app
        from .cli.plain import escape_what_cannot_be_shown
    except ModuleNotFoundError as missing:
        if missing.name not in {"rich", "typer"}:
            raise
        sys.exit(f"The command needs {missing.name}: {install('cli')}")
    escape_what_cannot_be_shown()
    try:
        app()
    except KdaError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
