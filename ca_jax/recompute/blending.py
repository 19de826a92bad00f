"""Which tokens of a context of chunks are computed anew: what is loaded and what is not, made into a plan.

Not here: how they are chosen and computed (fusion), what is loaded (histories), rates (rate_meter).
Source: the loading controller, CacheBlend (Yao et al., EuroSys 2025), section 5.1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ca_jax.config import BlendConfig
from ca_jax.device.runner import LayerSource, Runner
from ca_jax.kv.histories import History
from ca_jax.recompute.fused_history import FusedHistory, warm_up_fusion
from ca_jax.recompute.fusion import FusionPlan, TokenKind
from ca_jax.turns.chunks import ChunkSpan


class Blending:
    """Plans how contexts are blended. Belongs to the engine's thread.

    Args:
      config: the engine's.
      runner: computes.
    """

    def __init__(self, config: BlendConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner

    def fused(self, token_ids: list[int], history: History, num_own: int, source: LayerSource) -> FusedHistory:
        """A history with chunks as its prefill should read it.

        Args:
          token_ids: of the prompt.
          history: on its way.
          num_own: its first tokens whose KV is the session's own.
          source: gives its layers, the session's own tokens as they should be read.
        """
        plan = self._plan(history.num_places, num_own, history.chunks, history.recompute_ratio)
        return FusedHistory(source, plan, token_ids[: history.num_places], self._runner)

    def warm_up(self, chunk_tokens: Sequence[int], ratio: float) -> None:
        """Compiles what a context of such chunks at the beginning of a conversation needs, by running it.

        Args:
          chunk_tokens: of each, in order.
          ratio: share of them that is computed anew.
        """
        starts = itertools.accumulate(chunk_tokens, initial=0)
        spans = tuple(ChunkSpan("", start, size) for start, size in zip(starts, chunk_tokens, strict=False))
        warm_up_fusion(self._runner, self._plan(sum(chunk_tokens), 0, spans, ratio))

    def _plan(self, num_places: int, num_own: int, spans: Sequence[ChunkSpan], ratio: float) -> FusionPlan:
        kinds = np.full(num_places, TokenKind.NEW, np.int8)
        kinds[:num_own] = TokenKind.EXACT
        for span in spans:
            kinds[span.start : span.stop] = TokenKind.STORED if span.start else TokenKind.EXACT
        is_exact = kinds == TokenKind.EXACT
        start = len(kinds) if is_exact.all() else int(np.argmin(is_exact))
        return FusionPlan(
            num_layers=self._runner.num_layers,
            start=start,
            kinds=kinds[start:],
            chunk_starts=tuple(span.start for span in spans if span.start),
            ratio=ratio,
            check_layers=self._config.check_layers,
            selection=self._config.selection,
        )
