"""Replays a trace through the engine: real conversations, come and gone as they are told to, and what they took.

    python -m ca_jax.launch.replay --num_sessions=100 --max_turns=10 --dram_gib=1 --recompute --json_out=replay.json
    python -m ca_jax.launch.replay --trace_format=mooncake --trace=conversation_trace.jsonl --length_scale=0.05
    python -m ca_jax.launch.replay --arrival_rate=1 --ssd_dir=/mnt/ssd --eviction_policy=lru --simulate

Answers are as long as they were, but for a cap, so that all ways do the same work. `--recompute` serves the same
workload again with the store off; `--simulate` has it served in simulated time, with the rates that were measured.
With `--ssd_dir` the store uses a directory of its own there, which is removed at the end.

Not here: replaying (`benchmarks.replay`, which is in a checkout of the repository alone), a trace in simulated time
alone (`simulate`).
"""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("replay.main")
