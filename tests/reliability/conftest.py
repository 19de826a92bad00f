"""Fixtures for the tests of reliability."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes that are killed find what those before them compiled."""
    return tmp_path_factory.mktemp("xla")
