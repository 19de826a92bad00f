"""Converts any model that can be loaded into an orbax checkpoint, which loads without dequantising.

    python -m ca_jax.launch.convert --model=smollm2-135m-instruct --output_dir=smollm2_orbax --dtype=bfloat16

Weights are read and written a few at a time: memory for the largest one is enough.

`--dry_run` does what `ca_jax.launch.plan` does, by its flags.

Not here: the formats themselves (`ca_jax.models`), what a model would take of each device (`launch.plan`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.progress
from absl import app, flags, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch import plan
from ca_jax.launch.refused_flags import refuse_flags
from ca_jax.models import orbax, reading
from ca_jax.models.checkpoint import load_checkpoint

_MODEL = flags.DEFINE_string(
    "model", None, "Preset, .gguf file, Hugging Face directory or hub name (org/name) to convert."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where to write; must be new or empty.")
_DRY_RUN = flags.DEFINE_boolean(
    "dry_run", False, "Do as `ca_jax plan` does, by the other flags: read and write nothing."
)
plan.define()
_PLAN_ONLY = set(plan.flag_names()) - {"dtype"}


def convert(model: str, output_dir: Path, dtype: str) -> None:
    """Reads `model` and writes it under `output_dir`, with a progress bar.

    Raises:
      CheckpointError: `output_dir` is not empty, or the model is damaged.
      CaJaxError: whatever else `load_checkpoint` refuses.
    """
    orbax.require_empty(output_dir)
    console = rich.console.Console(stderr=True)
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.DownloadColumn())
    with rich.progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("opening", total=None)
        checkpoint = load_checkpoint(model, dtype=dtype, destinations=reading.unread)
        orbax.save_checkpoint(
            checkpoint,
            output_dir,
            progress=lambda label, done, total: bar.update(task, description=label, completed=done, total=total),
        )
    console.print(f"{checkpoint.name} ({dtype}) -> {output_dir}")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.ERROR)  # orbax reports every step.
    try:
        if _DRY_RUN.value:
            refuse_flags(("model", "output_dir"), "a dry run")
            plan.run()
            return
        refuse_flags(_PLAN_ONLY, "a conversion")
        if _MODEL.value is None or _OUTPUT_DIR.value is None:
            raise app.UsageError("wanted --model and --output_dir, or --dry_run and --model_preset")
        convert(_MODEL.value, Path(_OUTPUT_DIR.value).expanduser(), flags.FLAGS.dtype or "float32")
    except (CaJaxError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
