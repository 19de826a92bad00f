"""GGUF files of checkpoints that `transformers` wrote, made as llama.cpp's converter makes them, and llama.cpp itself.

Names of tensors are those of the `gguf` package's own table. What is kept of a config, and how queries, keys and values
are laid out, is the converter's: `convert_hf_to_gguf.py` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from tests.models import tiny_gguf

CONTEXT = 256

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
}
"""By Hugging Face's `model_type`."""

_EXPERT_PARTS = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def write(
    directory: Path,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    stacks_experts: bool = True,
) -> Path:
    """Converts a checkpoint.

    Args:
      directory: config.json and model.safetensors.
      path: of the file that is written.
      metadata: entries that are added or changed, by their keys without the architecture's name; None: left out.
      tensors: tensors that are added or changed; None: left out.
      types: of tensors that are quantised.
      vocabulary: the tokenizer's entries; None: some of the bytes' own tokens.
      stacks_experts: whether experts are stacked, as converters have done since 2024.
    """
    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    converted = _tensors(config, architecture, stored, stacks_experts) | (tensors or {})
    described = (vocabulary or _vocabulary(config["vocab_size"])).items()
    return tiny_gguf.write_file(
        path,
        gguf.MODEL_ARCH_NAMES[architecture],
        entries=_metadata(config) | (metadata or {}),
        vocabulary={f"ggml.{key}": value for key, value in described},
        tensors={name: tensor for name, tensor in converted.items() if tensor is not None},
        types=types,
    )


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    embed_dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    entries = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": embed_dim,
        "block_count": config["num_hidden_layers"],
        "attention.head_count": num_heads,
    }
    if config["model_type"] == "falcon":
        is_new = config["new_decoder_architecture"]
        return entries | {
            "tensor_data_layout": "jploski",
            "feed_forward_length": 4 * embed_dim,
            "attention.head_count_kv": config["num_kv_heads"] if is_new else 1,
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        }
    if config["model_type"] == "gpt_neox":
        share = config["rope_parameters"]["partial_rotary_factor"]
        return entries | {
            "feed_forward_length": config["intermediate_size"],
            "rope.dimension_count": int(share * (embed_dim // num_heads)),
            "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
            "use_parallel_residual": config["use_parallel_residual"],
            "attention.layer_norm_epsilon": config["layer_norm_eps"],
        }
    entries |= {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        **_rope_scaling(config["rope_parameters"]),
    }
    head_dim = config.get("head_dim")
    if head_dim is not None:
        entries |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if "num_local_experts" in config:
        entries |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
    if _ARCHITECTURES[config["model_type"]] == gguf.MODEL_ARCH.LLAMA:
        entries |= {
            "vocab_size": config["vocab_size"],
            "rope.dimension_count": head_dim or embed_dim // num_heads,
        }
    return entries


def _rope_scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {"rope.scaling.type": parameters["rope_type"], "rope.scaling.factor": parameters.get("factor")}
    if parameters["rope_type"] == "linear":
        return scaling
    if parameters["rope_type"] == "yarn":
        scaling["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            scaling[f"rope.scaling.yarn_{key}"] = parameters.get(key)
        return scaling
    return {}


def _vocabulary(size: int) -> dict[str, Any]:
    """Of the bytes' own tokens, as many as fit."""
    vocabulary = tiny_gguf.byte_vocabulary()
    tokens = [token for token in vocabulary["tokens"] if len(token) == 1 and token not in "ab"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", *tokens[: size - 3]],
        "token_type": [tiny_gguf.NORMAL] * size,
        "merges": ["a b"],
    }


def _tensors(
    config: Mapping[str, Any],
    architecture: gguf.MODEL_ARCH,
    stored: Mapping[str, np.ndarray],
    stacks_experts: bool,
) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    converted: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in stored.items():
        if ".experts." in name:
            layer, expert, part = name.split(".")[2], name.split(".")[5], name.split(".")[6]
            experts.setdefault(f"blk.{layer}.{_EXPERT_PARTS[part]}", {})[int(expert)] = tensor
            continue
        if architecture == gguf.MODEL_ARCH.LLAMA and name.endswith("q_proj.weight"):
            tensor = tiny_gguf.interleaved(tensor, num_heads)
        elif architecture == gguf.MODEL_ARCH.LLAMA and name.endswith("k_proj.weight"):
            tensor = tiny_gguf.interleaved(tensor, num_kv_heads)
        elif "query_key_value" in name:
            num_groups = num_heads
            if architecture == gguf.MODEL_ARCH.FALCON:
                num_groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
            head_dim = config["hidden_size"] // num_heads
            rows = tensor.reshape(num_groups, num_heads // num_groups + 2, head_dim, *tensor.shape[1:])
            tensor = np.concatenate(
                [part.reshape(-1, *tensor.shape[1:]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])]
            )
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        converted[new_name] = tensor
    for name, of_expert in experts.items():
        if stacks_experts:
            converted[f"{name}_exps.weight"] = np.stack([of_expert[i] for i in range(len(of_expert))])
        else:
            converted |= {f"{name}.{i}.weight": tensor for i, tensor in of_expert.items()}
    parameters = config["rope_parameters"]
    if parameters["rope_type"] == "llama3":
        converted["rope_freqs.weight"] = _llama3_factors(config, parameters)
    return converted


def _llama3_factors(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> np.ndarray:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    factors = []
    for exponent in range(0, dim, 2):
        wavelength = 2 * np.pi * parameters["rope_theta"] ** (exponent / dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


class LlamaCpp:
    """A GGUF file in llama.cpp, with weights and KV in float32.

    Args:
      path: the file.
      vocab_size: of the model.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = CONTEXT
        params.n_gpu_layers = 0
        params.warmup = params.fit_params = params.ui = False
        params.cache_ram_mib = params.n_ctx_checkpoints = params.verbosity = 0
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 1
        self._vocab_size = vocab_size
        self._server = xllamacpp.Server(params)

    def log_probabilities(self, prompt: list[int] | str) -> np.ndarray:
        """Of every token to come after token ids, or after a text that llama.cpp tokenises, f32 `[V]`."""
        reply = self._server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": 1,
                "n_probs": self._vocab_size,
                "temperature": 0.0,
                "cache_prompt": False,
                "logit_bias": [["a", 1000]],  # An end, or half a character, comes without any; they are from before it.
            }
        )
        (step,) = reply["choices"][0]["logprobs"]["content"]
        found = np.full(self._vocab_size, np.nan, np.float32)
        for each in step["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found
