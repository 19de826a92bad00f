"""Which tokens of a context of chunks are computed anew: what is loaded and what is not, made into a plan.

Not here: how they are chosen and computed (fusion), what is loaded (histories), rates (rate_meter).
Source: the loading controller, CacheBlend (Yao et al., EuroSys 2025), section 5.1.
"""

from __future__ import annotations

import numpy as np

from ca_jax.blend_config import BlendConfig
from ca_jax.fused_history import FusedHistory
from ca_jax.fusion import FusionPlan, TokenKind
from ca_jax.histories import History
from ca_jax.layer_loader import LayerLoad
from ca_jax.repair import RepairedHistory
from ca_jax.runner import Runner
from ca_jax.shared_load import SharedLoad


class Blending:
    """Plans how contexts are blended. Belongs to the engine's thread.

    Args:
      config: the engine's.
      runner: computes.
    """

    def __init__(self, config: BlendConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner

    def fused(
        self,
        token_ids: list[int],
        history: History,
        num_own: int,
        source: LayerLoad | SharedLoad | RepairedHistory,
    ) -> FusedHistory:
        """A history with chunks as its prefill should read it.

        Args:
          token_ids: of the prompt.
          history: on its way.
          num_own: its first tokens whose KV is the session's own.
          source: gives its layers, the session's own tokens as they should be read.
        """
        kinds = np.full(history.num_places, TokenKind.NEW, np.int8)
        kinds[:num_own] = TokenKind.EXACT
        for span in history.chunks:
            kinds[span.start : span.stop] = TokenKind.STORED if span.start else TokenKind.EXACT
        is_exact = kinds == TokenKind.EXACT
        start = len(kinds) if is_exact.all() else int(np.argmin(is_exact))
        plan = FusionPlan(
            num_layers=self._runner.num_layers,
            start=start,
            kinds=kinds[start:],
            chunk_starts=tuple(span.start for span in history.chunks if span.start),
            ratio=history.recompute_ratio,
            check_layers=self._config.check_layers,
            selection=self._config.selection,
        )
        return FusedHistory(source, plan, token_ids[: len(kinds)], self._runner)
