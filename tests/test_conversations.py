"""Conversations as bytes: what comes back is what went in, and other bytes are refused with one kind of error."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ca_jax.conversations import Conversation

GOOD = {
    "format": 1,
    "token_ids": [1, 2, 3],
    "messages": [{"role": "user", "content": "hi"}],
    "turn_starts": [[0, 0]],
}
INT32 = st.integers(0, 2**31 - 1)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def packed(value: object) -> bytes:
    return zlib.compress(json.dumps(value).encode())


@given(
    token_ids=st.lists(INT32),
    messages=st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()})),
    turn_starts=st.lists(st.tuples(INT32, INT32)),
)
@example(token_ids=[], messages=[], turn_starts=[])
@example(token_ids=[7], messages=[{"role": "user", "content": "\ud800 \x00 é 漢 🙂"}], turn_starts=[(0, 0)])
def test_it_comes_back_as_it_was(token_ids, messages, turn_starts):
    conversation = Conversation(token_ids=token_ids, messages=messages, turn_starts=turn_starts)
    assert Conversation.from_bytes(conversation.to_bytes()) == conversation


def test_it_is_smaller_than_its_text():
    messages = [{"role": "user", "content": "the same words again and again " * 20}] * 50
    conversation = Conversation(token_ids=list(range(5000)), messages=messages, turn_starts=[(0, 0)])
    assert len(conversation.to_bytes()) < len(json.dumps(messages)) / 2


@given(st.binary(max_size=60))
@example(b"")
@example(zlib.compress(b""))
@example(zlib.compress(b"\xff\xfe\x00"))
@example(packed(GOOD)[:-3])
@example(zlib.compress(b"[" * 100_000))
@example(packed(GOOD).replace(packed(GOOD)[5:7], b"\x00\x00"))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever they are
        Conversation.from_bytes(data)


@given(field=st.sampled_from([*GOOD]), value=JSON)
@example(field="token_ids", value=[float("inf")])
@example(field="token_ids", value=[float("nan")])
@example(field="messages", value=[{"role": "user"}])
@example(field="messages", value=None)
@example(field="turn_starts", value=[[1, 2, 3]])
@example(field="format", value=2)
def test_fields_that_are_not_what_they_should_be_are_refused_or_come_out_well_formed(field, value):
    try:
        found = Conversation.from_bytes(packed({**GOOD, field: value}))
    except ValueError:
        return
    assert all(type(token) is int for token in found.token_ids)
    assert all(type(text) is str for message in found.messages for text in message.values())
    assert all(type(number) is int for start in found.turn_starts for number in start)


@pytest.mark.parametrize("missing", [*GOOD])
def test_a_field_that_is_missing_is_named(missing):
    with pytest.raises(ValueError, match=missing):
        Conversation.from_bytes(packed({name: value for name, value in GOOD.items() if name != missing}))


def test_another_version_is_named():
    with pytest.raises(ValueError, match="wanted a conversation of format 1, found 2"):
        Conversation.from_bytes(packed({**GOOD, "format": 2}))


@pytest.mark.parametrize("value", [[], "text", 3, None])
def test_json_that_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match="wanted a conversation, found"):
        Conversation.from_bytes(packed(value))
