"""The flags of context-window overflow, the same in every script: each stands for one field of `OverflowConfig`.

Not here: the engine's other flags (`engine_flags`), what fields mean (`overflow`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from absl import flags

from ca_jax.overflow.config import METHODS, REPAIRS, OverflowConfig
from ca_jax.overflow.discarding import DISCARDERS

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

FLAG_OF = {
    "method": "overflow_method",
    "truncation_ratio": "truncation_ratio",
    "keep_first_tokens": "keep_first_tokens",
    "anchor_tokens": "overflow_anchor_tokens",
    "repair_ratio": "overflow_repair_ratio",
    "repair": "overflow_repair",
    "drift": "overflow_drift",
    "whole_turns": "truncate_whole_turns",
    "discarder": "token_discarder",
}
"""The flag of each field."""
OFF = "off"
"""The method of an engine that drops nothing."""

_CHOICES = {"method": list(METHODS), "repair": list(REPAIRS), "discarder": list(DISCARDERS)}
_TEXT = {
    "method": "What becomes of the KV of the tokens that stay when a conversation outgrows the context window: used as "
    "it is stored (ca), computed anew (tt), lost since positions are in it (of), used at its old positions, which is "
    "wrong (nkvt).",
    "truncation_ratio": "Share of the context window that is dropped at once when a conversation outgrows it.",
    "keep_first_tokens": "First tokens of a conversation that are never dropped.",
    "anchor_tokens": "ca: first tokens, of those that stay, that repair computes anew, as the beginning that they are "
    "now.",
    "repair_ratio": "ca: share of the tokens that stay that repair computes anew.",
    "repair": "ca: which of the tokens that stay have their KV computed anew with the next turn: no token (none, the "
    "paper's way), the anchors and those whose KV deviates most (deviating), the anchors and tokens evenly apart, as "
    "which all others move (spread).",
    "drift": "ca: file of the model's drift, which is added to the KV of the tokens that stay; none by default.",
    "whole_turns": "Drop whole turns only, as far as that makes room.",
    "discarder": "Which tokens are dropped: the oldest, the oldest but for some first ones (sinks), those that "
    "received the least attention (heavy_hitters).",
}
_OFF_TEXT = "Nothing is dropped, and what does not fit is an error or ends the answer (off)."


def define(
    default: OverflowConfig | None = None,
    *,
    without: Collection[str] = (),
    or_off: bool = False,
    flag_values: flags.FlagValues = flags.FLAGS,
) -> None:
    """Defines the flags.

    Args:
      default: what they are where they are not given, its discarder by name; the config's own defaults if not given.
      without: fields that get no flag.
      or_off: whether nothing may be dropped at all, which is the default then if no other is given.
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    config = default or OverflowConfig()
    for field, name in FLAG_OF.items():
        if field in without:
            continue
        value, text = getattr(config, field), _TEXT[field]
        if field == "method" and or_off:
            value, text = OFF if default is None else value, f"{text} {_OFF_TEXT}"
            flags.DEFINE_enum(name, value, [*METHODS, OFF], text, flag_values=flag_values)
        elif field in _CHOICES:
            flags.DEFINE_enum(name, value, _CHOICES[field], text, flag_values=flag_values)
        elif field == "drift":
            flags.DEFINE_string(name, value, text, flag_values=flag_values)
        elif isinstance(value, bool):
            flags.DEFINE_boolean(name, value, text, flag_values=flag_values)
        elif isinstance(value, int):
            flags.DEFINE_integer(name, value, text, flag_values=flag_values)
        else:
            flags.DEFINE_float(name, value, text, flag_values=flag_values)


def overflow_config(
    default: OverflowConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS
) -> OverflowConfig:
    """The config that parsed flags stand for.

    Args:
      default: as given to `define`; what has no flag is as in it.
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range; the message says what was wanted.
    """
    values: dict[str, Any] = {field: flag_values[name].value for field, name in FLAG_OF.items() if name in flag_values}
    return dataclasses.replace(default or OverflowConfig(), **values)


def overflow_or_off(
    default: OverflowConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS
) -> OverflowConfig | None:
    """The config that parsed flags stand for, where nothing may be dropped at all.

    Args:
      default: as given to `define`; what has no flag is as in it.
      flag_values: where they were defined, with `or_off`.

    Returns:
      None where nothing is dropped.

    Raises:
      ValueError: a value outside its range, or a flag that says how to drop what is not dropped.
    """
    method = FLAG_OF["method"]
    if flag_values[method].value != OFF if method in flag_values else default is not None:
        return overflow_config(default, flag_values=flag_values)
    given = [name for name in FLAG_OF.values() if name != method and name in flag_values and flag_values[name].present]
    if given:
        raise ValueError(f"{given[0]} wanted an {method} that drops tokens, found {OFF}")
    return None
