"""A process killed at any moment leaves what it had said to be stored: all of it, served rightly, and nothing else."""

from __future__ import annotations

import pytest

from tests.reliability import killing, workload


@pytest.mark.parametrize(
    "num_rounds", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)
@pytest.mark.parametrize("driver", workload.DRIVERS)
def test_what_was_published_outlives_kill_9(tmp_path, compile_cache, driver, num_rounds):
    report = killing.run_rounds(tmp_path, driver, num_rounds, seed=4, compile_cache=compile_cache)
    assert report.rounds == num_rounds
    assert report.wrong_tokens == 0
    assert report.turns > 0
    assert report.sessions_checked > 0
    assert report.chunks_checked > 0
    assert report.changes["publish"] > 0
    if num_rounds > 3:
        assert report.changes["cut"] > 0
        assert report.cut_sessions > 0
        assert report.shared_blocks > 0
        assert report.killed_at["serving"] > 20
        assert report.rounds_with_unheld_blocks > 0, "no round was cut short between a write and its publication"
