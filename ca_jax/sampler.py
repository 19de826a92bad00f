"""The sampling parameters of the decode slots, kept on the device as long as the batch stays the same.

Not here: how a token is drawn (sampling), when an answer ends (engine).
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from ca_jax import sampling
from ca_jax.jobs import SamplingParams
from ca_jax.models.sharding import ModelSharding, replicated
from ca_jax.transfer import to_device, to_host


class Sampler:
    """Draws tokens for slots, each with its own parameters. Belongs to the engine's thread.

    Args:
      num_slots: how many decode slots there are.
      vocab_size: V.
      sharding: of the model whose logits it draws from, which are whole on each device; None: it is on one.
    """

    def __init__(self, num_slots: int, vocab_size: int, sharding: ModelSharding | None = None) -> None:
        self._to_device = partial(to_device, sharding=replicated(sharding))
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._vocab_size = vocab_size
        self._seen: jax.Array | None = None  # bool [slots, V], made when first needed
        self._rows: dict[tuple[int, int], sampling.SamplerRows] = {}

    def set_slot(self, slot: int, params: SamplingParams, token_ids: list[int]) -> None:
        """Gives a slot to an answer whose prompt is `token_ids`."""
        self._params[slot] = params
        self._rows.clear()
        if _is_greedy(params):
            return
        if self._seen is None:
            self._seen = self._to_device(np.zeros((len(self._params), self._vocab_size), bool))
        present = np.zeros(self._vocab_size, bool)
        if params.repetition_penalty != 1.0:
            present[token_ids] = True
        self._seen = sampling.set_seen(self._seen, self._to_device(slot, np.int32), self._to_device(present))

    def free_slot(self, slot: int) -> None:
        """Forgets a slot's parameters."""
        self._params[slot] = None
        self._rows.clear()

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on tokens that must be marked first."""
        return any(params is not None and params.repetition_penalty != 1.0 for params in self._params)

    def draw(self, logits: jax.Array, positions: np.ndarray, first_slot: int = 0) -> np.ndarray:
        """Draws as `start` does, and waits for the tokens."""
        return to_host(self.start(logits, positions, first_slot))

    def start(self, logits: jax.Array, positions: np.ndarray, first_slot: int = 0) -> jax.Array:
        """Draws a token for each row. Does not wait.

        Args:
          logits: f32 `[n, V]`, of slots `first_slot` to `first_slot + n`.
          positions: i32 `[n]`, of the tokens being drawn.
          first_slot: which slot the first row is.

        Returns:
          i32 `[n]`; anything for slots not in use.
        """
        num_rows = logits.shape[0]
        slots = range(first_slot, first_slot + num_rows)
        used = [params for slot in slots if (params := self._params[slot]) is not None]
        if self._seen is None or all(_is_greedy(params) for params in used):
            return sampling.greedy(logits)
        rows = self._rows.get((first_slot, num_rows))
        if rows is None:
            rows = self._rows[first_slot, num_rows] = self._rows_of(slots)
        first, places = self._to_device(first_slot, np.int32), self._to_device(positions, np.int32)
        return sampling.sample(logits, rows, self._seen, first, places)

    def warmup(self, batch_sizes: tuple[int, ...]) -> None:
        """Compiles drawing for these numbers of rows. All slots must be free; drawing is then as if never called."""
        self.set_slot(0, SamplingParams(temperature=1.0, repetition_penalty=1.1), [])
        for size in batch_sizes:
            logits = self._to_device(np.zeros((size, self._vocab_size), np.float32))
            to_host(sampling.greedy(logits))
            self.draw(logits, np.zeros(size, np.int32))
        self.mark(0, 0)
        self.free_slot(0)

    def mark(self, slot: int, token: int) -> None:
        """Notes a drawn token for the slot's repetition penalty."""
        params = self._params[slot]
        if params is not None and params.repetition_penalty != 1.0 and self._seen is not None:
            at, drawn = self._to_device(slot, np.int32), self._to_device(token, np.int32)
            self._seen = sampling.mark_seen(self._seen, at, drawn)

    def _rows_of(self, slots: range) -> sampling.SamplerRows:
        filled = [self._params[slot] or SamplingParams() for slot in slots]
        return sampling.SamplerRows(
            temperature=self._to_device([row.temperature for row in filled], np.float32),
            top_k=self._to_device([row.top_k for row in filled], np.int32),
            top_p=self._to_device([row.top_p for row in filled], np.float32),
            min_p=self._to_device([row.min_p for row in filled], np.float32),
            repetition_penalty=self._to_device([row.repetition_penalty for row in filled], np.float32),
            seed=self._to_device([row.seed for row in filled], np.uint32),
        )


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 and params.repetition_penalty == 1.0
