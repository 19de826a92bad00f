"""Tokens a second with drafts and without, of answers that quote what they were given and of others.

Engines of one process answer the same prompts, one at a time; each round begins with the next one. With `--draft_model`
a third one has that model. Texts to repeat are paragraphs of `docs/`, code to edit is functions of the package, chats
are first messages of ShareGPT: the seed says which. An engine with drafts learns how often it guesses right from round
to round, as one that serves does.

Not here: what is guessed, and when it is checked (`ca_jax.serving.drafts`).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.conversations import is_installed
from benchmarks.engines import make_engine, random_ids
from benchmarks.harness import BenchError, Row, Run, Sample
from ca_jax.engine import Engine
from ca_jax.models.transformer import Transformer
from ca_jax.pretrained import LoadedModel
from ca_jax.simulate.traces.sharegpt import load_sharegpt
from ca_jax.turns.requests import SamplingParams

TASKS = {
    "quote": "Repeat this text word for word:\n\n{}",
    "edit": "Here is Python code:\n\n```python\n{}\n```\n\nWrite all of it again, with a docstring that is longer.",
    "chat": "{}",
}
"""What is asked, by task."""
WAYS = ("model", "drafts", "plain")
"""How it is answered: with drafts of a draft model and of the context, of the context alone, without."""

_ROOT = Path(__file__).parents[2]
_PIECE_CHARS = (400, 1200)  # Of a text, or a function.
_CHAT_CHARS = (20, 1200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftsConfig(harness.ServingConfig):
    """Answers with drafts and without."""

    may_be_zero: ClassVar = frozenset({"seed", "temperature", "idle_layers"})

    prompts_of_task: int = 6
    """Prompts of each task."""
    answer_tokens: int = 128
    """Most tokens of an answer."""
    concurrent_sessions: int = 1
    """Answers that come at a time."""
    temperature: float = 0.0
    """That tokens are drawn at; 0 takes the likeliest."""
    always_asks: bool = False
    """Have the draft model asked as if its guesses took no time, also where they do not pay: to see what they cost."""
    idle_layers: int = 0
    """Layers that add nothing, behind the model's own. So a pair is made of one model: as a draft model it is right as
    often as can be and faster than the target."""
    context_window: int = 2048
    """Most tokens of a conversation."""
    repeats: int = 3
    """Samples that a median is of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftsRow(Row):
    """All prompts of a task, answered in one way; numbers are of a round, medians of the rounds'."""

    task: str
    """One of `TASKS`."""
    way: str
    """One of `WAYS`."""
    concurrent_sessions: int
    """Answers that came at a time."""
    answer_tokens: int
    """Of all answers."""
    tokens_per_s: float
    """Of all answers together, behind their first tokens."""
    tokens_per_step: float
    """Of one answer."""
    accepted_share: float
    """Of the tokens of drafts that were checked, those that were right; 0 where none was checked."""
    model_tokens_share: float
    """Of the tokens of answers, those that a draft model's drafts gave."""
    asked_share: float
    """Of the tokens of drafts that were checked, those that it wrote."""
    same_tokens: bool
    """Whether all ways gave the same."""


def prompts_of(task: str, model: LoadedModel, config: DraftsConfig) -> list[str | list[int]]:
    """What is asked; of a model without a tokenizer random tokens, which come twice but in chats."""
    rng = np.random.default_rng((config.seed, list(TASKS).index(task)))
    if model.tokenizer is None:
        num_tokens = config.context_window // 8
        return [random_ids(rng, model, num_tokens) * (1 + (task != "chat")) for _ in range(config.prompts_of_task)]
    pieces = {"quote": _paragraphs, "edit": _functions, "chat": _first_messages}[task]()
    if len(pieces) < config.prompts_of_task:
        raise BenchError(f"task {task} must have {config.prompts_of_task} texts to choose from, got {len(pieces)}")
    chosen = rng.choice(len(pieces), config.prompts_of_task, replace=False)
    return [TASKS[task].format(pieces[number]) for number in chosen]


def _paragraphs() -> list[str]:
    texts = (path.read_text() for path in sorted((_ROOT / "docs").rglob("*.md")))
    parts = [" ".join(part.split()) for text in texts for part in text.split("\n\n")]
    is_prose = (part for part in parts if part[:1].isalpha() and "|" not in part)
    return [part for part in is_prose if _PIECE_CHARS[0] <= len(part) <= _PIECE_CHARS[1]]


def _functions() -> list[str]:
    found = []
    for path in sorted((_ROOT / "ca_jax").rglob("*.py")):
        text = path.read_text()
        functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
        found += [ast.get_source_segment(text, node) or "" for node in functions]
    return [part for part in found if _PIECE_CHARS[0] <= len(part) <= _PIECE_CHARS[1]]


def _first_messages() -> list[str]:
    if not is_installed():
        return []
    first = (each.user_texts[0] for each in itertools.islice(load_sharegpt(), 1000) if each.user_texts)
    return [message for message in first if _CHAT_CHARS[0] <= len(message) <= _CHAT_CHARS[1]]


def with_idle_layers(model: LoadedModel, count: int) -> LoadedModel:
    """The same model with so many layers more, which are computed and add nothing."""
    params, config = dict(model.params["params"]), model.config
    last = params[f"layer_{config.num_layers - 1}"]
    for layer in range(config.num_layers, config.num_layers + count):
        idle = jax.tree.map(jnp.copy, last)  # Of its own, so that memory is read for each.
        for part, out in (("attn", "wo"), ("mlp", "w_down")):
            idle[part] = {**idle[part], out: jnp.zeros_like(idle[part][out])}
        params[f"layer_{layer}"] = idle
    config = dataclasses.replace(config, num_layers=config.num_layers + count)
    known_by = f"{model.fingerprint} and {count} idle layers"
    return dataclasses.replace(
        model, config=config, model=Transformer(config), params={"params": params}, fingerprint=known_by
    )


@harness.suite(DraftsConfig, summary=lambda _: {})
def drafts(run: Run[DraftsConfig]) -> Iterator[DraftsRow]:
    """Tokens a second with drafts and without, where an answer quotes and where it does not."""
    config, model = run.config, run.model
    prompts = {task: prompts_of(task, model, config) for task in TASKS}
    model = with_idle_layers(model, config.idle_layers) if config.idle_layers else model
    with contextlib.ExitStack() as stack:
        engines = {}
        for way in WAYS if config.engine.draft_model else WAYS[1:]:
            most = config.engine.max_draft_tokens if way != "plain" else 0
            named = config.engine.draft_model if way == "model" else None
            sized = dataclasses.replace(
                config.engine, context_window=config.context_window, max_draft_tokens=most, draft_model=named
            )
            engines[way] = stack.enter_context(make_engine(model, sized))
            engines[way].warmup(progress=run.progress)
            if config.always_asks and (model_of := engines[way]._core._draft_model) is not None:
                model_of.seconds = lambda *of_guess: (0.0, 0.0)  # type: ignore[method-assign]
        for task in TASKS:
            ways = {way: partial(_answered, engine, config, prompts[task]) for way, engine in engines.items()}
            rounds = run.rounds(lambda ways=ways: ways)  # type: ignore[misc]
            same, taken = harness.same(rounds, "answers"), {way: harness.of_way(rounds, way) for way in engines}
            for name, way, other in (("speedup", "drafts", "plain"), ("model_speedup", "model", "drafts")):
                pairs = zip(taken.get(way, ()), taken[other] if way in taken else (), strict=True)
                if speedups := [one["tokens_per_s"] / by["tokens_per_s"] for one, by in pairs]:
                    run.facts[f"{name}_{task}"] = float(np.median(speedups))
                    run.facts[f"{name}_{task}_spread"] = [min(speedups), max(speedups)]
            run.facts["same_tokens"] = run.facts.get("same_tokens", True) and same
            run.facts["recompiles"] = run.facts.get("recompiles", 0) + harness.recompiles(rounds)
            for way, samples in taken.items():
                at_a_time = {"concurrent_sessions": config.concurrent_sessions, "same_tokens": same}
                yield harness.make_row(DraftsRow, samples, task=task, way=way, **at_a_time)


def _answered(engine: Engine, config: DraftsConfig, prompts: Sequence[str | list[int]]) -> Sample:
    """Has all prompts answered, so many at a time."""
    before, answers, seconds = dataclasses.replace(engine.metrics), [], 0.0
    sampling = SamplingParams(max_tokens=config.answer_tokens, temperature=config.temperature, seed=config.seed)
    for start in range(0, len(prompts), config.concurrent_sessions):
        together = prompts[start : start + config.concurrent_sessions]
        sessions = [engine.session() for _ in together]
        sent = [
            session.send(asked, sampling=sampling)
            if isinstance(asked, str)
            else session.send_ids(asked, sampling=sampling)
            for session, asked in zip(sessions, together, strict=True)
        ]
        pending: list[Any] = list(sent)
        while pending:
            pending = [answer for answer in pending if next(answer, None) is not None]
        jobs = [answer.job for answer in sent]
        answers += [job.output_ids for job in jobs]
        seconds += max(job.finished_s for job in jobs) - min(job.first_token_s for job in jobs)
        for session in sessions:
            session.close()
    after = engine.metrics
    counts = {name: getattr(after, name) - getattr(before, name) for name in vars(before) if "token" in name}
    decoded = sum(len(ids) - 1 for ids in answers)
    rows = decoded / max(after.decode_steps - before.decode_steps, 1)
    return {
        "answers": answers,
        "answer_tokens": sum(map(len, answers)),
        "tokens_per_s": decoded / seconds,
        "tokens_per_step": rows / min(config.concurrent_sessions, len(prompts)),
        "accepted_share": counts["accepted_tokens"] / max(counts["draft_tokens"], 1),
        "model_tokens_share": counts["model_accepted_tokens"] / max(decoded, 1),
        "asked_share": counts["model_draft_tokens"] / max(counts["draft_tokens"], 1),
    }
