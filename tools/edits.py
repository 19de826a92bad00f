"""What answers lose where one early message of a history was replaced, and stored KV behind it is used all the same.

    .venv/bin/python -m tools.edits --texts=c4.jsonl --out=results/blend/edits.json

A conversation of passages, each with a number hidden in it, of which one is asked for in the end. The second passage is
replaced; what was said behind it is as it was. Asked for is a number

    kept      of a passage behind the edit, which is the same before and after
    replaced  of the passage that takes the other's place, which had another number for the same name
    removed   of the passage that was replaced: nothing of the new history says it

Everything computed is compared with stored KV behind the edit, as it is and with some of it computed anew. Divergences
are means over the tokens of the answer that everything computed gives. On the pure model, by the code that the engine
serves with (`ca_jax.edits`, `recompute.plan`).

Not here: that the engine does the same (`tests/test_edits.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evaluate.items import RagPrompt
from benchmarks.evaluate.rag_context import Answerer, Behind, ContextModel
from benchmarks.evaluate.statistics import has_answer, kl_divergence, mean_interval, wilson_interval
from ca_jax.config import BlendConfig
from ca_jax.device.transfer import to_device, to_host
from ca_jax.edits import edited
from ca_jax.launch.machine import describe_machine, describe_versions
from ca_jax.pretrained import LoadedModel, load_model
from ca_jax.recompute.plan import blend_plan
from ca_jax.serving.prompts import new_turn
from ca_jax.turns.conversations import Borrowed, Conversation, as_messages
from ca_jax.turns.text import ChunkSpan
from tools import needles

KINDS = ("kept", "replaced", "removed")
METHODS = ("recompute", "reuse", "hkvd 5 %", "hkvd 15 %", "spread 5 %", "spread 15 %")
_ANSWER_TOKENS = 6
_EDITED = 1  # Which message of the user's is replaced.


@dataclasses.dataclass(frozen=True)
class Item:
    """A conversation, and what it becomes."""

    kind: str
    source: list[int]  # Tokens before the edit.
    ids: list[int]  # And after it, up to the end of what is borrowed.
    borrowed: Borrowed
    asked: list[int]  # Tokens behind those.
    answer: str
    old: str  # What the passage told of the same name before it was edited; "" of `kept`.


def make_items(model: LoadedModel, texts: list[str], kinds: Sequence[str], num_items: int, seed: int) -> list[Item]:
    """So many items of each kind."""
    rng, items = random.Random(seed), list[Item]()
    for number in range(len(kinds) * num_items):
        told, spare = needles.make_items(texts, 2, rng.randrange(10**9), num_passages=5, passage_chars=320)
        passages, (before, *_) = ([each["text"] for each in of["ctxs"]] for of in (told, spare))
        name, kind, old = told["question"], kinds[number % len(kinds)], ""
        place = next(place for place, text in enumerate(passages) if f"the {name} is" in text)
        wanted = rng.randrange(_EDITED + 1, len(passages)) if kind == "kept" else _EDITED
        passages[place], passages[wanted] = passages[wanted], passages[place]
        if kind == "replaced":
            old, (first, *rest) = str(rng.randrange(1000, 9999)), before.split(". ")
            before = ". ".join([first, f"The magic number of the {name} is {old}", *rest])
        elif kind == "removed":
            old, before, passages[_EDITED] = told["answers"][0], passages[_EDITED], before
        items.append(_item(model, kind, passages, before, name, told["answers"][0], old))
    return items


def _item(model: LoadedModel, kind: str, passages: list[str], before: str, name: str, answer: str, old: str) -> Item:
    tokenizer, source = model.tokenizer, Conversation.begin()
    if tokenizer is None or tokenizer.eos_id is None:
        raise ValueError(f"the model must have a tokenizer with an end of replies, got {model.name}")
    said = [as_messages(text.strip()) for text in passages]
    for messages in (*said[:_EDITED], as_messages(before.strip()), *said[_EDITED + 1 :]):
        ids = source.token_ids + new_turn(model, source.token_ids[-1:], source.messages, messages).ids
        source = source.with_turn([*ids, *tokenizer.encode_content("Noted."), tokenizer.eos_id], messages, "Noted.")
    told, question = list(source.messages), as_messages(f"What is the magic number of the {name}?")
    told[2 * _EDITED : 2 * _EDITED + 1] = said[_EDITED]
    found = edited(model, source, "source", [*told, *question], "")
    if found is None or found.borrowed is None:
        raise ValueError("the model's chat template must write what is behind an edit as it was, got another one")
    stop = found.borrowed.start + found.borrowed.num_tokens
    behind = new_turn(model, found.token_ids[-1:], told, question)
    asked = [*found.token_ids[stop:], *behind.ids, *tokenizer.encode_content(f"The magic number of the {name} is")]
    return Item(kind, source.token_ids, found.token_ids[:stop], found.borrowed, asked, answer, old)


def contexts_of(of: ContextModel, item: Item) -> dict[str, Any]:
    """KV of an item's context by each method."""
    part, count = item.borrowed, len(item.ids)
    full = of.prefill(item.ids)
    source = [to_host(kv) for kv in of.prefill(item.source)]
    reused = [np.array(to_host(kv)) for kv in full]
    for new, old in zip(reused, source, strict=True):
        new[:, part.start : count] = old[:, part.first : part.first + part.num_tokens]
    found, joined = {"recompute": full}, [to_device(kv) for kv in reused]
    for method in METHODS[1:]:
        name, *ratio = method.split()
        share = int(ratio[0]) / 100 if ratio else 0.0
        config = BlendConfig(recompute_ratio=share, selection=name if ratio else "hkvd")  # type: ignore[arg-type]
        span = ChunkSpan("", part.start, part.num_tokens)
        plan = blend_plan(config, of.config.num_layers, count, part.start, [span], share)
        found[method] = of.fused(plan, item.ids, joined) if ratio else joined
    return found


def ask(of: ContextModel, answerer: Answerer, item: Item) -> list[dict[str, Any]]:
    """What each method answers, and how far it is from everything computed."""
    contexts, count, tokenizer = contexts_of(of, item), len(item.ids), of.model.tokenizer
    rows = [Behind(kv, count, of.ask(kv, count, item.asked, 1), len(item.asked)) for kv in contexts.values()]
    answers = answerer.answer(rows, of.model.stop_token_ids)
    behind = [*item.asked, *answers[0].token_ids[: _ANSWER_TOKENS - 1]]
    positions = len(behind) - len(item.asked) + 1
    full, *others = (of.ask(kv, count, behind, positions).logprobs for kv in contexts.values())
    found = []
    for method, answer, logprobs in zip(contexts, answers, (full, *others), strict=True):
        text = "" if tokenizer is None else tokenizer.decode(answer.token_ids)
        found.append(
            {
                "kind": item.kind,
                "method": method,
                "text": text,
                "answer": item.answer,
                "right": bool(has_answer(text, [item.answer])),
                "old": bool(item.old and has_answer(text, [item.old])),
                "kl": float(np.mean([kl_divergence(*pair) for pair in zip(full, logprobs, strict=True)])),
                "top1": float((full.argmax(-1) == logprobs.argmax(-1)).mean()),
                "source_tokens": len(item.source),
                "prompt_tokens": count + len(item.asked),
                "borrowed_tokens": item.borrowed.num_tokens,
            }
        )
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of each kind and method, with intervals of 95 %: of shares Wilson's, else by the bootstrap over items."""
    found: dict[str, Any] = {}
    for kind, method in itertools.product(KINDS, METHODS):
        own = [row for row in rows if (row["kind"], row["method"]) == (kind, method)]
        for name in ("right", "old", "kl", "top1") if own else ():
            values = [float(row[name]) for row in own]
            is_share = name in ("right", "old")
            interval = wilson_interval(int(sum(values)), len(values)) if is_share else mean_interval(values)
            told = {"mean": float(np.mean(values)), "interval": interval, "items": len(own)}
            found.setdefault(kind, {}).setdefault(method, {})[name] = told
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--texts", type=Path, required=True, help='lines of JSON with a field "text"')
    parser.add_argument("--kinds", default="kept,replaced")
    parser.add_argument("--items", type=int, default=40, help="of each kind")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model, kinds = load_model(args.model, dtype="float32"), args.kinds.split(",")
    texts = [json.loads(line)["text"] for line in args.texts.read_text(encoding="utf-8").splitlines()]
    items = make_items(model, texts, kinds, args.items, args.seed)
    rows = list[dict[str, Any]]()
    sizes = [
        RagPrompt(source="", head=(), chunks=(tuple(ids),), question_ids=tuple(item.asked * 2), answers=())
        for item in items
        for ids in (item.source, item.ids)
    ]
    of = ContextModel(model, sizes, _ANSWER_TOKENS)
    answerer = Answerer(of, num_rows=len(METHODS), max_tokens=_ANSWER_TOKENS, capacity=of.capacity)
    asked = f"--texts={args.texts.name} --kinds={args.kinds} --items={args.items} --seed={args.seed}"
    command = f"python -m tools.edits --model={args.model} {asked}"
    told = {"command": command, "machine": describe_machine(), "versions": describe_versions()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for number, item in enumerate(items, 1):
        rows += ask(of, answerer, item)
        found = {**told, "summary": summary(rows), "items": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{number} of {len(items)}", flush=True)
    for kind, methods in summary(rows).items():
        for method, figures in methods.items():
            print(kind, method, *(f"{name} {figures[name]['mean']:.3f}" for name in ("right", "old", "kl", "top1")))


if __name__ == "__main__":
    main()
