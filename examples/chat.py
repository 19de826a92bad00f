"""A conversation that outlives its process: run it twice, and the second run goes on where the first one ended.

python examples/chat.py --ssd_dir=/tmp/ca_jax_example "Name three rivers of France."
python examples/chat.py --ssd_dir=/tmp/ca_jax_example "Which of them is the longest?"
"""

from __future__ import annotations

import argparse

import ca_jax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("message", nargs="?", default="Name three rivers of France.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--session_id", default="rivers")
    parser.add_argument("--ssd_dir", default=None, help="where the conversation is kept; by default in memory alone")
    args = parser.parse_args()

    store = ca_jax.StoreConfig(dram_gib=0.5, ssd_dir=args.ssd_dir, ssd_gib=1, ssd_free_floor_gib=0)
    config = ca_jax.EngineConfig(context_window=1024, store=store)
    with ca_jax.Engine.from_pretrained(args.model, config) as engine:
        session = engine.session(session_id=args.session_id)  # Begins it, or goes on with what the store kept.
        print(f"{len(session.messages)} messages so far")
        for piece in session.send(args.message, max_tokens=64):
            print(piece, end="", flush=True)
        usage = session.usage
        print(f"\n{usage.new_tokens} tokens prefilled; loaded, by tier: {usage.cached_tokens}")


if __name__ == "__main__":
    main()
