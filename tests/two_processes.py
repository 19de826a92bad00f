"""One of several processes that serve as one. `tests/test_two_processes.py` starts them, each with two CPU devices.

Says what it did as lines of JSON, then waits for its end to be asked for, or to be killed.
"""

from __future__ import annotations

import json
import sys

import jax

import ca_jax
from ca_jax.device.processes import JaxProcesses
from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit

WINDOW = 256
TURNS = [(60, 9), (37, 9), (70, 9), (20, 9), (40, 9)]
"""New tokens and tokens of the answer of each; the third takes two passes, the fifth overflows."""


def engine_of(store: StoreConfig, **changes: object) -> ca_jax.Engine:
    """An engine of a model that is the same in every process."""
    model = kit.model_of(num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8)
    return kit.small_engine(model, context_window=WINDOW, max_batch_size=4, store=store, **changes)


def turn(session: ca_jax.Session, number: int) -> dict[str, object]:
    """Has a turn answered: what came of it, each token with the two that were likeliest; every other one penalised."""
    num_new, max_tokens = TURNS[number]
    sampling = ca_jax.SamplingParams(frequency_penalty=number % 2, logprobs=2)
    sent = session.send_ids(kit.prompt(num_new, number), max_tokens=max_tokens, sampling=sampling)
    kit.drain(sent)
    answer = [[each.token_id, *(token for token, _ in each.top)] for each in sent.job.token_logprobs]
    return {"turn": number, "answer": answer, "cached": session.usage.cached_tokens}


def report(**what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(address: str, index: int, directory: str, data: int, tensor: int, first: int, stop: int) -> None:
    """Serves turns `first` to `stop` of a conversation that the store may have the beginning of."""
    jax.distributed.initialize(address, 2, index)
    with engine_of(kit.ssd_store(directory), data_parallel_size=data, tensor_parallel_size=tensor) as engine:
        session = engine.session(session_id="one")
        report(known=len(session.token_ids))
        for number in range(first, stop):
            report(**turn(session, number))
        engine.wait_for_saves()
        stats, layout = engine.store_stats(), engine._kv.store.layout
        report(heads=layout.num_kv_heads, stored=[info.num_tokens for info in engine.stored.list()])
        report(hits=stats.num_hits, from_ssd=stats.num_hits_from_ssd, misses=stats.misses["other_shard"])
        sys.stdin.readline()
    JaxProcesses("end").gather("end", None)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *(int(value) for value in sys.argv[4:]))
