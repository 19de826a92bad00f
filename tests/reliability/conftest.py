"""Fixtures for the tests of reliability."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compile_cache() -> Path:
    """Where processes that are killed find what those before them compiled, and no others: a file may be cut short."""
    path = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]) / "of_killed_processes"
    path.mkdir(parents=True, exist_ok=True)
    return path
