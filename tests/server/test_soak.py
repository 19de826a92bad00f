"""Many clients at once, some of which misbehave: nothing is lost, mixed up or wrong."""

from __future__ import annotations

import pytest

from tests import server_kit as sk
from tests.server.soak import limits, soak


@pytest.mark.parametrize(
    ("num_clients", "num_turns", "max_queue"),
    [(12, 84, 2), pytest.param(64, 5000, 40, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_answers_are_those_of_each_client_alone(num_clients, num_turns, max_queue, tmp_path):
    with sk.running(**limits(str(tmp_path), max_queue)) as server:
        report = soak(server, num_clients, num_turns)
        assert not report.failures
        assert not report.wrong
        assert num_turns <= report.num_turns < num_turns + num_clients
        assert report.num_ties <= report.num_turns // 100
        assert report.num_left
        assert report.num_refused
        assert 0 < sum(report.refusals) <= 5 * len(report.refusals), "each waits as it was told"
        assert report.cached_tokens > 0.3 * report.prompt_tokens, "conversations were found again"
        assert len(server.service.router._states) < 40 * num_clients + num_turns
