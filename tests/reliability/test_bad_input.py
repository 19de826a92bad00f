"""What a caller may not ask of stored sessions is refused, with what was wanted and what was found."""

from __future__ import annotations

import pytest

from ca_jax.errors import InvalidRequestError, TenantError, UnknownSessionError
from tests import engine_kit as kit
from tests.reliability import workload


def test_names_of_others_and_times_that_cannot_be(tmp_path):
    store = workload.ssd_store(tmp_path, "zarr3", dram_blocks=10, ssd_blocks=10)
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
        for ttl_s in (-1.0, float("nan")):
            with pytest.raises(InvalidRequestError, match=f"ttl_s must be a number of seconds >= 0, got {ttl_s}"):
                engine.session(ttl_s=ttl_s)
            with pytest.raises(ValueError, match=f"got {ttl_s}"):
                stored.set_ttl("one", ttl_s, tenant="a")
        session = engine.session(session_id="one", tenant="a")
        assert kit.say(session, [65]) == kit.greedy_answer(session.token_ids[:-12], 12)
        assert session.usage is not None
        assert session.usage.cached_tokens["ssd"] > 0
