"""The decode slots: the running batch's working copy of KV, rotated, and everything that is done to it; their steps.

Slots are donated from step to step and never saved. Only `Decoder` waits for the device, unless something broke.

Not here: prefill (runner), jitted code (steps), which job has which slot (scheduler).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.buckets import pad_to
from ca_jax.device.sampler import Draw, Sampler
from ca_jax.device.transfer import to_device, to_host
from ca_jax.models import rope
from ca_jax.models.attention import SLOT_BLOCK, slot_attention
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding, bytes_per_device, replicated
from ca_jax.session import Job


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSizes:
    """What a runner's slots and passes are like."""

    window: int
    """Most tokens of a job."""
    num_slots: int
    """Jobs that decode at a time."""
    chunk_tokens: int
    """Most new tokens of a prefill pass."""
    shorter_passes: bool = False
    """Whether passes may be shorter than that before a prompt's last one."""
    with_attention: bool = False
    """Whether the attention that tokens receive is measured."""
    packs_kv: bool = False
    """Whether KV is kept in int8."""


class DecodeSlots:
    """Owner of the slots' buffers. Belongs to the engine's thread.

    Args:
      capacity: tokens in each, a multiple of `SLOT_BLOCK`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: steps.Params,
        table: rope.Rotation,
        sizes: RunnerSizes,
        capacity: int,
        sharding: ModelSharding | None = None,
    ) -> None:
        dtype = str(params["params"]["embed"]["embedding"].dtype)
        self._make = partial(steps.make_slots, config, sizes.num_slots, capacity, dtype, sharding)
        self.buffers = self._make()
        """Per layer `[slots, K, C, H]`; donated by every call."""
        self._config = config
        self._params = params
        self._table = table
        self._capacity = capacity
        self._with_attention = sizes.with_attention
        self._packs_kv = sizes.packs_kv
        self._sharding = sharding
        self._to_device = partial(to_device, sharding=replicated(sharding))
        is_gpu = jax.default_backend() != "cpu"
        self._scatters = is_gpu
        of_layer = self.buffers.keys[0]
        on_device = jax.ShapeDtypeStruct(of_layer.sharding.shard_shape(of_layer.shape), of_layer.dtype)
        self._needs_static_extent = is_gpu and slot_attention(on_device) != "kernel"

    @property
    def num_bytes(self) -> int:
        """Of all slots, on each device."""
        return bytes_per_device(self.buffers)

    @property
    def extents(self) -> tuple[int, ...]:
        """Keys per row that decoding is compiled for; one will do where the extent is found at run time."""
        if not self._needs_static_extent:
            return (self._capacity,)
        doublings = range((self._capacity // SLOT_BLOCK).bit_length())
        return tuple(sorted({*(min(SLOT_BLOCK << n, self._capacity) for n in doublings), self._capacity}))

    def remake_if_broken(self) -> bool:
        """Makes the slots anew, empty, where a call that took them broke; whether one had. Waits for the device."""
        try:
            jax.block_until_ready(self.buffers)
        except RuntimeError:
            self.buffers = self._make()
            return True
        return False

    def insert(self, layer: int, kv: jax.Array, slot: jax.Array, start: jax.Array) -> jax.Array:
        """Puts one layer's unrotated KV into a slot, rotated, unpacked if it is int8; see `steps.insert_slot`.

        Returns:
          A scalar that is ready when that is done.
        """
        keys, values = self.buffers.keys[layer], self.buffers.values[layer]
        self.buffers.keys[layer], self.buffers.values[layer], done = steps.insert_slot(
            keys, values, kv, slot, start, self._table, self._sharding
        )
        return done

    def cut(
        self,
        slot: int,
        kept: np.ndarray,
        *,
        drift: np.ndarray | None = None,
        drifts_from: int = 0,
    ) -> None:
        """Moves the tokens of a slot that stay to its beginning.

        Args:
          slot: which.
          kept: i64 `[T]`, increasing: the places of the tokens that stay.
          drift: f32 `[L, 2, K, H]`, added to their unrotated KV; None adds nothing.
          drifts_from: the first of the tokens that stay which drift.
        """
        places = np.zeros(self._capacity, np.int32)
        places[: len(kept)] = kept
        turned = np.zeros(self._capacity, np.int32)
        turned[: len(kept)] = kept - np.arange(len(kept))
        self.buffers = steps.cut_slot(
            self.buffers,
            self._to_device(slot, np.int32),
            self._to_device(places),
            self._to_device(turned),
            self._table,
            None if drift is None else self._to_device(drift),
            None if drift is None else self._to_device([drifts_from, len(kept)], np.int32),
            self._sharding,
        )

    def decode(
        self, tokens: np.ndarray | jax.Array, lengths: np.ndarray
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """One token for each of the first n slots, n a batch bucket.

        Args:
          tokens: i32 `[n]`, on the host or the device; anything for slots not in use.
          lengths: i32 `[n]`, tokens already in the slot; 0 for slots not in use.

        Returns:
          Logits f32 `[n, V]`, the tokens' unrotated KV as it is kept, `[L, 2, n, K, H]` or int8 `[L, 2, n, K, H + 2]`,
          and the attention that the slots' tokens received, f32 `[n, C]`; None where that is not measured.
        """
        num_blocks = None
        if self._needs_static_extent:
            num_blocks = pad_to(self.extents, int(lengths.max()) + 1) // SLOT_BLOCK
        logits, kv, self.buffers, *received = steps.decode(
            self._config,
            self._params,
            self.buffers,
            tokens if isinstance(tokens, jax.Array) else self._to_device(tokens, np.int32),
            self._to_device(lengths, np.int32),
            self._table,
            num_blocks,
            self._scatters,
            self._with_attention,
            self._packs_kv,
            self._sharding,
        )
        return logits, kv, received[0] if received else None


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A step that has been dispatched."""

    batch: tuple[tuple[int, int, int], ...]  # Slot, job, and tokens in the slot.
    lengths: np.ndarray
    num_gone: np.ndarray
    logits: jax.Array
    draw: Draw | None  # None: it depends on the last step's tokens.
    kv: jax.Array
    received: jax.Array | None


class Decoder:
    """Steps the decode slots by a token, one step ahead where it may. Belongs to the engine's thread.

    A step is dispatched before the last one's tokens are read: the device computes while Python hands out text and
    plans. Where an answer has penalties, which the host counts, a step's tokens are drawn once the last ones are read;
    its logits are computed ahead all the same. A step that was dispatched and is not wanted, since the batch changed,
    is thrown away: it wrote keys and values only behind its jobs' lengths, where they are never attended to and are
    written again.

    Args:
      batch_buckets: numbers of slots that decoding is compiled for.
    """

    def __init__(self, slots: DecodeSlots, batch_buckets: tuple[int, ...], sampler: Sampler) -> None:
        self._slots = slots
        self._batch_buckets = batch_buckets
        self._sampler = sampler
        self._ahead: _Flight | None = None

    def step(
        self, jobs: Sequence[Job], run_ahead: bool, on_dispatched: Callable[[], None]
    ) -> tuple[Draw, jax.Array, np.ndarray | None]:
        """Decodes one token for each job, and waits for them.

        Args:
          jobs: at least one, each in a slot; the KV of its last token is computed, and is not in the slot yet.
          run_ahead: whether all are likely to want another token, and no other job may begin before that.
          on_dispatched: called once all is dispatched, before it is waited for.

        Returns:
          Drawn tokens by slot, the unrotated KV of the jobs' last tokens `[L, 2, n, K, H]`, and the
          attention that tokens of each slot received, f32 `[n, C]`; None where the runner does not measure it.
        """
        rows = {job.slot: job for job in jobs if job.slot is not None}
        batch = tuple((slot, job.job_id, job.num_tokens - 1) for slot, job in rows.items())
        flight, self._ahead = self._ahead, None
        if flight is None or flight.batch != batch:
            num_rows = pad_to(self._batch_buckets, 1 + max(rows))
            tokens, lengths, num_gone = (np.zeros(num_rows, np.int32) for _ in range(3))
            for slot, job in rows.items():
                tokens[slot], lengths[slot], num_gone[slot] = job.output_ids[-1], job.num_tokens - 1, job.num_gone
            flight = self._dispatch(batch, tokens, lengths, num_gone)
        draw = flight.draw or self._draw(flight.logits, flight.lengths, flight.num_gone)
        if run_ahead:
            lengths = flight.lengths.copy()
            lengths[list(rows)] += 1
            ahead = tuple((slot, job_id, length + 1) for slot, job_id, length in batch)
            draws = not self._sampler.has_penalties
            self._ahead = self._dispatch(ahead, draw.tokens, lengths, flight.num_gone, draws=draws)
        on_dispatched()
        received = None if flight.received is None else to_host(flight.received)
        return draw.wait(), flight.kv, received

    def _dispatch(
        self,
        batch: tuple[tuple[int, int, int], ...],
        tokens: np.ndarray | jax.Array,
        lengths: np.ndarray,
        num_gone: np.ndarray,
        *,
        draws: bool = True,
    ) -> _Flight:
        logits, kv, received = self._slots.decode(tokens, lengths)
        draw = self._draw(logits, lengths, num_gone) if draws else None
        return _Flight(batch, lengths, num_gone, logits, draw, kv, received)

    def _draw(self, logits: jax.Array, lengths: np.ndarray, num_gone: np.ndarray) -> Draw:
        """By how many tokens there were: the same number must not come again when some have left."""
        return self._sampler.start(logits, lengths + num_gone + 1)
