"""Text to token ids and back, and back piece by piece while a reply is being generated.

Not here: how a checkpoint describes its tokenizer (`gguf_tokenizer`, `huggingface`), what a conversation looks like
(`chat_template`).
"""

from __future__ import annotations

import codecs
import copy
import functools
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from ca_jax.errors import CheckpointError
from ca_jax.models.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_STOP_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A `tokenizers.Tokenizer` with what the engine needs to know about its special tokens. Threads may share it.

    Args:
      backend: does the work; its own truncation and padding are switched off.
      bos_id: the token that begins a sequence, or None.
      eos_id: the token that ends one, or None.
      add_bos: whether the model wants `bos_id` before plain text.
      chat_template: how the model wants conversations, or None where unknown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        add_bos: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        # It keeps no cache of words it has met: how fast it is would tell a client what others have said. On SmolLM2's,
        # 2 CPU cores: 0.85 ms for 1,170 tokens of new words, 0.58 ms for the same again; without it 0.70 and 0.66.
        if (resize := getattr(backend.model, "_resize_cache", None)) is not None:  # Of BPE and Unigram.
            resize(0)
        self.backend = backend
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.add_bos = add_bos
        self.chat_template = chat_template
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, t in self._added.items() if t.special)
        self._names = {self._added[i].content: i for i in self.special_ids}
        longest_first = sorted(self._names, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._mark = f"\uf8ff{secrets.randbits(64)}\uf8ff"  # Nobody can have written it, and no template changes it.
        self._reads_content = False

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, special ones included; a model may have room for more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling in the vocabulary, or None."""
        return self.backend.token_to_id(token)

    @property
    def special_names(self) -> frozenset[str]:
        """How its special tokens are spelled."""
        return frozenset(self._names)

    def usual_stop_ids(self) -> set[int]:
        """Ids of the well-known tokens that end a reply, where they are special tokens: files forget to say so."""
        ids = {self.token_id(token) for token in _STOP_TOKENS}
        return {i for i in ids if i is not None and i in self.special_ids}

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. Special tokens spelled out in it become those tokens.

        Args:
          text: any text.
          add_bos: whether to begin with `bos_id`; None does as the model wants for plain text. Text rendered by a chat
            template holds its own: pass False.

        Returns:
          Ids, possibly none.

        Raises:
          ValueError: `add_bos` is asked for and there is no such token.
        """
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if not (self.add_bos if add_bos is None else add_bos):
            return ids
        if self.bos_id is None:
            raise ValueError("add_bos must be asked of a tokenizer with a beginning-of-sequence token, got one without")
        return [self.bos_id, *ids]

    def reading_content(self) -> Tokenizer:
        """The same, for which special tokens that are spelled in what was said become those tokens, too."""
        reading = copy.copy(self)
        reading._reads_content = True
        return reading

    def said(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """What somebody said, for a chat template whose text `encode_said` reads: what it spells of special tokens is
        marked, in keys, values and in what these are made of.
        """
        if self._reads_content:
            return dict(message)
        return {key: self._said(value) for key, value in message.items()}

    def _said(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            told = {key: self._said(each) for key, each in value.items()}
            return {key if key.isidentifier() else self._marked(key): each for key, each in told.items()}
        return [self._said(each) for each in value] if isinstance(value, (list, tuple)) else value

    def encode_said(self, text: str) -> list[int]:
        """Token ids of what a chat template has made of messages that went through `said`.

        Special tokens that the template writes become those tokens; what messages spell of them is text. Where they
        spell none the ids are those of `encode`.
        """
        if self._mark not in text:
            return self.encode(text, add_bos=False)
        text = self._spelled.sub(lambda found: self._stand_in(self._names[found[0]]), text)
        return self._encode_plain(text.replace(self._mark, ""))

    def encode_content(self, text: str) -> list[int]:
        """Token ids of a text that somebody has said, alone: special tokens that it spells are text."""
        marked = text if self._reads_content else self._marked(text)
        return self.encode(text, add_bos=False) if marked is text else self._encode_plain(text)

    def _marked(self, text: str) -> str:
        """A text with a mark in each special token that it spells, and where another text could complete one.

        The same object where there is none.
        """
        marked = self._spelled.sub(lambda found: found[0][:1] + self._mark + found[0][1:], text)
        begins, ends = self._parts
        reach = range(1, 1 + min(len(text), max(map(len, self._names), default=0)))
        if any(text[:count] in ends for count in reach):
            marked = self._mark + marked
        if any(text[-count:] in begins for count in reach):
            marked += self._mark
        normalizer = self.backend.normalizer
        if marked == text and normalizer is not None and any(self._added[i].normalized for i in self.special_ids):
            marked = self._mark + text if self._spelled.search(normalizer.normalize_str(text)) else text
        return text if marked == text else marked

    @functools.cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        """What special tokens begin with, and what they end with, whole ones left out."""
        cuts = [(name[:cut], name[cut:]) for name in self._names for cut in range(1, len(name))]
        return frozenset(begin for begin, _ in cuts), frozenset(end for _, end in cuts)

    def _stand_in(self, token_id: int) -> str:
        """What stands for a special token in a text for `_plain`."""
        return f"\uf8fe{self._mark[1:-1]} {token_id}\uf8fe"

    @functools.cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The backend without special tokens, but with stand-ins for them; and the ids of both, where they differ."""
        plain = tokenizers.Tokenizer(self.backend.model)  # The same model, not a copy.
        if self.backend.normalizer is not None:
            plain.normalizer = self.backend.normalizer
        if self.backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self.backend.pre_tokenizer
        ids: dict[int, int] = {}
        for token_id, token in self._added.items():
            text = self._stand_in(token_id) if token.special else token.content
            plain.add_tokens(
                [
                    tokenizers.AddedToken(
                        text,
                        lstrip=token.lstrip,
                        rstrip=token.rstrip,
                        single_word=token.single_word,
                        normalized=token.normalized and not token.special,
                    )
                ]
            )
            if (plain_id := plain.token_to_id(text)) is not None:
                ids[plain_id] = token_id
        return plain, ids

    def _encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which only stand-ins become special tokens."""
        plain, ids = self._plain
        unknown = getattr(self.backend.model, "unk_token", None)
        found: list[int] = []
        for token_id in plain.encode(text, add_special_tokens=False).ids:
            name = plain.id_to_token(token_id) or ""
            if token_id not in ids and token_id in self.special_ids and name != unknown:
                # A word of the vocabulary that happens to be spelled like this: its characters, one by one.
                found += [token.id for character in name for token in self.backend.model.tokenize(character)]
            else:
                found.append(ids.get(token_id, token_id))
        return found

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text, a special token those of its name; no whole characters, maybe.

        They are those of a token that does not begin the text: with the space that SentencePiece's words begin with.

        Returns:
          None for an id outside the vocabulary, and where the decoder does not tell.
        """
        token = self.backend.id_to_token(token_id)
        if token is None:
            return None
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return _byte_level_bytes(token)
        text = self._token_behind_itself(token_id)
        if _BYTE_TOKEN.fullmatch(token) and text != token:
            return bytes.fromhex(token[3:5])
        return None if _REPLACEMENT in text and _REPLACEMENT not in token else text.encode()

    def token_text(self, token_id: int) -> str:
        """The text of a token alone, a special token's name; U+FFFD for bytes that are no characters by themselves."""
        known = self.token_bytes(token_id)
        return self._token_behind_itself(token_id) if known is None else known.decode(errors="replace")

    def _token_behind_itself(self, token_id: int) -> str:
        """What a token adds to a text that it does not begin: decoders treat the first token of a text differently."""
        alone, twice = (self.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(alone) :]

    def stream(self, spelled: Collection[str] = ()) -> TokenStream:
        """A detokeniser for one reply, in whose text these special tokens are spelled; others are left out."""
        return TokenStream(self, spelled)


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
      CheckpointError: it is none, or cannot be read.
    """
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except BaseException as error:
        raise_unless_damaged(error)
        raise CheckpointError(f"{path}: cannot be read as a tokenizer: {error}") from error


def raise_unless_damaged(error: BaseException) -> None:
    """Raises an error again that is not of what `tokenizers` was given: it raises Exception, or it panics."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class TokenStream:
    """Token ids to text as they come: the pieces of `push` and `flush` together are `decode` of all ids.

    A piece never holds part of a character. Vocabularies of bytes (byte-level BPE) give each character as soon as its
    last byte is there. Those that fall back to bytes (SentencePiece's `<0x0A>`) decode a run of byte tokens as a whole,
    all or nothing, so such a run is held until the token after it. One stream belongs to one reply and one thread.

    Args:
      tokenizer: whose ids are pushed.
      spelled: special tokens whose names are text.
    """

    def __init__(self, tokenizer: Tokenizer, spelled: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._spelled = frozenset(spelled)
        self._utf8 = None
        if isinstance(tokenizer.backend.decoder, decoders.ByteLevel):
            self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []  # The last token given out: decoders treat the first token of a text differently.
        self._context_chars = 0
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Takes the next token id and returns the text that is now certain, possibly none."""
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        if token_id in self._tokenizer.special_ids:
            return self._behind_bytes(token) if token in self._spelled else ""
        if self._utf8 is not None:
            return self._utf8.decode(_byte_level_bytes(token))
        self._held.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        piece = self._decode_held()
        if piece.endswith(_REPLACEMENT):
            return ""
        self._context = [token_id]
        self._context_chars = len(self._tokenizer.decode(self._context))
        self._held.clear()
        return piece

    def flush(self) -> str:
        """Returns what was held back; an unfinished character is U+FFFD. The stream is then at its end."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        piece = self._decode_held() if self._held else ""
        self._held.clear()
        return piece

    def _behind_bytes(self, name: str) -> str:
        """A name, with what was held back before it."""
        if self._utf8 is not None:
            return self._utf8.decode(name.encode())
        piece = self._decode_held() if self._held else ""
        self._held.clear()
        return piece + name

    def _decode_held(self) -> str:
        return self._tokenizer.decode(self._context + self._held)[self._context_chars :]


def _byte_alphabet() -> dict[str, int]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
"""The characters by which byte-level vocabularies spell the 256 bytes (GPT-2): printable bytes stand for themselves;
the others, in order, are U+0100, U+0101, ..."""


def _byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level vocabulary's token stands for; one not in its alphabet is an added token, plain text."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
