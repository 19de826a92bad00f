"""What processes of Ray are set up with where replicas are to be killed at a step of a turn.

The first replica that comes to a step after which a file is named takes the file away, and is killed there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from pathlib import Path

from tests.reliability.steps import tell_steps

DIRECTORY = "CA_JAX_TESTED_KILLS"
"""Of the environment: where such files lie."""


def set_up() -> None:
    """As `worker_process_setup_hook` of Ray's runtime environment."""
    tell_steps(functools.partial(_at, Path(os.environ[DIRECTORY])))


def _at(directory: Path, step: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (directory / step).unlink()  # One of all succeeds.
        os.kill(os.getpid(), signal.SIGKILL)
