"""What the benchmarks' tests share: a tiny model, a disk whose page cache can be emptied, and a suite that is run."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import benchmarks.suites
from benchmarks.disk import can_drop
from benchmarks.harness import SUITES, Run
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.simulate.traces.sharegpt import Conversation, Turn
from tests.launch.conftest import tiny_model
from tests.scripts_kit import Ended, run_script

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


def check_spread(row: Any) -> None:
    """Medians lie between the least and the largest sample; no sample is negative but a change."""
    for name, (least, largest) in row.spread.items():
        assert least <= getattr(row, name) <= largest, name
        assert least >= 0 or name.endswith(("overhead", "gain")), name


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
        """See `check_spread`; and what was measured was warmed up."""
        for row in self.rows:
            assert getattr(row, "recompiles", 0) == 0
            check_spread(row)


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


def recorded(*texts: str) -> Conversation:
    """A conversation that the user begins."""
    turns = tuple(Turn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts))
    return Conversation(id=texts[0], turns=turns)


@pytest.fixture
def command() -> Callable[..., Ended]:
    """Runs a command in this process, with its flags alone."""
    return lambda *arguments, module="bench": run_script(module, *arguments)
