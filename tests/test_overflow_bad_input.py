"""What cannot be is refused with an error that says what was wanted and found, and the session goes on as it was."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from ca_jax.config import EngineConfig
from ca_jax.errors import ContextWindowError, InvalidRequestError, SessionBusyError, SessionClosedError
from ca_jax.overflow.config import OverflowConfig
from ca_jax.overflow.discarding import DiscardContext
from ca_jax.recompute.drift import Drift
from tests import engine_kit as kit
from tests import overflow_kit as ok


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncation_ratio": 0.0}, r"truncation_ratio must be a share of the window in \(0, 1\], got 0"),
        ({"truncation_ratio": -0.5}, r"in \(0, 1\], got -0.5"),
        ({"truncation_ratio": 1.001}, r"in \(0, 1\], got 1.001"),
        ({"truncation_ratio": float("nan")}, r"in \(0, 1\], got nan"),
        ({"method": "re"}, "overflow method must be one of ca, tt, of; got 're'"),
        ({"keep_first_tokens": -1}, "keep_first_tokens must be a number of tokens >= 0, got -1"),
        ({"keep_first_tokens": 1.5}, "keep_first_tokens must be a number of tokens >= 0, got 1.5"),
        ({"keep_first_tokens": True}, "keep_first_tokens must be a number of tokens >= 0, got True"),
        ({"anchor_tokens": -4}, "anchor_tokens must be a number of tokens >= 0, got -4"),
        ({"repair_ratio": 1.5}, r"repair_ratio must be a share of the tokens in \[0, 1\], got 1.5"),
        ({"repair_ratio": -0.1}, r"repair_ratio must be a share of the tokens in \[0, 1\], got -0.1"),
        ({"discarder": "newest"}, "token discarder must be one of oldest, .*; got 'newest'"),
        ({"discarder": "newest", "whole_turns": True}, "token discarder must be one of oldest, .*; got 'newest'"),
        (
            {"discarder": "sinks", "whole_turns": True},
            "whole_turns must have the oldest leave first, got the discarder 'sinks'",
        ),
    ],
)
def test_a_config_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        OverflowConfig(**fields)


@pytest.mark.parametrize("keep_first", [ok.WINDOW, ok.WINDOW + 1, 10**6])
def test_first_tokens_that_fill_the_window(keep_first):
    """Known by the config where it names the window, and by the engine where it is the model's."""
    message = f"keep_first_tokens must be fewer than the context window of {ok.WINDOW} tokens, got {keep_first}"
    with pytest.raises(ValueError, match=message):
        EngineConfig(context_window=ok.WINDOW, overflow=ok.config(keep_first))
    with pytest.raises(ValueError, match=f"context window of {kit.WINDOW} tokens"):
        kit.small_engine(context_window=None, overflow=ok.config(max(keep_first, kit.WINDOW)))


@pytest.fixture(scope="module")
def engine():
    with ok.engine_of(ok.config()) as engine:
        yield engine


@pytest.fixture
def begun(engine) -> ok.Pair:
    """A conversation of 68 tokens; whatever is refused, it goes on right, over its next overflow."""
    pair = ok.Pair(engine)
    pair.turns(60)
    before = pair.session.conversation, engine.metrics.truncations
    yield pair
    assert (pair.session.conversation, engine.metrics.truncations) == before
    pair.turns(20, 50)
    assert engine.metrics.truncations == before[1] + 1
    pair.session.close()


@pytest.mark.parametrize("num_tokens", [ok.WINDOW, ok.WINDOW + 1, 5 * ok.WINDOW])
def test_a_message_longer_than_the_window(begun, num_tokens):
    with pytest.raises(ContextWindowError, match=f"under the context window of {ok.WINDOW} tokens, got {num_tokens}"):
        begun.session.send_ids(kit.prompt(num_tokens))


def test_a_text_longer_than_the_window(begun):
    with pytest.raises(ContextWindowError, match=f"under the context window of {ok.WINDOW} tokens, got"):
        begun.session.send("x" * ok.WINDOW)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([68], "positions of a context of 68 tokens, got 68"),
        ([-1, 3], "positions of a context of 68 tokens, got -1"),
        ([3, 4, 3], "each position once, got repeats of 3"),
        (range(68), "must be fewer than all, got all 68"),
        (np.ones(68, bool), "must be fewer than all, got all 68"),
        (np.zeros(67, bool), "bool mask of 68 tokens, got a mask of 67"),
        (np.zeros(69, bool), "bool mask of 68 tokens, got a mask of 69"),
        ([1.5], "got an array of shape .1,. and dtype float64"),
        ([[1, 2]], "got an array of shape"),
        ("all", "got an array of shape"),
        ([[1], [2, 3]], "got what makes no array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "tokens",
)
def test_tokens_that_cannot_be_discarded(begun, tokens, message):
    with pytest.raises(InvalidRequestError, match=message):
        begun.session.discard(tokens)


def test_nothing_is_there_to_discard(engine):
    session = engine.session()
    with pytest.raises(InvalidRequestError, match="positions of a context of 0 tokens, got 0"):
        session.discard([0])
    assert session.discard([]) == 0
    ok.Pair(engine, session).turns(20, 100, 20)


def test_a_turn_runs(engine):
    pair = ok.Pair(engine)
    pair.turns(60)
    answer = pair.session.send_ids(kit.prompt(30), max_tokens=60)
    job = answer._job
    for _ in range(45):  # Its window is full after 30.
        next(answer)
        with pytest.raises(SessionBusyError, match="still answers"):
            pair.session.discard([0])
    assert job.dropped_tokens
    kit.drain(answer)
    assert job.output_ids == pair.reference.say(kit.prompt(30), 60)
    assert pair.session.token_ids == pair.reference.token_ids
    pair.turns(20)


def test_a_session_that_is_closed(engine):
    session = engine.session()
    ok.say(session, kit.prompt(60), 4)
    session.close()
    with pytest.raises(SessionClosedError, match="is closed"):
        session.discard([0])


# Drift.


def drift_of(fingerprint: str, num_layers: int = 3) -> Drift:
    return Drift(
        values=np.zeros((num_layers, 2, 2, 16), np.float32),
        fingerprint=fingerprint,
        window=ok.WINDOW,
        truncation_ratio=0.5,
        num_tokens=1,
    )


def test_the_drift_of_another_model(tmp_path):
    path = str(tmp_path / "drift.npz")
    for drift in (drift_of("another"), drift_of(kit.tiny_model().fingerprint, num_layers=4)):
        drift.save(path)
        with pytest.raises(ValueError, match=r"drift must be \[3, 2, 2, 16\] of the model with fingerprint"):
            ok.engine_of(ok.config(drift=path))


@pytest.mark.parametrize("content", [b"", b"no drift", b"PK\x03\x04 neither"])
def test_a_file_that_is_no_drift(tmp_path, content):
    path = tmp_path / "drift.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the file must be of drift, got .*drift.npz"):
        ok.engine_of(ok.config(drift=str(path)))


def test_arrays_that_are_no_drift(tmp_path):
    path = str(tmp_path / "drift.npz")
    np.savez(path, values=np.zeros(3))
    with pytest.raises(ValueError, match="the file must be of drift"):
        ok.engine_of(ok.config(drift=path))


def test_a_drift_that_is_cut_short(tmp_path):
    path = tmp_path / "drift.npz"
    drift_of(kit.tiny_model().fingerprint).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="the file must be of drift"):
        ok.engine_of(ok.config(drift=str(path)))


def test_no_file_of_drift(tmp_path):
    with pytest.raises(FileNotFoundError):
        ok.engine_of(ok.config(drift=str(tmp_path / "nothing.npz")))


# Discarders of one's own.


@dataclasses.dataclass
class Unruly:
    """Names the oldest tokens, until it is told to do something else."""

    choice: object = None
    name: ClassVar[str] = "unruly"
    needs_attention: ClassVar[bool] = False
    needs_kv: ClassVar[bool] = False

    def choose(self, context: DiscardContext) -> np.ndarray:
        if isinstance(self.choice, Exception):
            raise self.choice
        oldest = np.arange(context.keep_first, context.keep_first + context.num_leaving)
        return oldest if self.choice is None else self.choice


UNRULY = [
    (RuntimeError("no idea"), RuntimeError, "no idea"),
    ([10**6], InvalidRequestError, "positions of a context of"),
    ([5, 5], InvalidRequestError, "each position once"),
    ([1.5], InvalidRequestError, "dtype float64"),
    ([], InvalidRequestError, r"discarder unruly must name at least \d+ tokens, got 0"),
]


@pytest.mark.parametrize(
    ("choice", "error", "message"), UNRULY, ids=["raises", "strangers", "repeats", "floats", "none"]
)
def test_a_discarder_that_breaks_before_a_prompt(choice, error, message):
    """The call breaks, the session stays as it was."""
    discarder = Unruly()
    with ok.engine_of(ok.config(discarder=discarder)) as engine:
        pair = ok.Pair(engine)
        pair.turns(100)
        before = pair.session.conversation
        discarder.choice = choice
        with pytest.raises(error, match=message):
            pair.session.send_ids(kit.prompt(50))
        assert pair.session.conversation == before
        discarder.choice = None
        pair.turns(50)


@pytest.mark.parametrize(
    ("choice", "error", "message"), UNRULY, ids=["raises", "strangers", "repeats", "floats", "none"]
)
def test_a_discarder_that_breaks_in_an_answer(choice, error, message):
    """That answer gets the error, and its session is as before it; others go on."""
    discarder = Unruly()
    with ok.engine_of(ok.config(discarder=discarder)) as engine:
        pair, other = ok.Pair(engine), ok.Pair(engine)
        pair.turns(60)
        before = pair.session.conversation
        discarder.choice = choice
        answer = pair.session.send_ids(kit.prompt(40), max_tokens=60)
        beside = other.session.send_ids(kit.prompt(30), max_tokens=60)
        job = beside._job
        kit.drain(beside)  # Runs both.
        with pytest.raises(error, match=message):
            kit.drain(answer)
        assert job.output_ids == other.reference.say(kit.prompt(30), 60)
        assert pair.session.conversation == before
        discarder.choice = None
        answer = ok.say(pair.session, kit.prompt(20), 8)  # What was stored of the turn that broke may serve it.
        assert answer == pair.reference.say(kit.prompt(20), 8)
        pair.turns(60)
        other.turns(60)


def test_a_discarder_that_names_fewer_than_it_may():
    """As many as must leave will do; then it is asked again for the next token."""
    discarder = ok.Recorded(Unruly(choice=[5]))
    with ok.engine_of(ok.config(discarder=discarder)) as engine:
        pair = ok.Pair(engine)
        pair.turn(kit.prompt(100), 50)
        assert engine.metrics.truncations == pair.session.usage.dropped_tokens == 22
        with pytest.raises(InvalidRequestError, match="there must name at least 9 tokens, got 1"):
            pair.session.send_ids(kit.prompt(8))
