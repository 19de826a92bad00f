"""Converts any model that can be loaded into an orbax checkpoint, which loads without dequantising.

    python -m ca_jax.launch.convert --model=smollm2-135m-instruct --output_dir=smollm2_orbax --dtype=bfloat16

Weights are read and written a few at a time: memory for the largest one is enough.

Says, without reading or writing anything, what a published architecture would take of each device, and how many
sessions each tier would hold:

    python -m ca_jax.launch.convert --dry_run --model_preset=llama2-70b --tensor_parallel_size=4

Not here: the formats themselves (`ca_jax.models`), the arithmetic of a dry run (`launch.plan`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import rich.console
import rich.progress
import rich.table
from absl import app, flags, logging

from ca_jax.errors import CaJaxError
from ca_jax.launch import engine_flags, store_flags
from ca_jax.launch.plan import Plan, make_plan
from ca_jax.models import orbax, reading
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.presets import PRESETS
from ca_jax.storage.config import GIB

_MODEL = flags.DEFINE_string(
    "model", None, "Preset, .gguf file, Hugging Face directory or hub name (org/name) to convert."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", None, "Where to write; must be new or empty.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16", "float16"],
    "Of the weights written, by default float32; in a dry run of weights and KV, by default bfloat16.",
)
_DRY_RUN = flags.DEFINE_boolean(
    "dry_run", False, "Read and write nothing: say what --model_preset would take, served as the other flags say."
)
_MODEL_PRESET = flags.DEFINE_enum("model_preset", None, sorted(PRESETS), "Architecture of a dry run.")
_DEVICE_GIB = flags.DEFINE_float("device_gib", 80.0, "Memory of each device in a dry run, GiB.", lower_bound=0.0)
_CONTEXT_WINDOW = flags.DEFINE_integer(
    "context_window", None, "Most tokens of a context in a dry run; by default the model's, at most 4,096."
)
_SESSION_TOKENS = flags.DEFINE_integer(
    "session_tokens", None, "Tokens of a session in a dry run; by default a full context window."
)
engine_flags.define()
store_flags.define()


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


def print_plan(plan: Plan, title: str, console: rich.console.Console) -> None:
    """Shows what a dry run found: a table of each device's memory, and one of the tiers."""
    is_packed = plan.stored_token_bytes != plan.token_bytes
    stored = f", {plan.stored_token_bytes / (1 << 20):.2f} stored" if is_packed else ""
    console.print(
        f"{title}: {plan.total_weight_bytes / 1e9:.1f} GB of weights, {plan.token_bytes / (1 << 20):.2f} MiB of KV a "
        f"token{stored}; {plan.num_devices} {'device' if plan.num_devices == 1 else 'devices'} of "
        f"{plan.device_bytes / GIB:.1f} GiB, {plan.device_bytes * plan.num_devices / 1e9:.0f} GB in all"
    )
    devices = rich.table.Table("of each device", title_justify="left")
    devices.add_column("bytes", justify="right")
    devices.add_column("GiB", justify="right")
    for name, num_bytes in (
        ("weights", plan.weight_bytes),
        (f"decode slots, {plan.window:,} tokens each", plan.slot_bytes),
        ("read buffer", plan.read_buffer_bytes),
        ("write buffer", plan.write_buffer_bytes),
        ("left, activations included", plan.left_bytes),
    ):
        devices.add_row(name, f"{num_bytes:,}", f"{num_bytes / GIB:.2f}")
    console.print(devices)
    tiers = rich.table.Table("tier")
    for name in ("GiB", "tokens", f"sessions of {plan.session_tokens:,} tokens"):
        tiers.add_column(name, justify="right")
    for tier in plan.tiers:
        tiers.add_row(tier.name, f"{tier.num_bytes / GIB:.1f}", f"{tier.num_tokens:,}", f"{tier.num_sessions:,}")
    console.print(tiers)
    console.print("HBM: the decode slots, and as many more as what is left would hold.")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line."""
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.ERROR)  # orbax reports every step.
    try:
        if _DRY_RUN.value:
            _dry_run()
            return
        if _MODEL.value is None or _OUTPUT_DIR.value is None:
            raise app.UsageError("wanted --model and --output_dir, or --dry_run and --model_preset")
        convert(_MODEL.value, Path(_OUTPUT_DIR.value).expanduser(), _DTYPE.value or "float32")
    except (CaJaxError, ValueError) as error:
        sys.exit(f"error: {error}")


def _dry_run() -> None:
    if _MODEL_PRESET.value is None:
        raise app.UsageError("--dry_run wanted a --model_preset, found none")
    engine = dataclasses.replace(
        engine_flags.engine_config(), context_window=_CONTEXT_WINDOW.value, store=store_flags.store_config()
    )
    dtype = _DTYPE.value or "bfloat16"
    plan = make_plan(
        PRESETS[_MODEL_PRESET.value],
        engine,
        dtype=dtype,
        device_bytes=int(_DEVICE_GIB.value * GIB),
        session_tokens=_SESSION_TOKENS.value,
    )
    print_plan(plan, f"{_MODEL_PRESET.value} in {dtype}", rich.console.Console(soft_wrap=True))


if __name__ == "__main__":
    app.run(main)
