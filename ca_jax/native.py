"""The library of C++ that the package is built with where there is a compiler, as ctypes loads it.

Not here: its functions (`ca_jax.models.cpu_kernels`, `ca_jax.storage.bfloat16`), its source (ca_jax/models/cpu).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import logging
import os
from pathlib import Path

_LOG = logging.getLogger(__name__)
_WITHOUT = "CA_JAX_NO_CPU_KERNELS"  # In the environment: everything is computed without it.


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library; None where it was not built or is not wanted."""
    if os.environ.get(_WITHOUT):
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).parent / "models" / f"_cpu_kernels{suffix}"
        if not path.exists():
            continue
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            _LOG.warning("%s cannot be used: everything is computed without it", path, exc_info=True)
            return None
    return None
