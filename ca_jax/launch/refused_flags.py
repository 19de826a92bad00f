"""Refuses flags that a script defines and one of its uses does not read.

Not here: what flags mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from absl import flags

flags.disclaim_key_flags()


def refuse_flags(names: Iterable[str], reader: str, *, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Refuses flags that would be ignored.

    Args:
      names: of flags that the reader does not read; names that are not defined are passed over.
      reader: what runs, for the error.
      flag_values: where flags were defined, parsed.

    Raises:
      ValueError: one of them was given.
    """
    for name in sorted(names):
        if name in flag_values and flag_values[name].present:
            raise ValueError(f"--{name} must be left out of {reader}, which does not read it")
