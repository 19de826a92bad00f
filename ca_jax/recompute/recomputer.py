"""A sequence of stored KV, some tokens of which are computed anew as its layers come.

`Recomputer` is one sequence under one plan. `RecomputedHistory` is a history on its way from the store to its prefill:
each layer is repaired, and blended, as soon as it is in its pages, so that the pipeline stays one. What is there then
is what the prefill reads, and what is stored from then on.

Shapes: D parts, T' places for tokens of a step, n tokens of a plan, C places of a row, K KV heads, H head dim, F embed.

Not here: which tokens (plan), one layer (layers), what drift is (drift), what is loaded (kv.load).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import jax
import numpy as np

from ca_jax.device.passes import LayerSource
from ca_jax.device.runner import Runner
from ca_jax.device.steps import Params
from ca_jax.device.transfer import to_host
from ca_jax.device.warmup import Compile, Shapes, compile_layer
from ca_jax.models.config import ModelConfig
from ca_jax.models.paged_attention import Rows
from ca_jax.models.rope import Rotation
from ca_jax.models.sharding import ModelSharding
from ca_jax.recompute.drift import Drift, add_drift
from ca_jax.recompute.layers import choose_deviating, kv_kind, recompute_layer
from ca_jax.recompute.plan import Plan, num_asking, repaired_rows, step_width

JOINED_TOKENS = 128
"""Tokens, at most, of a history that are computed anew in one with new ones: more take long enough by themselves."""


class Computer(Protocol):
    """What computes a model's layers: `Runner`, or somebody with arrays of their own."""

    config: ModelConfig
    """Of the model."""
    layers: list[Params]
    """Its layers' parameters."""
    tables: tuple[Rotation, ...]
    """Rotations of all places, of each of `config.ropes`."""
    packs_kv: bool
    """Whether new KV is handed out in int8."""

    @property
    def sharding(self) -> ModelSharding | None:
        """Of the model."""

    @property
    def to_device(self) -> Callable[..., jax.Array]:
        """See `transfer.to_device`."""

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """Embeddings `[D, T', F]` of tokens, i32 `[D, T']`."""


@dataclasses.dataclass(frozen=True)
class PagedRow:
    """Where a sequence lies."""

    table: np.ndarray
    """i32 `[D, M]`, its pages, among those of its part; of other parts anything."""
    page_tokens: int
    """Places of a page."""
    part: int = 0
    """Which part of the devices it is in."""


class Recomputer:
    """One sequence under a plan, layer by layer.

    Args:
      computer: of what model.
      plan: which tokens.
      token_ids: of all places.
      lies: where it does.
      width: least T'.
      behind: tokens behind it that are computed in one with those of the plan, which has as many in each layer.
      adapter: the adapter slot of all of them; None where there are no slots.

    Raises:
      ValueError: fewer token ids than the plan has tokens.
    """

    def __init__(
        self,
        computer: Computer,
        plan: Plan,
        token_ids: Sequence[int],
        lies: PagedRow,
        *,
        width: int = 0,
        behind: Sequence[int] = (),
        adapter: int | None = None,
    ) -> None:
        if len(token_ids) < plan.start + plan.num_tokens:
            raise ValueError(f"there must be ids of {plan.start + plan.num_tokens} tokens, got {len(token_ids)}")
        self._computer = computer
        self._plan = plan
        self._put = computer.to_device
        table, part = lies.table, lies.part
        self._part = part
        self._num_parts = len(table)
        self._num_places = table.shape[1] * lies.page_tokens
        self._count = plan.counts[0] + len(behind)
        self._num_rows = (repaired_rows(self._count),) * plan.num_layers if behind else plan.rows
        chosen = plan.start + plan.first_rows
        new = np.arange(len(token_ids), len(token_ids) + len(behind))
        tokens, places = np.zeros((2, self._num_parts, step_width(width, self._num_rows[0])), np.int32)
        tokens[part, : self._count] = [*(token_ids[place] for place in chosen), *behind]
        places[part, : self._count] = *chosen, *new
        self.x = computer.embed(tokens)
        """`[D, T', F]`, what goes into the next layer: of the plan's tokens, then of those behind."""
        self.kv: jax.Array | None = None
        """Unrotated KV of the same, `[2, D n, K, H]`, in the last layer that was computed."""
        self._rows = Rows(self._put(table), self._starts(), self._put(places.ravel()))
        self._adapters = None if adapter is None else self._put(np.full(tokens.shape, adapter, np.int32))
        self._always: jax.Array | None = None
        self._carried: tuple[jax.Array, ...] = ()

    def layer(self, layer: int, pages: jax.Array) -> jax.Array:
        """A layer's pages `[P, 2, K, page, H]`, which are donated, to those with what was computed. In order of layers.

        What is at places of new tokens and behind the plan's tokens is not read. Does not wait for the device. Layers
        behind the plan's have no KV of their own, and are given the pages that they read.
        """
        plan, by = self._plan, self._computer
        planned = min(layer, plan.num_layers - 1)
        count = plan.counts[planned]
        if not count:
            return pages
        if count < plan.counts[max(planned - 1, 0)] and layer == planned:
            always = self._always_there()
            found = choose_deviating(
                by.config,
                by.layers[layer],
                self.x,
                pages,
                self._rows,
                always,
                self._put(count, np.int32),
                plan.rows[layer - 1],
                kv_kind(by.config, layer),
                by.sharding,
                self._adapters,
            )
            self._count = count
            self.x, self._rows = found[0], self._rows._replace(starts=self._starts(), places=found[1])
        kind = by.config.kind_of(layer)
        self.x, kv, pages = recompute_layer(
            by.config,
            by.layers[layer],
            self.x,
            pages,
            self._rows,
            by.tables[kind.rope],
            self._num_rows[planned],
            kind,
            self._carried_at(layer) if kind.has_kv else (),
            by.sharding,
            by.packs_kv,
            self._adapters,
        )
        self.kv = self.kv if kv is None else kv
        return pages

    def _starts(self) -> jax.Array:
        starts = np.zeros((self._num_parts, 2), np.int32)
        starts[self._part, 1] = self._count
        return self._put(starts.ravel())

    def _always_there(self) -> jax.Array:
        if self._always is None:
            self._always = self._put(self._of_places(self._plan.always))
        return self._always

    def _carried_at(self, layer: int) -> tuple[jax.Array, ...]:
        """Which of the computed tokens say how others move, and which places move; nothing where none does."""
        plan = self._plan
        if plan.moves is None or plan.fitted is None or layer < plan.moves_from:
            return ()
        if not self._carried:
            fitted = np.zeros((self._num_parts, self._num_rows[0]), bool)
            fitted[self._part, : plan.counts[0]] = plan.fitted[plan.first_rows]
            self._carried = self._put(fitted), self._put(self._of_places(plan.moves))
        return self._carried

    def _of_places(self, of_tokens: np.ndarray) -> np.ndarray:
        found = np.zeros((self._num_parts, self._num_places), bool)
        found[self._part, self._plan.start : self._plan.start + self._plan.num_tokens] = of_tokens
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repair:
    """What is to be done to a history from which tokens have left."""

    plan: Plan | None
    """Which of its tokens are computed anew; None: none."""
    drift: Drift | None = None
    """Of the model; None adds nothing."""
    to_drift: tuple[int, ...] = ()
    """For each time that others left, how many of its tokens, the first ones, were there."""
    num_plain: int = 0
    """First tokens that had seen no token that left; those behind them drift."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What stands behind a context and says which of its tokens matter."""

    token_ids: Sequence[int]
    """At most as many as a pass may have."""
    before: Plan
    """What of the context is computed before it asks: tokens without KV."""
    plan: Callable[[np.ndarray], Plan]
    """How the context is blended, by the attention that its places received, f32 `[num_places]`: as many tokens in
    each layer whatever that is."""


class RecomputedHistory:
    """A history that is repaired, blended, or both, layer by layer; to a prefill it is like any other.

    Args:
      slot: that it is read in.
      token_ids: of all its places.
      repair: of the session's own first tokens; None: they are as they should be.
      blend: how the chunks behind them are computed; None: without chunks.
      question: by which the blend's tokens are chosen; None: they are chosen.
    """

    def __init__(
        self,
        source: LayerSource,
        slot: int,
        token_ids: list[int],
        runner: Runner,
        *,
        repair: Repair | None = None,
        blend: Plan | None = None,
        question: Question | None = None,
    ) -> None:
        self._plans = [plan for plan in (None if repair is None else repair.plan, blend) if plan is not None]
        self.num_recomputed = self._plans[-1].num_recomputed if self._plans else 0.0
        """Tokens with stored KV computed anew; of some layers alone, times their share of the layers."""
        self.is_blended = blend is not None
        """Whether it has chunks."""
        self.num_fused = 0 if blend is None else blend.num_tokens
        """Tokens whose KV is not what computing all of the context would give, since they are of chunks."""
        plain = [blend.start] if blend is not None and blend.num_tokens else []
        plain += [repair.num_plain] if repair is not None else []
        self.num_plain: int | None = min(plain, default=None)
        """First tokens whose KV is; None: all."""
        self._source = source
        self._slot = slot
        self._token_ids = token_ids
        self._runner = runner
        self._repair = repair
        self._question = question
        self._num_brought = 0  # First layers with KV that are in their pages already.
        self._recomputers: list[Recomputer] = []
        self._behind: Sequence[int] = ()
        is_alone = blend is None and len(self._plans) == 1 and not runner.with_attention
        moves = is_alone and self._plans[0].moves is not None and not self._plans[0].moves_from
        self.num_chosen = self._plans[0].counts[0] if moves else 0
        """Tokens that are computed anew in each layer, where new ones may be with them; else 0."""

    def may_join(self, num_new: int) -> bool:
        """Whether so many new tokens behind it may be computed with those that are computed anew."""
        return 0 < self.num_chosen <= JOINED_TOKENS - num_new

    def join(self, token_ids: Sequence[int]) -> RecomputedHistory:
        """Has new tokens behind it be computed with those that are computed anew, so that weights are read once."""
        self._behind = token_ids
        return self

    @property
    def num_rows(self) -> int:
        """Rows that are computed of both."""
        return repaired_rows(self.num_chosen + len(self._behind))

    @property
    def joined(self) -> tuple[jax.Array, jax.Array]:
        """Of the layer that was mended last: `Recomputer.x` and `kv`, new tokens' among it, from `num_chosen` on."""
        [recomputer] = self._recomputers
        if recomputer.kv is None:
            raise RuntimeError("a layer must be mended before it is read, and none is")
        return recomputer.x, recomputer.kv

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `LayerSource`."""
        self._source.computed(layer, result)

    def layer(self, layer: int) -> jax.Array | None:
        """See `LayerSource`: as it is loaded, and drifted."""
        if self._question is not None:
            question, self._question = self._question, None
            self._plans[-1] = question.plan(self._attention_of(question))
        if layer < self._num_brought:
            return None
        kv, repair, put = self._source.layer(layer), self._repair, self._runner.to_device
        if kv is not None and repair is not None and repair.drift is not None and repair.to_drift:
            kv, drift = self._runner.unpacked(kv), put(repair.drift.values[layer])
            for stop in repair.to_drift:
                kv = add_drift(kv, drift, put(repair.num_plain, np.int32), put(stop, np.int32))
        return kv

    def _attention_of(self, question: Question) -> np.ndarray:
        """What places receive from a question in the first layers, over KV as it is stored, which stays in its pages.

        Where nothing is stored it is computed. f32 `[num_places]`, summed over layers, heads and tokens. Waits for the
        device.
        """
        runner, slot, num_places = self._runner, self._slot, len(self._token_ids)
        runner.pool.make_room(slot, num_places + len(question.token_ids), num_places)
        step = runner.laid_out({slot: (num_places, question.token_ids)})
        x, seen_by = runner.embed(step.tokens), list[jax.Array]()
        has_new = question.before.num_new > 0
        before = make_recomputer(runner, slot, question.before, self._token_ids, ()) if has_new else None
        for layer in range(num_asking(runner.config.num_layers)):
            runner.bring(self, slot, layer, num_places)
            if before is not None and layer in runner.config.kv_layers:
                source = runner.config.kv_number(layer)
                runner.pool.buffers[source] = before.layer(layer, runner.pool.buffers[source])
            x, _, _, seen = runner.layer(layer, x, step, with_attention=True)
            seen_by.append(seen)
        self._num_brought = sum(each <= layer for each in runner.config.kv_layers)
        received = np.sum([to_host(seen) for seen in seen_by], axis=0)
        return received[step.slots.index(slot), :num_places]

    def mend(self, layer: int) -> None:
        """Computes a layer anew that is in its pages, as far as the plans say. In order of layers.

        Of one without KV of its own nothing is left to be read but what new tokens make of it.
        """
        if layer not in self._runner.config.kv_layers and not self._behind:
            return
        if not layer:
            self._recomputers = [
                make_recomputer(self._runner, self._slot, each, self._token_ids, self._behind) for each in self._plans
            ]
        for recomputer in self._recomputers:
            buffers, source = self._runner.pool.buffers, self._runner.config.kv_number(layer)
            buffers[source] = recomputer.layer(layer, buffers[source])


def make_recomputer(
    runner: Runner, slot: int, plan: Plan, token_ids: Sequence[int], behind: Sequence[int]
) -> Recomputer:
    """Has tokens of a history computed anew that lies in a slot's pages."""
    part, table = runner.pool.place(slot)
    size, width = runner.pool.size, runner.step_tokens
    lies, adapters = PagedRow(table, size.page_tokens, part), runner.adapters
    adapter = None if adapters.are_off else adapters.of_row(slot)
    return Recomputer(runner, plan, token_ids, lies, width=width, behind=behind, adapter=adapter)


def asking_functions(shapes: Shapes) -> list[Compile]:
    """What asking a question which tokens matter needs to be compiled."""
    runner = shapes.runner
    kinds = {runner.config.kind_of(layer): layer for layer in range(num_asking(runner.config.num_layers))}
    ask = partial(compile_layer, shapes, with_attention=True)
    return [partial(ask, layer, size) for layer in kinds.values() for size in runner.token_buckets]


def functions_of(shapes: Shapes, plan: Plan) -> list[Compile]:
    """What computing anew by such a plan needs to be compiled."""
    runner, places = shapes.runner, shapes.most_pages * shapes.runner.pool.size.page_tokens
    width = step_width(runner.step_tokens, plan.rows[0])
    bools, adapters = partial(shapes.small, shapes.num_parts, dtype=bool), shapes.adapters(shapes.num_parts, width)

    def recompute(layer: int, rows: int) -> None:
        kind = runner.config.kind_of(layer)
        moves = plan.moves is not None and layer >= plan.moves_from and kind.has_kv
        shapes.compiled(
            recompute_layer,
            runner.config,
            shapes.layers[layer],
            shapes.embedded(width),
            shapes.pages[runner.config.kv_number(layer)],
            shapes.rows(shapes.num_parts, width),
            shapes.tables[kind.rope],
            rows,
            kind,
            (bools(rows), bools(places)) if moves else (),
            runner.sharding,
            runner.packs_kv,
            adapters,
        )

    def choose(layer: int) -> None:
        x, rows = shapes.embedded(width), shapes.rows(shapes.num_parts, width)
        given = runner.config, shapes.layers[layer], x, shapes.pages[layer], rows, bools(places), shapes.small()
        kind = kv_kind(runner.config, layer)
        shapes.compiled(choose_deviating, *given, plan.rows[layer - 1], kind, runner.sharding, adapters)

    found, kind_of = dict[object, Compile](), runner.config.kind_of
    for layer, (count, rows) in enumerate(zip(plan.counts, plan.rows, strict=True)):
        if count:
            found.setdefault((rows, layer < plan.moves_from, kind_of(layer)), partial(recompute, layer, rows))
        if layer and 0 < count < plan.counts[layer - 1]:
            found.setdefault((plan.rows[layer - 1], kv_kind(runner.config, layer), "choice"), partial(choose, layer))
    if plan.moves is not None:  # New tokens may be computed with the plan's, and go through all layers.
        for layer in range(plan.num_layers, runner.config.num_layers):
            found.setdefault((plan.rows[-1], False, kind_of(layer)), partial(recompute, layer, plan.rows[-1]))
    return list(found.values())
