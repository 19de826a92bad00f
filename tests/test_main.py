"""The command `ca_jax` itself."""

import importlib.metadata
import subprocess
import sys


def test_version_is_that_of_the_package():
    done = subprocess.run([sys.executable, "-m", "ca_jax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ca_jax {importlib.metadata.version('ca-jax')}\n"


def test_anything_else_goes_to_the_subcommands():
    done = subprocess.run([sys.executable, "-m", "ca_jax", "serv"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean serve?" in done.stderr
