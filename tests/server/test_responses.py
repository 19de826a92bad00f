"""OpenAI's client against `/v1/responses`: kept, gone on from, forked, deleted, found after a restart, never by others.

Every response and event that comes is held against OpenAI's own description of its API.
"""

from __future__ import annotations

import concurrent.futures
import hashlib

import openai
import pytest

from ca_jax.server.tenants import Tenant, Tenants
from tests import server_kit as sk
from tests.server_kit import assistant, ssd_store, system, user

KINDS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
}


def respond(client, new, max_tokens=8, **options):
    """A greedy response, unless `options` say otherwise."""
    asked = {"model": sk.MODEL, "temperature": 0, "max_output_tokens": max_tokens, **options}
    return client.responses.create(input=new, **asked)


def cached(response):
    return response.usage.input_tokens_details.cached_tokens


@pytest.fixture
def created(client, check):
    """As `respond`, checked."""

    def ask(new, **options):
        response = respond(client, new, **options)
        check("Response", response.to_dict())
        return response

    return ask


def test_a_response_is_gone_on_from_by_its_id_and_another_one_forks(said_by_engine, server, client, created):
    first = created("who are you")
    history = [user("who are you")]
    assert first.output_text == said_by_engine(history)
    history.append(assistant(first.output_text))
    second = created("and who am i", previous_response_id=first.id)
    assert second.output_text == said_by_engine([*history, user("and who am i")])
    assert cached(second) == first.usage.total_tokens - 1, "its KV was there"
    forked = created("and who is she", previous_response_id=first.id)
    assert forked.output_text == said_by_engine([*history, user("and who is she")])
    again = created("really", previous_response_id=second.id)
    followed = [*history, user("and who am i"), assistant(second.output_text), user("really")]
    assert again.output_text == said_by_engine(followed), "the fork has changed nothing"
    named = {each.session_id for each in server.engine.sessions}
    with concurrent.futures.ThreadPoolExecutor(2) as pool, sk.held(server.service.loop):
        asking = [pool.submit(respond, client, "at once", previous_response_id=again.id) for _ in range(2)]
        sk.wait_for(lambda: server.service.admission.answers.total() == 2)
    texts = {each.result().output_text for each in asking}
    assert texts == {said_by_engine([*followed, assistant(again.output_text), user("at once")])}
    assert len({each.session_id for each in server.engine.sessions} - named) == 1, "one of the two has forked"


def test_a_response_is_retrieved_with_what_it_was_an_answer_to(client, created, check):
    asked = {"metadata": {"run": "7"}, "instructions": "Be brief.", "top_p": 0.5}
    first = created([system("Rhyme."), {"role": "user", "content": [{"type": "input_text", "text": "a"}]}], **asked)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert (first.metadata, first.instructions, first.top_p) == ({"run": "7"}, "Be brief.", 0.5)
    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    second = created("b", previous_response_id=first.id, instructions="Be brief.")
    assert client.responses.retrieve(second.id).previous_response_id == first.id
    page = client.responses.input_items.list(second.id, limit=2)
    check("ResponseItemList", page.to_dict())
    texts = [item.content[0].text for item in page]  # It asks for the next pages by itself.
    assert texts == ["b", first.output_text, "a", "Rhyme."]
    ordered = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in ordered] == texts[::-1]
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(second.id, after="msg_of_nobody")


def test_other_instructions_or_replies_of_its_own_are_told_anew(said_by_engine, created):
    first = created("who are you", instructions="Be brief.")
    said = [user("who are you"), assistant(first.output_text)]
    assert first.output_text == said_by_engine([system("Be brief."), said[0]])
    same = created("why", previous_response_id=first.id, instructions="Be brief.")
    assert same.output_text == said_by_engine([system("Be brief."), *said, user("why")])
    assert cached(same) == first.usage.total_tokens - 1
    for instructions, told in ((None, []), ("Be long.", [system("Be long.")])):
        other = created("why", previous_response_id=first.id, instructions=instructions)
        assert other.output_text == said_by_engine([*told, *said, user("why")])
    replies = [user("no"), assistant("yes"), user("oh")]
    longer = created(replies, previous_response_id=first.id, instructions="Be brief.")
    assert longer.output_text == said_by_engine([system("Be brief."), *said, *replies])


def test_items_of_a_response_are_input_as_they_come(said_by_engine, client, created):
    first = created("who are you")
    items = [user("who are you"), *(item.to_dict() for item in first.output), user("why")]
    items.insert(1, {"type": "reasoning", "id": "rs_1", "summary": []})
    whole = created(items)
    history = [user("who are you"), assistant(first.output_text), user("why")]
    assert whole.output_text == said_by_engine(history)
    assert cached(whole) == first.usage.total_tokens - 1, "the conversation is found by its history"
    chat = sk.chat(client, [*history, assistant(whole.output_text), user("again")])
    assert sk.cached(chat) > cached(whole), "so do chats find it"


def test_a_stream_of_typed_events(client, check, created):
    options = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = created("hello", **options)
    events = list(respond(client, "hello", stream=True, **options))
    for event in events:
        check(KINDS[event.type], event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    [told] = whole.output[0].content
    streamed = [each.logprob for event in deltas for each in event.logprobs]
    assert streamed == pytest.approx([each.logprob for each in told.logprobs], abs=1e-4)
    assert [each.token for each in told.logprobs] == list(whole.output_text)
    last = events[-1].response
    assert (last.id, last.output_text) == (events[0].response.id, whole.output_text)
    assert client.responses.retrieve(last.id).output_text == whole.output_text
    asked = {
        "model": sk.MODEL,
        "temperature": 0,
        "max_output_tokens": 400,
        "extra_body": {"stop": ["e", "a", "i", "o"]},
    }
    with client.responses.stream(input="hello", previous_response_id=last.id, **asked) as stream:
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.previous_response_id == last.id


def test_a_stream_that_breaks_ends_with_what_broke_it(client, check, server, monkeypatch):
    monkeypatch.setattr(server.engine._runner.sampler, "start", lambda *_: 1 / 0)
    *_, last = respond(client, "hello", stream=True)
    check(KINDS[last.type], last.to_dict())
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "ZeroDivision" not in str(last)


def assert_unknown(client, response_id):
    for ask in (
        lambda: client.responses.retrieve(response_id),
        lambda: client.responses.delete(response_id),
        lambda: client.responses.input_items.list(response_id),
        lambda: respond(client, "x", previous_response_id=response_id),
    ):
        with pytest.raises(openai.NotFoundError) as told:
            ask()
        assert told.value.code == "response_not_found"
    assert told.value.param == "previous_response_id"


def test_what_is_deleted_is_gone_with_its_turn_unless_another_stands_on_it(client, server, created):
    first = created("a first secret")
    second = created("a second one", previous_response_id=first.id)
    third = created("a third one", previous_response_id=second.id)
    [session] = [each for each in server.engine.sessions if any("first secret" in m["content"] for m in each.messages)]
    said = lambda: str(session.messages)  # noqa: E731
    client.responses.delete(second.id)
    assert_unknown(client, second.id)
    assert "a second one" in said(), "the third stands on it"
    fourth = created("a fourth one", previous_response_id=third.id)
    client.responses.delete(fourth.id)
    assert "a third one" in said()
    assert "fourth" not in said()
    client.responses.delete(third.id)
    assert "a first secret" in said()
    assert "second" not in said()
    assert cached(created("a second one", previous_response_id=first.id)) >= first.usage.total_tokens - 1
    forked = created("a fork", previous_response_id=first.id)
    [*_, last] = client.responses.input_items.list(forked.id)
    client.responses.delete(first.id)
    for each in (first, second, third, fourth):
        assert_unknown(client, each.id)
    assert last.content[0].text == "a first secret", "a fork has what it stands on"
    assert created("on", previous_response_id=forked.id).output_text


def test_nothing_is_kept_of_what_is_not_to_be_stored(client, server, created):
    first = created("keep this")
    opened = len(server.engine.sessions)
    dropped = created("but not this", previous_response_id=first.id, store=False)
    assert_unknown(client, dropped.id)
    assert len(server.engine.sessions) == opened
    assert created("but not this", previous_response_id=first.id).output_text == dropped.output_text


def test_a_session_is_gone_on_with_as_a_conversation(client, server, created):
    name = "trip-é"
    client.post("/sessions", cast_to=object, body={"session_id": name})
    first = created("who are you", conversation=name, instructions="Be brief.")
    second = created("why", conversation={"id": name})
    assert second.conversation.id == name
    shown = client.get("/sessions/trip-%C3%A9", cast_to=object)
    assert [each["role"] for each in shown["messages"]] == ["system", *["user", "assistant"] * 2]
    forked = created("why not", previous_response_id=second.id)
    assert len(server.engine.find_session(name).messages) == 5, "it is the client's to go on with"
    assert client.responses.retrieve(forked.id).output_text == forked.output_text
    client.responses.delete(second.id)
    client.responses.delete(first.id)
    assert len(server.engine.find_session(name).messages) == 5, "a conversation keeps what was said in it"
    with pytest.raises(openai.BadRequestError, match="must come without a conversation"):
        respond(client, "x", conversation=name, previous_response_id=forked.id)
    with pytest.raises(openai.BadRequestError, match="instructions must be"):
        respond(client, "x", conversation=name, instructions="Be long.")
    with pytest.raises(openai.NotFoundError):
        respond(client, "x", conversation="nobody")


def test_a_place_that_truncation_has_cut_away_says_so(client, created):
    first = last = created("a first word " + "x" * 100, truncation="auto")
    for _ in range(2):
        last = created("tell me more " + "y" * 100, previous_response_id=last.id)
    with pytest.raises(openai.BadRequestError) as full:
        created("tell me more " + "y" * 100, previous_response_id=last.id)
    assert full.value.code == "context_length_exceeded", "as OpenAI's, unless truncation is auto"
    cut = created("tell me more " + "y" * 100, previous_response_id=last.id, truncation="auto")
    assert cut.output_text
    for ask in (client.responses.retrieve, lambda each: respond(client, "x", previous_response_id=each)):
        with pytest.raises(openai.NotFoundError, match="tokens have left its conversation") as told:
            ask(first.id)
        assert told.value.code == "response_truncated"
    assert client.responses.retrieve(cut.id).output_text == cut.output_text
    assert created("on", previous_response_id=cut.id, truncation="auto").output_text


def test_responses_outlive_the_process(said_by_engine, tmp_path):
    with sk.running(store=ssd_store(tmp_path)) as server, server.client() as client:
        first = respond(client, "who are you")
        second = respond(client, "and who am i", previous_response_id=first.id)
        gone = respond(client, "and she", previous_response_id=second.id)
        client.responses.delete(gone.id)
    with sk.running(store=ssd_store(tmp_path)) as server, server.client() as client:
        assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
        assert_unknown(client, gone.id)
        history = [user("who are you"), assistant(first.output_text)]
        forked = respond(client, "and they", previous_response_id=first.id)
        assert forked.output_text == said_by_engine([*history, user("and they")])
        history += [user("and who am i"), assistant(second.output_text), user("on")]
        third = respond(client, "on", previous_response_id=second.id)
        assert third.output_text == said_by_engine(history)
        assert cached(third) >= second.usage.total_tokens - 1, "KV came from SSD"


def test_a_response_that_has_expired_is_found_no_more(tmp_path):
    with sk.running(store=ssd_store(tmp_path)) as server, server.client() as client:
        kept, expired = (
            respond(client, text, extra_body={"kv_retention_ttl_seconds": ttl_s})
            for text, ttl_s in (("keep me", 3600), ("forget me", 0))
        )
    with sk.running(store=ssd_store(tmp_path)) as server, server.client() as client:
        assert respond(client, "on", previous_response_id=kept.id).output_text
        assert_unknown(client, expired.id)


def test_no_tenant_finds_another_ones():
    tenants = Tenants([(hashlib.sha256(name.encode()).digest(), Tenant(name=name)) for name in ("a", "b")])
    with sk.running(tenants) as server, server.client("a") as client, server.client("b") as other:
        first = respond(client, "a secret")
        assert_unknown(other, first.id)
        assert client.responses.retrieve(first.id).output_text == first.output_text


BAD = {
    "no model of that name": ({"model": "gpt-4o"}, "model", "model_not_found"),
    "no id": ({"previous_response_id": "resp_\u00e9"}, "previous_response_id", "response_not_found"),
    "a tool": ({"tools": [{"type": "function", "name": "f"}]}, "tools", "unsupported_parameter"),
    "a format": ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "unsupported_parameter"),
    "an empty input": ({"new": ""}, None, "empty_message"),
    "no input": ({"new": []}, "input", "invalid_value"),
    "an image": (
        {"new": [user([{"type": "input_image", "image_url": "x"}])]},
        "input.0.content.0.type",
        "invalid_value",
    ),
    "over the window": ({"new": "x" * 600}, None, "context_length_exceeded"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_says_what_is_bad(client, name):
    changes, param, code = BAD[name]
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as told:
            respond(client, **({"new": "hello"} | changes), stream=stream)
        assert told.value.status_code in (400, 404)
        assert (told.value.param, told.value.code, told.value.type) == (param, code, "invalid_request_error")
