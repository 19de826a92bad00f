"""Many questions over the same passages: the KV of each passage is computed once, in whatever order they come.

python examples/shared_documents.py
"""

from __future__ import annotations

import ca_jax

PASSAGES = [
    "The Loire is the longest river of France. It rises in the Massif Central and ends in the Atlantic.",
    "The Seine flows through Paris and Rouen. Its mouth on the English Channel lies between Le Havre and Honfleur.",
    "The Rhône begins as the meltwater of a glacier in Switzerland and ends in a delta on the Mediterranean Sea.",
]
QUESTIONS = [
    ("Which river ends in a delta?", (2, 0, 1)),  # And the order in which the passages were found for it.
    ("Which river flows through Rouen?", (1, 2, 0)),
    ("Where does the longest river rise?", (0, 2)),
]


def main() -> None:
    blend = ca_jax.BlendConfig(recompute_ratio=0.15)  # Share of the passages' tokens that is computed anew.
    config = ca_jax.EngineConfig(context_window=1024, blend=blend)
    with ca_jax.Engine.from_pretrained("smollm2-135m-instruct", config) as engine:
        print(f"{engine.precompute(PASSAGES)} passages computed in advance")
        for question, order in QUESTIONS:
            session = engine.session()
            answer = "".join(session.send(question, context=[PASSAGES[i] for i in order], max_tokens=32))
            usage = session.usage
            computed = usage.new_tokens + usage.repaired_tokens
            print(f"> {question}\n{answer}\n{computed} of {usage.prompt_tokens} tokens computed\n")


if __name__ == "__main__":
    main()
