"""How often a method goes on with a text as `tt` does: the same greedy tokens, the same distribution of the next one.

Not here: reading texts (texts), intervals (statistics).
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from ca_jax.evaluation.comparison import EvaluationError
from ca_jax.evaluation.schema import AgreementConfig, AgreementRow, Evaluation
from ca_jax.evaluation.statistics import block_estimate, kl_divergence, log_softmax, wilson_interval
from ca_jax.evaluation.texts import check_overflows, read_ids
from ca_jax.pretrained import LoadedModel, Progress


@dataclasses.dataclass
class _Found:
    """What one method gave, an entry for each place."""

    answers: list[list[int]] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def run_agreement(model: LoadedModel, config: AgreementConfig, progress: Progress) -> Evaluation:
    """Feeds one text to a context of each method; at places behind the first overflow, copies go on by themselves.

    Args:
      model: that goes on.
      config: what is asked.
      progress: told of tokens as they are fed.

    Raises:
      EvaluationError: no such text, too little of it, or a window above the model's.
    """
    comparison, path = config.comparison, Path(config.data)
    streams = comparison.streams(model)
    token_ids = read_ids(model, path, config.max_tokens)
    check_overflows(len(token_ids), window=comparison.window, path=path, max_tokens=config.max_tokens)
    baseline = comparison.baseline
    if baseline is None:
        raise EvaluationError("there must be tt to hold the other methods against, got none")
    found = {name: _Found() for name in streams}
    items = []
    progress("agreement", 0, len(token_ids))
    for start in range(0, len(token_ids), config.every):
        part = token_ids[start : start + config.every]
        logprobs = {}
        for name, stream in streams.items():
            started_s = time.perf_counter()
            stream.extend(part)
            if stream.truncations:
                logprobs[name] = log_softmax(stream.logits())
                found[name].answers.append(stream.fork().generate(config.answer_tokens))
            found[name].seconds += time.perf_counter() - started_s
        if logprobs:  # A window overflows at the same place whatever becomes of its tokens.
            for name, each in logprobs.items():
                found[name].kl.append(kl_divergence(logprobs[baseline], each))
            items.append(
                {
                    "num_fed": start + len(part),
                    "answers": {name: each.answers[-1] for name, each in found.items()},
                    "kl": {name: each.kl[-1] for name, each in found.items() if name != baseline},
                }
            )
        progress("agreement", start + len(part), len(token_ids))
    rows = [
        _row(path.name, comparison.setting(name), each, found[baseline], len(streams[name].truncations))
        for name, each in found.items()
        if name != baseline
    ]
    return Evaluation(rows=rows, items=items)


def same_prefix(first: list[int], second: list[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def _row(text: str, setting: dict[str, Any], each: _Found, base: _Found, num_truncations: int) -> AgreementRow:
    num, length = len(each.answers), len(each.answers[0])
    prefixes = [same_prefix(*pair) for pair in zip(each.answers, base.answers, strict=True)]
    num_first, num_whole = sum(prefix > 0 for prefix in prefixes), sum(prefix == length for prefix in prefixes)
    kl = block_estimate(each.kl, 1)
    return AgreementRow(
        text=text,
        **setting,
        num_places=num,
        answer_tokens=length,
        same_first=num_first / num,
        same_first_interval=wilson_interval(num_first, num),
        same_answer=num_whole / num,
        same_answer_interval=wilson_interval(num_whole, num),
        mean_same_prefix=sum(prefixes) / (num * length),
        mean_kl=kl.mean,
        kl_stderr=kl.stderr,
        num_truncations=num_truncations,
        seconds=each.seconds,
    )
