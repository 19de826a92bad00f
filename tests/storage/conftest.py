"""Fixtures for the tests of `ca_jax.storage`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from ca_jax.storage import transform
from ca_jax.storage.store import AttentionStore

from .store_helpers import GatedTier, Kept, fill, make_store, open_gated


class OpenStore(Protocol):
    """Opens a store; of the test's directory, if no other is named. What was open there is closed before."""

    def __call__(self, num_blocks: int = 6, **options: Any) -> AttentionStore: ...


@pytest.fixture
def store() -> AttentionStore:
    """Four blocks of four tokens."""
    return make_store()


@pytest.fixture(params=["zarr3", "raw"])
def driver(request: pytest.FixtureRequest) -> str:
    """Each kind of SSD."""
    return request.param


@pytest.fixture
def ssd_driver(request: pytest.FixtureRequest) -> str:
    """Each kind, for a test that asks for the `driver`; else that of files."""
    return request.getfixturevalue("driver") if "driver" in request.fixturenames else "zarr3"


@pytest.fixture
def filled(tmp_path: Path, ssd_driver: str) -> Mapping[str, Kept]:
    """A store of four sessions in `tmp_path`, see `fill`."""
    return fill(tmp_path, ssd_driver)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Of the stores with an SSD."""
    return tmp_path / "store"


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[GatedTier]:
    """The gated tiers of the stores of this test."""
    return open_gated(monkeypatch)


@pytest.fixture
def open_store(ssd_driver: str, directory: Path) -> Iterator[OpenStore]:
    """Opens stores with an SSD, and closes them at the end."""
    opened: dict[Path, AttentionStore] = {}

    def open_it(num_blocks: int = 6, **options: Any) -> AttentionStore:
        options = {"ssd_dir": directory, "ssd_driver": ssd_driver, **options}
        if (before := opened.get(options["ssd_dir"])) is not None:
            before.close()
        store = opened[options["ssd_dir"]] = make_store(num_blocks, **options)
        return store

    yield open_it
    for store in opened.values():
        store.close()


@pytest.fixture
def by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are numpy's: tiles of bfloat16 may round a number that is nearly halfway the other way."""
    monkeypatch.setattr(transform, "is_served", lambda: False)
