"""A tiny model with a tokenizer, as a directory, and what a turn took."""

from pathlib import Path
from typing import Any

import pytest

from ca_jax.testing import tiny
from ca_jax.turns.requests import Usage


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory. Greedy answers never end by themselves: special tokens have logit 0, others more."""
    config = tiny.tiny_config(max_positions=8192)
    params = tiny.tiny_params(config)
    params["params"]["head"]["kernel"][:, [tiny.END_OF_TEXT_ID, tiny.IM_START_ID, tiny.IM_END_ID]] = 0
    return tiny.write_tiny_hf(tmp_path_factory.mktemp("models") / "tiny", config, params)


def usage(**known: Any) -> Usage:
    """What a turn took, of which some is known."""
    nothing = {"queued_s": 0.0, "load_s": 0.0, "load_stall_s": 0.0, "decode_s": 0.0}
    return Usage(**{**nothing, **known})
