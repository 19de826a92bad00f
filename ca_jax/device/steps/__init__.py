"""Every jitted function of the engine. Each is pure: it takes and returns all it touches, and says what it donates.

Prefill walks the layers one by one, so that a layer's history may still be on its way while earlier layers compute.
It reads history unrotated. Decode is one function over all layers and reads the decode slots, which hold keys rotated
at their positions: a working copy, never saved. New tokens' KV leaves both unrotated.

Shapes: n rows decoded, T new tokens (padded), S history places (padded), C slot capacity, L K G H F V as in models.

With a `sharding` they run over its mesh: whatever is done for each head by each device for the heads that it has, the
products between by all, and what is small is whole on each device.

Not here: buffers and their owners (runner), host transfers (transfer), sampling (sampling).
"""

from ca_jax.device.steps.common import Params
from ca_jax.device.steps.prefill_steps import (
    all_logits,
    append_history,
    embed,
    empty_kv,
    grow_history,
    last_logits,
    pack_kv,
    prefill_layer,
    prefill_layer_attention,
    rotation_table,
    unpack_kv,
)
from ca_jax.device.steps.slot_steps import Slots, cut_slot, decode, drift_slot, insert_slot, make_slots

__all__ = [
    "Params",
    "Slots",
    "all_logits",
    "append_history",
    "cut_slot",
    "decode",
    "drift_slot",
    "embed",
    "empty_kv",
    "grow_history",
    "insert_slot",
    "last_logits",
    "make_slots",
    "pack_kv",
    "prefill_layer",
    "prefill_layer_attention",
    "rotation_table",
    "unpack_kv",
]
