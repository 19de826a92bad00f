"""Serving in simulated time: the engine's scheduler and store, with a clock and byte counts in place of arrays."""
