"""Evaluates what overflow and reuse of chunks do to answers: `benchmarks.evaluate`, which is in a checkout alone."""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("evaluate.main")
