"""Checkpoints of this engine's own: the parameter tree as orbax writes it, beside a JSON with everything else.

    DIR/params/                  orbax: a folder for each leaf, of files of some rows each
    DIR/tokenizer.json           as `tokenizers` writes it; absent where there is no tokenizer
    DIR/ca_jax_checkpoint.json   written last: a directory without it is no checkpoint

Leaves are written and read a few at a time, never all of them: see `weights`. Nothing is pickled.

Not here: converting (`launch/convert.py`), the parameter tree (`weights`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.models import weights
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.config import ModelConfig
from ca_jax.models.families import FAMILIES, require_served
from ca_jax.models.small_weights import dtype_of
from ca_jax.models.stored import StoredTensor
from ca_jax.models.tokenizer import Tokenizer, read_backend

MANIFEST = "ca_jax_checkpoint.json"
"""The file by which such a directory is known."""

_FORMAT = 1
_CHUNK_BYTES = 4 << 20  # Of a file: what is read, cast and put in its place at once.


def save_checkpoint(
    checkpoint: weights.Checkpoint, directory: Path, *, progress: weights.ProgressFn | None = None
) -> None:
    """Writes a checkpoint. Blocks.

    Args:
      checkpoint: what to write; its weights keep their dtype. It was loaded to `weights.unread`: its leaves are read
        here, few at a time.
      directory: where to; made if absent. Nothing is left in it where writing fails.
      progress: told of bytes written.

    Raises:
      CheckpointError: `directory` is not empty.
      UnsupportedQuantizationError: a tensor's type cannot be read.
    """
    require_empty(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        registry = type_handlers.create_type_handler_registry((weights.Leaf, _LeafHandler(progress)))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((directory / "params").absolute(), args=ocp.args.PyTreeSave(checkpoint.params))
        if checkpoint.tokenizer is not None:
            (directory / "tokenizer.json").write_text(checkpoint.tokenizer.backend.to_str(), encoding="utf-8")
        manifest = {
            "format": _FORMAT,
            "name": checkpoint.name,
            "config": checkpoint.config.described(),
            "dtype": dtype_of(checkpoint.params).name,
            "fingerprint": checkpoint.fingerprint,
            "params_sha256": _hash_params(directory),
            "stop_token_ids": list(checkpoint.stop_token_ids),
            "tokenizer": None if checkpoint.tokenizer is None else _describe_tokenizer(checkpoint.tokenizer),
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except BaseException:
        for entry in directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def open_checkpoint(directory: Path) -> weights.Source:
    """Opens what `save_checkpoint` wrote.

    Loaded in the dtype it was written in, it has the fingerprint of what it was made from: stored KV stays good.

    Raises:
      CheckpointError: a file is missing or cannot be read. Its fingerprint raises it where a file has changed since.
      UnsupportedArchitectureError: its architecture is not one of those served.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"{directory}: the format must be {_FORMAT}, got {manifest['format']}")
        config = ModelConfig.from_dict(manifest["config"])
        wanted_sha256, fingerprint, stored_dtype = (manifest[key] for key in ("params_sha256", "fingerprint", "dtype"))
        described = manifest["tokenizer"]
        tokenizer = None if described is None else _load_tokenizer(directory, described)
        name, stop_token_ids = manifest["name"], tuple(manifest["stop_token_ids"])
        tensors = _stored_tensors(directory / "params")
    except CheckpointError:
        raise
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(f"{directory}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: cannot be read: {type(error).__name__}: {error}") from error
    require_served(config.architecture, str(directory), FAMILIES)

    def checked_fingerprint(dtype: np.dtype) -> str:
        if _hash_params(directory) != wanted_sha256:
            raise CheckpointError(f"{directory}: its weights are not those that were written (SHA-256 differs)")
        if stored_dtype == dtype.name:
            return str(fingerprint)
        return hashlib.sha256(f"{fingerprint} as {dtype.name}".encode()).hexdigest()

    return weights.Source(
        path=str(directory),
        name=name,
        config=config,
        tensors=tensors,
        names={slot.key: _name(slot) for slot in weights.parameter_slots(config)},
        fingerprint=checked_fingerprint,
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        is_tree=True,
    )


def require_empty(directory: Path) -> None:
    """Raises CheckpointError where `directory` holds anything, or is a file."""
    if directory.is_dir():
        entry = next(directory.iterdir(), None)
        if entry is not None:
            raise CheckpointError(f"the output directory must be empty or new, got {entry.name} in {directory}")
    elif directory.exists():
        raise CheckpointError(f"the output directory must not be a file, got {directory}")


class _LeafHandler(type_handlers.NumpyHandler):
    """Has orbax write leaves that are not read yet, in its own layout of arrays: few of them are in memory at once."""

    def __init__(self, progress: weights.ProgressFn | None) -> None:
        super().__init__()
        self._progress = progress

    async def serialize(
        self, values: Sequence[weights.Leaf], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> list[Any]:
        """Writes them; nothing is left to wait for."""
        paths = {leaf.slot.path: str(info.path) for leaf, info in zip(values, infos, strict=True)}
        total_bytes = sum(leaf.nbytes for leaf in values)
        done_bytes = 0
        for leaf, _ in weights.stream(values, lambda leaf: _write_leaf(leaf, paths[leaf.slot.path])):
            done_bytes += leaf.nbytes
            if self._progress is not None:
                self._progress("writing weights", done_bytes, total_bytes)
        return []


def _write_leaf(leaf: weights.Leaf, path: str) -> None:
    array = leaf.read()
    step = max(1, _CHUNK_BYTES // (array.nbytes // len(array)))
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {"shape": array.shape, "chunks": (min(step, len(array)), *array.shape[1:]), "compressor": None},
        "dtype": array.dtype.name,
        "store_data_equal_to_fill_value": True,
    }
    # Chunks are written from where they are: a copy of each would be a copy of the leaf.
    ts.open(spec, create=True).result().write(array, can_reference_source_data_indefinitely=True).result()


def _name(slot: weights.Slot) -> str:
    """What a leaf is called here, with `{layer}` where its layer's number goes."""
    return "/".join(slot.path if slot.layer is None else ("layer_{layer}", *slot.path[1:]))


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The leaves that orbax wrote: in folders of their own or, in older checkpoints, all in one OCDBT.

    Raises:
      OSError, ValueError, KeyError: it cannot be read.
    """
    described = json.loads((directory / "_METADATA").read_text(encoding="utf-8"))["tree_metadata"]
    is_ocdbt = type_handlers.is_ocdbt_checkpoint(directory)
    tensors = {}
    for leaf in described.values():
        keys = [key["key"] for key in leaf["key_metadata"]]
        folder = f"{'.'.join(keys)}/"
        if is_ocdbt:
            kvstore = {"driver": "ocdbt", "base": f"file://{directory.absolute()}/", "path": folder}
        elif (directory / folder / ".zarray").is_file():
            kvstore = {"driver": "file", "path": f"{directory.absolute()}/{folder}"}
        else:
            continue
        stored = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
        name = "/".join(keys[1:])
        tensors[name] = StoredTensor(
            shape=stored.shape,
            read_rows=partial(_read_rows, stored, f"{directory.parent}: tensor {name}"),
            chunk_rows=stored.chunk_layout.read_chunk_template[0].size,
        )
    return tensors


def _read_rows(stored: ts.TensorStore, name: str, start: int, stop: int) -> np.ndarray:
    try:
        return stored[start:stop].read().result()
    except ValueError as error:  # What TensorStore makes of every failure.
        raise CheckpointError(f"{name}: cannot be read: {error}") from error


def _hash_params(directory: Path) -> str:
    return weights.hash_files(directory, (path for path in (directory / "params").rglob("*") if path.is_file()))


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    described = {name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "add_bos")}
    template = tokenizer.chat_template
    if template is None:
        return {**described, "chat_template": None}
    own = () if template.tool_source == template.source else ("tool_source",)
    names = ("source", "bos_token", "eos_token", *own, *(("other_tokens",) if template.other_tokens else ()))
    fields = {name: getattr(template, name) for name in names}
    return {**described, "chat_template": fields}


def _load_tokenizer(directory: Path, described: dict[str, Any]) -> Tokenizer:
    template = described.pop("chat_template")
    backend = read_backend(directory / "tokenizer.json")
    return Tokenizer(backend, chat_template=None if template is None else ChatTemplate(**template), **described)
