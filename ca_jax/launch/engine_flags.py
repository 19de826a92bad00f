"""The flags of the engine: each stands for the field of `EngineConfig` of its name, in every script that serves.

Those of overflow and of CacheBlend are among them; they stand for the fields of the `OverflowConfig` and the
`BlendConfig` in it.

Not here: what the fields mean to the engine (`config`), how flags of overflow and CacheBlend are defined
(`launch.overflow_flags`, `launch.blend_flags`), flags of its store (`launch.store_flags`), what scripts settle
themselves: the model's dtype, the context window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from absl import flags

from ca_jax.config import KV_REST_DTYPES, READ_BUFFERS, EngineConfig
from ca_jax.launch import blend_flags, overflow_flags

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_INTEGERS = {
    "max_batch_size": "Most answers that are generated together.",
    "prefill_chunk_tokens": "Most new tokens that are prefilled in one pass, a multiple of 64; other answers go on "
    "between passes.",
    "tensor_parallel_size": "Devices that share the heads of the model, its weights and its KV.",
    "data_parallel_size": "Parts that the answers which are generated together are in, each on tensor_parallel_size "
    "devices of its own.",
}
_NUMBERS = {
    "max_tpot_ms": "Most milliseconds between two tokens of an answer for the sake of others' prefill; by default a "
    "whole pass.",
    "read_buffer_gib": "Most memory of the device that KV loaded ahead of its use takes, GiB, beside the two layers in "
    "use; by default room for a full context window.",
    "write_buffer_gib": "Most memory of the device that new KV waiting to be saved takes, GiB.",
}
_READ_BUFFER = (
    "Layers of stored KV that are loaded ahead of the one that computes: a number, or one of "
    f"{', '.join(READ_BUFFERS)}."
)
_KV_REST_DTYPE = (
    f"How KV is kept in memory and on SSD, one of {', '.join(KV_REST_DTYPES)}: as it was computed, or rounded to half "
    "the bytes of bfloat16."
)
_SWITCHES = {
    "async_save": "Save KV while computing; otherwise at the end of a turn, which waits for it.",
    "share_prefixes": "Begin new conversations with the stored KV of others that begin with the same tokens.",
    "special_tokens_in_content": "Read special tokens that messages and documents spell as those tokens, not as text: "
    "for trusted clients alone.",
    "recompute_if_faster": "Recompute stored KV where measured rates say that this is faster than to load it.",
}


def define(
    default: EngineConfig | None = None,
    *,
    without_overflow: Collection[str] = (),
    flag_values: flags.FlagValues = flags.FLAGS,
) -> None:
    """Defines the flags.

    Args:
      default: what they are where they are not given; the config's own defaults if not given.
      without_overflow: fields of `OverflowConfig` that get no flag.
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    default = default or EngineConfig()
    for name, text in _INTEGERS.items():
        flags.DEFINE_integer(name, getattr(default, name), text, flag_values=flag_values)
    for name, text in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(default, name), text, flag_values=flag_values)
    flags.DEFINE_string("read_buffer", str(default.read_buffer), _READ_BUFFER, flag_values=flag_values)
    flags.DEFINE_string("kv_rest_dtype", default.kv_rest_dtype, _KV_REST_DTYPE, flag_values=flag_values)
    for name, text in _SWITCHES.items():
        flags.DEFINE_boolean(name, getattr(default, name), text, flag_values=flag_values)
    overflow_flags.define(default.overflow, without=without_overflow, or_off=True, flag_values=flag_values)
    blend_flags.define(default.blend, flag_values=flag_values)


def engine_config(default: EngineConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """The config that parsed flags stand for.

    Args:
      default: as given to `define`; what has no flag is as in it.
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range; the message names the flag.
    """
    default = default or EngineConfig()
    values: dict[str, Any] = {name: flag_values[name].value for name in (*_INTEGERS, *_NUMBERS, *_SWITCHES)}
    values["read_buffer"] = _layers_or_word(str(flag_values["read_buffer"].value))
    values["kv_rest_dtype"] = flag_values["kv_rest_dtype"].value
    values["overflow"] = overflow_flags.overflow_or_off(default.overflow, flag_values=flag_values)
    values["blend"] = blend_flags.blend_config(default.blend, flag_values=flag_values)
    return dataclasses.replace(default, **values)


def _layers_or_word(text: str) -> int | str:
    """A number of layers where the text is one; else the text, for the config to judge."""
    try:
        return int(text)
    except ValueError:
        return text
