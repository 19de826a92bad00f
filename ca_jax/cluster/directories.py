"""Directories of the replicas of one machine: `replica-0`, `replica-1`, … below one, each for one process at a time.

    replica-0/       a store (`ca_jax.storage`)
    replica-0.lock   held by the process that has it
    replica-0.name   its name for life, which no directory of another machine has
    replica-0.keys   keys that its replica held last

A replica takes the first one that nobody holds, so that one that is started again finds what an earlier one has stored.

Not here: what is in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import secrets
from pathlib import Path
from typing import BinaryIO

from ca_jax.storage.catalog.file import CatalogLockedError, lock_directory
from ca_jax.storage.config import StoreConfig


@dataclasses.dataclass(frozen=True)
class Claim:
    """A directory that is this process's own, until it ends or lets go."""

    directory: Path
    name: str
    """Of the replicas that have had it: `replica-0-5fa2c4`."""
    lock: BinaryIO

    @property
    def number(self) -> int:
        """Which of the machine's it is, from 0 on."""
        return int(self.directory.name.rpartition("-")[2])

    @property
    def keys_file(self) -> Path:
        """Where the replica notes the keys that it holds."""
        return self.directory.with_suffix(".keys")

    def release(self) -> None:
        """Lets another process have it."""
        self.lock.close()

    def config(self, store: StoreConfig) -> StoreConfig:
        """The config of the store in it, of that of all replicas."""
        url = None if store.ssd_url is None else f"{store.ssd_url.rstrip('/')}/{self.name}"
        return dataclasses.replace(store, ssd_dir=str(self.directory), ssd_url=url)


def claim(root: Path) -> Claim:
    """Claims the first directory below `root` that no process holds. It is made (mode 0700) if it is not there.

    Raises:
      OSError: it cannot be made or written to.
      CatalogAccessError: likewise.
    """
    for number in itertools.count():
        directory = root / f"replica-{number}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = directory.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock_directory(directory).close()  # An engine that is no replica may have it.
            return Claim(directory, _name_of(directory), lock)
        except (BlockingIOError, CatalogLockedError):
            lock.close()
        except BaseException:
            lock.close()
            raise
    raise AssertionError("counting has no end")


def _name_of(directory: Path) -> str:
    path = directory.with_suffix(".name")
    with contextlib.suppress(FileNotFoundError):
        if name := path.read_text(encoding="ascii").strip():
            return name
    name = f"{directory.name}-{secrets.token_hex(3)}"
    path.write_text(name, encoding="ascii")
    return name
