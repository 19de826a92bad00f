"""What a turn says of itself: when its tokens were there."""

from __future__ import annotations

import itertools

import pytest

from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import SamplingParams, Usage
from ca_jax.turns.text import TextOutput
from tests import engine_kit as kit


def test_token_times_count_from_submission():
    job = Job(
        prompt_ids=[1, 2], params=SamplingParams(), output=TextOutput(None, ()), stop_ids=frozenset(), submitted_s=10.0
    )
    assert job.usage().token_times_s == ()
    job.output_ids += [3, 4, 5]
    job.token_times_s += [10.5, 11.0, 13.0]
    usage = job.usage()
    assert usage.token_times_s == (0.5, 1.0, 3.0)
    assert usage.completion_tokens == 3


def expect_times(usage: Usage) -> None:
    """A time for each token, in order, between the first one's and the turn's end."""
    times = usage.token_times_s
    assert len(times) == usage.completion_tokens
    assert all(before <= after for before, after in itertools.pairwise(times))
    assert times[0] >= usage.ttft_s >= usage.queued_s >= 0
    assert times[-1] <= usage.ttft_s + usage.decode_s


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine() as engine:
        yield engine


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_every_turn_has_a_time_for_each_of_its_own_tokens(engine, max_tokens):
    session = engine.session()
    for _ in range(2):
        kit.say(session, "Hello.", max_tokens)
        assert session.usage.completion_tokens == max_tokens
        expect_times(session.usage)


def test_jobs_that_decode_together_have_times_of_their_own(engine):
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (3, 9, 5)]
    for completion, each in zip(engine.generate([kit.prompt(20)] * 3, params), params, strict=True):
        assert len(completion.token_ids) == each.max_tokens
        expect_times(completion.usage)


def test_a_turn_that_is_cancelled_has_the_times_of_what_it_generated(engine):
    session = engine.session()
    answer = session.send("Hello.", max_tokens=50)
    next(answer)
    answer.close()
    engine.end_abandoned()
    assert 0 < session.usage.completion_tokens < 50
    expect_times(session.usage)
