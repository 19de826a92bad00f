"""A tiny model with a tokenizer, as a directory and served."""

from pathlib import Path

import pytest

from ca_jax import Engine, EngineConfig, StoreConfig
from ca_jax.testing import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A Hugging Face directory. Greedy answers never end by themselves: special tokens have logit 0, others more."""
    config = tiny.tiny_config(max_positions=8192)
    params = tiny.tiny_params(config)
    params["params"]["head"]["kernel"][:, [tiny.END_OF_TEXT_ID, tiny.IM_START_ID, tiny.IM_END_ID]] = 0
    return tiny.write_tiny_hf(tmp_path_factory.mktemp("models") / "tiny", config, params)


@pytest.fixture(scope="session")
def engine(tiny_model):
    """One slot, a window of 512 tokens, a store of 16 MiB."""
    config = EngineConfig(
        context_window=512,
        max_batch_size=1,
        compile_cache_dir=None,
        recompute_if_faster=False,
        store=StoreConfig(dram_gib=1 / 64),
    )
    with Engine.from_pretrained(str(tiny_model), config) as served:
        yield served
