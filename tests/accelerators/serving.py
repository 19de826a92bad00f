"""What an engine would compile to serve a model on a chip: every kind of jitted step.

The only file here that knows the steps' arguments.

Not here: their shapes (shapes), compiling them, and what is read from the result (compiling).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ca_jax.device import page_steps, sampler, state_steps, steps
from ca_jax.device.buckets import history_buckets, token_buckets
from ca_jax.device.prompt_logprobs import token_logprobs
from ca_jax.models.paged_attention import Rows
from ca_jax.recompute.layers import choose_deviating, kv_kind, recompute_layer
from ca_jax.turns.requests import MAX_LOGPROBS
from tests.accelerators.shapes import DTYPE, Shapes

HISTORY_TOKENS = 1024
"""Of histories that are brought into pages."""
_READ_TOKENS = 512
REPAIRED_TOKENS = 256
"""Of a history that is repaired, those that are computed anew."""
PROMPT_LOGPROBS = 64
"""Tokens of a prompt whose likelihoods are computed together."""
WITH_ADAPTERS = ("llama3-8b",)
"""Models that decode with adapters, too."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A jitted function and its arguments."""

    name: str
    """As in tables."""
    function: Any
    """Jitted."""
    arguments: tuple[Any, ...]
    """In order; shapes for arrays."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By name."""
    donated: Any = ()
    """Shapes of those arguments that it gives back changed, in place."""
    takes_everything: bool = False
    """Whether it takes all weights and all pages, and next to nothing else."""
    num_kernels: int = 0
    """Times that attention over pages is in it."""
    num_sums: int = 0
    """All-reduces at most, on a mesh."""
    num_gathers: int = 0
    """All-gathers at most, on a mesh."""
    sent_bytes: int = 0
    """Most bytes of one of either."""
    flops: float = 0
    """Of the products by weights on each device; attention comes on top."""
    read_bytes: float = 0
    """Of the weights on each device, which are read once."""
    product_bytes: float = 0
    """These, and what goes into each product by weights and comes out of it."""

    def lower(self) -> Any:
        """As jax has it, for the devices that the shapes name."""
        return self.function.lower(*self.arguments, **self.options)


class Setup(Shapes):
    """A model on a chip, or on four, and all steps that serve it there."""

    def steps(self) -> Iterator[Step]:
        """All that serving uses, the smallest and the largest of those that come in several sizes."""
        yield from self._passes()
        yield from self._decoding() if self.model.num_states else self._all_layers()
        yield from self._drawing()
        yield from self._moves()
        if self.chip.platform == "tpu":
            yield from self._yardsticks()

    def _step(self, name: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Step:
        counts = {field.name: more.pop(field.name) for field in dataclasses.fields(Step) if field.name in more}
        return Step(name, function, arguments, more, **counts)

    def _passes(self) -> Iterator[Step]:
        """What a pass consists of."""
        model, sharding, engine = self.model, self.sharding, self.engine
        num_rows, longest = engine.max_batch_size, engine.max_num_batched_tokens
        width = longest + num_rows
        tokens = self.shape(1, width)
        sent = {"num_sums": 1, "sent_bytes": self.activations(width)}
        yield self._step("embed", steps.embed, model, self.outer, tokens, sharding=sharding, **sent)
        yield self._step("rotation_tables", steps.rotation_tables, model, self.window, self.window, sharding)
        buckets = token_buckets(longest, coarse=True)
        for name, layer in self.kinds.items():
            for num_tokens in (buckets[0], buckets[-1]):
                yield self._layer_step(f"layer_step, {num_tokens} tokens{name}", layer, num_tokens)
            if not model.num_states:
                yield self._recompute(f"recompute_layer, {REPAIRED_TOKENS} tokens{name}", layer)
        if not model.num_states:
            yield self._layer_step(f"layer_step, {longest} tokens, attention", 0, longest, with_attention=True)
            yield self._choice()
        first = [self.kv(num_rows, number, axes=steps.STEP_KV) for number in range(len(model.kv_shapes))]
        for packs in (False, True):
            name = "stack_layers" + (", int8" if packs else "")
            yield self._step(name, steps.stack_layers, model, first, packs=packs, sharding=sharding)

    def _layer_step(self, name: str, layer: int, num_tokens: int, *, with_attention: bool = False) -> Step:
        model, kind, num_rows = self.model, self.model.kind_of(layer), self.engine.max_batch_size
        params, rows = steps.layer_of(self.variables, layer), self.rows(num_rows, self.x.shape[1])
        work = self.work(params, num_tokens)
        if kind.is_recurrent:
            arguments = (model, params, self.x, self.states[0], self.cells(num_rows), rows, num_tokens, kind)
            return self._step(
                name,
                state_steps.layer_step,
                *arguments,
                sharding=self.sharding,
                donated=(self.x, *self.states[0]),
                num_sums=self.num_sums(layer),
                num_gathers=1,
                sent_bytes=max(self.activations(num_tokens), self.channels(num_tokens)),
                **work,
            )
        pages = self.pages_of(layer)
        received = 4 * num_rows * self.num_places if with_attention else 0
        return self._step(
            name,
            steps.layer_step,
            *(model, params, self.x, pages, rows, self.tables[kind.rope], num_tokens, kind, num_rows),
            with_attention=with_attention,
            sharding=self.sharding,
            donated=(self.x, pages),
            num_kernels=int(self.has_kernel(layer)),
            num_sums=self.num_sums(layer) + with_attention,
            sent_bytes=self.activations(num_tokens) + received,  # XLA may send both together.
            **work,
        )

    def _recompute(self, name: str, layer: int) -> Step:
        kind, pages = self.model.kind_of(layer), self.pages_of(layer)
        params, rows = steps.layer_of(self.variables, layer), self.rows(1, self.x.shape[1])
        moved = [self.shape(1, size, dtype=bool) for size in (REPAIRED_TOKENS, self.num_places)]
        table = self.tables[kind.rope]
        return self._step(
            name,
            recompute_layer,
            *(self.model, params, self.x, pages, rows, table, REPAIRED_TOKENS, kind),
            carried=tuple(moved) if kind.has_kv else (),
            sharding=self.sharding,
            donated=(self.x, pages),
            num_kernels=int(self.has_kernel(layer)),
            num_sums=2,
            sent_bytes=self.activations(REPAIRED_TOKENS),
            **self.work(params, REPAIRED_TOKENS),
        )

    def _choice(self) -> Step:
        """Which tokens are computed anew from the second layer on."""
        always = self.shape(1, self.num_places, dtype=bool)
        rows, params = self.rows(1, self.x.shape[1]), steps.layer_of(self.variables, 1)
        arguments = (self.model, params, self.x, self.pages_of(1), rows, always, self.shape(), REPAIRED_TOKENS)
        kind = kv_kind(self.model, 1)
        sent = {"num_sums": 1, "sent_bytes": 4 * REPAIRED_TOKENS}
        return self._step("choose_deviating", choose_deviating, *arguments, kind, self.sharding, **sent)

    def _all_layers(self) -> Iterator[Step]:
        """Steps through all layers and, of decoding, the head."""
        model, sharding, pages = self.model, self.sharding, self.all_pages
        width, num_rows = self.x.shape[1], self.engine.max_batch_size
        few = token_buckets(self.engine.max_num_batched_tokens, coarse=True)[0]
        of_all = {
            **{"sharding": sharding, "donated": pages, "num_kernels": self.num_kernels},
            "num_sums": 2 * model.num_layers + 1,
        }
        rows, tables = self.rows(num_rows, width), self.tables
        yield self._step(
            f"model_step, {few} tokens",
            steps.model_step,
            *(model, self.variables, pages, self.shape(1, width), rows, tables, few, num_rows),
            sent_bytes=self.activations(width),
            **of_all,
            **self.work(self.params, few),
        )

        def decode(name: str, count: int, rows: Rows, params: steps.Params, **options: Any) -> Step:
            return self._step(
                name,
                steps.decode,
                *(model, params, pages, self.shape(count), rows, tables),
                takes_everything=True,
                num_gathers=1,
                sent_bytes=max(self.activations(count), self.logits(count)),
                **of_all,
                **options,
                **self.work(self.params, count),
            )

        drafts = self.chip.served_as.draft_sizes[0]
        rows = self.rows(num_rows, drafts)
        yield decode(f"decode, drafts in {drafts} tokens", drafts, rows, self.variables, one_each=False)
        for count in (self.row_buckets[0], self.row_buckets[-1]):
            yield decode(f"decode, {count} rows", count, self.rows(count, count), self.variables)
        rows = self.rows(count, count)
        yield decode(f"decode, {count} rows, int8", count, rows, self.variables, packs=True)
        if self.preset in WITH_ADAPTERS:
            step = decode(
                f"decode, {count} rows, adapters", count, rows, self.with_adapters, adapters=self.shape(count)
            )
            yield dataclasses.replace(step, takes_everything=False, num_gathers=1)

    def _decoding(self) -> Iterator[Step]:
        """Steps of decoding with layers that keep states."""
        pages = self.all_pages
        for count in (self.row_buckets[0], self.row_buckets[-1]):
            of_rows = self.cells(count), self.shape(count), self.rows(count, count), self.tables
            for packs in (False, True) if count == self.row_buckets[-1] else (False,):
                yield self._step(
                    f"decode, {count} rows" + (", int8" if packs else ""),
                    state_steps.decode,
                    *(self.model, self.variables, pages, self.states, *of_rows),
                    packs=packs,
                    sharding=self.sharding,
                    donated=(pages, self.states),
                    takes_everything=True,
                    num_kernels=self.num_kernels,
                    num_sums=sum(map(self.num_sums, range(self.model.num_layers))) + 1,
                    num_gathers=self.model.num_states + 1,
                    sent_bytes=max(self.activations(count), self.channels(count), self.logits(count)),
                    **self.work(self.params, count),
                )

    def _drawing(self) -> Iterator[Step]:
        """The head by itself, and what is drawn from what it gives."""
        model, sharding = self.model, self.sharding
        for count in (self.row_buckets[0], self.row_buckets[-1]):
            yield self._step(
                f"row_logits, {count} rows",
                steps.row_logits,
                *(model, self.outer, self.x, self.shape(count), sharding),
                num_gathers=1,
                sent_bytes=self.logits(count),
                **self.work(self.outer, count),
            )
            yield self._sample(count)
        logits = self.shape(count, model.vocab_size, dtype=jnp.float32)
        yield self._step("log_probabilities", sampler.log_probabilities, logits, self.shape(count), MAX_LOGPROBS)
        index = self.shape(PROMPT_LOGPROBS)
        yield self._step(
            f"token_logprobs, {PROMPT_LOGPROBS} tokens",
            token_logprobs,
            *(model, self.outer, self.x, index, index, MAX_LOGPROBS, sharding),
            num_gathers=1,
            sent_bytes=self.logits(PROMPT_LOGPROBS),
            **self.work(self.outer, PROMPT_LOGPROBS),
        )

    def _sample(self, count: int) -> Step:
        slots, vocab = self.engine.max_batch_size, self.model.vocab_size
        kinds = {"top_k": jnp.int32, "seed": jnp.uint32}
        names = (field.name for field in dataclasses.fields(sampler.SamplerRows))
        rows = sampler.SamplerRows(**{name: self.shape(count, dtype=kinds.get(name, jnp.float32)) for name in names})
        logits, marks = (self.shape(*sizes, dtype=jnp.float32) for sizes in ((count, vocab), (slots, 2, vocab)))
        masks = self.shape(count, -(-vocab // 32), dtype=jnp.uint32)
        arguments = (logits, rows, marks, masks, self.shape(count), self.shape(count), True)
        return self._step(f"sample, {count} rows", sampler.sample, *arguments)

    def _moves(self) -> Iterator[Step]:
        """What moves KV into pages and between them, and states."""
        model, sharding, most_pages, pages = self.model, self.sharding, self.pool.most_pages, self.all_pages
        one, table = self.shape(), self.shape(self.pool.most_pages)
        for own, number in self.own_shapes.items():
            for num_tokens in (HISTORY_TOKENS, history_buckets(self.window)[-1]):
                for packed in (False, True):
                    arguments = (pages[number], self.kv(num_tokens, number, packed=packed), table, one, one, one)
                    name = f"fill_pages, {num_tokens} tokens{own}" + (", int8" if packed else "")
                    yield self._step(name, page_steps.fill_pages, *arguments, sharding, donated=pages[number])
            arguments = (pages[number], table, one, _READ_TOKENS)
            yield self._step(f"read_pages{own}", page_steps.read_pages, *arguments, sharding=sharding)
            packed_kv = self.kv(HISTORY_TOKENS, number, packed=True)
            name = f"unpack_kv, {HISTORY_TOKENS} tokens{own}"
            yield self._step(name, steps.unpack_kv, packed_kv, DTYPE, sharding)
        yield self._step("copy_page", page_steps.copy_page, pages, one, one, one, sharding, donated=pages)
        if model.num_states:
            states, place = self.states, None if sharding is None else one
            yield self._step("read_state", state_steps.read_state, states, one, sharding=sharding)
            arguments = states, one, self.one_state, place
            yield self._step("write_state", state_steps.write_state, *arguments, sharding=sharding, donated=states)
            return
        arguments = (pages, self.shape(2, most_pages), one, self.shape(self.num_places), one)
        yield self._step("cut_pages", page_steps.cut_pages, *arguments, sharding=sharding, donated=pages)
        drift = [self.shape(parts, *sizes, dtype=jnp.float32) for parts, *sizes in model.kv_shapes]
        yield self._step("cut_pages, drift", page_steps.cut_pages, *arguments, drift, one, sharding, donated=pages)

    def _yardsticks(self) -> Iterator[Step]:
        """A product by one matrix and nothing else: what XLA estimates of that is no step's fault."""
        model = self.model
        matrix = self.shape(model.embed_dim, model.mlp_dim, dtype=jnp.bfloat16, axes=("embed", "mlp"))
        for count in (self.engine.max_batch_size, self.engine.max_num_batched_tokens):
            x = self.shape(count, model.embed_dim, dtype=jnp.bfloat16)
            yield self._step(f"a product, {count} tokens", jax.jit(jnp.dot), x, matrix, **self.work(matrix, count))
