"""What the benchmarks' tests share: a tiny model, a disk whose page cache can be emptied, and a suite that is run."""

import contextlib
import dataclasses
import io
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags

import benchmarks.suites
from benchmarks.disk import can_drop
from benchmarks.harness import SUITES, Run
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.simulate.traces.sharegpt import Turn
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


def recorded(*texts: str) -> tuple[Turn, ...]:
    """A conversation that the user begins."""
    return tuple(Turn(role=("user", "assistant")[i % 2], text=text) for i, text in enumerate(texts))


def scripts_flags() -> list[str]:
    """The flags that are not absl's own."""
    modules = flags.FLAGS.flags_by_module_dict()
    return [flag.name for module, defined in modules.items() if "absl" not in module for flag in defined]


@pytest.fixture
def command(monkeypatch):
    """Runs a command in this process, with its flags alone; they are forgotten behind it."""

    def run(*arguments: object, module: str = "bench") -> subprocess.CompletedProcess[str]:
        line, out, err = [module, *map(str, arguments)], io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", line)
        code, others = None, {name: flags.FLAGS[name] for name in scripts_flags()}
        flags.FLAGS.remove_flag_values(others)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module(f"ca_jax.launch.{module}", run_name="__main__")
            except SystemExit as end:
                code = end.code
            finally:
                flags.FLAGS.remove_flag_values(scripts_flags())
                for flag in others.values():
                    flags.FLAGS[flag.name] = flag
        stderr = err.getvalue() + (f"{code}\n" if isinstance(code, str) else "")
        return subprocess.CompletedProcess(line, 1 if isinstance(code, str) else code or 0, out.getvalue(), stderr)

    return run
