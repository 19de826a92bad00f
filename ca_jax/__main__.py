"""The command `ca_jax`, also as `python -m ca_jax`: `--version`, or a subcommand.

Not here: the subcommands and their help (`launch.command`).
"""

from __future__ import annotations

import importlib.metadata
import sys


def main() -> None:
    """Prints the version, or runs the subcommand that the command line names."""
    if sys.argv[1:] == ["--version"]:
        print(f"ca_jax {importlib.metadata.version('ca-jax')}")  # noqa: T201
        return
    from ca_jax.launch import command  # Only here: it loads what a terminal needs.

    command.main()


if __name__ == "__main__":
    main()
