"""What is noted of a request for its line in the access log and its trace.

Those that know something of a request say it here (`noted`); where nobody observes, nothing is noted.

Not here: what becomes of it (`observing`).
"""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import time
from collections.abc import Iterator
from typing import NamedTuple

from ca_jax.session import Job


class Took(NamedTuple):
    """What the answers of a request took, together."""

    prompt_tokens: int
    """A prompt of several answers counts once."""
    cached_tokens: int
    """Of these, tokens whose KV was loaded."""
    output_tokens: int
    ttft_s: float | None
    """Seconds to the first answer's first token; None: it had none."""


@dataclasses.dataclass(eq=False)
class Observed:
    """A request, from its head on."""

    request_id: str
    method: str
    path: str
    headers: dict[str, str]
    """Those of W3C Trace Context, by names in lower case."""
    began_s: float = dataclasses.field(default_factory=time.perf_counter)
    at: datetime.datetime = dataclasses.field(default_factory=lambda: datetime.datetime.now(datetime.UTC))
    """When it came."""
    ended_s: float = 0.0
    """When the last byte of its answer was sent; 0 before."""
    route: str | None = None
    """The route that answered, its parameters named; None: no route did."""
    status: int = 0
    """Of the answer; 0: its client went away before it had one."""
    error: str | None = None
    """What went wrong, a word; None: nothing did."""
    tenant: str | None = None
    """Whose it is; None: its key said nobody's."""
    session: str | None = None
    """The conversation, as its client names it; of several answers, the first one's."""
    model: str | None = None
    """That answers, as clients name it."""
    jobs: list[Job] = dataclasses.field(default_factory=list)
    """Its turns."""
    num_choices: int = 1
    """How many of them have the same prompt."""
    is_stream: bool = False

    @property
    def answers(self) -> list[Job]:
        """Its turns, without those that compute chunks."""
        return [job for job in self.jobs if job.chunk is None]

    @property
    def done(self) -> bool:
        """Whether its turns have ended."""
        return all(job.done for job in self.jobs)

    @property
    def saved(self) -> bool:
        """Whether all that is to be stored of its turns is."""
        return all(job.save_times is None or job.save_times.ended for job in self.jobs)

    def took(self) -> Took | None:
        """What its answers took so far; None: it has none."""
        answers = self.answers
        if not answers:
            return None
        usages = [job.usage() for job in answers]
        prompts = usages[:: self.num_choices]
        return Took(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.num_cached_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in usages),
            usages[0].ttft_s if answers[0].output_ids else None,
        )

    def finish_reasons(self) -> list[str]:
        """Why each of its answers ended."""
        reasons = [job.finish_reason for job in self.answers]
        return ["error" if reason is None else reason.value for reason in reasons]


OBSERVED: contextvars.ContextVar[Observed | None] = contextvars.ContextVar("ca_jax_observed", default=None)
"""The request that is served; None where nobody observes."""


def note_error(code: str | None, status: int) -> None:
    """Notes what went wrong with the request that is served."""
    if (observed := OBSERVED.get()) is not None:
        observed.error = code or str(status)


def note_tenant(name: str) -> None:
    """Notes whose the request is that is served."""
    if (observed := OBSERVED.get()) is not None:
        observed.tenant = name


class Phase(NamedTuple):
    """A phase of a turn, by the clock of its other times."""

    name: str
    """`queue`, `fetch`, `load`, `prefill`, `decode` or `save`."""
    start_s: float
    end_s: float | None
    """None while it goes on."""
    busy_s: float | None = None
    """Seconds of it that were spent on it, where others ran in between."""
    stall_s: float = 0.0
    """Of a load, seconds in which compute waited for it."""


def phases(job: Job) -> Iterator[Phase]:
    """What happened of a turn so far, in the order in which it began, but that a save goes last."""
    ended_s = job.finished_s or None  # Of a job that was given up before a phase ended, that phase's end too.
    yield Phase("queue", job.submitted_s, job.started_s or ended_s)
    if job.fetch_span_s is not None:
        yield Phase("fetch", *job.fetch_span_s)
    if job.load_span_s is not None:
        yield Phase("load", *job.load_span_s, job.load_s, job.load_stall_s)
    if job.started_s:
        yield Phase("prefill", job.started_s, job.first_token_s or ended_s, job.prefill_s or None)
    if job.first_token_s:
        yield Phase("decode", job.first_token_s, ended_s)
    saves = job.save_times
    if saves is not None and saves.begun_s:
        yield Phase("save", saves.begun_s, (saves.published_s or saves.begun_s) if saves.ended else None)
