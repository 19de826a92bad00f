"""Fixtures for the tests of `ca_jax.storage`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from ca_jax.storage.store import AttentionStore

from .filled_store import Kept, fill
from .store_helpers import make_store, open_gated


@pytest.fixture
def store() -> AttentionStore:
    """Four blocks of four tokens."""
    return make_store()


@pytest.fixture(params=["zarr3", "raw"])
def driver(request) -> str:
    """Each kind of SSD."""
    return request.param


@pytest.fixture
def filled(tmp_path, driver) -> Mapping[str, Kept]:
    """A store of four sessions in `tmp_path`, see `fill`."""
    return fill(tmp_path, driver)


@pytest.fixture
def directory(tmp_path) -> Path:
    """Of the stores with an SSD."""
    return tmp_path / "store"


@pytest.fixture
def gates(monkeypatch):
    """The gated tiers of the stores of this test."""
    return open_gated(monkeypatch)


@pytest.fixture
def open_store(directory):
    """Opens stores of one directory, and closes them at the end."""
    with contextlib.ExitStack() as at_the_end:

        def open_it(num_blocks: int = 6, **options) -> AttentionStore:
            store = make_store(num_blocks, ssd_dir=directory, **options)
            at_the_end.callback(store.close)
            return store

        yield open_it
