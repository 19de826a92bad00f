"""The suites: each module registers the functions that it decorates with `harness.suite`; a new file is found."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Imports all modules of this package, so that `harness.SUITES` has every suite."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
