"""Says in words what a key may hold, from the JSON schema of the config."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from trainkit.config.names import sections
from trainkit.config.schema import RunConfig

MAX_SHOWN = 80


def allowed_values(path: tuple[str, ...]) -> str:
    """What the key at a path may hold, for example ``a whole number of at least 1, or null``."""
    schema = _schema()
    field = schema["properties"][path[0]]
    if path[0] in sections():
        if len(path) == 1:
            return f"a section with keys such as {', '.join(sections()[path[0]][:3])}"
        name = field["$ref"].rpartition("/")[2]
        field = schema["$defs"][name]["properties"][path[1]]
    return schema_words(field)


@cache
def _schema() -> dict[str, Any]:
    return RunConfig.model_json_schema()


def show_value(value: Any) -> str:
    """A value as a message shows it, cut when it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def schema_words(schema: dict[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    if "$ref" in schema:
        return "a section"
    if "anyOf" in schema:
        options = [schema_words(option) for option in schema["anyOf"]]
        if "allowed" in schema:
            options = [schema["allowed"], *(word for word in options if word == "null")]
        return " or ".join(options)
    if "allowed" in schema:
        return str(schema["allowed"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "integer":
        return "a whole number" + _bounds(schema)
    if kind == "number":
        return "a number" + _bounds(schema)
    if kind == "array":
        if "prefixItems" in schema:
            return f"a list of {schema['minItems']}, each {schema_words(schema['prefixItems'][0])}"
        return f"a list, each {schema_words(schema['items'])}"
    if kind == "object":
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"a mapping, each value {schema_words(values)}"
    return {"boolean": "true or false", "string": "text", "null": "null"}[str(kind)]


def _bounds(schema: dict[str, Any]) -> str:
    bounds = []
    if "minimum" in schema:
        bounds.append(f"of at least {schema['minimum']:g}")
    if "exclusiveMinimum" in schema:
        bounds.append(f"above {schema['exclusiveMinimum']:g}")
    if "maximum" in schema:
        bounds.append(f"of at most {schema['maximum']:g}")
    if "exclusiveMaximum" in schema:
        bounds.append(f"below {schema['exclusiveMaximum']:g}")
    return f" {' and '.join(bounds)}" if bounds else ""
