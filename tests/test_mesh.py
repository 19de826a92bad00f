"""Serving on several devices, which a process has or has not from its start: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("on_mesh.py")


def run(marked: str) -> str:
    """Runs those tests of `on_mesh.py` with eight devices of a CPU: what they print."""
    # They compile far more than they run.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, str(FILE)]
    ended = subprocess.run(
        command, env=environment, cwd=FILE.parent.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout
    return ended.stdout


def test_an_engine_on_meshes():
    assert " passed" in run("not slow")


@pytest.mark.slow
def test_every_way_to_overflow_on_a_mesh():
    assert " passed" in run("slow")
