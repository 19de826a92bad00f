"""What cannot be is refused at start or by the call, with an error that says what was wanted and what was found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ca_jax.errors import InvalidRequestError, TenantError, UnknownSessionError
from ca_jax.storage.catalog.file import CatalogAccessError
from ca_jax.storage.config import GIB, StoreConfig
from tests import engine_kit as kit
from tests.reliability import workload
from tests.storage.ssd_helpers import unwritable


def store_in(directory: Path, **changes: object) -> StoreConfig:
    return dataclasses.replace(workload.ssd_store(directory, "zarr3", dram_blocks=10, ssd_blocks=10), **changes)


def test_a_cap_below_what_one_session_needs_is_told_when_it_matters(tmp_path):
    """A conversation may stay shorter than the window, so it is no error: the rest of it is a counted miss."""
    block_gib = kit.BLOCK_TOKENS * kit.TOKEN_BYTES / GIB
    with kit.small_engine(store=store_in(tmp_path, ssd_gib=2 * block_gib)) as engine:
        session = engine.session()
        kit.say(session, kit.prompt(60))
        engine.wait_for_saves()
        stats = engine.store_stats()
        assert stats.ssd is not None
        assert {str(reason): n for reason, n in stats.ssd.failed_flushes.items() if n} == {"too_large": 1}


@pytest.mark.parametrize("below", ["", "below"])
def test_a_directory_that_is_a_file(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("of somebody")
    with pytest.raises(CatalogAccessError, match=r"must have a directory to write in, got .*file"):
        kit.small_engine(store=store_in(file / below))
    assert file.read_text() == "of somebody"


@pytest.mark.parametrize("below", ["", "new"])
def test_a_directory_without_write_permission(tmp_path, below):
    with (
        unwritable(tmp_path / "store"),
        pytest.raises(CatalogAccessError, match=r"must have a directory to write in, got .*store.*(denied|Read-only)"),
    ):
        kit.small_engine(store=store_in(tmp_path / "store" / below))


def test_names_of_others_and_times_that_cannot_be(tmp_path):
    store = store_in(tmp_path)
    with kit.small_engine(store=store) as engine:
        kit.say(engine.session(session_id="one", tenant="a"), kit.prompt(20))
    with kit.small_engine(store=store) as engine:
        stored = engine.stored
        for call in (
            stored.pin,
            stored.unpin,
            stored.drop,
            lambda name, tenant: stored.set_ttl(name, 1.0, tenant=tenant),
        ):
            with pytest.raises(TenantError, match="'one' must be asked for by its own tenant, got 'b'"):
                call("one", tenant="b")
            with pytest.raises(UnknownSessionError, match="the session must be stored, and 'two' is not"):
                call("two", tenant="b")
        with pytest.raises(TenantError, match="'one' must be asked for by its own tenant, got 'b'"):
            engine.session(session_id="one", tenant="b")
        for ttl_s in (-1.0, float("nan")):
            with pytest.raises(InvalidRequestError, match=f"ttl_s must be a number of seconds >= 0, got {ttl_s}"):
                engine.session(ttl_s=ttl_s)
            with pytest.raises(ValueError, match=f"got {ttl_s}"):
                stored.set_ttl("one", ttl_s, tenant="a")
        session = engine.session(session_id="one", tenant="a")
        with pytest.raises(InvalidRequestError, match=r"tokens to keep must be 0\.\.\d+, got 1000"):
            session.rewind(1000)
        assert kit.say(session, [65]) == kit.greedy_answer(session.token_ids[:-12], 12)
        assert session.usage is not None
        assert session.usage.cached_tokens["ssd"] > 0
