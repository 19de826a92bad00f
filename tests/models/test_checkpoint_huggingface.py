"""Hugging Face directories: config.json, weights, tokenizer files, the hub, and what is refused."""

import copy
import json

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ca_jax.errors import (
    CheckpointError,
    UnknownModelError,
    UnsupportedArchitectureError,
    UnsupportedQuantizationError,
)
from ca_jax.models import huggingface
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import RopeConfig
from ca_jax.models.rope import inverse_frequencies
from ca_jax.testing import tiny

from .test_checkpoint_gguf import assert_same_params

CONFIG = tiny.tiny_config(num_layers=2)
PARAMS = tiny.tiny_params(CONFIG)
LLAMA3 = RopeConfig(
    theta=500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
)


@pytest.fixture
def directory(tmp_path):
    return tiny.write_tiny_hf(tmp_path / "tiny-llama", CONFIG, PARAMS)


def rewrite(path, **changes):
    """Changes entries of a JSON file; None takes one out."""
    contents = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


def rewrite_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


# config.json


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        tiny.tiny_config(tie_embeddings=True, norm_eps=1e-6),
        tiny.tiny_config(num_kv_heads=4, head_dim=32),
        tiny.tiny_config(rope=RopeConfig(theta=100000.0)),
        tiny.tiny_config(rope=RopeConfig(scaling="linear", factor=2.5)),
        tiny.tiny_config(rope=LLAMA3),
    ],
)
def test_config_comes_back(config):
    described = tiny.hf_config(config)
    assert huggingface.config_from_hf(described) == config
    if described.get("rope_scaling"):  # As it was spelled once.
        older = {"type" if key == "rope_type" else key: value for key, value in described["rope_scaling"].items()}
        assert huggingface.config_from_hf({**described, "rope_scaling": older}) == config
    parameters = {"rope_type": "default", "rope_theta": described.pop("rope_theta")}
    described["rope_parameters"] = parameters | (described.pop("rope_scaling") or {})
    assert huggingface.config_from_hf(described) == config, "as transformers 5 writes it"


def test_config_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig()
    described = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}
    described |= {"num_hidden_layers": 32, "num_attention_heads": 32}
    ours = huggingface.config_from_hf(described)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.max_positions, ours.norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])


UNSERVED = [
    ({"model_type": "gpt2"}, "'gpt2' is not served: it embeds absolute positions.*cannot be reused after trunc"),
    ({"model_type": "bloom"}, "'bloom'.*ALiBi"),
    ({"model_type": "rwkv"}, r"'rwkv' is not served: served are: .*llama"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
]
BITSANDBYTES = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
NEEDED = ("model_type", "hidden_size", "vocab_size")


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        *(("config.json", changes, UnsupportedArchitectureError, message) for changes, message in UNSERVED),
        *(("config.json", {key: None}, CheckpointError, f"{key} is missing") for key in NEEDED),
        ("config.json", BITSANDBYTES, UnsupportedQuantizationError, "tiny-llama: .*'bitsandbytes'"),
        ("config.json", '{"model_type": "lla', CheckpointError, r"config\.json: cannot be read as JSON"),
        ("tokenizer.json", "{}", CheckpointError, r"tokenizer\.json: cannot be read as a tokenizer"),
        ("tokenizer_config.json", "[]", CheckpointError, r"tokenizer_config\.json: .* a JSON object, got list"),
    ],
)
def test_files_that_make_no_model_are_refused_by_name(directory, name, content, error, message):
    if isinstance(content, dict):
        rewrite(directory / name, **content)
    else:
        (directory / name).write_text(content)
    with pytest.raises(error, match=message):
        load_checkpoint(str(directory))


PANICS = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"num_attention_heads": 0}, "config.json describes no model"),
        ("config.json", {"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10000, got 1000000000000"),
        ("config.json", {"rope_parameters": [1]}, "config.json describes no model"),
        ("config.json", {"architectures": 1}, r"the architecture must be LlamaForCausalLM, got 1"),
        ("config.json", {"model_type": ["llama"]}, r"model_type must be a name, got \['llama'\]"),
        ("config.json", {"model_type": "gemma3", "text_config": "x"}, "text_config must be an object, got 'x'"),
        ("config.json", {"eos_token_id": ["x", 2]}, "its files describe no model"),
        ("config.json", "[" * 100_000, "cannot be read as JSON"),
        ("generation_config.json", {"eos_token_id": {}}, "its files describe no model"),
        ("model.safetensors.index.json", {"weight_map": ["x"]}, "its files describe no model"),
        ("tokenizer_config.json", {"bos_token": 5}, "its files describe no model"),
        ("tokenizer_config.json", {"chat_template": {"a": 1}}, "its files describe no model"),
        ("tokenizer.json", json.dumps(PANICS), "cannot be read as a tokenizer"),
        ("chat_template.jinja", "{{" + "(" * 5000, "its files describe no model"),
    ],
)
def test_damaged_files_of_any_kind_are_refused(directory, name, content, message):
    if isinstance(content, dict):
        rewrite(directory / name, **content)
    else:
        (directory / name).write_text(content)
    error = UnsupportedArchitectureError if "architecture must" in message else CheckpointError
    with pytest.raises(error, match=message):
        load_checkpoint(str(directory))


# What is left out, and where the length before stretching is said, against transformers

LEFT_OUT = {
    "mistral": ("sliding_window", "num_key_value_heads"),
    "deepseek_v3": ("n_group", "topk_group", "routed_scaling_factor"),
    "kimi_linear": ("routed_scaling_factor",),
}


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_entries_that_are_left_out_are_as_transformers_has_them(model_type):
    transformers = pytest.importorskip("transformers")
    described = transformers.AutoConfig.for_model(model_type).to_dict()
    less = {key: value for key, value in described.items() if key not in LEFT_OUT[model_type]}
    assert huggingface.config_from_hf(less) == huggingface.config_from_hf(described)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 2.0] * 4, "long_factor": [3.0, 4.0] * 4}
STRETCHED = [
    {"rope_scaling": {**LONGROPE, "factor": 8.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    {
        "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("changes", STRETCHED)
def test_rope_is_stretched_as_in_transformers(changes):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    described = {**sizes, "num_attention_heads": 4, "max_position_embeddings": 256, **changes}
    ours = huggingface.config_from_hf({"model_type": "llama", **described}).rope
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(described)))
    np.testing.assert_allclose(inverse_frequencies(ours, 16), theirs.inv_freq.numpy(), rtol=1e-5)
    assert ours.attention_factor == pytest.approx(theirs.attention_scaling)


# Weights


def test_bfloat16_weights_are_exact_in_either_dtype(tmp_path):
    stored = tiny.tiny_params(CONFIG, dtype=ml_dtypes.bfloat16)
    directory = tiny.write_tiny_hf(tmp_path, CONFIG, stored)
    assert_same_params(load_checkpoint(str(directory), dtype="bfloat16").params, stored)
    wide = load_checkpoint(str(directory)).params["params"]["layer_0"]["attn"]["wo"]
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, stored["params"]["layer_0"]["attn"]["wo"].astype(np.float32))


def test_shards_are_put_together(directory):
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(weight_map.values()):
        held = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        safetensors.numpy.save_file(held, directory / shard)
    rewrite(directory / "model.safetensors.index.json", weight_map=weight_map)
    assert_same_params(load_checkpoint(str(directory)).params, PARAMS)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00002\.safetensors"):
        load_checkpoint(str(directory))


def test_a_tied_head_that_is_stored_all_the_same_is_not_used(tmp_path):
    config = tiny.tiny_config(num_layers=1, tie_embeddings=True)
    directory = tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    rewrite_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": np.zeros((256, 64), np.float32)}))
    assert_same_params(load_checkpoint(str(directory)).params, tiny.tiny_params(config))


def test_weights_that_are_cut_short_float8_or_pickled_are_refused(directory):
    path = directory / "model.safetensors"
    rewrite_tensors(directory, lambda tensors: tensors.update({"x": np.ones(64, ml_dtypes.float8_e4m3fn)}))
    with pytest.raises(UnsupportedQuantizationError, match="tensor x: type F8_E4M3"):
        load_checkpoint(str(directory))
    content = path.read_bytes()
    for kept in (0.0, 0.0001, 0.01, 0.5, 0.999):
        path.write_bytes(content[: int(len(content) * kept)])
        with pytest.raises(CheckpointError, match=r"model\.safetensors: not a whole safetensors file"):
            load_checkpoint(str(directory))
    path.rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"weights must be there as safetensors; missing: model\.safetensors"):
        load_checkpoint(str(directory))


# Tokenizer files


def test_stop_tokens_come_from_every_file_and_the_fingerprint_follows_the_config(directory):
    fingerprint = load_checkpoint(str(directory)).fingerprint
    rewrite(directory / "config.json", eos_token_id=7, rope_theta=20000.0)
    rewrite(directory / "generation_config.json", eos_token_id=[5, 9])
    loaded = load_checkpoint(str(directory))
    assert loaded.stop_token_ids == (5, 7, 9, tiny.IM_END_ID)
    assert loaded.fingerprint != fingerprint
    (directory / "tokenizer.json").unlink()
    loaded = load_checkpoint(str(directory))
    assert (loaded.tokenizer, loaded.stop_token_ids) == (None, (5, 7, 9))


def test_the_default_of_several_templates_is_taken_unless_there_is_a_file(directory):
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    rewrite(directory / "tokenizer_config.json", chat_template=several)
    assert load_checkpoint(str(directory)).tokenizer.chat_template.source == "plain"
    (directory / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert load_checkpoint(str(directory)).tokenizer.chat_template.first_turn([]) == "<|im_end|>!"


@pytest.mark.parametrize("as_files", [False, True])
def test_conversations_with_tools_have_the_template_that_transformers_takes(directory, as_files):
    transformers = pytest.importorskip("transformers")
    several = {
        "default": "{{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }} {{ messages[0].content }}",
    }
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), chat_template=several
    )
    theirs.save_pretrained(directory, save_jinja_files=as_files)
    if as_files:
        assert (directory / "additional_chat_templates" / "tool_use.jinja").exists()
    ours = load_checkpoint(str(directory)).tokenizer.chat_template
    message, tool = {"role": "user", "content": "Hi"}, {"type": "function", "function": {"name": "clock"}}
    for tools in (None, [tool]):
        said = [message if tools is None else message | {"tools": tools}]
        assert ours.first_turn(said) == theirs.apply_chat_template([message], tools=tools, tokenize=False)


TEMPLATES = {
    "bos": "[{{ bos_token }}]",
    "others": "{{ pad_token }}|{{ unk_token }}|{{ eos_token }}|{{ mask_token }}",
    "json": "{{ messages[0] | tojson(True) }}{{ messages[0] | tojson(False, 2) }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_given_what_transformers_gives_them(directory, name):
    transformers = pytest.importorskip("transformers")
    pad = {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False}
    tokens = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": pad, "unk_token": "a"}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATES[name], **tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(options))
    rewrite(directory / "config.json", bos_token_id=tiny.END_OF_TEXT_ID)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    messages = [{"role": "user", "content": "é"}]
    wanted = theirs.apply_chat_template(messages, tokenize=False)
    assert load_checkpoint(str(directory)).tokenizer.chat_template.first_turn(messages) == wanted


def test_whether_bos_is_added_is_what_the_tokenizer_does(directory):
    assert load_checkpoint(str(directory)).tokenizer.encode("a") == [ord("a")]
    path = directory / "tokenizer.json"
    post_processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [tiny.END_OF_TEXT_ID], "tokens": ["<|endoftext|>"]}
        },
    }
    rewrite(path, post_processor=post_processor)
    tokenizer = load_checkpoint(str(directory)).tokenizer
    assert tokenizer.encode("a") == [tiny.END_OF_TEXT_ID, ord("a")]
    assert tokenizer.encode("a", add_bos=False) == [ord("a")]
    rewrite(directory / "tokenizer_config.json", add_bos_token=False)
    assert load_checkpoint(str(directory)).tokenizer.encode("a") == [ord("a")]


# The hub


@pytest.fixture
def hub(monkeypatch):
    """Stands in for `snapshot_download`, given what is cached and online; the calls made: where, and for what."""

    def install(cached=None, online=None):
        calls = []

        def download(repo_id, *, allow_patterns, ignore_patterns, local_files_only=False):
            calls.append(("cache" if local_files_only else "online", tuple(allow_patterns)))
            found = cached if local_files_only else online
            if found is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("no network")
            return str(found)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return install


def test_a_hub_model_is_taken_from_the_cache_or_fetched_if_its_weights_are_not_there(hub, directory, tmp_path):
    calls = hub(cached=directory)
    loaded = load_checkpoint("someone/tiny")
    assert_same_params(loaded.params, PARAMS)
    assert loaded.name == "someone/tiny"
    assert [where for where, _ in calls] == ["cache"]
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.json").write_text((directory / "config.json").read_text())
    calls = hub(cached=partial, online=directory)
    assert_same_params(load_checkpoint("someone/tiny").params, PARAMS)
    assert [where for where, _ in calls] == ["cache", "online", "online"]


def test_a_hub_model_that_is_not_served_is_refused_before_its_weights_are_fetched(hub, directory):
    rewrite(directory / "config.json", model_type="gpt2")
    calls = hub(online=directory)
    with pytest.raises(UnsupportedArchitectureError, match=r"someone/tiny: .*absolute positions"):
        load_checkpoint("someone/tiny")
    assert "*.safetensors" not in calls[-1][1]


def test_a_hub_model_that_cannot_be_had_says_what_was_tried(hub):
    hub()
    with pytest.raises(
        UnknownModelError, match=r"'someone/tiny'.*not in the local cache.*no network.*smollm2-135m-instruct"
    ):
        load_checkpoint("someone/tiny")
