"""The last hour of a server, for who operates it: samples of queue, tiers and totals, and the turns that took longest.

Kept in memory and bounded: a sample every ten seconds, read between two steps of the engine, and so many turns. Other
tenants' turns are shown to those who may read metrics, without a name. A restart forgets it: what is to be kept for
longer is scraped (`metrics`).

Not here: one moment (`live`), the view that draws it (`page`).
"""

from __future__ import annotations

import collections
import threading
import time

import pydantic

from ca_jax.engine import Engine
from ca_jax.server.metrics import tiers_of
from ca_jax.server.router import client_name
from ca_jax.session import Job

SAMPLE_S = 10.0
"""Between two samples."""
HOUR_S = 3600.0
_MOST_TURNS = 20  # That are told.
_KEPT_TURNS = 2000  # Of the hour, the last ones.


class View(pydantic.BaseModel):
    """What a page shows."""

    model_config = pydantic.ConfigDict(frozen=True, use_attribute_docstrings=True)


class LiveDone(View):
    """What was done so far, for everybody."""

    turns: int
    """That ended well."""
    prompt_tokens: int
    """Of their prompts,"""
    cached_tokens: int
    """and those of them whose KV was there."""
    completion_tokens: int
    """Generated."""
    draft_tokens: int
    """Guessed ahead and checked,"""
    accepted_tokens: int
    """and those of them that were right."""


class HistorySample(View):
    """One moment of the hour."""

    age_s: float
    """Seconds ago."""
    num_running: int
    num_waiting: int
    used_shares: dict[str, float]
    """Of each tier, how much of it is taken, in [0, 1]."""
    done: LiveDone
    """Totals by then: rates are of two samples."""


class HistoryTurn(View):
    """A turn that ended in the hour."""

    age_s: float
    """Seconds since it ended."""
    session_id: str | None
    """Whose; None for another tenant's, or of none."""
    queued_s: float
    ttft_s: float
    total_s: float
    """From its submission to its last token."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class LastHour(View):
    """What was sampled in the last hour, oldest first, and the turns in it that took longest to their first token."""

    sample_s: float
    """Seconds between two samples."""
    samples: list[HistorySample]
    slowest: list[HistoryTurn]


class History:
    """Keeps the hour. Samples and turns are added by the engine's thread, and read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: collections.deque[tuple[float, HistorySample]] = collections.deque(maxlen=int(HOUR_S / SAMPLE_S))
        self._turns: collections.deque[tuple[float, str, HistoryTurn]] = collections.deque(maxlen=_KEPT_TURNS)

    def sample(self, engine: Engine) -> None:
        """Takes a sample; for the engine's thread."""
        (running, waiting), tiers = engine.jobs, tiers_of(engine.store_stats())
        sample = HistorySample(
            age_s=0.0,
            num_running=len(running),
            num_waiting=len(waiting),
            used_shares={
                name: tier.used_bytes / tier.capacity_bytes for name, tier, *_ in tiers if tier.capacity_bytes
            },
            done=LiveDone(**{name: getattr(engine.metrics, name) for name in LiveDone.model_fields}),
        )
        with self._lock:
            self._samples.append((time.monotonic(), sample))

    def add(self, job: Job) -> None:
        """Takes in a turn that has ended with an answer."""
        if not job.output_ids:
            return
        usage, session = job.usage(), job.session
        turn = HistoryTurn(
            age_s=0.0,
            session_id=None if session is None else session.session_id,
            queued_s=usage.queued_s,
            ttft_s=usage.ttft_s,
            total_s=usage.ttft_s + usage.decode_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.num_cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
        with self._lock:
            self._turns.append((time.monotonic(), job.tenant if session is None else session.tenant, turn))

    def read(self, tenant: str, *, is_operator: bool) -> LastHour:
        """What a tenant may see of it: an operator other tenants' turns too, without their names."""
        now_s = time.monotonic()
        with self._lock:
            samples, turns = list(self._samples), list(self._turns)
        recent = [each for each in turns if now_s - each[0] < HOUR_S and (is_operator or each[1] == tenant)]
        slowest = sorted(recent, key=lambda each: each[2].ttft_s, reverse=True)[:_MOST_TURNS]
        return LastHour(
            sample_s=SAMPLE_S,
            samples=[
                each.model_copy(update={"age_s": now_s - at_s}) for at_s, each in samples if now_s - at_s < HOUR_S
            ],
            slowest=[
                turn.model_copy(update={"age_s": now_s - at_s, "session_id": _name(tenant, whose, turn.session_id)})
                for at_s, whose, turn in slowest
            ],
        )


def _name(tenant: str, whose: str, session_id: str | None) -> str | None:
    return client_name(tenant, session_id) if tenant == whose and session_id is not None else None
