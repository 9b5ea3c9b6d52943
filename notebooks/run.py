"""Executes the notebooks, each in a fresh kernel; `--save` writes their outputs back.

    python notebooks/run.py                  all of them, nothing written
    python notebooks/run.py --save 04 06     these two, by how their names begin

What needs a GPU is run where there is one; a notebook says itself what it leaves out. Needs the
extra `notebooks` or `dev`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
PATIENCE_S = 600


def select(names: Sequence[str] = ()) -> list[Path]:
    """Notebooks in order, those whose names begin like one of `names` if there are any."""
    every = sorted(FOLDER.glob("*.ipynb"))
    for name in names:
        if not any(path.name.startswith(name) for path in every):
            known = ", ".join(path.stem for path in every)
            raise SystemExit(f"name: expected the beginning of one of {known}, got {name!r}.")
    return [path for path in every if not names or path.name.startswith(tuple(names))]


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs. Raises CellExecutionError where a cell fails.

    A cell that is meant to fail has the tag `raises-exception`.
    """
    notebook = nbformat.read(path, as_version=4)
    # A checkout that is not installed, too.
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    client = NotebookClient(
        notebook,
        timeout=PATIENCE_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # it warns of its own local port
    )
    client.execute(env=os.environ | {"PYTHONPATH": paths, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    # Versions of whoever runs it are not part of a notebook.
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="how the names of notebooks begin; default: all")
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks")
    options = parser.parse_args(argv)
    failed = 0
    for path in select(options.names):
        start = time.perf_counter()
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            failed += 1
            print(f"{path.name}: failed\n{error}", file=sys.stderr)
            continue
        if options.save:
            nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
