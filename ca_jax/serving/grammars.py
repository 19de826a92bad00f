"""Grammars of answers, followed token by token: compiled for a model's vocabulary, within bounds of time and memory.

llguidance does the work. What a vocabulary's tokens stand for is read once, when the first grammar comes. What is
compiled is kept by nobody: how fast another one compiles would tell a client what others have asked for.

Not here: what may be asked for (turns.grammars), masks on the device (device.sampler).
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np

from ca_jax.errors import InvalidRequestError
from ca_jax.models.tokenizer import Tokenizer
from ca_jax.serving.grammar_trial import Trial
from ca_jax.turns.grammars import Grammar

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between tokens of JSON: as models write it, but no model fills its answer with it."""
_LIMITS = {"max_grammar_size": 200_000, "max_lexer_states": 100_000, "verbose_errors": False}
_BEFORE = "\x02"  # What is tokenised in front of a text: no token joins it with what follows.
_SHOWN = 300  # Most characters of what llguidance says is wrong.
_TRIAL = Trial(_LIMITS)


class Grammars:
    """Compiles grammars for one model. Threads may share it.

    Args:
      tokenizer: of the model; None where it has none: then every grammar is refused.
      vocab_size: of its logits.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # llguidance's.

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar that is ready to be followed. Takes milliseconds; of large grammars, a second or so.

        Raises:
          InvalidRequestError: it is none, it asks for what is not supported, or for too much; llguidance is not
            installed; the model has no tokenizer.
        """
        guidance = _llguidance()
        matchers = guidance.LLMatcher
        try:
            if grammar.kind == "json_schema":
                options = {"whitespace_pattern": _WHITESPACE}
                text = matchers.grammar_from_json_schema(grammar.text, overrides=options)
            elif grammar.kind == "regex":
                text = matchers.grammar_from_regex(grammar.text)
            else:
                text = matchers.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise _refused(grammar, str(error)) from error
        vocabulary = self._known(guidance)
        if grammar.kind != "regex" and (wrong := _TRIAL.wrong(text)):
            raise _refused(grammar, wrong)
        matcher = matchers(vocabulary, text, log_level=0, limits=guidance.LLParserLimits(**_LIMITS))
        compiled = CompiledGrammar(matcher, self._vocab_size)
        try:
            compiled.begin(()).fill(np.zeros(-(-self._vocab_size // 32), np.uint32))
        except InvalidRequestError as error:
            raise _refused(grammar, "no text matches it, or it is too complex from its beginning on") from error
        return compiled

    def _known(self, guidance: Any) -> Any:
        """The vocabulary as llguidance has it."""
        if self._tokenizer is None:
            raise InvalidRequestError("a grammar must be given to a model with a tokenizer, got one without")
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = guidance.LLTokenizer(_Words(self._tokenizer, self._vocab_size))
            return self._vocabulary


class CompiledGrammar:
    """A grammar for one vocabulary, of so many tokens. Answers follow copies of it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self, stop_ids: Collection[int]) -> GrammarMatcher:
        """A matcher at the grammar's beginning, for an answer that ends with any of these tokens."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size, stop_ids)


class GrammarMatcher:
    """How far one answer has come; see `turns.grammars.Matcher`.

    llguidance knows one token that ends a text, and an answer may have several or none: so it is told of one more than
    the vocabulary has, and where it allows that, the answer's own stop tokens are allowed.
    """

    def __init__(self, matcher: Any, vocab_size: int, stop_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._end = vocab_size
        self._mask = np.zeros(vocab_size // 32 + 1, np.uint32)
        self._stop_ids = sorted(token for token in stop_ids if token < vocab_size)
        self.has_ended = False

    def take(self, token: int) -> None:
        """As of the protocol; a stop token ends the answer and is not looked at."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)
            self._check()
            self.has_ended = not self._stop_ids and self._matcher.is_stopped()

    def fill(self, mask: np.ndarray) -> None:
        """As of the protocol."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        mask[:] = self._mask[: len(mask)]
        if self._mask[self._end // 32] >> self._end % 32 & 1:
            for token in self._stop_ids:
                mask[token // 32] |= np.uint32(1 << token % 32)
        elif not mask.any():
            raise InvalidRequestError(
                "the grammar must have a token that goes on from here, got none in the vocabulary"
            )

    def _check(self) -> None:
        if self._matcher.is_error():
            why = _told(self._matcher.get_error())
            raise InvalidRequestError(f"the grammar became too complex for this answer: {why}")


class _Words:
    """A vocabulary as llguidance reads it, with one token more, which ends a text."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(tokenizer.vocab_size, vocab_size)
        self.tokens = [tokenizer.token_bytes(token) or b"" for token in range(known)]
        self.tokens += [b""] * (vocab_size - known) + [b"<end of the grammar>"]
        self.special_token_ids = [*(token for token in tokenizer.special_ids if token < known), vocab_size]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = vocab_size
        self._tokenizer = tokenizer
        special = {*self.special_token_ids}
        self._ids = {word: token for token, word in enumerate(self.tokens) if word and token not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that stands in the middle of another, as the model would write it where that can be told."""
        before = self._tokenizer.encode_content(_BEFORE)
        ids = self._tokenizer.encode_content(_BEFORE + text)
        rest, wanted = ids[len(before) :], text.encode()
        if ids[: len(before)] == before and b"".join(self.tokens[token] for token in rest) == wanted:
            return rest
        found, at = list[int](), 0
        while at < len(wanted):
            sizes = range(min(self._longest, len(wanted) - at), 0, -1)
            size = next((size for size in sizes if wanted[at : at + size] in self._ids), None)
            if size is None:
                break  # Of what is missing llguidance thinks for itself.
            found.append(self._ids[wanted[at : at + size]])
            at += size
        return found


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        message = f"a grammar needs another package: pip install 'ca-jax[grammar]' ({error})"
        raise InvalidRequestError(message) from error
    return llguidance


def _refused(grammar: Grammar, why: str) -> InvalidRequestError:
    name = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a grammar"}[grammar.kind]
    return InvalidRequestError(f"{name} must be one that can be followed: {_told(why)}")


def _told(why: str) -> str:
    """What llguidance says is wrong, in one short line."""
    line = " ".join(why.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"
