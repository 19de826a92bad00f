"""The flags of overflow: one a field, with the defaults and errors of the config."""

import dataclasses

import pytest
from absl import flags

from ca_jax.launch import overflow_flags
from ca_jax.overflow.config import OverflowConfig


def parse(*arguments, default=None, without=()):
    values = flags.FlagValues()
    overflow_flags.define(default, without=without, flag_values=values)
    values(["program", *arguments])
    return overflow_flags.overflow_config(default, flag_values=values)


def test_every_field_has_a_flag_with_help():
    values = flags.FlagValues()
    overflow_flags.define(flag_values=values)
    assert overflow_flags.FLAG_OF.keys() == {field.name for field in dataclasses.fields(OverflowConfig)}
    assert all(values[name].help for name in overflow_flags.FLAG_OF.values())


def test_without_flags_the_config_is_the_default():
    assert parse() == OverflowConfig()
    default = OverflowConfig(
        method="tt", truncation_ratio=0.25, keep_first_tokens=0, repair_ratio=0.1, whole_turns=True
    )
    assert parse(default=default) == default
    assert parse("--keep_first_tokens=2", default=default) == dataclasses.replace(default, keep_first_tokens=2)


def test_flags_are_fields():
    found = parse(
        "--overflow_method=nkvt",
        "--truncation_ratio=0.75",
        "--keep_first_tokens=1",
        "--overflow_anchor_tokens=16",
        "--overflow_repair_ratio=0.15",
        "--overflow_repair=none",
        "--overflow_drift=drift.npz",
        "--notruncate_whole_turns",
        "--token_discarder=sinks",
    )
    assert found == OverflowConfig(
        method="nkvt",
        truncation_ratio=0.75,
        keep_first_tokens=1,
        anchor_tokens=16,
        repair_ratio=0.15,
        repair="none",
        drift="drift.npz",
        whole_turns=False,
        discarder="sinks",
    )


def test_a_field_without_a_flag_is_as_in_the_default():
    assert parse("--truncation_ratio=0.25", default=OverflowConfig(method="of"), without=("method",)) == OverflowConfig(
        method="of", truncation_ratio=0.25
    )
    with pytest.raises(flags.UnrecognizedFlagError, match="overflow_method"):
        parse("--overflow_method=tt", without=("method",))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--truncation_ratio=0", r"truncation_ratio wanted a share of the window in \(0, 1\], found 0"),
        ("--truncation_ratio=1.5", r"truncation_ratio wanted a share of the window in \(0, 1\], found 1.5"),
        ("--keep_first_tokens=-1", "keep_first_tokens wanted a number of tokens >= 0, found -1"),
        ("--overflow_anchor_tokens=-1", "anchor_tokens wanted a number of tokens >= 0, found -1"),
        ("--overflow_repair_ratio=2", "repair_ratio wanted a share of the tokens"),
    ],
)
def test_what_the_config_refuses_is_said(argument, message):
    with pytest.raises(ValueError, match=message):
        parse(argument)
    with pytest.raises(flags.IllegalFlagValueError, match=r"value should be one of <ca\|tt\|of\|nkvt>"):
        parse("--overflow_method=none")


def parse_or_off(*arguments, default=None, without=()):
    values = flags.FlagValues()
    overflow_flags.define(default, without=without, or_off=True, flag_values=values)
    values(["program", *arguments])
    return overflow_flags.overflow_or_off(default, flag_values=values)


def test_an_engine_may_drop_nothing():
    assert parse_or_off() is None
    assert parse_or_off("--overflow_method=off", default=OverflowConfig()) is None
    assert parse_or_off(default=OverflowConfig(method="tt")) == OverflowConfig(method="tt")
    found = parse_or_off("--overflow_method=ca", "--truncation_ratio=0.25", "--token_discarder=heavy_hitters")
    assert found == OverflowConfig(truncation_ratio=0.25, discarder="heavy_hitters")


def test_without_a_method_it_is_as_in_the_default():
    assert parse_or_off(without=("method",)) is None
    default = OverflowConfig(method="of")
    found = parse_or_off("--keep_first_tokens=0", default=default, without=("method",))
    assert found == OverflowConfig(method="of", keep_first_tokens=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--truncation_ratio=0.5"], "truncation_ratio wanted an overflow_method that drops tokens, found off"),
        (["--truncate_whole_turns"], "truncate_whole_turns wanted an overflow_method that drops tokens, found off"),
        (["--overflow_method=ca", "--truncation_ratio=0"], "truncation_ratio wanted a share of the window"),
        (["--overflow_method=nkvt", "--token_discarder=heavy_hitters"], "nkvt wanted a discarder"),
    ],
)
def test_what_makes_no_sense_is_said_with_the_name_of_the_flag(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_or_off(*arguments)
    with pytest.raises(flags.IllegalFlagValueError, match=r"value should be one of <ca\|tt\|of\|nkvt\|off>"):
        parse_or_off("--overflow_method=none")
