"""What an engine's config refuses. Ranges of single fields: test_overlap_release."""

import pytest

from ca_jax.config import EngineConfig


def test_a_cap_of_what_is_loaded_ahead_and_loading_all_before_computing_exclude_each_other():
    """Staging would never hold a history, so that every load would break."""
    with pytest.raises(ValueError, match=r"read_buffer_gib wanted None with read_buffer off, .*; found 0\.5"):
        EngineConfig(read_buffer="off", read_buffer_gib=0.5)
    assert EngineConfig(read_buffer="off").read_buffer_gib is None
    assert EngineConfig(read_buffer="all", read_buffer_gib=0.5).read_buffer_gib == 0.5


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
def test_a_mesh_has_a_size(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, found 0"):
        EngineConfig(**{name: 0})


def test_slots_are_in_equal_parts():
    with pytest.raises(ValueError, match="max_batch_size wanted a multiple of data_parallel_size=3, found 8"):
        EngineConfig(data_parallel_size=3)
    assert EngineConfig(data_parallel_size=3, max_batch_size=9).max_batch_size == 9
