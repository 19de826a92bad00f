"""GGUF files: metadata to `ModelConfig` and a tokenizer, quantised tensors to plain arrays.

Rows of Q and K in files of Llama and its kin are in interleaved rotary order (pairs 2j, 2j+1); the model rotates in
half-split order (pairs j, j + H/2). They are put back on load: taken for one another, the model speaks fluent nonsense.

Not here: what each family's metadata and tensors are called (`families`), the parameter tree (`weights`), using a
tokenizer (`tokenizer`).
Source: the GGUF specification and the `gguf` package, both of ggml-org; the splits by `tokenizer.ggml.pre` are those
llama.cpp uses for these names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError
from ca_jax.models import weights
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.config import ModelConfig
from ca_jax.models.families import BY_GGUF_ARCHITECTURE, FAMILIES, require_served
from ca_jax.models.families.from_gguf import ROPE_FACTORS, GgufDescription
from ca_jax.models.families.names import Fused, Names, half_split_rows
from ca_jax.models.stored import StoredTensor
from ca_jax.models.tokenizer import Tokenizer, raise_unless_damaged
from ca_jax.private import gguf_reader

_EMBEDDING, _SHARE, _DECAY = "token_embd.weight", "ffn_gate_inp_shexp.weight", "ssm_a"
_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias)?")
_OF_ALL_EXPERTS = re.compile(r"blk\.\d+\.ffn_\w+_exps\.(weight|bias)")
_OF_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # How SentencePiece spells a space.

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASELESS = r"\p{Lm}\p{Lo}\p{M}"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_CASELESS}]", rf"[\p{{Ll}}{_CASELESS}]"
_BEFORE, _BEHIND = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"  # What a word takes with it.
_GPT4O_SPLIT = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_BEHIND}|{_BEFORE}{_UPPER}+{_LOWER}*{_BEHIND}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = _GPT4O_SPLIT.replace(_BEHIND, "").replace(r"\p{N}{1,3}", r"\p{N}")
_KIMI2_SPLIT = r"\p{Han}+|" + _GPT4O_SPLIT.replace(_CASELESS, _CASELESS + r"&&[^\p{Han}]").replace("/]*", "]*")
_DEEPSEEK3_SPLIT = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNLISTED = (
    r"\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
    "\U00010570-\U000105bc\U00010d50-\U00010d85\U00016e40-\U00016e7f\U0001d400-\U0001df2a"
)
_CASED = rf"[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_UNLISTED}]]"  # DeepSeek's pattern lists all other letters of two cases.
_DEEPSEEK_SPLITS = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u0800-\u9fa5\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEFAULT_SPLITS = (  # Of files from before 2024's converters wrote a name.
    r"[\p{P}$+<=>^~|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
_HAN_AND_KANA = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "pixtral", "lfm2")
_ADD_BOS = (*_LLAMA3, "tekken")  # Where the file does not say whether to.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # Added tokens of Phi-3 that take no white space with them.
_ENDS = ("<|end|>", "<|eom_id|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")  # Besides the usual ones; llama.cpp's.
_TAKE_WHOLE = (*_ADD_BOS, "glm4")  # Text that is a token as a whole is that token, whatever merges make of it.


def _isolated(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


_SPLITS: dict[str, tuple[pre_tokenizers.PreTokenizer, ...]] = {
    "default": (*map(_isolated, _DEFAULT_SPLITS), _BYTES),
    **dict.fromkeys(("gpt-2", "olmo", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "command-r"), (pre_tokenizers.Digits(individual_digits=True), _GPT2)),
    "falcon": (pre_tokenizers.Punctuation("contiguous"), _GPT2, _isolated("[0-9][0-9][0-9]")),
    **dict.fromkeys((*_LLAMA3, "smaug-bpe", "dbrx", "glm4"), (_isolated(_LLAMA3_SPLIT), _BYTES)),
    "qwen2": (_isolated(_QWEN2_SPLIT), _BYTES),
    "qwen35": (_isolated(_QWEN35_SPLIT), _BYTES),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), (_isolated(_GPT4O_SPLIT), _BYTES)),
    "tekken": (_isolated(_TEKKEN_SPLIT), _BYTES),
    "kimi-k2": (_isolated(_KIMI2_SPLIT), _BYTES),
    "deepseek-llm": (*map(_isolated, _DEEPSEEK_SPLITS), _BYTES),
    "deepseek-v3": (
        *(_isolated(pattern) for pattern in (r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3_SPLIT)),
        _BYTES,
    ),
}  # By `tokenizer.ggml.pre`.


class GgufFile(gguf_reader.Reader):
    """A GGUF file opened for reading: its metadata and its tensors, mapped and not yet read.

    Tensors are checked to lie within the file before any is looked at.

    Args:
      path: the file.

    Raises:
      CheckpointError: the file is not GGUF, or is cut off.
      UnsupportedQuantizationError: a tensor's type is unknown to the `gguf` package.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            super().__init__(path)
        except UnsupportedQuantizationError as error:
            raise UnsupportedQuantizationError(f"{path}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        except (ArithmeticError, IndexError, KeyError, RecursionError, ValueError, struct.error) as error:
            raise CheckpointError(f"{path}: not a whole GGUF file: {error}") from error
        if self.byte_order != "I":
            raise CheckpointError(f"{path}: a GGUF file must be little-endian, got a big-endian one")
        self.by_name = {tensor.name: tensor for tensor in self.tensors}
        """The tensors."""

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` as plain Python, or `default` where there is none."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def entries(self, architecture: str) -> dict[str, Any]:
        """The metadata of an architecture, by keys without its name."""
        prefix = f"{architecture}."
        return {key.removeprefix(prefix): self.get(key) for key in self.fields if key.startswith(prefix)}

    def require(self, key: str) -> Any:
        """The metadata value of `key`; CheckpointError where there is none."""
        if key not in self.fields:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return self.get(key)


def open_gguf(path: Path, name: str) -> weights.Source:
    """Opens a GGUF file: its weights dequantised, its tokenizer and chat template out of the metadata.

    The model is to be called `name`. Raises what `load_checkpoint` does.
    """
    file = GgufFile(path)
    config = config_from_gguf(file)
    names = FAMILIES[config.architecture].gguf_names(config)
    tokenizer = tokenizer_from_gguf(file)
    return weights.Source(
        path=str(path),
        name=name,
        config=config,
        tensors=_stored_tensors(file, config, names),
        names=names,
        fingerprint=lambda dtype: weights.fingerprint(weights.hash_file(path), config, dtype),
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids(file, tokenizer),
    )


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """The architecture that a GGUF file's metadata describes. Raises what `load_checkpoint` does."""
    where, architecture = str(file.path), file.require("general.architecture")
    require_served(architecture, where, BY_GGUF_ARCHITECTURE)
    if _EMBEDDING not in file.by_name:
        raise CheckpointError(f"{where}: tensor {_EMBEDDING} is missing")
    described = GgufDescription(
        entries=file.entries(architecture),
        shapes={name: _shape(tensor) for name, tensor in file.by_name.items()},
        rope_factors={
            name: np.asarray(file.by_name[name].data, np.float32).reshape(-1)
            for name in ROPE_FACTORS
            if name in file.by_name
        },
    )
    family = next(each for each in BY_GGUF_ARCHITECTURE[architecture] if each.is_gguf(described.entries))
    try:
        return family.config_from_gguf(described)
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(f"{where}: {architecture}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{where}: metadata {architecture}.{error.args[0]} is missing") from error
    except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{where}: its metadata describes no model: {error}") from error


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _stored_tensors(file: GgufFile, config: ModelConfig, names: Names) -> dict[str, StoredTensor]:
    """The file's tensors: Q and K in half-split order, and those that are stacked by expert each by itself."""
    order, family, forms = {}, FAMILIES[config.architecture], _forms(config, names)
    if family.gguf_is_interleaved:
        sizes = config.head_dim, config.rope.rotary_dim
        of_q, of_k = (half_split_rows(num, *sizes) for num in (config.num_heads, config.num_kv_heads))
        order = {"attn_q.weight": of_q, "attn_q.bias": of_q, "attn_k.weight": of_k, "attn_k.bias": of_k}
    stored = {}
    for name, tensor in file.by_name.items():
        if name in ROPE_FACTORS:
            continue
        shape, parts, own = _shape(tensor), {name: tensor.data}, name.split(".", 2)[-1]
        is_unread = _is_unread(config, family.drafts_behind, name)
        if own == "attn_k_b.weight":
            stored[name] = dataclasses.replace(_transposed_heads(name, tensor), is_optional=is_unread)
            continue
        if own == "attn_v_b.weight":
            shape, parts = (shape[0] * shape[1], shape[2]), {name: tensor.data.reshape(-1, tensor.data.shape[-1])}
        elif own in forms and math.prod(forms[own]) == math.prod(shape):
            shape, parts = forms[own], {name: tensor.data.reshape(forms[own][0], -1)}
        elif own == _SHARE:  # A row, or the vector that it is.
            shape, parts = (1, shape[-1]), {name: tensor.data.reshape(1, -1)}
        elif _OF_ALL_EXPERTS.fullmatch(name):
            shape, parts = shape[1:], {f"{name}[{i}]": part for i, part in enumerate(tensor.data)}
        elif match := _OF_ONE_EXPERT.fullmatch(name):  # As in files from before experts were stacked.
            parts = {f"{match[1]}_exps.weight[{match[2]}]": tensor.data}
        for part, data in parts.items():
            rows = functools.partial(_read_rows, part, tensor.tensor_type, data, order.get(own))
            rows = functools.partial(_read_decay, rows) if own == _DECAY else rows
            stored[part] = StoredTensor(shape=shape, read_rows=rows, is_optional=is_unread)
    return stored


def _is_unread(config: ModelConfig, drafts_behind: bool, name: str) -> bool:
    """Whether a tensor changes nothing: it is of a layer that drafts tokens, or of the KV of one that reads others'."""
    match = _OF_LAYER.fullmatch(name)
    if match is None:
        return False
    layer, is_of_kv = int(match[1]), match[2] in ("attn_k", "attn_v", "attn_k_norm")
    is_reader = config.num_layers - config.num_readers <= layer < config.num_layers
    return (is_reader and is_of_kv) or (drafts_behind and layer >= config.num_layers)


def _forms(config: ModelConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """The shapes of what layers that keep states have beside matrices, by names without the layer.

    Files hold the same numbers, with other axes of one, or norms by groups.
    """
    forms = {}
    for each in () if config.recurrence is None else config.recurrence.parameters(config.embed_dim):
        place = names[f"mixer.{each.name}"]
        name = place.name if isinstance(place, Fused) else place
        if each.num_inputs is None:
            forms[name.split(".", 2)[-1]] = each.stored_shape or each.shape
    return forms


def _read_decay(read_rows: Callable[[int, int], np.ndarray], start: int, stop: int) -> np.ndarray:
    """The logarithm of how fast states decay, of which files hold the negative itself."""
    return np.log(-read_rows(start, stop))


def _transposed_heads(name: str, tensor: gguf.ReaderTensor) -> StoredTensor:
    """The matrices of heads, which lie `[in, out]`, as rows of one `[out, in]`; each is read at once."""
    num_heads, num_inputs, width = _shape(tensor)

    def read_rows(start: int, stop: int) -> np.ndarray:
        return _read_rows(name, tensor.tensor_type, tensor.data[start // width], None, 0, num_inputs).T

    return StoredTensor(shape=(num_heads * width, num_inputs), read_rows=read_rows, chunk_rows=width)


def _read_rows(
    name: str, kind: gguf.GGMLQuantizationType, data: np.ndarray, order: np.ndarray | None, start: int, stop: int
) -> np.ndarray:
    # Quantisation blocks lie within rows, so rows are reordered while they are still small.
    stored = data[start:stop] if order is None else data[order[start:stop]]
    try:
        return gguf.dequantize(stored, kind)
    except NotImplementedError as error:
        raise UnsupportedQuantizationError(f"tensor {name}: type {kind.name} cannot be dequantised") from error


# The tokenizer.


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Rebuilds the tokenizer, special tokens and chat template included.

    Raises:
      CheckpointError: metadata is missing or contradicts itself.
      UnsupportedArchitectureError: a tokenizer model or pre-tokenizer that is not known, by name.
    """
    model = file.require("tokenizer.ggml.model")
    tokens: list[str] = file.require("tokenizer.ggml.tokens")
    if model == "gpt2":
        backend, adds_bos = _byte_level_bpe(file, tokens)
    elif model == "llama":
        backend, adds_bos = _sentencepiece_bpe(file, tokens), True
    elif model == "gemma4":
        backend, adds_bos = _falling_back_to_bytes(file, tokens, _merges(file), begins_with_space=False), True
    else:
        raise UnsupportedArchitectureError(
            f"{file.path}: tokenizer model {model!r} is not served; it must be one of gpt2, llama, gemma4"
        )
    types = file.get("tokenizer.ggml.token_type") or []
    takes_spaces = model == "llama" and _is_phi3(file)

    def added(of_kind: int) -> list[tokenizers.AddedToken]:
        found = [token for token, kind in zip(tokens, types, strict=False) if kind == of_kind]
        return [
            tokenizers.AddedToken(token, normalized=False, rstrip=takes_spaces and token not in _PHI3_PLAIN)
            for token in found
        ]

    # Control tokens are left out of decoded text, user-defined ones are text: both are found whole, before any split.
    backend.add_special_tokens(added(_CONTROL))
    backend.add_tokens(added(_USER_DEFINED))
    if backend.get_vocab_size() != len(tokens):
        raise CheckpointError(
            f"{file.path}: there must be {len(tokens)} different tokens, got {backend.get_vocab_size()}"
        )
    bos_id, eos_id = _token_id(file, "bos", len(tokens)), _token_id(file, "eos", len(tokens))
    bos, eos = ("" if token_id is None else tokens[token_id] for token_id in (bos_id, eos_id))
    template, for_tools = file.get("tokenizer.chat_template"), file.get("tokenizer.chat_template.tool_use")
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=bos_id is not None and file.get("tokenizer.ggml.add_bos_token", adds_bos),
        chat_template=None
        if template is None
        else ChatTemplate(template, bos_token=bos, eos_token=eos, tool_source=for_tools),
    )


def stop_token_ids(file: GgufFile, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a reply: those the metadata names, and by their names control tokens that do.

    Files name one or two, and rarely all that a model ends with.
    """
    ids = {_token_id(file, role, tokenizer.vocab_size) for role in ("eos", "eot", "eom")}
    known = tokenizer.special_names
    ends = {name for name in _ENDS if name in known}
    if {"<|return|>", "<|call|>"} <= known:  # gpt-oss goes on behind this one.
        ends.discard("<|end|>")
    ids |= {tokenizer.token_id(name) for name in ends}
    return tuple(sorted({i for i in ids if i is not None} | tokenizer.usual_stop_ids()))


def _is_phi3(file: GgufFile) -> bool:
    """Whether added tokens take the white space behind them. Files do not say so; llama.cpp goes by the name alone."""
    name = str(file.get("general.name", "")).lower()
    return file.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name


def _token_id(file: GgufFile, role: str, num_tokens: int) -> int | None:
    """The id of a special token, or None where there is none (some files say so with the greatest u32)."""
    token_id = file.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if token_id is not None and 0 <= token_id < num_tokens else None


def _byte_level_bpe(file: GgufFile, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """BPE over bytes, and whether its models want a beginning-of-sequence token where the file does not say."""
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in _SPLITS:
        raise UnsupportedArchitectureError(
            f"{file.path}: pre-tokenizer {pre!r} is not served; it must be one of {', '.join(_SPLITS)}"
        )
    backend = tokenizers.Tokenizer(_bpe(file, tokens, _merges(file), ignore_merges=pre in _TAKE_WHOLE))
    if pre in ("qwen2", "qwen35", "olmo"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITS[pre]))
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _ADD_BOS


def _sentencepiece_bpe(file: GgufFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the pair whose union has the best score is merged first; unknown characters become bytes."""
    scores = file.require("tokenizer.ggml.scores")
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not len(scores) == len(types) == len(tokens):
        raise CheckpointError(
            f"{file.path}: there must be {len(tokens)} token scores and types, got {len(scores)} and {len(types)}"
        )
    normal_scores = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    begins_with_space = file.get("tokenizer.ggml.add_space_prefix", True)
    return _falling_back_to_bytes(file, tokens, _merges_by_score(normal_scores), begins_with_space)


def _falling_back_to_bytes(
    file: GgufFile, tokens: Sequence[str], merges: list[Any], begins_with_space: bool
) -> tokenizers.Tokenizer:
    """BPE over characters, spaces spelled as SentencePiece does; characters that are no token become bytes."""
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = tokenizers.Tokenizer(_bpe(file, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if begins_with_space:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(file: GgufFile) -> list[Any]:
    return [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, those of better-scored tokens first."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]


def _bpe(file: GgufFile, tokens: Sequence[str], merges: list[Any], **options: Any) -> BPE:
    try:
        return BPE({token: i for i, token in enumerate(tokens)}, merges, **options)
    except BaseException as error:
        raise_unless_damaged(error)
        raise CheckpointError(f"{file.path}: its merges and its vocabulary do not fit: {error}") from error
