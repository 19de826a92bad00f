"""A prompt holds its own client's text alone, whatever others of the tenant say, fork, cut and drop meanwhile."""

from __future__ import annotations

import dataclasses
import functools

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.errors import SessionMovedError
from ca_jax.server.router import Router
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text_work import Texts
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, text_of, user

ANSWER = SamplingParams(max_tokens=2, logit_bias=((ord("x"), 100.0),))  # All are told the same: only texts differ.
VISIBLE = st.sampled_from(["a", "b", "c" * 150])  # What several clients may say alike; some of it overflows soon.
CONTEXTS = st.none() | st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=2)


@dataclasses.dataclass
class Client:
    """One of a tenant's: what it has said, and the name of its latest conversation."""

    number: int
    history: list = dataclasses.field(default_factory=list)
    name: str = ""
    by_name: list = dataclasses.field(default_factory=list)

    def message(self, text, context):
        """A message over documents of its own: in capitals that nobody else uses."""
        if context is None:
            return user(text)
        chunks = [chr(ord("A") + 3 * self.number + which) * 5 for which, _ in context]
        return {
            **user(text),
            "context": [
                list(chunk.encode()) if ids else chunk for chunk, (_, ids) in zip(chunks, context, strict=True)
            ],
        }


@functools.cache
def engine():
    return kit.small_engine(context_window=256)


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    engine().close()


def ask(router, found):
    """Has a conversation go on; the prompt as text and ids, and the session."""
    job = found.session.submit(found.messages, sampling=ANSWER)
    router.goes_on(found)
    while not job.done:
        engine().step()
    assert job.error is None
    router.ended(job)
    ids = [*job.slid_ids, *job.prompt_ids]
    return kit.tiny_model().tokenizer.decode(ids, skip_special_tokens=False), ids, found.session


def letters(text):
    return {letter for letter in text if letter.isupper()}


def documents(messages):
    return letters(
        "".join(
            chunk if isinstance(chunk, str) else bytes(chunk).decode()
            for message in messages
            for chunk in message.get("context", [])
        )
    )


OPERATIONS = st.tuples(
    st.sampled_from(["say", "say", "say", "name", "edit", "bare", "steal", "drop"]),
    st.integers(0, 2),
    VISIBLE,
    CONTEXTS,
    st.integers(0, 5),
)


@settings(max_examples=40, deadline=None)
@given(operations=st.lists(OPERATIONS, min_size=4, max_size=14))
def test_a_prompt_holds_its_own_clients_text_alone(operations):
    router = Router(engine(), max_open_sessions=32)
    clients = [Client(number) for number in range(3)]
    for what, who, text, context, place in operations:
        client = clients[who]
        if what == "drop":
            session = engine().find_session(client.name) if client.name else None
            if session is not None and len(session.token_ids) > 12:
                session.discard([place + 4])
            continue
        if what == "name" and client.name:
            try:
                found = router.by_id("", client.name, [client.message(text, context)], Texts())
            except SessionMovedError:
                continue
            client.by_name.append(found.messages[-1])
            prompt, _, _ = ask(router, found)
            assert letters(prompt) <= documents(client.by_name)
            continue
        if what == "edit":
            client.history = client.history[: 2 * (place % (1 + len(client.history) // 2))]
        if what == "bare":  # It forgets what it had asked over: a history of another conversation.
            client.history = [{"role": each["role"], "content": each["content"]} for each in client.history]
        if what == "steal":  # It says what others have said, as far as it has seen that.
            client.history = [{"role": each["role"], "content": each["content"]} for each in clients[place % 3].history]
        client.history.append(client.message(text, context))
        prompt, ids, session = ask(router, router.by_history("", list(client.history), Texts()))
        assert letters(prompt) <= documents(client.history), "somebody else's, or what it has not said this time"
        anew = engine().session()
        alone = anew.submit(list(client.history), sampling=ANSWER)
        assert ids == alone.prompt_ids, "the request alone says what the prompt is"
        engine().cancel(alone)
        client.name, client.by_name = session.session_id, list(client.history)
        client.history.append(assistant("xx"))
    for session in engine().sessions:
        session.close()


def said_to(server, answer):
    """What an answer's conversation is, as the model saw it."""
    ids = server.engine.opened(answer.session_id).token_ids
    return kit.tiny_model().tokenizer.decode(ids, skip_special_tokens=False)


def stands(answer):
    return {"session_id": answer.session_id, "session_state": answer.session_state}


def test_two_who_said_the_same_do_not_meet_by_name(server, client):
    first = chat(client, [user("hello")])
    history = [user("hello"), assistant(text_of(first))]
    other = chat(client, [*history, user("mine: NAME")])
    assert other.session_id == first.session_id, "it said all of it"
    for named in ({"session_id": first.session_id}, stands(first)):
        with pytest.raises(openai.ConflictError) as told:
            chat(client, [user("and mine")], extra_body=named)
        assert told.value.code == "session_moved"
    mine = chat(client, [*history, user("and mine")])
    assert mine.session_id != first.session_id
    assert "NAME" not in said_to(server, mine)
    assert chat(client, [user("on")], extra_body=stands(other)).session_id == first.session_id


def test_one_who_goes_on_by_name_is_not_disturbed_by_who_sends_the_history(server, client):
    first = chat(client, [user("hello there")])
    named = {"session_id": first.session_id}
    second = chat(client, [user("and on")], extra_body=named)
    history = [user("hello there"), assistant(text_of(first)), user("and on"), assistant(text_of(second))]
    other = chat(client, [*history, user("mine: NAME")])
    assert other.session_id != first.session_id
    assert sk.cached(other) > 0
    third = chat(client, [user("further")], extra_body=named)
    assert third.session_id == first.session_id
    assert "NAME" not in said_to(server, third)


def test_how_a_conversation_was_gone_on_with_outlives_the_server(tmp_path):
    store = StoreConfig(dram_gib=0.05, ssd_dir=str(tmp_path), ssd_gib=0.2, block_tokens=kit.BLOCK_TOKENS)
    store = dataclasses.replace(store, ssd_free_floor_gib=0.0)
    with sk.running(store=store) as server, server.client() as client:
        first = chat(client, [user("hello")])
        chat(client, [user("hello"), assistant(text_of(first)), user("mine: NAME")])
    with sk.running(store=store) as server, server.client() as client, pytest.raises(openai.ConflictError):
        chat(client, [user("and mine")], extra_body={"session_id": first.session_id})
