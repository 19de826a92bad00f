"""Finds the benchmarks, which are in a checkout of the repository and not in the installed package.

Not here: the benchmarks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ca_jax


def find_benchmarks() -> None:
    """Has `benchmarks` be the package beside this one; where there is none, exits and says where to clone."""
    root = Path(ca_jax.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "harness.py").is_file():
        sys.exit("error: the benchmarks are not part of the package: clone its repository and run this from there")
    sys.path.insert(0, str(root))
