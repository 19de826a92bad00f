"""A history that several processes load at once, each its own heads: what breaks on one must stop none.

All have to dispatch the same layers. Where a layer cannot be read the pass goes on over zeros instead, and its end
tells the others: then nobody uses what it gave.

Not here: loading (load), agreeing (processes), beginning anew (prefilling).
"""

from __future__ import annotations

import logging

import jax

from ca_jax.device.runner import Runner
from ca_jax.kv.load import LayerLoad

_LOG = logging.getLogger(__name__)


class SharedLoad:
    """This process's share of a load; to a prefill it is like any other history.

    Args:
      load: of this process.
      runner: gives zeros.
    """

    def __init__(self, load: LayerLoad, runner: Runner) -> None:
        self.error: Exception | None = None
        """What broke it."""
        self._load = load
        self._runner = runner

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self._load.num_layers

    def layer(self, layer: int) -> jax.Array:
        """See `runner.LayerSource`; zeros from the layer on that broke."""
        if self.error is None:
            try:
                return self._load.layer(layer)
            except Exception as error:  # For `check`: raised now, the others would wait for this process forever.
                _LOG.warning("layer %d of a history could not be loaded", layer, exc_info=True)
                self.error = error
        empty = self._runner.empty_kv(self._runner.padded_history(self._load.ticket.num_tokens))
        return self._runner.at_rest(empty)

    def computed(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`."""
        if self.error is None:
            self._load.computed(layer, result)

    def used(self, layer: int, result: jax.Array) -> None:
        """See `runner.LayerSource`."""
        if self.error is None:
            self._load.used(layer, result)
