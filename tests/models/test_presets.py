"""Published architectures in their exact sizes."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from ca_jax.models.families import FAMILIES
from ca_jax.models.presets import PRESETS
from ca_jax.models.random_weights import random_params
from ca_jax.models.transformer import Transformer
from ca_jax.models.weights import parameter_slots

MIB = 1 << 20
NUM_PARAMS = {
    # Numbers in the released weights: the sum over the safetensors files of each model's page on Hugging Face.
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "yi-34b": 34_388_917_248,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "falcon-40b": 41_303_293_952,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "pythia-1.4b": 1_414_647_808,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    # Its files hold the head beside the embedding that it is tied to, 7,217,189,760 in all: less 65,024 x 4,544.
    "falcon-7b": 6_921_720_704,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_published_and_the_model_takes_them(name):
    config = PRESETS[name]
    assert config.architecture in FAMILIES
    assert sum(math.prod(slot.shape) for slot in parameter_slots(config)) == NUM_PARAMS[name]
    config = dataclasses.replace(config, num_layers=2)
    params = jax.eval_shape(lambda: random_params(config, dtype="bfloat16"))
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    logits, kv = jax.eval_shape(Transformer(config).apply, params, tokens, tokens)  # refuses any other shape
    assert logits.shape == (1, 2, config.vocab_size)
    assert (
        sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(kv.layers)) == 2 * config.kv_bytes_per_token()
    )


@pytest.mark.parametrize(
    ("name", "mib"),
    # CachedAttention, section 4.2, in fp16; its MB are MiB. LLaMA-13B and 70B there are Llama 2.
    [("llama-65b", "2.50"), ("llama2-13b", "0.78"), ("llama2-70b", "0.31"), ("falcon-40b", "0.12")],
)
def test_a_token_leaves_as_many_bytes_as_the_paper_says(name, mib):
    assert f"{PRESETS[name].kv_bytes_per_token(2) / MIB:.2f}" == mib
