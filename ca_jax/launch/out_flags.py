"""Flags that name a file to write, as scripts that measure for minutes read them: checked before anything runs.

Not here: the flags, whose help says what goes into the file (bench_flags, evaluate_flags), writing (bench_report).
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

FLAGS = flags.FLAGS


def out_path(name: str) -> Path | None:
    """The file that a flag names; None where the flag is not given.

    Raises:
      ValueError: it is a directory; minutes would pass before that is noticed otherwise.
    """
    value = FLAGS[name].value
    if value is None:
        return None
    path = Path(value).expanduser()
    if path.is_dir():
        raise ValueError(f"{name} wanted a file, found the directory {path}")
    return path
