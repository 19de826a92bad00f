"""GGUF files of checkpoints that `transformers` wrote, made as llama.cpp's converter makes them, and llama.cpp itself.

Names of tensors are those of the `gguf` package's own table. What is kept of a config, and how queries, keys and values
are laid out, is the converter's: `convert_hf_to_gguf.py` of ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import math
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from ca_jax.models.config import ModelConfig
from ca_jax.testing import tiny
from tests import gguf_states_kit

CONTEXT = 256
F32 = gguf.GGMLQuantizationType.F32
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4

DIGITS = (("Ġ", "1"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "Ġ"), ("Ġ", "x"), ("Ċ", "Ċ"))
"""Merges of what pre-tokenizers split each in their own way."""

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "falcon": gguf.MODEL_ARCH.FALCON,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    **dict.fromkeys(("olmo2", "olmo3"), gguf.MODEL_ARCH.OLMO2),
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), gguf.MODEL_ARCH.DEEPSEEK2),
    "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    **gguf_states_kit.ARCHITECTURES,
}
"""By Hugging Face's `model_type`."""
_PERMUTED = {getattr(gguf.MODEL_ARCH, name) for name in ("LLAMA", "SMOLLM3", "GRANITE", "GRANITE_HYBRID", "MISTRAL3")}
"""Those whose queries and keys the converter puts in interleaved order."""
_GATING = {"deepseek_v2": 1, "deepseek_v3": 2, "glm4_moe": 2, "minimax_m2": 2}
"""How the router's numbers become shares: 1 is softmax, 2 sigmoid. The releases' config.json says so."""

_EXPERT_PARTS = {
    **{"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"},
    **{"gate_proj": "ffn_gate", "down_proj": "ffn_down", "up_proj": "ffn_up"},
}


def write(
    directory: Path,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    general_name: str | None = None,
    chat_template: list[dict[str, str]] | None = None,
    stacks_experts: bool = True,
) -> Path:
    """Converts a checkpoint.

    Args:
      directory: config.json and model.safetensors.
      path: of the file that is written.
      metadata: entries that are added or changed, by their keys without the architecture's name; None: left out.
      tensors: tensors that are added or changed; None: left out.
      types: of tensors that are quantised; those of bytes are so already.
      vocabulary: the tokenizer's entries; None: `tiny.byte_tokenizer`'s, or as many of them as fit.
      architecture: the name that the file gives it; None: its own.
      general_name: what the file calls the model; None: nothing.
      chat_template: several by `name`; None: what the vocabulary says.
      stacks_experts: whether experts are stacked, as converters have done since 2024.
    """
    config = json.loads((directory / "config.json").read_text())
    if "rope_theta" in config:  # As older versions of `transformers` write it.
        plain = {"rope_type": "default", "rope_theta": config["rope_theta"]}
        config["rope_parameters"] = plain | (config["rope_scaling"] or {})
    config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})  # Kimi Linear has none.
    kind = _ARCHITECTURES[config["model_type"]]
    name = architecture or gguf.MODEL_ARCH_NAMES[kind]
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    described = vocabulary or _vocabulary(config["vocab_size"])
    entries = {f"{name}.{key}": value for key, value in (_metadata(config) | (metadata or {})).items()} | {
        f"tokenizer.{'' if key == 'chat_template' else 'ggml.'}{key}": value for key, value in described.items()
    }
    writer = gguf.GGUFWriter(path, name)
    if general_name is not None:
        writer.add_name(general_name)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    for key, value in entries.items():
        if value is not None:
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    for key, tensor in (_tensors(config, kind, stored, stacks_experts) | (tensors or {})).items():
        quantised = (types or {}).get(key, F32)
        if tensor is not None and quantised == F32:
            writer.add_tensor(key, np.ascontiguousarray(tensor))
        elif tensor is not None:
            is_packed = tensor.dtype == np.uint8
            writer.add_tensor(key, tensor if is_packed else gguf.quantize(tensor, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(path: Path, config: ModelConfig, **changes: Any) -> Path:
    """Writes the tiny Llama of a config with `tiny.tiny_params`; changes as in `write`."""
    with tempfile.TemporaryDirectory() as directory:
        tiny.write_tiny_hf(directory, config, tiny.tiny_params(config))
        return write(Path(directory), path, **changes)


def byte_vocabulary() -> dict[str, Any]:
    """The tokenizer metadata of `tiny.byte_tokenizer`, with 0xFC, in no UTF-8 text, the merged token "ab"."""
    vocab = tiny.byte_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[0xFC] = "ab"
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [CONTROL if token.startswith("<|") else NORMAL for token in tokens],
        "merges": ["a b"],
        "bos_token_id": tiny.END_OF_TEXT_ID,
        "eos_token_id": tiny.IM_END_ID,
    }


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    embed_dim, num_heads = config["hidden_size"], config["num_attention_heads"]
    entries = {
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
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
    rope = config["rope_parameters"]
    of_full = rope.get("full_attention", rope)
    entries |= {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "rope.freq_base": float(of_full["rope_theta"]),
        **_rope_scaling(of_full),
    }
    if "sliding_attention" in rope:
        entries["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if config["model_type"] in ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "cohere2"):
        entries["attention.sliding_window"] = config["sliding_window"]
        entries["attn_logit_softcapping"] = config.get("attn_logit_softcapping")
        entries["final_logit_softcapping"] = config.get("final_logit_softcapping")
    head_dim = None if config["model_type"] == "granite" else config.get("head_dim")
    if head_dim is not None:
        entries |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if _ARCHITECTURES[config["model_type"]] in {*_PERMUTED, gguf.MODEL_ARCH.COHERE2}:
        entries |= {
            "vocab_size": config["vocab_size"],
            "rope.dimension_count": head_dim or embed_dim // num_heads,
        }
    return entries | _experts(config) | _of_family(config) | gguf_states_kit.metadata(config)


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of experts, where there are any."""
    num_experts = [config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if key in config]
    if not num_experts or "num_experts_per_tok" not in config:
        return {}
    entries = {
        "expert_count": num_experts[0],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "expert_gating_func": _GATING.get(config["model_type"]),
    }
    if config["model_type"] in ("gpt_oss", "minimax_m2"):
        entries["expert_feed_forward_length"] = config["intermediate_size"]
    if config["model_type"] in ("glm4_moe", "deepseek_v2", "deepseek_v3", "mistral4"):
        entries |= {
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config.get("norm_topk_prob") or None,
        }
    return entries


def _of_family(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the converter writes of some families alone."""
    rope, model_type = config["rope_parameters"], config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if model_type == "phi3":
        original, factors = config["original_max_position_embeddings"], {}
        if "long_factor" in rope:
            stretched = math.log(config["max_position_embeddings"] / original) / math.log(original)
            factors = {"rope.scaling.attn_factor": math.sqrt(1 + stretched)}
        return {
            "rope.scaling.original_context_length": original,
            "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * head_dim),
            "attention.sliding_window": config.get("sliding_window") or 0,
            **factors,
        }
    if model_type == "granite":
        multipliers = {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale"}
        multipliers |= {"residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"}
        return {key: float(config[name]) for name, key in multipliers.items()}
    if model_type == "ministral3":
        return {
            "rope.scaling.yarn_log_multiplier": float(rope["mscale_all_dim"]),
            "attention.temperature_scale": float(rope["llama_4_scaling_beta"]),
        }
    if model_type == "olmo3":
        types = config["layer_types"]
        return {"attention.sliding_window_pattern": [each == "sliding_attention" for each in types]}
    if model_type == "cohere2":
        return {"logit_scale": float(config["logit_scale"]), "rope.scaling.type": "none"}
    if model_type in ("glm4", "glm4_moe"):
        return {"rope.dimension_count": int(rope["partial_rotary_factor"] * head_dim)}
    if model_type == "minimax_m2":
        return {"rope.dimension_count": config["rotary_dim"]}
    if model_type in ("deepseek_v2", "deepseek_v3", "mistral4"):
        latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        of_all = rope.get("mscale_all_dim")
        return {
            "vocab_size": config["vocab_size"],
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config["q_lora_rank"],
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + rotary,
            "attention.value_length": latent,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": rotary,
            "rope.scaling.yarn_log_multiplier": None if of_all is None else 0.1 * of_all,
        }
    return {}


def _rope_scaling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {"rope.scaling.type": parameters["rope_type"], "rope.scaling.factor": parameters.get("factor")}
    if parameters["rope_type"] == "linear":
        return scaling
    if parameters["rope_type"] == "yarn":
        scaling["rope.scaling.original_context_length"] = parameters["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            scaling[f"rope.scaling.yarn_{key}"] = parameters.get(key)
        scaling["rope.scaling.yarn_attn_factor"] = parameters.get("attention_factor")
        return scaling
    return {}


def _vocabulary(size: int) -> dict[str, Any]:
    """Of the bytes' own tokens, as many as fit; where all do, with a chat template."""
    if size >= 256:
        return byte_vocabulary() | {"chat_template": tiny.CHATML_TEMPLATE}
    tokens = [token for token in byte_vocabulary()["tokens"] if len(token) == 1 and token not in "ab"]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab", *tokens[: size - 3]],
        "token_type": [NORMAL] * size,
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
    for name, tensor in gguf_states_kit.tensors(config, stored).items():
        if architecture == gguf.MODEL_ARCH.GPT_OSS and (".experts." in name or name.endswith("sinks")):
            converted |= _of_gpt_oss(name.split(".")[2], name.split(".")[-1], tensor)
            continue
        if name.startswith(("blk.", "rope_")):
            converted[name] = tensor
            continue
        if name.endswith((".gate_up_proj", "experts.down_proj")):
            converted[names.get_name(name) + ".weight"] = tensor
            continue
        if ".experts." in name:
            layer, expert, part = name.split(".")[2], name.split(".")[5], name.split(".")[6]
            experts.setdefault(f"blk.{layer}.{_EXPERT_PARTS[part]}", {})[int(expert)] = tensor
            continue
        if name.endswith("kv_b_proj.weight"):
            heads = tensor.reshape(num_heads, -1, tensor.shape[-1])
            of_k, of_v = np.split(heads, [config["qk_nope_head_dim"]], axis=1)
            block = f"blk.{name.split('.')[2]}."
            converted |= {f"{block}attn_k_b.weight": of_k.swapaxes(1, 2), f"{block}attn_v_b.weight": of_v}
            continue
        if architecture in _PERMUTED and ".q_proj." in name:
            tensor = _interleaved(tensor, num_heads)
        elif architecture in _PERMUTED and ".k_proj." in name:
            tensor = _interleaved(tensor, num_kv_heads)
        elif "query_key_value" in name:
            num_groups = num_heads
            if architecture == gguf.MODEL_ARCH.FALCON:
                num_groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
            head_dim = config["hidden_size"] // num_heads
            rows = tensor.reshape(num_groups, num_heads // num_groups + 2, head_dim, *tensor.shape[1:])
            tensor = np.concatenate(
                [part.reshape(-1, *tensor.shape[1:]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])]
            )
        elif architecture in (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3) and name.endswith("norm.weight"):
            tensor = tensor + 1
        new_name = names.get_name(name.replace("correction_bias", "correction.bias"), try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        converted[new_name] = tensor
    for name, of_expert in experts.items():
        if stacks_experts:
            converted[f"{name}_exps.weight"] = np.stack([of_expert[i] for i in range(len(of_expert))])
        else:
            converted |= {f"{name}.{i}.weight": tensor for i, tensor in of_expert.items()}
    parameters = config["rope_parameters"]
    if parameters.get("rope_type") == "llama3":
        converted["rope_freqs.weight"] = _llama3_factors(config, parameters)
    if architecture == gguf.MODEL_ARCH.PHI3 and "long_factor" in parameters:
        for kind in ("long", "short"):
            converted[f"rope_factors_{kind}.weight"] = np.array(parameters[f"{kind}_factor"], np.float32)
    return converted


def _of_gpt_oss(layer: str, part: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """The sinks of a layer, or what experts have in one tensor, matrices `[in, out]`, gate and up in turns."""
    if part == "sinks":
        return {f"blk.{layer}.attn_sinks.weight": tensor}
    kind = "bias" if part.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if part.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": rows}
    return {f"blk.{layer}.ffn_{name}_exps.{kind}": rows[:, first::2] for first, name in enumerate(("gate", "up"))}


def _interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (half, pair) to (pair, half) order."""
    rows = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(tensor.shape)


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
      context: most tokens of a text.
    """

    def __init__(self, path: Path, vocab_size: int, context: int = CONTEXT) -> None:
        xllamacpp = pytest.importorskip("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
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

    def ends_with(self, token_id: int) -> bool:
        """Whether a reply is at its end where this token comes."""
        asked = {"prompt": [0], "n_predict": 2, "temperature": 0.0, "logit_bias": [[token_id, 1000]]}
        [choice] = self._server.handle_completions(asked)["choices"]
        return bool(choice["finish_reason"] == "stop")

    def tokens(self, text: str) -> list[int]:
        """Of a text, with what begins it; control tokens spelled out in it are these tokens."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server.listening_address}/tokenize", body, headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)["tokens"]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The likeliest tokens behind token ids, at most so many."""
        request = {"prompt": prompt, "n_predict": num_tokens, "n_probs": 1, "temperature": 0.0, "cache_prompt": False}
        reply = self._server.handle_completions(request)
        return [each["id"] for each in reply["choices"][0]["logprobs"]["content"]]


def dequantise(path: Path, to: Path) -> None:
    """Writes a GGUF file anew with all tensors in float32: llama.cpp rounds what it multiplies quantised ones with."""
    file = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, file.fields["general.architecture"].contents())
    for key, field in file.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind, *_, item = [*field.types, None] if len(field.types) == 1 else field.types
        writer.add_key_value(key, field.contents(), kind, sub_type=item)
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
