"""Makes tasks of RULER's kind behind passages that come in any order: half of them to choose by, the others held back.

    .venv/bin/python -m tools.needles --texts=c4.jsonl --out=build/rag/needles.json
    .venv/bin/python -m ca_jax.launch.evaluate --task=rag --data=build/rag/needles_held.json --chunk_tokens=256 \
        --answer_tokens=8 --instruction="The magic number of the {question} is"

`needle`: each passage has a number hidden in it, and one is asked for. `variable`: the number that is asked for is that
of another key, as a second passage says. `common`: every passage names three colours, and the one that all name is
asked for; the instruction is "The colour that {question} of them name is".

Not here: asking (`benchmarks.evaluate.rag`).
Source: RULER (Hsieh et al., COLM 2024): needles in a haystack with several keys, variable tracking, common words.
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
_COLOURS = (
    "amber black blue brown crimson cyan gold green grey indigo ivory orange pink purple red silver teal white yellow"
)
TASKS = ("needle", "variable", "common")
"""What may be asked for."""


def make_items(
    texts: Sequence[str],
    num_items: int,
    seed: int,
    *,
    task: str = "needle",
    num_passages: int = 6,
    passage_chars: int = 900,
) -> list[dict[str, Any]]:
    """Items as `benchmarks.evaluate.items` reads them.

    Args:
      texts: what is hidden in; used again and again where there are few.
      num_items: how many.
      seed: of all that is drawn.
      task: one of `TASKS`.
      num_passages: of an item.
      passage_chars: characters of a passage, before something is hidden in it.

    Raises:
      ValueError: no text is long enough, or an unknown task.
    """
    rng = random.Random(seed)
    long = [text for text in (" ".join(text.split()) for text in texts) if len(text) > passage_chars * 4 // 3]
    if not long:
        least = passage_chars * 4 // 3
        raise ValueError(f"a text must have more than {least} characters, got {len(texts)} texts without one")
    hide = {"needle": _numbers, "variable": _chain, "common": _colours}.get(task)
    if hide is None:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    rng.shuffle(long)
    items = []
    for number in range(num_items):
        hidden, question, answer = hide(rng, num_passages)
        passages = []
        for nth, told in enumerate(hidden):
            sentences = long[(number * num_passages + nth) % len(long)][:passage_chars].split(". ")
            sentences.insert(rng.randrange(1, max(2, len(sentences))), told)
            passages.append({"title": "", "text": ". ".join(sentences) + ".\n\n"})
        items.append({"ctxs": passages, "question": question, "answers": [answer]})
    return items


def _numbers(rng: random.Random, num_passages: int) -> tuple[list[str], str, str]:
    """A sentence for each passage, the question and its answer."""
    keys, values = _pairs(rng, num_passages)
    asked = rng.randrange(num_passages)
    return [_told(*each) for each in zip(keys, values, strict=True)], keys[asked], values[asked]


def _chain(rng: random.Random, num_passages: int) -> tuple[list[str], str, str]:
    """Likewise; half of the passages say whose number another key has."""
    keys, values = _pairs(rng, num_passages)
    num_told = num_passages - num_passages // 2
    told = [_told(*each) for each in zip(keys[:num_told], values, strict=False)]
    others = keys[num_told:]
    whose = rng.sample(range(num_told), len(others))
    hidden = [
        *told,
        *(f"The magic number of the {key} is that of the {keys[of]}" for key, of in zip(others, whose, strict=True)),
    ]
    asked = rng.randrange(len(others))
    rng.shuffle(hidden)
    return hidden, others[asked], values[whose[asked]]


def _colours(rng: random.Random, num_passages: int) -> tuple[list[str], str, str]:
    """Likewise; one colour is named by all passages, two others by each."""
    common, *others = rng.sample(_COLOURS.split(), 10)
    hidden = []
    for _ in range(num_passages):
        named = [common, *rng.sample(others, 2)]
        rng.shuffle(named)
        hidden.append(f"The colours here are {named[0]}, {named[1]} and {named[2]}")
    return hidden, "all", common


def _pairs(rng: random.Random, number: int) -> tuple[list[str], list[str]]:
    every = [f"{adjective} {noun}" for adjective in _ADJECTIVES.split() for noun in _NOUNS.split()]
    return rng.sample(every, number), [str(rng.randrange(1000, 9999)) for _ in range(number)]


def _told(key: str, value: str) -> str:
    return f"The magic number of the {key} is {value}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help='lines of JSON with a field "text"')
    parser.add_argument("--out", type=Path, required=True, help="a name with .json: two files are written")
    parser.add_argument("--task", choices=TASKS, default="needle")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--passages", type=int, default=6, help="of an item")
    parser.add_argument("--passage_chars", type=int, default=900)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    lines = args.texts.read_text(encoding="utf-8").splitlines()
    sizes = {"task": args.task, "num_passages": args.passages, "passage_chars": args.passage_chars}
    items = make_items([json.loads(line)["text"] for line in lines], args.items, args.seed, **sizes)
    halves = {"chosen_by": items[: args.items // 2], "held": items[args.items // 2 :]}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name, half in halves.items():
        path = args.out.with_name(f"{args.out.stem}_{name}.json")
        path.write_text(json.dumps(half) + "\n", encoding="utf-8")
        print(f"{len(half)} items written to {path}")


if __name__ == "__main__":
    main()
