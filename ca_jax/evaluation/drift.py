"""Measuring drift: contexts of a text are truncated again and again, and what stays is computed anew each time.

Not here: what drift is, and its file (ca_jax.recompute.drift).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ca_jax.device.transfer import to_host
from ca_jax.evaluation.stream import ContextStream
from ca_jax.overflow.config import OverflowConfig, num_leaving, oldest_first
from ca_jax.pretrained import LoadedModel
from ca_jax.recompute.drift import Drift

_UNSETTLED = 0.1  # Share of the window behind the cut whose KV moves in a way of its own: those tokens lose most.


def measure_drift(
    model: LoadedModel,
    token_ids: Sequence[int],
    overflow: OverflowConfig,
    *,
    window: int,
    on_step: Callable[[int], None] | None = None,
) -> Drift:
    """Measures the drift of a model.

    Args:
      model: whose.
      token_ids: of any text; two windows long at least, and better ten.
      overflow: how much leaves, and how many first tokens stay.
      window: most tokens of the context.
      on_step: called with the number of tokens of each step that is done.

    Raises:
      ValueError: the text is too short to overflow.
    """
    again = dataclasses.replace(overflow, method="tt", drift=None)
    stream = ContextStream(model, again, window=window)
    count = num_leaving(again, window=window, num_tokens=window, num_wanted=1)
    settled = again.keep_first_tokens + round(_UNSETTLED * window)
    total, num_tokens, start = np.zeros(0), 0, 0
    while start < len(token_ids):
        part = token_ids[start : start + window - len(stream.token_ids)]
        stream.extend(part, on_step)
        start += len(part)
        if len(stream.token_ids) < window or window - count <= settled:
            break
        discarded = oldest_first(window, count, again.keep_first_tokens)
        stale = np.stack([to_host(kv)[:, :window][:, ~discarded] for kv in stream.kv])
        stream.truncate(discarded)
        fresh = np.stack([to_host(kv)[:, : window - count] for kv in stream.kv])
        moved = (fresh.astype(np.float64) - stale)[:, :, settled:]  # [L, 2, T, K, H]
        total = total + moved.sum(2) if num_tokens else moved.sum(2)
        num_tokens += moved.shape[2]
    if not num_tokens:
        raise ValueError(
            f"the text must have at least {window} tokens, and more than {settled} of them must stay; "
            f"got {len(token_ids)}, of which {window - count} would"
        )
    return Drift(
        values=(total / num_tokens).astype(np.float32),
        fingerprint=model.fingerprint,
        window=window,
        truncation_ratio=overflow.truncation_ratio,
        num_tokens=num_tokens,
    )
