"""One engine at a time has a directory: the second is refused and told why, and the first does not notice."""

from __future__ import annotations

import os
import signal

import pytest

from ca_jax.storage.catalog.file import CatalogLockedError
from tests import engine_kit as kit
from tests.reliability import killing, workload
from tests.reliability.arena import Arena

REFUSED = "must be this engine's alone, got it in use by process {} on .*; stop that one"


def test_a_second_engine_in_the_same_process_is_refused(tmp_path):
    with Arena(tmp_path / "store", "raw", seed=5) as arena:
        for other_driver in workload.DRIVERS:  # Whose blocks would be others.
            store = workload.ssd_store(arena.directory, other_driver, dram_blocks=10, ssd_blocks=10)
            with pytest.raises(CatalogLockedError, match=REFUSED.format(os.getpid())):
                kit.small_engine(store=store)
        arena.converse()
        assert arena.take_counts().total() == 0, "all were on SSD, and are still"
        assert arena.tally.wrong_tokens == arena.tally.failed_requests == 0
        arena.check_books()


def test_an_engine_beside_another_process_is_refused(tmp_path, compile_cache):
    directory, driver = tmp_path / "store", "zarr3"
    with killing.Nursery(directory, driver, compile_cache) as nursery:
        pid = nursery.begin(1)
        line = nursery.line(60)
        assert line is not None
        assert line.startswith("open 0 ")
        with pytest.raises(CatalogLockedError, match=REFUSED.format(pid)):
            kit.small_engine(store=workload.ssd_store(directory, driver, dram_blocks=10, ssd_blocks=300))
        os.kill(pid, signal.SIGKILL)
        while nursery.line(60) != "end":
            pass
        with kit.small_engine(store=workload.ssd_store(directory, driver, dram_blocks=10, ssd_blocks=300)) as engine:
            workload.check_books(engine, directory, fresh=True)
