"""Makes a model's codec from a text, for `--ssd_codec`: KV on SSD then takes a few bits a number.

    python -m ca_jax.launch.codec --data=text.txt --out=codec.npz
    python -m ca_jax.launch.serve --ssd_dir=~/kv --ssd_codec=codec.npz

Any text will do, best one like those that are to come. A codec belongs to weights, and to nothing else.

Not here: what a codec is (`ca_jax.storage.codec`), making it (`ca_jax.recompute.codec_fit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import rich.console
from absl import flags

from ca_jax.launch import texts
from ca_jax.launch.script import note, run
from ca_jax.recompute.codec_fit import NUM_EARLIER, fit_codecs

FLAGS = flags.FLAGS


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    texts.define_flags("codec", 40_000)
    flags.DEFINE_float("bits", 3.2, "Most that a number takes on SSD, bits; bfloat16 has 16.", lower_bound=0.1)
    text = (
        "Layers before one that predict it: with more, fewer bytes for the same loss, and more time to code and decode."
    )
    flags.DEFINE_integer("earlier_layers", NUM_EARLIER, text, lower_bound=0)


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    bits, num_earlier = [FLAGS.bits], FLAGS.earlier_layers
    model, (codec,) = texts.measured(
        lambda model, ids, tell: fit_codecs(model, ids, bits=bits, num_earlier=num_earlier, on_step=tell)
    )
    codec.save(FLAGS.out)
    told = f"codec of {model.name}, {codec.bits:g} bits a number, {16 / codec.bits:.1f} times less than bfloat16."
    note(rich.console.Console(), f"{told} Written to {FLAGS.out}", None)


if __name__ == "__main__":
    _define_flags()
    run(main)
