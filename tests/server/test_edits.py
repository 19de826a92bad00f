"""Histories that clients edit in the middle: found by what was said last, and over HTTP what of their KV is used."""

from __future__ import annotations

import anthropic
import openai
import pytest

from ca_jax import BlendConfig
from ca_jax.edits import last_exchange
from ca_jax.server.router import Router
from ca_jax.storage.records import Residency
from ca_jax.turns import text
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text import Texts
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server.test_router import Rig
from tests.server.test_tools import LOOK, model_with
from tests.server_kit import assistant, ssd_store, user

SAID = ("find the sea", "it is said to be far away, and blue", "how far is it then", "and is it deep, and cold too")
ASKED = user("what did I ask")
WHOLE, REUSE = (BlendConfig(recompute_ratio=ratio) for ratio in (1.0, 0.0))
USED = {"extra_body": {"reuse_edited": True}}


class EditedRig(Rig):
    """A rig whose requests may ask for the reuse of what was edited."""

    def edit(self, history, tenant="", reuse_edited=True, router=None, place=2, state=None):
        """An edited history's conversation, what it borrows, and the job that has answered it."""
        messages = [*history[:place], user("it is near"), *history[place + 1 :], ASKED]
        router = router or self.router
        found = router.by_history(tenant, messages, Texts(), reuse_edited=reuse_edited, state=state)
        borrowed = found.session.conversation.borrowed
        job = found.session.submit(found.messages, sampling=SamplingParams(max_tokens=8))
        while not job.done:
            self.engine.step()
        assert job.error is None
        self.router.ended(job)
        self.engine.wait_for_saves()
        return found.session, borrowed, job


@pytest.fixture
def rig():
    with kit.small_engine(blend=WHOLE) as engine:
        yield EditedRig(engine)


def test_only_who_asks_for_it_gets_what_was_stored_behind_an_edit(rig):
    history, answers = rig.talk(SAID)
    plain, borrowed, job = rig.edit(history, reuse_edited=False)
    assert borrowed is None
    assert (job.missed_chunks, rig.engine.metrics.loaded_chunks, plain.conversation.lineage) == (0, 0, 0)
    edited, borrowed, again = rig.edit(history)
    assert borrowed.session_id == answers[-1].name
    assert again.usage().num_cached_tokens > job.usage().num_cached_tokens + 50
    assert (again.prompt_ids, again.output_ids) == (job.prompt_ids, job.output_ids), "all is computed anew here"
    # Both are found where they stand, and a history that was not edited goes on as ever.
    said = "".join(again.token_texts)
    followed = [*history[:2], user("it is near"), *history[3:], ASKED, assistant(said), user("on")]
    assert rig.router.by_history("", followed, Texts(), reuse_edited=True).session is edited
    found = rig.router.by_history("", [*history, ASKED], Texts(), reuse_edited=True)
    assert found.session is answers[-1].session


def test_who_edits_the_beginning_must_say_what_was_there(rig):
    """Else a client of the tenant that said the same behind another beginning could be told of it."""
    history, answers = rig.talk(SAID)
    assert rig.edit(history, place=0)[1] is None
    assert rig.edit(history, place=0, state="another")[1] is None
    assert rig.edit(history, place=0, state=last_exchange(history))[1] is None, "who said the same can name that"
    _, borrowed, job = rig.edit(history, place=0, state=answers[-1].state)
    assert (borrowed.session_id, job.missed_chunks) == (answers[-1].name, 0)
    assert rig.edit(history, tenant="b", place=0, state=answers[-1].state)[1] is None
    other, _ = rig.talk(["another", *SAID[1:]])
    assert other[-1] != history[-1]
    found = rig.router.by_history("", [*other[:3], *history[3:], ASKED], Texts(), reuse_edited=True)
    assert found.session.conversation.borrowed is None, "it ended so, and began otherwise"


def test_the_same_history_of_another_tenant_is_never_used(rig):
    history, _ = rig.talk(SAID, tenant="a")
    session, borrowed, job = rig.edit(history, "b")
    assert (session.tenant, borrowed) == ("b", None)
    assert job.usage().num_cached_tokens == 0
    assert rig.edit(history, "a")[1] is not None


def test_a_history_that_is_not_open_is_found_and_left_so(tmp_path):
    with kit.small_engine(blend=REUSE, store=ssd_store(tmp_path)) as engine:
        rig = EditedRig(engine, max_open_sessions=1)
        history, answers = rig.talk(SAID)
        rig.talk(["of another"])
        name = answers[-1].name
        assert engine.opened(name) is None
        engine._kv.store.leave_dram(engine._kv.key(name))
        _, borrowed, job = rig.edit(history)
        assert borrowed.session_id == name
        assert engine.opened(name) is None
        assert job.missed_chunks == 0
        assert job.usage().cached_tokens["ssd"] >= borrowed.num_tokens
        expected = job.output_ids
    with kit.small_engine(blend=REUSE, store=ssd_store(tmp_path)) as engine:
        rig = EditedRig(engine)
        assert rig.edit(history, router=Router(engine, 4))[1] is None, "it has not learnt of it"
        rig.router.learn("", name, engine)
        _, borrowed, job = rig.edit(history)
        assert (borrowed.session_id, job.output_ids) == (name, expected)
        assert engine.stored.find(name).residency is not Residency.ABSENT
        engine.stored.drop(name)
        assert rig.edit(history)[1] is None


# Over HTTP.


@pytest.fixture(scope="module")
def server():
    with sk.running(make_engine=lambda: kit.small_engine(model_with(), blend=REUSE)) as running:
        yield running


def looped(client, server, question):
    """An agent's loop of four calls, as the client has it."""
    messages = [user(question)]
    for number in range(4):
        answer = sk.chat(client, messages, 200, tools=[LOOK], tool_choice="required", parallel_tool_calls=False)
        said = answer.choices[0].message.to_dict()
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": f"it is {number}"}]
    server.engine.wait_for_saves()
    return messages


@pytest.mark.parametrize("is_light", [True, False], ids=["", "texts on threads"])
def test_a_tools_output_that_is_dropped_leaves_what_follows_in_use(server, client, monkeypatch, is_light):
    monkeypatch.setattr(text, "LIGHT_CHARS", text.LIGHT_CHARS if is_light else 0)
    messages = looped(client, server, "Go." if is_light else "Go on.")
    edited = [*messages[:2], {**messages[2], "content": "-"}, *messages[3:]]
    loaded = server.engine.metrics.loaded_chunks
    used = sk.chat(client, edited, 8, tools=[LOOK], **USED)
    plain = sk.chat(client, edited, 8, tools=[LOOK])
    assert server.engine.metrics.loaded_chunks == loaded + 1
    # What is computed: the new message, the output that takes another's place, what the template writes around them.
    assert used.usage.prompt_tokens - sk.cached(used) < 2 * len("<|im_start|>tool it is 3<|im_start|>assistant ") + 16
    assert sk.cached(used) > sk.cached(plain) + 100
    assert used.usage.ca_jax["cached_tokens"] == {"dram": sk.cached(used)}
    assert (used.usage.ca_jax["repaired_tokens"], used.usage.ca_jax["missed_chunks"]) == (0, 0)
    several = sk.chat(client, edited, 4, tools=[LOOK], n=2, **USED)
    assert sk.text_of(several) == several.choices[1].message.content == sk.text_of(used)[: len(sk.text_of(several))]
    assert server.engine.metrics.loaded_chunks == loaded + 3
    unkept = sk.chat(client, edited, 8, tools=[LOOK], store=False, **USED)
    assert sk.text_of(unkept) == sk.text_of(used)
    assert server.engine.metrics.loaded_chunks == loaded + 4


def test_messages_as_anthropic_has_them(server, client):
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=sk.DEADLINE_S, max_retries=0) as claude:
        history, asked = [], {"model": sk.MODEL, "max_tokens": 14}
        for said in SAID:
            history.append(user(said))
            answer = claude.messages.create(messages=history, extra_body={"temperature": 0}, **asked)
            history.append(assistant(answer.content[0].text))
        server.engine.wait_for_saves()
        edited, loaded = [*history[:2], user("no"), *history[3:], ASKED], server.engine.metrics.loaded_chunks
        claude.messages.create(messages=edited, **asked)
        assert server.engine.metrics.loaded_chunks == loaded
        claude.messages.create(messages=edited, extra_body={"reuse_edited": True}, **asked)
        assert server.engine.metrics.loaded_chunks == loaded + 1


def test_a_client_that_edits_the_beginning_names_the_state(server, client):
    history = []
    for said in ("a secret", *SAID[1:]):
        history.append(user(said))
        answer = sk.chat(client, history, 14)
        history.append(assistant(sk.text_of(answer)))
    server.engine.wait_for_saves()
    loaded, told = server.engine.metrics.loaded_chunks, [user("nothing"), *history[1:], ASKED]
    sk.chat(client, told, 4, **USED)
    assert server.engine.metrics.loaded_chunks == loaded
    sk.chat(client, told, 4, extra_body={**USED["extra_body"], "session_state": answer.session_state})
    assert server.engine.metrics.loaded_chunks == loaded + 1


def test_a_name_goes_without(client):
    with pytest.raises(openai.BadRequestError, match="reuse_edited must come without a session_id"):
        sk.chat(client, [ASKED], extra_body={"reuse_edited": True, "session_id": "one"})
