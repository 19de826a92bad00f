"""`launch.flags.out_path` where the benchmarks look for it."""

from ca_jax.launch.flags import out_path

__all__ = ["out_path"]
