"""What a machine has for the tiers, and what `--dram_gib=auto` and `--ssd_gib=auto` make of it.

Not here: what an engine takes of each device (`plan`).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from absl import flags

from ca_jax.errors import CaJaxError
from ca_jax.launch.flags import AUTO, FlagError
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.inspector import StoreInspector

SIZES = ("dram_gib", "ssd_gib")
"""Flags that may be `auto`."""

_CGROUPS = (("memory.max", "memory.current", "inactive_file"), ("memory.limit_in_bytes", "memory.usage_in_bytes", ""))
_CGROUP_PARENTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
_SHARE = 0.8  # Of what is free: activations, compiled code and what else runs have the rest.
_LEAST_GIB = 0.05


def free_memory_bytes(proc: Path = Path("/proc"), cgroup: Path | None = None) -> int | None:
    """Memory that may still be taken: the machine's, or what a cgroup's limit leaves; None where no one says.

    Args:
      proc: where the kernel tells of the machine.
      cgroup: directory of the cgroup; None: this process's.
    """
    found = []
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for directory in [cgroup] if cgroup is not None else _own_cgroups(proc):
        for limit, used, cache in _CGROUPS:
            try:
                most, taken = (directory / limit).read_text().strip(), int((directory / used).read_text())
                stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if most.isdecimal() and int(most) < 1 << 60:
                found.append(max(int(most) - taken + int(stat.get(cache or "total_inactive_file", 0)), 0))
    return min(found, default=None)


def _own_cgroups(proc: Path) -> list[Path]:
    """Directories of the cgroup that this process is in, and of those above it, each of which may have a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.split(":", 2)[2] for line in lines if line.startswith("0::") or ":memory:" in line]
    inner = [Path(top, path.lstrip("/")) for top in _CGROUP_PARENTS for path in paths]
    tops = [Path(top) for top in _CGROUP_PARENTS]
    return list(dict.fromkeys([*tops, *(each for path in inner for each in (path, *path.parents) if _is_below(each))]))


def _is_below(path: Path) -> bool:
    return any(str(path).startswith(top) for top in _CGROUP_PARENTS)


def free_disk_bytes(directory: Path) -> int:
    """Free space where a directory is, or will be."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def sizes_to_find(flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """Flags of sizes that are `auto`."""
    return [name for name in SIZES if flag_values[name].value == AUTO]


def block_disk_bytes(directory: Path, weights: str | None = None) -> int:
    """What blocks that a store has in its directory take of the disk; 0 where there is none that can be read.

    Args:
      directory: the store's.
      weights: fingerprint of those whose blocks count; None: blocks of all.
    """
    try:
        with StoreInspector(directory) as inspector:
            blocks = inspector.disk_use().blocks
    except (CaJaxError, OSError):
        return 0
    own = (use.num_bytes for each, use in blocks.items() if weights in (None, each.weights.partition(" ")[0]))
    return sum(own)


def sized(store: StoreConfig, auto: Collection[str], needed_bytes: int, *, weights: str | None = None) -> StoreConfig:
    """A store's config with sizes that follow from the machine.

    Args:
      store: what else is asked of it.
      auto: which sizes do: `dram_gib`, `ssd_gib`.
      needed_bytes: of memory that the engine will take besides, and does not hold yet.
      weights: fingerprint of the model's, whose blocks on SSD will be the tier's; None: blocks of any model are.

    Raises:
      FlagError: there is too little, the system does not say, or there is no directory.
    """
    sizes: dict[str, Any] = {}
    if "dram_gib" in auto:
        free = free_memory_bytes()
        if free is None:
            raise FlagError("dram_gib must be a number of GiB here, where the system tells no free memory; got auto")
        sizes["dram_gib"] = _rounded("dram_gib", (free - needed_bytes) * _SHARE, f"{free / GIB:.2f} GiB of memory")
    if "ssd_gib" in auto:
        if store.ssd_directory is None:
            raise FlagError("ssd_dir must be given with --ssd_gib=auto, got none")
        own = block_disk_bytes(store.ssd_directory, weights)
        free = free_disk_bytes(store.ssd_directory)
        left = (free + own - store.ssd_free_floor_bytes) * _SHARE
        sizes["ssd_gib"] = _rounded("ssd_gib", left, f"{free / GIB:.2f} GiB of disk")
    return dataclasses.replace(store, **sizes)


def _rounded(name: str, num_bytes: float, free: str) -> float:
    gib = int(num_bytes / GIB * 100) / 100
    if gib < _LEAST_GIB:
        raise FlagError(
            f"{name}=auto must find {_LEAST_GIB} GiB, got {gib}: {free} are free; name a size, or free some"
        )
    return gib
