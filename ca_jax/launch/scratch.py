"""Directories that scripts fill and remove, and the JSON that they leave.

Not here: flags that name files (`out_flags`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ca_jax.errors import CaJaxError


class ScratchError(CaJaxError):
    """A directory that a script was given cannot be used."""


@contextlib.contextmanager
def scratch_directory(ssd_dir: str | None) -> Iterator[Path]:
    """Makes a directory, and removes it with all that is in it.

    Args:
      ssd_dir: where, made if need be; None for where the system keeps temporary files.

    Raises:
      ScratchError: `ssd_dir` is a file, or cannot be made or written to.
    """
    parent = None if ssd_dir is None else Path(ssd_dir).expanduser()
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="ca_jax-bench-", dir=parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise ScratchError(f"ssd_dir must be a directory, got the file {error.filename}") from error
    except OSError as error:
        raise ScratchError(f"ssd_dir must be a directory that can be written to, got {parent}: {error}") from error
    with made as path:
        yield Path(path)


def write_json(report: Mapping[str, Any], path: Path) -> None:
    """Writes a report; makes the directory it goes to.

    Raises:
      OSError: it cannot be written there.
      ValueError: a number in it is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
