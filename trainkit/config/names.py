"""The names of all config keys, suggestions for misspelt ones, and descriptions of allowed values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from trainkit.config.schema import RunConfig
from trainkit.formats import JsonObject


def near(word: str, words: Iterable[str]) -> str | None:
    """The word closest to the given one, or None if none is similar."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, list(words), n=1)), None)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The start of a hint; empty if no word is similar."""
    match = near(word, words)
    return f"did you mean {match}? " if match else ""


FREE_MAPPING = "task_args"
"""The key that is not a section but a mapping with any keys."""


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """The keys of every section."""
    found: dict[str, tuple[str, ...]] = {}
    for name, field in RunConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = tuple(inner.alias or key for key, inner in kind.model_fields.items())
    return found


@cache
def all_keys() -> tuple[str, ...]:
    """Every dotted key that has a value, in schema order."""
    return tuple(key for key, _ in flatten(RunConfig().model_dump(mode="json", by_alias=True)))


def flatten(dumped: JsonObject) -> Iterator[tuple[str, Any]]:
    """The dotted keys and values of a dumped config; mappings inside a section are one value."""
    for name, value in dumped.items():
        if name in sections():
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def is_known(path: tuple[str, ...]) -> bool:
    """Whether a path names a section, a key, or an entry of a free mapping."""
    if path[0] == FREE_MAPPING:
        return True
    if path[0] not in sections():
        return path[0] in RunConfig.model_fields and len(path) == 1
    return len(path) == 1 or path[1] in sections()[path[0]]


def meant(path: tuple[str, ...]) -> str | None:
    """The key or section closest to an unknown path, or None."""
    leaf, dotted = path[-1], ".".join(path)
    if len(path) > 1 and (match := near(leaf, sections().get(path[0], ()))):
        return f"{path[0]}.{match}"
    words = {key.rpartition(".")[2]: key for key in reversed(all_keys())}
    words |= {key.replace(".", "_"): key for key in all_keys()} | {key: key for key in all_keys()}
    words |= {name: name for name in RunConfig.model_fields}
    found = near(leaf, words) or near(dotted, words)
    return words[found] if found else None


MAX_SHOWN = 80


def allowed_values(path: tuple[str, ...]) -> str:
    """Describe the values allowed at a path, for example ``a whole number of at least 1 or null``."""
    schema = _schema()
    field = schema["properties"][path[0]]
    if path[0] in sections():
        if len(path) == 1:
            return f"a section with keys such as {', '.join(sections()[path[0]][:3])}"
        name = field["$ref"].rpartition("/")[2]
        field = schema["$defs"][name]["properties"][path[1]]
    return schema_words(field)


@cache
def _schema() -> JsonObject:
    return RunConfig.model_json_schema()


def show_value(value: Any) -> str:
    """A value as messages show it, truncated to `MAX_SHOWN` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def schema_words(schema: JsonObject) -> str:
    """Describe the values that a JSON schema allows, in words."""
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
        if schema.get("additionalProperties") is True:
            return "a mapping"
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"a mapping, each value {schema_words(values)}"
    return {"boolean": "true or false", "string": "text", "null": "null"}[str(kind)]


def _bounds(schema: JsonObject) -> str:
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
