"""Traces through the real engine: what is asked of it and when, asking it, what that took, and the same simulated.

Not here: readers of traces (`ca_jax.simulate.traces`).
"""
