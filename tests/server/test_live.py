"""What the server tells of itself while it works: the snapshot, its stream, and who sees what."""

import contextlib
import hashlib
import io
import json
import time

import pytest
import rich.console

from ca_jax.launch import top
from ca_jax.server.history import History
from ca_jax.server.live import read_live
from ca_jax.server.tenants import Tenant, Tenants
from ca_jax.storage.config import StoreConfig
from ca_jax.storage.placement.policy import look_ahead_window
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit, server_kit
from tests.scripts_kit import run_script
from tests.server_kit import DEADLINE_S, chat, ssd_store, user

BLOCK_TOKENS = engine_kit.BLOCK_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    store = ssd_store(tmp_path_factory.mktemp("ssd"), dram_gib=0.02, ssd_gib=0.1)
    keys = [(hashlib.sha256(name.encode()).digest(), Tenant(name=name)) for name in ("ann", "ben")]
    with server_kit.running(Tenants(keys), store=store) as running:
        yield running


def snapshot(server, key="ann", **query):
    with server.http(key) as http:
        answer = http.get("/live/snapshot", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def converse(server, key, *messages, **options):
    """Turns of one conversation; its id."""
    client, session_id = server.client(key), None
    for message in messages:
        more = {} if session_id is None else {"session_id": session_id}
        session_id = chat(client, [user(message)], extra_body=more, **options).session_id
    return session_id


# The snapshot.


@pytest.fixture
def engine(tmp_path):
    with engine_kit.small_engine(store=engine_kit.ssd_store(tmp_path)) as engine:
        yield engine


def test_a_session_is_told_of_block_by_block_and_its_last_turn_phase_by_phase(engine):
    session = engine.session(session_id="a")
    engine_kit.converse(session, ["tell me about the sea", "and about the shore"], 20)
    engine.wait_for_saves()
    shown = read_live(engine, "", "a").session
    num_stored = len(session.token_ids) - 1  # Of the last token there is no KV.
    assert (shown.dram_tokens, shown.ssd_tokens, shown.residency) == (num_stored, num_stored, "dram")
    assert [block.first_token for block in shown.blocks] == list(range(0, num_stored, BLOCK_TOKENS))
    assert all(block.dram_tokens == block.ssd_tokens and not block.saving_tokens for block in shown.blocks)
    turn, usage = shown.turn, session.usage
    assert (turn.phase, turn.prompt_tokens, turn.completion_tokens) == ("done", usage.prompt_tokens, 20)
    assert turn.cached_tokens == usage.num_cached_tokens > 0
    assert turn.saved_tokens == num_stored - turn.cached_tokens
    assert turn.ttft_s == usage.ttft_s
    spans = {span.name: span for span in turn.spans}
    assert list(spans) == ["queued", "load", "prefill", "decode", "save"]
    assert spans["queued"].start_s == 0
    assert spans["queued"].end_s == spans["prefill"].start_s <= spans["prefill"].end_s == spans["decode"].start_s
    assert spans["load"].busy_s == usage.load_s
    assert spans["load"].end_s <= spans["prefill"].end_s <= spans["decode"].end_s == turn.age_s
    assert spans["save"].start_s < spans["decode"].end_s <= spans["save"].end_s  # Its last token was published behind.


def test_the_end_of_a_save_is_told_when_it_is_there(engine, monkeypatch):
    session = engine.session(session_id="a")
    job = session.submit([user("a word of it")], sampling=SamplingParams(max_tokens=20))
    with monkeypatch.context() as held:
        held.setattr(engine._kv._saver, "poll", lambda *args, **options: [])
        while not job.done:
            engine.step()
        told = read_live(engine, "", "a").session.turn
    assert (told.phase, told.saved_tokens, told.spans[-1].name, told.spans[-1].end_s) == ("saving", 0, "save", None)
    before_s = time.perf_counter()
    engine.wait_for_saves()
    told = read_live(engine, "", "a").session.turn
    assert (told.phase, told.saved_tokens) == ("done", len(session.token_ids) - 1)
    assert before_s <= job.submitted_s + told.spans[-1].end_s <= time.perf_counter()


def test_a_queue_is_told_in_order_with_its_windows_and_nothing_of_others(tmp_path):
    with engine_kit.small_engine(store=engine_kit.ssd_store(tmp_path), max_batch_size=1) as engine:
        names = [f"ann/{i}" for i in range(3)] + ["ben/0"]
        sessions = [engine.session(session_id=name, tenant=name[:3]) for name in names]
        for session in sessions[1:]:
            engine_kit.say(session, "to be stored before", 4)
        engine.wait_for_saves()
        jobs = [session.submit([user("next")]) for session in sessions]
        jobs.append(engine.session(session_id="ann/late", tenant="ann").submit([user("later")], priority=1))
        engine.step()
        told, others, stats = read_live(engine, "ann"), read_live(engine, "ben"), engine.store_stats()
        stored = engine.stored.find("ann/1", tenant="ann")
        for job in jobs:
            engine.cancel(job)
        assert [(each.session_id, each.phase, each.is_own) for each in told.running] == [("0", "decode", True)]
        lengths = [len(job.prompt_ids) for job in jobs]
        assert [(each.session_id, each.is_own, each.residency, each.num_tokens) for each in told.queue.waiting] == [
            *(("1", True, "dram", lengths[1]), ("2", True, "dram", lengths[2])),
            *((None, False, "dram", 0), ("late", True, "absent", lengths[4])),
        ]
        assert (told.queue.num_waiting, told.queue.eviction_window_jobs) == (4, 4)
        mean_blocks = (
            stats.ssd.used_bytes / stats.ssd.num_sessions / (stored.ssd_bytes / -(-stored.ssd_tokens // BLOCK_TOKENS))
        )
        mean_bytes = mean_blocks * BLOCK_TOKENS * engine_kit.TOKEN_BYTES
        assert told.queue.prefetch_window_jobs == look_ahead_window(stats.capacity_bytes, mean_bytes)
        assert all(each.in_prefetch_window and each.in_eviction_window for each in told.queue.waiting)
        assert [each.session_id for each in others.queue.waiting] == [None, None, "0", None]
        assert [each.session_id for each in others.running] == [None]


@pytest.mark.parametrize(("policy", "looks"), [("scheduler_aware", True), ("return_aware", True), ("lru", False)])
def test_the_eviction_window_is_the_policys(policy, looks):
    store = StoreConfig(dram_gib=0.02, block_tokens=BLOCK_TOKENS, eviction_policy=policy)
    with engine_kit.small_engine(store=store) as engine:
        jobs = [engine.session().submit([user("hello")]) for _ in range(3)]
        windows = engine.stored.windows
        assert (windows.prefetch_jobs, windows.eviction_jobs) == (0, 3 if looks else 0)  # No SSD to fetch from.
        for job in jobs:
            engine.cancel(job)


# The route.


def test_the_answer_is_what_engine_and_store_say_and_a_session_its_own_tenants(server):
    session_id = converse(server, "ann", "hello there", "what else is there", max_tokens=12)
    server.engine.wait_for_saves()
    told, stats = snapshot(server, session_id=session_id), server.engine.store_stats()
    for tier, said in zip(told["tiers"], (stats, stats.ssd), strict=True):
        assert (tier["used_bytes"], tier["capacity_bytes"]) == (said.used_bytes, said.capacity_bytes)
    moved = {"load": stats.loaded_bytes, "save": stats.saved_bytes}
    moved |= {"fetch": stats.ssd.fetched_bytes, "flush": stats.ssd.flushed_bytes}
    assert {move["name"]: move["num_bytes"] for move in told["moves"]} == moved
    assert told["session"]["session_id"] == session_id
    assert told["session"]["turn"]["cached_tokens"] > 0
    assert snapshot(server, key="ben", session_id=session_id)["session"] is None
    assert snapshot(server, session_id="no such")["session"] is None


def events_of(lines):
    return (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def test_the_stream_tells_at_once_and_then_what_changes(server):
    with server.http("ann") as http, http.stream("GET", "/live", params={"interval_s": 0.1}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.iter_lines())
        first = next(events)
        converse(server, "ann", "something new", max_tokens=4)
        for event in events:  # Until the save shows.
            assert event | {"at_s": 0} != first | {"at_s": 0}
            if event["moves"][1]["num_bytes"] > first["moves"][1]["num_bytes"]:
                break


def test_viewers_of_the_same_cost_one_reading(server, monkeypatch):
    calls, call = [], server.service.loop.call

    async def counted(function):
        calls.append(function)
        return await call(function)

    monkeypatch.setattr(server.service.loop, "call", counted)
    with contextlib.ExitStack() as stack:
        streams = []  # One that is let go of is closed.
        for _ in range(5):
            http = stack.enter_context(server.http("ben"))
            response = stack.enter_context(http.stream("GET", "/live", params={"interval_s": 0.1}))
            streams.append(events_of(response.iter_lines()))
            assert next(streams[-1])["session"] is None
        started_s, num_before = time.monotonic(), len(calls)
        server_kit.wait_for(lambda: len(calls) >= num_before + 4)
        assert len(calls) - num_before <= (time.monotonic() - started_s) / 0.1 + 2


def test_the_stream_ends_when_the_server_stops():
    with server_kit.running() as running, running.http() as http:
        with http.stream("GET", "/live", params={"interval_s": 60}, timeout=DEADLINE_S / 2) as response:
            lines = response.iter_lines()
            assert next(events_of(lines))["num_slots"] == engine_kit.SMALL.max_batch_size
            running.state.stopping = True
            assert not list(events_of(lines))
        assert http.get("/live").status_code == 503


def test_the_page_wants_neither_key_nor_engine(server):
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"].keys()
        assert "/live/snapshot" in paths
        assert not {"/", "/live", "/page/{name}"} & paths, "a schema has what ends, and what is for programs"
        page = http.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        for name in ("page.css", "page.js", "icon.svg"):
            assert f"/page/{name}" in page.text
            assert http.get(f"/page/{name}").headers["x-content-type-options"] == "nosniff"
        for name in ("other.js", "..%2Fapp.py", "__init__.py"):
            assert http.get(f"/page/{name}").status_code == 404


def test_totals_are_everybody_s_and_a_terminal_shows_them(server, monkeypatch):
    converse(server, "ann", "One.", "Two.")
    server_kit.wait_until_idle(server)
    found = snapshot(server, "ben")["done"]
    assert found == {name: getattr(server.engine.metrics, name) for name in found}
    assert found["turns"] >= 2
    assert found["cached_tokens"] > 0

    monkeypatch.setenv("CA_JAX_API_KEY", "ann")
    ended = run_script("top", f"--url={server.url}", "--once", "--interval_s=0.1")
    assert ended.code == 0, ended.err
    assert f"0 of 8 slots, 0 waiting · {found['turns']} turns, 0.0 a minute" in ended.out
    assert all(name in ended.out for name in ("dram", "ssd", "load", "save", "fetch", "flush"))
    refused = run_script("top", f"--url={server.url}", "--once", "--api_key=nobody")
    assert (refused.code, "401" in refused.err, "CA_JAX_API_KEY" in refused.err) == (1, True, True)


def test_a_terminal_shows_rates_of_two_moments_jobs_by_slot_and_nobody_else_s_names():
    def moment(at_s, **done):
        job = {"session_id": "trip", "is_own": True, "num_tokens": 70}
        other = {"session_id": None, "is_own": False, "num_tokens": 0}
        tier = {
            "name": "dram",
            "used_bytes": 5,
            "capacity_bytes": 10,
            "num_sessions": 3,
            "num_hits": 2,
            "num_evictions": 1,
        }
        counts = ("turns", "prompt_tokens", "cached_tokens", "completion_tokens", "draft_tokens", "accepted_tokens")
        return {
            "at_s": at_s,
            "num_slots": 2,
            "running": [{**job, "slot": 0, "phase": "decode"}, {**other, "slot": 1, "phase": "prefill"}],
            "queue": {"num_waiting": 20, "waiting": [{**other, "residency": "ssd"}] * 20},
            "tiers": [tier],
            "moves": [{"name": "load", "num_bytes": int(at_s * 3000), "num_moves": 2, "bytes_per_s": None}],
            "done": dict.fromkeys(counts, 0) | done,
        }

    before = moment(1.0, turns=5, prompt_tokens=100, completion_tokens=10)
    now = moment(
        3.0, turns=7, prompt_tokens=500, cached_tokens=300, completion_tokens=110, draft_tokens=40, accepted_tokens=30
    )
    console = rich.console.Console(file=io.StringIO(), width=180)
    console.print(top.screen(now, before))
    text = console.file.getvalue()
    assert "2 of 2 slots, 20 waiting · 7 turns, 60.0 a minute · generated 50.0 tokens/s" in text
    assert "prompts 200 tokens/s (50 computed) · cached 60.0% of prompts so far" in text
    assert "30 tokens of answers took no step, 75% of those checked" in text
    assert "█" * 12 + "░" * 12 in text
    assert "3.0 kB/s" in text
    assert "and 6 more" in text
    assert (text.count("trip"), text.count("(another tenant's)"), text.count("waits, KV on SSD")) == (1, 15, 14)


@pytest.mark.parametrize(
    ("url", "wanted"),
    [("http://127.0.0.1:1", "must be a server that runs"), ("nowhere", "unknown url type")],
)
def test_a_server_that_is_not_there_is_named(url, wanted):
    ended = run_script("top", f"--url={url}", "--once")
    assert ended.code == 1
    assert wanted in ended.err
    assert url in ended.err


def test_the_last_hour_has_what_was_and_a_tenant_s_own_turns(server):
    for key in ("ann", "ben"):
        converse(server, key, "One.", "Two.")
    server_kit.wait_until_idle(server)
    server.state.service.history.sample(server.engine)
    hours = {}
    for key in ("ann", "ben"):
        with server.http(key) as http:
            hours[key] = http.get("/live/history").json()
    last = hours["ann"]["samples"][-1]
    assert last["done"] == snapshot(server)["done"]
    assert {name: share > 0 for name, share in last["used_shares"].items()} == {"dram": True, "ssd": True}
    names = {key: {turn["session_id"] for turn in hour["slowest"]} for key, hour in hours.items()}
    assert all(names.values())
    assert None not in names["ann"] | names["ben"], "another tenant's turns, and how long its prompts were"
    assert not names["ann"] & names["ben"]
    waits = [turn["ttft_s"] for turn in hours["ann"]["slowest"]]
    assert waits == sorted(waits, reverse=True)


def test_who_may_read_metrics_sees_every_tenant_s_turns_and_no_name_of_another():
    history = History()
    with engine_kit.small_engine() as engine:
        for name in ("ann", "ben"):
            session = engine.session(session_id=f"{name}/a", tenant=name)
            engine_kit.say(session, "so", 2)
            history.add(session.job)
    told = history.read("ann", is_operator=True).slowest
    assert {turn.session_id for turn in told} == {"a", None}
    assert [turn.session_id for turn in history.read("ann", is_operator=False).slowest] == ["a"]
