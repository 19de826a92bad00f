"""The flags of CacheBlend, the same in every script: each stands for one field of `BlendConfig`.

Not here: the engine's other flags (`engine_flags`), what fields mean (`blend_config`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from ca_jax.config import BLEND_MODES, SELECTIONS, BlendConfig

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

FLAG_OF = {
    "mode": "blend_mode",
    "recompute_ratio": "blend_recompute_ratio",
    "min_recompute_ratio": "min_recompute_ratio",
    "check_layers": "blend_check_layers",
    "selection": "blend_selection",
}
"""The flag of each field."""


def define(default: BlendConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags.

    Args:
      default: what they are where they are not given; the config's own defaults if not given.
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    config = default or BlendConfig()
    flags.DEFINE_enum(
        FLAG_OF["mode"],
        config.mode,
        list(BLEND_MODES),
        "What becomes of the stored KV of text chunks in a prompt: put at its new positions, and the tokens that "
        "deviate most computed anew (blend); put there as it is (reuse); used only behind the very text that it was "
        "computed behind (prefix); not used (recompute).",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        FLAG_OF["recompute_ratio"],
        config.recompute_ratio,
        "blend: share of the chunks' tokens that is computed anew, 0 to 1; by default as much as loading them hides by "
        "measured rates.",
        flag_values=flag_values,
    )
    flags.DEFINE_float(
        FLAG_OF["min_recompute_ratio"],
        config.min_recompute_ratio,
        f"blend: least such share where {FLAG_OF['recompute_ratio']} is not given.",
        flag_values=flag_values,
    )
    flags.DEFINE_integer(
        FLAG_OF["check_layers"],
        config.check_layers,
        "blend: first layers in which all tokens are computed, to see which deviate.",
        flag_values=flag_values,
    )
    flags.DEFINE_enum(
        FLAG_OF["selection"],
        config.selection,
        list(SELECTIONS),
        "blend: which tokens are computed anew: those whose KV deviates most (hkvd), ones evenly apart, by which all "
        "others are moved (spread), or to compare with, any (random) "
        "or the first ones of every chunk (first).",
        flag_values=flag_values,
    )


def blend_config(default: BlendConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS) -> BlendConfig:
    """The config that parsed flags stand for.

    Args:
      default: as given to `define`.
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range; the message says what was wanted.
    """
    values: dict[str, Any] = {field: flag_values[name].value for field, name in FLAG_OF.items()}
    return dataclasses.replace(default or BlendConfig(), **values)
