"""Whose the blocks at a URL are: a mark beside them names the one store's directory whose catalog knows them.

Blocks in a store's own directory need none: the holder of its lock has them. At a URL two engines with a directory each
would write to the same names, and each would remove the other's blocks as blocks without a session.

Not here: the directory's lock (catalog.file), which blocks are held (opening).
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorstore as ts

from ca_jax.errors import CaJaxError
from ca_jax.storage.catalog.file import write_file

OWNER_NAME = "owner.json"
"""The mark's name beside the blocks."""
ID_NAME = "directory.id"
"""What names a store's directory, in it."""
_FORMAT = 1
_FIELDS = ("owner", "directory", "host", "since")  # `directory_id`, its path then, local time.


class BlocksOwnedError(CaJaxError):
    """Blocks at a URL are another directory's, or it is not known whose. Nothing was changed."""


def claim_blocks(
    blocks: ts.KvStore,
    directory: Path,
    list_blocks: Callable[[], Sequence[int]],
    *,
    knows_any: Callable[[], bool],
    takes_over: bool = False,
) -> str | None:
    """Makes sure that a directory owns the blocks at a URL, and marks them as its own where they have no mark.

    Blocks with no mark are of an older version: they are adopted by a directory whose catalog has sessions there.

    Args:
      blocks: the URL.
      directory: the store's; the caller holds its lock.
      list_blocks: gives the ids of the blocks that are there; only asked where there is no mark, as `knows_any` is.
      knows_any: says whether the directory's catalog has sessions there.
      takes_over: makes it the owner in any case.

    Returns:
      The owner before, in words; None where there was no mark that can be read.

    Raises:
      BlocksOwnedError: they are not the directory's.
    """
    found = blocks.read(OWNER_NAME).result()
    owner, own_id = _parsed(found.value), directory_id(directory)
    if owner is not None and owner["owner"] == own_id:
        return _described(owner)
    if not takes_over:
        if found.state == "value":
            raise _refusal(blocks, directory, _described(owner) or "a mark of no known format")
        num_unknown = 0 if knows_any() else len(list_blocks())
        if num_unknown:
            raise _refusal(blocks, directory, f"{num_unknown} blocks that this directory knows nothing of")
    values = own_id, str(directory.absolute()), socket.gethostname(), time.strftime("%F %T %z")
    own = dict(zip(_FIELDS, values, strict=True))
    blocks.write(OWNER_NAME, json.dumps({"format": _FORMAT, **own}).encode(), if_equal=found.stamp.generation).result()
    marked = _parsed(blocks.read(OWNER_NAME).result().value)
    if marked != own:  # Another one came in between.
        raise _refusal(blocks, directory, str(_described(marked)))
    return _described(owner)


def directory_id(directory: Path) -> str:
    """Names a store's directory, wherever it is moved; a copy has another name. Durable when this returns.

    The caller holds the directory's lock.
    """
    path = directory / ID_NAME
    if not path.exists():
        write_file(path, uuid.uuid4().hex)
    return f"{path.read_text(encoding='ascii')}-{path.stat().st_ino}"  # A copy is another file.


def _parsed(text: bytes) -> dict[str, str] | None:
    """The fields of a mark; None of what is no mark."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        fields: dict[str, str] = json.loads(text)
        if fields.pop("format") == _FORMAT and set(fields) == set(_FIELDS):
            return fields
    return None


def _described(owner: dict[str, str] | None) -> str | None:
    return None if owner is None else f"{owner['directory']} on {owner['host']} since {owner['since']}"


def _refusal(blocks: ts.KvStore, directory: Path, found: str) -> BlocksOwnedError:
    return BlocksOwnedError(
        f"the blocks at {blocks.url} must be those of {directory}, got {found}; give this store a URL of its own, or, "
        "where the other directory is gone and no engine uses it, take its blocks over: "
        "python -m ca_jax.launch.store --ssd_dir=… --ssd_url=… claim"
    )
