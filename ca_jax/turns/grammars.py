"""What an answer's text must be like: a JSON value, one of some texts, a match of a regular expression or of a grammar.

    Grammar.json_schema({"type": "object", ...})     SamplingParams(grammar=...)

Not here: compiling it and following it token by token (serving.grammars), masks on the device (device.sampler).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from ca_jax.errors import InvalidRequestError, check

MAX_GRAMMAR_CHARS = 262_144
"""Most characters of a grammar: compiling takes time and memory in proportion."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """What the whole text of an answer must match. Immutable; equal ones compare and hash alike.

    An answer that ends by a stop token matches it. One that `max_tokens`, the window or a stop string of its own cuts
    short may not.

    Raises:
      InvalidRequestError: the text is longer than `MAX_GRAMMAR_CHARS`, or blank.
    """

    kind: Literal["json_schema", "regex", "lark"]
    """How `text` is read: a JSON schema as JSON (draft 2020-12), a regular expression (of Rust's `regex`, matched as a
    whole), or Lark's notation as llguidance extends it."""
    text: str
    """The schema, expression or grammar."""

    def __post_init__(self) -> None:
        check(0 < len(self.text) <= MAX_GRAMMAR_CHARS, f"a {self.kind}", f"1 to {MAX_GRAMMAR_CHARS} characters",
              len(self.text), InvalidRequestError)  # fmt: skip

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """A JSON value that a schema describes.

        Args:
          schema: it, or its JSON. Properties come in the order in which it names them.

        Raises:
          InvalidRequestError: it is no JSON.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a JSON schema must be JSON: {error}") from error
        return cls(kind="json_schema", text=text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches from its beginning to its end."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of some texts.

        Raises:
          InvalidRequestError: there is none, or one is empty.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(each, str) and each for each in texts):
            raise InvalidRequestError(f"choices must be at least one text, none of them empty, got {texts!r:.200}")
        return cls(kind="lark", text=f"start: {' | '.join(map(lark_text, texts))}")

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A text of the rule `start` of a grammar in Lark's notation; `%json {...}` in it is a schema's value."""
        return cls(kind="lark", text=text)


def lark_text(text: str) -> str:
    """A text as Lark's notation quotes it."""
    return json.dumps(text, ensure_ascii=False)


class Matcher(Protocol):
    """How far one answer has come in its grammar. Belongs to the engine's thread."""

    has_ended: bool
    """Whether nothing may follow and the answer has no stop token that says so."""

    def take(self, token: int) -> None:
        """Takes the token that was drawn. Raises InvalidRequestError where the grammar turns out too complex."""

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may come next into `mask`, u32 `[W]`: bit `i % 32` of number `i // 32` is token i's.

        Raises InvalidRequestError where the grammar turns out too complex.
        """
