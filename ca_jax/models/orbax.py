"""Checkpoints of this engine's own: the parameter tree as orbax writes it, beside a JSON with everything else.

    DIR/params/                  orbax
    DIR/tokenizer.json           as `tokenizers` writes it; absent where there is no tokenizer
    DIR/ca_jax_checkpoint.json   written last: a directory without it is no checkpoint

Nothing is pickled.

Not here: converting (`launch/convert.py`), the parameter tree (`weights`).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tokenizers

from ca_jax.errors import CheckpointError
from ca_jax.models import weights
from ca_jax.models.chat_template import ChatTemplate
from ca_jax.models.config import ModelConfig
from ca_jax.models.tokenizer import Tokenizer

MANIFEST = "ca_jax_checkpoint.json"
"""The file by which such a directory is known."""

_FORMAT = 1


def save_checkpoint(checkpoint: weights.Checkpoint, directory: Path) -> None:
    """Writes a checkpoint. Blocks.

    Args:
      checkpoint: what to write; its weights keep their dtype.
      directory: where to; made if absent.

    Raises:
      CheckpointError: `directory` is not empty.
    """
    require_empty(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", checkpoint.params)
        checkpointer.wait_until_finished()
    if checkpoint.tokenizer is not None:
        (directory / "tokenizer.json").write_text(checkpoint.tokenizer.backend.to_str(), encoding="utf-8")
    manifest = {
        "format": _FORMAT,
        "name": checkpoint.name,
        "config": dataclasses.asdict(checkpoint.config),
        "dtype": checkpoint.params["params"]["embed"]["embedding"].dtype.name,
        "fingerprint": checkpoint.fingerprint,
        "params_sha256": _hash_params(directory),
        "stop_token_ids": list(checkpoint.stop_token_ids),
        "tokenizer": None if checkpoint.tokenizer is None else _describe_tokenizer(checkpoint.tokenizer),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(
    directory: Path, *, dtype: np.dtype, progress: weights.ProgressFn | None = None
) -> weights.Checkpoint:
    """Reads what `save_checkpoint` wrote. Blocks.

    Loaded in the dtype it was written in, it has the fingerprint of what it was made from: stored KV stays good.

    Args:
      directory: the checkpoint.
      dtype: of the weights in memory.
      progress: told when the weights are read.

    Raises:
      CheckpointError: a file is missing, cut off or changed since it was written.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _FORMAT:
            raise CheckpointError(f"{directory}: wanted format {_FORMAT}, found {manifest['format']}")
        config = ModelConfig.from_dict(manifest["config"])
        stored_dtype, fingerprint = manifest["dtype"], manifest["fingerprint"]
        tokenizer = _load_tokenizer(directory, manifest["tokenizer"])
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            found_sha256 = pool.submit(_hash_params, directory)
            with ocp.StandardCheckpointer() as checkpointer:
                params = checkpointer.restore(directory.absolute() / "params")
        if found_sha256.result() != manifest["params_sha256"]:
            raise CheckpointError(f"{directory}: its weights are not those that were written (SHA-256 differs)")
        checkpoint = weights.Checkpoint(
            config=config,
            params=weights.cast_params(params, dtype),
            tokenizer=tokenizer,
            name=manifest["name"],
            fingerprint=fingerprint if stored_dtype == dtype.name else _recast(fingerprint, dtype),
            stop_token_ids=tuple(manifest["stop_token_ids"]),
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory}: cannot be read: {type(error).__name__}: {error}") from error
    weights.check_params(config, checkpoint.params, str(directory))
    if progress is not None:
        num_bytes = weights.params_bytes(checkpoint.params)
        progress("reading weights", num_bytes, num_bytes)
    return checkpoint


def require_empty(directory: Path) -> None:
    """Raises CheckpointError where `directory` holds anything, or is a file."""
    if directory.is_dir():
        entry = next(directory.iterdir(), None)
        if entry is not None:
            raise CheckpointError(f"wanted an empty or new output directory, found {entry.name} in {directory}")
    elif directory.exists():
        raise CheckpointError(f"wanted an output directory, found the file {directory}")


def _hash_params(directory: Path) -> str:
    return weights.hash_files(directory, (path for path in (directory / "params").rglob("*") if path.is_file()))


def _recast(fingerprint: str, dtype: np.dtype) -> str:
    """The fingerprint of weights that were stored in one dtype and are served in another."""
    return hashlib.sha256(f"{fingerprint} as {dtype.name}".encode()).hexdigest()


def _describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    template = tokenizer.chat_template
    return {
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "add_bos": tokenizer.add_bos,
        "chat_template": None
        if template is None
        else {"source": template.source, "bos_token": template.bos_token, "eos_token": template.eos_token},
    }


def _load_tokenizer(directory: Path, described: dict[str, Any] | None) -> Tokenizer | None:
    if described is None:
        return None
    template = described.pop("chat_template")
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # The library raises nothing narrower.
        raise CheckpointError(f"{directory}: tokenizer.json is not a tokenizer: {error}") from error
    return Tokenizer(backend, chat_template=None if template is None else ChatTemplate(**template), **described)
