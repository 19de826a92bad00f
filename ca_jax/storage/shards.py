"""Where each of several processes keeps its shard of a store: a directory of its own, named by how many there are.

Not here: which heads a shard has (its layout, and who makes it), what processes agree upon.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from ca_jax.storage.config import StoreConfig

_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


def shard_config(config: StoreConfig, index: int, count: int) -> StoreConfig:
    """The config of one process's store: what it says of a directory or URL is of that shard's below it.

    Args:
      config: of all of them together. Sizes are those of each process.
      index: which process.
      count: how many there are; 1: the config as it is.

    Raises:
      ValueError: the directory holds shards of another number of processes, or the store of a single one.
    """
    directory = config.ssd_directory
    if directory is None:
        return config
    found = {int(match[2]) for path in _entries(directory) if (match := _SHARD.fullmatch(path.name))}
    has_catalog = any(path.name.startswith("catalog.") for path in _entries(directory))
    others = sorted((found | ({1} if has_catalog else set())) - {count})
    if others:
        raise ValueError(
            f"{directory} wanted the store of {_processes(count)}, found that of {_processes(others[0])}; "
            "start as many, or name another directory"
        )
    if count == 1:
        return config
    name = f"shard-{index}-of-{count}"
    url = None if config.ssd_url is None else f"{config.ssd_url.rstrip('/')}/{name}"
    return dataclasses.replace(config, ssd_dir=str(directory / name), ssd_url=url)


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
