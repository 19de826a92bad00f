"""Owner of device state: weights, padded lengths, decode slots. Prefills, fills slots, and decodes.

    run_pass ...    some of a prompt's tokens through all layers, over a history that comes layer by layer
    draw            the first token, once all passes are dispatched
    insert          what the passes gave into the job's decode slot: put off until the first token has gone out
    decode ...      a token for every slot in use, one step ahead of the host where it may

A `Prefill` alone says what of a job is in its slot.

Not here: sessions, the store, what to run (batch), the slots' buffers (slots), jitted code (steps).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import jax
import numpy as np

from ca_jax.device import steps
from ca_jax.device.buckets import batch_buckets, history_buckets, new_token_buckets, pad_to, pass_sizes, slot_tokens
from ca_jax.device.sampler import Draw, Sampler
from ca_jax.device.slots import DecodeSlots, RunnerSizes
from ca_jax.device.transfer import params_to_device, to_device, to_host
from ca_jax.models.attention import SLOT_BLOCK
from ca_jax.models.config import ModelConfig
from ca_jax.models.cpu_kernels import pack_params
from ca_jax.models.sharding import ModelSharding, bytes_per_device, replicated
from ca_jax.session import Job
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

_TIMED_RUNS = 3
JOINED_TOKENS = 64
"""New tokens, at most, that are computed together with the repair of their history, and what they are padded to: more
take long enough by themselves, and each length is compiled for."""


Join = Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""Repairs a layer of a history in the pass that reads it, given what goes into it of new tokens, and the history's
length. Returns the history `[2, S, K, H]`, and of the new tokens what goes into the next layer and their KV."""


class LayerSource(Protocol):
    """Where a prefill takes its history from, layer by layer."""

    @property
    def num_held(self) -> int:
        """How many layers, the last ones, may be read until the job's slot is filled. Of the others nothing is read
        behind the pass that they are taken for: before the next layer is taken, `used` is said of each."""

    def layer(self, layer: int) -> jax.Array:
        """Unrotated KV `[2, S, K, H]`, or in int8 `[2, S, K, H + 2]`, S as `Runner.padded_history` says."""

    def computed(self, layer: int, result: jax.Array) -> None:
        """The layer was computed when `result` is ready."""

    def used(self, layer: int, result: jax.Array) -> None:
        """Nothing else reads what `layer` gave when `result` is ready."""


@dataclasses.dataclass(frozen=True)
class Received:
    """Attention that tokens received from the new ones of one pass, summed over layers and query heads."""

    attention: jax.Array
    """f32 `[S + T]`, places of history first."""
    num_places: int
    """S."""
    start: int
    """Tokens of history, and the place of the first new one."""
    num_new: int
    """New tokens."""

    def add_to(self, attention: np.ndarray) -> None:
        """Adds it up over a context, f32 `[T]`. Waits for the pass."""
        received = to_host(self.attention)
        attention[: self.start] += received[: self.start]
        attention[self.start : self.start + self.num_new] += received[self.num_places :][: self.num_new]


@dataclasses.dataclass
class Prefill:
    """A job's prefill, from its first pass to its insertion into the decode slot: says what of it is there already.

    Raises:
      ValueError: no tokens.
    """

    slot: int
    """Where it will decode."""
    tokens: list[int]
    """New ones."""
    history_length: int
    """Tokens before them, whose KV is loaded."""
    num_done: int = 0
    """New tokens that were dispatched."""
    past: dict[int, jax.Array] = dataclasses.field(default_factory=dict)
    """By layer the unrotated KV `[2, S, K, H]` of all tokens before the last pass, before the first pass as it was
    kept; none where there are none, or they are in the slot."""
    kv: list[jax.Array] = dataclasses.field(default_factory=list)
    """Per layer the unrotated KV `[2, T, K, H]` of the last pass."""
    outputs: list[jax.Array] = dataclasses.field(default_factory=list)
    """Per layer `x [1, T, F]` of the last pass: ready when the layer is computed."""
    last_start: int = 0
    """Position of the last pass's first token."""
    logits: jax.Array | None = None
    """Of the last token, f32 `[1, V]`; None before the last pass."""
    owns_past: bool = False
    """Whether `past` is its own, and not staging."""
    source: LayerSource | None = None
    """Where `past` came from at first."""
    received: list[Received] = dataclasses.field(default_factory=list)
    """Of each pass, the attention that tokens received in it, if the runner measures that."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("a prefill must have at least one new token, got none")

    @property
    def num_left(self) -> int:
        """New tokens that are to be dispatched."""
        return len(self.tokens) - self.num_done


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A decode step that has been dispatched."""

    batch: tuple[tuple[int, int, int], ...]  # Slot, job, and tokens in the slot.
    lengths: np.ndarray
    num_gone: np.ndarray
    logits: jax.Array
    draw: Draw | None  # None: it depends on the last step's tokens.
    kv: jax.Array
    received: jax.Array | None


class Runner:
    """Runs a model over its decode slots. Belongs to the engine's thread."""

    def __init__(
        self,
        config: ModelConfig,
        params: steps.Params,
        sizes: RunnerSizes,
        *,
        timeline: Timeline = NO_TIMELINE,
        sharding: ModelSharding | None = None,
    ) -> None:
        self.sharding = sharding
        """Of the model."""
        self.window = sizes.window
        """Most tokens of a job."""
        self.to_device = partial(to_device, sharding=replicated(sharding))
        """Copies small host data to all devices of the model; see `transfer.to_device`."""
        self.config = config
        """Of the model."""
        if sharding is None:
            params = {**params, "packed": params_to_device(pack_params(config, params["params"]))}
        self.param_bytes = bytes_per_device(params)
        """Of the model's parameters, on each device."""
        self._timeline = timeline
        self.with_attention = sizes.with_attention
        self._packs_kv = sizes.packs_kv
        self.layers = [steps.layer_of(params, i) for i in range(config.num_layers)]
        self._outer = {
            kind: {name: part for name, part in tree.items() if not name.startswith("layer_")}
            for kind, tree in params.items()
        }
        self.chunk_tokens = chunk_tokens = sizes.chunk_tokens
        coarse = jax.default_backend() != "cpu"  # There padding is cheap and compiling is not.
        self.new_token_buckets = new_token_buckets(chunk_tokens, coarse)
        self.pass_sizes = pass_sizes(chunk_tokens) if sizes.shorter_passes else (chunk_tokens,)
        self.history_buckets = history_buckets(sizes.window, coarse)
        # Slots that lie on several devices are decoded all: their first ones are one device's alone.
        is_whole = sharding is None or sharding.num_data == 1
        self.batch_buckets = batch_buckets(sizes.num_slots) if is_whole else (sizes.num_slots,)
        capacity = slot_tokens(sizes.window, chunk_tokens, SLOT_BLOCK, coarse)
        # One layer of each window: those of the same share their compiled functions.
        self._kinds = tuple({config.window_of(layer): layer for layer in reversed(range(config.num_layers))}.values())
        self.num_windows = len(self._kinds)
        """Different windows of the model's layers."""
        self._dtype = str(params["params"]["embed"]["embedding"].dtype)
        self.table = steps.rotation_table(config, capacity + chunk_tokens, sizes.window, sharding)
        self.slots = DecodeSlots(config, params, self.table, sizes, capacity, sharding)
        self.sampler = Sampler(sizes.num_slots, config.vocab_size, sharding)
        self._ahead: _Flight | None = None  # A step that was dispatched before it was asked for.

    def padded_history(self, num_tokens: int) -> int:
        """The history length that `num_tokens` are padded to."""
        return pad_to(self.history_buckets, num_tokens)

    def padded(self, num_history: int, num_new: int) -> tuple[int, int]:
        """What a prefill of such lengths computes, in tokens."""
        whole, rest = divmod(num_new, self.chunk_tokens)
        rest = pad_to(self.new_token_buckets, rest) if rest else 0
        return self.padded_history(num_history), whole * self.chunk_tokens + rest

    # Prefill.

    def run_pass(
        self,
        prefill: Prefill,
        num_tokens: int,
        history: LayerSource | None = None,
        on_layer: Callable[[int, jax.Array], None] = lambda layer, kv: None,
        join: Join | None = None,
    ) -> None:
        """Runs some of the new tokens over all that is before them, layer by layer. Does not wait for the device.

        Args:
          prefill: which; changed.
          num_tokens: how many; one of `pass_sizes`, unless they are the last.
          history: of the first pass, where there is a history.
          on_layer: called with each layer's new unrotated KV `[2, T, K, H]` as soon as that is dispatched.
          join: repairs the history in this pass: the only one, of at most `JOINED_TOKENS`; in place of `history.layer`.
        """
        start = prefill.history_length + prefill.num_done
        part = prefill.tokens[prefill.num_done : prefill.num_done + num_tokens]
        is_last = len(part) == prefill.num_left
        padded = np.zeros((1, JOINED_TOKENS if join else pad_to(self.new_token_buckets, len(part))), np.int32)
        padded[0, : len(part)] = part
        x = self.embed(padded)
        length = self.to_device(start, np.int32)
        received: list[jax.Array] = []
        prefill.kv, prefill.outputs, prefill.last_start = [], [], start
        prefill.source = history or prefill.source
        for i in range(self.config.num_layers):
            with self._timeline.annotate("engine", f"dispatch {i}", layer=i):
                if join is not None:
                    prefill.past[i], x, kv = join(i, x, length)
                else:
                    if history is not None:
                        with self._timeline.annotate("engine", f"await {i}", layer=i):
                            prefill.past[i] = history.layer(i)
                    x, kv, *attention = self._prefill_layer(i, x, prefill.past.get(i), length, len(part))
                    received += attention
                prefill.kv.append(kv)
                prefill.outputs.append(x)
                if history is not None:
                    history.computed(i, x)
                on_layer(i, kv)
                if not is_last:
                    self._extend_past(prefill, i, length, start + len(part), history)
                elif history is not None and i < self.config.num_layers - history.num_held:
                    self._insert_past(prefill, i)  # Later on it would wait for all that is dispatched meanwhile.
        if received:
            prefill.received.append(
                Received(sum(received[1:], received[0]), received[0].shape[0] - padded.shape[1], start, len(part))
            )
        prefill.num_done += len(part)
        prefill.owns_past |= not is_last
        if is_last:
            prefill.logits = self._last_logits(x, self.to_device(len(part) - 1, np.int32))

    def _prefill_layer(
        self, layer: int, x: jax.Array, past: jax.Array | None, length: jax.Array, num_new: int
    ) -> tuple[jax.Array, ...]:
        """Dispatches a layer of a pass: `x`, new KV and, if that is measured, what tokens received in it."""
        window, count = self.config.window_of(layer), None
        if self.with_attention:
            count = self.to_device(num_new, np.int32)
        return steps.prefill_layer(
            self.config, self.layers[layer], x, past, length, self.table, window, self.sharding, count
        )

    def draw(self, prefill: Prefill, num_before: int) -> Draw:
        """Draws the token behind a prompt, all of which was dispatched, and waits for it.

        Args:
          num_before: tokens before it, those that have left included.
        """
        if prefill.logits is None:
            raise RuntimeError(f"all tokens of the prompt must be dispatched, got {prefill.num_left} that are not")
        return self.sampler.draw(prefill.logits, np.array([num_before]), prefill.slot)

    def insert(self, prefill: Prefill, *, with_past: bool = True) -> None:
        """Puts a job's KV into its decode slot, rotated, as far as it is not there. Does not wait."""
        slot, start = self.to_device(prefill.slot, np.int32), self.to_device(prefill.last_start, np.int32)
        for layer, kv in enumerate(prefill.kv):
            if with_past and layer in prefill.past:
                self._insert_past(prefill, layer)
            self.slots.insert(layer, kv, slot, start)

    def _insert_past(self, prefill: Prefill, layer: int) -> None:
        """Puts a layer's tokens before the last pass into the slot. Nobody may decode between that and `insert`."""
        past = prefill.past.pop(layer)  # No later pass reads it.
        done = self.slots.insert(layer, past, self.to_device(prefill.slot, np.int32), self.to_device(0, np.int32))
        if prefill.source is not None:
            prefill.source.used(layer, done)

    def _extend_past(
        self, prefill: Prefill, layer: int, start: jax.Array, num_tokens: int, history: LayerSource | None
    ) -> None:
        """Puts a pass's KV behind its past, so that the next pass finds all of it."""
        past, capacity = prefill.past.get(layer), self.padded_history(num_tokens)
        if past is None:
            past = self.empty_kv(capacity)
        elif not prefill.owns_past or past.shape[1] != capacity:
            past, done = steps.grow_history(past, capacity, self._dtype, self.sharding)
            if history is not None:
                history.used(layer, done)
        prefill.past[layer] = steps.append_history(past, prefill.kv[layer], start, self.sharding)

    # Decoding.

    def decode(
        self, jobs: Sequence[Job], run_ahead: bool, on_dispatched: Callable[[], None]
    ) -> tuple[Draw, jax.Array, np.ndarray | None]:
        """Decodes one token for each job, and waits for them.

        The next step is dispatched before this one's tokens are read: the device computes while Python hands out text
        and plans. Where an answer has penalties, which the host counts, a step's tokens are drawn once the last ones
        are read; its logits are computed ahead all the same. A step that was dispatched and is not wanted, since the
        batch changed, is thrown away: it wrote keys and values only behind its jobs' lengths, where they are never
        attended to and are written again.

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
            num_rows = pad_to(self.batch_buckets, 1 + max(rows))
            tokens, lengths, num_gone = (np.zeros(num_rows, np.int32) for _ in range(3))
            for slot, job in rows.items():
                tokens[slot], lengths[slot], num_gone[slot] = job.output_ids[-1], job.num_tokens - 1, job.num_gone
            flight = self._dispatch(batch, tokens, lengths, num_gone)
        draw = flight.draw or self._draw(flight.logits, flight.lengths, flight.num_gone)
        if run_ahead:
            lengths = flight.lengths.copy()
            lengths[list(rows)] += 1
            ahead = tuple((slot, job_id, length + 1) for slot, job_id, length in batch)
            draws = not self.sampler.has_penalties
            self._ahead = self._dispatch(ahead, draw.tokens, lengths, flight.num_gone, draws=draws)
        on_dispatched()
        received = None if flight.received is None else to_host(flight.received)
        return draw.wait(), flight.kv, received

    def remake_if_broken(self) -> bool:
        """Makes anew, empty, what a call that broke has taken of slots or sampler; whether one had."""
        return self.slots.remake_if_broken() | self.sampler.forget_if_broken()

    def _dispatch(
        self,
        batch: tuple[tuple[int, int, int], ...],
        tokens: np.ndarray | jax.Array,
        lengths: np.ndarray,
        num_gone: np.ndarray,
        *,
        draws: bool = True,
    ) -> _Flight:
        logits, kv, received = self.slots.decode(tokens, lengths)
        draw = self._draw(logits, lengths, num_gone) if draws else None
        return _Flight(batch, lengths, num_gone, logits, draw, kv, received)

    def _draw(self, logits: jax.Array, lengths: np.ndarray, num_gone: np.ndarray) -> Draw:
        """By how many tokens there were: the same number must not come again when some have left."""
        return self.sampler.start(logits, lengths + num_gone + 1)

    # Recomputing and truncation.

    def embed_history(self, token_ids: list[int]) -> jax.Array:
        """Embeds the tokens of a history, `[1, S, F]`, padded to its bucket."""
        row = np.zeros((1, self.padded_history(len(token_ids))), np.int32)
        row[0, : len(token_ids)] = token_ids
        return self.embed(row)

    def recompute_first(self, slot: int, tokens: list[int], num_tokens: int) -> None:
        """Computes the first tokens of a slot anew, with nothing before them, and puts them there. Does not wait.

        Args:
          slot: which.
          tokens: all that are in it.
          num_tokens: how many to compute; rounded up to what is compiled.
        """
        _, count = self.padded(0, num_tokens)
        prefill = Prefill(slot, tokens[:count], 0)
        while prefill.num_left:
            self.run_pass(prefill, min(self.chunk_tokens, prefill.num_left))
            self.insert(prefill, with_past=False)  # Its past is padded: each pass is put in by itself.

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
        kept = {size: self.at_rest(history) for size, history in histories.items()}
        new_sizes = [size for size in self.new_token_buckets if size <= largest]
        pasts: list[jax.Array | None] = [None, *kept.values()]
        if self._packs_kv:  # Behind a first pass the past is unpacked.
            least = self.padded_history(min(self.pass_sizes))
            pasts += [history for size, history in histories.items() if size >= least]
        total, done = len(new_sizes) * len(pasts), 0
        zero = self.to_device(0, np.int32)
        for new_size in new_sizes:
            x = self.embed(np.zeros((1, new_size), np.int32))
            self._last_logits(x, zero)
            for history in pasts:
                for layer in self._kinds:
                    self._prefill_layer(layer, x, history, zero, 1)
                done += 1
                if progress is not None:
                    progress("compile", done, total)
            self.at_rest(self.empty_kv(new_size))
            self.slots.insert(0, self.empty_kv(new_size), zero, zero)
        for history in (*histories.values(), *kept.values()):
            self.slots.insert(0, history, zero, zero)
        self._warm_up_passes(histories)
        if self._packs_kv:
            self._warm_up_passes(kept)
        for rows in self.batch_buckets:
            for extent in self.slots.extents:
                lengths = np.full(rows, extent - 1, np.int32)
                jax.block_until_ready(self.slots.decode(np.zeros(rows, np.int32), lengths))

    def _warm_up_passes(self, histories: dict[int, jax.Array]) -> None:
        """Compiles what is between two passes of one prompt, whatever was before the first."""
        zero = self.to_device(0, np.int32)
        for below, size in itertools.pairwise((0, *histories)):
            reached = {
                self.padded_history(min(length + num_new, self.history_buckets[-1]))
                for num_new in self.pass_sizes
                for length in (below + 1, size)  # Passes of one size reach all buckets in between.
            }
            for capacity in self.history_buckets:
                if min(reached) <= capacity <= max(reached):
                    steps.grow_history(histories[size], capacity, self._dtype, self.sharding)
        for num_new in self.pass_sizes:
            new = self.empty_kv(num_new)
            for capacity in self.history_buckets:
                if capacity >= num_new:
                    steps.append_history(self.empty_kv(capacity), new, zero, self.sharding)

    def measure_prefill(self, max_history: int, max_new: int) -> list[tuple[int, int, float]]:
        """Times a layer of each kind at a few pairs of lengths up to these, compiled by `warmup`, and the head once.

        Returns:
          Padded history tokens, padded new tokens, and seconds of all layers and the head.
        """
        new_sizes = sorted({pad_to(self.new_token_buckets, min(size, max_new)) for size in (16, max_new // 4, max_new)})
        pasts = sorted({self.padded_history(size) for size in (0, max_history // 2, max_history)})
        zero, samples = self.to_device(0, np.int32), []
        for num_new in new_sizes:
            x = self.embed(np.zeros((1, num_new), np.int32))
            for num_past in pasts:
                past = self.at_rest(self.empty_kv(num_past)) if num_past else None
                samples.append((num_past, num_new, min(self._timed(x, past, zero) for _ in range(_TIMED_RUNS))))
        return samples

    def _timed(self, x: jax.Array, past: jax.Array | None, zero: jax.Array) -> float:
        """Seconds of all layers and the head, from one layer of each kind."""
        windows = [self.config.window_of(layer) for layer in range(self.config.num_layers)]
        seconds = 0.0
        for layer in self._kinds:
            jax.block_until_ready((x, past))
            started_s = time.perf_counter()
            out = self._prefill_layer(layer, x, past, zero, x.shape[1])[0]
            out.block_until_ready()
            seconds += (time.perf_counter() - started_s) * windows.count(windows[layer])
        started_s = time.perf_counter()
        self._last_logits(out, zero).block_until_ready()
        return seconds + time.perf_counter() - started_s

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """Embeddings `[1, T, F]` of tokens, i32 `[1, T]`."""
        return steps.embed(self.config, self._outer, self.to_device(tokens), self.sharding)

    def _last_logits(self, x: jax.Array, index: jax.Array) -> jax.Array:
        return steps.last_logits(self.config, self._outer, x, index, self.sharding)

    def empty_kv(self, num_tokens: int) -> jax.Array:
        """One layer's KV `[2, T, K, H]`, all zeros."""
        return steps.empty_kv(self.config, num_tokens, self._dtype, self.sharding)

    def at_rest(self, kv: jax.Array) -> jax.Array:
        """One layer's KV `[2, T, K, H]` as it is kept: in int8 `[2, T, K, H + 2]`, or as it is. Does not wait."""
        return steps.pack_kv(kv, self.sharding) if self._packs_kv else kv

    def unpacked(self, kv: jax.Array) -> jax.Array:
        """One layer's KV as it is kept to `[2, T, K, H]`. Does not wait."""
        return steps.unpack_kv(kv, self._dtype, self.sharding) if self._packs_kv else kv
