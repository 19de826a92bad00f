"""`launch.flags.refuse` under the name that the benchmarks use."""

from ca_jax.launch.flags import refuse as refuse_flags

__all__ = ["refuse_flags"]
