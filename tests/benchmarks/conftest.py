"""What the benchmarks' tests share: a tiny model, a disk whose page cache can be emptied, and a suite that is run."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmarks.suites
from benchmarks.disk import can_drop
from benchmarks.harness import SUITES, Run
from ca_jax.pretrained import LoadedModel, load_model
from tests.launch.conftest import tiny_model

__all__ = ["tiny_model"]

benchmarks.suites.load()


@pytest.fixture(scope="session")
def model(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), dtype="float32")


@pytest.fixture(scope="session")
def wordless(model) -> LoadedModel:
    """The same without a tokenizer: what is said to it is random tokens."""
    return dataclasses.replace(model, tokenizer=None)


@pytest.fixture
def disk(tmp_path) -> Path:
    """A directory whose files can be dropped from memory."""
    if not can_drop(tmp_path):
        pytest.skip("wants temporary files on a disk whose page cache can be emptied")
    return tmp_path / "disk"


@dataclasses.dataclass
class Measured:
    """What a suite left."""

    rows: list[Any]
    summary: dict[str, Any]
    calls: list[tuple[str, int, int]]
    run: Run[Any]

    def told(self, what: str) -> list[tuple[int, int]]:
        """The steps that were told of."""
        return [(done, total) for name, done, total in self.calls if name == what]

    def check_spreads(self) -> None:
        """Medians lie between the least and the largest sample, and what was measured was warmed up."""
        for row in self.rows:
            assert getattr(row, "recompiles", 0) == 0
            for name, (least, largest) in row.spread.items():
                assert least <= getattr(row, name) <= largest, name


@pytest.fixture(scope="session")
def measure():
    """Runs a suite."""

    def measured(suite: str, config: Any, model: LoadedModel | None = None, **options: Any) -> Measured:
        calls: list[tuple[str, int, int]] = []
        run: Run[Any] = Run(config=config, loaded=model, progress=lambda *call: calls.append(call), **options)
        rows, summary = SUITES[suite].run(run)
        return Measured(rows, summary, calls, run)

    return measured


def steps(total: int) -> list[tuple[int, int]]:
    """All steps of so many, as they are told."""
    return [(done, total) for done in range(total + 1)]


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Runs the command itself: flags of two launch modules cannot be defined in one process."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments: object, module: str = "bench", **options: Any) -> subprocess.CompletedProcess:
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-m", f"ca_jax.launch.{module}", *map(str, arguments)]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, **options)

    return run
