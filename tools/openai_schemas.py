"""Takes the schemas that the server's answers are checked against out of OpenAI's API description.

    python tools/openai_schemas.py openai_openapi.json tests/data/openai_schemas.json

What is prose or an example stays behind. `nullable` of OpenAPI 3.0 becomes JSON Schema's type null.

Not here: checking (`tests/server/test_openapi.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOTS = (
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "ListModelsResponse",
    "Model",
    "ErrorResponse",
)
_PROSE = {"description", "example", "examples", "title", "deprecated"}
_PREFIX = "#/components/schemas/"


def reduced(schema: Any, is_properties: bool = False) -> Any:
    """A schema without prose, as JSON Schema."""
    if isinstance(schema, list):
        return [reduced(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: reduced(value, is_properties=name == "properties" and not is_properties)
        for name, value in schema.items()
        if is_properties or not (name in _PROSE | {"nullable", "discriminator"} or name.startswith("x-"))
    }
    if "$ref" in kept and not is_properties:
        kept["$ref"] = "#/$defs/" + kept["$ref"].removeprefix(_PREFIX)
    if schema.get("nullable") is True and not is_properties:
        return {"anyOf": [kept, {"type": "null"}]}
    return kept


def references(schema: Any) -> set[str]:
    """Names of the schemas that one refers to."""
    if isinstance(schema, list):
        return set().union(*map(references, schema))
    if not isinstance(schema, dict):
        return set()
    found = set().union(*map(references, schema.values()))
    target = schema.get("$ref")
    return found | ({target.removeprefix("#/$defs/")} if isinstance(target, str) else set())


def main(source: str, out: str) -> None:
    """Writes the schemas that `ROOTS` need."""
    described = json.loads(Path(source).read_text(encoding="utf-8"))
    schemas, wanted, found = described["components"]["schemas"], list(ROOTS), {}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = reduced(schemas[name])
            wanted += sorted(references(found[name]))
    text = json.dumps({"version": described["info"]["version"], "$defs": dict(sorted(found.items()))}, indent=1)
    Path(out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
