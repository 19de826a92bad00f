"""Owner of device state: weights, decode slots, padded lengths. Calls `steps` and pads what goes in.

Not here: sessions, the store, what to run (engine), jitted code (steps).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax import steps
from ca_jax.buckets import batch_buckets, history_buckets, new_token_buckets, pad_to
from ca_jax.models.attention import SLOT_BLOCK
from ca_jax.models.config import ModelConfig
from ca_jax.transfer import to_device


@dataclasses.dataclass
class PrefillChunk:
    """New KV of one pass: per layer `[2, T, K, H]` unrotated; `num_tokens` of it count, at positions from `start`."""

    start: int
    num_tokens: int
    kv: list[jax.Array]


@dataclasses.dataclass
class Prefill:
    """What a prefill leaves on the device."""

    logits: jax.Array
    """Of the last token, f32 `[1, V]`."""
    history: list[jax.Array]
    """Loaded unrotated KV, per layer `[2, S, K, H]`; empty without history."""
    chunks: list[PrefillChunk]
    """New KV, in order."""


class Runner:
    """Runs a model over its decode slots. Belongs to the engine's thread.

    Args:
      config: of the model.
      params: its parameters, on the device.
      window: most tokens of a job.
      max_batch_size: how many slots.
      chunk_tokens: most new tokens per prefill pass.
    """

    def __init__(
        self, config: ModelConfig, params: steps.Params, *, window: int, max_batch_size: int, chunk_tokens: int
    ) -> None:
        self._config = config
        self._params = params
        self._layers = [params["params"][f"layer_{i}"] for i in range(config.num_layers)]
        outer = {name: part for name, part in params["params"].items() if not name.startswith("layer_")}
        self._outer = {"params": outer}
        self.chunk_tokens = chunk_tokens
        self.new_token_buckets = new_token_buckets(chunk_tokens)
        self.history_buckets = history_buckets(window)
        self.batch_buckets = batch_buckets(max_batch_size)
        # Padding behind a job's tokens must fit too: an update that overlaps the end would be moved, not cut.
        widest = max(window + self._max_padding(), self.history_buckets[-1])
        self._capacity = -(-widest // SLOT_BLOCK) * SLOT_BLOCK
        dtype = str(params["params"]["embed"]["embedding"].dtype)
        self._table = steps.rotation_table(config, self._capacity + chunk_tokens)
        self._slots = steps.make_slots(config, max_batch_size, self._capacity, dtype)
        self._needs_static_extent = jax.default_backend() != "cpu"

    @property
    def _decode_extents(self) -> tuple[int, ...]:
        """Keys per row that decoding is compiled for; one will do where the extent is found at run time."""
        if not self._needs_static_extent:
            return (self._capacity,)
        doublings = range((self._capacity // SLOT_BLOCK).bit_length())
        return tuple(sorted({*(min(SLOT_BLOCK << n, self._capacity) for n in doublings), self._capacity}))

    def _max_padding(self) -> int:
        sizes = (0, *self.new_token_buckets)
        return max(high - low - 1 for low, high in itertools.pairwise(sizes))

    def padded_history(self, num_tokens: int) -> int:
        """The history length that `num_tokens` are padded to."""
        return pad_to(self.history_buckets, num_tokens)

    def prefill(self, tokens: list[int], history_length: int, load_layer: Callable[[int], jax.Array] | None) -> Prefill:
        """Runs new tokens over their history, layer by layer; a long prompt in several passes. Does not wait.

        Args:
          tokens: new ones, at least one.
          history_length: tokens of history.
          load_layer: gives a layer's unrotated history `[2, S, K, H]`, S as `padded_history` says; None without.
        """
        loaded: list[jax.Array] = []
        past: list[jax.Array | None] = [None] * self._config.num_layers
        chunks: list[PrefillChunk] = []
        x, count = None, 0
        for offset in range(0, len(tokens), self.chunk_tokens):
            part = tokens[offset : offset + self.chunk_tokens]
            start, count = history_length + offset, len(part)
            if chunks:
                capacity, before = self.padded_history(start), to_device(chunks[-1].start, np.int32)
                past = [
                    steps.extend_history(old, new, before, capacity=capacity)
                    for old, new in zip(past, chunks[-1].kv, strict=True)
                ]
            padded = np.zeros((1, pad_to(self.new_token_buckets, count)), np.int32)
            padded[0, :count] = part
            x = steps.embed(self._config, self._outer, to_device(padded))
            length = to_device(start, np.int32)
            chunk = PrefillChunk(start, count, [])
            for i, layer_params in enumerate(self._layers):
                if load_layer is not None and not chunks:
                    loaded.append(load_layer(i))
                    past[i] = loaded[i]
                x, kv = steps.prefill_layer(self._config, layer_params, x, past[i], length, self._table)
                chunk.kv.append(kv)
            chunks.append(chunk)
        if x is None:
            raise ValueError("wanted at least one new token to prefill, found none")
        logits = steps.last_logits(self._config, self._outer, x, to_device(count - 1, np.int32))
        return Prefill(logits, loaded, chunks)

    def insert(self, slot: int, prefill: Prefill) -> None:
        """Puts a prefilled job's KV into a decode slot, rotated. Does not wait."""
        at = to_device(slot, np.int32)
        parts = [(prefill.history, 0)] if prefill.history else []
        parts += [(chunk.kv, chunk.start) for chunk in prefill.chunks]
        for kv, start in parts:
            begin = to_device(start, np.int32)
            for layer, layer_kv in enumerate(kv):
                self._insert_layer(layer, layer_kv, at, begin)

    def _insert_layer(self, layer: int, kv: jax.Array, slot: jax.Array, start: jax.Array) -> None:
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        self._slots.keys[layer], self._slots.values[layer] = steps.insert_slot(
            keys, values, kv, slot, start, self._table
        )

    def decode(self, tokens: np.ndarray | jax.Array, lengths: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """One token for each of the first n slots, n a batch bucket. Does not wait.

        Args:
          tokens: i32 `[n]`, on the host or the device; anything for slots not in use.
          lengths: i32 `[n]`, tokens already in the slot; 0 for slots not in use.

        Returns:
          Logits f32 `[n, V]` and the tokens' unrotated KV `[L, 2, n, K, H]`.
        """
        num_blocks = None
        if self._needs_static_extent:
            num_blocks = pad_to(self._decode_extents, int(lengths.max()) + 1) // SLOT_BLOCK
        logits, kv, self._slots = steps.decode(
            self._config,
            self._params,
            self._slots,
            tokens if isinstance(tokens, jax.Array) else to_device(tokens, np.int32),
            to_device(lengths, np.int32),
            self._table,
            num_blocks,
        )
        return logits, kv

    def warmup(self, max_history: int, max_new: int, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compiles what prefills up to these sizes and decoding need, by running it. All slots must be free.

        Args:
          max_history: tokens of history.
          max_new: new tokens in one pass.
          progress: called with "compile", pairs done and pairs in all.
        """
        reach = pad_to(self.history_buckets, min(max_history, self.history_buckets[-1]))
        largest = pad_to(self.new_token_buckets, min(max_new, self.chunk_tokens))
        histories = {size: self._empty_kv(size) for size in self.history_buckets if 0 < size <= reach}
        new_sizes = [size for size in self.new_token_buckets if size <= largest]
        total, done = len(new_sizes) * (1 + len(histories)), 0
        zero = to_device(0, np.int32)
        for new_size in new_sizes:
            x = steps.embed(self._config, self._outer, to_device(np.zeros((1, new_size), np.int32)))
            steps.last_logits(self._config, self._outer, x, zero)
            for history in (None, *histories.values()):  # One layer will do: all share their compiled functions.
                steps.prefill_layer(self._config, self._layers[0], x, history, zero, self._table)
                done += 1
                if progress is not None:
                    progress("compile", done, total)
            self._insert_layer(0, self._empty_kv(new_size), zero, zero)
        chunk = self._empty_kv(self.chunk_tokens)
        steps.extend_history(None, chunk, zero, capacity=self._padded_up_to(self.chunk_tokens))
        for below, size in itertools.pairwise((0, *histories)):
            least, most = (self._padded_up_to(length + self.chunk_tokens) for length in (below + 1, size))
            for capacity in self.history_buckets:
                if least <= capacity <= most:
                    steps.extend_history(histories[size], chunk, zero, capacity=capacity)
            self._insert_layer(0, histories[size], zero, zero)
        for rows in self.batch_buckets:
            for extent in self._decode_extents:
                lengths = np.full(rows, extent - 1, np.int32)
                jax.block_until_ready(self.decode(np.zeros(rows, np.int32), lengths))

    def _empty_kv(self, num_tokens: int) -> jax.Array:
        shape = (2, num_tokens, self._config.num_kv_heads, self._config.head_dim)
        return jnp.zeros(shape, self._slots.keys[0].dtype)

    def _padded_up_to(self, num_tokens: int) -> int:
        return self.padded_history(min(num_tokens, self.history_buckets[-1]))

    def wait(self) -> None:
        """Returns when everything dispatched so far has reached the slots."""
        jax.block_until_ready(self._slots)
