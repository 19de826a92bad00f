"""Runs the notebooks of the documentation from their first cell to their last; an error in a cell is an error.

    python -m tools.run_notebooks                               all of docs/notebooks, changing none
    python -m tools.run_notebooks --write FILE.ipynb            keeps what it prints and draws in the file

Each notebook has a kernel, and so an engine, of its own. Cells may take `--timeout` seconds each.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbclient
import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "docs" / "notebooks"
MAX_BYTES = 200_000
"""Largest notebook that `--write` keeps: it is read in diffs."""


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="by default all of docs/notebooks")
    parser.add_argument("--write", action="store_true", help="keep outputs in the files")
    parser.add_argument("--timeout", type=int, default=300, help="seconds that a cell may take")
    args = parser.parse_args()
    paths = args.notebooks or sorted(NOTEBOOKS.glob("*.ipynb"))
    if not paths:
        sys.exit(f"notebooks must be in {NOTEBOOKS}, got none")
    for path in paths:
        started_s = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        try:
            nbclient.NotebookClient(notebook, timeout=args.timeout, kernel_name="python3").execute()
        except nbclient.exceptions.CellExecutionError as error:
            sys.exit(f"{path.name}: {error}")
        if args.write:
            _write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started_s:.0f} s")


def _write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Keeps a notebook with its outputs, but nothing of the machine that ran it."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.execution_count = None
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    text = nbformat.writes(notebook)
    if len(text) > MAX_BYTES:
        sys.exit(f"{path.name} must be at most {MAX_BYTES:,} bytes with its outputs, got {len(text):,}")
    path.write_text(text + "\n")


if __name__ == "__main__":
    main()
