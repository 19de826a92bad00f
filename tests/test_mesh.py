"""Serving on several devices, which a process has or has not from its start: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("tests/on_mesh.py", "tests/families_on_mesh.py", "tests/states_on_mesh.py", "tests/models/on_shards.py")


@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(marked):
    # They compile far more than they run.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", marked, *FILES]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
