"""Evaluations, `python -m ca_jax.launch.evaluate`: the tasks, their rows, tables and figures; turns that are timed."""
