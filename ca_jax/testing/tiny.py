"""Tiny random Llama models: a config, its parameters, and the Hugging Face directory that holds the same model.

Weights are random and scaled so that every layer and every earlier token moves the logits: an error in any one shows.

Not here: how a model runs, and how a checkpoint is read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import flax.traverse_util
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import tokenizers

from ca_jax.models.config import ModelConfig, RopeConfig
from ca_jax.models.families import FAMILIES
from ca_jax.models.tokenizer import BYTE_ALPHABET
from ca_jax.models.weights import parameter_slots

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The ChatML chat template, without default system message."""

# Bytes that no UTF-8 text contains, so that the special tokens fit among the 256 ids and every other id is its byte.
END_OF_TEXT_ID = 0xFD
"""Token id of `<|endoftext|>`, the beginning-of-text token."""
IM_START_ID = 0xFE
"""Token id of `<|im_start|>`."""
IM_END_ID = 0xFF
"""Token id of `<|im_end|>`, the end-of-turn token."""

_SPECIAL_TOKENS = {"<|endoftext|>": END_OF_TEXT_ID, "<|im_start|>": IM_START_ID, "<|im_end|>": IM_END_ID}

# Attention is sharper than a fresh network's, so that it picks tokens instead of averaging them.
_GAINS = {
    "embed.embedding": 2.0,
    "attn.wq": 1.5,
    "attn.wk": 1.5,
    "mlp.w_down": 2.0,
    "experts.w_down": 2.0,
    "head.kernel": 2.0,
}

Params = dict[str, Any]


def tiny_config(**overrides: Any) -> ModelConfig:
    """A Llama of 3 layers, 4 query heads on 2 KV heads of 16, 256 tokens and 512 positions.

    Args:
      **overrides: fields of `ModelConfig` to set otherwise.

    Raises:
      TypeError: an override is no field of `ModelConfig`.
      ValueError: the overrides do not make a valid config.
    """
    config = ModelConfig(
        vocab_size=256,
        embed_dim=64,
        mlp_dim=128,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=512,
    )
    return dataclasses.replace(config, **overrides)


def tiny_params(config: ModelConfig, seed: int = 0, dtype: npt.DTypeLike = np.float32) -> Params:
    """Random parameters of `config` as a Flax linen variables tree of numpy arrays.

    `F` embed, `N` query heads, `K` KV heads, `H` head dim, `D` mlp, `V` vocab; layer i is `layer_{i}`:

        params / embed / embedding            [V, F]
               / layer_{i} / attn_norm / scale  [F]
                           / attn / wq [F, N, H], wk [F, K, H], wv [F, K, H], wo [N, H, F]
                           / mlp_norm / scale   [F]
                           / mlp / w_gate [F, D], w_up [F, D], w_down [D, F]
               / final_norm / scale           [F]
               / head / kernel                [F, V]   only where embeddings are not tied

    Args:
      config: the architecture.
      seed: of the random numbers; other dtypes get what the same seed gives in float32, rounded.
      dtype: of every array.
    """
    rng, leaves = np.random.default_rng(seed), {}
    for slot in parameter_slots(config):
        numbers = rng.standard_normal(slot.shape)
        if slot.key.endswith("norm.scale"):
            numbers = 1.0 - config.norm_offset + 0.2 * numbers
        elif len(slot.stored_shape) == 1:
            numbers = 0.1 * numbers
        else:
            numbers = numbers * (_GAINS.get(slot.key, 1.0) / np.sqrt(slot.stored_shape[1]))
        leaves[slot.path] = numbers.astype(np.float32).astype(dtype)
    return {"params": flax.traverse_util.unflatten_dict(leaves)}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer of 256 ids: a token is a UTF-8 byte, its id that byte; the special tokens take three unused bytes."""
    plain = {symbol: byte for symbol, byte in BYTE_ALPHABET.items() if byte not in _SPECIAL_TOKENS.values()}
    vocab = plain | _SPECIAL_TOKENS
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    return tokenizer


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` of a Hugging Face Llama says of the same model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _hf_rope_scaling(config.rope),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _hf_rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
    return scaling


def hf_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """The same parameters under Hugging Face's names; a linear weight is `[out, in]`, heads of Q and K half-split."""
    return {name: np.ascontiguousarray(view) for name, view in hf_views(config, params).items()}


def hf_views(config: ModelConfig, params: Params) -> dict[str, Any]:
    """As `hf_tensors`, but views of the parameters, which may be of any library that has `reshape` and `T`."""
    names, views = FAMILIES["llama"].hf_names(config), {}
    for slot in parameter_slots(config):
        array = functools.reduce(lambda tree, key: tree[key], slot.path, params["params"])
        stored = array.reshape(slot.stored_shape[::-1]).T if slot.transposed else array
        views[str(names[slot.key]).format(layer=slot.layer)] = stored
    return views


def write_tiny_hf(
    directory: str | os.PathLike[str], config: ModelConfig, params: Params, *, tokenizer: bool = True
) -> Path:
    """Writes the model as a Hugging Face directory that `transformers` loads.

    Args:
      directory: made where absent; files of the same names are replaced.
      config: the architecture.
      params: a tree as of `tiny_params`, of numpy arrays.
      tokenizer: whether to write `byte_tokenizer()` with the ChatML template beside it.

    Returns:
      The directory, now with config.json and model.safetensors, and with tokenizer.json and tokenizer_config.json where
      asked for.

    Raises:
      ValueError: the vocabulary has no room for the tokenizer's 256 ids.
    """
    if tokenizer and config.vocab_size < 256:
        raise ValueError(f"the byte tokenizer's vocab_size must be at least 256, got {config.vocab_size}")
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    described = hf_config(config)
    tensors = hf_tensors(config, params)
    described["dtype"] = str(tensors["model.norm.weight"].dtype)
    if tokenizer:
        described |= {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": IM_END_ID}
        byte_tokenizer().save(str(path / "tokenizer.json"))
        _write_json(
            path / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "chat_template": CHATML_TEMPLATE,
                "clean_up_tokenization_spaces": False,
                "model_max_length": config.max_positions,
            },
        )
    _write_json(path / "config.json", described)
    safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
