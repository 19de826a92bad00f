"""Evaluations, `python -m ca_jax.launch.evaluate`: flags, tables, figures, and turns of an engine that are timed."""
