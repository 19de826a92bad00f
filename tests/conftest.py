"""What every test shares: the environment jax starts in, an engine, stores, and where data outside this folder is."""

import gc
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from ca_jax import Engine, StoreConfig

REPOSITORY = Path(__file__).resolve().parent.parent

# Before jax is imported: XLA sizes its thread pools by these, and with fewer threads than virtual devices times
# computations in flight, collectives wait for each other for ever.
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("NPROC", "16")
# torch's threads spin while they wait, which would take time from other workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is compiled is kept for other workers, for processes that tests start, and for the next run.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Most of the tests' time would be compiling, and what they compile runs a few times: for a CPU it is compiled the quick
# way, which takes a third as long. `XLA_FLAGS= make test` compiles as an engine does.
if shutil.which("nvidia-smi") is None:
    _QUICK = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # XLA ends the process where it does not know a flag.
        # A function's code is generated in one piece: 32 pieces for threads of their own cost more than they save here.
        _QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", _QUICK)

# Tracing makes many objects that live long; looking through all of them as often as Python does is 6 % of the time.
gc.set_threshold(50_000, 20, 20)

# How long an example takes says what else the machine does.
hypothesis.settings.register_profile("tests", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("tests")


# Files that take longest, most of them with processes or models of their own.
_LONG = {
    *("test_mesh", "test_two_processes", "test_golden", "test_chat", "test_demo", "test_suites", "test_replica_kill"),
    *("test_faults", "test_kill", "test_overflow_exact", "test_overflow_repair", "test_overlap", "test_warmup"),
    *("test_adapters", "test_engine_families", "test_families", "test_gguf_families", "test_invariants", "test_soak"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with what takes longest, so that no worker is left with it alone at the end."""
    items.sort(key=lambda item: item.path.stem not in _LONG)


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


@pytest.fixture(scope="module")
def engine() -> Iterator["Engine"]:
    """`engine_kit.small_engine`, for tests that use sessions of their own, leave it idle and change nothing of it.

    One a file: what others have stored is found by whoever says the same.
    """
    from tests import engine_kit

    with engine_kit.small_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def said_by_engine() -> Iterator[Callable[..., str]]:
    """What a session that was never served over HTTP answers to a whole history, greedily, with nothing stored."""
    from tests import engine_kit

    with engine_kit.small_engine(store=engine_kit.STORE_OFF) as alone:
        yield lambda messages, max_tokens=8: "".join(alone.session().send(messages, max_tokens=max_tokens))


@pytest.fixture(params=["dram", "ssd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> "StoreConfig":
    """A store in DRAM alone, and one that has an SSD too."""
    from tests import engine_kit

    return engine_kit.store_of(1000) if request.param == "dram" else engine_kit.ssd_store(tmp_path / "store")


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
