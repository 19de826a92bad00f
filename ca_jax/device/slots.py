"""The decode slots: the running batch's working copy of KV, rotated, and everything that is done to it.

Slots are donated from step to step and never saved. Nothing here waits for the device, unless something broke.

Not here: when (runner), jitted code (steps), which job has which slot (scheduler).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.buckets import pad_to
from ca_jax.device.transfer import to_device
from ca_jax.models import rope
from ca_jax.models.attention import SLOT_BLOCK, slot_attention
from ca_jax.models.config import ModelConfig
from ca_jax.models.sharding import ModelSharding, bytes_per_device, replicated


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
