"""Joins records of LongEval's lines to longer ones: a window of 2,048 tokens overflows ten times in 525 lines.

    python -m tools.joined_lines --data=400_lines.jsonl --records=2 --out=800_lines.jsonl

Each row of `--out` is `--records` rows of `--data` that follow each other: the first one's words before its lines, then
all lines of which no earlier one has the name. `evaluate --task=longeval` reads it as any other.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

_LINE = re.compile(r"^line (.+?): REGISTER_CONTENT is <\d+>$", re.MULTILINE)


def joined(prompts: list[str]) -> str:
    """One record of several."""
    lines: dict[str, str] = {}
    for prompt in prompts:
        for found in _LINE.finditer(prompt):
            lines.setdefault(found[1], found[0])
    first = _LINE.search(prompts[0])
    if first is None:
        raise ValueError("a record must have lines 'line NAME: REGISTER_CONTENT is <NUMBER>', got none")
    return prompts[0][: first.start()] + "".join(f"{line}\n" for line in lines.values())


def main() -> None:
    """Reads, joins and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a .jsonl file of records of lines")
    parser.add_argument("--records", type=int, default=2, help="how many make one")
    parser.add_argument("--out", type=Path, required=True, help="where to write them")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    groups = [rows[i : i + args.records] for i in range(0, len(rows) - args.records + 1, args.records)]
    made = [{"prompt": joined([row["prompt"] for row in group]), "expected_number": 0} for group in groups]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    print(f"{len(made)} records of {min(len(_LINE.findall(row['prompt'])) for row in made)} lines and more: {args.out}")


if __name__ == "__main__":
    main()
