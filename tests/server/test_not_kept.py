"""An explicit `store: false`: nothing of the request outlives it, in no tier, file, log or table, however it ends."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import zlib
from pathlib import Path

import numpy as np
import openai
import pytest

from tests import server_kit as sk
from tests.server_kit import assistant, cached, chat, ssd_store, text_of, user, wait_until_idle

SECRET = "the word is xylophonequartz"
CONTEXT = "a paper on vexillology and jackdaws"


@pytest.fixture
def server(tmp_path):
    with sk.running(store=ssd_store(tmp_path), max_batch_size=1) as running:
        yield running


def texts_in(directory: Path) -> str:
    """All that files spell: as text, as token ids (a token of this model is a character), and what is compressed."""
    found = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        raw = path.read_bytes()
        found.append(raw.decode("latin-1"))
        found.extend(
            spelled(np.frombuffer(raw[shift : len(raw) - (len(raw) - shift) % 4], "<i4")) for shift in range(4)
        )
        if raw.startswith(b"SQLite format 3"):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                    for value in (value for row in db.execute(f"SELECT * FROM {table}") for value in row):
                        if isinstance(value, bytes):
                            with contextlib.suppress(zlib.error):
                                found.append(zlib.decompress(value).decode())
                            found.append(spelled(np.frombuffer(value[: len(value) // 4 * 4], "<i4")))
    return "\n".join(found)


def spelled(ids: np.ndarray) -> str:
    return "".join(chr(token) if 0 < token < 256 else "\0" for token in ids)


def texts_in_memory(engine) -> str:
    """What the store has KV of, in DRAM or on its way out of it, and what is known of conversations beside that."""
    stored = (spelled(entry.token_ids) for entry in engine._kv.store._entries)
    return "\n".join([*stored, repr(vars(engine._kv.conversations))])


def kv_files(directory: Path) -> dict[str, str]:
    """The files that KV is in, and what they hold."""
    paths = (path for path in directory.rglob("*") if path.is_file() and "sqlite" not in path.name)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


class Kept:
    """All that is kept: files of KV, keys in the store, open conversations, states that are known."""

    def __init__(self, server, directory):
        self._server, self._directory = server, directory
        server.engine.wait_for_saves()
        self._before = self._now()

    def _now(self):
        engine = self._server.engine
        opened = [session.session_id for session in engine.sessions]
        stored = {info.key for info in engine.stored.list()}
        return kv_files(self._directory), stored, opened, len(self._server.service.router._states)

    def spelt(self):
        return texts_in(self._directory) + texts_in_memory(self._server.engine)

    def assert_nothing_is_said(self):
        assert not re.search("xylophone|vexillology", self.spelt())

    def assert_nothing_more(self):
        wait_until_idle(self._server)
        self._server.engine.wait_for_saves()
        self.assert_nothing_is_said()
        assert self._now() == self._before


def test_it_is_answered_alike_and_nothing_of_it_is_kept(said_by_engine, server, tmp_path):
    with server.client() as client:
        common = [user("what everybody asks first, at some length " * 3)]
        first = chat(client, common)
        history = [*common, assistant(text_of(first))]
        kept = Kept(server, tmp_path)
        followed = [*history, user(SECRET)]
        expected = said_by_engine(followed)
        named = {"session_id": first.session_id, "session_state": first.session_state}
        for messages, more in ((followed, {}), ([user(SECRET)], named), (followed, named)):
            answer = chat(client, messages, store=False, extra_body=more)
            assert text_of(answer) == expected
            assert cached(answer) > 100, "what others have stored is read"
            assert not {"session_id", "session_state"} & answer.model_extra.keys(), "there is nothing to go on with"
        kept.assert_nothing_more()
        pieces = list(chat(client, followed, store=False, stream=True, n=2, temperature=1))
        assert not any({"session_id", "session_state"} & piece.model_extra.keys() for piece in pieces)
        kept.assert_nothing_more()
        chat(client, [user(SECRET)], 300, store=False, extra_body={"ignore_eos": True, "context": [CONTEXT]})
        chat(client, [user(SECRET)], 480, store=False, extra_body={"ignore_eos": True})
        cut = chat(client, [*history, user(SECRET + "y" * 360)], store=False)
        assert cut.usage.ca_jax["dropped_tokens"] > 0
        chat(client, [user(SECRET)], store=False, extra_body={"expected_resume_seconds": 30})
        kept.assert_nothing_more()
        again = chat(client, [user("go on")], extra_body=named)
        assert again.session_id == first.session_id, "it stands where it stood"
        chat(client, [user(SECRET)])
        server.engine.wait_for_saves()
        for found in (texts_in(tmp_path), texts_in_memory(server.engine)):
            assert "xylophone" in found, "what is stored would have been seen"


def test_nothing_of_it_is_kept_in_the_middle_either_or_if_it_breaks(server, tmp_path, monkeypatch):
    """A killed server leaves nothing behind either: what is on disk in the middle is what would be found."""
    with server.client(max_retries=0) as client:
        chat(client, [user("somebody else")])
        kept = Kept(server, tmp_path)
        asked = {"store": False, "extra_body": {"ignore_eos": True, "context": [CONTEXT]}}
        with chat(client, [user(SECRET)], 400, stream=True, **asked) as stream:
            for _, _piece in zip(range(80), stream, strict=False):
                pass
            assert server.engine.num_jobs[0] == 1
            server.engine.keep()
            kept.assert_nothing_is_said()
            with chat(client, [user(SECRET)], stream=True, **asked):  # Pre-loaded, and never begun.
                sk.wait_for(lambda: server.engine.num_jobs[1] == 1)
        kept.assert_nothing_more()  # Both were left in the middle.
        with pytest.raises(openai.APIStatusError, match="not there in time"):
            chat(client, [user(SECRET)], 400, store=False, extra_body={"ignore_eos": True, "timeout_s": 0.05})
        kept.assert_nothing_more()
        with monkeypatch.context() as broken:
            broken.setattr(server.engine._runner.sampler, "start", lambda *_: 1 / 0)
            with pytest.raises(openai.InternalServerError):
                chat(client, [user(SECRET)], **asked)
        kept.assert_nothing_more()
        with pytest.raises(openai.BadRequestError):
            chat(client, [user(SECRET), user(" ")], store=False)
        kept.assert_nothing_more()
