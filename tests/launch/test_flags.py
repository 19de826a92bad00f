"""Flags made from configs and configs made from flags: every field, every script's, however they are spelled."""

import ast
import dataclasses
import re
import subprocess
import sys

import pytest
from absl import flags

from ca_jax.config import BLEND_MODES, SELECTIONS, BlendConfig, EngineConfig
from ca_jax.launch import engine_flags
from ca_jax.launch.flags import NAMES, ConfigFlags, field_docs, out_path, refuse, spelled
from ca_jax.overflow.config import METHODS, OverflowConfig
from ca_jax.server.config import ServerConfig
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.requests import SamplingParams

WITHOUT_FLAG = {"save_group_tokens", "compile_cache_dir", "ssd_deadline_s", "block_tokens"}
CHANGED = {
    EngineConfig(): "max_batch_size=3 prefill_chunk_tokens=128 max_tpot_ms=12.5 read_buffer=15 read_buffer_gib=0.25 "
    "write_buffer_gib=0.0 async_save=False recompute_if_faster=False dtype=bfloat16 kv_rest_dtype=int8 "
    "context_window=512 special_tokens_in_content=True tensor_parallel_size=2 data_parallel_size=3 "
    "share_prefixes=False",
    OverflowConfig(): "method=tt truncation_ratio=0.75 keep_first_tokens=1 anchor_tokens=16 repair_ratio=0.15 "
    "repair=none drift=drift.npz whole_turns=True discarder=oldest",
    BlendConfig(): "mode=prefix recompute_ratio=0.25 min_recompute_ratio=0.0 check_layers=4 selection=random",
    StoreConfig(): "dram_gib=1.5 dram_free_fraction=0.25 ssd_dir=/kv ssd_gib=3.0 ssd_free_floor_gib=0.0 "
    "ssd_driver=zarr3 ssd_url=memory://kv eviction_policy=fifo ttl_s=90.0 tenant_quota_gib=0.125 "
    "tenant_quotas=(('a=b',1),('bob',5000))",
    ServerConfig(): "served_model_name=mine max_queue=5 request_timeout_s=1.5 shutdown_grace_s=2.0 max_body_bytes=9 "
    "max_choices=2 max_chunks=3 max_chunk_tokens=77 max_lookups=4 max_open_sessions=6 max_step_s=8.0 "
    "allowed_hosts=('a.example','b.example')",
}
"""A value of each field of a config, as Python spells it or as text."""
KINDS = [type(default).__name__ for default in CHANGED]


def parse(default, *arguments, **options):
    values, made = flags.FlagValues(), ConfigFlags(default, **options)
    made.define(values)
    values(["program", *arguments])
    return made.read(values)


def argument(kind, field, value):
    """A flag as a user types it, once or more often."""
    name = NAMES.get(kind, {}).get(field, field)
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no{name}"]
    if field == "tenant_quotas":
        return [f"--{name}={tenant}={num_bytes}" for tenant, num_bytes in value]
    return [f"--{name}={','.join(value) if isinstance(value, tuple) else value}"]


def values_of(text):
    """The values of a line of the table, by field."""

    def value(said):
        try:
            return ast.literal_eval(said)
        except (SyntaxError, ValueError):
            return said

    return {name: value(said) for name, said in (each.split("=", 1) for each in text.split())}


def own_fields(kind):
    return {field.name for field in dataclasses.fields(kind)} - WITHOUT_FLAG - {"overflow", "blend", "store"}


@pytest.mark.parametrize(("default", "changed"), CHANGED.items(), ids=KINDS)
def test_every_field_has_a_flag_with_the_field_s_words_and_value(default, changed):
    kind, changed = type(default), values_of(changed)
    assert changed.keys() == own_fields(kind), "the table above has every field"
    values = flags.FlagValues()
    ConfigFlags(default).define(values)
    for field in changed:
        flag = values[NAMES.get(kind, {}).get(field, field)]
        assert flag.value == (list(getattr(default, field)) if flag.value == [] else getattr(default, field))
        if field not in ("discarder", "tenant_quotas"):
            first_words = re.split("[,.;]", field_docs(kind)[field])[0].replace("`", "")
            assert first_words in flag.help
    assert parse(default) == default
    all_given = [each for field, value in changed.items() for each in argument(kind, field, value)]
    assert parse(default, *all_given) == dataclasses.replace(default, **changed)
    assert parse(dataclasses.replace(default, **changed)) == dataclasses.replace(default, **changed)


def test_configs_in_a_config_have_flags_too():
    arguments = ("--overflow_method=tt", "--blend_mode=reuse", "--dram_gib=1", "--max_batch_size=2")
    assert parse(EngineConfig(), *arguments) == EngineConfig(
        overflow=OverflowConfig(method="tt"),
        blend=BlendConfig(mode="reuse"),
        store=StoreConfig(dram_gib=1.0),
        max_batch_size=2,
    )
    default = EngineConfig(max_tpot_ms=40.0, save_group_tokens=8, blend=BlendConfig(mode="prefix"))
    assert parse(default, "--blend_check_layers=2") == dataclasses.replace(
        default, blend=BlendConfig(mode="prefix", check_layers=2)
    )


def test_what_has_no_flag_is_as_in_the_default():
    default = EngineConfig(overflow=OverflowConfig(method="of"), store=StoreConfig(dram_gib=0.5))
    options = {"without": ("overflow_method", "truncate_whole_turns", "store")}
    found = parse(default, "--truncation_ratio=0.25", **options)
    assert found == dataclasses.replace(default, overflow=OverflowConfig(method="of", truncation_ratio=0.25))
    for name in ("overflow_method=tt", "truncate_whole_turns", "dram_gib=1"):
        with pytest.raises(flags.UnrecognizedFlagError, match=name.partition("=")[0]):
            parse(default, f"--{name}", **options)
    only = parse(SamplingParams(max_tokens=7), "--top_k=3", only=("top_k",))
    assert only == SamplingParams(max_tokens=7, top_k=3)
    assert parse(StoreConfig(), "--ssd_dir=~/kv").ssd_dir.endswith("/kv")
    assert "~" not in parse(StoreConfig(), "--ssd_dir=~/kv").ssd_dir


def test_an_engine_may_drop_nothing():
    assert parse(EngineConfig(), "--overflow_method=off") == EngineConfig(overflow=None)
    dropping_nothing = EngineConfig(overflow=None, max_batch_size=2)
    assert parse(dropping_nothing) == dropping_nothing
    assert parse(dropping_nothing, "--overflow_method=ca") == EngineConfig(max_batch_size=2)
    for given in ("--keep_first_tokens=1", "--truncate_whole_turns"):
        with pytest.raises(ValueError, match="must be left out where overflow_method is off"):
            parse(EngineConfig(), "--overflow_method=off", given)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("all", "all"), ("off", "off"), ("0", 0), ("15", 15)])
def test_a_read_buffer_is_a_number_of_layers_or_a_word(text, value):
    assert parse(EngineConfig(), f"--read_buffer={text}").read_buffer == value


@pytest.mark.parametrize(
    ("flag", "choices"),
    [("overflow_method", METHODS), ("blend_mode", BLEND_MODES), ("blend_selection", SELECTIONS)],
)
def test_the_help_says_what_each_choice_is(flag, choices):
    values = flags.FlagValues()
    ConfigFlags(EngineConfig()).define(values)
    assert all(f" {choice}: " in values[flag].help or f", {choice}: " in values[flag].help for choice in choices[:2])
    with pytest.raises(flags.IllegalFlagValueError, match=rf"{flag}.*value should be one of"):
        parse(EngineConfig(), f"--{flag}=none")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--read_buffer=some", "read_buffer"),
        ("--read_buffer=1.5", "read_buffer"),
        ("--read_buffer=-1", "read_buffer"),
        ("--prefill_chunk_tokens=100", "prefill_chunk_tokens"),
        ("--max_tpot_ms=-1", "max_tpot_ms"),
        ("--max_batch_size=0", "max_batch_size"),
        ("--truncation_ratio=2", "truncation_ratio"),
        ("--truncation_ratio=0", "truncation_ratio"),
        ("--keep_first_tokens=-1", "keep_first_tokens"),
        ("--overflow_anchor_tokens=-1", "anchor_tokens"),
        ("--overflow_repair_ratio=2", "repair_ratio"),
        ("--blend_recompute_ratio=1.5", "recompute_ratio"),
        ("--min_recompute_ratio=-1", "min_recompute_ratio"),
        ("--blend_check_layers=0", "check_layers"),
        ("--eviction_policy=oldest", "eviction_policy"),
        ("--dram_gib=-1", "dram_gib"),
        ("--ssd_url=memory://kv", "ssd_url"),
        ("--ttl_s=-1", "ttl"),
        ("--tenant_quotas=bob", "tenant_quotas must be TENANT=BYTES, got 'bob'"),
    ],
)
def test_what_a_config_refuses_is_said_with_the_name_of_the_flag(given, named):
    with pytest.raises(ValueError, match=named):
        parse(EngineConfig(), given)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--max-batch-size=3"], ["--max_batch_size=3"]),
        (["--max-batch-size", "3"], ["--max_batch_size", "3"]),
        (["--max-num-seqs=3", "--max_model_len=9"], ["--max_batch_size=3", "--context_window=9"]),
        (["--no-async-save", "--noasync-save"], ["--noasync_save", "--noasync_save"]),
        (["--async-save", "a-b", "--ssd_dir=a-b", "-1"], ["--async_save", "a-b", "--ssd_dir=a-b", "-1"]),
        (["--unknown-flag", "--", "--max-batch-size"], ["--unknown-flag", "--", "--max-batch-size"]),
    ],
)
def test_dashes_and_other_servers_names_do_as_well(typed, meant):
    values = flags.FlagValues()
    ConfigFlags(EngineConfig()).define(values)
    assert spelled(["program", *typed], values) == ["program", *meant]


def test_flags_that_would_be_ignored_and_files_that_are_directories_are_refused(tmp_path):
    values = flags.FlagValues()
    flags.DEFINE_string("json_out", None, "A file.", flag_values=values)
    values(["program"])
    refuse(("json_out", "undefined"), "it", values)
    assert out_path("json_out", values) is None
    values(["program", f"--json_out={tmp_path}"])
    with pytest.raises(ValueError, match="--json_out must be left out of it, which does not read it"):
        refuse(("json_out",), "it", values)
    with pytest.raises(ValueError, match="json_out must be a file, got the directory"):
        out_path("json_out", values)


def test_the_benchmarks_engine_has_no_flags_of_the_store():
    values = flags.FlagValues()
    before = set(values)
    engine_flags.define(without_overflow=("method", "whole_turns"), flag_values=values)
    missing = set(ConfigFlags(EngineConfig()).names()) - (set(values) - before)
    assert missing == own_fields(StoreConfig) | {"dtype", "context_window", "overflow_method", "truncate_whole_turns"}
    values(["program", "--keep_first_tokens=7"])
    assert engine_flags.engine_config(flag_values=values).overflow == OverflowConfig(keep_first_tokens=7)


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("chat", [EngineConfig, OverflowConfig, BlendConfig, StoreConfig]),
        ("serve", [ServerConfig]),
        ("demo", [StoreConfig]),
    ],
)
def test_the_help_of_a_script_shows_them(script, shown):
    command = [sys.executable, "-m", f"ca_jax.launch.{script}", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout.replace("[no]", "")
    for kind in shown:
        assert all(f"--{NAMES.get(kind, {}).get(field, field)}: " in text for field in own_fields(kind))
