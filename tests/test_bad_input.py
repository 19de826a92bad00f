"""Bad input gets an error that names it and says what was got; sessions go on as they were."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import ca_jax
from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.errors import (
    CaJaxError,
    ContextWindowError,
    EmptyMessageError,
    InvalidRequestError,
    SessionBusyError,
    SessionClosedError,
)
from ca_jax.overflow.config import DiscardContext, HeavyHitters, OverflowConfig
from ca_jax.session import Session
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit
from tests import overflow_kit as ok

# Configs.

NAN, INF = math.nan, math.inf
BAD_VALUES: dict[type, dict[str, list[Any]]] = {
    SamplingParams: {
        "max_tokens": [0],
        "temperature": [-0.1, NAN, INF],
        "top_k": [-1],
        "top_p": [0.0, 1.1],
        "min_p": [1.0, -0.1],
        "repetition_penalty": [0.0, INF],
        "presence_penalty": [-2.1, NAN],
        "frequency_penalty": [2.1],
        "logit_bias": [((5, 100.5),), ((4, 1.0), (5, -101))],
        "logprobs": [-1, 21],
        "seed": [-1, 2**32],
        "stop": [("fine", "")],
    },
    EngineConfig: {
        "dtype": ["float64"],
        "context_window": [0],
        "max_batch_size": [0],
        "max_num_batched_tokens": [-64, 1, 100, 513],
        "page_tokens": [0, -8, 12, 8.0, True],
        "kv_pool_gib": [0, -1.0, NAN, INF],
        "save_group_tokens": [0],
        "tensor_parallel_size": [0],
        "data_parallel_size": [0, 3],  # Slots are in equal parts.
        "weight_dtype": ["int3", None],
        "kv_rest_dtype": ["int4"],
        "read_buffer": ["some", 1.5, None, True, -1],
        "read_buffer_gib": [-1.0, NAN, INF],
        "write_buffer_gib": [-1.0, NAN, INF],
        "max_tpot_ms": [0, -1.0, NAN, INF],
        "queue_order": ["longest", "", None],
    },
    BlendConfig: {
        "mode": ["fuse"],
        "recompute_ratio": [1.01, -0.01, NAN],
        "min_recompute_ratio": [1.5, -1.0],
        "check_layers": [0, 1.0, True],
        "selection": ["last"],
    },
    OverflowConfig: {
        "method": ["re"],
        "truncation_ratio": [0.0, -0.5, 1.001, NAN],
        "keep_first_tokens": [-1, 1.5, True],
        "anchor_tokens": [-4, 1.5],
        "repair": ["all"],
        "repair_ratio": [1.5, -0.1],
        "discarder": ["newest"],
    },
}


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [(config, field, value) for config, fields in BAD_VALUES.items() for field in fields for value in fields[field]],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_a_value_outside_its_range_is_named_with_what_was_got(config, field, value):
    with pytest.raises((ValueError, InvalidRequestError)) as caught:
        config(**{field: value})
    says = str(caught.value)
    assert field.split("_")[0] in says
    assert "got" in says or "found" in says


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EngineConfig(read_buffer="off", read_buffer_gib=0.5), "read_buffer_gib.*off.*0.5"),
        (lambda: OverflowConfig(whole_turns=True, discarder="sinks"), "oldest.*sinks"),
        (lambda: OverflowConfig(whole_turns=True, discarder=HeavyHitters()), "oldest.*heavy_hitters"),
        (lambda: EngineConfig(context_window=128, overflow=ok.config(128)), "keep_first_tokens.*128 tokens, got 128"),
        (lambda: kit.small_engine(context_window=None, overflow=ok.config(512)), "keep_first_tokens.*512 tokens"),
        (lambda: kit.small_engine(context_window=513), "context_window.*512 tokens, got 513"),
        (lambda: kit.small_engine(store=ca_jax.StoreConfig(dram_gib=1e6)), "DRAM.*at most this machine's"),
        (lambda: EngineConfig(max_batch_size=64, max_num_batched_tokens=64), "above max_batch_size=64, got 64"),
        (lambda: kit.small_engine(read_buffer_gib=1e6), r"read_buffer_gib.*\d+\.\d\d GiB of memory, got 1000000"),
        (lambda: kit.small_engine(write_buffer_gib=1e6), r"write_buffer_gib.*\d+\.\d\d GiB of memory, got 1000000"),
        (lambda: kit.small_engine(blend=BlendConfig(check_layers=99)), "check_layers"),
    ],
)
def test_values_that_exclude_each_other_or_what_there_is_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# Models.


def test_text_for_a_model_without_tokenizer_is_refused_and_token_ids_are_served():
    with kit.small_engine(kit.model_of()) as engine:
        for call in (lambda: engine.generate(["text"]), lambda: engine.session().send("text")):
            with pytest.raises(InvalidRequestError, match=r"has no tokenizer.*token ids, got text"):
                call()
        (done,) = engine.generate([[65, 66]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert (len(done.token_ids), done.text) == (3, "")


def test_a_model_gives_logits_of_token_ids_and_refuses_others():
    model, ids = kit.tiny_model(), kit.prompt(9)
    assert model.logits(ids).shape == (9, 256)
    assert model.logits(ids)[-1].argmax() == kit.full_pass(ids)[0][-1].argmax()
    for wrong, says in (([], "at least one token"), ([256], "got 256"), ([65] * 513, "at most 512 tokens")):
        with pytest.raises(InvalidRequestError, match=says):
            model.logits(wrong)


def test_a_drift_of_another_model_and_one_that_is_not_there_are_refused(tmp_path):
    """What a file may be at all: test_drift."""
    path, _ = ok.random_drift(kit.model_of(), ok.WINDOW, tmp_path)
    for drift, error, says in (
        (path, ValueError, r"drift must be \[3, 2, 2, 16\]"),
        (f"{path}.npz", FileNotFoundError, r"drift\.npz\.npz"),
    ):
        with pytest.raises(error, match=says):
            kit.small_engine(**ok.SMALL, overflow=ok.config(drift=drift))


# Requests.


def while_busy(engine: ca_jax.Engine, call: Callable[[Session], object]) -> None:
    session = engine.session()
    answer = session.send("Hello.", max_tokens=20)
    next(answer)
    try:
        call(session)
    finally:
        kit.drain(answer)


def when_closed(engine: ca_jax.Engine, call: Callable[[Session], object]) -> None:
    session = engine.session()
    kit.say(session, "Hello.")
    session.close()
    call(session)


def ask(**options: Any) -> Callable[[ca_jax.Engine], object]:
    return lambda engine: engine.session().send("Hi.", **options)


BAD_REQUESTS: dict[str, tuple[Callable, type[CaJaxError], str]] = {
    "message longer than the window": (lambda e: e.session().send("x" * 600), ContextWindowError, r"512 tokens, got 6"),
    "prompt of just the window": (
        lambda e: e.generate(["fine", kit.prompt(kit.WINDOW)]),
        ContextWindowError,
        "512 tokens, got 512",
    ),
    "blank message": (lambda e: e.session().send(" \n"), EmptyMessageError, "blank"),
    "no token ids": (lambda e: e.session().send_ids([]), EmptyMessageError, "at least one token"),
    "empty prompt": (lambda e: e.generate([""]), EmptyMessageError, "at least one token"),
    "negative max_tokens": (lambda e: e.session().send_ids([65], max_tokens=-3), InvalidRequestError, "max_tokens.*-3"),
    "id above the vocabulary": (lambda e: e.session().send_ids([65, 256]), InvalidRequestError, r"\[0, 256\).*256"),
    "negative id": (lambda e: e.generate([[-1]]), InvalidRequestError, "got -1"),
    "bias of a token above the vocabulary": (
        ask(sampling=SamplingParams(logit_bias={256: 1.0})),
        InvalidRequestError,
        r"logit_bias.*\[0, 256\), got 256",
    ),
    "params for other prompts": (
        lambda e: e.generate(["a", "b"], [SamplingParams()]),
        InvalidRequestError,
        "each of 2 prompts, got 1",
    ),
    **{
        f"priority {value!r}": (ask(priority=value), InvalidRequestError, f"priority.*whole number, got {value!r}")
        for value in ("high", NAN, True)
    },
    "a turn of a closed session": (lambda e: when_closed(e, lambda s: s.send("So?")), SessionClosedError, "is closed"),
    "a turn while one runs": (lambda e: while_busy(e, lambda s: s.send("Quick!")), SessionBusyError, "still answers"),
    "rewinding while one runs": (lambda e: while_busy(e, lambda s: s.rewind(0)), SessionBusyError, "still answers"),
    "rewinding too far": (lambda e: e.session().rewind(1), InvalidRequestError, r"0\.\.0.*, got 1"),
    "discarding of nothing": (lambda e: e.session().discard([0]), InvalidRequestError, "context of 0 tokens, got 0"),
    "system message twice": (
        lambda e: e.session(session_id=e.sessions[-1].session_id, system="Be rude."),
        InvalidRequestError,
        "system message must come first",
    ),
}


@pytest.fixture
def bystander(engine) -> Iterator[Session]:
    """A conversation beside what goes wrong: afterwards it goes on from its stored KV, with the right tokens."""
    session = engine.session(system="You are a bystander.")
    kit.say(session, "Hello.")
    num_tokens = len(session.token_ids)
    yield session
    assert engine._scheduler.idle, "a job was left behind"
    assert kit.check_turn(session, "Go on.").num_cached_tokens == num_tokens - 1
    session.close()


@pytest.mark.parametrize(("request_", "error", "says"), BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_a_bad_request_is_refused_and_others_go_on(engine, bystander, request_, error, says):
    with pytest.raises(error, match=says) as caught:
        request_(engine)
    assert isinstance(caught.value, CaJaxError)


def test_a_refused_turn_leaves_its_own_session_as_it_was(engine):
    session = engine.session()
    kit.say(session, "Hello.")
    before = (session.conversation, session.usage)
    for message, max_tokens in (("x" * 600, 5), ("", 5), ("fine", 0)):
        with pytest.raises(CaJaxError):
            session.send(message, max_tokens=max_tokens)
    for discarded in ([len(session.token_ids)], [3, 4, 3], range(len(session.token_ids)), np.ones(3, bool), "all"):
        with pytest.raises(InvalidRequestError):
            session.discard(discarded)
    assert (session.conversation, session.usage) == before
    assert kit.check_turn(session, "Go on.").num_cached_tokens == len(before[0].token_ids) - 1


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


@pytest.fixture(scope="module")
def unruly() -> Iterator[tuple[Unruly, ca_jax.Engine]]:
    discarder = Unruly()
    with kit.small_engine(**ok.SMALL, overflow=ok.config(discarder=discarder)) as engine:
        yield discarder, engine


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        (RuntimeError("no idea"), RuntimeError, "no idea"),
        ([10**6], InvalidRequestError, "positions of a context of"),
        ([], InvalidRequestError, r"unruly.* at least \d+ tokens, got 0"),
    ],
    ids=["raises", "strangers", "none"],
)
def test_a_discarder_that_breaks_breaks_its_own_turn_alone(unruly, choice, error, says):
    """Before a prompt the call breaks, in an answer the answer; the session is as before, and others go on."""
    discarder, engine = unruly
    discarder.choice = None
    pair, other = ok.Pair(engine), ok.Pair(engine)
    pair.turns(60)
    before = pair.session.conversation
    discarder.choice = choice
    with pytest.raises(error, match=says):
        pair.session.send_ids(kit.prompt(100))
    assert pair.session.conversation == before
    answer = pair.session.send_ids(kit.prompt(40), max_tokens=60)
    beside = other.session.send_ids(kit.prompt(30), max_tokens=60)
    kit.drain(beside)  # Runs both.
    with pytest.raises(error, match=says):
        kit.drain(answer)
    assert beside.job.output_ids == other.reference.say(kit.prompt(30), 60)
    assert pair.session.conversation == before
    discarder.choice = None
    answered = ok.say(pair.session, kit.prompt(20), 8)  # What was stored of the turn that broke may serve it.
    assert answered == pair.reference.say(kit.prompt(20), 8)
    pair.turns(60)
    other.turns(60)


def test_a_discarder_may_name_fewer_than_it_is_asked_for():
    """As many as must leave will do; then it is asked again for the next token."""
    discarder = ok.Recorded(Unruly(choice=[5]))
    with ok.pair(ok.config(discarder=discarder)) as pair:
        pair.turn(kit.prompt(100), 50)
        assert pair.engine.metrics.truncations == pair.session.usage.dropped_tokens == 22
        with pytest.raises(InvalidRequestError, match="at least 9 tokens, got 1"):
            pair.session.send_ids(kit.prompt(8))
