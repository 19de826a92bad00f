"""Fixtures for the tests of `ca_jax.storage`."""

from __future__ import annotations

import pytest

from ca_jax.storage import AttentionStore

from .store_helpers import make_store


@pytest.fixture
def store() -> AttentionStore:
    """Four blocks of four tokens."""
    return make_store()
