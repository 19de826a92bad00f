"""Traces through the real engine: what is asked of it and when, asking it, and what that took.

Not here: flags, tables, plots (`ca_jax.launch.replay`), readers of traces (`ca_jax.traces`).
"""
