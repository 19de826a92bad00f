"""A process's share of a history that several processes load at once.

Not here: what is loaded (load), how it is staged (layer_loader).
"""

from __future__ import annotations

import logging

import jax

from ca_jax.device.processes import Processes, least
from ca_jax.device.runner import Runner
from ca_jax.errors import ProcessesError
from ca_jax.kv.layer_loader import LayerLoad, LoadError

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
