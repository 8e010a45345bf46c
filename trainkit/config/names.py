"""The names of all config keys, suggestions for misspelt ones, and descriptions of allowed values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from trainkit.config.schema import RunConfig
from trainkit.formats import JsonObject


def close_matches(word: str, words: Iterable[str]) -> list[str]:
    """Up to three words similar to the given one, the closest first."""
    from difflib import get_close_matches

    return get_close_matches(word, list(words), n=3, cutoff=0.6)


def near(word: str, words: Iterable[str]) -> str | None:
    """The word closest to the given one, or None if none is similar."""
    return next(iter(close_matches(word, words)), None)


def near_yaml(name: str, names: Iterable[str]) -> str | None:
    """The YAML file whose name, without suffix, is closest to the given one, or None."""
    by_stem = {
        str(PurePath(item).with_suffix("")): item for item in names if item.endswith((".yaml", ".yml"))
    }
    match = near(str(PurePath(name).with_suffix("")), by_stem)
    return by_stem[match] if match else None


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
    section = path[0] if len(path) > 1 and path[0] in sections() else ""
    leaf = path[-1]
    if section:
        match = near(leaf, sections()[section])
        if match:
            return f"{section}.{match}"
    joined = {key.replace(".", "_"): key for key in all_keys() if "." in key}
    if leaf in joined:
        return joined[leaf]
    by_leaf = {key.rpartition(".")[2]: key for key in reversed(all_keys())}
    if leaf in by_leaf:
        return by_leaf[leaf]
    if not section and (match := near(leaf, RunConfig.model_fields)):
        return match
    dotted = ".".join(path)
    if match := near(dotted, all_keys()):
        return match
    match = near(leaf, by_leaf)
    return by_leaf[match] if match else None


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
