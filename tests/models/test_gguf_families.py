"""GGUF files of every architecture: against llama.cpp on the same file, and the safetensors it was made from."""

import dataclasses
import functools
import math
import re

import flax.traverse_util
import gguf
import numpy as np
import pytest
import scipy.special

import ca_jax
from benchmarks.compiles import CompileCounter
from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models.checkpoint import load_checkpoint
from tests import families_kit, gguf_kit
from tests.models.test_checkpoint_gguf import assert_same_params
from tests.tolerances import GELU_TABLE_ATOL, LOGITS_ATOL

METADATA = {
    "llama": {},
    "yi": {},
    "llama3_rope": {"rope.scaling.original_context_length": 64},  # As short as no release's, so it has to be said.
    "linear_rope": {},
    "yarn_rope": {},
    "mistral": {"attention.sliding_window": 24},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "falcon_7b": {},
    "falcon_40b": {},
    "neox": {},
    "gemma2": {},
    "gemma3": {"attention.sliding_window_pattern": [True, False, True]},
    "gemma3_scaled_rope": {"attention.sliding_window_pattern": [True, False, True]},
    "gpt_oss_plain_rope": {},
    "phi3": {},
    "phi3_long": {},
    "smollm3": {},
    "granite": {},
    "ministral3": {},
    "olmo2": {},
    "olmo3": {"rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1},
    "cohere2": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_groups": {},
    "minimax_m2": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    # As converters write of Mistral's own format; of Hugging Face's they leave it unsaid.
    "mistral4": {"attention.temperature_scale": 0.3, "attention.temperature_length": 64},
    "lfm2": {},
    "gemma4": {},
    "gemma4_keys_are_values": {},
    "gemma4_experts": {},
    "granite4": {},
    "granite4_dense": {},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "kimi_linear": {},
}
"""Of the cases of `families_kit` that such files can hold, what is added to what the converter writes."""

CHANGES = {
    "olmo2": {"attention_bias": False},  # llama.cpp adds none.
    "ministral3": {"rope_parameters": {"mscale": 1.0, "mscale_all_dim": 1.0}},
    # llama.cpp knows by the number of layers which models have no rank; 32 numbers can be quantised.
    "deepseek_v2": {"q_lora_rank": 24, "qk_nope_head_dim": 32},
    "deepseek_v3": {"rope_parameters": {"mscale": 0.8, "mscale_all_dim": 0.8}},
    # llama.cpp has as many heads in all layers, and adds as much in all norms.
    "kimi_linear": {"linear_num_heads": 4, "rms_norm_eps": 1e-6},
    # llama.cpp has values as long as keys.
    **{name: {"linear_value_head_dim": 8} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
    # llama.cpp takes one width for the other, and a bias as there, as the releases have it.
    "granite4_dense": {"shared_intermediate_size": 48, "num_experts_per_tok": 0, "mamba_conv_bias": True},
}
"""What differs from these cases in what is converted; entries of `rope_parameters` are added to theirs."""

ROOM = 128
NUM_GREEDY = 4


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    """Writes a case's checkpoint with `transformers`, once."""

    @functools.cache
    def directory_of(name):
        directory, changes = tmp_path_factory.mktemp(name), CHANGES.get(name, {})
        _, config = families_kit.CASES[name]
        nested = {key: config[key] | value for key, value in changes.items() if isinstance(value, dict)}
        families_kit.make(name, directory, **changes | nested)
        return directory

    return directory_of


@pytest.fixture
def write(directory_of, tmp_path):
    """Writes a case's GGUF file."""

    def write(name, *, metadata=None, **changes):
        metadata = METADATA.get(name, {}) | (metadata or {})
        return gguf_kit.write(directory_of(name), tmp_path / f"{name}.gguf", metadata=metadata, **changes)

    return write


def flat(tree):
    return flax.traverse_util.flatten_dict(tree["params"], sep=".")


def as_in_file(config):
    """A config as far as files hold it."""
    config = dataclasses.replace(config, norm_offset=0)
    if config.architecture == "granite4":  # Without a rope the converter writes no release's context.
        return dataclasses.replace(config, max_positions=2**20)
    return config


def near(config):
    """What describes a config; numbers that follow from others are as exact as a file's float32."""
    described = config.described()
    for part, key in ((described, "attention_scale"), (described["rope"], "attention_factor")):
        if part.get(key) is not None:
            part[key] = pytest.approx(part[key], rel=1e-6)
    return described


def shifted(params, offset):
    """Parameters whose norms have in their scales what the model of the others adds."""
    leaves = flax.traverse_util.flatten_dict(params)
    added = {path: np.float32(offset) for path in leaves if path[-1] == "scale" and path[-2] != "mixer"}
    moved = {path: leaf + added[path] if path in added else leaf for path, leaf in leaves.items()}
    return flax.traverse_util.unflatten_dict(moved)


@pytest.mark.parametrize("name", [*METADATA, "neox_sequential"])
def test_logits_and_greedy_tokens_equal_those_of_llama_cpp(write, directory_of, name):
    """And the model is that of the safetensors, whatever of it no logits show."""
    path = write(name)
    model, wanted = ca_jax.load_model(str(path), dtype="float32"), load_checkpoint(str(directory_of(name)))
    said = {} if name in METADATA else {"mlp": "gelu"}  # As the releases have it: of this one the file cannot tell.
    offset = wanted.config.norm_offset
    assert model.config.described() == near(dataclasses.replace(as_in_file(wanted.config), **said))
    assert_same_params(model.params, shifted(wanted.params, offset) if offset else wanted.params, rounded="a_log")
    theirs = gguf_kit.LlamaCpp(path, families_kit.VOCAB_SIZE)
    ignores_window = model.config.architecture in ("mistral", "phi3") and model.config.sliding_window
    atol = (LOGITS_ATOL if model.config.mlp.startswith("swiglu") else GELU_TABLE_ATOL)["float32"]
    for length in (1, 9, 40, 120):
        if ignores_window and length + NUM_GREEDY > model.config.sliding_window:
            break  # llama.cpp lets no layer of these architectures slide.
        ids = families_kit.prompt(length)
        expected = []
        for _ in range(NUM_GREEDY):
            expected.append(theirs.log_probabilities(ids))
            ids.append(int(expected[-1].argmax()))
        logits = families_kit.our_logits(model, ids, room=ROOM, context=gguf_kit.CONTEXT)[length - 1 : -1]
        np.testing.assert_allclose(scipy.special.log_softmax(logits, axis=-1), expected, atol=atol, rtol=0)
        for ours, row in zip(logits, expected, strict=True):
            assert row[ours.argmax()] >= row.max() - 2 * atol


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_groups", "lfm2_biased", "granite4_dense"])
def test_what_llama_cpp_computes_otherwise_is_the_model_of_the_safetensors(tmp_path, name):
    """V2-Lite, which it knows by its 27 layers, V2, whose groups it chooses by two shares, and biases and widths."""
    families_kit.make(name, tmp_path)
    checkpoint, wanted = (
        load_checkpoint(str(path)) for path in (gguf_kit.write(tmp_path, tmp_path / f"{name}.gguf"), tmp_path)
    )
    assert checkpoint.config.described() == near(as_in_file(wanted.config))
    assert_same_params(checkpoint.params, wanted.params, rounded="a_log")


def test_longrope_has_short_factors_in_short_contexts(tmp_path):
    """As long as llama.cpp's context here is at least."""
    families_kit.make("phi3_long", tmp_path, original_max_position_embeddings=gguf_kit.CONTEXT)
    path = gguf_kit.write(tmp_path, tmp_path / "short.gguf")
    model, ids = ca_jax.load_model(str(path), dtype="float32"), families_kit.prompt(100)
    expected = gguf_kit.LlamaCpp(path, families_kit.VOCAB_SIZE).log_probabilities(ids)
    short, long = (
        scipy.special.log_softmax(families_kit.our_logits(model, ids, room=ROOM, context=context)[-1])
        for context in (gguf_kit.CONTEXT, gguf_kit.CONTEXT + 1)
    )
    np.testing.assert_allclose(short, expected, atol=LOGITS_ATOL["float32"], rtol=0)
    assert np.abs(long - expected).max() > 0.1


def test_how_queries_grow_is_nothing_where_the_file_leaves_it_unsaid(write):
    config = load_checkpoint(str(write("mistral4", metadata={"attention.temperature_scale": None}))).config
    assert config.query_beta == 0


@pytest.mark.parametrize(("name", "num_layers"), [("glm4_moe", 3), ("qwen3_5_moe", 4)])
def test_layers_that_draft_tokens_are_left_out(write, name, num_layers):
    """They lie behind the last one, and are counted with the others."""
    plain, block = load_checkpoint(str(write(name))), f"blk.{num_layers}."
    drafts = {block + "attn_norm.weight": np.ones(32, np.float32), block + "nextn.eh_proj.weight": np.ones((32, 64))}
    drafts[block + "ffn_up_exps.weight"] = np.ones((6, 24, 32), np.float32)
    metadata = {"block_count": num_layers + 1, "nextn_predict_layers": 1}
    found = load_checkpoint(str(write(name, metadata=metadata, tensors=drafts)))
    assert found.config == plain.config
    assert_same_params(found.params, plain.params)


def test_layers_with_states_may_be_said_one_by_one(write):
    said = {"full_attention_interval": None, "attention.recurrent_layers": [True, True, True, False]}
    plain, found = (load_checkpoint(str(write("qwen3_5", metadata=each))) for each in ({}, said))
    assert found.config == plain.config


def test_granite4_of_attention_alone_is_a_file_of_granite(tmp_path):
    """As converters write it; the rope is that of the file."""
    families_kit.make("granite4_attention", tmp_path, shared_intermediate_size=48)
    said = {"attention.head_count_kv": 2, "context_length": 512, "rope.scaling.finetuned": True}
    path = gguf_kit.write(tmp_path, tmp_path / "alone.gguf", metadata=said, architecture="granite")
    checkpoint, wanted = load_checkpoint(str(path)), load_checkpoint(str(tmp_path))
    assert checkpoint.config == dataclasses.replace(wanted.config, architecture="granite")
    assert_same_params(checkpoint.params, wanted.params)


def test_keys_and_values_of_layers_that_read_those_of_others_are_left_out(write):
    """As the releases hold them."""
    plain = load_checkpoint(str(write("gemma4")))
    unread = {f"blk.{i}.attn_{part}.weight": np.ones((24, 32), np.float32) for i in (4, 5) for part in "kv"}
    unread["blk.5.attn_k_norm.weight"] = np.ones(20, np.float32)
    found = load_checkpoint(str(write("gemma4", tensors=unread)))
    assert found.config == plain.config
    assert_same_params(found.params, plain.params)


@pytest.mark.parametrize(
    ("name", "tensor", "shapes"),
    [
        ("qwen2_moe", "blk.0.ffn_gate_inp_shexp.weight", ((1, 32), (32,))),
        ("kimi_linear", "blk.0.ssm_a", ((1, 1, 4, 1), (4, 1))),
        ("kimi_linear", "blk.0.ssm_conv1d_q.weight", ((1, 64, 1, 4), (64, 1, 4))),
    ],
)
def test_axes_of_one_may_be_left_out(write, name, tensor, shapes):
    """As some converters do, and what quantises files."""
    numbers = -np.linspace(1, 2, math.prod(shapes[0]), dtype=np.float32)
    plain, found = (load_checkpoint(str(write(name, tensors={tensor: numbers.reshape(shape)}))) for shape in shapes)
    assert_same_params(found.params, plain.params)


def test_experts_one_by_one_are_those_that_are_stacked(write):
    """As in files from before they were."""
    stacked = load_checkpoint(str(write("mixtral")))
    single = load_checkpoint(str(write("mixtral", stacks_experts=False)))
    assert single.config == stacked.config
    assert_same_params(single.params, stacked.params)


def test_a_window_slides_with_experts_too(write):
    config = load_checkpoint(str(write("mixtral", metadata={"attention.sliding_window": 30}))).config
    assert (config.architecture, config.sliding_window, config.num_experts) == ("mixtral", 30, 4)


def test_yarn_is_read_with_all_that_it_says(write):
    said = {"type": "yarn", "factor": 4.0, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    config = load_checkpoint(str(write("qwen3", metadata={f"rope.scaling.{key}": said[key] for key in said}))).config
    rope = config.rope
    assert (rope.scaling, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 4, 16, 2)
    assert rope.original_max_positions == config.max_positions
    assert rope.attention_factor == pytest.approx(1 + 0.1 * np.log(4))


@pytest.mark.parametrize(
    ("name", "tensor", "keys"),
    [
        ("mixtral", "blk.1.ffn_up_exps.weight", ["layer_1.mlp.w_up"]),
        ("falcon_40b", "blk.0.attn_qkv.weight", [f"layer_0.attn.w{part}" for part in "qkv"]),
        ("llama3_rope", "blk.1.attn_k.weight", ["layer_1.attn.wk"]),
        ("deepseek_v2", "blk.1.attn_k_b.weight", ["layer_1.attn.wuk"]),
        ("phi3", "blk.1.ffn_up.weight", ["layer_1.mlp.w_gate", "layer_1.mlp.w_up"]),
        ("gemma4_experts", "blk.1.ffn_gate_up_exps.weight", ["layer_1.mlp.w_gate", "layer_1.mlp.w_up"]),
        ("granite4", "blk.0.ssm_in.weight", [f"layer_0.mixer.w_{part}" for part in ("z", "qkv", "step")]),
        ("qwen3_5", "blk.0.attn_qkv.weight", ["layer_0.mixer.w_qkv"]),
        ("qwen3_5", "blk.0.ssm_out.weight", ["layer_0.mixer.w_out"]),
    ],
)
def test_parts_of_quantised_tensors_are_dequantised(write, name, tensor, keys):
    plain, quantised = (
        flat(load_checkpoint(str(write(name, types=types))).params)
        for types in ({}, {tensor: gguf.GGMLQuantizationType.Q8_0})
    )
    for key, array in quantised.items():
        error = np.abs(array - plain[key]).max()
        assert (0 < error < 0.01) if key in keys else error == 0, key


CAMEL_CASE, MARKED = "dbA It'S!\n/ab", "b\u0302ab \u0302x"
TEXTS = ("x = 12345 + 678", "It's 99,000  (ab)\n\n  ab!?", "été 12 --ab", CAMEL_CASE, "中x = (ab", MARKED)
READ_OTHERWISE = {**dict.fromkeys(("gpt-4o", "tekken", "minimax-m2"), (MARKED,)), "kimi-k2": (MARKED, CAMEL_CASE)}
"""Which of these llama.cpp splits otherwise than the original patterns do."""
WHOLE = ("Ã©tÃ©", "678")
"""Tokens that no merges make, and that some take for what they are nonetheless."""
OF_SOME = (("b", "A"), ("t", "'"), ("Ċ", "/"), ("b", "Ì"))
"""Merges of what some pre-tokenizers alone split, or alone leave together."""


@pytest.mark.parametrize(
    "pre",
    [
        *("gpt-2", "smollm", "llama-bpe", "qwen2", "falcon", "olmo", "gpt-4o", "refact", "command-r", "smaug-bpe"),
        *("dbrx", "glm4", "tekken", "pixtral", "deepseek-llm", "deepseek-v3", "minimax-m2", "lfm2"),
        *("granite-docling", "qwen35", "kimi-k2"),
    ],
)
def test_text_is_split_as_llama_cpp_splits_it(write, pre):
    """Told by what it expects to come next: prompts of other tokens give other numbers."""
    vocabulary = gguf_kit.byte_vocabulary()
    for left, right in (
        *gguf_kit.DIGITS,
        ("'", "s"),
        ("0", "0"),
        ("00", "0"),
        (")", "Ċ"),
        ("!", "?"),
        ("-", "-"),
        ("Ń", "x"),
        *OF_SOME,
    ):
        vocabulary["tokens"].append(left + right)
        vocabulary["token_type"].append(gguf_kit.NORMAL)
        vocabulary["merges"].append(f"{left} {right}")
    vocabulary["tokens"] += WHOLE
    vocabulary["token_type"] += [gguf_kit.NORMAL] * len(WHOLE)
    size = len(vocabulary["tokens"])
    embedding = np.random.default_rng(0).standard_normal((size, 32)).astype(np.float32)
    vocabulary |= {"pre": pre, "add_bos_token": False}
    path = write("falcon_7b", vocabulary=vocabulary, tensors={"token_embd.weight": embedding})
    tokenizer, theirs = load_checkpoint(str(path)).tokenizer, gguf_kit.LlamaCpp(path, size)
    for text in TEXTS:
        if text in READ_OTHERWISE.get(pre, ()):
            continue
        ids = tokenizer.encode(text)
        expected = theirs.log_probabilities(text)
        np.testing.assert_array_equal(theirs.log_probabilities(ids), expected)
        assert np.abs(theirs.log_probabilities([*ids[:-3], *ids[-2:]]) - expected).max() > 0.1


# Bad input, named before anything is computed.

DAMAGED, UNSERVED = CheckpointError, UnsupportedArchitectureError
UP, NORM, Q = "blk.1.ffn_up_exps.weight", "blk.1.attn_norm_2.bias", "blk.1.attn_q_norm.weight"
ROUTER, FUSED, BIAS = "blk.0.ffn_gate_inp.weight", "blk.1.attn_qkv.weight", "blk.0.attn_qkv.bias"


@pytest.mark.parametrize(
    ("error", "name", "key", "value", "message"),
    [
        (DAMAGED, "mixtral", "expert_used_count", None, "metadata llama.expert_used_count is missing"),
        (DAMAGED, "mixtral", "expert_used_count", 9, "0 < num_experts_per_token <= num_experts, or both 0, got (9, 4)"),
        (DAMAGED, "neox", "use_parallel_residual", None, "metadata gptneox.use_parallel_residual is missing"),
        (DAMAGED, "neox", "rope.dimension_count", 5, "rotary_dim must be positive and even, got 5"),
        (DAMAGED, "qwen2", "attention.head_count", 0, "its metadata describes no model"),
        (UNSERVED, "neox", "rope.scaling.type", "dynamic", "gptneox: rope scaling 'dynamic' is not served; it must be"),
        (UNSERVED, "yarn_rope", "rope.scaling.attn_factor", 0.5, "attn_factor 0.5 is not served; it must be 1.0"),
        (UNSERVED, "llama3_rope", "rope.scaling.type", "linear", "'linear' with rope_freqs.weight is not served"),
        (UNSERVED, "qwen2", "attention.sliding_window", 20, "sliding_window 20 is not served; it must be 0"),
        (UNSERVED, "olmo3", "rope.scaling.yarn_attn_factor", 1.5, "yarn_attn_factor 1.5 is not served; it must be"),
        (UNSERVED, "deepseek_v3", "attention.key_length_mla", None, "attn_kv_b.weight without"),
        (UNSERVED, "deepseek_v3", "rope.scaling.yarn_log_multiplier", None, "'yarn' without yarn_log_multiplier"),
        (UNSERVED, "deepseek_v2", "expert_gating_func", 3, "expert_gating_func 3 is not served; it must be 1"),
        (
            UNSERVED,
            "granite",
            "rope.scaling.finetuned",
            False,
            "rope.scaling.finetuned False is not served",
        ),
        (UNSERVED, "glm4_moe", "expert_gating_func", 1, "expert_gating_func 1 is not served; it must be 2"),
        (DAMAGED, "qwen3_moe", "expert_feed_forward_length", None, "qwen3moe.expert_feed_forward_length is missing"),
        (UNSERVED, "mistral", "attention.head_count_kv", [2, 1], "a head_count_kv of its own for each layer is not"),
        (UNSERVED, "lfm2", "attention.head_count_kv", [0, 2, 0, 1], "a head_count_kv of its own for each layer is not"),
        (UNSERVED, "gemma4", "attention.head_count_kv", [2, 2, 1, 2, 2, 2], "must be alike for layers that slide"),
        (UNSERVED, "granite4", "attention.head_count_kv", [2] * 4, "head_count_kv must be 0 for some layers, and not"),
        (DAMAGED, "granite4", "ssm.state_size", None, "metadata granitehybrid.ssm.state_size is missing"),
        (UNSERVED, "qwen3_next", "blk.0.ssm_in.weight", np.ones((96, 32), np.float32), "ssm_in.weight is not served"),
        (UNSERVED, "kimi_linear", "expert_gating_func", 1, "expert_gating_func 1 is not served; it must be 2"),
        (DAMAGED, "kimi_linear", "blk.0.ssm_a", np.ones((1, 1, 3, 1), np.float32), "blk.0.ssm_a: the shape must be"),
        (DAMAGED, "qwen3_5", "attention.recurrent_layers", [True], "its metadata describes no model"),
        (UNSERVED, "gemma4", "rope.dimension_count_swa", 6, "rope.dimension_count_swa 6 is not served; it must be 12"),
        (UNSERVED, "gemma4", "feed_forward_length", [48, 40, 48, 48, 96, 96], "feed_forward_length for layers with KV"),
        (DAMAGED, "gemma4", "attention.key_length_swa", None, "metadata gemma4.attention.key_length_swa is missing"),
        (DAMAGED, "mixtral", UP, np.ones((3, 48, 32), np.float32), f"{UP}[3] is missing"),
        (DAMAGED, "mixtral", ROUTER, np.ones((5, 32), np.float32), f"{ROUTER}: the shape must be (4, 32), got (5, 32)"),
        (DAMAGED, "falcon_7b", FUSED, np.ones((96, 32), np.float32), "the shape must be (48, 32), got (96, 32)"),
        (DAMAGED, "falcon_40b", NORM, None, f"{NORM} is missing; its shape must be (32,)"),
        (DAMAGED, "neox", BIAS, None, f"{BIAS} is missing; its shape must be (192,)"),
        (DAMAGED, "qwen3", Q, None, f"{Q} is missing; its shape must be (16,)"),
    ],
)
def test_metadata_and_tensors_of_no_model_that_is_served_are_named(write, error, name, key, value, message):
    part = "tensors" if key.startswith("blk.") else "metadata"
    with CompileCounter() as counter, pytest.raises(error, match=re.escape(message)):
        ca_jax.load_model(str(write(name, **{part: {key: value}})))
    assert counter.count == 0
