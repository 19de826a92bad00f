"""A process that changes a catalog until it is killed, telling what it has done. Run by the tests of the catalog.

    python catalog_victim.py DIRECTORY

Each line on stdin is a seed: a fork of this process works by it, and says so on stdout: `start PID`, then, before each
change, what it is about to do, `ok` once that is durable, and `end` when the fork is gone. Forks, since starting Python
takes far longer than what is to be interrupted.
"""

from __future__ import annotations

import os
import random
import signal
import sys

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.tokens import Lineage, TokenPlaces

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=5, dtype="float32", block_tokens=4)
NAMESPACE = Namespace(weights="weights", layout=LAYOUT)
NUM_KEYS = 12


def make(key: int, version: int) -> tuple[SessionRecord, np.ndarray, np.ndarray, bytes]:
    """A session, told from every other version of it by each of its parts."""
    num_tokens = 1 + version % 37
    num_blocks = LAYOUT.num_blocks(num_tokens)
    record = SessionRecord(
        key=f"{key:064x}",
        tenant=f"tenant {key % 3}",
        session_id=f"session {key}",
        block_ids=np.arange(num_blocks) + 1000 * version,
        places=TokenPlaces.dense(num_tokens),
        created_s=0.0,
        last_used_s=float(version),
    )
    token_ids = np.arange(num_tokens, dtype=np.int32) + version
    return record, token_ids, np.full((num_blocks, 3), version, np.uint32), b"note %d" % version


def cut_of(version: int) -> tuple[np.ndarray, Lineage, bytes]:
    """How `make` of a version is cut: which tokens stay, the first one too, what is dropped, and the note then."""
    kept = (np.arange(1 + version % 37) * 7 + version) % 3 > 0
    kept[0] = True
    return kept, Lineage(int(np.count_nonzero(~kept)), int(np.argmin(kept))), b"cut %d" % version


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def work(directory: str, seed: int) -> None:
    """Publishes, cuts and forgets. Odd seeds end it from within, in the midst of a statement."""
    rng = random.Random(seed)
    with Catalog(directory, NAMESPACE) as catalog:
        if seed % 2:
            steps = iter(range(rng.randrange(1, 3000)))
            catalog._db.set_progress_handler(
                lambda: None if next(steps, None) is not None else os.kill(os.getpid(), signal.SIGKILL), 1
            )
        for version in range(seed * 10_000, (seed + 1) * 10_000):
            key = rng.randrange(NUM_KEYS)
            name = f"{key:064x}"
            found, chance = catalog.load(name), rng.random()
            if found is not None and not found[0].lineage.num_dropped and chance < 0.4:
                published = int(found[1].token_ids[0])
                tell(f"cut {key} {published}")
                catalog.cut(name, *cut_of(published))
            elif chance < 0.8:
                tell(f"publish {key} {version}")
                catalog.publish(*make(key, version))
            else:
                tell(f"forget {key}")
                catalog.forget([name])
            tell("ok")


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            work(sys.argv[1], int(line))
            os._exit(1)
        tell(f"start {pid}")
        os.waitpid(pid, 0)
        tell("end")


if __name__ == "__main__":
    main()
