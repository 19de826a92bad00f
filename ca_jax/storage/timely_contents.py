"""What the catalog says, for a thread that must not wait for a disk: asked on another thread, waited for so long.

Not here: what becomes of a deadline that was missed (ssd_books).
"""

from __future__ import annotations

import concurrent.futures

from ca_jax.storage.catalog_file import CatalogLateError
from ca_jax.storage.catalog_reader import CatalogReader
from ca_jax.storage.catalog_records import Namespace
from ca_jax.storage.catalog_rows import Contents
from ca_jax.storage.step_thread import StepThread

_CLOSE_S = 1.0


class TimelyContents:
    """See `SsdContents`. Belongs to the bookkeeping thread.

    Args:
      reader: of the catalog; this one's from now on.
      deadline_s: seconds after which a question is given up. Until its answer has come no other is asked.
    """

    def __init__(self, reader: CatalogReader, deadline_s: float) -> None:
        self._reader = reader
        self._deadline_s = deadline_s
        self._thread = StepThread("ca_jax-ssd-catalog")
        self._asked: concurrent.futures.Future[Contents | None] | None = None

    @property
    def namespace(self) -> Namespace:
        """Whose sessions these are."""
        return self._reader.namespace

    def contents(self, key: str) -> Contents | None:
        """See `SsdContents`."""
        if self._asked is not None and not self._asked.done():
            raise CatalogLateError("the catalog must answer one question at a time, and has not answered the last")
        future = self._asked = concurrent.futures.Future[Contents | None]()

        def answer() -> None:
            try:
                future.set_result(self._reader.contents(key))
            except BaseException as error:  # Whoever asks is told.
                future.set_exception(error)

        self._thread.put(answer)
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            raise CatalogLateError(f"the catalog must answer within {self._deadline_s} s, and did not") from None

    def close(self) -> None:
        """See `SsdContents`. The file of a reader that does not answer stays open."""
        self._thread.end()
        if self._thread.join(_CLOSE_S):
            self._reader.close()
