"""Two replicas of the tiny model on Ray Serve: the server's own answers, sessions that stay, and a replica that dies.

Ray runs here for all tests of this file, and ends with them. The last two tests end replicas.
"""

import collections
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any

import httpx2
import pytest

from ca_jax.storage.config import StoreConfig
from tests import engine_kit as kit
from tests import server_kit as sk

pytest.importorskip("ray.serve")

from ray import serve

from ca_jax.cluster.keys import REPLICA_HEADER
from ca_jax.launch.cluster import build
from tests.cluster.kit import free_port, running
from tests.private_kit import passes_requests_on

pytestmark = pytest.mark.timeout(900)
CHAT = "/v1/chat/completions"
APPLICATION = "tested"
MAX_BODY_BYTES = 50_000
START_S = 300.0
AS_RAY_STARTS = """
import os
import ray
from ca_jax.launch import cluster
from tests.private_kit import passes_requests_on

def start(**_):
    print(*sorted(passes_requests_on()), flush=True)
    os._exit(0)

ray.init = start
cluster.define_flags()
cluster.run(cluster.main)
"""


def has_events() -> bool:
    return all(importlib.util.find_spec(module) for module in ("msgspec", "zmq"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    root = tmp_path_factory.mktemp("kv")
    store = StoreConfig(ssd_dir=str(root), dram_gib=0.05, ssd_gib=0.1, ssd_free_floor_gib=0.0)
    server = {"max_body_bytes": MAX_BODY_BYTES, "shutdown_grace_s": 10.0}
    events_port = free_port()  # Of the first replica; the second one has the next.
    if has_events():
        server["kv_events_url"] = f"tcp://127.0.0.1:{events_port}"
    with running(tmp_path_factory.mktemp("model"), store, name=APPLICATION, **server) as started:
        started.events_port = events_port
        yield started


@pytest.fixture(scope="module")
def http(cluster):
    with cluster.http() as http:
        yield http


def test_a_config_file_s_args_are_an_application():
    fixed = build({"model": "m", "num_replicas": 3, "special-tokens-in-content": True, "api_keys_file": ""})
    scaled = build({"model": "m", "min_replicas": 2, "max_replicas": 4, "gpus_per_replica": 1})
    assert isinstance(fixed, serve.Application)
    assert isinstance(scaled, serve.Application)


def asked(content: str, **fields: object) -> dict[str, object]:
    return {"model": sk.MODEL, "messages": [sk.user(content)], "max_tokens": 4, "temperature": 0, **fields}


def replica_of(answer: httpx2.Response) -> str:
    return answer.headers[REPLICA_HEADER]


def test_requests_are_passed_on_by_grpc_on_one_event_loop_and_no_other_port_is_opened():
    assert passes_requests_on() == {"PROXY_USE_GRPC", "USE_GRPC_BY_DEFAULT"}


def test_the_command_starts_ray_so_where_nothing_of_it_is_set():
    unset = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_")}
    run = [sys.executable, "-c", AS_RAY_STARTS, "--model=m"]
    found = subprocess.run(run, env=unset, capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["PROXY_USE_GRPC", "USE_GRPC_BY_DEFAULT"], found.stderr


def test_routes_answers_and_errors_are_those_of_a_single_server(http, said_by_engine):
    with sk.running(server={"max_body_bytes": MAX_BODY_BYTES}) as alone, alone.http() as single:
        assert http.get("/openapi.json").json() == single.get("/openapi.json").json()
        assert http.get("/").text == single.get("/").text
        for method, path, body in [
            ("GET", "/health", b""),
            ("GET", "/v1/nothing", b""),
            ("GET", "/v1/sessions/nobody", b""),
            ("PUT", "/v1/sessions", b""),
            ("POST", CHAT, b"{not json"),
            ("POST", CHAT, b"[1]"),
            ("POST", CHAT, json.dumps(asked("hello", model="another")).encode()),
            ("POST", CHAT, b" " * (MAX_BODY_BYTES + 1)),
        ]:
            headers = {"Content-Type": "application/json"}
            ours, theirs = (each.request(method, path, content=body, headers=headers) for each in (http, single))
            assert (ours.status_code, ours.json()) == (theirs.status_code, theirs.json()), path
            names = {*map(str.lower, theirs.headers)} - {"connection"}
            assert names <= {*map(str.lower, ours.headers)}, path
            assert len(ours.headers.get_list("x-request-id")) == 1
    other = http.get("/health", headers={"Host": "theirs.example"})
    assert (other.status_code, other.json()["error"]["code"]) == (403, "host_not_allowed")
    history = [sk.user("Say something.")]
    for _ in range(2):
        said = http.post(CHAT, json=asked("", messages=history)).json()["choices"][0]["message"]["content"]
        assert said == said_by_engine(history, max_tokens=4)
        history += [sk.assistant(said), sk.user("And more.")]


def test_streams_come_chunk_by_chunk_and_end_as_they_should(cluster, http):
    whole = http.post(CHAT, json=asked("Tell me.", max_tokens=12)).json()
    with cluster.http() as other, other.stream("POST", CHAT, json=asked("Tell me.", max_tokens=12, stream=True)) as got:
        chunks = list(got.iter_raw())
    assert len(chunks) > 1
    events = [line for line in b"".join(chunks).decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    said = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    text = "".join(each["choices"][0]["delta"].get("content", "") for each in said)
    assert text == whole["choices"][0]["message"]["content"]


def test_a_client_that_leaves_ends_its_answer(cluster, http):
    headers = {"x-session-id": "leaves"}
    with cluster.http() as other:
        long = asked("Go on.", max_tokens=400, stream=True)
        with other.stream("POST", CHAT, json=long, headers=headers) as got:
            replica = replica_of(got)
            next(got.iter_raw())

    def aborted() -> bool:
        answer = http.get("/metrics", headers={REPLICA_HEADER: replica})
        assert replica_of(answer) == replica
        counts = [line for line in answer.text.splitlines() if 'finished_reason="abort"' in line]
        return any(float(line.rpartition(" ")[2]) for line in counts)

    sk.wait_for(aborted, every_s=0.1)


def test_sessions_stay_on_one_replica_each_and_all_replicas_are_used(http):
    replicas = collections.defaultdict(set)
    for turn in range(4):
        for session in range(12):
            name = ("x-session-id", "X_Session_ID")[turn % 2]
            answer = http.post(CHAT, json=asked(f"turn {turn}"), headers={name: f"session {session}"})
            assert answer.status_code == 200
            replicas[session].add(replica_of(answer))
    assert {len(each) for each in replicas.values()} == {1}
    assert len(set.union(*replicas.values())) == 2


def test_a_history_goes_on_where_it_is_stored(http):
    used = set()
    for number in range(8):
        history = [sk.user(f"Conversation {number} begins here with some words that are its own.")]
        answer = http.post(CHAT, json=asked("", messages=history))
        history += [answer.json()["choices"][0]["message"], sk.user("next")]
        del history[1]["refusal"]
        after = http.post(CHAT, json=asked("", messages=history))
        assert replica_of(after) == replica_of(answer)
        assert after.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        used.add(replica_of(answer))
    assert len(used) == 2


def test_a_conversation_is_gone_on_with_by_whatever_name_it_was_given(http):
    """Named by its client, by the server, and by the server as it answered: at once, and everywhere it can be named."""
    for number in range(6):
        answer = http.post(CHAT, json=asked(f"I am number {number}."))
        begun = http.post("/v1/sessions", json={})
        mine = http.post("/v1/sessions", json={"session_id": f"mine {number}"})
        for first, name in [
            (answer, answer.json()["session_id"]),
            *((each, each.json()["id"]) for each in (begun, mine)),
        ]:
            state = {"session_state": first.json()["session_state"]}
            turn = http.post(CHAT, json=asked("More.", session_id=name, **state))
            shown = http.get(f"/v1/sessions/{name}")
            live = http.get("/live/snapshot", params={"session_id": name})
            assert [turn.status_code, shown.status_code, live.status_code] == [200, 200, 200], turn.text
            assert {replica_of(each) for each in (turn, shown, live)} == {replica_of(first)}
            assert live.json()["session"]["session_id"] == name
        gone = http.delete(f"/v1/sessions/{mine.json()['id']}")
        assert (gone.status_code, replica_of(gone)) == (200, replica_of(mine))


def test_a_fork_is_gone_on_with_where_its_origin_is(http):
    """It is known by a name that its answer told, at the replica that has what it begins with."""
    for number in range(4):
        origin = http.post(CHAT, json=asked(f"I am number {number}, and have much to say."))
        forked = http.post(f"/v1/sessions/{origin.json()['session_id']}/fork", json={"at": 2})
        assert (forked.status_code, replica_of(forked)) == (201, replica_of(origin)), forked.text
        for answer, name in ((origin, origin.json()["session_id"]), (forked, forked.json()["id"])):
            state = {"session_state": answer.json()["session_state"]}
            turn = http.post(CHAT, json=asked("More.", session_id=name, **state))
            assert (turn.status_code, replica_of(turn)) == (200, replica_of(origin)), turn.text
        listed = http.get(f"/v1/sessions/{forked.json()['id']}").json()
        assert listed["forked_from"] == {"id": origin.json()["session_id"], "at": 2}


@pytest.mark.skipif(not has_events(), reason="needs zmq and msgspec")
def test_each_replica_tells_at_a_port_of_its_own_which_blocks_it_stores(cluster, http):
    import msgspec
    import zmq

    def told_by(socket: Any) -> list[list[int]]:
        """Token ids of the blocks that have been told of since."""
        batches = []
        while socket.poll(0):
            batches.append(msgspec.msgpack.decode(socket.recv_multipart()[-1]))
        events = [event for batch in batches for event in batch[1]]
        return [event["token_ids"] for event in events if event["type"] == "BlockStored"]

    with zmq.Context() as context, contextlib.ExitStack() as stack:
        sockets = {}
        for name in cluster.names():  # As `replica-1-5fa2c4`.
            sockets[name] = stack.enter_context(context.socket(zmq.SUB))
            sockets[name].subscribe("")
            sockets[name].connect(f"tcp://127.0.0.1:{cluster.events_port + int(name.split('-')[1])}")
        assert len(sockets) == 2
        missing = set(sockets)
        for number in range(100):
            messages = [sk.user(f"{number} is a day of which there is much to tell. " * 4)]
            said = http.post(CHAT, json=asked("", messages=messages))
            prompt = http.post(f"{CHAT}/render", json=asked("", messages=messages)).json()["token_ids"]
            replica, found = replica_of(said), []

            def is_told(replica: str = replica, found: list[list[int]] = found, prompt: list[int] = prompt) -> bool:
                found += told_by(sockets[replica])
                return any(prompt[: len(block)] == block for block in found)

            with contextlib.suppress(AssertionError):  # What is told before a socket is connected is lost.
                sk.wait_for(is_told, 10.0 if replica in missing else sk.DEADLINE_S, every_s=0.05)
                missing.discard(replica)
            if not missing:
                break
        assert not missing
        others = [block for name, socket in sockets.items() if name != replica for block in told_by(socket)]
        assert not any(prompt[: len(block)] == block for block in others), "no other one has it"


def test_a_replica_that_is_killed_leaves_the_others_serving_and_its_sessions_come_back(cluster, http):
    """To the replica that takes its directory: a ring of hashes would have half of all sessions elsewhere by then."""
    kept = collections.defaultdict(list)
    while len(kept) < 2 or min(map(len, kept.values())) < 4:  # On each replica, each with a turn.
        name = f"kept {os.urandom(4).hex()}"
        http.post("/v1/sessions", json={"session_id": name})
        kept[replica_of(http.post(CHAT, json=asked("Keep this.", session_id=name)))].append(name)
    killed, other = kept
    os.kill(cluster.pid_of(killed), signal.SIGKILL)
    for number in range(20):
        answer = http.post(CHAT, json=asked("Hello.", session_id=kept[other][number % 4]))
        assert (answer.status_code, replica_of(answer)) == (200, other)
        assert http.post(CHAT, json=asked(f"Whole history {number}.")).status_code == 200

    def is_at(name: str, replica: str) -> bool:
        shown = http.get(f"/v1/sessions/{name}")
        return shown.status_code == 200 and replica_of(shown) == replica

    sk.wait_for(lambda: all(is_at(name, killed) for name in kept[killed]), START_S, every_s=0.2)
    said = http.get(f"/v1/sessions/{kept[killed][0]}").json()["messages"]
    assert said[0]["content"] == "Keep this."
    assert all(is_at(name, other) for name in kept[other])


def test_replicas_that_are_drained_let_answers_end_and_save(cluster):
    headers = {"x-session-id": "drained"}
    with cluster.http() as http:
        long = asked("Go on.", max_tokens=60, stream=True)
        with http.stream("POST", CHAT, json=long, headers=headers) as got:
            pieces = got.iter_lines()
            next(pieces)
            serve.delete(APPLICATION, _blocking=False)
            lines = [line for line in pieces if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    sk.wait_for(lambda: APPLICATION not in serve.status().applications, every_s=0.1)
    noted = [path for path in cluster.root.glob("*.keys") if json.loads(path.read_text())]
    assert len(noted) == len(cluster.names()) == 2
    with contextlib.ExitStack() as stack:  # The directories are free.
        for path in cluster.root.glob("*.name"):
            stack.enter_context(kit.small_engine(store=kit.ssd_store(path.with_suffix(""))))
