"""Owner of device state: weights, decode slots, padded lengths. Calls `steps` and pads what goes in.

Not here: sessions, the store, what to run (engine), jitted code (steps).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from ca_jax import steps
from ca_jax.buckets import batch_buckets, history_buckets, new_token_buckets, pad_to, pass_sizes
from ca_jax.models.attention import SLOT_BLOCK, slot_attention
from ca_jax.models.config import ModelConfig
from ca_jax.timeline import NO_TIMELINE, Timeline
from ca_jax.transfer import to_device

_TIMED_RUNS = 3


class LayerSource(Protocol):
    """Where a prefill takes its history from, layer by layer; see `layer_loader.LayerLoad`."""

    def layer(self, layer: int) -> jax.Array:
        """Unrotated KV `[2, S, K, H]`, S as `Runner.padded_history` says."""

    def computed(self, layer: int, result: jax.Array) -> None:
        """The layer was computed when `result` is ready."""

    def used(self, layer: int, result: jax.Array) -> None:
        """Nothing else reads what `layer` gave when `result` is ready."""


@dataclasses.dataclass
class Prefill:
    """A job's prefill, from its first pass to its insertion into the decode slot."""

    slot: int
    """Where it will decode."""
    tokens: list[int]
    """New ones."""
    history_length: int
    """Tokens before them, whose KV is loaded."""
    num_done: int = 0
    """New tokens that were dispatched."""
    past: list[jax.Array | None] = dataclasses.field(default_factory=list)
    """Per layer the unrotated KV `[2, S, K, H]` of all tokens before the last pass; None where there are none."""
    kv: list[jax.Array] = dataclasses.field(default_factory=list)
    """Per layer the unrotated KV `[2, T, K, H]` of the last pass."""
    outputs: list[jax.Array] = dataclasses.field(default_factory=list)
    """Per layer `x [1, T, F]` of the last pass: ready when the layer is computed."""
    last_start: int = 0
    """Position of the last pass's first token."""
    logits: jax.Array | None = None
    """Of the last token, f32 `[1, V]`; None before the last pass."""
    inserted: set[int] = dataclasses.field(default_factory=set)
    """Layers whose past is in the slot."""
    owns_past: bool = False
    """Whether `past` is its own, and not staging."""

    @property
    def num_left(self) -> int:
        """New tokens that are to be dispatched."""
        return len(self.tokens) - self.num_done


def _no_layer(layer: int, kv: jax.Array) -> None:
    pass


class Runner:
    """Runs a model over its decode slots. Belongs to the engine's thread.

    Args:
      config: of the model.
      params: its parameters, on the device.
      window: most tokens of a job.
      max_batch_size: how many slots.
      chunk_tokens: most new tokens per prefill pass.
      shorter_passes: whether passes may be shorter than that before a prompt's last one.
      timeline: told of what is dispatched.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: steps.Params,
        *,
        window: int,
        max_batch_size: int,
        chunk_tokens: int,
        shorter_passes: bool = False,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._config = config
        self._params = params
        self._timeline = timeline
        self._layers = [params["params"][f"layer_{i}"] for i in range(config.num_layers)]
        outer = {name: part for name, part in params["params"].items() if not name.startswith("layer_")}
        self._outer = {"params": outer}
        self.chunk_tokens = chunk_tokens
        coarse = jax.default_backend() != "cpu"  # There padding is cheap and compiling is not.
        self.new_token_buckets = new_token_buckets(chunk_tokens, coarse)
        self.pass_sizes = pass_sizes(chunk_tokens) if shorter_passes else (chunk_tokens,)
        self.history_buckets = history_buckets(window, coarse)
        self.batch_buckets = batch_buckets(max_batch_size)
        # Padding behind a job's tokens must fit too: an update that overlaps the end would be moved, not cut.
        widest = max(window + self._max_padding(), self.history_buckets[-1])
        self._capacity = -(-widest // SLOT_BLOCK) * SLOT_BLOCK
        self._dtype = str(params["params"]["embed"]["embedding"].dtype)
        self._table = steps.rotation_table(config, self._capacity + chunk_tokens)
        self._slots = steps.make_slots(config, max_batch_size, self._capacity, self._dtype)
        is_gpu = jax.default_backend() != "cpu"
        self._scatters = is_gpu
        self._needs_static_extent = is_gpu and slot_attention(self._slots.keys[0]) != "kernel"

    @property
    def slot_bytes(self) -> int:
        """Of all decode slots."""
        return sum(buffer.nbytes for buffer in jax.tree.leaves(self._slots))

    @property
    def param_bytes(self) -> int:
        """Of the model's parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._params))

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

    def padded(self, num_history: int, num_new: int) -> tuple[int, int]:
        """What a prefill of such lengths computes, in tokens."""
        whole, rest = divmod(num_new, self.chunk_tokens)
        rest = pad_to(self.new_token_buckets, rest) if rest else 0
        return self.padded_history(num_history), whole * self.chunk_tokens + rest

    # Prefill.

    def start_prefill(self, slot: int, tokens: list[int], history_length: int) -> Prefill:
        """Begins a job's prefill; runs nothing.

        Args:
          slot: where it will decode.
          tokens: new ones.
          history_length: tokens before them.

        Raises:
          ValueError: no tokens.
        """
        if not tokens:
            raise ValueError("wanted at least one new token to prefill, found none")
        return Prefill(slot, tokens, history_length, past=[None] * self._config.num_layers)

    def run_pass(
        self,
        prefill: Prefill,
        num_tokens: int,
        history: LayerSource | None = None,
        on_layer: Callable[[int, jax.Array], None] = _no_layer,
    ) -> None:
        """Runs some of the new tokens over all that is before them, layer by layer. Does not wait for the device.

        Args:
          prefill: which; changed.
          num_tokens: how many; one of `pass_sizes`, unless they are the last.
          history: of the first pass, where there is a history.
          on_layer: called with each layer's new unrotated KV `[2, T, K, H]` as soon as that is dispatched.
        """
        start = prefill.history_length + prefill.num_done
        part = prefill.tokens[prefill.num_done : prefill.num_done + num_tokens]
        is_last = len(part) == prefill.num_left
        padded = np.zeros((1, pad_to(self.new_token_buckets, len(part))), np.int32)
        padded[0, : len(part)] = part
        x = steps.embed(self._config, self._outer, to_device(padded))
        length = to_device(start, np.int32)
        prefill.kv, prefill.outputs, prefill.last_start = [], [], start
        for i, layer_params in enumerate(self._layers):
            with self._timeline.annotate("engine", f"dispatch {i}", layer=i):
                if history is not None:
                    with self._timeline.annotate("engine", f"await {i}", layer=i):
                        prefill.past[i] = history.layer(i)
                x, kv = steps.prefill_layer(self._config, layer_params, x, prefill.past[i], length, self._table)
                prefill.kv.append(kv)
                prefill.outputs.append(x)
                if history is not None:
                    history.computed(i, x)
                on_layer(i, kv)
                if not is_last:
                    self._extend_past(prefill, i, length, start + len(part), history)
        prefill.num_done += len(part)
        prefill.owns_past |= not is_last
        if is_last:
            prefill.logits = steps.last_logits(self._config, self._outer, x, to_device(len(part) - 1, np.int32))

    def insert_past(self, prefill: Prefill, layer: int) -> jax.Array:
        """Puts a layer's tokens before the last pass into the slot, rotated; a scalar, ready when that is done.

        Nobody may decode between the first such call and `insert`: rows that are not in use are written to.
        """
        past = prefill.past[layer]
        if past is None or layer in prefill.inserted:
            raise RuntimeError(f"layer {layer} has nothing to insert")
        prefill.inserted.add(layer)
        return self._insert_layer(layer, past, to_device(prefill.slot, np.int32), to_device(0, np.int32))

    def insert(self, prefill: Prefill) -> dict[int, jax.Array]:
        """Puts a job's KV into its decode slot, rotated, as far as it is not there. Does not wait.

        Returns:
          For each layer whose past was inserted now, a scalar that is ready when that is done.
        """
        done = {}
        slot, start = to_device(prefill.slot, np.int32), to_device(prefill.last_start, np.int32)
        for layer, kv in enumerate(prefill.kv):
            if prefill.past[layer] is not None and layer not in prefill.inserted:
                done[layer] = self.insert_past(prefill, layer)
            self._insert_layer(layer, kv, slot, start)
        return done

    def _extend_past(
        self, prefill: Prefill, layer: int, start: jax.Array, num_tokens: int, history: LayerSource | None
    ) -> None:
        """Puts a pass's KV behind its past, so that the next pass finds all of it."""
        past, capacity = prefill.past[layer], self.padded_history(num_tokens)
        if past is None:
            past = self.empty_kv(capacity)
        elif not prefill.owns_past or past.shape[1] != capacity:
            past, done = steps.grow_history(past, capacity)
            if history is not None:
                history.used(layer, done)
        prefill.past[layer] = steps.append_history(past, prefill.kv[layer], start)

    def _insert_layer(self, layer: int, kv: jax.Array, slot: jax.Array, start: jax.Array) -> jax.Array:
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        self._slots.keys[layer], self._slots.values[layer], done = steps.insert_slot(
            keys, values, kv, slot, start, self._table
        )
        return done

    # Decoding.

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
            self._scatters,
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
        histories = {size: self.empty_kv(size) for size in self.history_buckets if 0 < size <= reach}
        new_sizes = [size for size in self.new_token_buckets if size <= largest]
        total, done = len(new_sizes) * (1 + len(histories)), 0
        zero = to_device(0, np.int32)
        for new_size in new_sizes:
            x = self._embedded(new_size)
            steps.last_logits(self._config, self._outer, x, zero)
            for history in (None, *histories.values()):  # One layer will do: all share their compiled functions.
                steps.prefill_layer(self._config, self._layers[0], x, history, zero, self._table)
                done += 1
                if progress is not None:
                    progress("compile", done, total)
            self._insert_layer(0, self.empty_kv(new_size), zero, zero)
        for history in histories.values():
            self._insert_layer(0, history, zero, zero)
        self._warm_up_passes(histories)
        for rows in self.batch_buckets:
            for extent in self._decode_extents:
                lengths = np.full(rows, extent - 1, np.int32)
                jax.block_until_ready(self.decode(np.zeros(rows, np.int32), lengths))

    def _warm_up_passes(self, histories: dict[int, jax.Array]) -> None:
        """Compiles what is between two passes of one prompt, whatever was before the first."""
        zero = to_device(0, np.int32)
        for below, size in itertools.pairwise((0, *histories)):
            reached = {
                self._padded_up_to(length + num_new)
                for num_new in self.pass_sizes
                for length in (below + 1, size)  # Passes of one size reach all buckets in between.
            }
            for capacity in self.history_buckets:
                if min(reached) <= capacity <= max(reached):
                    steps.grow_history(histories[size], capacity)
        for num_new in self.pass_sizes:
            new = self.empty_kv(num_new)
            for capacity in self.history_buckets:
                if capacity >= num_new:
                    steps.append_history(self.empty_kv(capacity), new, zero)

    def measure_prefill(self, max_history: int, max_new: int) -> list[tuple[int, int, float]]:
        """Times one layer at a few pairs of lengths up to these, compiled by `warmup`, and the head once.

        Returns:
          Padded history tokens, padded new tokens, and seconds of all layers and the head.
        """
        new_sizes = sorted({pad_to(self.new_token_buckets, min(size, max_new)) for size in (16, max_new // 4, max_new)})
        pasts = sorted({self.padded_history(size) for size in (0, max_history // 2, max_history)})
        zero, samples = to_device(0, np.int32), []
        for num_new in new_sizes:
            x = self._embedded(num_new)
            for num_past in pasts:
                past = self.empty_kv(num_past) if num_past else None
                seconds = []
                for _ in range(_TIMED_RUNS):
                    jax.block_until_ready((x, past))
                    started_s = time.perf_counter()
                    out, _ = steps.prefill_layer(self._config, self._layers[0], x, past, zero, self._table)
                    out.block_until_ready()
                    layer_s = time.perf_counter() - started_s
                    steps.last_logits(self._config, self._outer, out, zero).block_until_ready()
                    head_s = time.perf_counter() - started_s - layer_s
                    seconds.append(layer_s * self._config.num_layers + head_s)
                samples.append((num_past, num_new, min(seconds)))
        return samples

    def _embedded(self, num_tokens: int) -> jax.Array:
        return steps.embed(self._config, self._outer, to_device(np.zeros((1, num_tokens), np.int32)))

    def empty_kv(self, num_tokens: int) -> jax.Array:
        """One layer's KV `[2, T, K, H]`, all zeros."""
        return steps.empty_kv(self._config, num_tokens, self._dtype)

    def _padded_up_to(self, num_tokens: int) -> int:
        return self.padded_history(min(num_tokens, self.history_buckets[-1]))

    def wait(self) -> None:
        """Returns when everything dispatched so far has reached the slots."""
        jax.block_until_ready(self._slots)
