"""What of a turn's history is loaded: KV of its first tokens and of chunks, pages that have it, and a state behind it.

Where several processes load it at once, each has its share of it.

Not here: choosing and beginning it (load), how it is staged (layer_loader), computing behind it (serving.batch).
"""

from __future__ import annotations

import dataclasses
import logging

import jax

from ca_jax.device.pages import Holding
from ca_jax.device.processes import Processes, least
from ca_jax.device.runner import Runner
from ca_jax.device.states import StatePool
from ca_jax.errors import ProcessesError
from ca_jax.kv.layer_loader import LayerLoad, LoadError
from ca_jax.kv.snapshots import Snapshot
from ca_jax.storage.tickets import LoadTicket
from ca_jax.turns.text import ChunkSpan

_LOG = logging.getLogger(__name__)


class SharedLoad:
    """This process's share of a history that several load at once, each its own heads; a `passes.LayerSource`.

    All have to dispatch the same layers. Where a layer cannot be read the pass goes on over zeros, and its end tells
    the others: then nobody uses what it gave.
    """

    def __init__(self, load: LayerLoad, runner: Runner) -> None:
        self.error: Exception | None = None  # What broke it.
        self._load = load
        self._runner = runner

    def layer(self, layer: int) -> jax.Array:
        """See `passes.LayerSource`; zeros from the layer on that broke."""
        if self.error is None:
            try:
                return self._load.layer(layer)
            except Exception as error:  # For `check`: raised now, the others would wait for this process forever.
                _LOG.warning("layer %d of a history could not be loaded", layer, exc_info=True)
                self.error = error
        return self._runner.empty_kv(layer, self._load.num_places(layer))

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `passes.LayerSource`."""
        if self.error is None:
            self._load.computed(layer, result)

    def check(self, processes: Processes) -> None:
        """Raises where the load broke, or staging it, on any process: what was computed from it is nothing then.

        Raises:
          LoadError: it could not be read.
          ProcessesError: what was read could not be brought to its devices.
        """
        error = self.error
        is_sound = error is None or isinstance(error, LoadError)
        are_loaded, are_sound = least(processes, "loaded", (error is None, is_sound))
        if not are_sound:
            raise ProcessesError("a shard of the history could not be brought to its devices") from error
        if not are_loaded:
            raise LoadError("a shard of the history could not be read") from error


@dataclasses.dataclass(eq=False)
class History:
    """What of a turn's history is loaded."""

    key: str
    """Of its session, in the store."""
    load: LayerLoad | None
    """On its way; None where nothing is loaded."""
    source: LayerLoad | SharedLoad | None
    """What its prefill takes layers from."""
    num_stored: int
    """Tokens whose KV is stored, and need not be saved again."""
    num_slid: int
    """First tokens of the conversation that no layer looks back to, of which nothing is stored."""
    predicted_s: float | None
    """What prefilling over it is predicted to take; None without rates."""
    chunks: tuple[ChunkSpan, ...] = ()
    """Chunks that are loaded, each to its place. Between them is room for what is not."""
    missed_chunks: int = 0
    """Chunks of its context that are not."""
    num_resident: int = 0
    """Tokens whose KV is on the device still, so that nothing is loaded."""
    resident: Holding | None = None
    """The pages of those, until a row has them."""
    first_seen: tuple[int, ...] = ()
    """Of each layer the first of its tokens whose KV is loaded, or there: no later token sees those before it. Nothing
    said: all are."""
    snapshot: Snapshot | None = None
    """The states behind these tokens. None if no layer of the model keeps one, or if none are stored."""

    @property
    def tickets(self) -> tuple[LoadTicket, ...]:
        """Open loads of the store."""
        return () if self.load is None else tuple(ticket for ticket, _ in self.load.ticket.parts)

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all that is loaded, and of its session."""
        return (self.key, *(ticket.key for ticket in self.tickets))

    @property
    def broken(self) -> set[str]:
        """Keys of what of it could not be read, where more than one was."""
        return self.load.ticket.broken if self.load is not None and len(self.tickets) > 1 else set()

    @property
    def num_places(self) -> int:
        """Places that need not be computed: the first ones of the context."""
        return self.num_resident if self.load is None else self.load.ticket.num_tokens

    @property
    def num_loaded(self) -> int:
        """Tokens whose KV is loaded, or there: the first ones, unless there are chunks."""
        return self.num_resident + sum(ticket.num_tokens for ticket in self.tickets)

    @property
    def from_ssd(self) -> bool:
        """Whether they were fetched from SSD for this load."""
        return self.load is not None and self.load.ticket.from_ssd

    @property
    def tier(self) -> str:
        """Where they were: `device`, `ssd` or `dram`."""
        return "device" if self.num_resident else "ssd" if self.from_ssd else "dram"

    def restore(self, states: StatePool, row: int) -> LoadError | None:
        """Has a row stand where the snapshot does, if there is one; what broke, if that could not be read. Waits.

        Or what of its KV was to come, and will not.
        """
        if self.load is not None and self.load.ticket.is_broken:
            return LoadError("KV that was to be read as it came did not come")
        return None if self.snapshot is None else self.snapshot.restore(states, row)
