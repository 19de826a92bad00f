"""Serves a recorded conversation with reuse of stored KV and with recompute, restarts, and goes on with it from SSD.

    python -m ca_jax.launch.demo --results_dir=build

Act one serves each turn over stored KV, and again without. Act two, in a new process, serves the next turn over the KV
that act one left on SSD, and again without. User messages are those of the recording, answers are the model's own,
greedy, so both must say the same. What is timed compiles nothing. Nothing else should run meanwhile.

Not here: the acts and their report (`benchmarks.demo`, which is in a checkout of the repository alone).
"""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("demo")
