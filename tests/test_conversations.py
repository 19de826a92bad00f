"""Conversations as bytes, which come back as they went in; and as they grow, are rewound and lose tokens."""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ca_jax.turns.conversations import OTHERWISE, Conversation, as_messages, chain_of


def numbers(values: list, dtype: str) -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


GOOD = {
    "format": 6,
    "token_ids": numbers([1, 2, 3], "<i4"),
    "messages": [{"role": "user", "content": "hi"}],
    "turn_starts": [[0, 0]],
    "num_dropped": 5,
    "lineage": 4,
    "attention": numbers([0.5, 0.25], "<f4"),
    "num_to_repair": 2,
    "to_drift": [2, 1],
    "num_slid": 1,
    "chain": "0123abcd",
    "states": [["0123abcd", 3]],
    "cut_by": "a rule",
    "reached": "name",
    "generation": 7,
}
ADAPTED = {**GOOD, "format": 7, "adapter": "pirate", "adapter_weights": "00ff"}
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
    rest=st.fixed_dictionaries(
        {
            **dict.fromkeys(("num_dropped", "lineage", "num_slid"), INT32),
            "attention": st.lists(st.floats(0, 2**20, width=32)),
        }
    ),
)
@example(token_ids=[], messages=[], turn_starts=[], rest={})
@example(token_ids=[7], messages=[{"role": "user", "content": "\ud800 \x00 é 漢 🙂"}], turn_starts=[(0, 0)], rest={})
def test_it_comes_back_as_it_was(token_ids, messages, turn_starts, rest):
    conversation = Conversation(token_ids=token_ids, messages=messages, turn_starts=turn_starts, **rest)
    assert Conversation.from_bytes(conversation.to_bytes()) == conversation


def of_older_format(number, **changes):
    newer = ("states", "cut_by", "reached", *(["generation"] if number == 3 else []))
    older = {name: value for name, value in GOOD.items() if name not in newer} | {"format": number}
    return Conversation.from_bytes(packed(older | changes))


@pytest.mark.parametrize("number", [3, 4])
def test_one_of_an_older_format_is_found_by_no_history_and_goes_on_by_name(number):
    """Its chain leaves contexts out: one that has any may not be taken for one that has none."""
    hi = {"role": "user", "content": "hi"}
    plain = of_older_format(number, num_dropped=0, chain=chain_of([hi]))
    assert (plain.chain, plain.states, plain.cut_by) == (chain_of([hi]), [], "")
    with_context = {**hi, "content": "a document\n\nhi"}
    for other in (
        of_older_format(number, num_dropped=0, chain=chain_of([hi]), messages=[with_context]),
        of_older_format(number),
    ):
        assert other.chain not in (chain_of([hi]), chain_of([with_context]), GOOD["chain"])
        assert (other.states, other.token_ids) == ([], [1, 2, 3])


@given(st.binary(max_size=60))
@example(b"")
@example(zlib.compress(b""))
@example(zlib.compress(b"\xff\xfe\x00"))
@example(packed(GOOD)[:-3])
@example(zlib.compress(b"[" * 100_000))
@example(packed([]))
@example(packed(None))
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever they are
        Conversation.from_bytes(data)


@given(field=st.sampled_from([*GOOD]), value=JSON)
@example(field="token_ids", value=[float("inf")])
@example(field="messages", value=[{"role": "user", "content": "", "context": [None]}])
@example(field="turn_starts", value=[[1, 2, 3]])
@example(field="num_to_repair", value=float("inf"))
def test_fields_that_are_not_what_they_should_be_are_refused_or_come_out_well_formed(field, value):
    try:
        found = Conversation.from_bytes(packed({**GOOD, field: value}))
    except ValueError:
        return
    assert all(type(message[name]) is str for message in found.messages for name in ("role", "content"))
    starts = [number for start in found.turn_starts for number in start]
    numbers_of_it = (found.num_dropped, found.lineage, found.num_to_repair, *found.to_drift)
    assert all(type(number) is int for number in (*found.token_ids, *starts, *numbers_of_it))
    assert all(type(received) is float for received in found.attention)


def test_what_a_server_keeps_with_one_stays_with_it_and_no_fork_has_it():
    begun = Conversation.begin().with_turn([1, 2, 3], [{"role": "user", "content": "a"}], "b")
    noted = dataclasses.replace(begun, kept='{"metadata": {}}')
    added = noted.added_to(begun)
    assert added is not None
    for each in (Conversation.from_bytes(noted.to_bytes()), Conversation.from_bytes(begun.to_bytes() + added)):
        assert each.kept == noted.kept
    assert noted.take(2).kept == noted.cut(np.arange(3) < 1).kept == noted.kept
    assert noted.forked(3).kept == Conversation.from_bytes(begun.to_bytes()).kept == ""


def test_every_field_is_among_the_bytes_and_one_that_is_missing_or_of_another_version_is_named():
    others = {"stem", "borrowed", "responses", "kept"}  # Those of one that has these are held against themselves below.
    assert {field.name for field in dataclasses.fields(Conversation)} - others == ADAPTED.keys() - {"format"}
    adapted = Conversation.from_bytes(packed(ADAPTED))
    assert (adapted.adapter, adapted.adapter_weights) == ("pirate", "00ff")
    for missing in ("adapter", "adapter_weights"):
        with pytest.raises(ValueError, match=missing):
            Conversation.from_bytes(packed({name: value for name, value in ADAPTED.items() if name != missing}))
    found = Conversation.from_bytes(packed(GOOD))
    assert (found.token_ids, found.attention) == ([1, 2, 3], [0.5, 0.25])
    assert (found.turn_starts, found.states) == ([(0, 0)], [("0123abcd", 3)])
    as_written = {*GOOD} - {"format", "token_ids", "attention", "turn_starts", "states"}
    assert {name: getattr(found, name) for name in as_written} == {name: GOOD[name] for name in as_written}
    for missing in GOOD.keys() - {"generation"}:
        with pytest.raises(ValueError, match=missing):
            Conversation.from_bytes(packed({name: value for name, value in GOOD.items() if name != missing}))
    with pytest.raises(ValueError, match="format 6, got 1"):
        Conversation.from_bytes(packed({**GOOD, "format": 1}))
    older = {**GOOD, "format": 5, "positions": ""}
    assert Conversation.from_bytes(packed(older)) == found
    with pytest.raises(ValueError, match="truncated naively"):
        Conversation.from_bytes(packed({**older, "positions": numbers([0, 6, 7], "<i4")}))


def test_what_is_kept_of_a_conversation_without_adapter_is_as_it_was_before_there_were_any():
    told = json.loads(zlib.decompress(Conversation.begin([SYSTEM]).to_bytes()))
    assert told["format"] == 6
    assert {*told} == {*GOOD, "behind"}
    assert Conversation.begin([SYSTEM]).chain == chain_of([SYSTEM])


def test_an_adapter_stays_with_a_conversation_and_tells_its_chain_from_others():
    begun = [Conversation.begin([SYSTEM], adapter=name, adapter_weights=of) for name, of in (("a", "0"), ("a", "1"))]
    assert len({each.chain for each in (*begun, Conversation.begin([SYSTEM]))}) == 3
    said = begun[0].with_turn([1, 2, 3], as_messages("hi"), "ho")
    for each in (said, said.cut(np.array([True, False, False])), said.forked(2), said.take(0), said.slid(1)):
        assert (each.adapter, each.adapter_weights) == ("a", "0")
        assert Conversation.from_bytes(each.to_bytes()) == each
    assert said.take(0).chain == begun[0].chain


def test_a_response_leaves_with_its_turn_unless_another_stands_on_it():
    conversation, hi = Conversation.begin([SYSTEM]), as_messages("hi")
    for number, note in enumerate([("a", "1"), None, ("b", "2"), ("c", "3")], 1):
        conversation = conversation.with_turn(list(range(4 * number)), hi, f"answer {number}", note=note)
    assert [name for name, _, _ in conversation.responses] == ["a", "b", "c"]
    assert conversation.forked(16).responses == conversation.cut(np.arange(16) < 4).responses == []
    assert [name for name, _, _ in conversation.take(12).responses] == ["a", "b"]
    middle = conversation.without_response("b", takes_turn=True)
    assert len(middle.token_ids) == 16
    assert [kept for _, _, kept in middle.responses] == ["1", "", "3"]
    ended = middle.without_response("c", takes_turn=True)
    assert (len(ended.token_ids), ended.messages[-1]["content"]) == (8, "answer 2"), "a turn that was no response stays"
    assert [name for name, _, _ in ended.responses] == ["a"]
    assert len(middle.without_response("c", takes_turn=False).token_ids) == 16
    alone = Conversation.begin([SYSTEM]).with_turn([1, 2], hi, "ho", note=("a", "1"))
    assert alone.without_response("a", takes_turn=True).token_ids == []


def grown(conversation: Conversation, data) -> Conversation:
    """After something that may happen to a conversation."""
    num_tokens = len(conversation.token_ids)
    change = data.draw(
        st.sampled_from(["turn", "turn", "turn", "slid", "stored anew", "repair", "cut", "take", "without"])
    )
    if change == "turn":
        ids = [*conversation.token_ids, *data.draw(st.lists(INT32, max_size=5))]
        user, answer = data.draw(st.text(max_size=5)), data.draw(st.text(max_size=5))
        note = data.draw(st.none() | st.tuples(st.sampled_from("abc"), st.text(min_size=1, max_size=5)))
        return conversation.with_turn(ids, as_messages(user), answer, note=note)
    if change == "cut":
        gone = np.array(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), bool)
        return conversation.cut(gone)
    number = data.draw(st.integers(0, num_tokens))
    changes = {
        "slid": lambda: conversation.slid(number),
        "stored anew": lambda: conversation.stored_anew(number),
        "repair": lambda: conversation.with_repair(number, drifts=True),
        "take": lambda: conversation.take(number),
        "without": lambda: conversation.without_response("a", takes_turn=bool(number % 2)),
    }
    return changes[change]()


@given(data=st.data())
def test_with_what_was_added_behind_it_it_is_what_it_has_become(data):
    conversation = Conversation.begin([SYSTEM])
    before, note = conversation, conversation.to_bytes()
    for _ in range(data.draw(st.integers(1, 8))):
        generation = conversation.generation
        conversation = grown(conversation, data)
        assert conversation.generation >= generation
        if data.draw(st.booleans()):
            added = conversation.added_to(before)
            before, note = conversation, conversation.to_bytes() if added is None else note + added
        found = Conversation.from_bytes(note)
        assert (found, found.generation) == (before, before.generation)


def test_what_is_added_is_as_large_as_what_is_new_and_of_one_state_alone():
    before = of_turns(*[10] * 200)
    after = before.with_turn([*before.token_ids, *range(10)], as_messages("a message"), "an answer")
    assert len(after.added_to(before)) < 1000 < len(before.to_bytes())
    assert before.added_to(before.cut(mask(2000, 3))) is None
    assert before.added_to(after) is None
    other = before.with_turn(before.token_ids, as_messages("a message"), "", attention=np.ones(2000))
    assert other.added_to(before) is None, "attention changes for all tokens"
    with pytest.raises(ValueError, match="must come behind"):
        Conversation.from_bytes(of_turns(10).to_bytes() + after.added_to(before))
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        Conversation.from_bytes(before.to_bytes() + after.added_to(before)[:-9])


# As it grows, is rewound, and loses tokens.


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"message {number}"}, {"role": "assistant", "content": f"answer {number}"}]


SYSTEM = {"role": "system", "content": "be kind"}


def of_turns(*num_tokens: int, system: bool = True) -> Conversation:
    """A conversation of turns of so many tokens; its token ids count on."""
    conversation = Conversation.begin([SYSTEM] if system else [])
    for number, count in enumerate(num_tokens):
        ids = list(range(len(conversation.token_ids) + count))
        user, answer = (message["content"] for message in said(number))
        conversation = conversation.with_turn(ids, as_messages(user), answer)
    return conversation


def mask(num_tokens: int, *gone: int) -> np.ndarray:
    out = np.zeros(num_tokens, bool)
    out[list(gone)] = True
    return out


def messages_of(*numbers: int) -> list[dict[str, str]]:
    return [SYSTEM, *(message for number in numbers for message in said(number))]


@pytest.mark.parametrize(
    ("num_tokens", "turns"),
    [(0, ()), (1, (0,)), (10, (0,)), (11, (0, 1)), (60, (0, 1, 2))],
)
def test_what_is_taken_has_the_messages_of_its_turns(num_tokens, turns):
    whole = dataclasses.replace(
        of_turns(10, 20, 30),
        lineage=5,
        attention=[1.0] * 60,
        num_to_repair=25,
        to_drift=[20, 25],
    )
    taken = whole.take(num_tokens)
    is_whole = num_tokens in (0, 10, 30, 60)
    assert (taken.chain == chain_of(messages_of(*turns))) == is_whole
    assert taken == Conversation(
        chain=taken.chain,
        states=[state for state in whole.states if state[1] <= num_tokens],
        token_ids=list(range(num_tokens)),
        messages=messages_of(*turns),
        turn_starts=[((0, 10, 30)[turn], 1 + 2 * turn) for turn in turns],
        lineage=5,
        attention=[1.0] * num_tokens,
        num_to_repair=min(25, num_tokens),
        to_drift=[min(20, num_tokens), min(25, num_tokens)] if num_tokens else [],
    )


def test_a_chain_names_all_that_was_said_with_its_contexts():
    whole = of_turns(10, 20, 30)
    assert whole.chain == chain_of(messages_of(0, 1, 2)) == chain_of(messages_of(0, 1, 2)[1:], chain_of([SYSTEM]))
    assert whole.cut(mask(60, *range(35))).chain == whole.chain, "what has left was said all the same"
    asked, told = said(3)
    contexts = (["a", "b"], ["b", "a"], ["ab"], [[97], "b"], ["[97]", "b"], [[97, 98]], [[9, 7, 98]], ["a", "b", ""])
    chains = {chain_of(messages_of(0, 1, 2, 3))}
    for context in contexts:
        after = whole.with_turn(list(range(70)), [{**asked, "context": context}], told["content"])
        assert Conversation.from_bytes(after.to_bytes()) == after
        assert after.chain == chain_of([*messages_of(0, 1, 2), {**asked, "context": context}, told])
        chains.add(after.chain)
    chains.add(whole.with_turn(list(range(70)), [asked], told["content"], given_ids=[60, 61]).chain)
    assert len(chains) == len(contexts) + 2
    others = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert len({chain_of(each) for each in (others, others[:1], others[::-1], [], [{**others[0], "role": "x"}])}) == 5


def test_states_are_those_since_tokens_left_and_a_rule_is_that_of_every_cut():
    whole = of_turns(10, 20, 30)
    assert [num_tokens for _, num_tokens in whole.states] == [10, 30, 60]
    cut = whole.cut(mask(60, *range(4, 14)), by="a rule")
    assert (cut.states, cut.cut_by) == ([], "a rule")
    more = cut.with_turn([*cut.token_ids, 1], as_messages("on"), "so")
    assert more.states == [(more.chain, 51)]
    assert more.cut(mask(51, 5), by="a rule").cut_by == "a rule"
    assert more.cut(mask(51, 5)).cut_by == more.cut(mask(51, 5)).cut(mask(50, 5), by="a rule").cut_by == OTHERWISE
    left = more.take(20)
    assert left.chain not in (chain_of(left.messages), more.chain), "what left is not what its messages say"


@pytest.mark.parametrize(
    ("gone", "turns", "starts"),
    [
        (range(0), (0, 1, 2), [0, 10, 30]),
        (range(4, 10), (1, 2), [4, 24]),  # What is left of the first turn is before what left.
        (range(9), (0, 1, 2), [0, 1, 21]),
        (range(4, 30), (2,), [4]),
        (range(12, 30), (0, 2), [0, 12]),  # The first turn is whole, though it is before what left.
        (range(30, 60), (0, 1), [0, 10]),
        ([0, 10, 30, 59], (0, 1, 2), [0, 9, 28]),
        (range(60), (), []),
        ([*range(2, 10), *range(30, 60)], (1,), [2]),
    ],
)
def test_a_turn_that_left_takes_its_messages_with_it(gone, turns, starts):
    whole = of_turns(10, 20, 30)
    left = whole.cut(mask(60, *gone))
    assert left.token_ids == [token for token in range(60) if token not in gone]
    assert left.messages == messages_of(*turns)
    assert left.turn_starts == [(start, 1 + 2 * index) for index, start in enumerate(starts)]
    assert left.num_dropped == len(gone)
    assert whole == of_turns(10, 20, 30)


@pytest.mark.parametrize(
    ("gone", "others", "lineage"),
    [
        ((4, 5), None, 2),
        ((8, 9), None, 0),  # The last ones: what is left has not seen them.
        ((4, 9), None, 1),
        ((9,), (0, 1), 3),
        ((), (4,), 0),
    ],
)
def test_lineage_counts_what_left_before_others_that_stay(gone, others, lineage):
    of_turn = None if others is None else mask(5, *others)
    left = dataclasses.replace(of_turns(10), num_dropped=20, lineage=11).cut(mask(10, *gone), others=of_turn)
    assert left.lineage == 11 + lineage
    assert left.num_dropped == 20 + len(gone) + len(others or ())
    assert left.token_ids == [token for token in range(10) if token not in gone]


@given(data=st.data())
def test_two_cuts_are_one(data):
    first = np.array(data.draw(st.lists(st.booleans(), min_size=60, max_size=60)))
    num_left = int((~first).sum())
    second = np.array(data.draw(st.lists(st.booleans(), min_size=num_left, max_size=num_left)), bool)
    whole = dataclasses.replace(
        of_turns(10, 20, 30), attention=list(map(float, range(60))), num_to_repair=40, to_drift=[20, 40]
    )
    twice, both = whole.cut(first).cut(second), first.copy()
    both[np.flatnonzero(~first)[second]] = True
    once = whole.cut(both)
    for field in ("token_ids", "num_dropped", "attention", "num_to_repair", "to_drift"):
        assert getattr(twice, field) == getattr(once, field)
    assert [start for start, _ in twice.turn_starts] == sorted(start for start, _ in twice.turn_starts)
    assert all(start < len(twice.token_ids) for start, _ in twice.turn_starts)
    assert len(twice.messages) == 1 + 2 * len(twice.turn_starts)
