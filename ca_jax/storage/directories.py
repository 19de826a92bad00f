"""Directories whose names are durable: a file's own sync says nothing of the directory that it is in.

Not here: what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(directory: Path) -> None:
    """Makes a directory (0700) and those that it lies in, if they are not there; the names of new ones are durable.

    Raises:
      OSError: one of them cannot be made; FileExistsError or NotADirectoryError where one is a file.
    """
    if directory.is_dir():
        return
    if directory.parent != directory:
        make_directory(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Makes the names of what was made, moved or removed in a directory durable."""
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
