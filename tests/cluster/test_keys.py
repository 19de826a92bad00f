"""The keys of requests: one for a conversation, another one for another tenant's, and one for any bytes at all."""

import json
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from ca_jax.cluster.keys import Keys, keys_of, replica_key, session_key, told_name
from ca_jax.server.response_items import new_key, response_id

CHAT, COMPLETIONS, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/sessions"
RESPONSES = "/v1/responses"


def keys(path=CHAT, body=None, *, tenant="lab", query=b"", **headers) -> Keys:
    sent = b"" if body is None else json.dumps(body).encode()
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return keys_of(tenant, path, query, named, sent)


def said(*messages, **fields):
    return {"messages": [{"role": role, "content": content} for role, content in messages], **fields}


def test_a_name_has_one_key_wherever_it_is_given():
    key = session_key("lab", "mine")
    assert {
        keys(x_session_id="mine").key,
        keys_of("lab", CHAT, b"", [(b"X_SESSION_ID", b"mine")], b"").key,
        keys(body=said(("user", "hello"), session_id="mine")).key,
        keys(SESSIONS, {"session_id": "mine"}).key,
        keys(f"{SESSIONS}/mine").key,
        keys(f"{SESSIONS}/mine/discard", {"start": 0, "stop": 1}).key,
        keys("/v1/conversations/mine").key,
        keys("/v1/conversations/mine/items", {"items": []}).key,
        keys(RESPONSES, {"input": "hello", "conversation": {"id": "mine"}}).key,
        keys("/live", query=b"interval_s=1&session_id=mine").key,
        keys("/live/snapshot", query=b"session_id=mine").key,
    } == {key}
    assert session_key("other", "mine") != key != session_key("lab", "yours")


def test_a_header_goes_before_a_name_and_both_are_noted():
    both = keys(body=said(("user", "hello"), session_id="mine"), x_session_id="theirs")
    assert both.key == session_key("lab", "theirs")
    assert both.names == (session_key("lab", "theirs"), session_key("lab", "mine"))
    assert keys(body=said(("user", "hello"), session_id="mine"), x_session_id="mine").names == (
        session_key("lab", "mine"),
    )


@pytest.mark.parametrize(
    ("found", "is_bound"),
    [
        (keys(body=said(("user", "hello"))), False),
        (keys(body=said(("user", "hello")), x_session_id="mine"), False),
        (keys(body=said(("user", "hello"), session_id="mine")), True),
        (keys(body=said(("user", "hello"), session_id="mine"), x_session_id="theirs"), True),
        (keys(SESSIONS, {"session_id": "mine"}), False),
        (keys(f"{SESSIONS}/mine"), True),
        (keys("/v1/conversations/mine"), True),
        (keys("/v1/conversations", {}), False),
        (keys("/metrics", x_ca_jax_replica="replica-0-abcdef"), True),
        (keys("/metrics"), False),
    ],
)
def test_a_request_that_tells_all_is_bound_to_no_replica(found, is_bound):
    assert found.is_bound is is_bound


def test_turns_of_a_history_have_one_key_and_other_beginnings_others():
    first = keys(body=said(("system", "be brief"), ("user", "hello")))
    later = said(("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "what now?"))
    assert keys(body=later).key == first.key
    others = [
        keys(body=said(("system", "be long"), ("user", "hello"))),
        keys(body=said(("user", "hello"))),
        keys(body=said(("system", "be brief"), ("user", "goodbye"))),
        keys(body=said(("system", "be brief"), ("user", "hello")), tenant="other"),
        keys(body=said(("system", "be brief"))),
    ]
    assert len({each.key for each in [first, *others]}) == 1 + len(others)


def test_a_plain_prompt_goes_by_its_beginning():
    prompt = "word " * 100
    assert keys(COMPLETIONS, {"prompt": prompt}).key == keys(COMPLETIONS, {"prompt": prompt + "and on"}).key
    assert keys(COMPLETIONS, {"prompt": [prompt, "else"]}).key == keys(COMPLETIONS, {"prompt": prompt}).key
    assert keys(COMPLETIONS, {"prompt": "another"}).key != keys(COMPLETIONS, {"prompt": prompt}).key
    assert keys(COMPLETIONS, {"prompt": [5, 6]}).key == keys(COMPLETIONS, {"prompt": [[5, 6]]}).key


def test_sessions_that_the_server_names_are_spread_and_lists_are_of_one_replica():
    assert keys(SESSIONS, {}).key != keys(SESSIONS, {}).key
    assert keys("/v1/conversations", {}).key != keys("/v1/conversations", {}).key
    assert keys(SESSIONS).key == keys("/v1/models").key != keys(SESSIONS, tenant="other").key


def test_a_replica_is_asked_for_by_name():
    assert keys(f"{SESSIONS}/mine", x_ca_jax_replica="replica-0-abcdef").key == replica_key("replica-0-abcdef")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "prompt", "session_id", "user"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@hypothesis.given(
    path=st.sampled_from([CHAT, COMPLETIONS, SESSIONS, f"{SESSIONS}/x", "/live", "/"]),
    query=st.binary(max_size=20),
    header=st.tuples(st.sampled_from([b"x-session-id", b"x-ca-jax-replica", b"other"]), st.binary(max_size=9)),
    body=st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_any_request_has_a_key_that_tells_nothing(path, query, header, body):
    found = keys_of("lab", path, query, [header], body)
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in (found.key, *found.names))


def test_a_body_nested_beyond_all_measure_has_a_key():
    assert keys_of("lab", CHAT, b"", [], b"[" * 100_000).key == keys().key


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, b'{"id": "chatcmpl-1", "session_id": "a\\"b\\u00e9"}', 'a"bé'),
        (CHAT, b'data: {"choices": [], "session_id":"abc"}\n\n', "abc"),
        (CHAT, json.dumps({"content": '"session_id": "spoken"'}).encode(), None),
        (CHAT, b'{"session_id": nothing}', None),
        (SESSIONS, b'{"id": "abc", "object": "session"}', "abc"),
        (SESSIONS, b'{"error": {}}', None),
        (SESSIONS, b'{"id": 7}', None),
        (f"{SESSIONS}/abc/fork", b'{"id": "def", "forked_from": {"id": "abc", "at": 2}}', "def"),
        (f"{SESSIONS}/abc/discard", b'{"id": "abc"}', None),
        (COMPLETIONS, b'{"session_id": "abc"}', None),
    ],
)
def test_an_answer_tells_the_name_of_its_conversation(path, body, name):
    assert told_name(path, body) == name


def test_a_response_goes_where_its_conversation_is():
    response = response_id(new_key(), "mine")
    key = session_key("lab", "mine")
    assert {
        keys(RESPONSES, {"input": "on", "previous_response_id": response}).key,
        keys(RESPONSES, {"input": "on", "conversation": "mine"}).key,
        keys(RESPONSES, {"input": "on", "conversation": {"id": "mine"}}).key,
        keys(f"{RESPONSES}/{response}").key,
        keys(f"{RESPONSES}/{response}/input_items").key,
    } == {key}
    assert keys(RESPONSES, {"input": "on", "previous_response_id": response}).is_bound
    for body in ({"id": response, "object": "response"}, {"type": "response.created", "response": {"id": response}}):
        assert told_name(RESPONSES, json.dumps(body).encode()) == "mine"
    assert told_name(RESPONSES, b'{"id": "resp_of_nobody"}') is None
    begins = keys(RESPONSES, {"input": "hello"})
    assert begins.key == keys(RESPONSES, {"input": [{"role": "user", "content": "hello"}]}).key
    assert not begins.is_bound
    assert keys(RESPONSES, {"input": "hello", "instructions": "x"}).key != begins.key
    said = {"messages": [{"role": "user", "content": "hello"}], "system": "x"}
    assert keys("/v1/messages", said).key != keys("/v1/messages", {**said, "system": "y"}).key
