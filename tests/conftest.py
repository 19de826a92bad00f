"""What every test shares: the environment jax starts in, and where data that is not in the repository lies."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before jax is imported: XLA sizes its thread pools by these, and with fewer threads than virtual devices times
# computations in flight, collectives wait for each other for ever.
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("NPROC", "16")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def recorded_data() -> Path:
    """tests/data: what tools/record_expectations.py wrote."""
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """../shared/data beside the repository; a test that asks for it is skipped where there is none."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("wants the data in ../shared/data, which is not there")
    return path


_MANY_MAPS = 40_000  # Of the 65,530 that Linux gives a process by default: compiling fails, or crashes, without one.


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps() -> Iterator[None]:
    """Forgets compiled functions once there are very many: each has memory maps, of which a process has so many."""
    yield
    jax = sys.modules.get("jax")
    maps = Path("/proc/self/maps")
    if jax is not None and maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()
