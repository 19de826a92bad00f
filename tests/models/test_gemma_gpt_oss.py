"""Gemma and gpt-oss: config.json of any age, metadata that leaves things unsaid, and experts in one tensor.

Their logits are held against those of others in `test_families` and `test_gguf_families`.
"""

import dataclasses
import json

import gguf
import numpy as np
import pytest

import ca_jax
from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models import weights
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.families import FAMILIES
from ca_jax.models.families.from_gguf import GgufDescription
from ca_jax.models.huggingface import config_from_hf
from ca_jax.models.stored import StoredTensor, of_each_expert
from tests import families_kit, gguf_kit
from tests.tolerances import LOGITS_ATOL

GEMMA2_27B = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    **{"vocab_size": 256000, "hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46},
    **{"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144},
    **{"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096},
    **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"},
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    **{"vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256},
    **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 512, "sliding_window_pattern": 6},
    **{"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None, "attn_logit_softcapping": None},
    **{"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
}
YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5, "sliding_window": 128},
    **{"rope_theta": 150000, "rope_scaling": YARN, "swiglu_limit": 7.0, "hidden_act": "silu"},
}
"""The releases', as far as they say anything of the architecture."""


def without(described, *keys):
    return {key: value for key, value in described.items() if key not in keys}


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("Gemma2", GEMMA2_27B),
        ("Gemma2", {**GEMMA2_27B, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("Gemma2", without(GEMMA2_27B, "query_pre_attn_scalar", "rope_theta", "sliding_window")),
        ("Gemma2", without(GEMMA2_27B, "attn_logit_softcapping", "final_logit_softcapping", "hidden_activation")),
        ("Gemma3Text", GEMMA3_1B),
        ("Gemma3Text", {**GEMMA3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("Gemma3Text", {**GEMMA3_1B, "rope_local_base_freq": 300.0, "sliding_window_pattern": 2}),
        ("Gemma3Text", without(GEMMA3_1B, "rope_theta", "rope_local_base_freq", "sliding_window_pattern")),
        ("Gemma3Text", {**GEMMA3_1B, "attention_bias": True, "tie_word_embeddings": False}),
        ("GptOss", GPT_OSS_20B),
        ("GptOss", {**GPT_OSS_20B, "rope_theta": 1e4, "attention_bias": False}),
        ("GptOss", without(GPT_OSS_20B, "rope_theta", "rope_scaling", "sliding_window", "head_dim")),
    ],
)
def test_what_a_file_says_and_leaves_unsaid_is_read_as_transformers_reads_it(kind, described):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, f"{kind}Config")(**without(described, "model_type")).to_dict()
    assert {"layer_types", "rope_parameters"} <= theirs.keys()
    assert config_from_hf(described) == config_from_hf(without(theirs, "rope_theta", "rope_local_base_freq"))


def test_a_release_of_each_is_what_its_paper_says():
    config = config_from_hf(GEMMA3_1B)
    assert (config.full_layers, config.sliding_window) == ((5, 11, 17, 23), 512)
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    config = config_from_hf(GEMMA2_27B)
    assert (config.score_cap, config.logit_cap, config.attention_scale) == (50, 30, 1 / 12)
    assert config.full_layers == tuple(range(1, 46, 2))
    config = config_from_hf(GPT_OSS_20B)
    assert config.full_layers == tuple(range(1, 24, 2))
    assert (config.rope.scaling, config.rope.truncate, config.num_experts_per_token) == ("yarn", False, 4)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention=True is not served"),
        ({**GEMMA3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not served"),
        ({**GEMMA2_27B, "hidden_activation": "relu"}, "hidden_activation='relu' is not served"),
        ({**GPT_OSS_20B, "swiglu_limit": 8.0}, "swiglu_limit=8.0 is not served; it must be 7.0"),
    ],
)
def test_what_is_not_served_is_named(described, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        config_from_hf(described)


def test_of_a_model_that_reads_images_the_text_model_is_served(tmp_path):
    """Its `text_config` leaves most things unsaid, as that of Gemma 3 4B does."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    unsaid = {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "sliding_window": 5}
    text = {"model_type": "gemma3_text", **sizes, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    sees = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    sees |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=sees, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["text_config"].keys() > unsaid
    (tmp_path / "config.json").write_text(json.dumps({**described, "text_config": text}))
    model = ca_jax.load_model(str(tmp_path), dtype="float32")
    assert model.config == config_from_hf(described)
    with pytest.raises(CheckpointError, match="text_config is missing"):
        config_from_hf({"model_type": "gemma3"})
    ids = np.random.default_rng(0).integers(0, 1000, 20).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(model.logits(ids), expected, atol=LOGITS_ATOL["float32"], rtol=0)


@pytest.mark.parametrize("ties", [False, True])
def test_the_whole_model_says_whether_its_head_is_tied_and_not_its_text_model(tmp_path, ties):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    text = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 300, "head_dim": 8}
    sees = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text | {"model_type": "gemma3_text", "tie_word_embeddings": not ties},
        vision_config=sees | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=ties,
    )
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["text_config"]["tie_word_embeddings"] = not ties
    (tmp_path / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": ties}))
    ids = [5, 17, 250, 3]
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    found = ca_jax.load_model(str(tmp_path), dtype="float32").logits(ids)
    np.testing.assert_allclose(found, expected, atol=LOGITS_ATOL["float32"], rtol=0)


GGUF_27B = {
    **{"context_length": 8192, "embedding_length": 4608, "block_count": 46, "feed_forward_length": 36864},
    **{"attention.head_count": 32, "attention.head_count_kv": 16, "attention.key_length": 128},
    **{"attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-6},
}


def test_gguf_says_nothing_of_scale_caps_and_window_and_they_are_those_of_the_releases():
    described = GgufDescription(entries=GGUF_27B, shapes={"token_embd.weight": (256000, 4608)})
    wanted = dataclasses.replace(config_from_hf(GEMMA2_27B), norm_offset=0)
    assert FAMILIES["gemma2"].config_from_gguf(described) == wanted
    smaller = dataclasses.replace(described, entries={**GGUF_27B, "block_count": 42})
    assert FAMILIES["gemma2"].config_from_gguf(smaller).attention_scale is None


def test_gemma3_without_a_window_has_one_rope():
    described = GgufDescription(entries=GGUF_27B, shapes={"token_embd.weight": (256000, 4608)})
    config = FAMILIES["gemma3"].config_from_gguf(described)
    assert (config.sliding_window, config.full_layers, config.local_rope) == (None, (), None)


def test_yarn_of_gpt_oss_is_not_truncated_though_the_file_cannot_say_so(tmp_path):
    families_kit.make("gpt_oss", tmp_path)
    config = load_checkpoint(str(tmp_path)).config
    found = load_checkpoint(str(gguf_kit.write(tmp_path, tmp_path / "of.gguf"))).config
    assert not found.rope.truncate
    assert dataclasses.replace(found.rope, attention_factor=1) == dataclasses.replace(config.rope, attention_factor=1)
    assert found.rope.attention_factor == pytest.approx(config.rope.attention_factor)


# Experts in one tensor.


def experts_of(checkpoint):
    return checkpoint.params["params"]["layer_1"]["mlp"]


def test_experts_in_four_bits_are_each_read_from_their_place(tmp_path):
    families_kit.make("gpt_oss", tmp_path)
    names = [f"blk.1.ffn_{name}_exps.weight" for name in ("gate", "up")]
    types = dict.fromkeys(names, gguf.GGMLQuantizationType.MXFP4)
    plain = experts_of(load_checkpoint(str(gguf_kit.write(tmp_path, tmp_path / "plain.gguf"))))
    quantised = experts_of(load_checkpoint(str(gguf_kit.write(tmp_path, tmp_path / "mxfp4.gguf", types=types))))
    for key, leaf in plain.items():
        error = np.abs(quantised[key] - leaf).max()
        # Of 32 numbers the largest are multiples of a third or a fourth of the largest.
        assert (0 < error < np.abs(leaf).max() / 4) if key in ("w_gate", "w_up") else error == 0, key


@pytest.mark.parametrize("transposed", [True, False])
def test_matrices_of_all_experts_lie_either_way_and_each_is_read_once_a_leaf(transposed):
    """Rows that take turns included: gate and up of one tensor."""
    sizes = {"hidden_size": 6, "intermediate_size": 4, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = config_from_hf({**GPT_OSS_20B, **sizes})
    matrices = np.random.default_rng(0).standard_normal((3, 8, 6)).astype(np.float32)  # [E, 2D, F]
    stored = np.ascontiguousarray(matrices.swapaxes(1, 2)) if transposed else matrices
    read = []

    def read_rows(start, stop):
        read.append(start)
        return stored[start:stop]

    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensor = StoredTensor(shape=stored.shape, read_rows=read_rows)
    tensors = of_each_expert(name, tensor, transposed)
    place = FAMILIES["gpt_oss"].hf_names(config)["experts.w_up"]
    slot = next(slot for slot in weights.parameter_slots(config) if slot.key == "experts.w_up")
    of_experts = tuple(tensors[place.name.format(layer=0, expert=i)] for i in range(3))
    leaf = weights.Leaf(slot=slot, dtype=np.dtype(np.float32), tensors=of_experts, rows=place.rows)
    np.testing.assert_array_equal(leaf.read(), matrices[:, 1::2].swapaxes(1, 2))
    assert read == [0, 1, 2]
