"""One kit for the tests of `ca_jax.storage`: stores, tiers and filled directories, to be followed by hand.

Blocks are of four tokens of three layers. Tests of other rooms use it too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from ca_jax.storage import opening as ssd_setup
from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.records import Namespace, SessionRecord
from ca_jax.storage.config import GIB, StoreConfig
from ca_jax.storage.layout import KVLayout
from ca_jax.storage.opening import open_ssd
from ca_jax.storage.records import EntryInfo, Owner, StoreRuntime
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tiers.disk import DiskTier
from ca_jax.storage.tiers.formats import RawTier, Zarr3Tier
from ca_jax.storage.tiers.mover import SsdWorker
from ca_jax.storage.tokens import TokenPlaces
from ca_jax.telemetry.timeline import NO_TIMELINE, Timeline

BLOCK_TOKENS = 4
SLOT_BYTES = 4096  # What a block takes on SSD.
PATIENCE_S = 60.0  # How long a test waits for another thread before it fails.
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def make_layout(dtype: str = "float32", block_tokens: int = BLOCK_TOKENS, **sizes: int) -> KVLayout:
    sizes = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 5, **sizes}
    return KVLayout.uniform(dtype=dtype, block_tokens=block_tokens, **sizes)


LAYOUT = make_layout()
NAMESPACE = Namespace(weights="aaaa1111weights", layout=LAYOUT)  # Of the stores of `make_store`.


@dataclasses.dataclass
class StoppedClock:
    """A clock that stands until a test moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def ssd_config(directory: Path | None, num_blocks: float, **fields: Any) -> StoreConfig:
    """The config of a store with so many blocks on SSD in a directory."""
    return StoreConfig(
        block_tokens=BLOCK_TOKENS,
        ssd_dir=None if directory is None else str(directory),
        ssd_gib=num_blocks * SLOT_BYTES / GIB,
        ssd_free_floor_gib=0.0,
        **fields,
    )


def make_store(
    num_blocks: int = 4,
    *,
    dtype: str = "float32",
    layout: KVLayout | None = None,
    eviction_policy: str = "lru",
    ssd_dir: Path | None = None,
    ssd_blocks: int = 16,
    ssd_driver: str = "zarr3",
    quota_bytes: int | None = None,
    clock: Callable[[], float] | None = None,
    timeline: Timeline = NO_TIMELINE,
    on_fetch: Callable[[int, float], None] = lambda num_bytes, seconds: None,
    **fields: Any,
) -> AttentionStore:
    """A store of `num_blocks` blocks, each full of NaN: what nobody wrote must never show.

    With `ssd_dir` it has an SSD of `ssd_blocks` blocks too.
    """
    layout = layout or make_layout(dtype)
    config = dataclasses.replace(
        ssd_config(ssd_dir, ssd_blocks, ssd_driver=ssd_driver, **fields),
        dram_gib=num_blocks * layout.block_bytes / GIB,
        eviction_policy=eviction_policy,
        tenant_quota_gib=None if quota_bytes is None else quota_bytes / GIB,
    )
    runtime = StoreRuntime(clock=clock or itertools.count(1.0).__next__, on_fetch=on_fetch, timeline=timeline)
    store = AttentionStore(layout, config, weights=NAMESPACE.weights, runtime=runtime)
    if num_blocks:
        store._dram.slab.view(np.uint8)[...] = 0xFF  # A NaN of every float, and of the scale of an int8 row.
    return store


def make_kv(layout: KVLayout, num_tokens: int, seed: int = 0) -> np.ndarray:
    """`[L, 2, T, K, H]` of random bits: every pattern a dtype has, NaNs with payload and subnormals among them."""
    bits = BITS[layout.numpy_dtype.itemsize]
    shape = (layout.num_layers, *layout.groups[0].shape(num_tokens))
    rng, largest = np.random.default_rng(seed), np.iinfo(bits).max
    return rng.integers(0, largest, shape, bits, endpoint=True).view(layout.numpy_dtype)


def as_bits(array: np.ndarray) -> np.ndarray:
    """The array as integers, so that NaNs compare by their bits."""
    return np.ascontiguousarray(array).view(BITS[array.dtype.itemsize])


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    """Two arrays are the same, bit by bit."""
    np.testing.assert_array_equal(as_bits(found), as_bits(wanted))


def save(
    store: AttentionStore, key: str, token_ids, kv: np.ndarray, start_token: int = 0, owner: Owner | None = None
) -> bool:
    """Saves `token_ids` in one go; False where the save was skipped."""
    ticket = store.prepare_save(key, start_token, token_ids, owner)
    if ticket is None:
        return False
    ticket.write_all(kv)
    return store.complete_save(ticket)


def load(store: AttentionStore, key: str, token_ids, num_dropped: int = 0) -> np.ndarray | None:
    """Loads the longest stored prefix of `token_ids`, `[L, 2, T, K, H]`; None for a miss."""
    ticket = store.prepare_load(key, token_ids, num_dropped=num_dropped)
    if ticket is None:
        return None
    layout = store.layout
    staging = np.empty(layout.layer_shape(0, ticket.num_tokens + 3), layout.numpy_dtype)
    layers = []
    for layer in range(layout.num_layers):
        as_int = staging.view(BITS[staging.itemsize])
        as_int[...] = 123
        ticket.read(layer, staging).result()
        assert np.all(as_int[:, ticket.num_tokens :] == 123), "a load wrote past its tokens"
        layers.append(staging[:, : ticket.num_tokens].copy())
    store.complete_load(ticket)
    return np.stack(layers)


def use(store: AttentionStore, key: str) -> None:
    """Uses a session in DRAM whose tokens begin like `ids`."""
    store.complete_load(store.prepare_load(key, ids(1)))


def fetch(store: AttentionStore, key: str) -> None:
    """Asks for a session until it is in DRAM, or not worth waiting for."""
    wait_until(store, lambda: not store.request(key))


def ids(num_tokens: int, first: int = 100) -> list[int]:
    """So many token ids."""
    return list(range(first, first + num_tokens))


def mask_of(num_tokens: int, discarded) -> np.ndarray:
    """Which of the first tokens are discarded, bool `[num_tokens]`."""
    return np.isin(np.arange(num_tokens), list(discarded))


def info(store: AttentionStore, key: str) -> EntryInfo | None:
    """What the store tells of a session."""
    return next((each for each in store.list() if each.key == key), None)


def ssd_tokens(store: AttentionStore, key: str) -> int:
    """Tokens of a session that are on SSD."""
    found = info(store, key)
    return 0 if found is None else found.ssd_tokens


def used_blocks(store: AttentionStore) -> int:
    """Blocks of DRAM that are held."""
    stats = store.stats()
    assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
    return stats.used_bytes // store.layout.block_bytes


def put(store: AttentionStore, key: str, num_tokens: int, *, seed: int = 0, first: int = 100, owner=None) -> np.ndarray:
    """Saves a session, waits until it is on SSD, and returns its KV."""
    kv = make_kv(LAYOUT, num_tokens, seed)
    assert save(store, key, ids(num_tokens, first), kv, owner=owner)
    assert store.settle(PATIENCE_S)
    return kv


def assert_loads(
    store: AttentionStore, key: str, token_ids: Sequence[int], kv: np.ndarray, num_dropped: int = 0
) -> None:
    """A session is fetched, if it is on SSD only, and all of it is what was saved."""
    fetch(store, key)
    found = load(store, key, token_ids, num_dropped)
    assert found is not None, store.stats().misses
    assert_same(found, kv)


def wait_until(store: AttentionStore, reached: Callable[[], object]) -> None:
    """Turns the store's wheel until something is so; fails if it does not become so."""
    for _ in range(10_000):
        store._progress.clear()
        store.poll()
        if reached():
            return
        assert store._progress.wait(PATIENCE_S), "nothing happens any more, and what was waited for is not so"
    raise AssertionError("much happens, and what was waited for does not become so")


def begin_flush(store: AttentionStore, tier: GatedTier) -> None:
    """Begins what is due, and waits until its writes stand before the closed gate."""
    store.poll()
    tier.writes.wait_held()


# Faults, and moves that wait for a test.


@contextlib.contextmanager
def replaced(owner: object, name: str, value: Callable[..., object]) -> Iterator[None]:
    """Gives one object another method."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


class Gate:
    """Holds calls and moves back while it is closed, each for as long as a test waits at most."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self._changed = threading.Condition()
        self._is_closed = is_closed
        self._num_held = 0
        self.num_come = 0

    def close(self) -> None:
        with self._changed:
            self._is_closed = True

    def open(self) -> None:
        with self._changed:
            self._is_closed = False
            self._changed.notify_all()

    def wait_held(self, num_calls: int = 1) -> None:
        """Waits until so many stand before the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._num_held >= num_calls, PATIENCE_S), "none came to the gate"

    def __call__(self) -> None:
        with self._changed:
            self.num_come += 1
            self._num_held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_closed, PATIENCE_S)
            self._num_held -= 1


@contextlib.contextmanager
def stalled(*methods: tuple[object, str]) -> Iterator[Gate]:
    """Has methods of objects begin and not end, until the block does."""
    gate = Gate(is_closed=True)

    def late(method: Callable[..., object], *args: object, **options: object) -> object:
        gate()
        return method(*args, **options)

    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(replaced(owner, name, functools.partial(late, getattr(owner, name))))
        stack.callback(gate.open)
        yield gate


@contextlib.contextmanager
def writer_stopped(store: AttentionStore) -> Iterator[Gate]:
    """Blocks the thread that writes the catalog, once all changes asked for so far are made."""
    gate = Gate(is_closed=True)
    store._ssd._mover._put_change(gate)
    gate.wait_held()
    try:
        yield gate
    finally:
        gate.open()


class GatedTier:
    """A DiskTier whose reads and writes stand before gates, and are late by a clock that a test moves."""

    def __init__(self, tier: DiskTier, clock: StoppedClock):
        self._tier, self._clock = tier, clock
        self.reads, self.writes = Gate(), Gate()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read_blocks(self, *arguments: Any) -> None:
        self.reads()
        self._tier.read_blocks(*arguments)

    def write_blocks(self, *arguments: Any) -> None:
        self.writes()
        self._tier.write_blocks(*arguments)

    def let_time_pass(self, seconds: float) -> None:
        self._clock.now_s += seconds


def open_gated(monkeypatch) -> list[GatedTier]:
    """Has the stores made from now on get gated tiers, which are added to the list."""
    tiers: list[GatedTier] = []
    clock = StoppedClock()

    def open_it(*args: Any, **options: Any):
        opened = open_ssd(*args, **options)
        tiers.append(GatedTier(opened.tier, clock))
        return dataclasses.replace(opened, tier=tiers[-1])

    monkeypatch.setattr(ssd_setup, "open_ssd", open_it)
    monkeypatch.setattr(ssd_setup, "SsdWorker", functools.partial(SsdWorker, clock=clock))
    return tiers


@dataclasses.dataclass
class Disk:
    """A place for tiers of one kind, `zarr3`, `memory` or `raw`: opening it again finds what the last one wrote."""

    kind: str
    path: Path
    _context: ts.Context = dataclasses.field(
        default_factory=lambda: ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    )

    def open(self, layout: KVLayout = LAYOUT, num_blocks: int = 8, **options: Any) -> DiskTier:
        """A tier, with options of a disk."""
        num_bytes = num_blocks * layout.stored_block_bytes
        if self.kind == "raw":
            return RawTier(layout, self.path, num_bytes, **options)
        if self.kind == "memory":
            return Zarr3Tier(layout, "memory://kv", num_bytes, context=self._context, **options)
        return Zarr3Tier(layout, self.path, num_bytes, **options)

    def block_file(self, block: int) -> Path:
        """The file of a block of kind `zarr3`."""
        return self.path / "zarr3" / f"{block // 1024:06d}" / f"c.{block % 1024}.0.0.0.0.0"

    def place(self, block: int) -> tuple[Path, int]:
        """The file that a block is in, and where in it."""
        if self.kind == "raw":
            return self.path / "raw" / "blocks", block * SLOT_BYTES
        return self.block_file(block), 0


def make_blocks(layout: KVLayout, num_blocks: int, seed: int = 0) -> np.ndarray:
    """`[n, L, 2, block_tokens, K, H]` of random bits."""
    return np.stack([make_kv(layout, layout.block_tokens, 100 * seed + i) for i in range(num_blocks)])


def read(tier: DiskTier, block_ids: list[int]) -> np.ndarray:
    """Reads whole blocks into memory full of other bits."""
    into = make_blocks(tier.layout, len(block_ids), seed=99)
    tier.read_blocks(block_ids, into)
    return into


def mount(*arguments: object) -> bool:
    """Whether a mount succeeded: many systems let no test do that."""
    try:
        return not subprocess.run(["mount", *map(str, arguments)], capture_output=True).returncode
    except FileNotFoundError:
        return False


def unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Path | None]:
    """A filesystem of its own for a new directory; None where that cannot be had, which leaves the directory."""
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={num_bytes}", "none", path):
        yield None
        return
    try:
        yield path
    finally:
        unmount(path)


@contextlib.contextmanager
def unwritable(path: Path, fill: Callable[[Path], object] = lambda path: None) -> Iterator[None]:
    """A directory, filled, without write permission; for root, whom modes do not stop, a read-only filesystem."""
    if os.geteuid():
        path.mkdir()
        fill(path)
        path.chmod(0o500)
        yield
        path.chmod(0o700)
        return
    with small_disk(path, 1 << 20) as disk:
        fill(path)
        if disk is None or not mount("-o", "remount,ro", path):
            pytest.skip("wants to mount a filesystem, which the system refuses")
        yield


# Directories, filled as an engine would, for what looks at them and cleans them.


OTHER_NAMESPACE = Namespace(weights="bbbb2222weights", layout=make_layout("bfloat16"))
KEYS = {"first": "a1" + 62 * "0", "second": "a2" + 62 * "0", "third": "b3" + 62 * "0", "other": "c4" + 62 * "0"}


@dataclasses.dataclass
class Kept:
    """What was stored of one session."""

    record: SessionRecord
    token_ids: np.ndarray
    kv: np.ndarray  # [L, 2, T, K, H]


def open_tier(path: Path, kind: str, namespace: Namespace = NAMESPACE) -> DiskTier:
    """The blocks of a namespace as an engine opens them."""
    return Disk(kind, path / namespace.directory_name).open(namespace.layout, num_blocks=16)


def block_file(path: Path, block: int, namespace: Namespace = NAMESPACE) -> Path:
    """The file of a block that is kept by driver zarr3."""
    return Disk("zarr3", path / namespace.directory_name).block_file(block)


def publish(
    catalog: Catalog,
    tier: DiskTier,
    key: str,
    block_ids: list[int],
    num_tokens: int | None = None,
    *,
    seed: int = 0,
    **fields: Any,
) -> Kept:
    """Writes a session's blocks, full ones if it is not said of how many tokens, and publishes it."""
    blocks = make_blocks(tier.layout, len(block_ids), seed=seed)
    tier.write_blocks(block_ids, blocks)
    num_tokens = len(block_ids) * tier.layout.block_tokens if num_tokens is None else num_tokens
    record = SessionRecord(
        key=key,
        block_ids=np.array(block_ids, np.int64),
        places=TokenPlaces.dense(num_tokens),
        **{"tenant": "alice", "session_id": key, "created_s": 1e9, "last_used_s": 1e9, **fields},
    )
    token_ids = np.arange(num_tokens, dtype=np.int32) + 1000 * (seed + 1)
    record = catalog.publish(record, token_ids, np.array([LAYOUT.layer_sums(block) for block in blocks]))
    kv = np.concatenate(list(blocks), axis=2)[:, :, :num_tokens]
    return Kept(record=record, token_ids=token_ids, kv=kv)


def fill(path: Path, kind: str) -> Mapping[str, Kept]:
    """Four sessions by name: three of two tenants in one namespace, one in another. Used last: first, second, …

    first   alice  "chat"   10 tokens in blocks 0 1 2, used at 1e9
    second  alice  "notes"   4 tokens in block 3, expired long ago
    third   bob    "chat"    9 tokens in blocks 7 5 6, pinned although its time is over
    other   carol  "x"       5 tokens in blocks 0 1 of the other namespace
    """
    old, bobs = {"last_used_s": 1e9 + 1, "ttl_s": 60.0}, {"last_used_s": 1e9 + 2, "ttl_s": 60.0, "pinned": True}
    sessions: list[tuple[Namespace, str, list[int], int, dict[str, Any]]] = [
        (NAMESPACE, "first", [0, 1, 2], 10, {"session_id": "chat"}),
        (NAMESPACE, "second", [3], 4, {"session_id": "notes", **old}),
        (NAMESPACE, "third", [7, 5, 6], 9, {"session_id": "chat", "tenant": "bob", **bobs}),
        (OTHER_NAMESPACE, "other", [0, 1], 5, {"session_id": "x", "tenant": "carol", "last_used_s": 1e9 + 3}),
    ]
    kept = {}
    for seed, (namespace, name, block_ids, num_tokens, fields) in enumerate(sessions):
        tier = open_tier(path, kind, namespace)
        with Catalog(path, namespace) as catalog:
            kept[name] = publish(catalog, tier, KEYS[name], block_ids, num_tokens, seed=seed, **fields)
        tier.close()
    return kept


def files_of(path: Path) -> dict[str, bytes]:
    """All files of blocks below a directory, by relative name."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and not file.name.startswith("catalog.")
    }
