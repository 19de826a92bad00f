"""Converts any model that can be loaded into an orbax checkpoint, which loads without dequantising.

    python -m ca_jax.launch.convert --model=smollm2-135m-instruct --output_dir=smollm2_orbax --dtype=bfloat16

Weights are read and written a few at a time: memory for the largest one is enough.

`--dry_run` does what `ca_jax.launch.plan` does, by its flags.

Not here: the formats themselves (`ca_jax.models`), what a model would take of each device (`launch.plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import app, flags, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch import plan
from ca_jax.launch.flags import refuse
from ca_jax.launch.script import note, run
from ca_jax.launch.terminal import progress_bars
from ca_jax.models import orbax, weights
from ca_jax.models.checkpoint import load_checkpoint

FLAGS = flags.FLAGS


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    flags.DEFINE_string("model", None, "Preset, .gguf file, Hugging Face directory or hub name (org/name) to convert.")
    flags.DEFINE_string("output_dir", None, "Where to write; must be new or empty.")
    flags.DEFINE_boolean("dry_run", False, "Do as `ca_jax plan` does, by the other flags: read and write nothing.")
    plan.define()


def convert(model: str, output_dir: Path, dtype: str) -> None:
    """Reads `model` and writes it under `output_dir`, with a progress bar.

    Raises:
      CheckpointError: `output_dir` is not empty, or the model is damaged.
      CaJaxError: whatever else `load_checkpoint` refuses.
    """
    orbax.require_empty(output_dir)
    console = rich.console.Console(stderr=True)
    with progress_bars(console) as progress:
        checkpoint = load_checkpoint(model, dtype=dtype, destinations=weights.unread)
        orbax.save_checkpoint(checkpoint, output_dir, progress=progress)
    note(console, f"{checkpoint.name} ({dtype}) -> {output_dir}", None)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    logging.set_verbosity(logging.ERROR)  # orbax reports every step.
    if FLAGS.dry_run:
        refuse(("model", "output_dir"), "a dry run")
        plan.main()
        return
    refuse(set(plan.FLAG_NAMES) - {"dtype"}, "a conversion")
    if FLAGS.model is None or FLAGS.output_dir is None:
        raise app.UsageError("flags must be --model and --output_dir, or --dry_run and --model_preset")
    convert(FLAGS.model, Path(FLAGS.output_dir).expanduser(), FLAGS.dtype or "float32")


if __name__ == "__main__":
    _define_flags()
    run(main, errors=(CaJaxError, ValueError))
