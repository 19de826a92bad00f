"""Links of a set pace between store and device, for engines whose loads or saves take as long as a suite says.

Not here: what is measured over them (`suites.preload`, `suites.save`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from benchmarks.engines import make_engine
from benchmarks.paced import ControlledStore, Future, PacedLink, Result, Timer, Transfer
from ca_jax.config import EngineConfig
from ca_jax.engine import Engine
from ca_jax.pretrained import LoadedModel
from ca_jax.storage.store import AttentionStore

CALIBRATIONS = 3
"""Samples of compute alone that a link's pace is set by."""


class AdjustableLink(PacedLink):
    """A `PacedLink` that hardly uses the CPU; endless at first.

    A load whose bytes the same load has put there before, and no other since, takes its time and copies nothing: a
    device's copy engine would not take cores from what computes either. What is stored must stay the same meanwhile.
    """

    def __init__(self, timer: Timer | None = None) -> None:
        super().__init__(timer=timer, copies_early=True)
        self._present: dict[tuple[int, int], Transfer] = {}  # What lies where.

    def submit(self, transfer: Transfer, copy: Callable[[], Result]) -> Future[Result]:
        """See `Transfers`."""
        if transfer.memory is None:
            return super().submit(transfer, copy)
        if self._present.get(transfer.memory) == transfer:
            return super().submit(transfer, cast(Callable[[], Result], lambda: None))
        start, stop = transfer.memory
        for each in [each for each in self._present if each[0] < stop and start < each[1]]:
            del self._present[each]
        self._present[transfer.memory] = transfer
        return super().submit(transfer, copy)


def paced_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    loads: AdjustableLink | None = None,
    saves: AdjustableLink | None = None,
) -> Engine:
    """An engine that is ready, as of `make_engine`, whose loads or saves go over a link; None: memory as it is."""

    def wrap(store: AttentionStore) -> AttentionStore:
        return cast(AttentionStore, ControlledStore(store, loads=loads, saves=saves))

    engine = make_engine(model, config, store_wrapper=wrap if loads or saves else None)
    engine.wait_until_ready()  # First touch would share the memory bus with the samples.
    return engine
