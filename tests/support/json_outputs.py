"""Checks the JSON output of commands with the commands' JSON Schemas, which tests use in strict form."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from trainkit.capabilities.programs.outputs import outputs


def checked(name: str, text: str) -> Any:
    """Return the JSON value in a text, which must be valid for the output `name`, without unknown keys."""
    value = json.loads(text)
    validators()[name].validate(value)
    return value


@cache
def validators() -> dict[str, Draft202012Validator]:
    """Return a strict validator for each output."""
    return {name: Draft202012Validator(_strict(output.schema(name))) for name, output in outputs().items()}


def _strict(schema: Any) -> Any:
    """Return a schema that does not allow unknown keys, so that a key without a schema is found."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {key: _strict(item) for key, item in schema.items()}
