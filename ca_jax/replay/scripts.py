"""Recorded conversations as they are served: what is sent, and how many tokens are generated.

A recorded conversation is served with its recorded lengths. Where answers are capped, what lies behind the cap is not
generated: it comes with the next message, so that histories still grow as they did.

    recorded   user 1        answer 1               user 2        answer 2
    served     [message 1]   <generated, capped>    [the rest of answer 1, message 2]   <generated, capped>

Not here: which conversations (whoever serves them), reading them (`ca_jax.traces`), when turns come (workload).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ca_jax.models.tokenizer import Tokenizer
from ca_jax.pretrained import LoadedModel
from ca_jax.serving.prompts import turn_ids

LEAST_ANSWER_TOKENS = 2
"""Of every answer: there is a time between them."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One turn to be served."""

    message: tuple[int, ...]
    """Tokens sent, behind what the conversation has."""
    answer_tokens: int
    """Tokens to be generated."""

    @property
    def num_tokens(self) -> int:
        """Of both."""
        return len(self.message) + self.answer_tokens


Script = tuple[Exchange, ...]
"""A conversation."""


def recorded_script(
    model: LoadedModel, tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], most_answer_tokens: int
) -> Script:
    """A conversation as it was recorded, in the model's template, of whose answers only the beginnings are generated.

    Args:
      model: whose chat template.
      tokenizer: the model's.
      texts: what the user said and what was answered, of each turn.
      most_answer_tokens: generated of an answer.
    """
    script: list[Exchange] = []
    answer_ids: list[int] = []  # Of the turn before: stands for the conversation so far, which is not tokenised again.
    rest: tuple[int, ...] = ()
    messages: list[dict[str, str]] = []
    for said, answered in texts:
        new_ids = turn_ids(model, answer_ids, messages, said)[len(answer_ids) :]
        answer_ids = tokenizer.encode(answered, add_bos=False)
        num_generated = max(min(len(answer_ids), most_answer_tokens), LEAST_ANSWER_TOKENS)
        script.append(Exchange((*rest, *new_ids), num_generated))
        rest = tuple(answer_ids[num_generated:])
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answered}]
    return tuple(script)
