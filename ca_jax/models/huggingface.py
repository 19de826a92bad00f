"""Hugging Face checkpoints: a directory of config.json, safetensors and tokenizer.json, local or from the hub.

Not here: pickled weights (`pytorch_model.bin`), which are never read; the parameter tree (`weights`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import tokenizers

from ca_jax.errors import (
    CaJaxError,
    CheckpointError,
    UnknownModelError,
    UnsupportedArchitectureError,
    UnsupportedQuantizationError,
    check,
)
from ca_jax.models import quantized, weights
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.config import ModelConfig
from ca_jax.models.families import BY_MODEL_TYPE, FAMILIES, MULTIMODAL_TYPES, require_served
from ca_jax.models.families.family import Family
from ca_jax.models.quantization_scheme import Scheme, scheme_from_hf
from ca_jax.models.stored import StoredTensor, of_each_expert, of_fused_experts
from ca_jax.models.tokenizer import Tokenizer, read_backend

_OF_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_PACKED = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I32": np.int32, "U8": np.uint8}
_TYPES: dict[str, np.dtype] = {name: np.dtype(kind) for name, kind in (_PLAIN | _PACKED).items()}

_TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model.", "lm_head.": "lm_head."}
"""What names of the text model's tensors begin with, in models that read images too, and do without. Others are not
read."""

_ALL_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
"""Ends of names of tensors that hold the matrices of all experts, `[E, out, in]`, where a family has them apart: as
`transformers` computes with them, and some releases have them."""

_DRAFTS_PREFIX = "mtp."
"""What names of tensors begin with that draft and are not numbered as layers."""

_HUB_METADATA = ("*.json", "*.jinja")
_HUB_WEIGHTS = ("*.safetensors",)
_HUB_IGNORED = ("original/*", "consolidated*")  # The same weights once more, in another format.


def open_directory(directory: Path, name: str) -> weights.Source:
    """Opens a directory of config.json, safetensors (one file or shards) and, if there, tokenizer.json.

    The model is to be called `name`. Raises what `load_checkpoint` does.
    """
    described = read_json(directory / "config.json")
    try:
        config = config_from_hf(described)
    except (UnsupportedArchitectureError, UnsupportedQuantizationError, CheckpointError) as error:
        raise type(error)(f"{directory}: {error}") from error
    family, files, scheme = FAMILIES[config.architecture], weight_files(directory), scheme_from_hf(described)
    tokenizer = _load_tokenizer(directory, described)
    prefixes = _TEXT_PREFIXES if described["model_type"] in MULTIMODAL_TYPES else {"": ""}
    tensors = _stored_tensors(directory, files, config, family, scheme, prefixes)
    _require_names_of(family, config, tensors, directory)
    return weights.Source(
        path=str(directory),
        name=name,
        config=config,
        tensors=tensors,
        names=family.hf_names(config),
        fingerprint=lambda dtype: weights.fingerprint(_content(directory, files, scheme), config, dtype),
        tokenizer=tokenizer,
        stop_token_ids=_stop_token_ids(directory, described, tokenizer),
    )


def config_from_hf(described: Mapping[str, Any]) -> ModelConfig:
    """The architecture that the contents of a config.json describe. Pure; raises what `load_checkpoint` does."""
    model_type = described.get("model_type")
    if model_type is None:
        raise CheckpointError("config.json: model_type is missing")
    check(isinstance(model_type, str), "config.json: model_type", "a name", model_type, CheckpointError)
    if model_type in MULTIMODAL_TYPES:
        if "text_config" not in described:
            raise CheckpointError("config.json: text_config is missing")
        text = described["text_config"]
        check(isinstance(text, dict), "config.json: text_config", "an object", text, CheckpointError)
        quantization = described.get("quantization_config")
        of_both = {key: described[key] for key in ("tie_word_embeddings",) if key in described}
        return config_from_hf({**text, **of_both, "quantization_config": quantization})
    require_served(model_type, "config.json", BY_MODEL_TYPE.keys() | MULTIMODAL_TYPES)
    family = BY_MODEL_TYPE[model_type]
    architectures = described.get("architectures") or [family.architectures[0]]
    if architectures not in [[each] for each in family.architectures]:
        raise UnsupportedArchitectureError(
            f"config.json: the architecture must be {' or '.join(family.architectures)}, got {architectures}"
        )
    scheme_from_hf(described)  # A quantisation that is not read is refused as early as an architecture.
    try:
        return family.config_from_hf(described)
    except UnsupportedArchitectureError:
        raise
    except KeyError as error:
        raise CheckpointError(f"config.json: {error.args[0]} is missing") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json describes no model: {error}") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory: the shards its index names, or the single file.

    Raises:
      CheckpointError: there are none, or a shard is missing.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists():
        files = sorted({directory / shard for shard in read_json(index).get("weight_map", {}).values()})
    else:
        files = [single]
    missing = [path.name for path in files if not path.is_file()]
    if missing or not files:
        raise CheckpointError(
            f"{directory}: weights must be there as safetensors; missing: {', '.join(missing) or index.name}"
        )
    return files


def _stored_tensors(
    directory: Path,
    files: list[Path],
    config: ModelConfig,
    family: Family,
    scheme: Scheme | None,
    prefixes: Mapping[str, str],
) -> dict[str, StoredTensor]:
    """Those whose names begin so, by names that begin as they do without."""
    raw: quantized.Arrays = {}
    for path in files:
        for name, each in _mapped(path, family.ignored):
            prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
            if prefix is not None and not _is_left_out(name, family, config):
                raw[prefixes[prefix] + name.removeprefix(prefix)] = each
    try:
        tensors = {} if scheme is None else quantized.take(raw, scheme)
    except (CheckpointError, UnsupportedQuantizationError) as error:
        raise type(error)(f"{directory}: {error}") from error
    from_scheme = set(tensors)  # Their matrices are [out, in], also where they are stacked.
    for name, tensor in raw.items():
        kind = next(each for each, dtype in _TYPES.items() if dtype == tensor.dtype)
        if kind not in _PLAIN:
            raise _unread(directory, name, kind)
        tensors[name] = quantized.plain(tensor)
    if config.tie_embeddings:  # A head is a second name for the embedding then.
        tensors.pop(str(family.hf_names(config)["head.kernel"]), None)
    for name in [name for name in tensors if name.endswith(family.hf_stacked)]:
        transposed = family.stacks_inputs_first and name not in from_scheme
        tensors |= of_each_expert(name, tensors.pop(name), transposed=transposed)
    for name, found in [(name, found) for name in tensors if (found := _ALL_EXPERTS.search(name))]:
        of_one = f"{name[: found.start()]}.mlp.experts.{{expert}}.{{part}}_proj.weight"
        tensors |= of_fused_experts(of_one, tensors.pop(name), found[1].split("_"))
    return tensors


def read_plain_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file of floating point numbers, mapped.

    Raises:
      CheckpointError: it is no whole file.
      UnsupportedQuantizationError: a tensor is of another type.
    """
    for name, tensor in _mapped(path, ()):
        kind = next(each for each, dtype in _TYPES.items() if dtype == tensor.dtype)
        if kind not in _PLAIN:
            raise _unread(path, name, kind)
        yield name, tensor


def _mapped(path: Path, ignored: tuple[str, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """A file's tensors but for those with such ends, mapped: the package's numpy reader knows no 8-bit floats."""
    try:
        names = safetensors.safe_open(path, framework="numpy").keys()  # Checks the file, from header to end.
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from error
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    for name in names:
        if name.endswith(ignored):
            continue  # Derived from the config.
        told = header[name]
        if told["dtype"] not in _TYPES:
            raise _unread(path, name, told["dtype"])
        first, last = told["data_offsets"]
        yield name, content[start + first : start + last].view(_TYPES[told["dtype"]]).reshape(told["shape"])


def _is_left_out(name: str, family: Family, config: ModelConfig) -> bool:
    """Whether a tensor is of a layer behind the last one, or drafts, or is of KV that a layer has none of."""
    layer = _OF_LAYER.search(name)
    if layer is None or int(layer[1]) >= config.num_layers:
        return family.drafts_behind and (layer is not None or name.startswith(_DRAFTS_PREFIX))
    reads = int(layer[1]) not in config.kv_layers and not config.is_recurrent(int(layer[1]))
    return reads and re.search(r"\.[kv]_(proj|norm)\.", name) is not None


def _unread(path: Path, name: str, kind: str) -> UnsupportedQuantizationError:
    return UnsupportedQuantizationError(
        f"{path}: tensor {name}: type {kind} is not served; it must be one of {', '.join(_PLAIN)}"
    )


def _content(directory: Path, files: list[Path], scheme: Scheme | None) -> str:
    """What the weights are known by: what the files hold and, where it is quantised, how that is read."""
    content = weights.hash_files(directory, files)
    return content if scheme is None else f"{content} {dataclasses.asdict(scheme)}"


def _require_names_of(
    family: Family, config: ModelConfig, tensors: Mapping[str, StoredTensor], directory: Path
) -> None:
    """Raises CheckpointError where tensors are named as another family's: that says more than that one is missing."""

    def fits(each: Family) -> bool:
        return each.hf_names(config)["embed.embedding"] in tensors

    if not fits(family):
        other = next((each.name for each in FAMILIES.values() if fits(each)), None)
        if other is not None:
            raise CheckpointError(
                f"{directory}: config.json names family {family.name}, and tensors are named as those of {other}"
            )


def _load_tokenizer(directory: Path, described: Mapping[str, Any]) -> Tokenizer | None:
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    backend = read_backend(path)
    options = read_json(directory / "tokenizer_config.json", optional=True)
    bos, eos = (_special_token(backend, options, described, role) for role in ("bos", "eos"))
    bos_id, eos_id = (None if text is None else backend.token_to_id(text) for text in (bos, eos))
    adds_bos = options.get("add_bos_token")
    if adds_bos is None:  # Then what it adds by itself is the truth.
        adds_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    source, for_tools = _chat_template_sources(directory, options)
    template = None
    if source is not None:
        roles = ("unk", "sep", "pad", "cls", "mask")
        others = {f"{role}_token": _special_token(backend, options, {}, role) for role in roles}
        template = ChatTemplate(
            source,
            bos_token=bos or "",
            eos_token=eos or "",
            tool_source=for_tools,
            other_tokens={name: text for name, text in others.items() if text is not None},
        )
    add_bos = bool(adds_bos) and bos_id is not None
    return Tokenizer(backend, bos_id=bos_id, eos_id=eos_id, add_bos=add_bos, chat_template=template)


def _special_token(
    backend: tokenizers.Tokenizer, options: Mapping[str, Any], described: Mapping[str, Any], role: str
) -> str | None:
    """The text of a special token: what tokenizer_config.json says, also that there is none, or else config.json."""
    token = options.get(f"{role}_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if f"{role}_token" not in options:
        token_id = described.get(f"{role}_token_id")
        token = backend.id_to_token(token_id) if isinstance(token_id, int) else None
    return token


def _chat_template_sources(directory: Path, options: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The chat template, and the one for conversations with tools where that is another."""
    plain, for_tools = directory / "chat_template.jinja", directory / "additional_chat_templates" / "tool_use.jinja"
    if plain.exists():
        return plain.read_text(encoding="utf-8"), for_tools.read_text(encoding="utf-8") if for_tools.exists() else None
    template = options.get("chat_template")
    if isinstance(template, list):  # Several by name; "default" is for plain chat.
        by_name = {each["name"]: each["template"] for each in template}
        return by_name.get("default"), by_name.get("tool_use")
    return template, None


def _stop_token_ids(directory: Path, described: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids: list[int | None] = []
    for options in (read_json(directory / "generation_config.json", optional=True), described):
        found = options.get("eos_token_id")
        ids += found if isinstance(found, list) else [found]
    if tokenizer is not None:
        ids += [tokenizer.eos_id, *tokenizer.usual_stop_ids()]
    return tuple(sorted({i for i in ids if i is not None}))


def read_json(path: Path, optional: bool = False, error: type[CaJaxError] = CheckpointError) -> dict[str, Any]:
    """The object that a file of JSON holds; an `optional` one that is not there is empty. Raises such an error."""
    if optional and not path.exists():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as found:
        raise error(f"{path}: cannot be read as JSON: {found}") from found
    if not isinstance(contents, dict):
        raise error(f"{path}: contents must be a JSON object, got {type(contents).__name__}")
    return contents


def snapshot(repo_id: str) -> Path:
    """A local directory with what is needed of a hub repository, from the cache if it is there, else downloaded.

    Raises:
      UnknownModelError: it is neither in the cache nor to be had.
      CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError: it is not served.
    """
    import huggingface_hub  # Only here: most models are local.

    download = functools.partial(huggingface_hub.snapshot_download, repo_id, ignore_patterns=_HUB_IGNORED)
    everything = [*_HUB_METADATA, *_HUB_WEIGHTS]
    try:
        cached = Path(download(allow_patterns=everything, local_files_only=True))
        weight_files(cached)
        return cached
    except (OSError, ValueError):
        pass  # Not in the cache, or not all of it.
    try:
        # Metadata first: a model that is not served is refused before its weights are fetched.
        config_from_hf(read_json(Path(download(allow_patterns=_HUB_METADATA)) / "config.json"))
        return Path(download(allow_patterns=everything))
    except (CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError) as error:
        raise type(error)(f"{repo_id}: {error}") from error
    except (OSError, ValueError) as error:
        raise UnknownModelError(
            f"model {repo_id!r} cannot be had from the Hugging Face hub: it is not in the local cache, and fetching it "
            f"failed with {type(error).__name__}: {error}"
        ) from error
