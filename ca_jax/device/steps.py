"""The jitted functions that compute. Each is pure: it takes and returns all it touches, and says what it donates.

A step computes some tokens of each of several rows over the pages of their contexts (`models.paged_attention`). Layers
are called one by one, so that the history of a layer may still be on its way while earlier ones compute; where all of
it is there and tokens are few, all layers are one function. All put new tokens' KV into pages, and hand it
out in buffers of its own, unrotated as everything is.

Shapes: D parts that rows are in, each on devices of its own, 1 without a mesh; T tokens of a part (padded), n rows of
all parts, S places of history (padded), P pages, M pages of a row, L K H F V as in models. `table` has the rotations of
all places; `config`, `kind` (`config.kind_of` the layer) and `sharding` are static. With a `sharding` functions run
over its mesh: what is done for each head by each device for the heads and rows that it has, the products between by
all, and what is small is whole on each device.

Not here: moving KV into pages and out of them (page_steps), buffers, their owners, which pages are whose (runner,
pages), host transfers (transfer), sampling (sampler).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from ca_jax.device.sampler import greedy
from ca_jax.models import latent_attention, rope
from ca_jax.models import paged_attention as paged
from ca_jax.models.config import LayerKind, ModelConfig
from ca_jax.models.kv import LayerKV, dequantize, quantize
from ca_jax.models.parts import look_up
from ca_jax.models.sharding import Axes, ModelSharding, by_device, constrain, held_axes
from ca_jax.models.small_weights import Int8Matrix, dtype_of
from ca_jax.models.transformer import Layer, Learned, Transformer, put_stream, scale_embedded, scale_queries

Params = Any
"""A tree of linen variables."""
Move = Callable[..., jax.Array]
"""Of pages, new KV, rows and some arrays; gives the pages."""

BESIDE = ("packed", "adapters", "places")
"""Collections of variables beside the parameters: weights packed for a CPU, matrices of adapters, layers' numbers."""
KV_HEADS: Axes = (None, None, "kv_heads", None)
"""Of new KV `[1, T, K, H]` and of unrotated KV `[2, S, K, H]`."""
ROWS: Axes = ("batch",)
"""Of what has a row for each job, or a part for each part of them."""
HEADS: Axes = ("heads",)
"""Of arrays with one number for each query head."""
OF_LATENTS: Axes = (None, "heads", None)
"""Of what makes each head's keys or values of latents `[R, N, H]`."""
TOKEN_HEADS: Axes = ("batch", None, "heads", None)
"""Of queries `[D, T, N, H]`."""
TOKEN_KV: Axes = ("batch", None, "kv_heads", None)
"""Of new KV `[D, T, K, H]`."""
STEP_KV: Axes = (None, "batch", "kv_heads", None)
"""Of a layer's new KV as it is handed out `[2, D T, K, H]`."""
PAGES: Axes = ("batch", None, "kv_heads", None, None)
"""Of a layer's pages `[P, 2, K, page, H]`."""


def apply(module: nn.Module, variables: Params, *args: Any, method: Any = None) -> Any:
    """`module.apply`, typed as it is used here."""
    return module.apply(variables, *args, method=method)


def variables_of(layer_params: Params, adapters: jax.Array | None = None) -> Params:
    """A layer's variables, from its parameters and, under `packed` and `adapters`, those that lie beside them.

    Args:
      adapters: i32 `[D, T]`, the adapter slot of each token that is computed, -1 for none; None: there are no slots.
    """
    params = dict(layer_params)
    beside = {kind: params.pop(kind) for kind in BESIDE if kind in params}
    if adapters is None:
        beside.pop("adapters", None)
    elif "adapters" in beside:
        of_queries = beside["adapters"]["attn"]["wq_b"]
        chosen = (adapters[..., None] == jnp.arange(len(of_queries)))[..., None].astype(of_queries.dtype)
        beside["adapters"] = {module: {**arrays, "chosen": chosen} for module, arrays in beside["adapters"].items()}
    return {"params": params, **beside}


def with_places(config: ModelConfig, variables: Params, to_device: Callable[..., jax.Array]) -> Params:
    """A model's variables with each layer's number among them, where layers are given something by it."""
    if not config.layer_input_dim:
        return variables
    return {**variables, "places": {f"layer_{i}": {"number": to_device(i, "int32")} for i in range(config.num_layers)}}


def layer_of(variables: Params, layer: int) -> Params:
    """The parameters of one layer, with what lies beside them."""
    name = f"layer_{layer}"
    beside = {kind: variables[kind][name] for kind in BESIDE if name in variables.get(kind, {})}
    return {**variables["params"][name], **beside}


def logits_of(
    config: ModelConfig, params: Params, x: jax.Array, sharding: ModelSharding | None, rows: Axes
) -> jax.Array:
    """`x [n, 1, F]` to logits f32 `[n, V]`: each device computes those of its part of the vocabulary."""
    logits = apply(Transformer(config), params, x, method=Transformer.head)[:, 0]
    return constrain(constrain(logits, sharding, (*rows, "vocab")), sharding)


# Into the layers, and out of them.


@partial(jax.jit, static_argnames=("config", "num_positions", "context", "sharding"))
def rotation_tables(
    config: ModelConfig, num_positions: int, context: int | None = None, sharding: ModelSharding | None = None
) -> tuple[rope.Rotation, ...]:
    """Of each of `config.ropes` the rotations of positions 0 to `num_positions` - 1, f32 `[P, R/2]`, R as in `rope`.

    Args:
      num_positions: P, static.
      context: how long a text may become, tokens, static; `dynamic` and `longrope` rope ask for it. None: P.
    """
    places, context = jnp.arange(num_positions), context or num_positions
    tables = (rope.rotation_at(*each, places, context) for each in config.ropes)
    return tuple(rope.Rotation(*(constrain(part, sharding) for part in table)) for table in tables)


@partial(jax.jit, static_argnames=("dtype", "sharding"))
def unpack_kv(kv: jax.Array, dtype: str, sharding: ModelSharding | None = None) -> jax.Array:
    """KV that is kept in int8 `[2, S, K, H + 2]`, unrotated, `[2, S, K, H]`."""
    return constrain(dequantize(kv, dtype), sharding, KV_HEADS)


@partial(jax.jit, static_argnames=("config", "sharding"))
def embed(config: ModelConfig, params: Params, tokens: jax.Array, sharding: ModelSharding | None = None) -> jax.Array:
    """i32 `[D, T]` to `[D, T, F]`, and behind it what layers are given.

    Each device looks up those that its part of the vocabulary has: left to itself XLA may gather the whole table.
    """
    if sharding is None or config.vocab_size % sharding.num_tensor:
        return constrain(apply(Transformer(config), params, tokens, method=Transformer.embed), sharding, ROWS)

    dtype = dtype_of(params)

    def own_rows(table: jax.Array | Int8Matrix, ids: jax.Array, tokens: jax.Array) -> jax.Array:
        places = tokens - ids[0]
        is_own = (places >= 0) & (places < len(ids))
        return jnp.where(is_own[..., None], look_up(table, jnp.clip(places, 0, len(ids) - 1), dtype), 0)[None]

    def rows_of(table: jax.Array | Int8Matrix) -> jax.Array:
        in_axes = held_axes(table, ("vocab", None), ("vocab",)), ("vocab",), ROWS
        of_device = by_device(own_rows, sharding, in_axes, ("vocab", *ROWS))
        return of_device(table, jnp.arange(config.vocab_size), tokens).sum(0)

    names = ("embed", "inputs") if config.layer_input_dim else ("embed",)
    found, *rows = (rows_of(params["params"][name]["embedding"]) for name in names)
    x = scale_embedded(config, found)
    if rows:
        x = apply(Transformer(config), params, x, *rows, method=Transformer.with_inputs)
    return constrain(x, sharding, ROWS)


@partial(jax.jit, static_argnames=("config",))
def all_logits(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits of all tokens: `x [1, T, F]` to f32 `[1, T, V]`."""
    return apply(Transformer(config), params, x, method=Transformer.head)


# Over pages.


def through_layer(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    pages: jax.Array,
    rows: paged.Rows,
    table: rope.Rotation,
    kind: LayerKind,
    num_first: int,
    *,
    one_each: bool,
    with_attention: bool,
    sharding: ModelSharding | None,
    has_gaps: bool = False,
    packs: bool = False,
    move: Move | None = None,
    moved: tuple[jax.Array, ...] = (),
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """`x [D, T, F]` through a layer; its new KV, that of each part's first tokens, pages, and what places received.

    A layer without KV of its own gives None for both, and only reads its pages: those of the layer whose KV it reads.

    Args:
      adapters: as of `variables_of`.
      has_gaps: whether places of a row's tokens may have gaps.
      packs: whether the new KV comes in int8, but for that of first tokens.
      move: changes the pages before the tokens' KV is put into them, given `moved`, whose first axis is of the parts.
    """

    def attend_heads(
        q: jax.Array,
        new: tuple[LayerKV, ...],
        pages: jax.Array,
        rows: tuple[jax.Array, ...],
        table: rope.Rotation,
        moved: tuple[jax.Array, ...],
        *learned: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        own, own_new = paged.Rows(*rows), new[0] if new else None
        own_q = scale_queries(config, q[0], own.places[: q.shape[1]])
        sinks, key_scale, made = (each[0] if each else None for each in learned)
        expansion = None if made is None else latent_attention.Expansion(*made)
        over: Any = paged if expansion is None else latent_attention
        options: dict[str, Any] = {"cap": config.score_cap, "one_each": one_each}
        options |= {"sinks": sinks, "key_scale": key_scale} if expansion is None else {"expansion": expansion}
        if move is not None and own_new is not None:
            pages = move(pages, own_new, own, *(each[0] for each in moved))
        out, pages = over.attend_pages(own_q, own_new, pages, own, table, kind.window, has_gaps=has_gaps, **options)
        kv = [jnp.concatenate(each.parts, axis=0) for each in new]
        given = (out[None], *kv, *(each[:, :num_first] for each in kv), pages)
        if not with_attention:
            return given
        return *given, over.attention_received(own_q, pages, own, table, kind.window, **options)[None]

    def attend_fn(q: jax.Array, new: LayerKV | None, learned: Learned) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        own = () if new is None else (new,)
        of_heads, of_all, of_latents = (() if each is None else (each,) for each in learned)
        given = ((TOKEN_KV,) * len(own), PAGES, (ROWS, ROWS, ROWS), (), (ROWS,) * len(moved))
        by_head, by_latents = (HEADS,) * len(of_heads), ((OF_LATENTS, OF_LATENTS),) * len(of_latents)
        in_axes = (TOKEN_HEADS, *given, by_head, ((),) * len(of_all), by_latents)
        received: tuple[Axes, ...] = (("heads", "batch"),) if with_attention else ()
        out_axes = (TOKEN_HEADS, *(STEP_KV,) * 2 * len(own), PAGES, *received)
        of_device = by_device(attend_heads, sharding, in_axes, out_axes)
        latents = tuple(tuple(each) for each in of_latents)
        out, *carried = of_device(q, own, pages, tuple(rows), table, moved, of_heads, of_all, latents)
        return out, tuple(carried)

    variables = variables_of(layer_params, adapters)
    x, carried = apply(Layer(config, kind, sharding), variables, x, attend_fn)
    kv, first, pages, *seen = carried if kind.has_kv else (None, None, *carried)
    if kind.has_kv:
        given = quantize(kv) if packs else kv, first
        kv, first = (constrain(each, sharding, handed_out(sharding)) for each in given)
    return constrain(x, sharding, ROWS), (kv, first, pages, *(constrain(each.sum(0), sharding) for each in seen))


def handed_out(sharding: ModelSharding | None) -> Axes:
    """How new KV lies that leaves the device, without a first axis of layers."""
    return STEP_KV if sharding is None or not sharding.shares_rows else KV_HEADS


@partial(
    jax.jit,
    static_argnames=("config", "num_tokens", "kind", "num_first", "with_attention", "packs", "sharding"),
    donate_argnames=("x", "pages"),
)
def layer_step(
    config: ModelConfig,
    layer_params: Params,
    x: jax.Array,
    pages: jax.Array,
    rows: paged.Rows,
    table: rope.Rotation,
    num_tokens: int,
    kind: LayerKind,
    num_first: int = 1,
    *,
    with_attention: bool = False,
    packs: bool = False,
    sharding: ModelSharding | None = None,
    adapters: jax.Array | None = None,
) -> tuple[Any, ...]:
    """One layer over some tokens of each row. Layers of a kind share a compiled function for each T. Donates both.

    Args:
      x: `[D, T', F]`, of which the first T tokens of each part are computed.
      pages: this layer's, `[P, 2, K, page, H]`, or those that it reads.
      num_tokens: T, static.
      num_first: static: of how many first tokens of each part KV is handed out by itself, too.
      with_attention: static: also return the attention that places received.
      packs: static: return the new KV in int8, `[2, D T, K, H + 2]`.
      adapters: i32 `[D, T']`, the adapter slots of tokens, -1 for none; None where there are no slots.

    Returns:
      `x` for the next layer; the tokens' unrotated KV `[2, D T, K, H]`, or packed; that of each part's first tokens,
      both fresh buffers, or None where the layer has no KV of its own; the pages. If asked for, the attention that
      places received, f32 `[n, M page]`: summed over query heads and new tokens.
    """
    part, carried = through_layer(
        config,
        layer_params,
        x[:, :num_tokens],
        pages,
        rows,
        table,
        kind,
        num_first,
        one_each=False,
        with_attention=with_attention,
        packs=packs,
        sharding=sharding,
        adapters=None if adapters is None else adapters[:, :num_tokens],
    )
    return constrain(lax.dynamic_update_slice_in_dim(x, part, 0, 1), sharding, ROWS), *carried


@partial(jax.jit, static_argnames=("config", "sharding"))
def row_logits(
    config: ModelConfig, params: Params, x: jax.Array, index: jax.Array, sharding: ModelSharding | None = None
) -> tuple[jax.Array, jax.Array]:
    """Logits of some tokens of each part: `x [D, T', F]` and i32 `[n]`, n / D in each part, to f32 `[n, V]`.

    And the likeliest token behind each, i32 `[n]`.
    """
    chosen = jnp.take_along_axis(x, index.reshape(len(x), -1, 1), axis=1)
    logits = logits_of(config, params, chosen.reshape(-1, 1, x.shape[-1]), sharding, ROWS)
    return logits, greedy(logits)


@partial(jax.jit, static_argnames=("config", "packs", "sharding"))
def stack_layers(
    config: ModelConfig, kv: Sequence[jax.Array], packs: bool = False, sharding: ModelSharding | None = None
) -> tuple[jax.Array, ...]:
    """KV of layers `[2, n, K, H]` as one array for each of `config.kv_groups`, `[l, 2, n, K, H]`, or packed as int8."""
    stacked = (jnp.stack([kv[number] for number in numbers]) for numbers in config.kv_groups)
    axes = (None, *handed_out(sharding))
    return tuple(constrain(quantize(each) if packs else each, sharding, axes) for each in stacked)


def through_layers(
    config: ModelConfig,
    params: Params,
    x: jax.Array,
    pages: Sequence[jax.Array],
    tables: tuple[rope.Rotation, ...],
    **options: Any,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], list[jax.Array], list[jax.Array]]:
    """`x [D, T, F]` through all layers, and beside it what these give: new KV and that of first tokens, of layers that
    have some, pages, and what places received. `through_layer` has the options.
    """
    kv, first, received, pages = list[jax.Array](), list[jax.Array](), list[jax.Array](), list(pages)
    for i in range(config.num_layers):
        kind, source = config.kind_of(i), config.kv_number(i)
        of_params, table = layer_of(params, i), tables[kind.rope]
        stream, given = through_layer(config, of_params, x, pages[source], table=table, kind=kind, **options)
        x, pages[source] = put_stream(x, stream), given[2]
        if kind.has_kv:
            kv.append(given[0])
            first.append(given[1])
        received += given[3:]
    return x, kv, first, pages, received


@partial(
    jax.jit,
    static_argnames=("config", "num_tokens", "num_first", "with_attention", "packs", "sharding"),
    donate_argnames=("pages",),
)
def model_step(
    config: ModelConfig,
    params: Params,
    pages: Sequence[jax.Array],
    tokens: jax.Array,
    rows: paged.Rows,
    tables: tuple[rope.Rotation, ...],
    num_tokens: int,
    num_first: int = 1,
    *,
    with_attention: bool = False,
    packs: bool = False,
    sharding: ModelSharding | None = None,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, list[jax.Array], tuple[jax.Array, ...], list[jax.Array], jax.Array | None]:
    """Some tokens of each row through all layers, as `layer_step` takes them through one. Donates the pages.

    Args:
      pages: per layer `[P, 2, K, page, H]`.
      tokens: i32 `[D, T']`, of which the first T of each part are computed.

    Returns:
      What the head takes `[D, T', F]`; per layer with KV the tokens' unrotated KV `[2, D T, K, H]`, or packed, fresh;
      that of each part's first tokens, of each of `config.kv_groups` `[l, 2, n, K, H]`, or packed; the pages; and if
      asked for, the attention that places received, f32 `[n, M page]`, summed over layers; else None.
    """
    options = {"with_attention": with_attention, "packs": packs, "sharding": sharding, "one_each": False}
    x = embed(config, params, tokens, sharding)
    chosen = None if adapters is None else adapters[:, :num_tokens]
    of_first = {"rows": rows, "num_first": num_first, "adapters": chosen}
    part, kv, first, new_pages, received = through_layers(
        config, params, x[:, :num_tokens], pages, tables, **of_first, **options
    )
    x = constrain(lax.dynamic_update_slice_in_dim(x, part, 0, 1), sharding, ROWS)
    return x, kv, stack_layers(config, first, packs, sharding), new_pages, _summed(received)


@partial(
    jax.jit,
    static_argnames=("config", "one_each", "with_attention", "packs", "sharding"),
    donate_argnames=("pages",),
)
def decode(
    config: ModelConfig,
    params: Params,
    pages: Sequence[jax.Array],
    tokens: jax.Array,
    rows: paged.Rows,
    tables: tuple[rope.Rotation, ...],
    *,
    one_each: bool = True,
    with_attention: bool = False,
    packs: bool = False,
    sharding: ModelSharding | None = None,
    adapters: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], list[jax.Array], jax.Array | None]:
    """One token for each row, or some, through all layers and the head. Donates the pages.

    Args:
      pages: per layer `[P, 2, K, page, H]`.
      tokens: i32 `[n]`, one for each row, or some, as `rows` says.
      one_each: static: whether each row has one token at most, its own number among them.
      with_attention: static: also return the attention that places received.
      packs: static: return the new KV in int8.
      adapters: i32 `[n]`, the adapter slots of tokens, -1 for none; None where there are no slots.

    Returns:
      Logits f32 `[n, V]`; the likeliest tokens i32 `[n]`; the tokens' unrotated KV of each of `config.kv_groups`
      `[l, 2, n, K, H]`, or packed, fresh; the pages; and if asked for, the attention that places received, f32
      `[n, M page]`: summed over query heads and layers; else None.
    """
    num_parts = 1 if sharding is None else sharding.num_data
    x = embed(config, params, tokens.reshape(num_parts, -1), sharding)
    options = {"with_attention": with_attention, "sharding": sharding, "one_each": one_each, "num_first": 0}
    chosen = None if adapters is None else adapters.reshape(num_parts, -1)
    x, new_kv, _, new_pages, received = through_layers(
        config, params, x, pages, tables, rows=rows, adapters=chosen, **options
    )
    logits = logits_of(config, params, x.reshape(-1, 1, x.shape[-1]), sharding, ROWS)
    return logits, greedy(logits), stack_layers(config, new_kv, packs, sharding), new_pages, _summed(received)


def _summed(received: list[jax.Array]) -> jax.Array | None:
    """What places received in all layers, if that was measured."""
    return sum(received[1:], received[0]) if received else None
