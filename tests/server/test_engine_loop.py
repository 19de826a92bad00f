"""The engine's thread and the way to it, without a socket: all that is asked runs between two steps."""

import asyncio
import contextlib
import functools
import threading

import pytest

from ca_jax.server.engine_loop import EngineLoop
from ca_jax.turns.requests import FinishReason, SamplingParams
from tests import engine_kit as kit
from tests.server_kit import DEADLINE_S, held, on_loop, user, wait_until


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine(max_batch_size=2) as engine:
        yield engine


@contextlib.asynccontextmanager
async def looping(engine, **options):
    loop = EngineLoop(engine, **options)
    try:
        yield loop
    finally:
        await loop.stop()


def turn(engine, text="hello", max_tokens=8):
    return [engine.session().submit([user(text)], sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True))]


@on_loop
async def test_parts_come_in_order_and_all_of_a_step_by_one_call(engine, monkeypatch):
    calls, ended = [], []
    async with looping(engine, on_ended=lambda job: ended.append(job) or "behind it") as loop:
        post = asyncio.get_running_loop().call_soon_threadsafe
        monkeypatch.setattr(
            asyncio.get_running_loop(), "call_soon_threadsafe", lambda *args: calls.append(args) or post(*args)
        )
        feed = await loop.submit(lambda engine: turn(engine, "one") + turn(engine, "two"))
        texts, counts = ["", ""], [[], []]
        async for part in feed.parts():
            texts[part.index] += part.text
            counts[part.index].append(part.num_tokens)
            assert part.state == ("behind it" if part.done else None)
    assert texts == ["".join(job.token_texts) for job in feed.jobs]
    assert all(each == sorted(set(each)) and each[-1] == 8 for each in counts)
    assert feed.jobs == sorted(ended, key=feed.jobs.index)
    assert len(calls) < sum(map(len, counts)), "listeners of one step are resumed together"


@pytest.mark.parametrize("is_begun", [False, True])
@on_loop
async def test_a_caller_that_is_cancelled_leaves_no_job_behind(engine, is_begun):
    async with looping(engine) as loop:
        submitted, begun = [], threading.Event()

        def submit(engine):
            submitted.extend(turn(engine, max_tokens=400))
            begun.set()
            return submitted

        with held(loop) as let_go:
            waiting = asyncio.ensure_future(loop.submit(submit))
            await asyncio.sleep(0)
            if is_begun:  # And the event loop does not know yet.
                let_go.set()
                assert begun.wait(DEADLINE_S)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await wait_until(lambda: loop.num_jobs == 0)
    assert len(submitted) == is_begun
    assert all(job.finish_reason is FinishReason.CANCELLED for job in submitted)


@on_loop
async def test_the_end_cancels_what_runs_and_tells_its_listener(engine):
    async with looping(engine) as loop:
        feed = await loop.submit(functools.partial(turn, max_tokens=400))
    parts = [part async for part in feed.parts()]
    assert parts[-1].done
    assert parts[-1].num_tokens < 400
    assert feed.jobs[0].finish_reason is FinishReason.CANCELLED
    loop.cancel(feed)  # Nothing is left to be cancelled.
