"""An `AttentionStore` whose copies run when a test says so.

    with PacedLink(bytes_per_s=12e9) as link:
        store = ControlledStore(store, loads=link, saves=link)

Not here: who decides (paced), the copies themselves (storage.tickets).
"""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np

from ca_jax.storage.records import MissReason
from ca_jax.storage.store import AttentionStore
from ca_jax.storage.tickets import LoadTicket, SaveTicket, TicketState
from ca_jax.testing.paced import Transfer, Transfers

Future = concurrent.futures.Future


class ControlledLoad:
    """A `LoadTicket` whose copies run when `transfers` says so. All its errors come by the future."""

    def __init__(self, ticket: LoadTicket, transfers: Transfers) -> None:
        self.ticket = ticket
        """The store's."""
        self.key, self.num_tokens, self.from_ssd = ticket.key, ticket.num_tokens, ticket.from_ssd
        self._transfers = transfers
        self._reads: list[Future[None]] = []

    @property
    def state(self) -> TicketState:
        """What became of the load."""
        return self.ticket.state

    def shorten(self, num_tokens: int) -> None:
        """As `LoadTicket.shorten`."""
        self.ticket.shorten(num_tokens)
        self.num_tokens = num_tokens

    def read(self, layer: int, dst: np.ndarray) -> Future[None]:
        """As `LoadTicket.read`, but for when it copies and how errors come."""
        num_bytes = dst.nbytes * self.num_tokens // max(dst.shape[1], 1)
        memory = dst.ctypes.data, dst.ctypes.data + dst.nbytes
        transfer = Transfer("load", self.key, layer, 1, num_bytes, memory=memory)
        future = self._transfers.submit(transfer, lambda: self.ticket.read(layer, dst).result())
        self._reads.append(future)
        return future

    def settle(self) -> None:
        """Waits until no read is under way."""
        concurrent.futures.wait(self._reads)


class ControlledSave:
    """A `SaveTicket` whose copies run when `transfers` says so. Whoever writes waits for that."""

    def __init__(self, ticket: SaveTicket, transfers: Transfers) -> None:
        self.ticket = ticket
        """The store's."""
        self.key, self.token_ids = ticket.key, ticket.token_ids
        self.start_token, self.stop_token, self.num_tokens = ticket.start_token, ticket.stop_token, ticket.num_tokens
        self._transfers = transfers

    @property
    def state(self) -> TicketState:
        """What became of the save."""
        return self.ticket.state

    @property
    def num_missing(self) -> int:
        """How many (layer, token) pairs are not written yet."""
        return self.ticket.num_missing

    def write(self, layer: int, kv: np.ndarray, token_offset: int = 0) -> bool:
        """As `SaveTicket.write`; returns when the transfer is over."""
        transfer = Transfer("save", self.key, layer, 1, kv.nbytes)
        return self._transfers.submit(transfer, lambda: self.ticket.write(layer, kv, token_offset)).result()

    def write_all(self, kv: np.ndarray, token_offset: int = 0) -> bool:
        """As `SaveTicket.write_all`; one transfer, of all layers."""
        transfer = Transfer("save", self.key, None, len(kv), kv.nbytes)
        return self._transfers.submit(transfer, lambda: self.ticket.write_all(kv, token_offset)).result()


class ControlledStore:
    """An `AttentionStore` whose tickets copy when `loads` and `saves` say so; everything else is the store's.

    Args:
      store: the store itself.
      loads: for tickets of loads; None leaves them as they are.
      saves: for tickets of saves, perhaps the same; None leaves them as they are.
    """

    def __init__(
        self, store: AttentionStore, *, loads: Transfers | None = None, saves: Transfers | None = None
    ) -> None:
        self.store = store
        """What stands behind it."""
        self._loads, self._saves = loads, saves

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def prepare_load(self, *args: Any, **options: Any) -> LoadTicket | ControlledLoad | None:
        """As `AttentionStore.prepare_load`."""
        ticket = self.store.prepare_load(*args, **options)
        return ticket if ticket is None or self._loads is None else ControlledLoad(ticket, self._loads)

    def complete_load(self, ticket: LoadTicket | ControlledLoad) -> None:
        """As `AttentionStore.complete_load`: waits for reads under way."""
        self.store.complete_load(_settled(ticket))

    def abort_load(self, ticket: LoadTicket | ControlledLoad, reason: MissReason = MissReason.ABORTED) -> None:
        """As `AttentionStore.abort_load`: waits for reads under way."""
        self.store.abort_load(_settled(ticket), reason)

    def prepare_save(self, *args: Any, **options: Any) -> SaveTicket | ControlledSave | None:
        """As `AttentionStore.prepare_save`."""
        ticket = self.store.prepare_save(*args, **options)
        return ticket if ticket is None or self._saves is None else ControlledSave(ticket, self._saves)

    def complete_save(self, ticket: SaveTicket | ControlledSave) -> bool:
        """As `AttentionStore.complete_save`."""
        return self.store.complete_save(ticket.ticket if isinstance(ticket, ControlledSave) else ticket)

    def abort_save(self, ticket: SaveTicket | ControlledSave) -> None:
        """As `AttentionStore.abort_save`. A write under way returns False then, when its transfer is over."""
        self.store.abort_save(ticket.ticket if isinstance(ticket, ControlledSave) else ticket)


def _settled(ticket: LoadTicket | ControlledLoad) -> LoadTicket:
    if not isinstance(ticket, ControlledLoad):
        return ticket
    ticket.settle()
    return ticket.ticket
