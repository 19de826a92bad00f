"""The flags of the AttentionStore: each stands for the field of `StoreConfig` of its name, in every script that serves.

Not here: what the fields mean to the store (`storage.config`), flags of the tool that looks into one (`launch.store`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from absl import flags

from ca_jax.storage.config import SSD_DRIVERS, StoreConfig
from ca_jax.storage.placement.policy import EVICTION_POLICIES

flags.disclaim_key_flags()  # They are flags of the script that asks for them: its --help shows them.

_NUMBERS = {
    "dram_gib": "Memory for stored KV, GiB, taken at start; 0 keeps none.",
    "dram_free_fraction": "Share of that memory, 0 to below 1, kept free by eviction to SSD in the background.",
    "ssd_gib": "Most that stored KV takes on SSD, GiB.",
    "ssd_free_floor_gib": "Free space that is left on the disk whatever --ssd_gib says, GiB.",
    "ttl_s": "How long a conversation is kept after its last use, seconds; by default while there is room.",
    "tenant_quota_gib": "Most that one tenant may hold in memory, and on SSD, GiB; by default there is no limit.",
}
_TEXTS = {
    "ssd_dir": "Directory where conversations and their KV are kept over restarts, for one process at a time; by "
    "default KV is kept in memory alone.",
    "ssd_driver": f"How KV is kept on SSD, one of {', '.join(SSD_DRIVERS)}: one file a block, or one file of slots "
    "that is read and written past the page cache.",
    "ssd_url": "Where KV is kept instead of in --ssd_dir, as a TensorStore URL (s3://, gs://, memory://, file://); "
    "--ssd_dir holds the catalog still.",
    "eviction_policy": f"What goes when the store is full, one of {', '.join(EVICTION_POLICIES)}: whose next turn is "
    "last, the same with what is learned of when sessions come back, what was used least recently, or stored first.",
}


def define(default: StoreConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags.

    Args:
      default: what they are where they are not given; the config's own defaults if not given.
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: another flag has such a name.
    """
    default = default or StoreConfig()
    for name, text in _NUMBERS.items():
        flags.DEFINE_float(name, getattr(default, name), text, flag_values=flag_values)
    for name, text in _TEXTS.items():
        flags.DEFINE_string(name, getattr(default, name), text, flag_values=flag_values)
    flags.DEFINE_multi_string(
        "tenant_quotas",
        [f"{tenant}={num_bytes}" for tenant, num_bytes in dict(default.tenant_quotas).items()],
        "TENANT=BYTES: most that this one may hold, in place of --tenant_quota_gib.",
        flag_values=flag_values,
    )


def store_config(default: StoreConfig | None = None, *, flag_values: flags.FlagValues = flags.FLAGS) -> StoreConfig:
    """The config that parsed flags stand for; `~` in the directory is the user's home.

    Args:
      default: as given to `define`; what has no flag is as in it.
      flag_values: where they were defined.

    Raises:
      ValueError: a value outside its range, or values that do not go together; the message names the flag.
    """
    values: dict[str, Any] = {name: flag_values[name].value for name in (*_NUMBERS, *_TEXTS)}
    if values["ssd_dir"] is not None:
        values["ssd_dir"] = os.path.expanduser(values["ssd_dir"])
    values["tenant_quotas"] = tuple(_quota(text) for text in flag_values["tenant_quotas"].value or ())
    return dataclasses.replace(default or StoreConfig(), **values)


def _quota(text: str) -> tuple[str, int]:
    tenant, _, num_bytes = text.rpartition("=")
    if not num_bytes.isdecimal():
        raise ValueError(f"tenant_quotas wanted TENANT=BYTES, found {text!r}")
    return tenant, int(num_bytes)
