"""Responses in the background, and events of responses that are read again: OpenAI's client, every reply checked."""

from __future__ import annotations

import hashlib

import openai
import pytest

from ca_jax.server.tenants import Tenant, Tenants
from tests import server_kit as sk
from tests.server.test_responses import KINDS, assert_unknown, cached, respond

QUEUED = KINDS | {"response.queued": "ResponseQueuedEvent"}


def ended(client, response):
    """A response when it has ended, as a client finds out."""
    found = []
    sk.wait_for(lambda: found.append(client.responses.retrieve(response.id)) or has_ended(found[-1]))
    return found[-1]


def has_ended(response):
    return response.status not in ("queued", "in_progress")


def test_a_response_in_the_background_is_polled_and_gone_on_from(client, check):
    whole = respond(client, "hello", 20)
    first = respond(client, "hello", 20, background=True)
    check("Response", first.to_dict())
    assert (first.background, first.status, first.output) == (True, "queued", [])
    last = ended(client, first)
    check("Response", last.to_dict())
    assert (last.id, last.output_text, last.status) == (first.id, whole.output_text, whole.status)
    assert respond(client, "on", previous_response_id=last.id).previous_response_id == last.id
    assert client.responses.cancel(last.id).to_dict() == last.to_dict(), "it has ended"
    client.responses.delete(last.id)
    assert_unknown(client, last.id)


def test_what_is_asked_of_one_that_runs(client, check, server, stops_behind):
    let_go = stops_behind(server.engine, 3)
    running = respond(client, "hello", 200, background=True)
    for ask in (
        lambda: respond(client, "on", previous_response_id=running.id),
        lambda: client.responses.delete(running.id),
        lambda: client.responses.input_items.list(running.id),
    ):
        with pytest.raises(openai.ConflictError) as told:
            ask()
        assert told.value.code == "response_not_ended"
    assert client.responses.retrieve(running.id).status in ("queued", "in_progress")
    let_go.set()
    cancelled = client.responses.cancel(running.id)
    check("Response", cancelled.to_dict())
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(running.id).to_dict() == cancelled.to_dict()
    assert cached(respond(client, "on", previous_response_id=running.id)) > 0, "what was said is part of it"


def test_one_that_breaks_says_so_and_is_forgotten_when_it_is_deleted(client, check, server, monkeypatch):
    monkeypatch.setattr(server.engine._runner.sampler, "start", lambda *_: 1 / 0)
    broken = ended(client, respond(client, "hello", background=True))
    check("Response", broken.to_dict())
    assert (broken.status, broken.error.code) == ("failed", "server_error")
    client.responses.delete(broken.id)
    assert_unknown(client, broken.id)


def test_one_that_is_not_there_in_time_has_failed_and_still_has_when_it_is_kept(client, check, server, stops_behind):
    let_go = stops_behind(server.engine, 3)
    late = {"timeout_s": 1.0, "ignore_eos": True}
    broken = ended(client, respond(client, "how late", 100, background=True, extra_body=late))
    assert (broken.status, broken.error.message) == ("failed", "the answer was not there in time")
    let_go.set()
    sk.wait_until_idle(server)
    kept = client.responses.retrieve(broken.id)
    check("Response", kept.to_dict())
    assert (kept.status, kept.error) == (broken.status, broken.error)
    assert list(client.responses.retrieve(broken.id, stream=True))[-1].type == "response.failed"
    server.service.background.forget("", broken.id)
    *_, last = client.responses.retrieve(broken.id, stream=True)
    check("ResponseFailedEvent", last.to_dict())
    assert last.response.to_dict() == kept.to_dict()


def test_a_stream_is_read_on_from_where_it_broke_off(client, check, server, stops_behind):
    let_go = stops_behind(server.engine, 5)
    seen = []
    with respond(client, "hello", 20, background=True, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    response_id, after = seen[0].response.id, seen[-1].sequence_number
    let_go.set()
    seen += client.responses.retrieve(response_id, stream=True, starting_after=after)
    for event in seen:
        check(QUEUED[event.type], event.to_dict())
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text == client.responses.retrieve(response_id).output_text
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in seen]


def test_a_response_that_is_kept_is_told_again_as_events(client, check):
    first = respond(client, "hello")
    events = list(client.responses.retrieve(first.id, stream=True))
    for event in events:
        check(KINDS[event.type], event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.to_dict() == first.to_dict()
    rest = client.responses.retrieve(first.id, stream=True, starting_after=events[2].sequence_number)
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[3:]]
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(first.id)
    with pytest.raises(openai.BadRequestError, match="stream=true"):
        client.responses.retrieve(first.id, starting_after=1)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="store=false"):
        respond(client, "hello", background=True, store=False)


def test_one_that_may_not_be_read_along_is_not_begun():
    with sk.running(server={"max_lookups": 1}) as server, server.client(max_retries=0) as client:
        with server.http() as http, http.stream("GET", "/live") as watched:
            assert watched.status_code == 200
            with pytest.raises(openai.RateLimitError):
                respond(client, "hello", background=True, stream=True)
        assert not server.engine.sessions


def test_no_tenant_meets_what_runs_for_another():
    tenants = Tenants([(hashlib.sha256(name.encode()).digest(), Tenant(name=name)) for name in ("a", "b")])
    with sk.running(tenants) as server, server.client("a") as client, server.client("b") as other:
        running = respond(client, "a secret", 100, background=True)
        assert_unknown(other, running.id)
        for ask in (other.responses.cancel, lambda each: other.responses.retrieve(each, stream=True)):
            with pytest.raises(openai.NotFoundError):
                ask(running.id)
        assert ended(client, running).output_text


def test_what_runs_in_the_background_ends_before_the_server_does(tmp_path):
    with sk.running(store=sk.ssd_store(tmp_path)) as server, server.client() as client:
        running = respond(client, "hello", 40, background=True)
    with sk.running(store=sk.ssd_store(tmp_path)) as server, server.client() as client:
        found = client.responses.retrieve(running.id)
        assert found.usage.output_tokens == 40
        assert found.background
