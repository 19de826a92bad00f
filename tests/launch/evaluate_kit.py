"""The evaluation as tests run it: flags parsed apart, a task on the tiny model, and the command itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

from absl import flags

from ca_jax.launch import evaluate, evaluate_flags
from tests import engine_kit as kit


def parse(*arguments: str, json_out: str | None = "out.json"):
    """The config that flags stand for."""
    values = flags.FlagValues()
    evaluate_flags.define(values)
    values(["program", *arguments, *([] if json_out is None else [f"--json_out={json_out}"])])
    return evaluate_flags.config(values)


def run(task: str, *arguments: object) -> dict:
    """The report of a task on the tiny model, as it is written."""
    config = parse(f"--task={task}", *map(str, arguments))
    report = evaluate.run(task, config, lambda _: kit.tiny_model(), command=f"python -m it --task={task}")
    return json.loads(json.dumps(report, allow_nan=False))


def launch(module: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command: flags of two scripts cannot be defined in one process."""
    settings = {"JAX_COMPILATION_CACHE_DIR": str(cwd / "cache"), "JAX_PLATFORMS": "cpu"}
    environment = os.environ | settings | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
