"""The flags of the engine: one a field, with the defaults and errors of the config, shown by a script's --help."""

import dataclasses
import subprocess
import sys

import pytest
from absl import flags

from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.launch import blend_flags, engine_flags, overflow_flags
from ca_jax.overflow.config import OverflowConfig

WITHOUT_FLAG = {"dtype", "context_window", "save_group_tokens", "compile_cache_dir", "store", "overflow", "blend"}
FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}
OF_OVERFLOW = set(overflow_flags.FLAG_OF.values())
OF_PARTS = OF_OVERFLOW | set(blend_flags.FLAG_OF.values())


def parse(*arguments, default=None):
    values = flags.FlagValues()
    engine_flags.define(default, flag_values=values)
    values(["program", *arguments])
    return engine_flags.engine_config(default, flag_values=values)


def test_every_field_has_a_flag_of_its_name_but_those_that_scripts_settle():
    values = flags.FlagValues()
    before = set(values)
    engine_flags.define(flag_values=values)
    booleans = {f"no{name}" for name in ("async_save", "recompute_if_faster", "truncate_whole_turns")}
    assert set(values) - before - booleans == (FIELDS - WITHOUT_FLAG) | OF_PARTS
    assert all(values[name].help for name in (FIELDS - WITHOUT_FLAG) | OF_PARTS)


def test_without_flags_the_config_is_the_default():
    assert parse() == EngineConfig()
    default = EngineConfig(max_batch_size=1, read_buffer=3, max_tpot_ms=40.0, async_save=False, save_group_tokens=8)
    assert parse(default=default) == default
    assert parse("--max_batch_size=2", default=default) == dataclasses.replace(default, max_batch_size=2)


def test_flags_are_fields():
    found = parse(
        "--max_batch_size=3",
        "--prefill_chunk_tokens=128",
        "--max_tpot_ms=12.5",
        "--read_buffer_gib=0.25",
        "--write_buffer_gib=0",
        "--noasync_save",
        "--norecompute_if_faster",
    )
    assert found == EngineConfig(
        max_batch_size=3,
        prefill_chunk_tokens=128,
        max_tpot_ms=12.5,
        read_buffer_gib=0.25,
        write_buffer_gib=0.0,
        async_save=False,
        recompute_if_faster=False,
    )


def test_flags_of_overflow_are_fields_of_its_config():
    found = parse(
        "--overflow_method=tt",
        "--truncation_ratio=0.25",
        "--keep_first_tokens=8",
        "--overflow_anchor_tokens=2",
        "--overflow_repair_ratio=0.15",
        "--overflow_drift=drift.npz",
        "--truncate_whole_turns",
    )
    overflow = OverflowConfig(
        method="tt",
        truncation_ratio=0.25,
        keep_first_tokens=8,
        anchor_tokens=2,
        repair_ratio=0.15,
        drift="drift.npz",
        whole_turns=True,
    )
    assert found == EngineConfig(overflow=overflow)
    assert parse("--token_discarder=heavy_hitters").overflow == OverflowConfig(discarder="heavy_hitters")


def test_flags_of_cacheblend_are_fields_of_its_config():
    found = parse("--blend_mode=reuse", "--blend_recompute_ratio=0.3", "--blend_check_layers=2")
    assert found == EngineConfig(blend=BlendConfig(mode="reuse", recompute_ratio=0.3, check_layers=2))
    default = EngineConfig(blend=BlendConfig(mode="prefix", min_recompute_ratio=0.05))
    assert parse(default=default) == default
    assert parse("--blend_mode=blend", default=default).blend == BlendConfig(min_recompute_ratio=0.05)


def test_an_engine_may_drop_nothing():
    assert parse("--overflow_method=off") == EngineConfig(overflow=None)
    dropping_nothing = EngineConfig(overflow=None, max_batch_size=2)
    assert parse(default=dropping_nothing) == dropping_nothing
    assert parse("--overflow_method=ca", default=dropping_nothing) == EngineConfig(max_batch_size=2)


def test_what_of_overflow_has_no_flag_is_as_in_the_default():
    values, default = flags.FlagValues(), EngineConfig(overflow=OverflowConfig(method="of"))
    engine_flags.define(default, without_overflow=("method", "whole_turns"), flag_values=values)
    assert OF_OVERFLOW - set(values) == {"overflow_method", "truncate_whole_turns"}
    values(["program", "--truncation_ratio=0.25"])
    found = engine_flags.engine_config(default, flag_values=values)
    assert found == EngineConfig(overflow=OverflowConfig(method="of", truncation_ratio=0.25))


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("all", "all"), ("off", "off"), ("0", 0), ("15", 15)])
def test_a_read_buffer_is_a_number_of_layers_or_a_word(text, value):
    assert parse(f"--read_buffer={text}").read_buffer == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--read_buffer=some"], "read_buffer wanted a number of layers or one of auto, all, off, found 'some'"),
        (["--read_buffer=1.5"], "read_buffer wanted a number of layers or one of auto, all, off, found '1.5'"),
        (["--read_buffer=-1"], "read_buffer wanted at least 0 layers, found -1"),
        (["--prefill_chunk_tokens=100"], "prefill_chunk_tokens must be a multiple of 64, found 100"),
        (["--max_tpot_ms=-1"], "max_tpot_ms wanted a number > 0, found -1"),
        (["--max_batch_size=0"], "max_batch_size must be positive, found 0"),
        (["--truncation_ratio=2"], r"truncation_ratio wanted a share of the window in \(0, 1\], found 2"),
        (["--blend_recompute_ratio=2"], r"recompute_ratio wanted a share in \[0, 1\] or None, found 2"),
        (["--overflow_method=off", "--keep_first_tokens=1"], "keep_first_tokens wanted an overflow_method that drops"),
    ],
)
def test_what_the_config_refuses_is_said_with_the_name_of_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


@pytest.mark.parametrize(("script", "lacks"), [("chat", set()), ("bench", {"overflow_method", "truncate_whole_turns"})])
def test_the_help_of_a_script_shows_them(script, lacks):
    done = subprocess.run(
        [sys.executable, "-m", f"ca_jax.launch.{script}", "--help"], capture_output=True, text=True, timeout=120
    )
    shown = done.stdout.replace("[no]", "")
    assert all(f"--{name}: " in shown for name in (FIELDS - WITHOUT_FLAG) | OF_PARTS - lacks)
    assert not any(f"--{name}: " in shown for name in lacks)
