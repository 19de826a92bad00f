"""Makes a model's codec from a text, for `--ssd_codec`: KV on SSD then takes a few bits a number.

    python -m ca_jax.launch.codec --data=text.txt --out=codec.npz
    python -m ca_jax.launch.serve --ssd_dir=~/kv --ssd_codec=codec.npz

Any text will do, best one like those that are to come. A codec belongs to weights, and to nothing else.

Not here: what a codec is (`ca_jax.storage.codec`), making it (`ca_jax.recompute.codec_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rich.console
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.launch.flags import define_dtype, define_model
from ca_jax.launch.script import note, run
from ca_jax.launch.terminal import progress_bars
from ca_jax.launch.texts import read_ids
from ca_jax.pretrained import load_model
from ca_jax.recompute.codec_fit import NUM_EARLIER, fit_codecs
from ca_jax.serving.core import enable_compile_cache

FLAGS = flags.FLAGS


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    flags.DEFINE_string("data", None, "A text, .txt or .jsonl with a field text.", required=True)
    flags.DEFINE_string("out", None, "File to write the codec to, .npz.", required=True)
    define_model()
    define_dtype()
    flags.DEFINE_float("bits", 3.2, "Most that a number takes on SSD, bits; bfloat16 has 16.", lower_bound=0.1)
    flags.DEFINE_integer("max_tokens", 40_000, "Most tokens of the text.")
    text = (
        "Layers before one that predict it: with more, fewer bytes for the same loss, and more time to code and decode."
    )
    flags.DEFINE_integer("earlier_layers", NUM_EARLIER, text, lower_bound=0)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    enable_compile_cache(EngineConfig().compile_cache_dir)
    with progress_bars() as progress:
        model = load_model(FLAGS.model, dtype=FLAGS.dtype, progress=progress)
        token_ids = read_ids(model, Path(FLAGS.data).expanduser(), FLAGS.max_tokens)
        num_done = 0

        def tell(num_tokens: int) -> None:
            nonlocal num_done
            num_done += num_tokens
            progress("tokens", num_done, len(token_ids))

        (codec,) = fit_codecs(model, token_ids, bits=[FLAGS.bits], num_earlier=FLAGS.earlier_layers, on_step=tell)
    codec.save(FLAGS.out)
    told = f"codec of {model.name}, {codec.bits:g} bits a number, {16 / codec.bits:.1f} times less than bfloat16."
    note(rich.console.Console(), f"{told} Written to {FLAGS.out}", None)


if __name__ == "__main__":
    _define_flags()
    run(main)
