"""Encoding, decoding, and decoding piece by piece."""

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers
from tokenizers.models import BPE

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.testing import tiny


def byte_level() -> Tokenizer:
    """A token is a byte, and one added token is text that the byte alphabet cannot spell."""
    backend = tiny.byte_tokenizer()
    backend.add_tokens(["un deux ½"])
    return Tokenizer(backend, bos_id=tiny.END_OF_TEXT_ID, eos_id=tiny.IM_END_ID)


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: words that begin with ▁, bytes for what has no token, specials, one leading space off."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "a", "é", "▁中", "."]
    backend = tokenizers.Tokenizer(BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, bos_id=1, eos_id=2)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()


BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


@pytest.mark.parametrize("kind", [BPE, tokenizers.models.Unigram, tokenizers.models.WordLevel])
def test_no_cache_is_kept_of_words(kind, monkeypatch):
    """Tenants share a tokenizer: what one has said must not make another's request faster."""
    sizes = []
    if hasattr(kind, "_resize_cache"):
        monkeypatch.setattr(kind, "_resize_cache", lambda self, size: sizes.append(size))
    Tokenizer(tokenizers.Tokenizer(kind()))
    assert sizes == ([] if kind is tokenizers.models.WordLevel else [0])


def test_special_tokens_are_single_tokens_and_left_out_of_text_unless_wanted():
    ids = [tiny.IM_START_ID, ord("h"), tiny.IM_END_ID]
    assert BYTE_LEVEL.encode("<|im_start|>h<|im_end|>") == ids
    assert BYTE_LEVEL.decode(ids) == "h"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "<|im_start|>h<|im_end|>"
    assert BYTE_LEVEL.special_ids == {tiny.END_OF_TEXT_ID, tiny.IM_START_ID, tiny.IM_END_ID}


def test_bos_is_added_when_asked_for_or_wanted_by_the_model():
    assert BYTE_LEVEL.encode("h") == [ord("h")]
    assert BYTE_LEVEL.encode("h", add_bos=True) == [tiny.END_OF_TEXT_ID, ord("h")]
    eager = Tokenizer(tiny.byte_tokenizer(), bos_id=tiny.END_OF_TEXT_ID, add_bos=True)
    assert eager.encode("h") == [tiny.END_OF_TEXT_ID, ord("h")]
    assert eager.encode("") == [tiny.END_OF_TEXT_ID]
    assert eager.encode("h", add_bos=False) == [ord("h")]
    with pytest.raises(ValueError, match="got one without"):
        Tokenizer(tiny.byte_tokenizer()).encode("h", add_bos=True)


def test_truncation_and_padding_that_came_with_the_file_are_off():
    backend = tiny.byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    assert Tokenizer(backend).encode("seventh") == list(b"seventh")
    assert Tokenizer(backend).encode("ab") == list(b"ab")


def test_vocab_size_counts_added_tokens():
    assert BYTE_LEVEL.vocab_size == 257
    assert BYTE_LEVEL.token_id("un deux ½") == 256
    assert BYTE_LEVEL.token_id("trois") is None


def test_usual_stop_tokens_are_found_where_they_are_special():
    assert BYTE_LEVEL.usual_stop_ids() == {tiny.IM_END_ID}
    assert BYTE_FALLBACK.usual_stop_ids() == set()
    backend = tiny.byte_tokenizer()
    backend.add_tokens(["<|eot_id|>"])
    assert Tokenizer(backend).usual_stop_ids() == {tiny.IM_END_ID}, "<|eot_id|> is plain text here"


# What is said


def sentencepiece() -> Tokenizer:
    """As Llama 2's: each stretch between special tokens begins with a space of its own; one that takes blanks along."""
    backend = byte_fallback().backend
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True, normalized=False)])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return Tokenizer(backend)


def unigram() -> Tokenizer:
    """A vocabulary that has its special tokens as likely words, which no setting of the library keeps from text."""
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -5.0) for char in "<s/>a b")]
    backend = tokenizers.Tokenizer(models.Unigram(words, 0))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


SAID = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_", "end|>", "<s>", "</s>", "<|end|>", "<think>", "<", "a", " ", "\n"])
)


@pytest.mark.parametrize("make", [byte_level, byte_fallback, sentencepiece], ids=lambda make: make.__name__)
@hypothesis.given(said=SAID.map("".join), others=SAID.map("".join))
@hypothesis.settings(max_examples=100, deadline=None)
def test_what_is_said_is_text_and_what_a_template_writes_is_not(make, said, others):
    """Against the library's own way, which is for a whole tokenizer and all that it reads."""
    tokenizer = make()
    plain = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    plain.encode_special_tokens = True
    assert tokenizer.encode_content(said) == plain.encode(said, add_special_tokens=False).ids
    names = sorted(tokenizer.special_ids)
    begin, end = (tokenizer.backend.id_to_token(token_id) for token_id in (names[0], names[-1]))
    messages = [tokenizer.said({"content": text})["content"] for text in (said, others)]
    found = tokenizer.encode_said(f"{begin}{messages[0]}{messages[1]}{end}{messages[1]}")
    assert [token for token in found if token in tokenizer.special_ids] == [names[0], names[-1]]
    harmless = (said + others).replace("<", "").replace(">", "")
    text = f"{begin}{tokenizer.said({'content': harmless})['content']}{end}"
    assert tokenizer.encode_said(text) == tokenizer.encode(f"{begin}{harmless}{end}", add_bos=False)


def test_a_word_that_is_spelled_like_a_special_token_is_its_characters():
    tokenizer = unigram()
    assert tokenizer.encode("a<s>") == [tokenizer.token_id("a"), 1]
    assert tokenizer.decode(tokenizer.encode_content("a<s>b</s>"), False).replace(" ", "") == "a<s>b</s>"
    assert not {1, 2} & set(tokenizer.encode_content("a<s>b</s>"))


def test_a_special_token_that_is_found_in_normalised_text_is_text_too():
    backend = tiny.byte_tokenizer()
    backend.normalizer = normalizers.NFKC()
    backend.add_special_tokens([tokenizers.AddedToken("<stop>", normalized=True)])
    tokenizer = Tokenizer(backend)
    stop = tokenizer.token_id("<stop>")
    assert tokenizer.encode("a\uff1cstop\uff1e") == [ord("a"), stop]
    assert stop not in tokenizer.encode_content("a\uff1cstop\uff1e")
    assert tokenizer.encode_said("<stop>" + tokenizer.said({"content": "\uff1cstop\uff1e"})["content"]).count(stop) == 1


def test_one_that_reads_content_makes_special_tokens_of_it():
    reading = BYTE_LEVEL.reading_content()
    assert reading.encode_content("<|im_end|>") == [tiny.IM_END_ID] != BYTE_LEVEL.encode_content("<|im_end|>")
    assert reading.encode_said(reading.said({"content": "<|im_end|>"})["content"]) == [tiny.IM_END_ID]


# Tokens


@hypothesis.given(st.text(max_size=12))
@hypothesis.settings(max_examples=30, deadline=None)
def test_the_bytes_of_tokens_together_are_those_of_the_text_which_comes_back(text):
    assert b"".join(BYTE_LEVEL.token_bytes(i) for i in BYTE_LEVEL.encode(text)) == text.encode()
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text


def test_a_token_has_its_bytes_though_they_are_no_character():
    assert [BYTE_LEVEL.token_bytes(i) for i in range(0xFD)] == [bytes([i]) for i in range(0xFD)]
    assert [BYTE_FALLBACK.token_bytes(3 + i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert (BYTE_LEVEL.token_text(0xE4), BYTE_FALLBACK.token_text(3 + 0xE4)) == ("\ufffd", "\ufffd")
    assert (BYTE_LEVEL.token_text(0x41), BYTE_FALLBACK.token_text(3 + 0x41)) == ("A", "A")


def test_a_token_has_the_text_that_it_adds_behind_others():
    words = {"▁": " ", "▁a": " a", "a": "a", "é": "é", "▁中": " 中", ".": "."}
    for token, text in words.items():
        token_id = BYTE_FALLBACK.token_id(token)
        assert BYTE_FALLBACK.token_text(token_id) == text
        assert BYTE_FALLBACK.token_bytes(token_id) == text.encode()
        behind = BYTE_FALLBACK.decode([BYTE_FALLBACK.token_id("."), token_id])
        assert behind == "." + text
    assert (BYTE_LEVEL.token_text(256), BYTE_LEVEL.token_bytes(256)) == ("un deux ½", "un deux ½".encode())


@BOTH
def test_a_special_token_has_its_name_and_an_unknown_id_nothing(tokenizer):
    for token_id in tokenizer.special_ids:
        name = tokenizer.backend.id_to_token(token_id)
        assert (tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)) == (name, name.encode())
    assert (tokenizer.token_text(100_000), tokenizer.token_bytes(100_000)) == ("", None)


def test_bytes_that_a_decoder_does_not_tell_are_not_made_up():
    backend = tiny.byte_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    hidden = Tokenizer(backend)
    assert (hidden.token_bytes(0xC3), hidden.token_text(0xC3)) == (None, "\ufffd")
    assert (hidden.token_bytes(0x41), hidden.token_text(0x41)) == (b"A", "A")


# Streams


def flatten(lists):
    return [i for each in lists for i in each]


def ids_with_text():
    """Random ids, bytes and beyond the vocabulary included, and ids of real text, in any mixture."""
    text = st.text(alphabet="aé½世👩 \n\ufffd", max_size=6).map(lambda text: list(text.encode()))
    return st.lists(st.one_of(text, st.lists(st.integers(0, 300), max_size=6)), max_size=8).map(flatten)


@BOTH
@hypothesis.given(ids=ids_with_text())
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.example([0xE4])
@hypothesis.example([0xE4, tiny.IM_END_ID, 0xB8, 0xAD])
@hypothesis.example([0xF0, 0x9F, 0xF0, 0x9F, 0x91, 0xA9])
@hypothesis.example([256, 0xC3, 256])
@hypothesis.example([*BYTE_LEVEL.special_ids, 100_000])
@hypothesis.example([259, 260, 259, 261])
@hypothesis.example([3 + 0xE4, 2, 3 + 0xB8, 3 + 0xAD, 264])
@hypothesis.example([260, 3 + 0xE4, 3 + 0xB8, 3 + 0xAD, 3 + 0xFF, 260])
@hypothesis.example([259, 259, 3 + 0x20, 259])
def test_pieces_of_a_stream_are_the_whole_text(tokenizer, ids):
    stream, other = tokenizer.stream(), tokenizer.stream()
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)
    assert (stream.flush(), other.flush()) == ("", ""), "streams of one tokenizer are apart"


@hypothesis.given(st.text(max_size=20))
@hypothesis.settings(max_examples=100, deadline=None)
def test_no_piece_holds_part_of_a_character(text):
    """Of text without U+FFFD, no piece has one, and every character is given out with its last byte."""
    hypothesis.assume("\ufffd" not in text)
    stream = BYTE_LEVEL.stream()
    for character in text:
        *first, last = character.encode()
        assert [stream.push(byte) for byte in first] == [""] * len(first)
        assert stream.push(last) == character
    assert stream.flush() == ""


def test_a_run_of_fallback_bytes_comes_with_the_token_after_it():
    stream = BYTE_FALLBACK.stream()
    assert stream.push(BYTE_FALLBACK.token_id("▁a")) == "a"
    assert [stream.push(3 + byte) for byte in "ß".encode()] == ["", ""]
    assert stream.push(BYTE_FALLBACK.token_id(".")) == "ß."


@BOTH
def test_special_tokens_are_spelled_where_that_is_asked_for(tokenizer):
    """Others are left out; what was held back of a character comes before."""
    names = sorted(tokenizer.token_text(token) for token in tokenizer.special_ids)
    stream, others = tokenizer.stream([names[0]]), names[1:]
    ids = [*tokenizer.encode("é"), tokenizer.token_id(names[0]), *tokenizer.encode("a"), tokenizer.token_id(others[0])]
    assert "".join(map(stream.push, ids)) + stream.flush() == f"é{names[0]}a".replace(" ", "")


def test_what_is_made_of_texts_is_marked_in_all_its_parts():
    spelled = {"tools": [{"name": "<|im_end|>", "parameters": {"<|im_end|>": ["<|im_end|>", 3]}}], "content": "x"}
    marked = BYTE_LEVEL.said(spelled)
    [tool] = marked["tools"]
    texts = [tool["name"], *tool["parameters"], *tool["parameters"].values()]
    assert texts[2][1] == 3
    assert all("<|im_end|>" not in text for text in (texts[0], texts[1], texts[2][0]))
    assert tiny.IM_END_ID not in BYTE_LEVEL.encode_said("".join((texts[0], texts[1], texts[2][0])))
    assert spelled["tools"][0]["name"] == "<|im_end|>"
