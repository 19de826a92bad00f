"""Small files in the formats of LongEval."""

import json
from pathlib import Path

HEADER = "Below is a record of lines.\n\n"
TOPICS = ("The future of space tourism", "The psychology of creativity", "The benefits of learning chess")


def write_lines(path: Path, num_rows: int = 3, num_lines: int = 20) -> Path:
    """Rows of lines "line row-nth: REGISTER_CONTENT is <1000 * row + 7 * nth>"."""
    rows = []
    for row in range(1, num_rows + 1):
        lines = "".join(f"line {row}-{nth}: REGISTER_CONTENT is <{1000 * row + 7 * nth}>\n" for nth in range(num_lines))
        prompt = f"{HEADER}{lines}\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {row}-0?"
        rows.append({"expected_number": 1000 * row, "num_lines": num_lines, "prompt": prompt})
    return write_rows(path, rows)


def write_topics(path: Path) -> Path:
    """One row of conversations, the topic named at the beginning and the end of each."""
    prompt = "Below is a record of our previous conversation. Now the record start. "
    for name in TOPICS:
        prompt += (
            f"USER: I would like to discuss the topic of {name.lower()}. \n ASSISTANT: Sure. \n USER: Go on. \n "
            f"ASSISTANT: There is much to say. \n USER: Great, this is the end of our discussion on the topic {name}, "
            "let's talk about the next topic. "
        )
    prompt += "Now the record ends. What is the first topic we discussed?"
    return write_rows(path, [{"test_id": 0, "prompt": prompt, "topics": list(TOPICS)}])


def write_rows(path: Path, rows: list[dict]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
