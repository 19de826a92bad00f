"""Says what a number was measured on: the machine, and the versions of what ran.

Not here: measuring.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from ca_jax.models import cpu_kernels

PACKAGES = ("ca-jax", "jax", "jaxlib", "flax", "numpy", "tensorstore")
"""Distributions whose versions are told."""

_GIB = 1 << 30
_CPU_INFO = Path("/proc/cpuinfo")
_THREAD_VARIABLES = ("PJRT_NPROC", "NPROC", "OMP_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS")


def describe_machine() -> dict[str, Any]:
    """What this process runs on, as JSON values. Starts jax's backend.

    Returns:
      `cpu` (model), `cores` (that this process may use), `memory_gib` (None where the system does not say), `os`,
      `device` (kind), `platform` and `num_devices` of jax, `cpu_kernels` (what they are compiled
      for; None where XLA computes everything), `environment` (variables set that size thread pools or pick
      the backend), `load_1m` (processes that ran or waited, mean of the last minute; None where the system does not
      say), `date` (UTC, ISO 8601).
    """
    devices = jax.devices()
    return {
        "cpu": _cpu_model(),
        # A container or `taskset` makes them fewer than there are.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": _if_told(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "os": platform.platform(),
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "cpu_kernels": cpu_kernels.kind(),
        "environment": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        "load_1m": _if_told(lambda: os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def describe_versions(packages: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Versions of Python and of installed distributions; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    """The name of the processor; Linux alone has it in a file."""
    if _CPU_INFO.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _if_told(ask: Callable[[], float], digits: int) -> float | None:
    """What the system says, rounded; None where it does not say."""
    try:
        return round(ask(), digits)
    except (AttributeError, ValueError, OSError):
        return None
