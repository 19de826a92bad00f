"""Answers of all kinds, side by side, to compare what engines say that check drafts and that check none.

Not here: what is guessed (`test_drafts`, `test_draft_model`).
"""

from __future__ import annotations

import dataclasses

from ca_jax.session import Job
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.grammars import Grammar
from ca_jax.turns.requests import SamplingParams
from tests import engine_kit as kit

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40),
    "drawn": SamplingParams(max_tokens=40, temperature=0.3, seed=3),
    "filtered": SamplingParams(max_tokens=40, temperature=0.5, top_k=5, top_p=0.9, seed=4, logprobs=2),
    "biased": SamplingParams(max_tokens=40, logit_bias=((65, 2.0),)),
    "stops": SamplingParams(max_tokens=40, stop=("zz",), stop_token_ids=(66, 67)),
    "short": SamplingParams(max_tokens=3),
    "penalised": SamplingParams(max_tokens=20, frequency_penalty=0.5, presence_penalty=0.2),
    "least": SamplingParams(max_tokens=30, min_tokens=20, stop_token_ids=tuple(range(0x40, 0x50))),
    "bound": SamplingParams(max_tokens=20, grammar=Grammar(kind="regex", text="(ab|cd)*")),
}
"""One of each kind that drafts are served with, and of those that they are not."""


@dataclasses.dataclass(frozen=True)
class Said:
    """What an engine said in three turns of a conversation of each kind."""

    token_ids: dict[str, list[int]]
    """Of whole conversations."""
    logprob_ids: list[list[int]]
    """Of each answer, tokens of which it is known how likely they were."""
    jobs: list[Job]
    """All turns."""
    metrics: EngineMetrics
    """What was counted."""

    @property
    def answers(self) -> tuple[object, ...]:
        """What must be the same."""
        return self.token_ids, self.logprob_ids


def said(**changes: object) -> Said:
    """Has an engine of four rows and these changes say it."""
    with kit.small_engine(**{"max_batch_size": 4, "share_prefixes": False, **changes}) as engine:
        sessions, jobs = {name: engine.session(session_id=name) for name in SAMPLINGS}, []
        for turn in range(3):
            message = kit.prompt(11, turn) * 2
            answers = [each.send_ids(message, sampling=SAMPLINGS[name]) for name, each in sessions.items()]
            kit.drain(*answers)
            jobs += [answer.job for answer in answers]
        logprob_ids = [[each.token_id for each in job.token_logprobs] for job in jobs]
        token_ids = {name: each.token_ids for name, each in sessions.items()}
        return Said(token_ids, logprob_ids, jobs, dataclasses.replace(engine.metrics))
