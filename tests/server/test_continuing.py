"""Which conversation a request goes on with: by name, by its whole history, edited, branched, truncated, restarted."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import openai
import pytest

from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server_kit import assistant, chat, system, text_of, user


def talk(client, texts, max_tokens=12, **options):
    """A conversation as OpenAI's clients hold it: the history of it, and the answers."""
    history, answers = [], []
    for text in texts:
        history.append(user(text))
        answers.append(chat(client, history, max_tokens, **options))
        history.append(assistant(text_of(answers[-1])))
    return history, answers


def said_by_engine(messages, max_tokens=12):
    """Of a whole history, tokenised at once, without anything stored."""
    with kit.small_engine(store=kit.STORE_OFF) as engine:
        return "".join(engine.session().send(messages, max_tokens=max_tokens))


def num_sessions(client):
    return len(client.get("/sessions", cast_to=object)["data"])


def test_a_whole_history_goes_on_in_its_session_and_prefills_what_is_new(client):
    before = num_sessions(client)
    history, answers = talk(client, ["who are you", "and who am i", "are we alone"])
    assert num_sessions(client) == before + 1
    for number, answer in enumerate(answers):
        assert text_of(answer) == said_by_engine(history[: 2 * number + 1])
        held = answers[number - 1].usage.total_tokens if number else 0
        assert sk.cached(answer) == max(held - 1, 0), "all but the last token, whose KV nobody has computed"
        assert answer.usage.ca_jax["cached_tokens"] == {"dram": max(held - 1, 0)}
    assert len({answer.session_id for answer in answers}) == 1


def test_a_name_goes_on_with_what_is_new_alone_or_with_all_of_it(client):
    history, [first] = talk(client, ["count with me"])
    named = {"session_id": first.session_id}
    second = chat(client, [user("further")], 12, extra_body=named)
    assert text_of(second) == said_by_engine([*history, user("further")])
    history += [user("further"), assistant(text_of(second)), user("stop")]
    third = chat(client, history, 12, extra_body=named)
    assert text_of(third) == said_by_engine(history)
    assert third.session_id == first.session_id
    with pytest.raises(openai.BadRequestError, match="must be what is new to session"):
        chat(client, [user("count with me"), assistant("no"), user("further")], extra_body=named)
    with pytest.raises(openai.NotFoundError, match="'nobody'"):
        chat(client, [user("further")], extra_body={"session_id": "nobody"})


def test_a_name_can_be_held_to_where_the_conversation_stood(client):
    first = chat(client, [user("one")])
    stands = {"session_id": first.session_id, "session_state": first.session_state}
    *_, last = chat(client, [user("two")], stream=True, extra_body=stands)
    with pytest.raises(openai.ConflictError, match="behind 4 messages") as told:
        chat(client, [user("three")], extra_body=stands)
    assert (told.value.code, told.value.request.headers["x-stainless-retry-count"]) == ("session_moved", "0")
    shown = client.get(f"/sessions/{first.session_id}", cast_to=object)
    assert shown["session_state"] == last.session_state != first.session_state
    third = chat(client, [user("three")], extra_body={**stands, "session_state": last.session_state})
    assert third.session_id == first.session_id
    assert len(client.get(f"/sessions/{first.session_id}", cast_to=object)["messages"]) == 6
    with pytest.raises(openai.BadRequestError, match="a session_id"):
        chat(client, [user("three")], extra_body={"session_state": last.session_state})


def test_edited_and_branched_histories_fork_and_both_live_on(client):
    history, answers = talk(client, ["a story of the sea", "of a whale", "of an island"])
    regenerated = chat(client, history[:5], 12, temperature=1.0, seed=3, extra_body={"top_k": 4})
    edited = [*history[:2], user("of a ship"), *history[3:4], user("of an island")]
    branch = chat(client, edited, 12)
    assert text_of(branch) == said_by_engine(edited)
    for other in (regenerated, branch):
        assert other.session_id != answers[0].session_id
    more = [*history, user("the end")]
    assert text_of(chat(client, more, 12)) == said_by_engine(more), "the first branch lives on"
    other = [*history[:5], assistant(text_of(regenerated)), user("the end")]
    answer = chat(client, other, 12)
    assert text_of(answer) == said_by_engine(other), "so does the other"
    assert answer.session_id == regenerated.session_id
    assert sk.cached(answer) > 100


def test_an_answer_that_was_changed_loses_only_what_differs(client):
    history, _ = talk(client, ["tell me of the moon " * 3, "and of the sun"], 40)
    changed = [*history[:3], assistant(f"{history[3]['content'][:20]}?"), user("go on")]
    answer = chat(client, changed, 12)
    assert text_of(answer) == said_by_engine(changed)
    kept = len(kit_ids(changed[:3]))
    assert sk.cached(answer) >= kept // kit.BLOCK_TOKENS * kit.BLOCK_TOKENS


def kit_ids(messages):
    template = kit.tiny_model().tokenizer.chat_template
    return kit.tiny_model().tokenizer.encode(template.first_turn(messages), add_bos=False)


def test_two_at_once_behind_the_same_history_are_apart(client):
    history, _ = talk(client, ["two roads"])

    def follow(text):
        return text_of(chat(client, [*history, user(text)], 60))

    texts = [f"road {number}" for number in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(follow, texts))
    for text, answer in zip(texts, answers, strict=True):
        assert answer == said_by_engine([*history, user(text)], 60)


def test_a_session_that_was_truncated_is_found_by_its_whole_history(client):
    history = []
    for number in range(12):
        history.append(user(f"turn {number} " + "tell me more of it " * 3))
        answer = chat(client, history, 12)
        assert answer.session_id == (history and answer.session_id)
        history.append(assistant(text_of(answer)))
    assert answer.usage.prompt_tokens < kit.WINDOW < len(kit_ids(history)), "tokens have left"
    [shown] = [each for each in client.get("/sessions", cast_to=object)["data"] if each["id"] == answer.session_id]
    assert shown["num_dropped"] > 0
    assert sk.cached(answer) > 100, "what is left of it was not computed anew"
    assert answer.usage.ca_jax["num_dropped"] == shown["num_dropped"]
    again = chat(client, history[:-1], 12)
    assert again.session_id != answer.session_id, "to regenerate the last answer is another conversation"
    assert again.usage.prompt_tokens == answer.usage.prompt_tokens


def long_history(client, num_turns=12):
    history, answers = talk(client, [f"turn {number} " + "tell me more of it " * 3 for number in range(num_turns)])
    return [*history, user("so?")], answers


def prompt_of(server, answer):
    """The token ids that an answer was conditioned on."""
    session = server.engine.find_session(answer.session_id)
    return session.token_ids[: answer.usage.prompt_tokens]


@pytest.mark.parametrize("num_turns", [7, 9, 12, 20])
def test_a_history_longer_than_the_window_is_cut_alike_whether_it_is_known_or_not(num_turns):
    with sk.running() as server, server.client() as client:
        history, answers = long_history(client, num_turns)
        known = chat(client, history)
        assert known.session_id == answers[-1].session_id
        assert sk.cached(known) == answers[-1].usage.total_tokens - 1, "its KV is used"
        prompt = prompt_of(server, known)
    with sk.running() as server, server.client() as client:
        told = chat(client, history)
        assert prompt_of(server, told) == prompt
        assert told.usage.ca_jax["num_dropped"] == known.usage.ca_jax["num_dropped"] > 0
        more = chat(client, [*history, assistant(text_of(told)), user("more?")])
        assert more.session_id == told.session_id, "and is found from there on"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_history_longer_than_the_window_is_an_error_where_nothing_may_leave(is_known):
    with sk.running() as server, server.client() as client:
        history, _ = long_history(client)
        if not is_known:
            history[0] = user("something else")
        with pytest.raises(openai.BadRequestError) as told:
            chat(client, history, extra_body={"truncation": "disabled"})
        assert told.value.code == "context_length_exceeded"
        assert chat(client, history).usage.ca_jax["num_dropped"] > 0
        filled = chat(client, [user("x" * 400)], 400, extra_body={"truncation": "disabled"})
        assert (filled.usage.total_tokens, filled.choices[0].finish_reason) == (kit.WINDOW, "length")
        assert chat(client, history[:3], extra_body={"truncation": "disabled"}).usage.ca_jax["num_dropped"] == 0


def test_a_branch_of_a_conversation_that_lost_tokens_since_has_them(server, client):
    history, answers = long_history(client)
    assert answers[-1].usage.ca_jax["num_dropped"] > 0
    early = [*history[:4], user("another way")]
    branch = chat(client, early)
    assert branch.usage.ca_jax["num_dropped"] == 0
    assert prompt_of(server, branch) == kit_ids(early)


def test_what_was_dropped_by_hand_is_not_missing_from_a_whole_history(server, client):
    history, [answer] = talk(client, ["one two three four five six"])
    client.post(f"/sessions/{answer.session_id}/discard", body={"start": 4, "stop": 24}, cast_to=object)
    told = chat(client, [*history, user("seven")])
    assert told.session_id != answer.session_id
    assert prompt_of(server, told) == kit_ids([*history, user("seven")])


def test_sessions_are_begun_shown_pinned_cut_and_deleted(server, client):
    begun = client.post("/sessions", body={"session_id": "mine", "system": "be kind"}, cast_to=object)
    assert begun["id"] == "mine"
    with pytest.raises(openai.BadRequestError, match="must be a name that is not taken, got 'mine'"):
        client.post("/sessions", body={"session_id": "mine"}, cast_to=object)
    answer = chat(client, [user("a word " * 10)], extra_body={"session_id": "mine"})
    assert text_of(answer) == said_by_engine([system("be kind"), user("a word " * 10)], 8)
    server.engine.wait_for_saves()
    shown = client.get("/sessions/mine", cast_to=object)
    assert [message["role"] for message in shown["messages"]] == ["system", "user", "assistant"]
    assert (shown["stored"]["tier"], shown["stored"]["pinned"]) == ("dram", False)
    assert client.post("/sessions/mine", body={"pinned": True}, cast_to=object)["stored"]["pinned"]
    assert client.post("/sessions/mine", body={"ttl_s": 60, "pinned": False}, cast_to=object)["stored"]["ttl_s"] == 60
    cut = client.post("/sessions/mine/discard", body={"start": 4, "stop": 24}, cast_to=object)
    assert cut["num_tokens"] == shown["num_tokens"] - 20
    with pytest.raises(openai.BadRequestError):
        client.post("/sessions/mine/discard", body={"start": 4, "stop": 4000}, cast_to=object)
    assert chat(client, [user("more")], extra_body={"session_id": "mine"}).session_id == "mine"
    assert client.delete("/sessions/mine", cast_to=object)["deleted"]
    for path in ("/sessions/mine", "/sessions/other"):
        with pytest.raises(openai.NotFoundError):
            client.get(path, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        chat(client, [user("more")], extra_body={"session_id": "mine"})


def test_a_list_has_the_sessions_that_can_be_asked_for_by_name(server, client):
    client.post("/chunks", body={"chunks": ["the mill is by the river " * 2]}, cast_to=object)
    client.completions.create(model=sk.MODEL, prompt="once upon a time", max_tokens=4)
    client.post("/sessions", body={"session_id": "chunk 1"}, cast_to=object)
    server.engine.wait_for_saves()
    page = client.get("/sessions", cast_to=object, options={"params": {"limit": 100}})
    assert not page["has_more"]
    names = [each["id"] for each in page["data"]]
    assert "chunk 1" in names
    for name in names:
        assert client.get(f"/sessions/{name}", cast_to=object)["id"] == name
    for name in {info.session_id for info in server.engine.stored.list()} - set(names):
        with pytest.raises(openai.NotFoundError, match=f"there must be a session of that name, got '{name}'"):
            client.get(f"/sessions/{name}", cast_to=object)
        if name.startswith("chunk-"):
            with pytest.raises(openai.BadRequestError, match="must be a name that is not taken"):
                client.post("/sessions", body={"session_id": name}, cast_to=object)


def test_a_name_that_no_path_can_say_is_refused(client):
    with pytest.raises(openai.BadRequestError) as told:
        client.post("/sessions", body={"session_id": "a/b"}, cast_to=object)
    assert told.value.param == "session_id"


def test_chunks_are_computed_once_and_blended(client):
    chunks = ["the harbour is to the east of the old town " * 2, "the market is held on thursdays " * 2]
    assert client.post("/chunks", body={"chunks": chunks}, cast_to=object)["num_computed"] == 2
    assert client.post("/chunks", body={"chunks": chunks[:1]}, cast_to=object)["num_computed"] == 0
    answer = chat(client, [user("where is it?")], 12, extra_body={"context": chunks[::-1]})
    assert sk.cached(answer) > 50
    asked = {**user("where is it?"), "context": chunks[::-1]}
    history = [asked, assistant(text_of(answer)), user("and when?")]
    followed = chat(client, history, 12)
    assert followed.session_id == answer.session_id, "who says the context again goes on"
    assert followed.usage.prompt_tokens > answer.usage.total_tokens
    stands = {"session_id": answer.session_id, "session_state": followed.session_state}
    assert chat(client, [user("sure?")], extra_body=stands).session_id == answer.session_id
    for other in (user("where is it?"), {**asked, "context": chunks}):
        anew = chat(client, [other, *history[1:]], 12)
        assert anew.session_id != answer.session_id
        assert sk.cached(anew) <= sum(map(len, chunks)) + 20
    with pytest.raises(openai.BadRequestError, match="context must be given once"):
        chat(client, [asked], extra_body={"context": chunks})
    with pytest.raises(openai.BadRequestError, match="must be of a message to the assistant"):
        chat(client, [user("a"), {**assistant("b"), "context": chunks}, user("c")])


def test_documents_of_one_user_are_not_in_another_users_prompt(server, client):
    """Both ask the same, and are told the same: only what they asked it of differs."""
    same = {"logit_bias": {"120": 100}}
    documents = {"ann": "the safe opens with 4711 " * 4, "bob": "the safe opens with 9000 " * 4}
    asked = {
        who: chat(client, [user("what opens it?")], 4, extra_body={"context": [text], **same})
        for who, text in documents.items()
    }
    assert text_of(asked["ann"]) == text_of(asked["bob"])
    history = [user("what opens it?"), assistant(text_of(asked["ann"])), user("sure?")]
    decode = server.engine.model.tokenizer.decode
    assert "safe" not in decode(prompt_of(server, chat(client, history)))
    for who, text in documents.items():
        followed = chat(client, [{**history[0], "context": [text]}, *history[1:]])
        assert followed.session_id == asked[who].session_id
        prompt = decode(prompt_of(server, followed))
        assert text in prompt
        assert all(other not in prompt for whose, other in documents.items() if whose != who)


def test_conversations_outlive_the_server_on_ssd(tmp_path):
    store = StoreConfig(dram_gib=0.05, ssd_dir=str(tmp_path), ssd_gib=0.2, block_tokens=kit.BLOCK_TOKENS)
    store = dataclasses.replace(store, ssd_free_floor_gib=0.0)
    with sk.running(store=store) as server, server.client() as client:
        history, answers = talk(client, ["remember the number nine", "and the colour blue"])
        long = [user("x" * 200)]
        for number in range(5):
            answer = chat(client, long, 12)
            long += [assistant(text_of(answer)), user(f"{number} " + "y" * 60)]
    with sk.running(store=store) as server, server.client() as client:
        followed = [*history, user("what was it")]
        answer = chat(client, followed, 12)
        assert answer.session_id == answers[0].session_id
        assert answer.usage.ca_jax["cached_tokens"] == {"ssd": answers[1].usage.total_tokens - 1}
        assert text_of(answer) == said_by_engine(followed)
        stands = {"session_id": answer.session_id, "session_state": answer.session_state}
        more = chat(client, [user("say it again")], 12, extra_body=stands)
        assert text_of(more) == said_by_engine([*followed, assistant(text_of(answer)), user("say it again")])
        truncated = chat(client, long, 12)
        assert truncated.usage.ca_jax["cached_tokens"]["ssd"] > 100, "one that was truncated is found too"


def test_of_more_conversations_than_are_known_those_used_last_are_found_after_a_restart(tmp_path):
    store = StoreConfig(dram_gib=0.05, ssd_dir=str(tmp_path), ssd_gib=0.2, block_tokens=kit.BLOCK_TOKENS)
    store = dataclasses.replace(store, ssd_free_floor_gib=0.0)
    few = {"max_open_sessions": 1}
    said = [user(f"number {number}") for number in range(20)]
    with sk.running(store=store, server=few) as server, server.client() as client:
        answers = [chat(client, [each], 4) for each in said]
        assert chat(client, [user("on")], 4, extra_body={"session_id": answers[0].session_id}).session_id
        num_known = server.service.router.max_known
    assert num_known < len(said)
    with sk.running(store=store, server=few) as server, server.client() as client:
        assert server.service.router.num_states <= num_known
        for number in (1, 19):  # Found by name, in any case; the first one was used last of all.
            history = [said[number], assistant(text_of(answers[number])), user("and on")]
            found = chat(client, history, 4)
            assert (found.session_id == answers[number].session_id) == (number == 19)
            assert text_of(found) == said_by_engine(history, 4)
        shown = client.get(f"/sessions/{answers[0].session_id}", cast_to=object)
        assert [each["content"] for each in shown["messages"][::2]] == ["number 0", "on"]


def test_chunks_on_ssd_are_no_sessions_of_a_server_that_starts_again(tmp_path):
    store = StoreConfig(dram_gib=0.05, ssd_dir=str(tmp_path), ssd_gib=0.2, block_tokens=kit.BLOCK_TOKENS)
    store = dataclasses.replace(store, ssd_free_floor_gib=0.0)
    chunks = {"chunks": ["the mill is by the river " * 2]}
    with sk.running(store=store) as server, server.client() as client:
        _, [answer] = talk(client, ["where is it?"])
        client.post("/chunks", body={**chunks, "tier": "ssd"}, cast_to=object)
    with sk.running(store=store) as server, server.client() as client:
        assert [each["id"] for each in client.get("/sessions", cast_to=object)["data"]] == [answer.session_id]
        assert client.post("/chunks", body=chunks, cast_to=object)["num_computed"] == 0
