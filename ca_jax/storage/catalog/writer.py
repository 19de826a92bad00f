"""The catalog as the SSD's writing thread changes it: in order, with what could not be changed made up for.

Changes that free blocks (`forget`, `cut`) have to be durable before anything is written over those blocks. One that
cannot be made is tried again before the next write, and until it is made nothing is written at all.

Nothing here raises for what a disk or catalog does. All calls belong to the writing thread.

Not here: the catalog itself (catalog), when what changes (ssd), blocks (tiers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np

from ca_jax.storage.catalog.catalog import Catalog
from ca_jax.storage.catalog.file import CatalogCorruptError, CatalogError, CatalogFullError, quarantine
from ca_jax.storage.catalog.records import DamagedRecordError, SessionRecord
from ca_jax.storage.records import BlockIoError, IoFailure
from ca_jax.storage.tokens import Lineage

_LOG = logging.getLogger(__name__)


class CatalogWriter:
    """Changes a catalog. No other thread or process may.

    Args:
      catalog: the keeper's from now on.
      on_lost: called with the key of a session that had to be forgotten, since it could not be cut, or was not there.
    """

    def __init__(self, catalog: Catalog, on_lost: Callable[[str], None]) -> None:
        self._catalog = catalog
        self._on_lost = on_lost
        self._unforgotten: set[str] = set()  # What the catalog still names and must not, before anything is written.
        self._is_beyond_use = False  # Whether the catalog is damaged where it would be written.

    def settle(self) -> BlockIoError | None:
        """Makes outstanding changes durable; why not, if that cannot be, or if nothing can."""
        if not self._catalog.is_in_place():
            return BlockIoError(IoFailure.CATALOG, "the catalog must be in its directory; it is gone or was replaced")
        if not self._unforgotten:
            return None
        try:
            self._catalog.forget(self._unforgotten)
        except CatalogError as error:
            return self._failure(error)
        self._unforgotten.clear()
        return None

    def publish(
        self,
        record: SessionRecord,
        token_ids: np.ndarray,
        new_sums: np.ndarray,
        num_kept_blocks: int,
        note: bytes | None,
    ) -> BlockIoError | None:
        """Publishes a session, some leading blocks of which are published already; why not, if that cannot be.

        Args:
          record: the session.
          token_ids: int32 `[num_tokens]`.
          new_sums: uint32 `[n, L]`, the checksums of the blocks behind those that stay.
          num_kept_blocks: how many stay.
          note: what to keep with it; None keeps what is kept.
        """
        error = self.settle()
        if error is not None:
            return error
        try:
            kept = self._catalog.contents(record.key)
            kept_sums = np.empty_like(new_sums, shape=(0, new_sums.shape[1])) if kept is None else kept.sums
            if len(kept_sums) < num_kept_blocks:
                raise DamagedRecordError(
                    f"session {record.key!r} must have {num_kept_blocks} blocks to stay, got {len(kept_sums)}"
                )
            if note is None:
                note = b"" if kept is None else kept.note
            sums = np.concatenate([kept_sums[:num_kept_blocks], new_sums])
            self._catalog.publish(record, token_ids, sums, note)
        except DamagedRecordError as failure:
            return BlockIoError(IoFailure.CORRUPT, str(failure))
        except CatalogError as failure:
            return self._failure(failure)
        return None

    def forget(self, keys: tuple[str, ...]) -> None:
        """Forgets sessions."""
        self._unforgotten.update(keys)
        error = self.settle()
        if error is not None:
            _LOG.warning("%d sessions are to be forgotten before anything is written: %s", len(keys), error)

    def cut(self, key: str, kept: np.ndarray, lineage: Lineage, note: bytes | None) -> bool:
        """Forgets some of a session's tokens, see `Catalog.cut`; all of it, where that cannot be written down.

        Returns:
          Whether the session is there still.
        """
        if key in self._unforgotten:
            return False
        try:
            if self._catalog.cut(key, kept, lineage, note) is not None:
                return True
            self._on_lost(key)
        except (CatalogError, ValueError) as error:  # ValueError: the catalog has another state than the index.
            _LOG.warning("a session cannot be cut, and is forgotten: %s", error)
            self._on_lost(key)
            self.forget((key,))
        return False

    def change(self, key: str, pinned: bool, ttl_s: float | None) -> BlockIoError | None:
        """Writes down a session's pin and time to live; why not, if that cannot be."""
        return self._changed(key, lambda: self._catalog.set_kept(key, pinned, ttl_s))

    def set_note(self, key: str, note: bytes) -> BlockIoError | None:
        """Writes down what is kept with a session; why not, if that cannot be."""
        return self._changed(key, lambda: self._catalog.set_note(key, note))

    def use(self, times_s: Mapping[str, float]) -> None:
        """Writes down when sessions were last used, seconds since the epoch."""
        try:
            self._catalog.touch_used(times_s)
        except CatalogError as error:
            _LOG.warning("when sessions were last used was not written down: %s", error)

    def close(self) -> None:
        """Closes the catalog. One that is damaged is moved aside: nothing could ever be written again with it."""
        self._catalog.close()
        if not self._is_beyond_use:
            return
        try:
            moved = quarantine(self._catalog.directory)
        except CatalogError as error:
            _LOG.warning("a damaged catalog stays where it is: %s", error)
        else:
            _LOG.warning("the catalog is damaged, and was moved to %s", moved)

    def _changed(self, key: str, change: Callable[[], bool]) -> BlockIoError | None:
        try:
            if change():
                return None
        except CatalogError as error:
            _LOG.warning("a session's pin, note or time to live is not written down yet: %s", error)
            return self._failure(error)
        self._on_lost(key)
        return BlockIoError(IoFailure.MISSING, f"the catalog must have session {key!r}, got none")

    def _failure(self, error: CatalogError) -> BlockIoError:
        self._is_beyond_use |= isinstance(error, CatalogCorruptError)
        reason = IoFailure.NO_SPACE if isinstance(error, CatalogFullError) else IoFailure.CATALOG
        return BlockIoError(reason, str(error))
