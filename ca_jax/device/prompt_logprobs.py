"""How likely the tokens of a prompt were: a head over what its prefill computes, for prompts that ask for it.

    place          0     1     2     3        what the model expects behind a token is compared with the next one
    token          a     b     c     d        of `a` nothing is said
    expected             b|a   c|ab  d|abc    each computed from the hidden state of the place before

The head is computed for some tokens at a time, so that logits of so many are there at once, whatever the prompt; the
function for that is compiled when a prompt first asks for it.

Not here: which of a prompt's KV may come from the store then (`SamplingParams.num_cacheable`), tokens that are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.runner import Runner
from ca_jax.device.sampler import Draw, log_probabilities
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding
from ca_jax.turns.requests import MAX_LOGPROBS, TokenLogprob

_TOKENS = 64  # Of a call: 12 MiB of logits where a vocabulary has 49,152 tokens, 64 MiB where it has 262,144.


@partial(jax.jit, static_argnames=("config", "num_top", "sharding"))
def token_logprobs(
    config: ModelConfig,
    params: steps.Params,
    x: jax.Array,
    index: jax.Array,
    tokens: jax.Array,
    num_top: int,
    sharding: ModelSharding | None = None,
) -> Draw:
    """How likely tokens are, i32 `[n]`, each behind another: `x [D, T', F]` and i32 `[n]` as of `row_logits`."""
    logits, _ = steps.row_logits(config, params, x, index, sharding)
    return log_probabilities(logits, tokens, num_top)


class PromptLogprobs:
    """Of one prompt, whose passes it is told of in their order. Belongs to the engine's thread.

    Args:
      prompt_ids: all of it that is computed or loaded.
      start: place in it of the first token of which something is said, 1 or above.
      num_top: how many of the likeliest tokens are told with each.
    """

    def __init__(self, runner: Runner, prompt_ids: Sequence[int], start: int, num_top: int) -> None:
        self._runner = runner
        self._prompt_ids = prompt_ids
        self._next = start
        self._num_told = num_top
        self._num_top = 1 if num_top <= 1 else min(MAX_LOGPROBS, runner.config.vocab_size)  # Two functions at most.
        self._found: list[tuple[Draw, int, int]] = []  # With the first row of each that counts, and how many do.

    def add(self, places: range, x: jax.Array, part: int, first: int) -> None:
        """A pass was dispatched. Does not wait.

        Args:
          places: in the prompt, of the tokens that it computes.
          x: what its last layer gives, `[D, T', F]`.
          part: of the mesh, in which they are.
          first: the first of them there.
        """
        runner, last = self._runner, min(places.stop, len(self._prompt_ids) - 1)
        for place in range(max(self._next - 1, places.start), last, _TOKENS):
            ids = self._prompt_ids[place + 1 : min(place + _TOKENS, last) + 1]
            index, tokens = np.zeros((2, len(x), _TOKENS), np.int32)
            index[part, : len(ids)] = np.arange(len(ids)) + (first + place - places.start)
            tokens[part, : len(ids)] = ids
            given = (runner.to_device(each.reshape(-1), np.int32) for each in (index, tokens))
            draw = token_logprobs(runner.config, runner.outer, x, *given, self._num_top, runner.sharding)
            self._found.append((draw, part * _TOKENS, len(ids)))
            self._next = place + len(ids) + 1

    def take(self) -> list[TokenLogprob]:
        """What was found. Waits for it."""
        told: list[TokenLogprob] = []
        for draw, first, count in self._found:
            on_host = draw.wait()
            each = (on_host.logprob(row, self._num_told) for row in range(first, first + count))
            told += [logprob for logprob in each if logprob is not None]
        return told
