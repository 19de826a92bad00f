"""What an engine would compile to serve a model on a chip: every kind of jitted step, with shapes in place of arrays.

The only file here that knows the steps' arguments. Shapes are those of `Runner` and `PagePool`, and come from the same
functions: buckets, pool, mesh.

Not here: compiling them, and what is read from the result (compiling).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, SingleDeviceSharding

from ca_jax.config import EngineConfig
from ca_jax.device import page_steps, sampler, steps
from ca_jax.device.buckets import batch_buckets, history_buckets, token_buckets
from ca_jax.device.pages import PoolSize
from ca_jax.kv.layout import pool_bytes, pool_size
from ca_jax.models.config import ModelConfig
from ca_jax.models.kv import SCALE_BYTES
from ca_jax.models.paged_attention import Rows
from ca_jax.models.presets import PRESETS
from ca_jax.models.sharding import Axes, ModelSharding, model_sharding
from ca_jax.models.weights import parameter_slots, resolve_dtype
from ca_jax.recompute.layers import recompute_layer
from ca_jax.serving.core import DEFAULT_WINDOW_TOKENS
from tests.accelerators.chips import Chip

DTYPE = "bfloat16"
"""Of weights and KV as it is computed."""
HISTORY_TOKENS = 1024
"""Of histories that are brought into pages."""
_READ_TOKENS = 512
REPAIRED_TOKENS = 256
"""Of a history that is repaired, those that are computed anew."""


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


@dataclasses.dataclass(frozen=True)
class Setup:
    """A model on a chip, or on four."""

    chip: Chip
    preset: str
    num_devices: int = 1

    def __str__(self) -> str:
        return f"{self.preset} on {self.num_devices if self.num_devices > 1 else 'one'} {self.chip.name}"

    @property
    def model(self) -> ModelConfig:
        """Its architecture."""
        return PRESETS[self.preset]

    @property
    def engine(self) -> EngineConfig:
        """By default, but for the mesh."""
        return EngineConfig(tensor_parallel_size=self.num_devices, context_window=self.window, overflow=None)

    @property
    def window(self) -> int:
        """Of an engine that is asked for none."""
        return min(self.model.steady_positions, DEFAULT_WINDOW_TOKENS)

    @cached_property
    def sharding(self) -> ModelSharding | None:
        """As `model_sharding` has it, over devices that are not there."""
        paper = model_sharding(self.model, tensor_parallel_size=self.num_devices, on_paper=True)
        if paper is None:
            return None
        devices = np.array(self.chip.devices(self.num_devices)).reshape(paper.mesh.axis_sizes)
        auto = (AxisType.Auto,) * len(paper.mesh.axis_names)
        return ModelSharding(Mesh(devices, paper.mesh.axis_names, axis_types=auto))

    @cached_property
    def pool(self) -> PoolSize:
        """Of all that running jobs may come to need."""
        return pool_size(self.model, DTYPE, self.engine, self.window)

    @property
    def has_kernel(self) -> bool:
        """Whether attention over its pages is by a kernel of ours: on a TPU heads of 128 numbers alone."""
        return self.chip.platform == "gpu" or self.model.head_dim % 128 == 0

    @property
    def pool_bytes(self) -> int:
        """Of each device."""
        return pool_bytes(self.model, DTYPE, self.pool, self.sharding)

    @cached_property
    def weight_bytes(self) -> int:
        """Of each device."""
        return self.bytes_of(self.params)

    def bytes_of(self, tree: Any) -> int:
        """What a tree of shapes takes of each device."""
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)

    # Shapes.

    def shape(self, *sizes: int, dtype: Any = jnp.int32, axes: Axes = ()) -> jax.ShapeDtypeStruct:
        """Of an array where it would lie."""
        place = self._device if self.sharding is None else self.sharding.of(axes, sizes)
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    @cached_property
    def _device(self) -> SingleDeviceSharding:
        return SingleDeviceSharding(self.chip.devices(1)[0])

    @cached_property
    def params(self) -> steps.Params:
        """Of the whole model."""
        leaves = {
            ("params", *slot.path): self.shape(*slot.shape, dtype=resolve_dtype(DTYPE), axes=slot.axes)
            for slot in parameter_slots(self.model)
        }
        return flax.traverse_util.unflatten_dict(leaves)

    @property
    def outer(self) -> steps.Params:
        """What is outside the layers."""
        return {"params": {name: part for name, part in self.params["params"].items() if not name.startswith("layer_")}}

    @property
    def pages(self) -> jax.ShapeDtypeStruct:
        """Of one layer."""
        sizes = (self.pool.num_pages, 2, self.model.num_kv_heads, self.pool.page_tokens, self.model.head_dim)
        return self.shape(*sizes, dtype=jnp.bfloat16, axes=steps.PAGES)

    @cached_property
    def tables(self) -> Any:
        """Of the rotations of all places, of each of the model's ropes."""
        num_places = max(history_buckets(self.window)[-1], self.pool.most_pages * self.pool.page_tokens)
        rotations = jax.eval_shape(partial(steps.rotation_tables, self.model, num_places))
        return jax.tree.map(lambda part: self.shape(*part.shape, dtype=part.dtype), rotations)

    def rows(self, count: int, num_tokens: int) -> Rows:
        """So many rows of a step, with places for so many tokens."""
        return Rows(self.shape(count, self.pool.most_pages), self.shape(count + 1), self.shape(num_tokens))

    def kv(self, num_tokens: int, *, packed: bool = False, axes: Axes = steps.KV_HEADS) -> jax.ShapeDtypeStruct:
        """One layer's, on its way to pages or from them."""
        width = self.model.head_dim + (SCALE_BYTES if packed else 0)
        sizes = (2, num_tokens, self.model.num_kv_heads, width)
        return self.shape(*sizes, dtype=jnp.int8 if packed else jnp.bfloat16, axes=axes)

    # Steps.

    def steps(self) -> Iterator[Step]:
        """All that serving uses, the smallest and the largest of those that come in several sizes."""
        yield from self._passes()
        yield from self._decoding()
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
        x = self.shape(1, width, model.embed_dim, dtype=jnp.bfloat16, axes=steps.ROWS)
        of_layer = {"donated": (x, self.pages), "num_kernels": 1, "num_sums": 2, "sharding": sharding}
        tokens = self.shape(1, width)
        sent = {"num_sums": 1, "sent_bytes": self._activations(width)}
        yield self._step("embed", steps.embed, model, self.outer, tokens, sharding=sharding, **sent)
        buckets = token_buckets(longest, coarse=True)
        layer, kind = steps.layer_of(self.params, 0), model.kind_of(0)
        for num_tokens in (buckets[0], buckets[-1]):
            arguments = (model, layer, x, self.pages, self.rows(num_rows, width), self.tables[kind.rope], num_tokens)
            yield self._step(
                f"layer_step, {num_tokens} tokens",
                steps.layer_step,
                *arguments,
                kind,
                num_rows,
                **of_layer,
                sent_bytes=self._activations(num_tokens),
                **self._work(layer, num_tokens),
            )
        arguments = (model, layer, x, self.pages, self.rows(1, width), self.tables[kind.rope], REPAIRED_TOKENS)
        places = self.pool.most_pages * self.pool.page_tokens
        moved = [self.shape(1, size, dtype=bool) for size in (REPAIRED_TOKENS, places)]
        yield self._step(
            f"recompute_layer, {REPAIRED_TOKENS} tokens",
            recompute_layer,
            *(*arguments, kind, tuple(moved)),
            **of_layer,
            sent_bytes=self._activations(REPAIRED_TOKENS),
            **self._work(layer, REPAIRED_TOKENS),
        )
        first = [self.kv(num_rows, axes=steps.STEP_KV)] * model.num_layers
        for packs in (False, True):
            name = "stack_layers" + (", int8" if packs else "")
            yield self._step(name, steps.stack_layers, model, first, packs=packs, sharding=sharding)

    def _decoding(self) -> Iterator[Step]:
        """A step of decoding, and drawing."""
        model, sharding = self.model, self.sharding
        width = self.engine.max_num_batched_tokens + self.engine.max_batch_size
        x = self.shape(1, width, model.embed_dim, dtype=jnp.bfloat16, axes=steps.ROWS)
        few, pages = token_buckets(self.engine.max_num_batched_tokens, coarse=True)[0], [self.pages] * model.num_layers
        num_rows = self.engine.max_batch_size
        yield self._step(
            f"model_step, {few} tokens",
            steps.model_step,
            *(model, self.params, pages, self.shape(1, width), self.rows(num_rows, width), self.tables, few, num_rows),
            sharding=sharding,
            donated=pages,
            num_kernels=model.num_layers,
            num_sums=2 * model.num_layers + 1,
            sent_bytes=self._activations(width),
            **self._work(self.params, few),
        )
        drafts = self.chip.served_as.draft_sizes[0]
        pages = [self.pages] * model.num_layers
        yield self._step(
            f"decode, drafts in {drafts} tokens",
            steps.decode,
            *(model, self.params, pages, self.shape(drafts), self.rows(num_rows, drafts), self.tables),
            one_each=False,
            sharding=sharding,
            donated=pages,
            takes_everything=True,
            num_kernels=model.num_layers,
            num_sums=2 * model.num_layers + 1,
            num_gathers=1,
            sent_bytes=max(self._activations(drafts), self._logits(drafts)),
            **self._work(self.params, drafts),
        )
        buckets = batch_buckets(self.engine.max_batch_size, self.chip.served_as.least_rows)
        for count in (buckets[0], buckets[-1]):
            pages = [self.pages] * model.num_layers
            for packs in (False, True) if count == buckets[-1] else (False,):
                yield self._step(
                    f"decode, {count} rows" + (", int8" if packs else ""),
                    steps.decode,
                    *(model, self.params, pages, self.shape(count), self.rows(count, count), self.tables),
                    packs=packs,
                    sharding=sharding,
                    donated=pages,
                    takes_everything=True,
                    num_kernels=model.num_layers,
                    num_sums=2 * model.num_layers + 1,
                    num_gathers=1,
                    sent_bytes=max(self._activations(count), self._logits(count)),
                    **self._work(self.params, count),
                )
            yield self._step(
                f"row_logits, {count} rows",
                steps.row_logits,
                *(model, self.outer, x, self.shape(count), sharding),
                num_gathers=1,
                sent_bytes=self._logits(count),
                **self._work(self.outer, count),
            )
            yield self._sample(count)

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
        """What moves KV into pages and between them."""
        model, sharding, pool = self.model, self.sharding, self.pool
        one = self.shape()
        for num_tokens in (HISTORY_TOKENS, history_buckets(self.window)[-1]):
            for packed in (False, True):
                arguments = (self.pages, self.kv(num_tokens, packed=packed), self.shape(pool.most_pages), one, one, one)
                name = f"fill_pages, {num_tokens} tokens" + (", int8" if packed else "")
                yield self._step(name, page_steps.fill_pages, *arguments, sharding, donated=self.pages)
        packed_kv = self.kv(HISTORY_TOKENS, packed=True)
        arguments = (self.pages, self.shape(pool.most_pages), one, _READ_TOKENS)
        yield self._step("read_pages", page_steps.read_pages, *arguments, sharding=sharding)
        yield self._step(f"unpack_kv, {HISTORY_TOKENS} tokens", steps.unpack_kv, packed_kv, DTYPE, sharding)
        pages = [self.pages] * model.num_layers
        places = self.shape(pool.most_pages * pool.page_tokens)
        arguments = (pages, self.shape(2, pool.most_pages), one, places, one)
        yield self._step("cut_pages", page_steps.cut_pages, *arguments, sharding=sharding, donated=pages)
        drift = self.shape(model.num_layers, 2, model.num_kv_heads, model.head_dim, dtype=jnp.float32)
        yield self._step("cut_pages, drift", page_steps.cut_pages, *arguments, drift, one, sharding, donated=pages)
        yield self._step("copy_page", page_steps.copy_page, pages, one, one, one, sharding, donated=pages)

    def _yardsticks(self) -> Iterator[Step]:
        """A product by one matrix and nothing else: what XLA estimates of that is no step's fault."""
        model = self.model
        matrix = self.shape(model.embed_dim, model.mlp_dim, dtype=jnp.bfloat16, axes=("embed", "mlp"))
        for count in (self.engine.max_batch_size, self.engine.max_num_batched_tokens):
            x = self.shape(count, model.embed_dim, dtype=jnp.bfloat16)
            yield self._step(f"a product, {count} tokens", jax.jit(jnp.dot), x, matrix, **self._work(matrix, count))

    # Least that must be.

    def _activations(self, num_tokens: int) -> int:
        """Of one tensor of the residual stream, in float32."""
        return 4 * num_tokens * self.model.embed_dim

    def _logits(self, count: int) -> int:
        return 4 * count * self.model.vocab_size

    def _work(self, params: Any, num_tokens: int) -> dict[str, float]:
        """Of the matrices in them, but for embeddings that are only looked up: of experts those that tokens choose."""
        table, num_experts = self.params["params"]["embed"]["embedding"], self.model.num_experts
        flops = read_bytes = product_bytes = 0.0
        for leaf in jax.tree.leaves(params):
            if leaf.ndim < 2 or (leaf is table and not self.model.tie_embeddings):
                continue
            size = self.bytes_of(leaf) / leaf.dtype.itemsize
            is_of_experts = num_experts and leaf.ndim == 3 and leaf.shape[0] == num_experts
            chosen = self.model.num_experts_per_token / num_experts if is_of_experts else 1.0
            flops += 2 * size * chosen * num_tokens
            read_bytes += size * leaf.dtype.itemsize * min(chosen * num_tokens, 1)
            width, of_each = self.model.embed_dim, num_experts if is_of_experts else 1
            ends = width + size / of_each / width  # Of a product: all have the residual stream at one end.
            product_bytes += ends * leaf.dtype.itemsize * num_tokens * of_each * chosen
        return {"flops": flops, "read_bytes": read_bytes, "product_bytes": read_bytes + product_bytes}
