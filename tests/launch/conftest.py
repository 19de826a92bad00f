"""A tiny model with a tokenizer, as a directory, and scripts that run in this process."""

import dataclasses
import io
import runpy
import sys
from pathlib import Path

import pytest
from absl import app, flags

from ca_jax.testing import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory. Greedy answers never end by themselves: special tokens have logit 0, others more."""
    config = tiny.tiny_config(max_positions=8192)
    params = tiny.tiny_params(config)
    params["params"]["head"]["kernel"][:, [tiny.END_OF_TEXT_ID, tiny.IM_START_ID, tiny.IM_END_ID]] = 0
    return tiny.write_tiny_hf(tmp_path_factory.mktemp("models") / "tiny", config, params)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a script left."""

    code: int
    out: str
    err: str


@pytest.fixture
def launch(monkeypatch, capsys):
    """Runs a script of `ca_jax.launch` as its command line does, but in this process; its flags are gone afterwards."""

    def run(script: str, *arguments: object, said: str = "") -> Ended:
        capsys.readouterr()
        app.define_help_flags()  # Once in a process: they stay.
        before, code = set(flags.FLAGS), 0
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        monkeypatch.delitem(sys.modules, f"ca_jax.launch.{script}", raising=False)  # Run twice it would be warned of.
        try:
            runpy.run_module(f"ca_jax.launch.{script}", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            if isinstance(ended.code, str):
                sys.stderr.write(f"{ended.code}\n")
        finally:
            for name in set(flags.FLAGS) - before:
                delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
        return Ended(code, *capsys.readouterr())

    return run
