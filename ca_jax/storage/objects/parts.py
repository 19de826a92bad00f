"""KV of a session as objects: which tokens each has, what it is named, and its bytes. An object is never changed.

    tokens     0 . . . . . run | run . . . . . 2 run | 2 run . . | . . . N
    objects    one             | one                 | one       | one          a run is of 16 MiB or more

Full runs lie at the same tokens in every session, so that sessions of a tenant that begin alike name the same objects.
Behind the last full run a publish adds what is new as an object of its own; once the run is full it is written whole.

KV that has seen no dropped token is named by tenant and tokens, whoever computed it. All other KV is named by its
session, its owner's epoch and a name made up for each publish.

    object     header, 8 KiB: JSON, padded | layer 0 [P, T, K, H] | layer 1 | ...

Where KV is coded, each layer is what the codec makes of it, and the manifest says how many bytes it has.

Plain KV may be there though no manifest names it any more. A collector that is about to delete such an object marks it
first; a publish that finds the mark writes the object anew, and the collector leaves what has changed.

Not here: who reads and writes them (kv.shared_sessions), which of them are nobody's (collector).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import crc32c
import numpy as np

from ca_jax.storage.layout import KVLayout
from ca_jax.storage.objects.manifest import PartRef
from ca_jax.storage.objects.store import ObjectsError, ObjectStore

RUN_BYTES = 16 << 20
"""A run is of as few blocks as have so many bytes."""
_HEADER_BYTES = 8192
_FORMAT = 1


class PartError(Exception):
    """An object is not the KV that it should be: damaged, cut short, or of other tokens."""


class PartMissingError(PartError):
    """An object is not there."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Tokens of a session that are to be an object."""

    name: str
    first: int
    num_tokens: int
    tokens: str
    """As of `PartRef`."""


def run_tokens(layout: KVLayout) -> int:
    """Tokens in a run."""
    return -(-RUN_BYTES // layout.block_bytes) * layout.block_tokens


def parts_prefix(namespace: str) -> str:
    """What all names of KV objects of a namespace begin with."""
    return f"v1/{namespace[:16]}/kv/"


def doomed_name(name: str) -> str:
    """Of the mark on a KV object that a collector is about to delete."""
    return name.replace("/kv/", "/doomed/", 1)


def is_plain_name(name: str) -> bool:
    """Whether an object's KV is named by its tokens, so that any session of its tenant may come to name it."""
    return "/plain/" in name


def divide(
    token_ids: np.ndarray,
    num_plain: int,
    layout: KVLayout,
    known: Sequence[PartRef] = (),
    *,
    namespace: str,
    tenant: str,
    key: str,
    mark: str,
) -> list[PartRef | Wanted]:
    """The objects that a session's KV is made of: those that are there already, and those to be written.

    Args:
      token_ids: int32 `[T]`, of all tokens with KV.
      num_plain: first tokens whose KV has seen no dropped token.
      known: objects that have KV of the session as it was, of the same lineage.
      key, mark: name what is not plain.
    """
    size, total = run_tokens(layout), len(token_ids)
    num_full = total // size * size
    names = TokenHashes(token_ids)
    by_range = {(part.first, part.stop): part for part in known}
    found: list[PartRef | Wanted] = []

    def one(first: int, stop: int) -> PartRef | Wanted:
        tokens = names.upto(stop)
        part = by_range.get((first, stop))
        is_plain = stop <= num_plain
        if is_plain:
            text = f"{namespace} {len(tenant)}:{tenant} {first} {tokens}"
            digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
            name = f"{parts_prefix(namespace)}plain/{digest[:2]}/{digest}"
        else:
            name = f"{parts_prefix(namespace)}own/{key}/{mark}-{first}-{stop}"
        if part is not None and part.tokens == tokens and is_plain == is_plain_name(part.name):
            return part
        return Wanted(name, first, stop - first, tokens)

    for first in range(0, num_full, size):
        found.append(one(first, first + size))
    at = num_full
    for part in known:  # What is there of the last run, in order.
        if part.first == at and part.stop <= total and isinstance(same := one(part.first, part.stop), PartRef):
            found.append(same)
            at = part.stop
    if at < total:
        found.append(one(at, total))
    return found


class TokenHashes:
    """SHA-256 of first tokens, for growing numbers of them."""

    def __init__(self, token_ids: np.ndarray) -> None:
        self._ids = np.ascontiguousarray(token_ids, "<i4")
        self._hash, self._at = hashlib.sha256(), 0
        self._known: dict[int, str] = {}

    def upto(self, stop: int) -> str:
        """Of the first `stop` tokens, as hex."""
        if stop not in self._known:
            if stop < self._at:
                self._hash, self._at = hashlib.sha256(), 0
            self._hash.update(self._ids[self._at : stop].tobytes())
            self._at = stop
            self._known[stop] = self._hash.hexdigest()
        return self._known[stop]


def fitting(parts: Iterable[PartRef], token_ids: np.ndarray) -> list[PartRef]:
    """The first of some parts, as long as they are of the first of these tokens, int32 `[T]`."""
    hashes = TokenHashes(token_ids)
    is_same = lambda part: part.stop <= len(token_ids) and part.tokens == hashes.upto(part.stop)  # noqa: E731
    return list(itertools.takewhile(is_same, parts))


def layer_bytes(layout: KVLayout, num_tokens: int) -> list[int]:
    """Bytes of each layer of so many tokens, `[L]`."""
    shapes = (layout.layer_shape(layer, num_tokens) for layer in range(layout.num_layers))
    return [int(np.prod(shape)) * layout.numpy_dtype.itemsize for shape in shapes]


def write_part(
    store: ObjectStore,
    wanted: Wanted,
    layers: Callable[[], Sequence[bytes | memoryview]],
    layout: KVLayout,
    namespace: str,
    *,
    is_damaged: bool = False,
) -> tuple[PartRef, int]:
    """Writes an object, unless there is one of its name: then that one's checksums are what is named.

    Args:
      layers: gives the bytes of each layer; called where there is no such object.
      is_damaged: whether the one that is there is known to be, so that it is written anew.

    Returns:
      What names it, and how many bytes were written.

    Raises:
      ObjectsError: it is not known to be there.
    """
    # The mark first: one that is set later leaves this publish the collector's grace to name the object.
    is_doomed = is_plain_name(wanted.name) and store.read(doomed_name(wanted.name)).value is not None
    header, generation = _read_header(store, wanted, layout, namespace)
    if header is not None and not is_damaged and not is_doomed:
        return _ref(wanted, header, layout), 0
    stored = layers()
    fields = {
        **dataclasses.asdict(wanted),
        "namespace": namespace,
        "sums": [crc32c.crc32c(layer) for layer in stored],
        "layer_bytes": [len(layer) for layer in stored],
        "write_id": uuid.uuid4().hex,  # Where a generation is a hash of the bytes, equal KV written anew has another.
    }
    text = json.dumps({"format": _FORMAT, **fields}).encode()
    if len(text) > _HEADER_BYTES:
        raise ValueError(f"a header must be at most {_HEADER_BYTES} bytes, got {len(text)} of {len(stored)} layers")
    data = b"".join([text.ljust(_HEADER_BYTES), *stored])
    if store.write(wanted.name, data, replaces=generation) is not None:
        return _ref(wanted, fields, layout), len(data)
    header, generation = _read_header(store, wanted, layout, namespace)
    if header is not None:  # Another replica has the same tokens, and was faster.
        return _ref(wanted, header, layout), 0
    # It was deleted meanwhile, or is of something else.
    if store.write(wanted.name, data, replaces=generation) is None:
        raise ObjectsError(f"{wanted.name} must be KV of {wanted.num_tokens} tokens, got another object")
    return _ref(wanted, fields, layout), len(data)


def find_part(store: ObjectStore, wanted: Wanted, layout: KVLayout, namespace: str) -> PartRef | None:
    """Names an object if it is there and its header is as it should be.

    Raises:
      ObjectsError: that cannot be found out.
    """
    header, _ = _read_header(store, wanted, layout, namespace)
    return None if header is None else _ref(wanted, header, layout)


def read_layers(
    store: ObjectStore, part: PartRef, layout: KVLayout, first: int, stop: int
) -> Callable[[], Iterator[memoryview]]:
    """Begins to read layers `first` to `stop` of an object, and does not wait.

    Returns:
      What waits for them: gives the bytes of each, once they are held against their checksum. It raises ObjectsError
      where the object cannot be read, and PartError where it is not there, or not what was written.
    """
    sizes = part.layer_bytes or layer_bytes(layout, part.num_tokens)
    start = _HEADER_BYTES + sum(sizes[:first])
    reading = store.begin_read(part.name, start, start + sum(sizes[first:stop]), may_be_short=True)

    def wait() -> Iterator[memoryview]:
        data, at = reading().value, 0
        if data is None:
            raise PartError(f"{part.name} must be there, and is not")
        for layer in range(first, stop):
            of_layer = memoryview(data)[at : at + sizes[layer]]
            at += sizes[layer]
            if len(of_layer) != sizes[layer] or crc32c.crc32c(of_layer) != part.sums[layer]:
                raise PartError(f"layer {layer} of {part.name} must have crc32c {part.sums[layer]:#010x}, and has not")
            yield of_layer

    return wait


def as_layer(data: memoryview, part: PartRef, layout: KVLayout, layer: int) -> np.ndarray:
    """The KV `[P, T, K, H]` that a layer's bytes are, where it is not coded."""
    return np.frombuffer(data, layout.numpy_dtype).reshape(layout.layer_shape(layer, part.num_tokens))


def check_part(store: ObjectStore, part: PartRef, namespace: str) -> None:
    """Reads an object whole and holds it against its header, and both against what names it. Needs no layout.

    Raises:
      ObjectsError: it cannot be read.
      PartError: it is not what it should be (`PartMissingError`: not there).
    """
    data = store.read(part.name).value
    if data is None:
        raise PartMissingError(f"{part.name} must be there, and is not")
    header = _parsed(data[:_HEADER_BYTES])
    for name, value in {"format": _FORMAT, "namespace": namespace, **part.to_dict()}.items():
        if header.get(name) != value:
            raise PartError(f"the header of {part.name} must say {name} {value}, got {header.get(name)}")
    sizes = _layer_bytes(header)
    if sizes is None or len(sizes) != len(part.sums):
        raise PartError(f"the header of {part.name} must say the bytes of {len(part.sums)} layers, got {sizes}")
    if len(data) != _HEADER_BYTES + sum(sizes):
        raise PartError(f"{part.name} must be of {_HEADER_BYTES + sum(sizes)} bytes, got {len(data)}")
    at = _HEADER_BYTES
    for layer, (size, wanted_sum) in enumerate(zip(sizes, part.sums, strict=True)):
        found = crc32c.crc32c(memoryview(data)[at : at + size])
        if found != wanted_sum:
            raise PartError(f"layer {layer} of {part.name} must have crc32c {wanted_sum:#010x}, got {found:#010x}")
        at += size


def measure_part(store: ObjectStore, name: str) -> tuple[bytes, int] | None:
    """An object's generation, and its bytes as its header says, 0 where that cannot be read; None: it is not there.

    Raises:
      ObjectsError: that cannot be found out.
    """
    found = store.read(name, 0, _HEADER_BYTES, may_be_short=True)
    if found.value is None:
        return None
    sizes = _layer_bytes(_parsed(found.value[:_HEADER_BYTES]))
    return found.generation, 0 if sizes is None else _HEADER_BYTES + sum(sizes)


def _layer_bytes(header: dict[str, Any]) -> list[int] | None:
    sizes = header.get("layer_bytes")
    return sizes if isinstance(sizes, list) and all(isinstance(each, int) for each in sizes) else None


def _parsed(header: bytes) -> dict[str, Any]:
    """The fields of a header, none of what is no header."""
    try:
        fields = json.loads(header)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _read_header(
    store: ObjectStore, wanted: Wanted, layout: KVLayout, namespace: str
) -> tuple[dict[str, Any] | None, bytes]:
    """The header of an object of that name, and its generation; no header where there is none, or of something else."""
    found = store.read(wanted.name, 0, _HEADER_BYTES, may_be_short=True)
    try:
        header = json.loads(found.value or b"")
        same = {**dataclasses.asdict(wanted), "format": _FORMAT, "namespace": namespace}
        sums_fit = len(header["sums"]) == layout.num_layers and all(isinstance(each, int) for each in header["sums"])
        is_it = sums_fit and all(header.get(name) == value for name, value in same.items())
    except (ValueError, TypeError, KeyError, AttributeError):
        is_it = False
    return header if is_it else None, found.generation


def _ref(wanted: Wanted, header: dict[str, Any], layout: KVLayout) -> PartRef:
    sizes = _layer_bytes(header) or []
    is_as_computed = sizes in ([], layer_bytes(layout, wanted.num_tokens))
    return PartRef(
        wanted.name,
        wanted.first,
        wanted.num_tokens,
        wanted.tokens,
        tuple(header["sums"]),
        () if is_as_computed else tuple(sizes),
    )
