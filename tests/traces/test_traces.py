"""Readers of traces: what they yield, and that what is wrong with a row is said with file, line and field."""

import json

import pytest

from ca_jax.traces.agents import agent_requests, load_agent_calls
from ca_jax.traces.arrivals import load_arrivals
from ca_jax.traces.mooncake import load_mooncake
from ca_jax.traces.requests import HASH_BLOCK_TOKENS, share_of_seen_blocks
from ca_jax.traces.rows import BadRows, TraceError


@pytest.fixture
def written(tmp_path):
    def write(*rows, name="trace.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def asked(timestamp, input_length, *hash_ids, output_length=7):
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def called(timestamp, text, answer="yes", session="a"):
    return {"timestamp": timestamp, "input": text, "output": answer, "session_id": session}


def test_a_mooncake_row_is_a_request(written):
    first, second = load_mooncake(written(asked(1500, 1000, 4, 8), asked("2500", 512, 9)))
    assert (first.arrival_s, first.input_tokens, first.output_tokens, first.hash_ids) == (1.5, 1000, 7, (4, 8))
    assert second.arrival_s == 2.5


# Blocks 0 and 1 are everybody's: a system prompt. The last id of each prompt is of a block that is not full.
SESSIONS = [
    ("begins", asked(0, 1900, 0, 1, 2, 3), 0),
    ("begins beside it", asked(1, 1700, 0, 1, 4, 5), 1),
    ("goes on from the first", asked(2, 2300, 0, 1, 2, 6, 7), 0),
    ("goes on from the second, its last block now full", asked(3, 2100, 0, 1, 4, 8, 9), 1),
    ("goes on from the first again", asked(4, 2600, 0, 1, 2, 6, 10, 11), 0),
    ("leaves the first within its blocks", asked(5, 1900, 0, 1, 2, 12), 2),
    ("shares the system prompt alone, and has no full block", asked(6, 1100, 0, 1, 13), 3),
    ("as short: nothing tells that it goes on from that", asked(7, 1200, 0, 1, 14), 4),
    ("shares nothing", asked(8, 100, 15), 5),
]


def test_sessions_are_found_by_prefix(written):
    found = list(load_mooncake(written(*(row for _, row, _ in SESSIONS))))
    assert [request.session_id for request in found] == [f"s{session}" for _, _, session in SESSIONS]
    shared = [0, 0, 3, 3, 4, 0, 0, 0, 0]  # Full blocks of the prompt before.
    assert [request.shared_tokens for request in found] == [HASH_BLOCK_TOKENS * blocks for blocks in shared]


def test_seen_blocks_are_leading_ones(written):
    rows = (asked(0, 1500, 0, 1, 2), asked(0, 1500, 0, 3, 2), asked(0, 1000, 3, 1), asked(0, 600, 0, 3))
    found = share_of_seen_blocks(load_mooncake(written(*rows)))
    assert found == (0 + 1 + 2 + 2) / 10  # The third begins with two blocks that were seen, though never at its front.
    assert share_of_seen_blocks([]) == 0.0


BAD_MOONCAKE = {
    "no JSON": ('{"timestamp": 1', "must be a JSON object"),
    "no object": ("[1, 2]", "must be a JSON object"),
    "a field is missing": ({"timestamp": 1, "input_length": 5, "hash_ids": [1]}, "`output_length` must be a number"),
    "a negative length": (asked(1, -5, 1), "`input_length` must be an integer of at least 1, got -5"),
    "no whole length": (asked(1, 5.5, 1), "`input_length` must be an integer"),
    "too few hashes": (asked(1, HASH_BLOCK_TOKENS + 1, 1), "`hash_ids` must be one for each of 2 blocks"),
    "a hash that is none": (asked(1, 5, "x"), "`hash_ids` must be a list of integers"),
    "no time": (asked(None, 5, 1), "`timestamp` must be a number"),
    "a time that is no number": (asked("noon", 5, 1), "`timestamp` must be a number, got 'noon'"),
    "infinite": (asked(1e999, 5, 1), "`timestamp` must be a number"),
    "back in time": (asked(0.5, 5, 1), "`timestamp` must be at least the 1 ms of the row before"),
}


def skipped(load, path, line, message):
    """What is read without a bad row, which is told otherwise: by line, and counted once where it is skipped."""
    with pytest.raises(TraceError, match=message) as error:
        list(load(path))
    assert str(error.value).startswith(f"{path}, line {line}: ")
    bad_rows = BadRows(skip=True)
    found = list(load(path, bad_rows))
    assert (bad_rows.num_skipped, bad_rows.first) == (1, str(error.value))
    return found


@pytest.mark.parametrize(("row", "message"), BAD_MOONCAKE.values(), ids=BAD_MOONCAKE)
def test_a_bad_mooncake_row_is_told_or_skipped(written, row, message):
    path = written(asked(1, 5, 1), "", row, asked(2, 5, 2))
    found = skipped(load_mooncake, path, 3, message)
    assert [request.arrival_s for request in found] == [0.001, 0.002]


def test_calls_of_agents_come_by_time(written):
    path = written(called("3000000", "c"), called(1000000, "a"), called(2000000, "b", "no"))
    other = written(called(1500000, "d", session="b"), name="other.jsonl")
    calls = list(load_agent_calls([path, other]))
    assert [call.prompt for call in calls] == ["a", "b", "c", "d"]
    requests = agent_requests(calls, len)
    assert [(each.session_id, each.arrival_s) for each in requests] == [("a", 0), ("b", 0.5), ("a", 1), ("a", 2)]
    assert [each.output_tokens for each in requests] == [3, 3, 2, 3]


def test_calls_share_what_their_prompts_begin_with(written):
    texts = [("one", "two"), ("onetwothree", "x"), ("onetwo", "y"), ("other", "z"), ("bone", "w")]
    path = written(*(called(time, *text) for time, text in enumerate(texts)), called(9, "one", session="b"))
    assert [each.shared_tokens for each in agent_requests(load_agent_calls([path]), len)] == [0, 6, 6, 1, 0, 0]


def test_calls_without_text_are_no_requests(written):
    calls = load_agent_calls([written(called(1, ""), called(2, "x", ""), called(3, "x"))])
    assert len(agent_requests(calls, len)) == 1


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (called(-1, "x"), "timestamp"),
        (called(1, None), "input"),
        (called(1, "x", 5), "output"),
        (called(1, "x", session=""), "session_id"),
    ],
)
def test_a_bad_call_is_told_or_skipped(written, row, field):
    path = written(called(1, "x"), row)
    found = skipped(lambda path, *bad_rows: load_agent_calls([path], *bad_rows), path, 2, f"`{field}` wanted")
    assert [call.prompt for call in found] == ["x"]


ARRIVALS = {
    "dates": ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.6805900"),
    "seconds": ("arrival_s,input_tokens,output_tokens", "5", "9"),
    "a zone": ("time,prompt_tokens,completion_tokens", "2023-11-16T18:15:46+01:00", "2023-11-16T17:15:50Z"),
}


@pytest.mark.parametrize(("header", "first", "second"), ARRIVALS.values(), ids=ARRIVALS)
def test_arrivals_are_seconds_since_the_first(written, header, first, second):
    found = list(load_arrivals(written(header, f"{first},374,44", f"{second},396,109", name="a.csv")))
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in found] == [(0, 374, 44), (4, 396, 109)]
    assert found[0].session_id != found[1].session_id


def test_columns_may_stand_in_any_order_among_others(written):
    (found,) = load_arrivals(
        written("Model,Response tokens,Timestamp,Request tokens", "ChatGPT,18,5,472", name="a.csv")
    )
    assert (found.input_tokens, found.output_tokens) == (472, 18)


def test_a_missing_column_is_told(written):
    with pytest.raises(TraceError, match=r"line 1: `output` must be a column of .*generatedtokens"):
        list(load_arrivals(written("TIMESTAMP,ContextTokens", "1,2", name="a.csv")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1,2", "there must be 3 fields"),
        ("noon,2,3", "`arrival` must be seconds, or a date"),
        ("0,2,3", "`arrival` must be a time that is not before"),
        ("nan,2,3", "`arrival` must be seconds"),
        ("1,-2,3", "`input` must be an integer of at least 1, got '-2'"),
        ("1,2,0", "`output` must be an integer of at least 1"),
    ],
)
def test_a_bad_arrival_is_told_or_skipped(written, row, message):
    path = written("time,input_tokens,output_tokens", "1,2,3", row, "2,2,3", name="a.csv")
    assert [each.arrival_s for each in skipped(load_arrivals, path, 3, message)] == [0, 1]


@pytest.mark.parametrize("load", [load_mooncake, load_arrivals, lambda path: load_agent_calls([path])])
def test_a_trace_that_is_not_there_is_told(tmp_path, load):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(load(tmp_path / "nowhere"))


def test_an_empty_trace_has_no_requests(written):
    assert list(load_mooncake(written())) == []
