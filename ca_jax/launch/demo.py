"""Serves a conversation with reuse and with recompute, over a restart: `benchmarks.demo`, in a checkout alone."""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("demo")
