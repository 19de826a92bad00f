"""Measures the engine on this machine, and a peer beside it: runs one suite of `benchmarks/`, from a checkout.

    python -m ca_jax.launch.bench --suite=reuse --history_tokens=500,2000 --new_tokens=100 --json_out=reuse.json
    python -m ca_jax.launch.bench --suite=decode --batch_sizes=1,8 --peer=transformers --json_out=decode.json
    python -m ca_jax.launch.bench --suite=tiers --ssd_dir=/mnt/ssd --json_out=tiers.json
    python -m ca_jax.launch.bench --suite=ttft --trace_out=trace.json --plot_out=turn.png --json_out=ttft.json
    python -m ca_jax.launch.bench --suite=throughput --model_preset=llama3-8b --json_out=throughput.json
    python -m ca_jax.launch.bench --suite=preload --json_out=preload.json
    python -m ca_jax.launch.bench --suite=overflow --plot_out=overflow.png --json_out=overflow.json
    python -m ca_jax.launch.bench --suite=blend --data=musique.json --json_out=blend.json
    python -m ca_jax.launch.bench --suite=blend_throughput --json_out=blend_throughput.json
    python -m ca_jax.launch.bench --suite=store --ssd_dir=/mnt/ssd --json_out=store.json
    python -m ca_jax.launch.bench --suite=policy --json_out=policy.json
    python -m ca_jax.launch.bench --suite=serving --json_out=serving.json

`tiers` is a turn's TTFT by where its history is: DRAM, SSD, SSD after a restart, nowhere. `ttft` is the same against
its compute and its load alone, `throughput` a continuous batch of conversations. `preload` and `save` are what of loads
and saves is hidden. `overflow` is what truncation costs, and what it saves over recomputing what is left. `blend` is
the TTFT of a question behind stored chunks, by how much of them is computed anew and where they are, `blend_throughput`
a stream of such questions whose chunks come again. `serving` is chats of several clients over HTTP, against
llama.cpp's server and, where it is installed, vLLM's. `store` (how fast its tiers move bytes) and `policy` (what its
bookkeeping costs and is worth) need no model.

Let nothing else run meanwhile. `transformers` waits for all its threads at every operation: where one of them shares
its core it becomes many times slower, and a comparison with it worthless. Medians, their spread, the machine and the
versions are printed and written as JSON.

Not here: the suites and what they share (`benchmarks`).
"""

from ca_jax.launch.script import run_benchmark

if __name__ == "__main__":
    run_benchmark("main")
