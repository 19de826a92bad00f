"""The command `ca_jax`, also as `python -m ca_jax`: each script of `launch` as a subcommand, with its flags and help.

    ca_jax                                      what there is
    ca_jax --version
    ca_jax serve --help                         flags of one
    ca_jax serve --model=smollm2-135m-instruct --port=8000 --ssd_dir=~/kv
    ca_jax chat --system="Answer briefly."

Not here: what the scripts do.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import runpy
import sys

COMMANDS = {
    "serve": "serve a model over HTTP with OpenAI's API",
    "cluster": "the same by several replicas on Ray Serve, behind one address",
    "top": "show what a server is doing, live",
    "chat": "chat with a model in the terminal",
    "demo": "see a conversation served with and without reuse, over a restart",
    "replay": "replay traces of conversations against the engine",
    "simulate": "the same on a simulated machine, at cluster scale",
    "bench": "measure prefill, decode, tiers, overlap, overflow, blending",
    "gpu_bench": "measure what only a GPU shows",
    "tpu_bench": "the same of a TPU",
    "evaluate": "measure what truncation and blending cost in quality",
    "drift": "measure a model's mean drift of KV behind a truncation",
    "codec": "make a model's codec, by which KV takes a few bits a number on SSD",
    "doctor": "say what of this machine stands in the way, and what to set",
    "store": "look into, verify and tidy a store's directory",
    "plan": "say what a model and a store need of a machine",
    "convert": "convert a checkpoint, sharded, to orbax",
}
"""Subcommands: the module of that name, and what it is for."""


def main() -> None:
    """Prints the version or what there is, or runs the subcommand that the command line names."""
    name = sys.argv[1] if len(sys.argv) > 1 else "help"
    if name == "--version":
        print(f"ca_jax {importlib.metadata.version('ca-jax')}")  # noqa: T201
    elif name in ("help", "--help", "-h"):
        _print_help()
    elif name in COMMANDS:
        sys.argv[:2] = [f"ca_jax {name}"]
        runpy.run_module(f"ca_jax.launch.{name}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        sys.stderr.write(f"ca_jax: the command must be one of {', '.join(COMMANDS)}; got {name!r}{hint}\n")
        sys.exit(2)


def _print_help() -> None:
    import rich.console  # Only here: scripts load it where they want it.
    import rich.table

    console = rich.console.Console()
    console.print("ca_jax: multi-turn LLM serving in JAX that keeps KV between turns\n", highlight=False)
    console.print("usage: ca_jax COMMAND [--flag=value ...]; ca_jax COMMAND --help tells its flags\n", markup=False)
    table = rich.table.Table.grid(padding=(0, 2))
    for name, text in COMMANDS.items():
        table.add_row(f"  {name}", text)
    console.print(table)
    console.print("\nexamples:", highlight=False)
    for example in (
        "ca_jax serve --model=smollm2-135m-instruct --port=8000 --dram_gib=4 --ssd_dir=~/kv --ssd_gib=50",
        "ca_jax chat --ssd_dir=~/kv --session_id=mine",
        "ca_jax bench --suite=ttft",
        "ca_jax store --ssd_dir=~/kv stats",
    ):
        console.print(f"  {example}", markup=False, highlight=False, soft_wrap=True)
    if importlib.util.find_spec("fastapi") is None:
        console.print("\nserve wants more packages: pip install 'ca-jax[serve]'", markup=False, highlight=False)


if __name__ == "__main__":
    main()
