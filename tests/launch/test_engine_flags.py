"""The flags of the engine: one a field, with the defaults and errors of the config, shown by a script's --help."""

import dataclasses
import subprocess
import sys

import pytest
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.launch import engine_flags

WITHOUT_FLAG = {"dtype", "context_window", "save_group_tokens", "compile_cache_dir", "store"}
FIELDS = {field.name for field in dataclasses.fields(EngineConfig)}


def parse(*arguments, default=None):
    values = flags.FlagValues()
    engine_flags.define(default, flag_values=values)
    values(["program", *arguments])
    return engine_flags.engine_config(default, flag_values=values)


def test_every_field_has_a_flag_of_its_name_but_those_that_scripts_settle():
    values = flags.FlagValues()
    before = set(values)
    engine_flags.define(flag_values=values)
    booleans = {f"no{name}" for name in ("async_save", "recompute_if_faster")}
    assert set(values) - before - booleans == FIELDS - WITHOUT_FLAG
    assert all(values[name].help for name in FIELDS - WITHOUT_FLAG)


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
    ],
)
def test_what_the_config_refuses_is_said_with_the_name_of_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)


@pytest.mark.parametrize("script", ["chat", "bench"])
def test_the_help_of_a_script_shows_them(script):
    done = subprocess.run(
        [sys.executable, "-m", f"ca_jax.launch.{script}", "--help"], capture_output=True, text=True, timeout=120
    )
    assert all(f"--{name}: " in done.stdout.replace("[no]", "") for name in FIELDS - WITHOUT_FLAG)
