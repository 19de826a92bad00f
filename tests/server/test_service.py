"""What one request and one tenant may ask for, each limit by itself, and what others notice of it; without a socket."""

import asyncio
import contextlib

import pytest

from ca_jax.errors import ContextWindowError, InvalidRequestError
from ca_jax.server.bodies import ChatRequest, CompletionRequest
from ca_jax.server.config import ServerConfig
from ca_jax.server.errors import ApiError
from ca_jax.server.service import Service
from ca_jax.server.tenants import EVERYBODY, Tenant, Tenants
from tests import engine_kit as kit
from tests.server_kit import MODEL, held, on_loop, user, wait_until

A, B = Tenant(name="lab-a", max_requests=4), Tenant(name="lab-b", best_priority=-5)
LIMITS = {"max_queue": 4, "max_chunks": 3, "max_chunk_tokens": 60, "max_lookups": 2, "max_open_sessions": 4}


@pytest.fixture(scope="module")
def engine():
    with kit.small_engine(max_batch_size=1) as engine:
        yield engine


@contextlib.asynccontextmanager
async def serving(engine, tenants=(A, B), **changes):
    keys = Tenants([(each.name.encode(), each) for each in tenants])
    config = ServerConfig(**{"served_model_name": MODEL, **LIMITS, **changes})
    service = Service(engine, config, keys)
    await service.begin()
    try:
        yield service
    finally:
        await service.stop()


def chat(content="hello", max_tokens=2, **fields):
    return ChatRequest(model=MODEL, messages=[user(content)], max_tokens=max_tokens, temperature=0, **fields)


async def answer(service, tenant, request):
    """The texts that a request is answered with."""
    begin = service.chat if isinstance(request, ChatRequest) else service.complete
    with service.admission.answering(tenant, request.num_answers, request.priority):
        async with begin(tenant, request) as feed:
            texts = [""] * len(feed.jobs)
            async for part in feed.parts():
                texts[part.index] += part.text
            return texts


@contextlib.asynccontextmanager
async def answering(service, tenant, **fields):
    """An answer that takes the only slot for as long as the block lasts."""
    task = asyncio.ensure_future(answer(service, tenant, chat("a long story", 400, ignore_eos=True, **fields)))
    await wait_until(lambda: service.loop.num_jobs > 0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: service.admission.answers.total() == service.loop.num_jobs == 0)


@contextlib.contextmanager
def refused(status, code, param=None, match=None):
    with pytest.raises(ApiError, match=match) as told:
        yield told
    assert (told.value.status_code, told.value.code, told.value.param) == (status, code, param)
    assert (told.value.retry_after_s is not None) == (status in (429, 503))


def busy():
    return refused(429, "rate_limit_exceeded")


@on_loop
async def test_chunks_of_one_request_are_bounded_by_number_and_by_tokens(engine):
    chunks = [f"chunk {number} of them" for number in range(4)]
    before = engine.metrics.computed_chunks
    async with serving(engine) as service:
        with refused(400, "invalid_value", "context", "must be at most 3 chunks, got 4"):
            await answer(service, A, chat(context=chunks))
        with refused(400, "invalid_value", "chunks", "must be at most 3 chunks, got 4"):
            await service.precompute(A, chunks, None)
        with refused(400, "invalid_value", "chunks", "must be at most 60 tokens together, got"):
            await service.precompute(A, ["x" * 30, "y" * 31], None)
        assert engine.metrics.computed_chunks == before, "none was queued"
        assert await service.precompute(A, chunks[:3], None) == 3
        assert await service.precompute(A, chunks[1:], None) == 1


@on_loop
async def test_prefills_of_chunks_count_in_the_queue(engine):
    """Both before the engine's thread has queued them, and behind that; not once their caller has left."""
    async with serving(engine) as service:
        async with answering(service, B):
            waiting = asyncio.ensure_future(answer(service, A, chat(context=["passage 1", "passage 2", "passage 3"])))
            await wait_until(lambda: engine.num_jobs == (1, 4))
            with busy():
                await answer(service, B, chat())
            before = engine.metrics.computed_chunks
            waiting.cancel()
            await wait_until(lambda: service.loop.num_jobs == 1)
            assert engine.metrics.computed_chunks == before
        with held(service.loop):
            waiting = asyncio.ensure_future(answer(service, A, chat(context=["another 1", "another 2", "another 3"])))
            await asyncio.sleep(0)
            with busy():
                await service.precompute(B, ["p", "q"], None)
        assert await waiting


@on_loop
async def test_lookups_and_streams_of_one_tenant_are_so_many_at_a_time(engine):
    async with serving(engine, max_lookups=2) as service:
        with held(service.loop):
            asking = [asyncio.ensure_future(service.ask(A, lambda engine, _: 1)) for _ in range(2)]
            await asyncio.sleep(0)
            with busy() as told:
                await service.ask(A, lambda engine, _: 1)
            assert told.value.retry_after_s == 1
            asking.append(asyncio.ensure_future(service.ask(B, lambda engine, _: 1)))
            with service.admission.looking(A, is_stream=True), service.admission.looking(A, is_stream=True), busy():
                service.admission.looking(A, is_stream=True).__enter__()
        assert await asyncio.gather(*asking) == [1, 1, 1]
        assert await service.ask(A, lambda engine, _: 2) == 2


@on_loop
async def test_a_request_may_ask_for_what_its_tenant_may(engine):
    async with serving(engine) as service:
        for tenant, best in ((A, 0), (B, -5)):
            assert await answer(service, tenant, chat(priority=best))
            why = f"must be at least {best} for this key's tenant, got {best - 1}"
            with refused(403, "priority_not_allowed", "priority", why):
                await answer(service, tenant, chat(priority=best - 1))
        with refused(400, "invalid_value", "n", "must be at most 4, got 5"):
            await answer(service, A, chat(n=5))
        assert len(await answer(service, A, chat(n=4))) == 4
        async with answering(service, A, n=3):
            with busy() as told:
                await answer(service, A, chat(n=2))
            assert "this key's tenant may have 4 answers at a time" in told.value.detail
            with service.admission.answering(A, 1), service.admission.answering(B, 9):
                assert service.admission.answers == {"lab-a": 4, "lab-b": 9}


@on_loop
async def test_a_place_is_kept_for_a_client_that_was_told_to_come_again(engine):
    """A client that has just been answered would take each place that comes free, being there first."""
    async with serving(engine, (EVERYBODY,), max_queue=1) as service:
        async with answering(service, EVERYBODY):
            waiting = asyncio.ensure_future(answer(service, EVERYBODY, chat("waits")))
            await wait_until(lambda: service.loop.num_jobs == 2)
            with busy() as told:
                await answer(service, EVERYBODY, chat())
            assert "1 turns wait already, and 1 may" in told.value.detail
            waiting.cancel()
            await wait_until(lambda: service.loop.num_jobs == 1)
            with busy():
                await answer(service, EVERYBODY, chat())  # There is a place, which is another's.
        assert await answer(service, EVERYBODY, chat()), "what nobody waits for is everybody's"


@on_loop
async def test_refusals_do_not_make_the_wait_look_short(engine):
    async with serving(engine, (EVERYBODY,), max_queue=1) as service:
        service.admission._seconds.extend([30.0] * 64)  # Of a slot, each of the latest answers.
        async with answering(service, EVERYBODY):
            waiting = asyncio.ensure_future(answer(service, EVERYBODY, chat("waits")))
            await wait_until(lambda: service.loop.num_jobs == 2)
            for _ in range(80):
                with busy() as told:
                    await answer(service, EVERYBODY, chat())
                assert 30 <= told.value.retry_after_s <= 60
            waiting.cancel()


@on_loop
async def test_a_deadline_ends_what_waits_for_the_engine(engine):
    async with serving(engine, request_timeout_s=0.02) as service:
        with held(service.loop), pytest.raises(TimeoutError):
            await service.ask(A, lambda engine, _: 1)
        with held(service.loop), pytest.raises(TimeoutError):
            async with service.deadline(3600), service.chat(A, chat()):
                pass
        assert service.deadline(0.001).when() < service.deadline(None).when()


@on_loop
async def test_of_several_answers_all_are_begun_or_none(engine):
    async with serving(engine) as service:
        kept = [session.session_id for session in engine.sessions]
        bad = (
            (chat("x" * 600, truncation="disabled"), ContextWindowError),
            (chat(n=2, min_tokens=9), InvalidRequestError),
            (CompletionRequest(model=MODEL, prompt=["a", "b" * 600]), ContextWindowError),
        )
        for request, error in bad:
            with pytest.raises(error):
                await answer(service, A, request)
        await wait_until(lambda: service.admission.answers.total() == service.loop.num_jobs == 0)
        assert await answer(service, A, CompletionRequest(model=MODEL, prompt="plain", max_tokens=2))
        await service.ask(A, lambda engine, _: None)
        assert [session.session_id for session in engine.sessions] == kept, "of plain prompts nothing is kept"


@on_loop
async def test_one_tenants_load_closes_and_forgets_no_other_tenants_conversation(engine):
    async with serving(engine) as service:
        await answer(service, A, chat("do not forget me"))
        [mine] = [session for session in engine.sessions if session.tenant == "lab-a" and session.job.done][-1:]
        for number in range(service.router.max_known + 1):
            await answer(service, B, chat(f"load {number}", 1))
        assert engine.opened(mine.session_id, tenant="lab-a") is mine
        history = [*mine.messages, user("and?")]
        asked = ChatRequest(model=MODEL, messages=history, max_tokens=2, temperature=0)
        await answer(service, A, asked)
        assert mine.messages[-2] == user("and?")
