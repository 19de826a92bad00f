"""Quality of what the engine does to KV, measured: texts and benchmarks over the pure model."""
