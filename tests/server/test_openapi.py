"""Sessions and errors against the server's description of itself; `tools.fuzz_server` holds many more against it."""

from __future__ import annotations

import asyncio

import jsonschema
import pytest

from ca_jax.server.app import make_app
from ca_jax.server.tenants import Tenant, Tenants
from tests import server_kit as sk
from tests.server_kit import user
from tools.fuzz_server import Recorder


@pytest.mark.parametrize("tenants", [Tenants(), Tenants([(b"", Tenant(name="a"))])], ids=["no keys", "keys"])
def test_errors_are_described_as_they_are_told_and_keys_where_they_are_asked_for(tenants):
    description = make_app(lambda: pytest.fail("nobody asked for an engine"), tenants=tenants).openapi()
    components = description["components"]
    assert "HTTPValidationError" not in components["schemas"]
    scheme = {"key": {"type": "http", "scheme": "bearer"}} if tenants.asks_for_keys else None
    assert components.get("securitySchemes") == scheme
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            answers, wants_key = operation["responses"], tenants.asks_for_keys and path != "/health"
            assert "422" not in answers, "wrong fields are a 400"
            assert ("401" in answers) == wants_key, (method, path)
            assert operation.get("security") == ([{"key": []}] if wants_key else None)
            if "requestBody" in operation:
                assert {"400", "413", "503"} <= answers.keys(), (method, path)
            for status in answers.keys() - {"200", "201"} - ({"503"} if path == "/health" else set()):
                told = answers[status]["content"]["application/json"]["schema"]
                name = "MessagesErrorAnswer" if path.startswith("/v1/messages") else "ErrorAnswer"
                assert told == {"$ref": f"#/components/schemas/{name}"}, (method, path, status)


def test_sessions_and_errors_are_as_the_server_describes_them(server):
    with server.http() as http:
        components = http.get("/openapi.json").json()["components"]

        def check(name, answer):
            jsonschema.validate(answer.json(), {"$ref": f"#/components/schemas/{name}", "components": components})

        check("ListedSession", http.post("/v1/sessions", json={"session_id": "described", "system": "be brief"}))
        body = {"model": sk.MODEL, "messages": [user("a")], "session_id": "described", "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        server.engine.wait_for_saves()
        shown = http.get("/v1/sessions/described")
        assert shown.json()["stored"] is not None
        check("ShownSession", shown)
        check("ShownSession", http.post("/v1/sessions/described", json={"pinned": True, "ttl_s": 3}))
        check("ShownSession", http.post("/v1/sessions/described/fork", json={"at": 1}))
        check("SessionList", http.get("/v1/sessions"))
        for answer in (http.delete("/v1/sessions/nobody"), http.get("/v1/sessions?limit=x")):
            check("ErrorAnswer", answer)


def test_the_fuzzer_sees_what_must_not_leave_the_server():
    async def breaks(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Traceback (most rec", "more_body": True})
        await send({"type": "http.response.body", "body": b"ent call last):"})

    async def refuses(scope, receive, send):
        await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"1")]})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message):
        pass

    for app, seen in ((breaks, 1), (refuses, 0)):
        recorder = Recorder(app)
        asyncio.run(recorder({"type": "http", "method": "GET", "raw_path": b"/x"}, None, send))
        assert (len(recorder.errors), len(recorder.leaks)) == (seen, seen)
        assert sum(recorder.statuses["others"].values()) == 1
