"""YAML with the scalars of YAML 1.2: only true and false are booleans, and 01:00:00 is text.

The core schema of https://yaml.org/spec/1.2.2/#103-core-schema; PyYAML alone follows YAML 1.1, where
``on`` is a boolean, ``01:00:00`` is 3600 and ``3e-4`` is text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
_PATTERNS = {
    "null": r"^(?:~|null|Null|NULL|)$",
    "bool": r"^(?:true|True|TRUE|false|False|FALSE)$",
    "int": r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


class Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """Composes nodes; the C parser where PyYAML has it."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes what YAML 1.1 or 1.2 would take for something other than text."""


for _name, _pattern in _PATTERNS.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(_pattern), None)


def parse_scalar(node: yaml.ScalarNode) -> Any:
    """The value of a scalar node; ValueError for a tag that is not of the core schema."""
    text: str = node.value
    kind = node.tag.removeprefix(TAG)
    if kind == "str":
        return text
    pattern = _PATTERNS.get(kind)
    if pattern is None or not re.match(pattern, text):
        raise ValueError(f"the tag {node.tag} is not supported here")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def dump(value: Any) -> str:
    """YAML text, keys in the order given, that loads back equal under YAML 1.1 and 1.2."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text
