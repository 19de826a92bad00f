"""Random JSON schemas, of what answers are asked to be."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

WORDS = ("a", "name", "x-y", "größe", "key with space", "n0", "$id_", "日")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema whose values are short, of any of the keywords that are served; a few refer to themselves."""
    rng = random.Random(seed)
    schema = _object(rng, 2) if rng.random() < 0.7 else _any(rng, 2)
    if rng.random() < 0.15:
        leaf = {"type": "object", "properties": {"v": _scalar(rng)}, "required": ["v"], "additionalProperties": False}
        node = {
            "type": "array",
            "items": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]},
            "maxItems": 2,
        }
        schema = {"$defs": {"leaf": leaf, "node": node}, **_object(rng, 0, extra={"$ref": "#/$defs/node"})}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(("object", "array", "scalar", "anyOf", "allOf") if depth else ("scalar",))
    if kind == "object":
        return _object(rng, depth - 1)
    if kind == "array":
        least = rng.randrange(3)
        array = {
            "type": "array",
            "items": _any(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randrange(3),
        }
        if rng.random() < 0.2:
            array = {"type": "array", "prefixItems": [_scalar(rng), _scalar(rng)], "items": False, "minItems": 2}
        return array
    if kind == "anyOf":
        return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    if kind == "allOf":
        both = {"type": "integer", "minimum": rng.randint(-20, 0)}
        return {"allOf": [both, {"maximum": rng.randint(1, 500)}]}
    return _scalar(rng)


def _object(rng: random.Random, depth: int, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0 if extra else 1, 3))
    properties = {name: _any(rng, depth) for name in names}
    if extra is not None:
        properties["self"] = extra
    required = [name for name in properties if rng.random() < 0.7]
    made = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if rng.random() < 0.1:
        made["additionalProperties"] = {"type": "boolean"}
    return made


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return rng.choice(
        (
            {"type": "string", "maxLength": rng.randint(0, 8)},
            {"type": "string", "minLength": 2, "maxLength": 5},
            {"type": "string", "pattern": "^[a-c]{1,4}-[0-9]+$", "maxLength": 9},
            {"type": "string", "format": rng.choice(("date", "time", "ipv4", "uuid"))},
            {"enum": [rng.choice(WORDS), None, 7, {"k": [1, "v"]}]},
            {"const": rng.choice((1.5, "c", True, None, [], {"a": 1}))},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)},
            {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100, "multipleOf": 5},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "null"]},
            {"type": "string", "enum": ["on", "off", 'q"uote', "back\\slash", "line\nbreak"]},
        )
    )


def check_answer(schema: dict[str, Any], text: str) -> None:
    """Raises where a text is no JSON that a schema describes."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
