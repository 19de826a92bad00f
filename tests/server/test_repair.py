"""A conversation that lost tokens in the middle of an answer is repaired before its next message comes."""

from __future__ import annotations

from ca_jax.overflow.config import OverflowConfig
from tests import server_kit as sk


def test_a_server_repairs_between_two_turns_and_answers_as_it_would_have():
    """Once without, for the answers; then with, waiting between two turns for nothing but the repair."""
    answers = {}
    for repairs in (False, True):
        overflow = OverflowConfig(repair_when_idle=repairs)
        with sk.running(context_window=128, overflow=overflow) as running, running.client() as client:
            asked = {"model": sk.MODEL, "temperature": 0, "truncation": "auto"}
            said = [client.responses.create(input="begin " * 8, max_output_tokens=70, **asked)]
            metrics = running.engine.metrics
            assert metrics.dropped_tokens > 0
            if repairs:
                sk.wait_for(lambda metrics=metrics: metrics.idle_repairs == 1)
            asked["previous_response_id"] = said[0].id
            said.append(client.responses.create(input="go on", max_output_tokens=20, **asked))
            assert metrics.idle_repairs == repairs
            assert metrics.repaired_tokens > 0
            assert metrics.turns == 2
            assert "ca_jax:idle_repairs" in running.http().get("/metrics").text
            answers[repairs] = [each.output_text for each in said]
    assert answers[True] == answers[False]
