"""The engine's flags as the benchmarks ask for them, without the store's, --dtype and --context_window.

Not here: how flags are made (`launch.flags`).
"""

from __future__ import annotations

from collections.abc import Collection

from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.launch.flags import NAMES, ConfigFlags
from ca_jax.overflow.config import OverflowConfig

flags.disclaim_key_flags()

_WITHOUT = ("dtype", "context_window", "store")


def define(*, without_overflow: Collection[str] = (), flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags but those of some fields of `OverflowConfig`."""
    left_out = [NAMES[OverflowConfig].get(field, field) for field in without_overflow]
    ConfigFlags(EngineConfig(), without=(*_WITHOUT, *left_out)).define(flag_values)


def engine_config(*, flag_values: flags.FlagValues = flags.FLAGS) -> EngineConfig:
    """The config that parsed flags stand for."""
    names = ConfigFlags(EngineConfig()).names()
    return ConfigFlags(EngineConfig(), without=(*_WITHOUT, *(set(names) - set(flag_values)))).read(flag_values)
