"""Measures the accelerator and the engine on it, in one go: what the hardware gives, and how much of it is reached.

    python -m ca_jax.launch.gpu_bench --json_out=results/gpu/h100.json --markdown_out=results/gpu/h100.md

Without an accelerator the same runs small on CPU. Sections come in order of importance. One that would not end within
`--budget_s` is skipped, one that breaks is noted, and what is there is written after each, so that a run that is cut
short leaves all it has measured. No weight is downloaded: all are random, and made on the device.

Not here: the sections (`benchmarks.gpu`).
"""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("gpu.main")
