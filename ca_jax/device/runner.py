"""Owner of device state: weights, padded lengths, the pool of pages. Computes prompts and decodes.

    run_pass ...    tokens of prompts through all layers, over histories that come layer by layer
    decode ...      a token for every running job, one step ahead of the host where it may

What either computes is in the pages when it is dispatched; nothing is moved behind it.

Not here: sessions, the store, what to run (batch), the pages' books (pages), jitted code (steps).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from ca_jax import backend
from ca_jax.device import steps
from ca_jax.device.adapters import AdapterSlots
from ca_jax.device.buckets import batch_buckets, history_buckets, pad_to, token_buckets
from ca_jax.device.pages import PagePool
from ca_jax.device.passes import Decoded, Flight, LayerSource, Passed, PassPart, Received, RunnerSizes, Step
from ca_jax.device.sampler import Draw, Sampler
from ca_jax.device.states import StatePool
from ca_jax.device.transfer import params_to_device, to_device, to_host
from ca_jax.models.adapters import Adapter
from ca_jax.models.config import ModelConfig
from ca_jax.models.cpu_kernels import pack_params
from ca_jax.models.kv import SCALE_BYTES
from ca_jax.models.sharding import ModelSharding, bytes_per_device, replicated
from ca_jax.models.small_weights import dtype_of
from ca_jax.session import Job
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

_READ_TOKENS = 512  # Of pages, at a time.
_FINE_WINDOW = 8_192  # Above it there are so many padded histories that other functions must be fewer.


class Runner:
    """Runs a model over the pages of contexts. Belongs to the engine's thread."""

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
        self.window = sizes.pool.max_tokens
        """Most tokens of a job."""
        self.to_device = partial(to_device, sharding=replicated(sharding))
        """Copies small host data to all devices of the model; see `transfer.to_device`."""
        self.config = config
        """Of the model."""
        if sharding is None:
            params = {**params, "packed": params_to_device(pack_params(config, params["params"]))}
        self.dtype = str(dtype_of(params))
        """Of KV as it is computed."""
        self.adapters = AdapterSlots(config, sizes.adapters, self.dtype, sizes.pool.num_rows, sharding)
        """Which adapters there are, and which each row has."""
        if not self.adapters.are_off:
            params = {**params, "adapters": self.adapters.arrays()}
        params = steps.with_places(config, params, self.to_device)
        self.param_bytes = bytes_per_device(params)
        """Of the model's parameters, on each device."""
        self.params = params
        """Of the model, with what lies packed beside them."""
        self._timeline = timeline
        self.with_attention = sizes.with_attention
        self.packs_kv = sizes.packs_kv
        """Whether KV is kept in int8."""
        self.layers = [steps.layer_of(params, i) for i in range(config.num_layers)]
        self.outer = {
            kind: {name: part for name, part in tree.items() if not name.startswith("layer_")}
            for kind, tree in params.items()
        }
        """The parameters outside of layers."""
        self.chunk_tokens = sizes.chunk_tokens
        self._num_slots = sizes.pool.num_rows
        self.step_tokens = sizes.chunk_tokens + self._num_slots
        """Places for tokens of each part of a step."""
        self._num_parts = sizes.pool.num_parts
        is_coarse = backend.here().coarse_steps or self.window > _FINE_WINDOW
        self.token_buckets = token_buckets(sizes.chunk_tokens, coarse=is_coarse)
        most = 0 if config.num_states else backend.here().whole_tokens
        self.whole_tokens = max((size for size in self.token_buckets if size <= most), default=0)
        """Most tokens of a pass that is one function."""
        self.history_buckets = history_buckets(self.window)
        self.batch_buckets = batch_buckets(self._num_slots // self._num_parts, backend.here().least_rows)
        """Rows of each part that decode."""
        has_drafts = sizes.max_draft_tokens > 0 and not (config.num_states or sizes.with_attention)
        self.draft_buckets = backend.here().draft_sizes if has_drafts else ()
        """Tokens of each part of a step that checks drafts, padding too; none: no draft can be checked."""
        self.kinds = tuple({config.kind_of(layer): layer for layer in reversed(range(config.num_layers))}.values())
        """A layer of each kind."""
        self.shapes = tuple({shape: number for number, shape in enumerate(config.kv_shapes)}.values())
        """A layer of each shape of KV, by its number among `config.kv_layers`."""
        self._kv_number = [config.kv_number(layer) for layer in range(config.num_layers)]
        self.pool = PagePool(config, self.dtype, sizes.pool, sharding)
        """The pages of all contexts."""
        self.states = StatePool(config, self.dtype, sizes.pool, sharding)
        """Where rows stand in layers that keep states."""
        num_places = max(self.history_buckets[-1], sizes.pool.most_pages * sizes.pool.page_tokens)
        self.read_tokens = min(_READ_TOKENS, self.pool.size.most_pages * self.pool.size.page_tokens)
        """KV of so many tokens is read from pages at a time."""
        self.tables = steps.rotation_tables(config, num_places, self.window, sharding)
        """Rotations of all places, of each of `config.ropes`."""
        self.sampler = Sampler(self._num_slots, config.vocab_size, sharding)
        self._ahead: Flight | None = None  # A step that was dispatched before it was asked for.

    def put_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """Has a slot hold an adapter, or none, from the next step on. Steps that were dispatched are not changed."""
        self.adapters.put(slot, adapter)
        self.params = {**self.params, "adapters": self.adapters.arrays()}
        self.layers = [steps.layer_of(self.params, i) for i in range(self.config.num_layers)]

    def padded_history(self, num_tokens: int) -> int:
        """The history length that `num_tokens` are padded to where they are brought or recomputed."""
        return pad_to(self.history_buckets, num_tokens)

    def padded(self, num_history: int, num_new: int) -> tuple[int, int]:
        """What a prefill of such lengths computes, in tokens."""
        whole, rest = divmod(num_new, self.chunk_tokens)
        return num_history, whole * self.chunk_tokens + (pad_to(self.token_buckets, rest) if rest else 0)

    def placed(self, slots: Iterable[int], num_rows: int | None = None) -> list[int | None]:
        """Slots as rows: those of a part one behind the other, as many of each part, None for padding.

        Args:
          num_rows: of a part; None: the least that are compiled for.
        """
        of_parts: list[list[int | None]] = [[] for _ in range(self._num_parts)]
        for slot in slots:
            of_parts[self.pool.size.part_of(slot)].append(slot)
        each = num_rows or pad_to(self.batch_buckets, max(map(len, of_parts)))
        return [slot for part in of_parts for slot in (*part, *[None] * (each - len(part)))]

    # Prompts.

    def run_pass(self, parts: Sequence[PassPart], jobs: Sequence[Job] = ()) -> Passed:
        """Runs tokens of prompts over all that is before them, layer by layer. Does not wait for the device.

        What breaks of a part alone is kept in it, and the others go on.

        Args:
          parts: what of which prompts; their prefills are changed.
          jobs: that decode a token each in the same pass; the KV of their last token is not computed yet.

        Returns:
          Draws of the prompts that are complete with this, and of the jobs.
        """
        spans = {job.slot: (job.num_tokens - 1, job.output_ids[-1:]) for job in jobs if job.slot is not None}
        for part in parts:
            prefill = part.prefill
            spans[prefill.slot] = prefill.start, prefill.tokens[prefill.num_done :][: part.num_tokens]
            if part.history is not None:
                self.pool.make_room(prefill.slot, prefill.start, 0)
            prefill.outputs = []
        for slot, (start, new) in spans.items():
            self.pool.make_room(slot, start + len(new), start)
        step = self.laid_out(spans)
        self._ahead = None
        if step.num_tokens <= self.whole_tokens and all(part.history is None for part in parts):
            return self._run_whole(parts, jobs, step)
        x = self.embed(step.tokens)
        joined = parts[0].joined if parts else None
        if joined is not None:  # It is alone.
            step = step.behind(joined.num_chosen, joined.num_rows)
        decoded: list[jax.Array] = []
        received: list[jax.Array] = []
        for i in range(self.config.num_layers):
            with self._timeline.annotate("engine", f"dispatch {i}", layer=i):
                if self.config.is_recurrent(i):
                    [x] = self.layer(i, x, step)
                    continue
                for part in parts:
                    self._bring(part, i)
                if not jobs and all(part.error is not None for part in parts):
                    break
                if joined is not None:
                    x, kv = joined.joined
                else:
                    x, kv, first, *seen = self.layer(i, x, step)
                    received += seen
                    decoded += [] if first is None else [first]
                for part in parts if i in self.config.kv_layers else ():
                    part.take(self._kv_number[i], kv, step.kv_row(part.prefill.slot))
        self.states.stands({slot: start + len(new) for slot, (start, new) in spans.items()})
        of_jobs = steps.stack_layers(self.config, decoded, self.packs_kv, self.sharding) if jobs else None
        return self._passed(parts, jobs, step, x, of_jobs, sum(received[1:], received[0]) if received else None)

    def _run_whole(self, parts: Sequence[PassPart], jobs: Sequence[Job], step: Step) -> Passed:
        """A pass of few tokens, all before which is in pages: one function."""
        with self._timeline.annotate("engine", "dispatch all"):
            x, kv, first, self.pool.buffers, received = steps.model_step(
                self.config,
                self.params,
                self.pool.buffers,
                self.to_device(step.tokens),
                step.rows,
                self.tables,
                step.num_tokens,
                self._num_slots // self._num_parts,
                with_attention=self.with_attention,
                packs=self.packs_kv,
                sharding=self.sharding,
                adapters=step.adapters,
            )
        for part in parts:
            for i, of_layer in enumerate(kv):
                part.take(i, of_layer, step.kv_row(part.prefill.slot))
        return self._passed(parts, jobs, step, x, first if jobs else None, received)

    def laid_out(self, spans: Mapping[int, tuple[int, Sequence[int]]], sizes: tuple[int, ...] = ()) -> Step:
        """How a step lies: by slot the place of the first token, and the tokens.

        Args:
          sizes: what the tokens of each part are padded to, all places that there are; none: as passes are.
        """
        slots = self.placed(spans, self._num_slots // self._num_parts)
        counts = [0] * self._num_parts
        for slot, (_, new) in spans.items():
            counts[self.pool.size.part_of(slot)] += len(new)
        num_tokens = pad_to(sizes or self.token_buckets, max(counts))
        tokens = np.zeros((self._num_parts, num_tokens if sizes else self.step_tokens), np.int32)
        ends, first = [0] * self._num_parts, {}
        for slot, (_, new) in spans.items():
            part = self.pool.size.part_of(slot)
            first[slot], ends[part] = ends[part], ends[part] + len(new)
            tokens[part, first[slot] : ends[part]] = new
        of_rows = [None if slot is None else (slot, spans[slot][0], len(spans[slot][1])) for slot in slots]
        rows = self.pool.rows(of_rows, tokens.shape[1])
        last = {slot: first[slot] + len(new) - 1 for slot, (_, new) in spans.items()}
        of_part = {slot: self.pool.size.part_of(slot) for slot in spans}
        at = {slot: (of_part[slot], first[slot], len(new)) for slot, (_, new) in spans.items()}
        adapters = None if self.adapters.are_off else self.to_device(self.adapters.of_tokens(tokens.shape, at))
        return Step(rows, slots, tokens, num_tokens, of_part, first, last, adapters, self.states.cells(slots))

    def _bring(self, part: PassPart, layer: int) -> None:
        """Puts a layer of a part's history into its pages."""
        if part.history is None or part.error is not None:
            return
        try:
            self.bring(part.history, part.prefill.slot, layer, part.prefill.history_length)
            part.mend(layer)
        except Exception as error:
            part.error = error

    def bring(self, history: LayerSource, slot: int, layer: int, num_tokens: int) -> None:
        """Puts a layer of a history of so many tokens into a slot's pages, if it has KV of its own."""
        if layer not in self.config.kv_layers:
            return
        number = self._kv_number[layer]
        with self._timeline.annotate("engine", f"await {layer}", layer=layer):
            kv = history.layer(number)
        if kv is not None:
            start = self.pool.first_seen(slot, number)
            history.computed(number, self.pool.fill(slot, number, kv, start, num_tokens - start))

    def layer(self, layer: int, x: jax.Array, step: Step, *, with_attention: bool = False) -> list[Any]:
        """Dispatches a layer of a pass: `x`, new KV, that of first tokens and, if it is measured, what was received.

        Of one that keeps states `x` alone.

        Args:
          with_attention: whether it is measured in any case.
        """
        kind, source = self.config.kind_of(layer), self._kv_number[layer]
        if kind.is_recurrent:
            return [self.states.layer_step(layer, self.layers[layer], x, step)]
        x, kv, first, self.pool.buffers[source], *received = steps.layer_step(
            self.config,
            self.layers[layer],
            x,
            self.pool.buffers[source],
            step.rows,
            self.tables[kind.rope],
            step.num_tokens,
            kind,
            self._num_slots // self._num_parts,
            with_attention=self.with_attention or with_attention,
            packs=self.packs_kv,
            sharding=self.sharding,
            adapters=step.adapters,
        )
        return [x, kv, first, *received]

    def _passed(
        self,
        parts: Sequence[PassPart],
        jobs: Sequence[Job],
        step: Step,
        x: jax.Array,
        kv: tuple[jax.Array, ...] | None,
        received: jax.Array | None,
    ) -> Passed:
        """What a pass gives, all layers of which were dispatched."""
        places = {job.slot: job.num_tokens + job.num_gone for job in jobs if job.slot is not None}
        of_slot: dict[int, Received] = {}
        if received is not None:
            rows = {slot: row for row, slot in enumerate(step.slots) if slot is not None}
            ends = {job.slot: job.num_tokens for job in jobs}
            ends |= {part.prefill.slot: part.prefill.start + part.num_tokens for part in parts}
            of_slot = {slot: Received(received, row, ends[slot]) for slot, row in rows.items()}
        for part in parts:
            part.take_hidden(x, step.part[part.prefill.slot], step.first[part.prefill.slot])
            if part.error is not None:
                continue
            prefill = part.prefill
            prefill.num_done += part.num_tokens
            if prefill.slot in of_slot:
                prefill.received.append(of_slot.pop(prefill.slot))
            if not prefill.num_left and part.draws_behind is not None:
                places[prefill.slot] = part.draws_behind
        draw, slots = None, self.placed(places)
        if places:
            index = [0 if slot is None else step.last[slot] for slot in slots]
            found = steps.row_logits(self.config, self.outer, x, self.to_device(index, np.int32), self.sharding)
            draw = self._draw(found, slots, [0 if slot is None else places[slot] for slot in slots])
        rows = {slot: row for row, slot in enumerate(slots) if slot is not None}
        width = 0 if kv is None else kv[0].shape[2] // self._num_parts
        kv_rows = {job.slot: step.part[job.slot] * width + step.first[job.slot] for job in jobs if job.slot is not None}
        return Passed(draw, rows, kv, kv_rows, of_slot)

    # Decoding.

    def decode(self, jobs: Sequence[Job], run_ahead: bool) -> Decoded:
        """Decodes one token for each job, and waits for them.

        The next step is dispatched before this one's tokens are read: the device computes while Python hands out text
        and plans. Where an answer has penalties or a grammar, which the host follows, a step's tokens are drawn once
        the last ones are read; its logits are computed ahead all the same. A step that was dispatched and is not
        wanted, since the batch changed, is thrown away: it wrote only behind its jobs' tokens, where nothing is
        attended to and is written again.

        Args:
          jobs: at least one, each in a slot; the KV of its last token is not computed yet.
          run_ahead: whether all are likely to want another token, and no other job may begin before that.
        """
        by_slot = {job.slot: job for job in jobs if job.slot is not None}
        batch = _batch_of(jobs)
        flight, self._ahead = self._ahead, None
        if flight is None or flight.batch != batch:
            slots = self.placed(by_slot)
            running = [None if slot is None else by_slot[slot] for slot in slots]
            tokens = np.fromiter((0 if job is None else job.output_ids[-1] for job in running), np.int32)
            lengths = np.fromiter((0 if job is None else job.num_tokens - 1 for job in running), np.int32)
            num_gone = np.fromiter((0 if job is None else job.num_gone for job in running), np.int32)
            flight = self.dispatch(batch, slots, self.to_device(tokens), lengths, num_gone)
        self.states.stands({slot: length + 1 for slot, _, length in batch})
        draw = flight.draw or self._draw(flight.found, flight.slots, flight.lengths + flight.num_gone + 1)
        if run_ahead:
            ahead = tuple((slot, job_id, length + 1) for slot, job_id, length in batch)
            draws = not self.sampler.waits_for_marks
            lengths = flight.lengths + 1
            drawn = draw.tokens if isinstance(draw.tokens, jax.Array) else self.to_device(draw.tokens)
            self._ahead = self.dispatch(ahead, flight.slots, drawn, lengths, flight.num_gone, draws=draws)
        received = None if flight.received is None else to_host(flight.received)
        rows = {slot: row for row, slot in enumerate(flight.slots) if slot is not None}
        return Decoded(draw.wait(), flight.kv, rows, received)

    def check(self, jobs: Sequence[Job], drafts: Mapping[int, Sequence[int]]) -> Decoded:
        """Decodes the token behind each job's last one, and behind each token of its draft, and waits for them.

        What is drawn behind a token that the draft has wrong is nothing: it has seen what is not there. It is in the
        pages behind the job's tokens, where nothing is attended to and is written again.

        Args:
          jobs: as of `decode`.
          drafts: by slot, the tokens that may follow; a job without one decodes a token.
        """
        spans = {job.slot: (job.num_tokens - 1, job.output_ids[-1:]) for job in jobs if job.slot is not None}
        spans = {slot: (start, [*last, *drafts.get(slot, ())]) for slot, (start, last) in spans.items()}
        for slot, (start, new) in spans.items():
            self.pool.make_room(slot, start + len(new), start)
        step, self._ahead = self.laid_out(spans, self.draft_buckets), None
        logits, likeliest, kv, self.pool.buffers, _ = steps.decode(
            self.config,
            self.params,
            self.pool.buffers,
            self.to_device(step.tokens.ravel()),
            step.rows,
            self.tables,
            one_each=False,
            packs=self.packs_kv,
            sharding=self.sharding,
            adapters=step.adapters,
        )
        slots: list[int | None] = [None] * step.tokens.size
        places = np.zeros(step.tokens.size, np.int32)
        rows = {slot: step.kv_row(slot) for slot in spans}
        for job in jobs:
            if job.slot is not None:
                own = slice(rows[job.slot], rows[job.slot] + len(spans[job.slot][1]))
                slots[own] = [job.slot] * (own.stop - own.start)
                places[own] = job.num_tokens + job.num_gone + np.arange(own.stop - own.start)
        draw = self._draw((logits, likeliest), slots, places)
        return Decoded(draw.wait(), kv, rows, None)

    def is_ahead(self, jobs: Sequence[Job]) -> bool:
        """Whether the next token of these jobs was dispatched already."""
        return self._ahead is not None and self._ahead.batch == _batch_of(jobs)

    def remake_if_broken(self) -> bool:
        """Makes anew, empty, what a call that broke has taken of pages, states or sampler; whether one had."""
        is_broken = self.pool.remake_if_broken() | self.states.remake_if_broken()
        return is_broken | self.sampler.forget_if_broken()

    def dispatch(
        self,
        batch: tuple[tuple[int, int, int], ...],
        slots: list[int | None],
        tokens: jax.Array,
        lengths: np.ndarray,
        num_gone: np.ndarray,
        *,
        draws: bool = True,
    ) -> Flight:
        """Dispatches a step of a token i32 `[n]` for each row; fields of `Flight` say what else is given."""
        spans: list[tuple[int, int, int] | None] = []
        for slot, length in zip(slots, map(int, lengths), strict=True):
            if slot is not None:
                self.pool.make_room(slot, length + 1, length)
            spans.append(None if slot is None else (slot, length, 1))
        rows, received = self.pool.rows(spans, len(spans) // self._num_parts), None
        if self.states.are_none:
            logits, likeliest, kv, self.pool.buffers, received = steps.decode(
                self.config,
                self.params,
                self.pool.buffers,
                tokens,
                rows,
                self.tables,
                with_attention=self.with_attention,
                packs=self.packs_kv,
                sharding=self.sharding,
                adapters=None if self.adapters.are_off else self.to_device(self.adapters.of_rows(slots)),
            )
        else:
            given = slots, self.params, self.pool.buffers, tokens, rows, self.tables
            logits, likeliest, kv, self.pool.buffers = self.states.decode(*given, packs=self.packs_kv)
        found = logits, likeliest
        draw = self._draw(found, slots, lengths + num_gone + 1) if draws else None
        return Flight(batch, slots, lengths, num_gone, found, draw, kv, received)

    def _draw(self, found: tuple[jax.Array, jax.Array], slots: Sequence[int | None], places: npt.ArrayLike) -> Draw:
        """By how many tokens there were: the same number must not come again when some have left."""
        logits, likeliest = found
        return self.sampler.start(logits, places, slots, likeliest)

    # KV and tokens.

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """Embeddings `[D, T, F]` of tokens, i32 `[D, T]`."""
        return steps.embed(self.config, self.outer, self.to_device(tokens), self.sharding)

    def read(self, slot: int, num_tokens: int) -> Iterator[tuple[slice, int, list[jax.Array]]]:
        """The KV of a slot's first tokens as it is kept, some at a time.

        Yields:
          Their places, which row of the arrays is the first's, and an array `[2, T, K, H]` for each layer.
        """
        size = self.read_tokens
        row = self.pool.size.part_of(slot) * size
        numbers = range(len(self.config.kv_layers))
        for start in range(0, num_tokens, size):
            kv = [self.pool.read(slot, number, start, size, packs=self.packs_kv) for number in numbers]
            yield slice(start, min(start + size, num_tokens)), row, kv

    def loaded_shape(self, layer: int, num_tokens: int) -> jax.ShapeDtypeStruct:
        """How the history of a layer with KV comes, as it is kept: `[2, T, K, H]`, or in int8 `[2, T, K, H + 2]`."""
        (parts, num_kv, width), dtype = self.config.kv_shapes[layer], self.dtype
        if self.packs_kv:
            width, dtype = width + SCALE_BYTES, "int8"
        sharding = None if self.sharding is None else self.sharding.kv
        return jax.ShapeDtypeStruct((parts, num_tokens, num_kv, width), dtype, sharding=sharding)

    def empty_kv(self, layer: int, num_tokens: int) -> jax.Array:
        """A layer's KV as it is kept, all zeros."""
        shape = self.loaded_shape(layer, num_tokens)
        return to_device(np.zeros(shape.shape, shape.dtype), sharding=shape.sharding)

    def unpacked(self, kv: jax.Array) -> jax.Array:
        """One layer's KV as it is kept to `[2, T, K, H]`. Does not wait."""
        return steps.unpack_kv(kv, self.dtype, self.sharding) if self.packs_kv else kv


def _batch_of(jobs: Sequence[Job]) -> tuple[tuple[int, int, int], ...]:
    return tuple((job.slot, job.job_id, job.num_tokens - 1) for job in jobs if job.slot is not None)
