"""Writes tiny GGUF files the way llama.cpp's converter does: Q and K rows in interleaved rotary order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ca_jax.models.config import ModelConfig
from ca_jax.testing import tiny

F32 = gguf.GGMLQuantizationType.F32
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4

DIGITS = (("Ġ", "1"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "Ġ"), ("Ġ", "x"), ("Ċ", "Ċ"))
"""Merges of what pre-tokenizers split each in their own way."""


def gguf_tensors(config: ModelConfig, params: tiny.Params) -> dict[str, np.ndarray]:
    """The model's tensors by GGUF name, Q and K permuted from (head, half, pair) to (head, pair, half) rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    found = tiny.hf_tensors(config, params).items()
    tensors = {str(names.get_name(name, try_suffixes=(".weight",))): tensor for name, tensor in found}
    for name, tensor in tensors.items():
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            tensors[name] = interleaved(tensor, tensor.shape[0] // config.head_dim)
    return tensors


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) to (pair, half) order."""
    rows = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)


def byte_vocabulary() -> dict[str, Any]:
    """The tokenizer metadata of `tiny.byte_tokenizer`, with 0xFC, in no UTF-8 text, the merged token "ab"."""
    vocab = tiny.byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[0xFC] = "ab"
    types = [CONTROL if token.startswith("<|") else NORMAL for token in tokens]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": ["a b"],
        "bos_token_id": tiny.END_OF_TEXT_ID,
        "eos_token_id": tiny.IM_END_ID,
    }


def write_file(
    path: Path,
    architecture: str,
    *,
    entries: Mapping[str, Any],
    vocabulary: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Writes a file.

    Args:
      path: of it.
      architecture: its name.
      entries: metadata, by keys without that name; None: left out.
      vocabulary: the tokenizer's entries.
      tensors: by name.
      types: of tensors that are quantised; those of bytes are so already.
    """
    writer = gguf.GGUFWriter(path, architecture)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    named = {f"{architecture}.{key}": value for key, value in entries.items() if value is not None}
    for key, value in (named | {f"tokenizer.{key}": value for key, value in vocabulary.items()}).items():
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for name, tensor in tensors.items():
        kind = (types or {}).get(name, F32)
        if kind == F32:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        else:
            writer.add_tensor(name, tensor if tensor.dtype == np.uint8 else gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    *,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    vocabulary: dict[str, Any] | None = None,
    chat_template: str | None = tiny.CHATML_TEMPLATE,
) -> Path:
    """Writes a file of a Llama; `metadata` is added to what its config says."""
    entries = {
        "context_length": config.max_positions,
        "embedding_length": config.embed_dim,
        "feed_forward_length": config.mlp_dim,
        "block_count": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.head_dim,
        **(metadata or {}),
    }
    described = {f"ggml.{key}": value for key, value in (vocabulary or byte_vocabulary()).items()}
    if chat_template is not None:
        described["chat_template"] = chat_template
    return write_file(path, architecture, entries=entries, vocabulary=described, tensors=tensors, types=types)
