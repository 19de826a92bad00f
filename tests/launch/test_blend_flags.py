"""The flags of CacheBlend: one a field, with the defaults and errors of the config."""

import dataclasses

import pytest
from absl import flags

from ca_jax.config import BLEND_MODES, SELECTIONS, BlendConfig
from ca_jax.launch import blend_flags


def parse(*arguments, default=None):
    values = flags.FlagValues()
    blend_flags.define(default, flag_values=values)
    values(["program", *arguments])
    return blend_flags.blend_config(default, flag_values=values)


def test_every_field_has_a_flag_with_help():
    values = flags.FlagValues()
    blend_flags.define(flag_values=values)
    assert blend_flags.FLAG_OF.keys() == {field.name for field in dataclasses.fields(BlendConfig)}
    assert all(values[name].help for name in blend_flags.FLAG_OF.values())


def test_without_flags_the_config_is_the_default():
    assert parse() == BlendConfig()
    default = BlendConfig(mode="reuse", recompute_ratio=0.5, min_recompute_ratio=0.1, check_layers=2, selection="first")
    assert parse(default=default) == default
    assert parse("--blend_check_layers=3", default=default) == dataclasses.replace(default, check_layers=3)


def test_flags_are_fields():
    found = parse(
        "--blend_mode=prefix",
        "--blend_recompute_ratio=0.25",
        "--min_recompute_ratio=0",
        "--blend_check_layers=4",
        "--blend_selection=random",
    )
    assert found == BlendConfig(
        mode="prefix", recompute_ratio=0.25, min_recompute_ratio=0.0, check_layers=4, selection="random"
    )


@pytest.mark.parametrize(("flag", "choices"), [("blend_mode", BLEND_MODES), ("blend_selection", SELECTIONS)])
def test_the_help_says_what_each_choice_is(flag, choices):
    values = flags.FlagValues()
    blend_flags.define(flag_values=values)
    assert all(f"({choice})" in values[flag].help for choice in choices)
    with pytest.raises(flags.IllegalFlagValueError, match=r"blend_.*value should be one of"):
        parse(f"--{flag}=none")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--blend_recompute_ratio=1.5", r"recompute_ratio wanted a share in \[0, 1\] or None, found 1\.5"),
        ("--min_recompute_ratio=-1", r"min_recompute_ratio wanted a share in \[0, 1\], found -1"),
        ("--blend_check_layers=0", "check_layers wanted a number of layers >= 1, found 0"),
    ],
)
def test_what_the_config_refuses_is_said_with_the_name_of_the_flag(argument, message):
    with pytest.raises(ValueError, match=message):
        parse(argument)
