"""Published architectures in their exact sizes, and random weights of any: their tree, their numbers, their scale."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.compiles import CompileCounter
from ca_jax.errors import UnknownModelError
from ca_jax.models.families import FAMILIES
from ca_jax.models.presets import PRESETS
from ca_jax.models.random_weights import random_fingerprint, random_params
from ca_jax.models.transformer import Transformer
from ca_jax.models.weights import parameter_slots, resolve_dtype
from ca_jax.pretrained import random_model
from ca_jax.testing import tiny

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


# Random weights.

TOKENS = [5, 200, 17, 17, 0, 255]


@pytest.fixture
def preset(monkeypatch):
    def add(**changes):
        monkeypatch.setitem(PRESETS, "tiny", tiny.tiny_config(**changes))
        return "tiny"

    return add


@pytest.mark.parametrize(("tied", "dtype"), [(False, "float16"), (True, "bfloat16")])
def test_the_tree_is_that_of_a_checkpoint(preset, tied, dtype):
    model = random_model(preset(tie_embeddings=tied), dtype=dtype)
    wanted = tiny.tiny_params(model.config, dtype=resolve_dtype(dtype))
    jax.tree.map(lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), model.params, wanted)
    wide = random_params(model.config, dtype="float32")
    # Two compiled functions may round a number on either side of a tie: they agree but for the last place.
    bounds = {"rtol": float(jnp.finfo(dtype).eps), "atol": float(jnp.finfo(dtype).smallest_subnormal)}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.astype("float32"), **bounds), wide, model.params)
    assert (model.name, model.dtype, model.tokenizer) == ("tiny (random weights)", dtype, None)


PARALLEL = {"norm": "layer", "mlp": "gelu", "mlp_bias": True, "is_parallel": True, "qkv_bias": True, "out_bias": True}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "qk_norm": True}


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [("float16", {"num_layers": 12}), ("float32", PARALLEL), ("float32", EXPERTS)],  # bfloat16 has float32's range.
)
def test_logits_are_of_order_one_and_norms_scale_by_one(preset, dtype, changes):
    model = random_model(preset(**changes), dtype=dtype)
    logits = model.logits(TOKENS)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2
    assert np.abs(logits - model.logits([6, *TOKENS[1:]]))[-1].max() > 1e-2, "what came before moves them"
    np.testing.assert_array_equal(model.params["params"]["final_norm"]["scale"], 1.0)


def test_a_seed_decides_every_matrix_and_no_two_are_alike():
    config = tiny.tiny_config()
    matrices = {}
    for label, seed in (("first", 0), ("again", 0), ("other", 1)):
        leaves = jax.tree.leaves(random_params(config, dtype="float32", seed=seed))
        matrices[label] = [leaf for leaf in leaves if leaf.ndim > 1]
    for first, again, other in zip(*matrices.values(), strict=True):
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)
    beginnings = {tuple(matrix.ravel()[:4].tolist()) for matrix in matrices["first"]}
    assert len(beginnings) == len(matrices["first"])


def test_more_layers_compile_nothing_more():
    random_params(tiny.tiny_config(num_layers=1, mlp_dim=96), dtype="float32")
    with CompileCounter() as compiles:
        random_params(tiny.tiny_config(num_layers=2, mlp_dim=96), dtype="float32", seed=7)
    assert compiles.count == 0


def test_a_fingerprint_differs_with_all_that_the_weights_depend_on(preset):
    config = tiny.tiny_config()
    base = random_fingerprint(config, dtype="float32", seed=0)
    others = {
        random_fingerprint(config, dtype="float32", seed=1),
        random_fingerprint(config, dtype="bfloat16", seed=0),
        random_fingerprint(tiny.tiny_config(num_layers=4), dtype="float32", seed=0),
    }
    assert len({base, *others}) == 4
    assert random_model(preset(), dtype="float32", seed=0).fingerprint == base


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama9", {}, r"one of falcon-40b, .*yi-34b; got 'llama9'"),
        *(("tiny", {"seed": seed}, rf"seed must be in \[0, 4294967296\), got {seed}") for seed in (-1, 2**32)),
        ("tiny", {"dtype": "int8"}, r"dtype must be one of .* got 'int8'"),
    ],
)
def test_what_cannot_be_made_is_refused(preset, name, changes, says):
    preset()
    with pytest.raises((UnknownModelError, ValueError), match=says):
        random_model(name, **changes)
