"""The flags of the store: one a field, with the defaults and errors of the config, shown by a script's --help."""

import dataclasses
import subprocess
import sys

import pytest
from absl import flags

from ca_jax.launch import store_flags
from ca_jax.storage.config import StoreConfig

WITHOUT_FLAG = {"ssd_deadline_s", "block_tokens"}
FIELDS = {field.name for field in dataclasses.fields(StoreConfig)}


def parse(*arguments, default=None):
    values = flags.FlagValues()
    store_flags.define(default, flag_values=values)
    values(["program", *arguments])
    return store_flags.store_config(default, flag_values=values)


def test_every_field_has_a_flag_of_its_name_but_those_for_measuring():
    values = flags.FlagValues()
    before = set(values)
    store_flags.define(flag_values=values)
    assert set(values) - before == FIELDS - WITHOUT_FLAG
    assert all(values[name].help for name in FIELDS - WITHOUT_FLAG)


def test_without_flags_the_config_is_the_default():
    assert parse() == StoreConfig()
    default = StoreConfig(dram_gib=0.5, ttl_s=60.0, block_tokens=32, eviction_policy="lru")
    assert parse(default=default) == default
    assert parse("--ttl_s=5", default=default) == dataclasses.replace(default, ttl_s=5.0)


def test_flags_are_fields(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    changed = {
        "dram_gib": 1.5,
        "dram_free_fraction": 0.25,
        "ssd_gib": 3.0,
        "ssd_free_floor_gib": 0.0,
        "ssd_driver": "zarr3",
        "ssd_url": "memory://kv",
        "eviction_policy": "fifo",
        "ttl_s": 90.0,
        "tenant_quota_gib": 0.125,
    }
    quotas = ["--tenant_quotas=bob=5000", "--tenant_quotas=a=b=1"]
    found = parse("--ssd_dir=~/kv", *quotas, *(f"--{name}={value}" for name, value in changed.items()))
    assert found == StoreConfig(ssd_dir=str(tmp_path / "kv"), tenant_quotas={"bob": 5000, "a=b": 1}, **changed)
    assert parse(default=found) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eviction_policy=oldest"], "eviction_policy wanted one of scheduler_aware, return_aware, lru, fifo; found"),
        (["--dram_gib=-1"], "dram_gib wanted a number of GiB >= 0, found -1"),
        (["--ssd_url=memory://kv"], "ssd_url wanted an ssd_dir"),
        (["--ttl_s=-1"], "ttl"),
        (["--tenant_quotas=bob"], "tenant_quotas wanted TENANT=BYTES, found 'bob'"),
    ],
)
def test_what_the_config_refuses_is_said_with_the_name_of_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


@pytest.mark.parametrize("script", ["chat", "demo"])
def test_the_help_of_a_script_shows_them(script):
    done = subprocess.run(
        [sys.executable, "-m", f"ca_jax.launch.{script}", "--help"], capture_output=True, text=True, timeout=120
    )
    assert all(f"--{name}: " in done.stdout for name in FIELDS - WITHOUT_FLAG)
