"""Measures a model's drift on a text, for `--overflow_drift`: what is added to KV that stays when others leave.

    python -m ca_jax.launch.drift --data=text.txt --window=1024 --out=drift.npz
    python -m ca_jax.launch.chat --context_window=1024 --overflow_drift=drift.npz

Any text will do, best one like those that are to come; it is fed under the window, which it overflows again and again,
and what stays is computed anew each time. Drift belongs to weights, window and truncation ratio.

Not here: what drift is (`ca_jax.recompute.drift`), measuring it (`benchmarks.evaluate.stream`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import rich.console
from absl import flags

from ca_jax.launch import texts
from ca_jax.launch.flags import ConfigFlags
from ca_jax.launch.script import note, run
from ca_jax.overflow.config import OverflowConfig
from ca_jax.recompute.drift import measure_drift

FLAGS = flags.FLAGS
_OVERFLOW = ConfigFlags(OverflowConfig(), only=("truncation_ratio", "keep_first_tokens"))


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    texts.define_flags("drift", 10_000)
    flags.DEFINE_integer("window", 1024, "Most tokens of a context.")
    _OVERFLOW.define()


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    overflow = _OVERFLOW.read()
    model, drift = texts.measured(
        lambda model, ids, tell: measure_drift(model, ids, overflow, window=FLAGS.window, on_step=tell)
    )
    drift.save(FLAGS.out)
    lengths = np.stack([np.linalg.norm(each.reshape(2, -1), axis=-1) for each in drift.values])
    moved = f"keys move by {lengths[:, 0].mean():.2f}, values by {lengths[:, 1].mean():.2f} in the mean over"
    told = f"drift of {model.name}, the mean of {drift.num_tokens:,} tokens: {moved} {len(lengths)} layers."
    note(rich.console.Console(), f"{told} Written to {FLAGS.out}", None)


if __name__ == "__main__":
    _define_flags()
    run(main)
