"""Traces as workloads: the same every time, of exact lengths, at the right times, and what is said of bad input."""

import functools
import itertools

import numpy as np
import pytest

from benchmarks.replay.workload import ReplayedTrace, ReplayError
from tests.benchmarks.traces_kit import lengths, lines_file, sharegpt_file, talk, workload

# Of the tiny model's template, whose special tokens and bytes are a token each.
BEFORE_MESSAGE = len("Suser\n")
BEHIND_MESSAGE = len("E\nSassistant\n")
BEHIND_ANSWER = len("E\n")


@pytest.fixture
def conversations():
    return [talk(num_turns, seed) for seed, num_turns in enumerate((3, 1, 4, 2))]


@pytest.fixture
def sharegpt(tmp_path, conversations):
    return ReplayedTrace(trace=str(sharegpt_file(tmp_path / "sharegpt.json", *conversations)))


def lines_of(names):
    """Makes traces of one JSON object on each line, with fields of these names."""

    def make(tmp_path, *rows, **fields):
        path = lines_file(tmp_path / "trace.jsonl", *(dict(zip(names, row, strict=True)) for row in rows))
        return ReplayedTrace(trace=str(path), **fields)

    return make


mooncake = functools.partial(
    lines_of(("timestamp", "input_length", "output_length", "hash_ids")), trace_format="mooncake", length_scale=1 / 16
)
agents = functools.partial(lines_of(("timestamp", "session_id", "input", "output")), trace_format="agents")


def texts(made):
    return [[bytes(turn.message).decode() for turn in session.turns] for session in made.sessions]


@pytest.mark.parametrize("max_answer_tokens", [5, 17, 400])
def test_recorded_text_is_sent_or_generated_whole_and_answers_are_capped(sharegpt, conversations, max_answer_tokens):
    made = workload(sharegpt, num_sessions=4, max_answer_tokens=max_answer_tokens)
    assert (made.cut_turns, made.cut_tokens, made.left_out_turns) == (0, 0, 0)
    for pairs, served in zip(conversations, lengths(made), strict=True):
        assert [answer for _, answer in served] == [min(len(told), max_answer_tokens) for _, told in pairs]
        rest = [max(len(told) - max_answer_tokens, 0) for _, told in pairs]
        before = [0, *(size + BEHIND_ANSWER for size in rest[:-1])]
        wanted = [BEFORE_MESSAGE + len(asked) + BEHIND_MESSAGE for asked, _ in pairs]
        wanted = [size + more for size, more in zip(wanted, before, strict=True)]
        assert [message for message, _ in served] == wanted


def test_a_message_that_fits_no_window_is_cut_or_left_out_and_said_to_be(sharegpt):
    asked = {"num_sessions": 4, "max_answer_tokens": 8}
    whole, made = workload(sharegpt, **asked), workload(sharegpt, **asked, window=64)
    assert workload(sharegpt, **asked) == whole, "the same asked again is the same"
    pairs = list(zip(itertools.chain(*lengths(whole)), itertools.chain(*lengths(made)), strict=True))
    assert all(cut == (min(size[0], 64 - 4 - size[1]), size[1]) for size, cut in pairs)
    assert made.cut_turns == sum(size != cut for size, cut in pairs) > 0
    assert made.cut_tokens == sum(size[0] - cut[0] for size, cut in pairs)
    made = workload(sharegpt, **asked, window=128, overflow=None)  # Nothing may leave the window.
    assert made.left_out_turns == whole.num_turns - made.num_turns > 0
    assert all(session.num_tokens <= 128 for session in made.sessions)
    made = workload(sharegpt, num_sessions=3, max_turns=2)
    assert [(each.session_id, len(each.turns)) for each in made.sessions] == [("c0", 2), ("c1", 1), ("c2", 2)]


def test_a_hash_stands_for_the_same_tokens_everywhere(tmp_path):
    trace = mooncake(
        tmp_path,
        (0, 1024, 160, [1, 2]),
        (1000, 600, 32, [1, 9]),
        (5000, 1600, 32, [1, 2, 3, 4]),
        (9000, 2048, 32, [1, 9, 5, 6]),
    )
    made = workload(trace, num_sessions=3, seed=5)
    assert lengths(made) == [[(64, 10), (26, 2)], [(38, 2)], [(128, 2)]]
    first, other, last = (session.turns[0].message for session in made.sessions)
    assert first[:32] == other[:32] == last[:32]
    assert other[32:] == last[32:38] != first[32:38]
    assert workload(trace, num_sessions=3, seed=6).sessions == made.sessions


def test_what_goes_on_sends_what_its_context_lacks(tmp_path):
    trace = mooncake(
        tmp_path, (0, 1024, 512, [1, 2]), (1000, 2048, 64, [1, 2, 3, 4]), (2000, 2049, 64, [1, 2, 3, 4, 5])
    )
    made = workload(trace, num_sessions=1)
    assert lengths(made) == [[(64, 32), (32, 4), (1, 4)]]
    assert [turn.not_before_s for turn in made.sessions[0].turns] == [0.0, 1.0, 2.0]


def test_an_agent_s_prompt_goes_on_from_the_whole_context_or_begins_anew(tmp_path):
    trace = agents(
        tmp_path,
        ("1000000", "task", "user: go", "looking"),
        ("3000000", "task", "user: go\n\nassistant: looking\n\nuser: and?", "found it"),
        ("4000000", "task", "user: go\n\nassistant: looked\n\nuser: and?", "lost it"),
        ("2000000", "other", "user: hi", "hello"),
        ("5000000", "other", "", "a picture"),
        ("6000000", "other", "user: hihello!", "yes"),
        ("7000000", "task", "user: go\n\nassistant: looking\n\nuser: and?\n\nassistant: found it\n\nuser: fine", "bye"),
    )
    made = workload(trace, num_sessions=3, max_answer_tokens=4)
    names = [session.session_id for session in made.sessions]
    assert names == ["task/0", "other/0", "task/1"]
    assert texts(made) == [
        ["user: go", "ing\n\nuser: and?", "d it\n\nuser: fine"],
        ["user: hi", "o!"],
        ["user: go\n\nassistant: looked\n\nuser: and?"],
    ]
    assert [turn.not_before_s for turn in made.sessions[0].turns] == [0.0, 2.0, 6.0]


def test_arrivals_have_random_tokens_of_their_lengths(tmp_path):
    path = tmp_path / "arrivals.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,10\n0.5,40,200\n")
    trace = ReplayedTrace(trace_format="arrivals", trace=str(path), length_scale=0.5)
    made = workload(trace, num_sessions=2, max_answer_tokens=16)
    assert lengths(made) == [[(50, 5)], [(20, 16)]]
    assert [session.turns[0].not_before_s for session in made.sessions] == [0.0, 0.5]
    assert workload(trace, num_sessions=2, max_answer_tokens=16) == made
    assert workload(trace, num_sessions=2, max_answer_tokens=16, seed=1) != made


def test_a_rate_of_arrival_takes_the_place_of_the_trace_s_times(tmp_path):
    rows = [(1000 * index, 600, 32, [2 * index, 2 * index + 1]) for index in range(400)]
    trace = mooncake(tmp_path, *rows, (500, 600, 32, [3, 4]), skip_bad_rows=True)
    made = workload(trace, num_sessions=400, arrival_rate=4.0)
    assert made.skipped_rows == 1
    assert "line 401: `timestamp` must be a time that is not before" in made.first_skipped
    arrivals_s = np.array([session.turns[0].not_before_s for session in made.sessions])
    assert (np.diff(arrivals_s) > 0).all()
    assert arrivals_s[-1] == pytest.approx(100, rel=0.15)


@pytest.mark.parametrize(
    ("distribution", "spread"), [("constant", 0.0), ("exponential", 2.0), ("lognormal", 2.0 * np.sqrt(np.e - 1))]
)
def test_think_times_have_their_mean_and_come_between_turns(tmp_path, distribution, spread):
    path = sharegpt_file(tmp_path / "many.json", *([("a", "b")] * 20 for _ in range(40)))
    made = workload(
        ReplayedTrace(trace=str(path)), num_sessions=40, think_time_s=2.0, think_time_distribution=distribution
    )
    assert all(session.turns[0].think_s == 0 for session in made.sessions)
    pauses_s = [turn.think_s for session in made.sessions for turn in session.turns[1:]]
    assert np.mean(pauses_s) == pytest.approx(2.0, rel=0.1)
    assert np.std(pauses_s) == pytest.approx(spread, rel=0.2)


def test_more_conversations_than_there_are_and_answers_without_room_are_refused(sharegpt):
    with pytest.raises(ReplayError, match="num_sessions must be at most the 4 of the trace, got 5"):
        workload(sharegpt, num_sessions=5)
    with pytest.raises(ReplayError, match="max_answer_tokens must be fewer than the window of 64 tokens"):
        workload(sharegpt, num_sessions=4, window=64)
