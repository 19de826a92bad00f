"""What an engine's config refuses. Ranges of single fields: test_overlap_release."""

import math

import pytest

from ca_jax.config import BlendConfig, EngineConfig


def test_a_cap_of_what_is_loaded_ahead_and_loading_all_before_computing_exclude_each_other():
    """Staging would never hold a history, so that every load would break."""
    with pytest.raises(ValueError, match=r"read_buffer_gib must be None with read_buffer off, .*; got 0\.5"):
        EngineConfig(read_buffer="off", read_buffer_gib=0.5)
    assert EngineConfig(read_buffer="off").read_buffer_gib is None
    assert EngineConfig(read_buffer="all", read_buffer_gib=0.5).read_buffer_gib == 0.5


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_a_mesh_has_a_size(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        EngineConfig(**{name: 0})


def test_slots_are_in_equal_parts():
    with pytest.raises(ValueError, match="max_batch_size must be a multiple of data_parallel_size=3, got 8"):
        EngineConfig(data_parallel_size=3)
    assert EngineConfig(data_parallel_size=3, max_batch_size=9).max_batch_size == 9


def test_chunks_are_blended_at_what_loading_hides_unless_it_is_said_otherwise():
    blend = EngineConfig().blend
    assert (blend.mode, blend.recompute_ratio, blend.min_recompute_ratio, blend.check_layers, blend.selection) == (
        "blend",
        None,
        0.15,
        1,
        "hkvd",
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "fuse", "blend mode must be one of blend, reuse, prefix, recompute; got 'fuse'"),
        ("recompute_ratio", 1.01, r"recompute_ratio must be a share in \[0, 1\] or None, got 1\.01"),
        ("recompute_ratio", -0.01, r"recompute_ratio must be a share in \[0, 1\] or None, got -0\.01"),
        ("recompute_ratio", math.nan, r"recompute_ratio must be a share in \[0, 1\] or None, got nan"),
        ("min_recompute_ratio", 1.5, r"min_recompute_ratio must be a share in \[0, 1\], got 1\.5"),
        ("min_recompute_ratio", -1.0, r"min_recompute_ratio must be a share in \[0, 1\], got -1\.0"),
        ("check_layers", 0, "check_layers must be a number of layers >= 1, got 0"),
        ("check_layers", 1.0, r"check_layers must be a number of layers >= 1, got 1\.0"),
        ("check_layers", True, "check_layers must be a number of layers >= 1, got True"),
        ("selection", "last", "blend selection must be one of hkvd, spread, random, first; got 'last'"),
    ],
)
def test_a_value_of_blending_outside_its_range_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        BlendConfig(**{field: value})


@pytest.mark.parametrize("field", ["recompute_ratio", "min_recompute_ratio"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0, 1])
def test_ratios_reach_from_nothing_to_everything(field, value):
    assert getattr(BlendConfig(**{field: value}), field) == value
