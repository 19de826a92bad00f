"""Gemma 4's config.json, as releases and `transformers` spell it, what of it is refused, and its text model alone."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import ca_jax
from ca_jax.errors import UnsupportedArchitectureError
from ca_jax.models.config import RopeConfig
from ca_jax.models.huggingface import config_from_hf
from tests.tolerances import LOGITS_ATOL

SIZES = {
    **{"vocab_size": 96, "vocab_size_per_layer_input": 96, "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 13, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5},
    **{"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 6, "max_position_embeddings": 64},
}
TEXT = {"model_type": "gemma4_text", "global_head_dim": 12, **SIZES}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
BY_LAYER = {key: value for key, value in TEXT.items() if key != "global_head_dim"}


def test_what_is_left_unsaid_is_as_in_the_releases():
    config = config_from_hf({**TEXT, "use_double_wide_mlp": True})
    assert config.full_layers == (5, 11, 12), "every sixth layer, and the last one in any case"
    assert config.kv_layers == tuple(range(7))
    assert [config.kv_number(layer) for layer in range(7, 13)] == [6, 6, 6, 6, 5, 5]
    assert (config.full_head_dim, config.full_kv_heads, config.reader_mlp_dim) == (12, None, 48)
    assert config.rope == RopeConfig(theta=1e6, scaling="proportional", num_turning=1)
    assert config.local_rope == RopeConfig()
    assert (config.logit_cap, config.attention_scale, config.embed_scale) == (None, 1.0, 4.0)
    assert config_from_hf({**TEXT, "global_head_dim": 8}).full_head_dim is None


def test_sizes_of_layers_are_said_for_all_or_for_each():
    alike = {"attention_k_eq_v": True, "num_kv_shared_layers": 0}
    of_each = {str(layer): {"head_dim": 12, "num_key_value_heads": 1} for layer in (5, 11, 12)}
    config = config_from_hf({**TEXT, **alike, "num_global_key_value_heads": 1})
    assert config.kv_shape(5) == (1, 1, 12)
    assert config == config_from_hf({**BY_LAYER, **alike, "per_layer_config": of_each})


def test_experts_stand_beside_the_block_that_all_tokens_go_through():
    config = config_from_hf({**TEXT, **EXPERTS})
    assert (config.num_experts, config.num_experts_per_token, config.mlp_dim, config.shared_mlp_dim) == (4, 2, 12, 24)
    assert config.norms_experts
    with pytest.raises(ValueError, match="norms_experts must be False without experts"):
        dataclasses.replace(config, shared_mlp_dim=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({**EXPERTS, "use_double_wide_mlp": True}, "enable_moe_block=True with use_double_wide_mlp=True is not served"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not served"),
        ({"attention_k_eq_v": True}, "attention_k_eq_v=True with num_kv_shared_layers=6 is not served"),
        ({"vocab_size_per_layer_input": 32}, "vocab_size_per_layer_input=32 is not served; it must be vocab_size 96"),
        ({"per_layer_config": {"5": {"head_dim": 12}}}, "per_layer_config must be alike for layers of one type"),
        ({"per_layer_config": {"5": {"sliding_window": 9}}}, "per_layer_config with sliding_window is not served"),
    ],
)
def test_what_is_not_served_is_named(changes, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        config_from_hf({**(TEXT if "per_layer_config" not in changes else BY_LAYER), **changes})


def test_of_a_model_that_reads_images_the_text_model_is_served(tmp_path):
    """And tensors that layers without KV of their own have none of, as releases hold them, are not read."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    import safetensors.torch

    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    text = {**SIZES, "global_head_dim": 12, "tie_word_embeddings": True, **special}
    torch.manual_seed(0)
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    theirs = transformers.Gemma4ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.language_model.layers.9.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    tensors["model.vision_tower.encoder.layers.0.mlp.down_proj.weight"] = torch.zeros(4, 4)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = ca_jax.load_model(str(tmp_path), dtype="float32")
    assert model.config == config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    ids = np.random.default_rng(0).integers(0, 96, 20).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(model.logits(ids), expected, atol=LOGITS_ATOL["float32"], rtol=0)
