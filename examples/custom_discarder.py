"""One's own rule for which tokens leave a context that is full: those that were looked at least.

    python examples/custom_discarder.py

A discarder is a pure function of what it is shown: how many tokens there are, how many leave, and what it asks for.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

import ca_jax
from ca_jax.overflow.config import DiscardContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastLookedAt:
    """The tokens leave that received the least attention, but for the most recent quarter of those that stay."""

    name: ClassVar[str] = "least_looked_at"
    needs_attention: ClassVar[bool] = True  # Measured in each step, which costs some time.
    needs_kv: ClassVar[bool] = False

    def choose(self, context: DiscardContext) -> np.ndarray:
        """The places of the tokens that leave, sorted."""
        behind = context.num_tokens - context.num_staying // 4
        order = np.argsort(context.attention[context.keep_first : behind], kind="stable")
        return np.sort(order[: context.num_leaving] + context.keep_first)


def main() -> None:
    overflow = ca_jax.OverflowConfig(discarder=LeastLookedAt(), truncation_ratio=0.25)
    config = ca_jax.EngineConfig(context_window=256, overflow=overflow)
    with ca_jax.Engine.from_pretrained("smollm2-135m-instruct", config) as engine:
        session = engine.session(system="Remember this word: heron.")
        for subject in ("the sea", "the sky", "the hills", "the plains", "the word"):
            for _ in session.send(f"Say something about {subject}.", max_tokens=32):
                pass
            print(f"{subject}: {session.usage.dropped_tokens} tokens left, {len(session.token_ids)} stay")
        print("what the model still sees:", repr(engine.model.tokenizer.decode(session.token_ids)[:200]))


if __name__ == "__main__":
    main()
