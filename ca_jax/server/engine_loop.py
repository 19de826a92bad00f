"""The engine's own thread, and the one way to it from the event loop.

The engine's thread runs whatever is asked of it between two steps: no coroutine ever waits for the engine's lock, and
none is resumed more than once a step. What a step has drawn goes to all listeners in one call.

    coroutine   call(fn) ------> |                 future <--+
                submit(fn) ----> | engine's thread           |  one call_soon_threadsafe a step
                                 |   commands, step, deliver-+

Not here: HTTP, which conversation a request goes on with (router).
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from ca_jax.engine import Engine
from ca_jax.errors import SessionClosedError
from ca_jax.session import Job

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Part:
    """What a step gave to one job of a request: new text, its end, or both."""

    index: int
    """Which of its request's."""
    text: str
    """New text that can be shown."""
    num_tokens: int
    """Tokens generated so far."""
    done: bool
    """Whether the job has ended; its error, if it has one, is in the job."""
    state: str | None = None
    """What was made of its end."""


class Feed:
    """The jobs of one request and what they give, in the order in which it comes. Belongs to the event loop."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        """Of the engine, once they are queued; each is only read, and once it has ended."""
        self.num_prompt_tokens: list[int] = []
        """Of each, when it was queued."""
        self.came: asyncio.Queue[Part | None] = asyncio.Queue()
        """What steps gave that no listener has taken yet; None: it is too late for more."""

    async def parts(self, until_s: float | None = None) -> AsyncIterator[Part]:
        """What each step gave to each job, until all have ended; for one listener.

        Args:
          until_s: when to give up, seconds of the event loop's clock.

        Raises:
          TimeoutError: that was not in time.
          Exception: whatever broke one of them.
        """
        num_jobs = len(self.jobs)
        loop = asyncio.get_running_loop()
        late = None if until_s is None else loop.call_at(until_s, self.came.put_nowait, None)
        try:
            while num_jobs:
                part = await self.came.get()
                if part is None:
                    raise TimeoutError
                error = self.jobs[part.index].error if part.done else None
                if error is not None:
                    raise error
                num_jobs -= part.done
                yield part
        finally:
            if late is not None:
                late.cancel()


class EngineLoop:
    """Runs an engine on a thread of its own. Made and called in the event loop, until `stop`.

    Args:
      engine: nobody else may run it. The loop does not close it.
      on_ended: called with each job that has ended, by the engine's thread, before its listener knows; what it returns
        is `Part.state`.
    """

    def __init__(self, engine: Engine, on_ended: Callable[[Job], str | None] = lambda job: None) -> None:
        self._engine = engine
        self._events = asyncio.get_running_loop()
        self._commands: collections.deque[Callable[[], object]] = collections.deque()
        self._asked = threading.Condition()  # Nothing is asked for once the thread has looked for the last time.
        self._stopping = False
        self.failure: Exception | None = None
        """What broke the engine, if something did: then nothing is served any more."""
        self._on_ended = on_ended
        self._live: dict[Job, Feed] = {}  # Where parts of a job go; the engine's thread's.
        self._num_begun = 0  # Jobs; the engine's thread's.
        self._num_ended = 0  # The event loop's.
        self._num_jobs = 0  # Of the engine, as its thread saw them last.
        self._since_s: float | None = None  # When its thread began what it does; None while nothing is asked of it.
        self._thread = threading.Thread(target=self._run, name="ca_jax-engine", daemon=True)
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run, or whose end nobody was told of; those of a context's chunks too."""
        return max(self._num_begun - self._num_ended, self._num_jobs)

    @property
    def step_s(self) -> float:
        """Seconds that the engine's thread has been at the step that it is at; 0 while nothing is asked of it."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Has the engine's thread run a function between two steps, and returns what it gives.

        The function does not run if the caller is cancelled before that.

        Raises:
          SessionClosedError: the loop was stopped.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        asked = asyncio.wrap_future(future)  # It hands a cancellation on an iteration of the event loop later.

        def run() -> None:
            if not asked.cancelled() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)

        self._ask(run)
        return await asked

    async def submit(self, function: Callable[[Engine], Sequence[Job]]) -> Feed:
        """Has the engine's thread run a function that queues jobs, as `call` does; what comes of them.

        A caller that is cancelled while it waits for this leaves no job behind.
        """
        feed = Feed()

        def begin(engine: Engine) -> None:
            for job in function(engine):
                feed.jobs.append(job)
                feed.num_prompt_tokens.append(job.num_prompt_tokens)
                self._live[job] = feed
            self._num_begun += len(feed.jobs)
            self._num_jobs = sum(engine.num_jobs)

        try:
            await self.call(begin)
        except asyncio.CancelledError:
            self.cancel(feed)
            raise
        return feed

    def cancel(self, feed: Feed) -> None:
        """Cancels the jobs of a request that have not ended, and those that are about to be queued. Does not wait."""

        def cancel_all(engine: Engine) -> None:
            for job in feed.jobs:
                if not job.done:
                    engine.cancel(job)

        if not feed.jobs or not all(job.done for job in feed.jobs):
            self.tell(cancel_all)

    def tell(self, function: Callable[[Engine], object]) -> None:
        """Has a function run by the engine's thread between two steps; nobody waits for it. It must not raise."""
        with contextlib.suppress(SessionClosedError):  # All ends anyway.
            self._ask(lambda: function(self._engine))

    async def stop(self) -> None:
        """Ends the thread; jobs that run are cancelled, and their listeners told so."""
        with self._asked:
            self._stopping = True
            self._asked.notify()
        self._engine.wake()
        await asyncio.to_thread(self._thread.join)

    def _ask(self, command: Callable[[], object]) -> None:
        with self._asked:
            if self._stopping:
                raise SessionClosedError("the engine is broken" if self.failure else "the server is shutting down")
            self._commands.append(command)
            self._since_s = self._since_s or time.monotonic()
            self._asked.notify()
        self._engine.wake()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._since_s = time.monotonic()
                for _ in range(len(self._commands)):  # What is asked meanwhile comes behind the next step.
                    self._commands.popleft()()
                ran = self._engine.step()
                self._num_jobs = sum(self._engine.num_jobs)
                self._deliver()
                if not ran:
                    with self._asked:
                        self._since_s = self._since_s if self._commands else None
                        self._asked.wait_for(lambda: self._commands or self._stopping)
        except Exception as error:  # Jobs' own errors do not come here: the engine itself is broken.
            _LOG.exception("the engine broke: nothing is served any more")
            with self._asked:
                self.failure = error
                self._stopping = True
        self._end()

    def _end(self) -> None:
        """Answers what was asked last and cancels what runs, whatever state a broken engine is in."""
        for last in (*self._commands, self._give_up, self._deliver):
            try:
                last()
            except Exception:
                _LOG.exception("at the end of the engine's thread")

    def _give_up(self) -> None:
        for job in self._live:
            try:
                if not job.done:
                    self._engine.cancel(job)
            except Exception as error:
                _LOG.exception("at the end of the engine's thread")
                job.error = error
            job.error = job.error or self.failure

    def _deliver(self) -> None:
        """Hands out what the jobs have got since the last time."""
        parts: list[tuple[Feed, Part]] = []
        for job, feed in tuple(self._live.items()):
            done = job.done  # Before its text is taken.
            text = "".join(job.pieces.popleft() for _ in range(len(job.pieces)))
            if done:
                del self._live[job]
            if text or done:
                state = self._on_ended(job) if done else None
                parts.append((feed, Part(feed.jobs.index(job), text, len(job.output_ids), done, state)))
        if parts:
            with contextlib.suppress(RuntimeError):  # The event loop is closed: nobody listens any more.
                self._events.call_soon_threadsafe(self._hand_out, parts)

    def _hand_out(self, parts: list[tuple[Feed, Part]]) -> None:
        for feed, part in parts:
            self._num_ended += part.done
            feed.came.put_nowait(part)
