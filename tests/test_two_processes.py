"""Two processes of two devices each that serve one model: reuse, kill, restart.

What they agree upon, and that they do, is tested with threads in `test_processes.py`: this is the real thing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import ca_jax
from ca_jax.device.processes import JaxProcesses
from ca_jax.serving import drafts
from ca_jax.storage.config import StoreConfig
from ca_jax.testing import tiny
from tests import engine_kit as kit

NUM_PROCESSES = 2
ENVIRONMENT = os.environ | {
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # Each of several processes compiles all of it.
}


# What each of them does.


WINDOW = 256
TURNS = [(60, 9), (37, 9), (70, 9)]
"""New tokens and tokens of the answer of each; the third takes two passes."""


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
    """Serves turns `first` to `stop` of a conversation that the store may have the beginning of.

    Says what it did as lines of JSON, then waits for its end to be asked for, or to be killed.
    """
    jax.distributed.initialize(address, 2, index)
    drafts.LEAST_MATCH = 1  # Much is guessed, and most of it wrong.
    sizes = {"data_parallel_size": data, "tensor_parallel_size": tensor, "max_draft_tokens": 15}
    with engine_of(kit.ssd_store(directory), **sizes) as engine:
        session = engine.session(session_id="one")
        report(known=len(session.token_ids))
        for number in range(first, stop):
            report(**turn(session, number))
        engine.wait_for_saves()
        stats, layout = engine.store_stats(), engine._kv.store.layout
        report(heads=layout.groups[0].num_kv_heads, stored=[info.num_tokens for info in engine.stored.list()])
        report(hits=stats.num_hits, from_ssd=stats.num_hits_from_ssd, misses=stats.misses["other_shard"])
        sys.stdin.readline()
    JaxProcesses("end").gather("end", None)


# Both together.


def start(arguments: list[str], **options: object) -> subprocess.Popen:
    """A process of python that is told what to do."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdin=subprocess.PIPE, text=True, **options)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Pair:
    """Two processes that run `main`."""

    def __init__(self, directory: Path, *, data: int, tensor: int, first: int, stop: int) -> None:
        module, address, root = "tests.test_two_processes", free_address(), Path(__file__).parent.parent
        arguments = [str(value) for value in (directory, data, tensor, first, stop)]
        self._logs = [directory.parent / f"log-{first}-{index}" for index in range(NUM_PROCESSES)]
        self._processes = [
            start([module, address, str(index), *arguments], cwd=root, stdout=subprocess.PIPE, stderr=log.open("w"))
            for index, log in enumerate(self._logs)
        ]

    def read(self) -> dict[str, object]:
        """The next line of both: what they say, and where they do not say the same, what each does."""
        lines = [next((line for line in process.stdout if line.startswith("{")), "") for process in self._processes]
        if not all(lines):
            self.kill()
            pytest.fail("\n".join(log.read_text()[-3000:] for log in self._logs))
        one, other = (json.loads(line) for line in lines)
        assert one.keys() == other.keys()
        return {name: said if said == other[name] else [said, other[name]] for name, said in one.items()}

    def end(self) -> None:
        """Lets both end by themselves."""
        for process in self._processes:  # Each waits for the other to end with it.
            process.stdin.write("end\n")
            process.stdin.flush()
        for process in self._processes:
            process.communicate(timeout=120)
        assert [process.returncode for process in self._processes] == [0, 0], self._logs[0].read_text()[-3000:]

    def kill(self) -> None:
        """Ends both at once, wherever they are."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@functools.cache
def expected() -> list[list[list[int]]]:
    """The answers of one process with one device, each token with the likeliest."""
    with engine_of(StoreConfig(dram_gib=0.05, block_tokens=kit.BLOCK_TOKENS)) as engine:
        session = engine.session()
        return [turn(session, number)["answer"] for number in range(len(TURNS))]


def test_a_conversation_over_kills_and_restarts(tmp_path):
    directory = tmp_path / "store"
    shards = [directory / f"shard-{index}-of-{NUM_PROCESSES}" for index in range(NUM_PROCESSES)]
    answers = expected()
    with Pair(directory, data=1, tensor=4, first=0, stop=2) as pair:
        assert pair.read() == {"known": 0}
        assert pair.read() == {"turn": 0, "answer": answers[0], "cached": {"dram": 0}}
        assert pair.read() == {"turn": 1, "answer": answers[1], "cached": {"dram": 60 + 9 - 1}}
        assert pair.read() == {"heads": 2, "stored": [60 + 9 + 37 + 9 - 1]}
        assert pair.read()["hits"] == 1
        pair.kill()
    assert all(shard.is_dir() for shard in shards)

    with Pair(directory, data=1, tensor=4, first=2, stop=3) as pair:
        assert pair.read() == {"known": 60 + 9 + 37 + 9}
        assert pair.read() == {"turn": 2, "answer": answers[2], "cached": {"ssd": 60 + 9 + 37 + 9 - 1}}
        assert pair.read() == {"heads": 2, "stored": [60 + 9 + 37 + 9 + 70 + 9 - 1]}
        assert pair.read() == {"hits": 1, "from_ssd": 1, "misses": 0}
        pair.end()


def test_processes_that_have_all_heads_and_their_own_slots(tmp_path):
    """Rows of the batch are other processes', and each saves those of all."""
    with Pair(tmp_path / "store", data=2, tensor=2, first=0, stop=2) as pair:
        pair.read()
        for number in range(2):
            assert pair.read()["answer"] == expected()[number]
        assert pair.read()["heads"] == 4
        pair.end()


def test_a_chat_of_two_processes_is_that_of_the_first_ones_user(tmp_path):
    """Two KV heads over four devices: each process has one of them, twice."""
    config = tiny.tiny_config(num_layers=1)
    tiny.write_tiny_hf(tmp_path / "model", config, tiny.tiny_params(config, seed=1))
    flags = [f"--model={tmp_path / 'model'}", "--tensor_parallel_size=4", "--max_tokens=4", "--dram_gib=0.1"]
    flags += ["--context_window=128", "--max_num_batched_tokens=64"]
    flags += ["--norecompute_if_faster"]  # As it is for a model as small as this.
    flags += [f"--coordinator_address={free_address()}", f"--num_processes={NUM_PROCESSES}"]
    logs = [tmp_path / f"chat-{index}" for index in range(NUM_PROCESSES)]
    chats = [
        start(["ca_jax.launch.chat", *flags, f"--process_id={index}"], stdout=log.open("w"), stderr=subprocess.STDOUT)
        for index, log in enumerate(logs)
    ]
    try:
        chats[0].stdin.write("hello there\nand again\n/stats\n/quit\n")
        chats[0].stdin.close()
        assert [chat.wait(240) for chat in chats] == [0, 0]
    finally:
        for chat in chats:
            chat.kill()
            chat.wait()
            chat.stdin.close()
    first, other = (log.read_text() for log in logs)
    assert first.count("answer 4") == 2
    assert re.search(r"\(device \d\d\)", first)
    assert "answer 4" not in other


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], *(int(value) for value in sys.argv[4:]))
