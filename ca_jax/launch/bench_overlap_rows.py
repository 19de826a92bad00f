"""What the samples of the suites of overlap come to: rows and summaries, by arithmetic alone.

Not here: taking samples (`bench_preload`, `bench_save`), what rows hold (`bench_overlap_schema`), what times should be
(`costs`).
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ca_jax.kv import costs
from ca_jax.kv.rates import Rates
from ca_jax.launch.bench_overlap_schema import DepthRow, PreloadRow, SaveRow, StreamRow
from ca_jax.launch.bench_schema import Samples

NOISE = 0.03
"""Times that differ by less, as a share, count as the same where the best depth is looked for."""


PreloadRound = Mapping[str, Mapping[str, float]]
"""A sample of each way to load: `ttft_s`, `head_start_s`, `load_s` and `load_stall_s`, by read buffer or `compute`."""

COMPUTE = "compute"
"""The way whose history is on the device before the turn begins; `all` is taken for it where there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreloadCell:
    """What the rows of one history and one speed have in common; see `PreloadRow` for its fields."""

    link: str
    """`real` or `paced`."""
    load_ratio: float | None
    """Load over compute, as asked for."""
    history_tokens: int
    """Stored."""
    new_tokens: int
    """Of the turn."""
    num_layers: int
    """L, of the model."""
    load_s: float
    """Of all layers."""
    same_tokens: bool
    """Of all ways."""
    recompiles: int
    """Of all ways."""

    def rows(self, rounds: Sequence[PreloadRound]) -> list[PreloadRow]:
        """The rows of the cell's ways but `compute`.

        Args:
          rounds: of the same ways, `off` among them.
        """
        compute_way = COMPUTE if COMPUTE in rounds[0] else "all"
        compute_s, off_s = (statistics.median(each[way]["ttft_s"] for each in rounds) for way in (compute_way, "off"))
        rows = []
        for read_buffer in rounds[0]:
            if read_buffer != COMPUTE:
                samples = Samples()
                for each in rounds:
                    sample = each[read_buffer]
                    ideal_s = self._ideal_s(read_buffer, each[compute_way]["ttft_s"], sample["head_start_s"])
                    samples.add(**sample, **({} if ideal_s is None else {"ratio": sample["ttft_s"] / ideal_s}))
                rows.append(self._row(read_buffer, samples, compute_s, off_s))
        return rows

    def depth_row(
        self, rows: Sequence[PreloadRow], load_ratio: float, rates: Rates, padded: tuple[int, int]
    ) -> DepthRow:
        """How deep the read buffer should be.

        Args:
          rows: of the cell, none of them `recompute`.
          load_ratio: of the cell.
          rates: that an engine measured over the same link.
          padded: the history and new tokens that are computed for the turn's.
        """
        ttft_s = {self._depth(row.read_buffer): row.ttft_s for row in rows if row.read_buffer not in ("off", "auto")}
        as_fast_s = min(ttft_s.values()) * (1 + NOISE)
        compute_s, head_start_s = rows[0].compute_s, statistics.median(row.head_start_s for row in rows)
        return DepthRow(
            load_ratio=load_ratio,
            by_rates=max(
                1,
                costs.read_buffer_layers(rates, self.history_tokens, self.new_tokens, padded=lambda *_: padded),
            ),
            best=costs.best_depth(*self._of_layer(compute_s), self.num_layers, head_start_s),
            measured_best=min(depth for depth, time_s in ttft_s.items() if time_s <= as_fast_s),
            noise=NOISE,
            rates_load_s=costs.load_s(rates, self.history_tokens),
            load_s=self.load_s,
            rates_compute_s=costs.prefill_s(rates, *padded),
            compute_s=compute_s,
        )

    def _row(self, read_buffer: str, samples: Samples, compute_s: float, off_s: float) -> PreloadRow:
        ttft_s, head_start_s = samples.median("ttft_s"), samples.median("head_start_s")
        blocking_s, hidden = off_s - compute_s, None
        if read_buffer != "recompute" and blocking_s > 0:
            hidden = costs.hidden_fraction(ttft_s, compute_s, blocking_s)
        shared, spread = dataclasses.asdict(self), samples.spread()
        del shared["num_layers"], spread["load_s"]
        return PreloadRow(
            **shared,
            read_buffer=read_buffer,
            ttft_s=ttft_s,
            ideal_s=self._ideal_s(read_buffer, compute_s, head_start_s),
            ratio=samples.median_or_none("ratio"),
            hidden=hidden,
            compute_s=compute_s,
            load_stall_s=samples.median("load_stall_s"),
            head_start_s=head_start_s,
            spread=spread,
        )

    def _ideal_s(self, read_buffer: str, compute_s: float, head_start_s: float) -> float | None:
        if read_buffer == "recompute":
            return None
        layer_times_s = self._of_layer(compute_s)
        if read_buffer == "off":
            return costs.blocking_s(*layer_times_s, self.num_layers)
        return costs.pipeline_s(*layer_times_s, self.num_layers, self._depth(read_buffer), head_start_s)

    def _depth(self, read_buffer: str) -> int:
        return self.num_layers if read_buffer in ("all", "auto") else int(read_buffer)

    def _of_layer(self, compute_s: float) -> tuple[float, float]:
        """Load and compute of one layer."""
        return self.load_s / self.num_layers, compute_s / self.num_layers


def summarize_preload(rows: Sequence[PreloadRow | DepthRow]) -> dict[str, Any]:
    """What the rows of `preload` come to; None where there is no row for it.

    - `load_hidden`: where load and compute take the same, the fraction of the blocking load that a read buffer of all
      layers hides.
    - `worst_ttft_vs_ideal`, `best_ttft_vs_ideal`: largest and smallest `ratio` of the paced rows.
    - `worst_depth_error`: most layers between the read buffer that the rates gave and the best one.
    - `ttft_saved_by_read_buffer`: at real speed, by read buffer, the share of the TTFT without pre-loading that it
      saves: median of the history lengths.
    - `same_tokens`, `recompiles`: of all rows.
    """
    turns = [row for row in rows if isinstance(row, PreloadRow)]
    cells = {(row.link, row.load_ratio, row.history_tokens): row.recompiles for row in turns}
    ratios = [row.ratio for row in turns if row.link == "paced" and row.ratio is not None]
    hidden = [row.hidden for row in turns if row.load_ratio == 1 and row.read_buffer == "all"]
    real = [row for row in turns if row.link == "real"]
    off_s = {row.history_tokens: row.ttft_s for row in real if row.read_buffer == "off"}
    saved = collections.defaultdict(list)
    for row in real:
        if row.read_buffer not in ("off", "recompute"):
            saved[row.read_buffer].append(1 - row.ttft_s / off_s[row.history_tokens])
    return {
        "load_hidden": hidden[0] if hidden else None,
        "worst_ttft_vs_ideal": max(ratios, default=None),
        "best_ttft_vs_ideal": min(ratios, default=None),
        "worst_depth_error": max(
            (abs(row.by_rates - row.best) for row in rows if isinstance(row, DepthRow)), default=None
        ),
        "ttft_saved_by_read_buffer": {name: statistics.median(shares) for name, shares in saved.items()},
        "same_tokens": all(row.same_tokens for row in turns),
        "recompiles": sum(cells.values()),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCell:
    """What was measured of one prompt and one speed besides times; see `SaveRow` for its fields."""

    link: str
    """`real` or `paced`."""
    save_ratio: float | None
    """Save over turn, as asked for."""
    prompt_tokens: int
    """Of the turn."""
    answer_tokens: int
    """Of the turn."""
    save_s: float | None
    """What the link takes."""
    same_tokens: bool
    """Of all three ways."""
    recompiles: int
    """Of all three ways."""

    def row(self, samples: Samples) -> SaveRow:
        """The cell's row.

        Args:
          samples: as of `save_round`.
        """
        off_s, async_s, blocking_s = (samples.median(f"turn_{way}_s") for way in ("off", "async", "blocking"))
        added_s = blocking_s - off_s
        return SaveRow(
            **dataclasses.asdict(self),
            turn_off_s=off_s,
            turn_async_s=async_s,
            turn_blocking_s=blocking_s,
            async_overhead=samples.median("async_overhead"),
            blocking_overhead=samples.median("blocking_overhead"),
            async_gain=samples.median("async_gain"),
            hidden=costs.hidden_fraction(async_s, off_s, added_s) if added_s > 0 else None,
            spread=samples.spread(),
        )


def save_round(off_s: float, async_s: float, blocking_s: float) -> dict[str, float]:
    """The samples of one round of `save`, by the fields of `SaveRow` that are their medians.

    Args:
      off_s: of the turn without a store.
      async_s: of the turn with saves beside it.
      blocking_s: of the turn with a save at its end.
    """
    return {
        "turn_off_s": off_s,
        "turn_async_s": async_s,
        "turn_blocking_s": blocking_s,
        "async_overhead": async_s / off_s - 1,
        "blocking_overhead": blocking_s / off_s - 1,
        "async_gain": 1 - async_s / blocking_s,
    }


def stream_round(off_s: float, on_s: float) -> dict[str, float]:
    """Likewise of `StreamRow`."""
    return {"stream_off_s": off_s, "stream_on_s": on_s, "overhead": on_s / off_s - 1}


def summarize_save(rows: Sequence[SaveRow | StreamRow]) -> dict[str, Any]:
    """What the rows of `save` come to; None where there is no row for it.

    - `save_hidden`: where the save takes as long as the turn, the fraction of the blocking save that is hidden.
    - `save_overhead`: at real speed, the most that saving beside a turn adds to it, as a share.
    - `worst_async_gain`, `best_async_gain`: at real speed, by what share saving beside a turn shortens it against
      saving at its end.
    - `store_overhead`: by what share the store slows a stream of turns that never come back.
    - `same_tokens`, `recompiles`: of all rows.
    """
    turns = [row for row in rows if isinstance(row, SaveRow)]
    hidden = [row.hidden for row in turns if row.save_ratio == 1]
    real = [row for row in turns if row.link == "real"]
    overheads = [row.overhead for row in rows if isinstance(row, StreamRow)]
    return {
        "save_hidden": hidden[0] if hidden else None,
        "save_overhead": max((row.async_overhead for row in real), default=None),
        "worst_async_gain": min((row.async_gain for row in real), default=None),
        "best_async_gain": max((row.async_gain for row in real), default=None),
        "store_overhead": overheads[0] if overheads else None,
        "same_tokens": all(row.same_tokens for row in rows),
        "recompiles": sum(row.recompiles for row in rows),
    }
