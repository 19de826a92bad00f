"""Loading onto several devices, which a process has or has not from its start: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ON_SHARDS = Path(__file__).with_name("on_shards.py")


def test_models_are_loaded_into_their_shards():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ON_SHARDS)]
    ended = subprocess.run(
        command, env=environment, cwd=ON_SHARDS.parents[2], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
