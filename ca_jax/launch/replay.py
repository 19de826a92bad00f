"""Replays a trace through the engine: `benchmarks.replay`, which is in a checkout alone."""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("replay.main")
