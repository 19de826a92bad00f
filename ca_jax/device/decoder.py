"""Decoding ahead of the host: the next step is dispatched before the last one's tokens are read.

The device then computes while Python hands out text and plans. Where an answer has penalties, which the host counts, a
step's tokens are drawn once the last ones are read; its logits are computed ahead all the same. A step that was
dispatched and is not wanted, since the batch changed, is thrown away: it wrote keys and values only behind its jobs'
lengths, where they are never attended to and are written again.

Not here: jitted code (steps), which jobs run (scheduler), when an answer ends (engine).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from ca_jax.device.buckets import pad_to
from ca_jax.device.runner import Runner
from ca_jax.device.sampler import Draw, Drawn, Sampler
from ca_jax.device.transfer import to_host


@dataclasses.dataclass(frozen=True)
class DecodeRow:
    """One job's next token."""

    job_id: int
    """Whose."""
    slot: int
    """Where its KV is."""
    token: int
    """The last token, whose KV this step computes."""
    length: int
    """Tokens already in the slot."""
    num_dropped: int = 0
    """Tokens that have left it: a draw is by how many tokens there were, and must not be the same again."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that has been dispatched."""

    batch: tuple[tuple[int, int, int], ...]  # job, slot, length
    lengths: np.ndarray
    dropped: np.ndarray
    logits: jax.Array
    draw: Draw | None  # None: it depends on the last step's tokens.
    kv: jax.Array
    received: jax.Array | None


class Decoder:
    """Steps the decode slots by a token, one step ahead where it may. Belongs to the engine's thread.

    Args:
      runner: computes.
      sampler: draws.
    """

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._ahead: _Flight | None = None

    def step(
        self, rows: list[DecodeRow], run_ahead: bool, on_dispatched: Callable[[], None] = lambda: None
    ) -> tuple[Drawn, jax.Array, np.ndarray | None]:
        """Decodes one token for each row, and waits for them.

        Args:
          rows: at least one, each of another slot.
          run_ahead: whether all rows are likely to want another token, and nobody else may begin before that.
          on_dispatched: called once all is dispatched, before it is waited for.

        Returns:
          Drawn tokens by slot, the unrotated KV of the rows' last tokens `[L, 2, n, K, H]`, and the
          attention that tokens of each slot received, f32 `[n, C]`; None where the runner does not measure it.
        """
        batch = tuple((row.job_id, row.slot, row.length) for row in rows)
        flight, self._ahead = self._ahead, None
        if flight is None or flight.batch != batch:
            num_rows = pad_to(self._runner.batch_buckets, 1 + max(row.slot for row in rows))
            tokens, lengths, dropped = (np.zeros(num_rows, np.int32) for _ in range(3))
            for row in rows:
                tokens[row.slot], lengths[row.slot], dropped[row.slot] = row.token, row.length, row.num_dropped
            flight = self._dispatch(batch, tokens, lengths, dropped)
        draw = flight.draw or self._draw(flight.logits, flight.lengths, flight.dropped)
        if run_ahead:
            lengths = flight.lengths.copy()
            for row in rows:
                lengths[row.slot] += 1
            self._ahead = self._dispatch(
                tuple((job, slot, length + 1) for job, slot, length in batch),
                draw.tokens,
                lengths,
                flight.dropped,
                draws=not self._sampler.has_penalties,
            )
        on_dispatched()
        received = None if flight.received is None else to_host(flight.received)
        return draw.wait(), flight.kv, received

    def _dispatch(
        self,
        batch: tuple[tuple[int, int, int], ...],
        tokens: np.ndarray | jax.Array,
        lengths: np.ndarray,
        dropped: np.ndarray,
        *,
        draws: bool = True,
    ) -> _Flight:
        logits, kv, received = self._runner.slots.decode(tokens, lengths)
        draw = self._draw(logits, lengths, dropped) if draws else None
        return _Flight(batch, lengths, dropped, logits, draw, kv, received)

    def _draw(self, logits: jax.Array, lengths: np.ndarray, dropped: np.ndarray) -> Draw:
        return self._sampler.start(logits, lengths + dropped + 1)
