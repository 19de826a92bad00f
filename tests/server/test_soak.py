"""Many clients at once, some of which misbehave, and a server that is killed: nothing is lost, mixed up or wrong."""

from __future__ import annotations

import concurrent.futures
import math
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import engine_kit as kit
from tests import server_kit as sk
from tests.server import mixed_clients, soak
from tests.server.test_tools import model_with

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_TURNS = 6  # Of a client of a server that is killed.
BLOCK_TOKENS = 128  # The server's default.


@pytest.mark.parametrize(
    ("num_clients", "num_turns", "max_queue"),
    [(12, 84, 2), pytest.param(64, 5000, 40, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_answers_are_those_of_each_client_alone(num_clients, num_turns, max_queue, tmp_path):
    with sk.running(**soak.limits(tmp_path, max_queue)) as server:
        body_bytes, each = server.state.config.max_body_bytes, -(-num_turns // num_clients)
        report, asked = soak.Crowd(server.url, body_bytes, num_clients, each).talk(soak.Report())
        sk.wait_until_idle(server)
        assert len(server.service.router._states) < 2 * (40 * num_clients + num_turns)  # Two names each.
    soak.check_all(asked, report)
    assert not report.failures
    assert not report.wrong
    assert report.num_turns == num_clients * each
    assert report.num_ties <= report.num_turns // 100
    assert report.num_left
    assert report.num_refused
    assert 0 < sum(report.refusals) <= 5 * len(report.refusals), "each waits as it was told"
    assert report.cached_tokens > 0.3 * report.prompt_tokens, "conversations were found again"


@pytest.mark.parametrize(
    ("num_clients", "num_turns"), [(10, 3), pytest.param(40, 50, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_tools_schemas_responses_and_messages_at_once_are_those_of_each_alone(num_clients, num_turns, tmp_path):
    def engine(**changes):
        return kit.small_engine(model_with(), **changes)

    with sk.running(make_engine=engine, **soak.limits(tmp_path)) as server:
        report = mixed_clients.talk(server.url, num_clients, num_turns)
        sk.wait_until_idle(server)
    with sk.running(make_engine=engine, store=kit.STORE_OFF) as alone:
        mixed_clients.check_all(report, alone.url)
    assert not report.failures
    assert not report.wrong
    assert report.num_ties <= len(report.asked) // 100
    assert min(report.num_by_kind.values()) == num_clients // 5 * num_turns
    assert len(report.num_by_kind) == 5
    assert report.num_left
    assert report.cached_tokens > 0


class ServerProcess:
    """`ca_jax serve` over the tiny model and one directory, on a port of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        kit.write_tiny_model(directory / "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Returns once it is ready."""
        flags = ["--dram_gib=0.02", "--ssd_gib=0.2", "--ssd_free_floor_gib=0", f"--ssd_dir={self._directory / 'ssd'}"]
        flags += ["--dtype=float32", f"--context_window={kit.WINDOW}", "--max_batch_size=8", "--norecompute_if_faster"]
        flags += ["--nowarmup", "--max_body_bytes=65536", f"--served_model_name={sk.MODEL}", f"--port={self._port}"]
        command = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={self._directory / 'model'}", *flags]
        log = self._directory / "log"
        with open(log, "ab") as file:
            home = {"HOME": str(self._directory)}  # What is compiled is kept there.
            self._process = subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | home, stdout=file, stderr=file)

        def is_ready() -> bool:
            assert self._process.poll() is None, log.read_text()
            return sk.is_ready(self.url)

        sk.wait_for(is_ready, soak.START_S, 0.05)

    def kill_in_the_middle(self, report: soak.Report, num_answers: int, delay_s: float) -> set[str]:
        """Kills it behind so many answers, once something is on SSD; names of what was, by then."""
        on_ssd = set[str]()
        with sk.http(self.url) as http:

            def is_time() -> bool:
                for each in http.get("/v1/sessions", params={"limit": 100}).json()["data"]:
                    if each["stored"] and each["stored"]["ssd_tokens"] >= BLOCK_TOKENS:
                        on_ssd.add(each["id"])
                return bool(on_ssd) and report.num_turns >= num_answers

            sk.wait_for(is_time, every_s=0.02)
        threading.Event().wait(delay_s)
        self.kill()
        report.num_kills += 1
        return on_ssd

    def kill(self) -> None:
        """By SIGKILL, if it runs."""
        self._process.kill()
        self._process.wait()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("num_clients", "num_kills"), [(8, 1), pytest.param(16, 4, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_conversations_go_on_behind_kill_9(num_clients, num_kills, tmp_path, record_property):
    """What was answered is known again, on SSD or not yet. A client that goes on by name says where the conversation
    stands: an answer may have been complete that did not get through, and then all of it is sent."""
    report, draw, on_ssd = soak.Report(), random.Random(num_kills), dict[str, int]()
    server = ServerProcess(tmp_path)
    server.start()
    share = num_clients * NUM_TURNS // (num_kills + 2)
    crowd = soak.Crowd(server.url, 1 << 16, num_clients, NUM_TURNS, is_killed=True)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            talking = pool.submit(crowd.talk, report)
            for number in range(num_kills):
                seen = server.kill_in_the_middle(report, (number + 1) * share, draw.uniform(0, 0.05))
                on_ssd = dict.fromkeys(seen, report.num_kills) | on_ssd  # Before which kill each was there first.
                server.start()
            _, asked = talking.result()
    finally:
        server.kill()
    soak.check_all(asked, report)
    for field in ("num_turns", "num_broken_off", "num_ahead", "num_ties"):
        record_property(field, getattr(report, field))
    assert not report.failures
    assert not report.wrong
    assert report.num_ties <= 1
    assert len(asked) == num_clients * NUM_TURNS
    assert report.num_broken_off > 0, "nothing was under way"
    found = [each for each in report.resumed if each.num_kills >= on_ssd.get(each.name, math.inf)]
    assert found
    assert all(each.cached_tokens for each in found), "what was on SSD is known again"
    assert any(each.by_name for each in report.resumed)
