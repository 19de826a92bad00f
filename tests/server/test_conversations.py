"""OpenAI's client against `/v1/conversations`: sessions with metadata and items, which responses go on with."""

from __future__ import annotations

import concurrent.futures
import hashlib

import openai
import pytest

from ca_jax.server.tenants import Tenant, Tenants
from tests import server_kit as sk
from tests.server.test_responses import cached, respond
from tests.server_kit import assistant, system, user


def texts_in(client, name):
    items = client.conversations.items.list(name, order="asc")
    return [item.content[0].text for item in items]


def test_items_wait_for_the_turn_that_says_them(said_by_engine, client, check):
    begun = [system("Be brief."), user("who are you")]
    held = client.conversations.create(metadata={"topic": "x"}, items=begun)
    check("ConversationResource", held.to_dict())
    assert texts_in(client, held.id) == ["Be brief.", "who are you"]
    first = respond(client, "and who am i", conversation=held.id)
    assert first.output_text == said_by_engine([*begun, user("and who am i")])
    assert first.conversation.id == held.id
    added = client.conversations.items.create(held.id, items=[user("so"), assistant("well")])
    check("ConversationItemList", added.to_dict())
    assert [item.content[0].text for item in added.data] == ["so", "well"]
    second = respond(client, "why", conversation={"id": held.id})
    history = [*begun, user("and who am i"), assistant(first.output_text), user("so"), assistant("well"), user("why")]
    assert second.output_text == said_by_engine(history)
    assert cached(second) == first.usage.total_tokens - 1
    said = [message["content"] for message in [*history, assistant(second.output_text)]]
    assert texts_in(client, held.id) == said
    page = client.conversations.items.list(held.id, limit=3)
    check("ConversationItemList", page.to_dict())
    assert [item.content[0].text for item in page] == said[::-1], "it asks for the next pages by itself"


def test_what_waits_may_leave_and_what_was_seen_stays(said_by_engine, client, check):
    held = client.conversations.create(items=[user("one"), user("two"), user("one")])
    one, two, again = client.conversations.items.list(held.id, order="asc").data
    assert client.conversations.items.retrieve(two.id, conversation_id=held.id).to_dict() == two.to_dict()
    check("ConversationResource", client.conversations.items.delete(two.id, conversation_id=held.id).to_dict())
    left = client.conversations.items.list(held.id, order="asc").data
    assert [item.id for item in left] == [one.id, again.id]
    answer = respond(client, "three", conversation=held.id)
    assert answer.output_text == said_by_engine([user("one"), user("one"), user("three")])
    with pytest.raises(openai.BadRequestError, match="what the model has seen stays"):
        client.conversations.items.delete(one.id, conversation_id=held.id)
    with pytest.raises(openai.NotFoundError, match="an item of that id"):
        client.conversations.items.delete(two.id, conversation_id=held.id)
    changed = client.conversations.update(held.id, metadata={"topic": "y"})
    assert client.conversations.retrieve(held.id).to_dict() == changed.to_dict()
    assert (changed.metadata, changed.created_at) == ({"topic": "y"}, held.created_at)
    check("DeletedConversationResource", client.conversations.delete(held.id).to_dict())
    for ask in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            ask(held.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_turn_that_cannot_be_leaves_what_waits(client):
    held = client.conversations.create(items=[user("x" * 300)])
    with pytest.raises(openai.BadRequestError, match="context window"):
        respond(client, "y" * 300, conversation=held.id)
    assert texts_in(client, held.id) == ["x" * 300]
    assert respond(client, "y", conversation=held.id).usage.input_tokens > 300


def test_a_session_of_the_projects_own_is_one_too(client):
    client.post("/sessions", cast_to=object, body={"session_id": "own", "system": "Be brief."})
    assert client.conversations.retrieve("own").metadata == {}
    client.conversations.items.create("own", items=[user("hello")])
    more = {"session_id": "own"}
    told = client.chat.completions.create(model=sk.MODEL, messages=[user("so")], max_tokens=4, extra_body=more)
    assert texts_in(client, "own") == ["Be brief.", "hello", "so", told.choices[0].message.content]


def test_conversations_outlive_the_process_and_are_their_tenants(said_by_engine, tmp_path):
    tenants = Tenants([(hashlib.sha256(name.encode()).digest(), Tenant(name=name)) for name in ("a", "b")])
    store = sk.ssd_store(tmp_path)
    with sk.running(tenants, store=store) as server, server.client("a") as client, server.client("b") as other:
        fresh = client.conversations.create(metadata={"k": "v"}, items=[user("who are you")])
        held = client.conversations.create()
        first = respond(client, "hello", conversation=held.id)
        client.conversations.items.create(held.id, items=[user("so")])
        for ask in (other.conversations.retrieve, other.conversations.items.list, other.conversations.delete):
            with pytest.raises(openai.NotFoundError):
                ask(held.id)
    with sk.running(tenants, store=store) as server, server.client("a") as client:
        assert client.conversations.retrieve(fresh.id).to_dict() == fresh.to_dict()
        answer = respond(client, "why", conversation=fresh.id)
        assert answer.output_text == said_by_engine([user("who are you"), user("why")])
        second = respond(client, "well", conversation=held.id)
        history = [user("hello"), assistant(first.output_text), user("so"), user("well")]
        assert second.output_text == said_by_engine(history)
        assert cached(second) == first.usage.total_tokens - 1


def test_each_is_told_the_items_that_it_has_added(server, client):
    held = client.conversations.create()
    texts = [f"item {number}" for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool, sk.held(server.service.loop):
        adding = [pool.submit(client.conversations.items.create, held.id, items=[user(text)]) for text in texts]
        sk.wait_for(lambda: server.service.admission.lookups.total() == 4)
    assert [[item.content[0].text for item in each.result().data] for each in adding] == [[text] for text in texts]


def test_what_is_bad_is_named(client):
    with pytest.raises(openai.BadRequestError) as told:
        client.conversations.create(items=[{"type": "item_reference", "id": "x"}])
    assert told.value.param.startswith("items.0")
    with pytest.raises(openai.BadRequestError) as told:
        client.conversations.create(metadata={"k": "v" * 513})
    assert told.value.param == "metadata.k"
    held = client.conversations.create()
    for _ in range(12):
        client.conversations.items.create(held.id, items=[user("x")] * 20)
    with pytest.raises(openai.BadRequestError, match="at most 256"):
        client.conversations.items.create(held.id, items=[user("x")] * 20)
