"""Makes questions of RULER's kind behind passages: each passage has a number hidden in it, and one is asked for.

    .venv/bin/python -m tools.needles --texts=c4.jsonl --out=build/rag/needles.json
    .venv/bin/python -m ca_jax.launch.evaluate --task=rag --data=build/rag/needles_held.json --chunk_tokens=256 \
        --answer_tokens=8 --instruction="The magic number of the {question} is"

Half of the items are for choosing (`…_chosen_by.json`), the others are held back (`…_held.json`).

Not here: asking (`benchmarks.evaluate.rag`).
Source: RULER (Hsieh et al., COLM 2024), needles in a haystack with several keys.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_ADJECTIVES = (
    "amber brave calm dusty eager faint gentle hollow icy jolly keen lively mellow noble odd proud quiet rapid silent "
    "tidy urban vivid warm young zesty crimson golden silver wooden frozen"
)
_NOUNS = (
    "falcon harbor lantern meadow orchard pebble quarry river saddle tunnel valley window anchor bridge candle desert "
    "engine forest garden hammer island jacket kettle ladder mirror needle oyster pillow rocket statue"
)
_NUM_PASSAGES = 6
_PASSAGE_CHARS = 900
_LEAST_CHARS = 1200  # Shorter texts are left out.


def make_items(texts: Sequence[str], num_items: int, seed: int) -> list[dict[str, Any]]:
    """Items as `benchmarks.evaluate.items` reads them.

    Args:
      texts: what numbers are hidden in; used again and again where there are few.

    Raises:
      ValueError: no text is long enough.
    """
    rng = random.Random(seed)
    long = [text for text in (" ".join(text.split()) for text in texts) if len(text) > _LEAST_CHARS]
    if not long:
        raise ValueError(f"a text must have more than {_LEAST_CHARS} characters, got {len(texts)} texts without one")
    rng.shuffle(long)
    items = []
    for number in range(num_items):
        keys = rng.sample(
            [f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()], _NUM_PASSAGES
        )
        values = [str(rng.randrange(1000, 9999)) for _ in keys]
        passages = []
        for nth, (key, value) in enumerate(zip(keys, values, strict=True)):
            sentences = long[(number * _NUM_PASSAGES + nth) % len(long)][:_PASSAGE_CHARS].split(". ")
            place = rng.randrange(1, max(2, len(sentences)))
            sentences.insert(place, f"The magic number of the {key} is {value}")
            passages.append({"title": "", "text": ". ".join(sentences) + ".\n\n"})
        asked = rng.randrange(_NUM_PASSAGES)
        items.append({"ctxs": passages, "question": keys[asked], "answers": [values[asked]]})
    return items


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help='lines of JSON with a field "text"')
    parser.add_argument("--out", type=Path, required=True, help="a name with .json: two files are written")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    lines = args.texts.read_text(encoding="utf-8").splitlines()
    items = make_items([json.loads(line)["text"] for line in lines], args.items, args.seed)
    halves = {"chosen_by": items[: args.items // 2], "held": items[args.items // 2 :]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, half in halves.items():
        path = args.out.with_name(f"{args.out.stem}_{name}.json")
        path.write_text(json.dumps(half) + "\n", encoding="utf-8")
        print(f"{len(half)} items written to {path}")


if __name__ == "__main__":
    main()
