"""Measures the engine on this machine, and a peer beside it: `benchmarks.main`, which is in a checkout alone."""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("main")
