"""The tokenizer that a GGUF file describes in its metadata, rebuilt with the `tokenizers` library.

Not here: reading the file (`gguf`), using a tokenizer (`tokenizer`).
Source: the GGUF specification; the splits by `tokenizer.ggml.pre` are those llama.cpp uses for these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.tokenizer import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # How SentencePiece spells a space.

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class Metadata(Protocol):
    """What is needed of a GGUF file: its metadata by key."""

    path: Any

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`."""

    def require(self, key: str) -> Any:
        """The value of `key`; CheckpointError where there is none."""


def tokenizer_from_gguf(file: Metadata) -> Tokenizer:
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
    else:
        raise UnsupportedArchitectureError(
            f"{file.path}: tokenizer model {model!r} is not served; it must be one of gpt2, llama"
        )
    types = file.get("tokenizer.ggml.token_type") or []
    # Control tokens are left out of decoded text, user-defined ones are text: both are found whole, before any split.
    backend.add_special_tokens([_added(t) for t, kind in zip(tokens, types, strict=False) if kind == _CONTROL])
    backend.add_tokens([_added(t) for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED])
    if backend.get_vocab_size() != len(tokens):
        raise CheckpointError(
            f"{file.path}: there must be {len(tokens)} different tokens, got {backend.get_vocab_size()}"
        )
    bos_id, eos_id = _token_id(file, "bos", len(tokens)), _token_id(file, "eos", len(tokens))
    template = file.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=bos_id is not None and file.get("tokenizer.ggml.add_bos_token", adds_bos),
        chat_template=None
        if template is None
        else ChatTemplate(
            template,
            bos_token="" if bos_id is None else tokens[bos_id],
            eos_token="" if eos_id is None else tokens[eos_id],
        ),
    )


def stop_token_ids(file: Metadata, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end a reply: those the metadata names, and the usual ones where they are control tokens."""
    ids = {_token_id(file, role, tokenizer.vocab_size) for role in ("eos", "eot")}
    return tuple(sorted({i for i in ids if i is not None} | tokenizer.usual_stop_ids()))


def _added(token: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token, normalized=False)


def _token_id(file: Metadata, role: str, num_tokens: int) -> int | None:
    """The id of a special token, or None where there is none (some files say so with the greatest u32)."""
    token_id = file.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if token_id is not None and 0 <= token_id < num_tokens else None


def _byte_level_bpe(file: Metadata, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """BPE over bytes, and whether its models want a beginning-of-sequence token where the file does not say."""
    pre = file.get("tokenizer.ggml.pre", "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    is_llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
    splits: list[pre_tokenizers.PreTokenizer]
    gpt2_split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2", "olmo"):
        splits = [gpt2_split]
    elif pre == "smollm":
        splits = [pre_tokenizers.Digits(individual_digits=True), gpt2_split]
    elif is_llama3:
        splits = [pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated"), byte_level]
    elif pre == "qwen2":
        splits = [pre_tokenizers.Split(tokenizers.Regex(_QWEN2_SPLIT), "isolated"), byte_level]
    elif pre == "falcon":
        threes = pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
        splits = [pre_tokenizers.Punctuation("contiguous"), gpt2_split, threes]
    else:
        raise UnsupportedArchitectureError(
            f"{file.path}: pre-tokenizer {pre!r} is not served; it must be one of default, gpt-2, "
            "olmo, smollm, falcon, "
            "llama-bpe, qwen2"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    backend = tokenizers.Tokenizer(_bpe(file, tokens, merges, ignore_merges=is_llama3))
    if pre in ("qwen2", "olmo"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend, is_llama3


def _sentencepiece_bpe(file: Metadata, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the pair whose union has the best score is merged first; unknown characters become bytes."""
    scores = file.require("tokenizer.ggml.scores")
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not len(scores) == len(types) == len(tokens):
        raise CheckpointError(
            f"{file.path}: there must be {len(tokens)} token scores and types, got {len(scores)} and {len(types)}"
        )
    normal_scores = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    model = _bpe(file, tokens, _merges_by_score(normal_scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = replace
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, those of better-scored tokens first."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]


def _bpe(file: Metadata, tokens: Sequence[str], merges: list[Any], **options: Any) -> BPE:
    try:
        return BPE({token: i for i, token in enumerate(tokens)}, merges, **options)
    except Exception as error:  # The library raises nothing narrower.
        raise CheckpointError(f"{file.path}: its merges and its vocabulary do not fit: {error}") from error
