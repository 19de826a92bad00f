"""Readers of traces of requests: what they yield, and that a bad row is reported with file, line and field."""

import gzip
import json

import pytest

from ca_jax.simulate.traces import requests as traces


@pytest.fixture
def written(tmp_path):
    def write(*rows, name="trace.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def asked(timestamp, input_length, *hash_ids):
    return {"timestamp": timestamp, "input_length": input_length, "output_length": 7, "hash_ids": list(hash_ids)}


def called(timestamp, text, answer="yes", session="a"):
    return {"timestamp": timestamp, "input": text, "output": answer, "session_id": session}


def test_a_mooncake_row_is_a_request(written):
    first, second = traces.load_requests("mooncake", written(asked(1500, 1000, 4, 8), asked("2500", 512, 9)))
    assert (first.arrival_s, first.input_tokens, first.output_tokens, first.hash_ids) == (1.5, 1000, 7, (4, 8))
    assert second.arrival_s == 2.5
    assert list(traces.load_requests("mooncake", written())) == []


# Blocks 0 and 1 are everybody's: a system prompt. The last id of each prompt is of a block that is not full.
SESSIONS = [
    ("begins", asked(0, 1900, 0, 1, 2, 3), 0, 0),
    ("begins beside it", asked(1, 1700, 0, 1, 4, 5), 1, 0),
    ("goes on from the first", asked(2, 2300, 0, 1, 2, 6, 7), 0, 3),
    ("goes on from the second, its last block now full", asked(3, 2100, 0, 1, 4, 8, 9), 1, 3),
    ("goes on from the first again", asked(4, 2600, 0, 1, 2, 6, 10, 11), 0, 4),
    ("leaves the first within its blocks", asked(5, 1900, 0, 1, 2, 12), 2, 0),
    ("shares the system prompt alone, and has no full block", asked(6, 1100, 0, 1, 13), 3, 0),
    ("as short: nothing tells that it goes on from that", asked(7, 1200, 0, 1, 14), 4, 0),
    ("shares nothing", asked(8, 100, 15), 5, 0),
]


def test_sessions_are_found_by_prefix(written):
    found = traces.load_requests("mooncake", written(*(row for _, row, _, _ in SESSIONS)))
    for request, (what, _, session, shared_blocks) in zip(found, SESSIONS, strict=True):
        assert (request.session_id, request.shared_tokens) == (
            f"s{session}",
            traces.HASH_BLOCK_TOKENS * shared_blocks,
        ), what


def test_seen_blocks_are_leading_ones(written):
    rows = (asked(0, 1500, 0, 1, 2), asked(0, 1500, 0, 3, 2), asked(0, 1000, 3, 1), asked(0, 600, 0, 3))
    found = traces.share_of_seen_blocks(traces.load_requests("mooncake", written(*rows)))
    assert found == (0 + 1 + 2 + 2) / 10  # The third begins with two blocks that were seen, though never at its front.
    assert traces.share_of_seen_blocks([]) == 0.0


def test_calls_of_agents_come_by_time(written):
    path = written(called("3000000", "c"), called(1000000, "a"), called(2000000, "b", "no"))
    written(called(1500000, "d", session="b"), name="zlast.jsonl")
    calls = list(traces.load_agent_calls(path.parent))
    assert [call.prompt for call in calls] == ["a", "b", "c", "d"]
    requests = traces.agent_requests(calls, len)
    assert [(each.session_id, each.arrival_s) for each in requests] == [("a", 0), ("b", 0.5), ("a", 1), ("a", 2)]
    assert [each.output_tokens for each in requests] == [3, 3, 2, 3]


def test_calls_share_what_their_prompts_begin_with_and_those_without_text_are_left_out(written):
    texts = [("one", "two"), ("onetwothree", "x"), ("onetwo", "y"), ("other", "z"), ("bone", "w"), ("", "v"), ("x", "")]
    path = written(*(called(time, *text) for time, text in enumerate(texts)), called(9, "one", session="b"))
    assert [each.shared_tokens for each in traces.agent_requests(traces.load_agent_calls(path), len)] == [
        0,
        6,
        6,
        1,
        0,
        0,
    ]


def of_agent(begin_s, *hash_ids, took_s=2.0, answer=7):
    size = 64 * len(hash_ids) + 5
    return {"t": begin_s, "api_time": took_s, "in": size, "out": answer, "hash_ids": list(hash_ids)}


def agent_session(name, *requests, tools=130):
    return {"id": name, "block_size": 64, "tool_tokens": tools, "requests": list(requests)}


def test_agents_sessions_share_their_tools_and_subagents_come_among_the_others(written):
    subagent = {"t": 10.0, "tool_tokens": 64, "requests": [of_agent(0.0, 9, 10), of_agent(4.0, 9, 10, 11)]}
    first = agent_session("a", of_agent(5.0, 1, 2, 3), of_agent(12.0, 1, 2, 3, 4, answer=0), subagent)
    rows = (first, agent_session("b", of_agent(0.0, 1, 2, 3)), agent_session("c", of_agent(0.0, 1, 2), tools=200))
    found = list(traces.load_agent_sessions(written(*rows)))
    assert [each.session_id for each in found] == ["a"] * 4 + ["b", "c"]
    assert [each.arrival_s for each in found[:4]] == [0.0, 5.0, 7.0, 9.0]
    assert [each.think_s for each in found[:4]] == [0.0, 3.0, 0.0, 0.0], "the subagent's second comes at once"
    assert [each.shared_tokens for each in found[:4]] == [0, 0, 0, 0], "with the request before it"
    assert (found[0].input_tokens, found[2].output_tokens, found[0].tool_tokens) == (197, 1, 130)
    ids = [each.hash_ids for each in found]
    assert ids[0][:2] == ids[2][:2] == ids[4][:2], "the same tools"
    assert ids[0][2] != ids[4][2], "their own prompts"
    assert ids[2][:3] == ids[0]
    assert ids[1] == ids[3][:2]
    assert not set(ids[5]) & set(ids[0]), "other tools"
    by_time = traces.load_requests("agent_sessions", written(*rows))
    assert [each.arrival_s for each in by_time] == [0.0, 0.0, 0.0, 5.0, 7.0, 9.0]


def test_a_compressed_file_is_read_like_a_plain_one(written, tmp_path):
    plain = written(agent_session("a", of_agent(0.0, 1, 2), of_agent(3.0, 1, 2, 3)))
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(traces.load_agent_sessions(packed)) == list(traces.load_agent_sessions(plain))


ARRIVALS = {
    "dates": ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.6805900"),
    "seconds": ("arrival_s,input_tokens,output_tokens", "5", "9"),
    "a zone": ("time,prompt_tokens,completion_tokens", "2023-11-16T18:15:46+01:00", "2023-11-16T17:15:50Z"),
}


@pytest.mark.parametrize(("header", "first", "second"), ARRIVALS.values(), ids=ARRIVALS)
def test_arrivals_are_seconds_since_the_first(written, header, first, second):
    found = list(traces.load_requests("arrivals", written(header, f"{first},374,44", f"{second},396,109")))
    assert [(each.arrival_s, each.input_tokens, each.output_tokens) for each in found] == [(0, 374, 44), (4, 396, 109)]
    assert found[0].session_id != found[1].session_id


def test_columns_may_stand_in_any_order_among_others_and_a_missing_one_is_named(written):
    (found,) = traces.load_requests(
        "arrivals", written("Model,Response tokens,Timestamp,Request tokens", "ChatGPT,18,5,472")
    )
    assert (found.input_tokens, found.output_tokens) == (472, 18)
    with pytest.raises(traces.TraceError, match=r"line 1: `output` must be a column of .*generatedtokens"):
        list(traces.load_requests("arrivals", written("TIMESTAMP,ContextTokens", "1,2")))


MOONCAKE = "mooncake", [asked(1, 5, 1), asked(2, 5, 2)]
AGENTS = "agents", [called(1, "x"), called(2, "y")]
SESSIONS_OF_AGENTS = "agent_sessions", [agent_session("a", of_agent(0.0, 1)), agent_session("b", of_agent(0.0, 1))]
CSV = "arrivals", ["time,input_tokens,output_tokens", "1,2,3", "2,2,3"]
BAD_ROWS = [
    (MOONCAKE, '{"timestamp": 1', "a row must be a JSON object"),
    (MOONCAKE, {"timestamp": 1, "input_length": 5, "hash_ids": [1]}, "`output_length` must be a number, got nothing"),
    (MOONCAKE, asked(1, -5, 1), "`input_length` must be an integer of at least 1, got -5"),
    (MOONCAKE, asked(1, traces.HASH_BLOCK_TOKENS + 1, 1), "`hash_ids` must be one for each of 2 blocks"),
    (MOONCAKE, asked(1, 5, "x"), "`hash_ids` must be a list of integers"),
    (MOONCAKE, asked("noon", 5, 1), "`timestamp` must be a number, got 'noon'"),
    (MOONCAKE, asked(1e999, 5, 1), "`timestamp` must be a number"),
    (MOONCAKE, asked(0.5, 5, 1), "`timestamp` must be a time that is not before"),
    (AGENTS, called(-1, "x"), "`timestamp` must be microseconds"),
    (AGENTS, called(1, None), "`input` must be text"),
    (AGENTS, called(1, "x", session=""), "`session_id` must be a name"),
    (SESSIONS_OF_AGENTS, agent_session("", {"t": 0.0, "in": 70}), "`hash_ids` must be a list of integers"),
    (SESSIONS_OF_AGENTS, {**agent_session("c"), "block_size": 16}, "`block_size` must be 64, the only size"),
    (SESSIONS_OF_AGENTS, {**agent_session("c"), "requests": [3]}, "`requests` must be a list of objects"),
    (SESSIONS_OF_AGENTS, agent_session("c", {**of_agent(0.0, 1), "in": 7}), "`hash_ids` must be one for each full"),
    (CSV, "1,2", "a row must have 3 fields"),
    (CSV, "noon,2,3", "`arrival` must be seconds, or a date"),
    (CSV, "0,2,3", "`arrival` must be a time that is not before"),
    (CSV, "nan,2,3", "`arrival` must be seconds"),
    (CSV, "1,2,0", "`output` must be an integer of at least 1"),
]


@pytest.mark.parametrize(("trace", "row", "message"), BAD_ROWS)
def test_a_bad_row_is_an_error_or_counted_and_skipped(written, trace, row, message):
    trace_format, (*before, last) = trace
    path = written(*before, row, last)
    with pytest.raises(traces.TraceError) as error:
        traces.load_requests(trace_format, path)
    assert str(error.value).startswith(f"{path}, line {len(before) + 1}: {message}")
    bad_rows = traces.BadRows(skip=True)
    found = traces.load_requests(trace_format, path, len, bad_rows)
    assert (bad_rows.num_skipped, bad_rows.first) == (1, str(error.value))
    assert len(found) == 2


@pytest.mark.parametrize("trace_format", ["mooncake", "arrivals", "agents", "agent_sessions"])
def test_a_trace_that_is_not_there_is_named(tmp_path, trace_format):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        traces.load_requests(trace_format, tmp_path / "nowhere")
    if trace_format == "agents":
        with pytest.raises(FileNotFoundError, match=r"\*\.jsonl"):
            traces.load_requests(trace_format, tmp_path)
