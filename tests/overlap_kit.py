"""What the tests of overlap share: memory that turns into NaN when it is let go of, answers checked, nothing held.

Everything here looks at an engine from within.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.paced import ControlledStore, Transfer, Transfers
from ca_jax.device.pages import Holding
from ca_jax.engine import Engine
from ca_jax.kv.costs import PrefillRate, Rates, TransferRate
from ca_jax.kv.layer_loader import ReadBuffer
from ca_jax.session import Answer
from ca_jax.storage.store import AttentionStore
from tests import engine_kit as kit
from tests.transfers_kit import DelayedTransfers, GatedTransfers

PATIENCE_S = 60.0  # How long a test waits for another thread before it fails.
REGION_BYTES = 256 * kit.TOKEN_BYTES // kit.NUM_LAYERS
"""Staging of one layer of a history of up to 256 tokens."""
NAN_BYTE = 0xFF
"""Everywhere it is NaN, in floats of any width and in the scale of an int8 row."""


def rates_of(load_token_s: float, token_s: float = 1e-3, pair_s: float = 0.0) -> Rates:
    """As if measured: seconds of loading or saving a token in all layers, and of computing it.

    What follows from rates (depths, lengths of passes, what is recomputed) is so on any machine then.
    """
    link, prefill = (
        TransferRate(bytes_per_s=kit.TOKEN_BYTES / load_token_s),
        PrefillRate(token_s=token_s, pair_s=pair_s),
    )
    layer_token_bytes = kit.TOKEN_BYTES // kit.NUM_LAYERS
    return Rates(num_layers=kit.NUM_LAYERS, layer_token_bytes=layer_token_bytes, load=link, save=link, prefill=prefill)


# Memory that nobody may read.


def poison(engine: Engine, *, staged_layers: int = 2 * kit.NUM_LAYERS) -> None:
    """Fills all memory that is not in use with NaN, now and whenever some is let go of.

    Blocks of DRAM when they are free, regions of the read buffer and pages of the pool when they are given back: who
    reads one of them too late finds NaN, and who writes too early is written over.

    Args:
      engine: whose memory; idle.
      staged_layers: how many layers of a history of up to 256 tokens its read buffer holds from here on.
    """
    engine.wait_until_ready()
    store, loader, pool = _store(engine), engine._kv._loader, engine._runner.pool
    slab = store._dram.slab
    blocks = store._blocks

    def free(tenant: str, ids: Iterable[int], original: Callable = blocks.free) -> None:
        given_back = list(ids)
        original(tenant, given_back)
        slab.view(np.uint8)[[block for block in given_back if not blocks._taken[block]]] = NAN_BYTE

    def release(holding: Holding, original: Callable = pool._release) -> None:
        original(holding)
        if holding.pages and holding.generation == pool.generation:
            is_free = np.zeros((pool.size.num_parts, pool.size.num_pages), bool)
            is_free[holding.part, [page for page in holding.pages if page not in pool._holders[holding.part]]] = True
            pool.buffers = _nan_in_pages(pool.buffers, is_free.ravel())

    slab.view(np.uint8)[...] = NAN_BYTE
    pool.buffers = _nan_in_pages(pool.buffers, np.ones(len(pool.buffers[0]), bool))
    blocks.free = free
    pool._release = release
    loader.buffer = PoisonedBuffer(staged_layers * REGION_BYTES)


@functools.partial(jax.jit, donate_argnums=0)
def _nan_in_pages(pages: list[jax.Array], is_free: jax.Array) -> list[jax.Array]:
    return [jnp.where(is_free[:, None, None, None, None], jnp.nan, each) for each in pages]


class PoisonedBuffer(ReadBuffer):
    """A read buffer whose free memory is NaN."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.memory.view(np.uint8)[...] = NAN_BYTE

    def give_back(self) -> slice:
        """Frees the oldest piece, and forgets what it held."""
        region = super().give_back()
        self.memory[region].view(np.uint8)[...] = NAN_BYTE
        return region


# Transfers.


class LateGate:
    """A gate of an SSD tier that lets each move through after a random delay."""

    def __init__(self, transfers: DelayedTransfers, direction: str) -> None:
        self._transfers = transfers
        self._transfer = Transfer(direction, "ssd", None, 1, 1)

    def __call__(self) -> None:
        self._transfers.submit(self._transfer, lambda: None).result()


def controlled(
    *, loads: Transfers | None = None, saves: Transfers | None = None
) -> Callable[[AttentionStore], ControlledStore]:
    """A `store_wrapper` that has loads, saves, or both run when these say so."""
    return functools.partial(ControlledStore, loads=loads, saves=saves)


def open_gate() -> GatedTransfers:
    """A gate that lets everybody through, at once and on the caller's thread, until it is shut."""
    gate = GatedTransfers()
    gate.open()
    return gate


@contextlib.contextmanager
def shut(*gates: GatedTransfers) -> Iterator[None]:
    """Gates hold whoever comes within a `with` block, and let all through at its end."""
    for gate in gates:
        gate.shut()
    try:
        yield
    finally:
        for gate in gates:
            gate.open()


@contextlib.contextmanager
def gated_engine(
    *, staged_layers: int = 2 * kit.NUM_LAYERS, **changes: object
) -> Iterator[tuple[Engine, GatedTransfers, GatedTransfers]]:
    """An engine whose free memory is NaN, and the gates of its loads and its saves; in the end nothing is held."""
    loads, saves = open_gate(), open_gate()
    with kit.small_engine(store_wrapper=controlled(loads=loads, saves=saves), **changes) as engine:
        poison(engine, staged_layers=staged_layers)
        try:
            yield engine, loads, saves
        finally:  # Else it could not close.
            loads.open()
            saves.open()
        assert_nothing_is_held(engine)


@contextlib.contextmanager
def in_thread(action: Callable[[], object]) -> Iterator[None]:
    """Runs an action beside the `with` block, at whose end it must end too; what it raises is raised there."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the other thread waits for something that does not come"
    if errors:
        raise errors[0]


# Answers.


def take(answer: Answer, num_pieces: int) -> None:
    """Runs the engine until so many pieces of an answer are there."""
    for _ in range(num_pieces):
        next(answer)


# What is held.


def assert_nothing_is_held(engine: Engine) -> None:
    """Checks that an engine without jobs holds nothing of any: slots, pages, staging, tickets, pins, blocks, saves.

    It waits for saves that are under way.
    """
    scheduler, kv, pool = engine._scheduler, engine._kv, engine._runner.pool
    assert scheduler.idle, f"jobs: {scheduler.waiting}, {scheduler.running}"
    assert len({*scheduler._free_slots}) == engine.config.max_batch_size, "a slot did not come back"
    assert not scheduler.prefilling
    assert not engine._batch._prefilling, "a prefill was not let go of"
    assert not pool._rows, "a row of the pool was not given back"
    assert not pool._promised, "pages are promised to nobody"
    kept = {(each.holding.part, page) for each in kv.resident._kept.values() for page in each.holding.pages}
    free = {(part, page) for part, pages in enumerate(pool._free) for page in pages}
    assert pool.num_held == len(kept), "pages were not given back"
    assert len(kept | free) == len(kept) + len(free) == pool.size.num_pages * pool.size.num_parts
    assert engine._runner.sampler._params == [None] * engine.config.max_batch_size
    engine.wait_for_saves()

    assert not engine._batch._savers
    assert not kv._queued, "a turn is announced that does not wait"
    assert kv.histories._preloaded is None, "a load was begun and not let go of"
    assert not kv.write_buffer._turns, "a turn's saving has not ended"
    assert kv.write_buffer.num_bytes == 0, "the write buffer is not empty"
    assert not kv._saver._open, "a save has not ended"

    loader = kv._loader
    assert not loader._loads, "a load is open"
    for stage in loader.staged:
        jax.block_until_ready(stage.computed)
    loader.pump()
    assert not loader.staged, "staging is in use"
    assert loader.buffer.take(loader.buffer.memory.nbytes // 128 * 128) is not None, "the read buffer is not free"
    loader.buffer.give_back()

    _assert_store_is_at_rest(_store(engine))


def _assert_store_is_at_rest(store: AttentionStore) -> None:
    """No ticket is open, nothing is pinned or asked for, and blocks are those of published tokens."""
    entries, blocks, layout = list(store._entries), store._blocks, store.layout
    assert not store._transfers._open_loads, "a load's ticket is open"
    assert not store._entries._pins, "a session is pinned"
    assert len(store._placement._look_ahead) == 0, "a job that is gone is looked ahead to"
    for entry in entries:
        assert not entry.open_saves, f"a save of {entry.key} is open"
        assert entry.num_open_loads == entry.num_pins == 0, f"{entry.key} is held"
        assert not any((entry.requested, entry.waits_for_flush)), f"{entry.key} may not leave DRAM"
        assert entry.fetch is entry.flush is None, f"{entry.key} is on its way"
        assert len(entry.block_ids) == layout.num_blocks(entry.num_tokens), f"{entry.key} has blocks without tokens"
        assert not entry.replaced_blocks, f"{entry.key} holds blocks that nobody loads"
    held = sorted({block for entry in entries for block in entry.block_ids})
    taken = [block for block, is_taken in enumerate(blocks._taken) if is_taken]
    assert taken == held, f"blocks of nobody: {sorted(set(taken) - set(held))}"
    assert blocks.num_free == blocks.num_blocks - len(held)


def _store(engine: Engine) -> AttentionStore:
    """The store itself, behind whatever stands before it."""
    store = engine._kv.store
    return store.store if isinstance(store, ControlledStore) else store
