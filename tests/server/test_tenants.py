"""Tenants by key: whose a request is, what others see of it, and files that are wrong."""

from __future__ import annotations

import collections
import hashlib
import random

import openai
import pytest

from ca_jax.server.tenants import EVERYBODY, Tenant, Tenants
from tests import server_kit as sk
from tests.server_kit import assistant, chat, ssd_store, text_of, user

A, B, C = "sk-of-lab-a-1", "sk-of-lab-a-2", "sk-of-lab-b"
FILE = f"""
[lab-a]
keys = ["{A}", "{B}"]
max_requests = 2

[lab-b]
keys_sha256 = ["{hashlib.sha256(C.encode()).hexdigest()}"]
salt = "pepper"
best_priority = -10
max_pinned = 8
metrics = true
"""


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    path = tmp_path_factory.mktemp("tenants") / "keys.toml"
    path.write_text(FILE)
    return Tenants.read(path)


@pytest.fixture(scope="module")
def server(tenants):
    with sk.running(tenants) as running:
        yield running


def test_a_key_says_whose_a_request_is(tenants):
    lab_a, lab_b = tenants.all
    assert (lab_a.name, lab_a.max_requests, lab_a.domain) == ("lab-a", 2, "lab-a")
    assert tenants.of_header(f"Bearer {A}") == tenants.of_header(f"bearer  {B}") == lab_a
    assert tenants.of_header(f"Bearer {C}") == lab_b
    assert lab_b.domain.startswith("lab-b.")
    assert lab_b.domain != Tenant(name="lab-b", salt="salt").domain
    for header in (None, "", "Bearer", "Bearer ", f"Basic {A}", A, f"Bearer {A}x", f"Bearer {A[:-1]}", "Bearer \udcff"):
        assert tenants.of_header(header) is None
    assert Tenants().of_header(None) == EVERYBODY
    assert (lab_a.best_priority, lab_a.max_pinned, lab_a.metrics) == (0, 0, False), (
        "what others would notice is asked for"
    )
    assert (lab_b.best_priority, lab_b.max_pinned, lab_b.metrics) == (-10, 8, True)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("keys = 3", "there must be a table for each tenant"),
        ("[a", "it must be TOML"),
        ("[a]\n", "at least one tenant with a key"),
        ('["a/b"]\nkeys = ["12345678"]', "a tenant's name must be"),
        ('[a]\nkey = ["12345678"]', "tenant a: fields must be of adapters, best_priority, keys, .*, salt; got key"),
        ('[a]\nkeys = "12345678"', "tenant a: keys must be a valid list$"),
        ('[a]\nkeys = ["12345678", "short"]', "tenant a: keys number 2 must have at least 8 characters$"),
        ('[a]\nkeys_sha256 = ["12345678"]', "keys_sha256 number 1 must match pattern .*64"),
        ('[a]\nkeys = ["12345678"]\nquota_gib = 0', "quota_gib must be greater than 0, got 0"),
        ('[a]\nkeys = ["12345678"]\nbest_priority = true', "best_priority must be a valid integer, got True"),
        ('[a]\nkeys = ["12345678"]\nbest_priority = -1001', "best_priority must be greater than or equal to -1000"),
        ('[a]\nkeys = ["12345678"]\nmax_pinned = -1', "max_pinned must be greater than or equal to 0, got -1"),
        ('[a]\nkeys = ["12345678"]\nmetrics = 1', "metrics must be a valid boolean, got 1"),
        ('[a]\nkeys = ["12345678"]\n[b]\nkeys = ["12345678"]', "each key must be there once"),
    ],
)
def test_a_file_that_is_wrong_says_where(text, match, tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        Tenants.read(path)


def test_a_quota_reaches_its_tenant_whatever_the_salt_or_is_refused_by_name(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[a]\nkeys = ["12345678"]\nsalt = "x"\n[b]\nkeys = ["23456789"]\nsalt = "y"\nquota_gib = 0.5')
    tenants = Tenants.read(path)
    a, b = tenants.all
    assert tenants.quotas({"a": 5000}) == {a.domain: 5000, b.domain: 1 << 29}
    with pytest.raises(ValueError, match="must name tenants of the file of API keys, got 'nobody'"):
        tenants.quotas({"nobody": 5000})
    with pytest.raises(ValueError, match="must leave out tenants that have a quota_gib, got 'b'"):
        tenants.quotas({"b": 5000})
    with pytest.raises(ValueError, match="got 'a'"):
        Tenants().quotas({"a": 5000})
    assert Tenants().quotas({"": 5000}) == {"": 5000}, "without keys everybody is one tenant"


def test_tenants_do_not_meet(server):
    with server.client(A) as one, server.client(B) as colleague, server.client(C) as other:
        asked = [user("the formula of the new alloy is nickel and tin " * 3)]
        first = chat(one, asked)
        named = {"session_id": first.session_id}
        followed = [*asked, assistant(text_of(first)), user("why?")]
        assert sk.cached(chat(other, followed)) == 0
        assert other.get("/sessions", cast_to=object)["data"][0]["id"] != first.session_id
        for call in (
            lambda: chat(other, [user("why?")], extra_body=named),
            lambda: other.get(f"/sessions/{first.session_id}", cast_to=object),
            lambda: other.post(f"/sessions/{first.session_id}", body={"pinned": True}, cast_to=object),
            lambda: other.post(f"/sessions/{first.session_id}/discard", body={"start": 0, "stop": 1}, cast_to=object),
            lambda: other.post(f"/sessions/{first.session_id}/fork", body={"at": 0}, cast_to=object),
            lambda: other.delete(f"/sessions/{first.session_id}", cast_to=object),
        ):
            with pytest.raises(openai.NotFoundError) as told:
                call()
            assert told.value.code == "session_not_found"
        assert other.post("/sessions", body={"session_id": first.session_id}, cast_to=object), "a name of its own"
        assert sk.cached(chat(colleague, followed)) > 100, "keys of one tenant share"
        assert colleague.get(f"/sessions/{first.session_id}", cast_to=object)["num_tokens"] > 0


ASKED = ("lookup", "find_prefix", "copy_prefix", "prepare_load", "complete_load", "abort_load")


def work_of(engine, client, content):
    """What a request of one turn has engine and store do, in counts; and its cached tokens."""
    engine.wait_for_saves()

    def counts():
        stats, store = engine.store_stats(), engine._kv.store
        of_engine = {name: value for name, value in vars(engine.metrics).items() if isinstance(value, int)}
        of_store = {"hits": stats.num_hits, "fetches": stats.ssd.num_fetches, "gaps": sum(stats.evict_to_reuse.counts)}
        of_store |= {"saved_bytes": stats.saved_bytes, "flushed_bytes": stats.ssd.flushed_bytes, **stats.misses}
        return of_engine | of_store | {call: number for call, number in store.calls.items() if call[0] in ASKED}

    before = collections.Counter(counts())
    answer = chat(client, [user(content)], 1)
    engine.wait_for_saves()
    return collections.Counter(counts()) - before, sk.cached(answer)


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_what_another_tenant_has_stored_is_as_much_work_as_what_nobody_has(tenants, tier, tmp_path):
    draw = random.Random(5)
    theirs, nobodys, own, first = ("".join(draw.choices("abcdefgh ", k=300)) for _ in range(4))
    with (
        sk.running(tenants, store=ssd_store(tmp_path), store_wrapper=sk.CountedStore) as server,
        server.client(A) as victim,
        server.client(C) as prober,
    ):
        engine = server.engine
        for client, text in ((prober, first), (prober, own), (victim, theirs)):  # The first one compiles.
            chat(client, [user(text)], 1)
        engine.wait_for_saves()
        if tier == "ssd":
            store = engine._kv.store.store
            for info in store.list():
                assert info.ssd_tokens
                store.leave_dram(info.key)
        of_theirs, cached_theirs = work_of(engine, prober, theirs)
        of_nobodys, cached_nobodys = work_of(engine, prober, nobodys)
        hits = [work_of(engine, prober, own), work_of(engine, victim, theirs)]
    assert cached_theirs == cached_nobodys == 0
    assert of_theirs == of_nobodys
    assert of_theirs["prompt_tokens"] > 300
    assert of_theirs["find_prefix", False] > 0, "it was looked for"
    assert not of_theirs["find_prefix", True] + of_theirs["hits"] + of_theirs["fetches"]
    for of_hit, cached in hits:
        assert cached > 256
        assert (of_hit["cached_tokens"], of_hit["hits"], of_hit["fetches"]) == (cached, 1, int(tier == "ssd"))
