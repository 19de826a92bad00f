"""Measures a TPU and the engine on it, as `gpu_bench` does a GPU: `benchmarks.gpu`, which is in a checkout alone."""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("gpu.main")
