"""A server that has time computes what is left of a conversation anew before its next message comes."""

from __future__ import annotations

from ca_jax.overflow.config import OverflowConfig
from tests import engine_kit as kit
from tests import server_kit as sk


def test_between_two_turns_what_is_left_of_a_conversation_becomes_exact():
    with sk.running(context_window=128, overflow=OverflowConfig()) as running, running.client() as client:
        asked = {"model": sk.MODEL, "temperature": 0, "truncation": "auto", "max_output_tokens": 70}
        first = client.responses.create(input="begin " * 8, **asked)
        metrics = running.engine.metrics
        assert metrics.dropped_tokens > 0
        sk.wait_for(lambda: metrics.idle_recomputes == 1)
        asked["max_output_tokens"] = 20
        client.responses.create(input="go on", previous_response_id=first.id, **asked)
        [session] = running.engine.sessions
        assert session.usage.num_cached_tokens > 70
        assert (session.usage.repaired_tokens, metrics.turns) == (0, 2)
        kit.expect_right(session)
        assert "ca_jax:idle_recomputes" in running.http().get("/metrics").text
