"""A model over one context whose KV is plain arrays, layer by layer, by the steps that an engine computes with.

A context is one page: `[1, 2, K, S, H]` a layer, S places. Shapes: T tokens, K KV heads, H head dim, F embed.

Not here: pages of many contexts, and their owner (device.runner, device.pages).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ca_jax.device import steps
from ca_jax.device.steps import Params, layer_of, with_places
from ca_jax.device.transfer import to_device
from ca_jax.errors import check
from ca_jax.models.paged_attention import Rows
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.plan import Plan
from ca_jax.recompute.recomputer import PagedRow, Recomputer

_TABLE = np.zeros((1, 1), np.int32)


class LayerByLayer:
    """What computes a model over contexts of so many places, see `recomputer.Computer`; rope may ask for the window."""

    def __init__(self, model: LoadedModel, num_places: int, window: int) -> None:
        params = model.params["params"]
        self.config = model.config
        variables = with_places(model.config, {"params": params}, to_device)
        self.layers: list[Params] = [layer_of(variables, i) for i in range(model.config.num_layers)]
        """Parameters of each layer."""
        self.outer = {"params": {name: part for name, part in params.items() if not name.startswith("layer_")}}
        """The other parameters."""
        self.tables = steps.rotation_tables(model.config, num_places, window)
        """Rotations of all places, of each of `config.ropes`."""
        self.sharding = None
        """It is on one device."""
        self.packs_kv = False
        """It is handed out as it is computed."""
        self.to_device = to_device
        self._dtype = model.dtype

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """Embeddings `[1, T, F]` of tokens, i32 `[1, T]`."""
        return steps.embed(self.config, self.outer, to_device(tokens))

    def embedded(self, token_ids: Sequence[int], padded: int) -> jax.Array:
        """The same of fewer tokens, padded to so many."""
        row = np.zeros((1, padded), np.int32)
        row[0, : len(token_ids)] = token_ids
        return self.embed(row)

    def empty(self, num_places: int) -> jax.Array:
        """Any layer's KV of a context with room for so many tokens. ValueError: layers differ in it, or have none."""
        shapes, num_layers = self.config.kv_shapes, self.config.num_layers
        check(len({*shapes}) == 1 and len(shapes) == num_layers, "KV of layers", "of one shape, of each", shapes)
        num_parts, num_kv_heads, head_dim = shapes[0]
        return jnp.zeros((1, num_parts, num_kv_heads, num_places, head_dim), self._dtype)

    def layer(
        self, layer: int, x: jax.Array, pages: jax.Array, start: int, num_new: int, *, with_attention: bool = False
    ) -> list[jax.Array]:
        """Computes a layer of new tokens, the first of `x [1, T, F]`, from place `start` on. Donates `x` and the pages.

        Gives `x`; the new tokens' KV `[2, T, K, H]`; the pages; and, if asked for, what places received, f32 `[1, S]`.
        """
        places = start + np.arange(x.shape[1], dtype=np.int32)
        rows = Rows(*map(to_device, (_TABLE, np.array([0, num_new], np.int32), places)))
        kind = self.config.kind_of(layer)
        x, kv, _, *rest = steps.layer_step(
            self.config,
            self.layers[layer],
            x,
            pages,
            rows,
            self.tables[kind.rope],
            x.shape[1],
            kind,
            with_attention=with_attention,
        )
        return [x, kv, *rest]

    def recomputed(self, plan: Plan, token_ids: Sequence[int], pages: Sequence[jax.Array]) -> list[jax.Array]:
        """A context of these tokens, of which some are computed anew in layers of their own KV. Donates the pages."""
        recomputer = Recomputer(self, plan, token_ids, PagedRow(_TABLE, pages[0].shape[3]))
        return [recomputer.layer(i, of_layer) for i, of_layer in enumerate(pages)]


@jax.jit
def as_pages(kv: jax.Array) -> jax.Array:
    """KV `[2, S, K, H]` as a page `[1, 2, K, S, H]`."""
    return kv.swapaxes(1, 2)[None]


@jax.jit
def from_pages(pages: jax.Array) -> jax.Array:
    """A page `[1, 2, K, S, H]` as KV `[2, S, K, H]`, a buffer of its own."""
    return pages[0].swapaxes(1, 2)
