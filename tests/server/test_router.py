"""Which conversation a request goes on with: by name, by its whole history, edited, branched, truncated, restarted.

Without a socket: the router is asked as the service asks it, and the engine runs what it finds.
"""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ca_jax.config import OverflowConfig
from ca_jax.errors import InvalidRequestError, SessionBusyError, SessionMovedError, UnknownSessionError
from ca_jax.server.router import Router, client_name, engine_name
from ca_jax.turns.requests import SamplingParams
from ca_jax.turns.text import Texts, TextWork
from tests import engine_kit as kit
from tests.server_kit import assistant, ssd_store, user

WINDOW = 256


@dataclasses.dataclass
class Answer:
    """What a request came to."""

    session: object
    prompt: list[int]
    text: str
    cached: int

    @property
    def name(self):
        return self.session.session_id

    @property
    def state(self):
        return self.session.conversation.chain

    @property
    def prompt_text(self):
        return kit.tiny_model().tokenizer.decode(self.prompt, skip_special_tokens=False)


class Rig:
    """A router over an engine, which answers what the router finds."""

    def __init__(self, engine, max_open_sessions=64):
        self.engine = engine
        self.router = Router(engine, max_open_sessions)

    def ask(self, messages, name=None, state=None, *, tenant="", may_drop=True, is_known=True, **sampling):
        messages = [user(messages)] if isinstance(messages, str) else list(messages)
        router = self.router if is_known else Router(self.engine, 1)
        if name is None:
            found = router.by_history(tenant, messages, Texts(), may_drop=may_drop)
        else:
            found = router.by_id(tenant, name, messages, Texts(), state)
        job = found.session.submit(found.messages, sampling=SamplingParams(**{"max_tokens": 8} | sampling))
        router.goes_on(found)
        while not job.done:
            self.engine.step()
        assert job.error is None
        router.ended(job)
        self.engine.wait_for_saves()
        num_cached = job.usage().num_cached_tokens
        return Answer(found.session, [*job.slid_ids, *job.prompt_ids], "".join(job.token_texts), num_cached)

    def talk(self, texts, **options):
        """A conversation as OpenAI's clients hold it: the history, its last answer included, and the answers."""
        history, answers = [], []
        for text in texts:
            history.append(user(text))
            answers.append(self.ask(history, **options))
            history.append(assistant(answers[-1].text))
        return history, answers


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine(context_window=WINDOW) as engine:
        yield engine


@pytest.fixture
def rig(engine):
    yield Rig(engine)
    for session in engine.sessions:
        session.close()


def ids_of(messages):
    template = kit.tiny_model().tokenizer.chat_template
    return kit.tiny_model().tokenizer.encode(template.first_turn(messages), add_bos=False)


def test_a_name_goes_on_with_what_is_new_alone_or_with_all_of_it(rig):
    history, [first] = rig.talk(["count with me"])
    second = rig.ask("further", first.name)
    assert second.prompt == ids_of([*history, user("further")])
    history += [user("further"), assistant(second.text), user("stop")]
    third = rig.ask(history, first.name)
    assert (third.name, third.prompt) == (first.name, ids_of(history))
    with pytest.raises(InvalidRequestError, match="must be what is new to session"):
        rig.ask([user("count with me"), assistant("no"), user("further")], first.name)
    assert rig.router.look("", first.name) is first.session.conversation
    with pytest.raises(UnknownSessionError, match="'nobody'"):
        rig.ask("further", "nobody")


def test_edited_and_branched_histories_fork_and_all_live_on(rig):
    history, answers = rig.talk(["a story of the sea", "of a whale", "of an island"])
    regenerated = rig.ask(history[:5], temperature=1.0, seed=3, top_k=4)
    edited = rig.ask([*history[:2], user("of a ship"), *history[3:4], user("of an island")])
    changed = [*history[:3], assistant(f"{history[3]['content'][:4]}?"), user("go on")]
    assert len({each.name for each in (answers[0], regenerated, edited, rig.ask(changed))}) == 4
    assert rig.ask(changed).cached >= len(ids_of(changed[:3])) // kit.BLOCK_TOKENS * kit.BLOCK_TOKENS
    first = rig.ask([*history, user("the end")])
    other = rig.ask([*history[:5], assistant(regenerated.text), user("the end")])
    assert (first.name, other.name) == (answers[0].name, regenerated.name)
    assert other.prompt == ids_of([*history[:5], assistant(regenerated.text), user("the end")])
    assert other.cached > len(regenerated.prompt)


def test_a_conversation_that_is_busy_is_forked_and_refused_by_name(rig):
    history, [first] = rig.talk(["two roads"])
    running = first.session.submit([user("one")])
    assert rig.ask([*history, user("the other")]).name != first.name
    assert running.done or running.output_ids
    while not running.done:
        with pytest.raises(SessionBusyError):
            rig.ask("the other", first.name)
        rig.engine.step()


def test_what_was_dropped_by_hand_is_not_missing_from_a_whole_history(rig):
    history, [answer] = rig.talk(["one two three four five six"])
    answer.session.discard(range(4, 24))
    anew = rig.ask([*history, user("seven")])
    assert anew.name != answer.name
    assert anew.prompt == ids_of([*history, user("seven")])


def long_talk(rig, num_turns=7):
    return rig.talk([f"turn {number} " + "tell me more of it " * 2 for number in range(num_turns)])


@pytest.mark.parametrize("num_turns", [4, 7, 12])
def test_a_history_longer_than_the_window_is_cut_alike_whether_it_is_known_or_not(rig, num_turns):
    history, answers = long_talk(rig, num_turns)
    asked = [*history, user("so?")]
    told = rig.ask(asked, is_known=False)
    known = rig.ask(asked)
    assert (known.name, known.prompt) == (answers[-1].name, told.prompt)
    assert known.cached > 100, "its KV is used"
    assert known.session.conversation.num_dropped == told.session.conversation.num_dropped > 0
    again = rig.ask(history[:-1])
    assert again.name != known.name, "to regenerate an answer is another conversation"
    assert again.prompt == answers[-1].prompt
    early = rig.ask([*history[:4], user("another way")])
    assert early.prompt == ids_of([*history[:4], user("another way")]), "a branch has what has left since"
    assert rig.ask(asked, may_drop=False, is_known=True).name != known.name


def test_a_history_does_not_find_what_was_cut_in_a_way_that_it_does_not_tell():
    with kit.small_engine(context_window=WINDOW, overflow=OverflowConfig(whole_turns=True)) as engine:
        rig = Rig(engine)
        history, answers = long_talk(rig)
        assert answers[-1].session.conversation.num_dropped > 0
        assert rig.ask([*history, user("so?")]).name not in {each.name for each in answers}


def test_two_who_said_the_same_do_not_meet_by_name(rig):
    history, [first] = rig.talk(["hello"])
    other = rig.ask([*history, user("mine:"), user("NAME")])
    assert other.name == first.name, "it said all of it"
    for state in (None, "of before"):
        with pytest.raises(SessionMovedError):
            rig.ask("and mine", first.name, state)
    mine = rig.ask([*history, user("and mine")])
    assert mine.name != first.name
    assert "NAME" not in mine.prompt_text
    assert rig.ask("on", first.name, other.state).name == first.name


def test_one_who_goes_on_by_name_is_not_disturbed_by_who_sends_the_history(rig):
    history, [first] = rig.talk(["hello there"])
    second = rig.ask("and on", first.name)
    other = rig.ask([*history, user("and on"), assistant(second.text), user("mine: NAME")])
    assert other.name != first.name
    assert other.cached > 0
    third = rig.ask("further", first.name)
    assert third.name == first.name
    assert "NAME" not in third.prompt_text


def test_open_and_known_conversations_are_bounded_and_the_least_recently_used_leave(tmp_path):
    with kit.small_engine(context_window=WINDOW, store=ssd_store(tmp_path)) as engine:
        rig = Rig(engine, max_open_sessions=2)
        held = [rig.talk([f"number {number}"], tenant="few") for number in range(rig.router.max_known + 2)]
        assert len(engine.sessions) == 2
        assert len(rig.router._states) == 2 * rig.router.max_known == 64, "each by its chain and its last exchange"
        rig.talk(["of another"], tenant="other")
        names = [answers[0].name for _, answers in held]
        for number, is_known in ((0, False), (5, True), (-1, True)):
            followed = rig.ask([*held[number][0], user("more")], tenant="few")
            assert (followed.name == names[number]) == is_known
        oldest = client_name("few", names[0])
        assert rig.router.look("few", oldest).chain == held[0][1][0].state
        assert engine.opened(names[0], tenant="few") is None, "who looks opens nothing"
        assert rig.router.look("other", oldest) is None
        with pytest.raises(InvalidRequestError, match=f"not taken, got '{oldest}'"):
            rig.router.begin("few", oldest)
        history = [*held[-1][0], user("more"), assistant(followed.text), user("on")]
        rig.router.forget("few", engine_name("few", client_name("few", followed.name)))
        anew = rig.ask(history, tenant="few")
        assert anew.name != followed.name, "it is forgotten"
        rig.router.let_go([anew.session])
        assert engine.opened(anew.name, tenant="few") is None
        assert rig.ask([*history, assistant(anew.text), user("on")], tenant="few").name != anew.name


@pytest.mark.parametrize(("num_chars", "is_much"), [(3299, False), (3300, True)])
def test_a_hundred_characters_count_for_one_and_a_message_for_32_until_it_is_much_to_hash(rig, num_chars, is_much):
    asked = [{**user("x" * (num_chars - 900)), "context": ["x" * 900, [1] * 900]}, *[assistant("")] * 125, user("")]
    with pytest.raises(TextWork) if is_much else contextlib.nullcontext():
        rig.router.by_history("", asked, Texts())


def test_what_was_gone_on_with_by_its_history_is_moved_for_another_router_too(tmp_path):
    with kit.small_engine(context_window=WINDOW, store=ssd_store(tmp_path)) as engine:
        rig = Rig(engine)
        shared, [first] = rig.talk(["hello"])
        shared.append(user("mine: NAME"))
        shared.append(assistant(rig.ask(shared).text))
    reopened = kit.small_engine(context_window=WINDOW, store=ssd_store(tmp_path))
    with reopened as engine:
        router = Rig(engine).router
        with pytest.raises(SessionMovedError):
            router.by_id("", first.name, [user("and mine")], Texts())
        router.learn("", first.name[:1] + first.name[1:], engine)  # Another object, as of a list.
        router.learn("", "nobody", engine)
        found = router.by_history("", [*shared, user("and on")], Texts())
        assert (found.session.session_id, found.reached) == (first.name, "history")


# Whatever several clients do, a prompt is what its own client has said.


ANSWER = {"max_tokens": 2, "logit_bias": ((ord("x"), 100.0),)}  # All get the same: only texts differ.
VISIBLE = st.sampled_from(["a", "b", "c" * 150])  # What several clients may say alike; some of it overflows soon.
CONTEXTS = st.none() | st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=2)
OPERATIONS = st.tuples(
    st.sampled_from(["say", "say", "say", "name", "edit", "bare", "steal", "drop"]),
    st.integers(0, 2),
    VISIBLE,
    CONTEXTS,
    st.integers(0, 5),
)


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
        given = [list(chunk.encode()) if ids else chunk for chunk, (_, ids) in zip(chunks, context, strict=True)]
        return {**user(text), "context": given}


def letters(text):
    return {letter for letter in text if letter.isupper()}


def documents(messages):
    chunks = [chunk for message in messages for chunk in message.get("context", [])]
    return letters("".join(chunk if isinstance(chunk, str) else bytes(chunk).decode() for chunk in chunks))


def without_context(history):
    return [{"role": each["role"], "content": each["content"]} for each in history]


@pytest.mark.parametrize("num_examples", [12, pytest.param(200, marks=pytest.mark.slow)], ids=["short", "long"])
def test_a_prompt_holds_its_own_clients_text_alone(engine, num_examples):
    run = given(operations=st.lists(OPERATIONS, min_size=4, max_size=14))(lambda operations: act(engine, operations))
    settings(max_examples=num_examples, deadline=None)(run)()


def act(engine, operations):
    """Has three clients of a tenant do these, and looks at each prompt."""
    rig, clients = Rig(engine, 32), [Client(number) for number in range(3)]
    for what, who, text, context, place in operations:
        client = clients[who]
        if what == "drop":
            session = engine.find_session(client.name) if client.name else None
            if session is not None and len(session.token_ids) > 12:
                session.discard([place + 4])
            continue
        if what == "name" and client.name:
            with contextlib.suppress(SessionMovedError):
                message = client.message(text, context)
                found = rig.ask([message], client.name, **ANSWER)
                client.by_name.append(message)
                assert letters(found.prompt_text) <= documents(client.by_name)
            continue
        if what == "edit":
            client.history = client.history[: 2 * (place % (1 + len(client.history) // 2))]
        if what == "bare":  # It forgets what it had asked over: a history of another conversation.
            client.history = without_context(client.history)
        if what == "steal":  # It says what others have said, as far as it has seen that.
            client.history = without_context(clients[place % 3].history)
        client.history.append(client.message(text, context))
        found = rig.ask(client.history, **ANSWER)
        assert letters(found.prompt_text) <= documents(client.history), "somebody else's, or not said this time"
        alone = engine.session().submit(list(client.history), sampling=SamplingParams(**ANSWER))
        assert found.prompt == alone.prompt_ids, "the request alone says what the prompt is"
        engine.cancel(alone)
        client.name, client.by_name = found.name, list(client.history)
        client.history.append(assistant("xx"))
    for session in engine.sessions:
        session.close()
