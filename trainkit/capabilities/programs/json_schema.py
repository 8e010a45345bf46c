"""Derives the JSON Schema of a command's output from the Python type of the printed value."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from trainkit.run.files import INLINE, LEFT_OUT, OPTIONAL, UNLIMITED, Record

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, object]
_PLAIN = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    NoneType: "null",
    Path: "string",
}


def schema_of(*kinds: object) -> Schema:
    """Return the schema of a value that has one of the given types.

    A type may contain TypedDicts and dataclasses; a dataclass is described as `to_json` writes it. The
    schemas of TypedDicts and dataclasses allow additional keys, because a later version of trainkit may add
    keys.
    """
    records: dict[str, tuple[object, Schema]] = {}
    schema = _any_of([_schema(kind, records) for kind in kinds])
    return schema | ({"$defs": {name: own for name, (_, own) in sorted(records.items())}} if records else {})


def _schema(hint: object, records: dict[str, tuple[object, Schema]]) -> Schema:
    """Return the schema of a type; add each dataclass and TypedDict that it contains to `records`."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Any, object):
        return {}
    if origin in (Union, UnionType):
        return _any_of([_schema(part, records) for part in parts])
    if origin is Literal:
        return {"enum": list(parts)}
    if origin is datetime:
        return {"type": "string", "format": "date-time"}
    if origin in _PLAIN:
        return {"type": _PLAIN[origin]}
    if isinstance(origin, type) and issubclass(origin, Record):
        return {"type": "object", "description": _first_sentence(origin)}
    if is_dataclass(origin) or is_typeddict(origin):
        return _reference(cast(type, origin), records)
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _schema(parts[1], records)}
    if origin is tuple and parts[-1] is not Ellipsis:
        items = [_schema(part, records) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _schema(parts[0], records)}
    raise TypeError(f"the type {hint} has no JSON Schema")


def _any_of(schemas: Sequence[Schema]) -> Schema:
    """Return a schema that allows the values of all `schemas`; plain types are combined into one schema."""
    plain = [schema["type"] for schema in schemas if schema.keys() == {"type"}]
    others = [schema for schema in schemas if schema.keys() != {"type"}]
    if plain:
        others.append({"type": plain[0] if len(plain) == 1 else list(dict.fromkeys(plain))})
    return others[0] if len(others) == 1 else {"anyOf": others}


def _reference(kind: type, records: dict[str, tuple[object, Schema]]) -> Schema:
    """Return a reference to the schema of a dataclass or TypedDict, and add the schema to `records`."""
    name = kind.__name__
    if name not in records:
        schema: Schema = {}
        records[name] = kind, schema
        described, required = dict[str, Schema](), list[str]()
        for key, hint, about, is_required in _keys(kind):
            described[key] = _schema(hint, records) | ({"description": about} if about else {})
            required += [key] if is_required else []
        about = _first_sentence(kind)
        schema |= {"type": "object"} | ({"description": about} if about else {})
        schema |= {"properties": described, "required": required}
    if records[name][0] is not kind:
        raise TypeError(f"{kind} and {records[name][0]} have the same name")
    return {"$ref": f"#/$defs/{name}"}


def _keys(kind: type) -> Iterator[tuple[str, object, str, bool]]:
    """Yield the name, the type and the description of each key, and whether the key is always present."""
    hints, about = get_type_hints(kind), _descriptions(kind)
    if not is_dataclass(kind):
        for key, hint in hints.items():
            yield key, hint, about.get(key, ""), key in cast(Any, kind).__required_keys__
        return
    for item in fields(cast(Any, kind)):
        hint = hints[item.name]
        if item.metadata == INLINE:
            yield from _keys(cast(type, hint))
        elif item.metadata != LEFT_OUT and item.name != "more":
            hint = hint | None if item.metadata == UNLIMITED else hint
            yield item.name, hint, about.get(item.name, ""), item.metadata != OPTIONAL


@cache
def _descriptions(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, including those of its base classes."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    found: dict[str, str] = {}
    for name in map(ast.unparse, node.bases):  # A TypedDict class does not record its base classes.
        base = vars(sys.modules[kind.__module__]).get(name)
        if is_dataclass(base) or is_typeddict(base):
            found |= _descriptions(cast(type, base))
    for item, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[ast.unparse(item.target)] = _as_json(ast.literal_eval(after.value))
    return found


def _first_sentence(kind: type) -> str:
    """Return the first paragraph of a class's docstring, or an empty string if the class has none."""
    text = (vars(kind).get("__doc__") or "").partition("\n\n")[0]
    # If a dataclass has no docstring, Python generates one that consists of its signature.
    return "" if text.startswith(f"{kind.__name__}(") else _as_json(text)


def _as_json(text: str) -> str:
    """Return a docstring as one line, with `null` instead of `None`."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split()).replace("``", "`"))
