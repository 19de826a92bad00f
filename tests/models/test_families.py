"""Every architecture and every rope scaling against `transformers`, on small random checkpoints that it wrote."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

import ca_jax
from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models import weights
from ca_jax.models.huggingface import config_from_hf
from ca_jax.testing.tiny import tiny_config
from tests import families_kit as kit
from tests.tolerances import LOGITS_ATOL

ATOL = LOGITS_ATOL["float32"]
LENGTHS = (1, 9, 40, 120)
ROOM = 128
NUM_GREEDY = 4


@pytest.mark.parametrize("name", kit.CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    pair = kit.pair(name)
    for length in LENGTHS:
        ids = kit.prompt(length)
        for _ in range(NUM_GREEDY):
            ours = kit.our_logits(pair.model, ids, room=ROOM, context=ROOM)
            theirs = pair.their_logits(ids)
            np.testing.assert_allclose(ours, theirs, atol=ATOL, rtol=0)
            assert ours[-1].argmax() == theirs[-1].argmax()
            ids.append(int(theirs[-1].argmax()))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "mistral4", "kimi_linear"])
def test_latents_that_are_absorbed_and_that_are_expanded_give_the_logits_of_transformers(name):
    pair = kit.pair(name)
    for length in LENGTHS:  # The first two are absorbed.
        ids = kit.prompt(length)
        np.testing.assert_allclose(pair.model.logits(ids), pair.their_logits(ids), atol=ATOL, rtol=0)


ORIGINAL = {
    "dynamic_rope": {"max_position_embeddings": 32},
    "phi3_long": {"max_position_embeddings": 128, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("length", [32, 120])
@pytest.mark.parametrize("name", ORIGINAL)
def test_rope_by_the_length_of_a_text_is_that_of_transformers_within_the_original_length_and_beyond(name, length):
    pair = kit.pair(name, **ORIGINAL[name])
    config = pair.model.config
    assert (config.max_positions, config.steady_positions) == (128, 32)
    ids = kit.prompt(length)
    ours = kit.our_logits(pair.model, ids, room=length, context=length)
    np.testing.assert_allclose(ours, pair.their_logits(ids), atol=ATOL, rtol=0)
    np.testing.assert_allclose(pair.model.logits(ids), ours, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_of_a_model_that_reads_images_too_the_text_model_is_served(tmp_path, name):
    """Its head lies beside the language model; whether it is the embedding's may be said of both."""
    transformers = pytest.importorskip("transformers")
    text, kind = kit.make(name, tmp_path / "text"), kit.CASES[name][0]
    sees = {
        "depth": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
    }
    config = getattr(transformers, f"{kind}Config")(text_config=text.config.to_dict(), vision_config=sees)
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.lm_head.load_state_dict(text.lm_head.state_dict())
    theirs.save_pretrained(tmp_path / "both")
    described = json.loads((tmp_path / "both" / "config.json").read_text())
    assert described["model_type"] == name
    ids = kit.prompt(40)
    expected = ca_jax.load_model(str(tmp_path / "text"), dtype="float32").logits(ids)
    found = ca_jax.load_model(str(tmp_path / "both"), dtype="float32").logits(ids)
    np.testing.assert_array_equal(found, expected)
    del described["text_config"]["tie_word_embeddings"]
    assert not config_from_hf(described).tie_embeddings
    assert config_from_hf({**described, "tie_word_embeddings": True}).tie_embeddings


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_experts_may_lie_in_one_tensor_or_in_one_each(tmp_path, name):
    theirs = kit.make(name, tmp_path / "apart")
    theirs.save_pretrained(tmp_path / "together", save_original_format=False)
    stored = safetensors.numpy.load_file(tmp_path / "together" / "model.safetensors")
    assert sum(each.endswith("mlp.experts.gate_up_proj") for each in stored)
    apart, together = (ca_jax.load_model(str(tmp_path / each), dtype="float32") for each in ("apart", "together"))
    jax.tree.map(np.testing.assert_array_equal, together.params, apart.params)
    short = {
        each: tensor[:-1] if each.endswith("1.mlp.experts.down_proj") else tensor for each, tensor in stored.items()
    }
    safetensors.numpy.save_file(short, tmp_path / "together" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.\d.down_proj.weight is missing"):
        ca_jax.load_model(str(tmp_path / "together"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_step_limit": [0.0, 2.0]}, r"time_step_limit=\[0.0, 2.0\] is not served; it must be \[0.0, inf\]"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias=True is not served"),
        ({"layer_types": ["mamba"] * 4}, r"recurrence layers must be some and not all .* got \(0, 1, 2, 3\)"),
        ({"layer_types": ["mamba", "conv", "attention", "mamba"]}, "layer_types conv not served"),
    ],
)
def test_what_of_granite_4_is_not_served_is_named(tmp_path, changes, message):
    kit.make("granite4", tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    older = {**described, "layer_types": ["mamba", "attention", "mamba", "mamba"]}  # As files before transformers 5.
    assert config_from_hf(older) == config_from_hf(described)
    with pytest.raises((CheckpointError, UnsupportedArchitectureError), match=message):
        config_from_hf({**described, **changes})


# Against expectations that are files.


RECORDED = (
    *("llama_gqa_linear_rope", "llama_gqa_llama3_rope", "llama_gqa_tied", "llama_mha_untied", "llama_wide_heads"),
    *("family_mistral", "family_mixtral", "family_qwen2", "family_qwen3", "family_falcon_7b", "family_falcon_40b"),
    "family_neox",
)


@pytest.mark.parametrize("name", RECORDED)
def test_logits_and_greedy_tokens_are_those_recorded(recorded_data, monkeypatch, name):
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 150)  # Tensors are read in several chunks, as large ones are.
    directory = recorded_data / name
    model = ca_jax.load_model(str(directory), dtype="float32")
    expected = np.load(directory / "expected.npz")
    cases = json.loads((directory / "expected_greedy.json").read_text())["cases"]
    assert [len(case["prompt"]) for case in cases] == list(LENGTHS)
    for case, length in zip(cases, LENGTHS, strict=True):
        assert expected[f"prompt_{length}"].tolist() == case["prompt"]
        found = kit.our_logits(model, [*case["prompt"], *case["token_ids"]], room=160, context=160)
        np.testing.assert_allclose(found[:length], expected[f"logits_{length}"], atol=ATOL, rtol=0)
        assert found[length - 1 : -1].argmax(-1).tolist() == case["token_ids"]


def test_layers_behind_the_last_with_which_others_draft_are_left_out(tmp_path):
    kit.make("glm4_moe", tmp_path)
    described = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert ca_jax.load_model(str(tmp_path), dtype="float32").config.num_layers == 2


# Bad input.


def copy_of(recorded_data: Path, tmp_path: Path, case: str, *, drop: str = "", reshape: str = "", **entries) -> Path:
    """A recorded checkpoint without one tensor, with one of another shape, or with other entries in its config."""
    source = recorded_data / f"family_{case}"
    described = json.loads((source / "config.json").read_text()) | entries
    (tmp_path / "config.json").write_text(json.dumps(described))
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name != drop}
    if reshape:
        tensors[reshape] = np.ascontiguousarray(tensors[reshape][:-1])
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


FUSED = "transformer.h.1.self_attention.query_key_value.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
BIAS = "model.layers.1.self_attn.k_proj.bias"
NEOX_OF_LLAMA = {"model_type": "gpt_neox", "architectures": None, "hidden_act": "gelu"}


SU = {"rope_type": "su", "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "factor": 2.0}
SHORT = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}
LINEAR = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear"] * 2}
DAMAGED, UNSERVED = CheckpointError, UnsupportedArchitectureError


@pytest.mark.parametrize(
    ("error", "case", "changes", "message"),
    [
        (DAMAGED, "falcon_7b", {"drop": FUSED}, rf"{FUSED} is missing; its shape must be \(48, 32\)"),
        (DAMAGED, "mixtral", {"drop": EXPERT}, rf"{EXPERT} is missing; its shape must be \(32, 16\)"),
        (DAMAGED, "qwen2", {"reshape": BIAS}, rf"{BIAS}: the shape must be \(16,\), got \(15,\)"),
        (DAMAGED, "qwen2", {"model_type": "llama", "architectures": None}, "belong to no parameter.*bias"),
        (DAMAGED, "mistral", NEOX_OF_LLAMA, "names family gpt_neox, and tensors are named as those of llama"),
        (UNSERVED, "falcon_7b", {"alibi": True}, "alibi=True is not served.*ALiBi"),
        (UNSERVED, "falcon_7b", {"activation": "relu"}, "activation='relu' is not served; it must be one of gelu"),
        (UNSERVED, "neox", {"hidden_act": "silu"}, "hidden_act='silu'"),
        (UNSERVED, "mistral", {"rope_parameters": SU}, "rope scaling 'su' is not served; it must be one of default"),
        (DAMAGED, "mistral", {"rope_parameters": LONGROPE}, "short_factor is missing"),
        (DAMAGED, "mistral", {"rope_parameters": SHORT}, "long_factors of longrope rope scaling must be positive"),
        (UNSERVED, "qwen2", LINEAR, "linear"),
        (UNSERVED, "mixtral", {"architectures": ["MistralForCausalLM"]}, "architecture must be MixtralForCausalLM"),
    ],
)
def test_tensors_that_do_not_fit_and_what_is_not_served_are_named(
    recorded_data, tmp_path, error, case, changes, message
):
    with pytest.raises(error, match=message):
        ca_jax.load_model(str(copy_of(recorded_data, tmp_path, case, **changes)), dtype="float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "batch"}, "norm must be one of rms, layer; got 'batch'"),
        ({"mlp": "relu"}, "mlp must be one of swiglu, swiglu_clipped, geglu, geglu_tanh, gelu, gelu_tanh; got 'relu'"),
        ({"shares_norm": True}, "shares_norm must be False without is_parallel"),
        ({"sliding_window": 0}, "sliding_window must be positive"),
        ({"sliding_window": 4, "full_layers": (3,)}, r"full_layers must be layers in \[0, 3\)"),
        ({"num_experts": 2}, "num_experts_per_token"),
        ({"num_experts": 2, "num_experts_per_token": 3}, r"got \(3, 2\)"),
        ({"num_experts": 2, "num_experts_per_token": 1, "mlp": "gelu"}, "mlp of experts must be"),
        ({"routing": "argmax"}, "routing must be one of softmax, sigmoid; got 'argmax'"),
        ({"num_experts": 6, "num_experts_per_token": 1, "num_expert_groups": 4}, "num_experts must be a multiple of 4"),
        ({"num_expert_groups": 2, "num_chosen_groups": 3}, r"num_chosen_groups must be in \[1, num_expert_groups\]"),
        ({"norms_before": False}, "norms_before and norms_behind must be True at least one of them"),
        ({"nope_layers": (0, 9)}, r"nope_layers must be layers in \[0, 3\)"),
        ({"dense_layers": (-1,)}, r"dense_layers must be layers in \[0, 3\)"),
        ({"score_cap": 0.0}, "score_cap must be positive or None"),
        ({"query_beta": 0.1, "query_span": 0}, "query_span must be positive"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)
