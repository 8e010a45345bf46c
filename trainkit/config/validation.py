"""Turns what pydantic found into problems with the value, what is allowed and where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from trainkit.config.allowed import allowed_values, show_value
from trainkit.config.names import all_keys, is_known, meant, sections
from trainkit.config.tree import Entry
from trainkit.errors import Problem


def unknown_keys(entry: Entry) -> Iterator[tuple[tuple[str, ...], Entry]]:
    """The first unknown key on every path of a tree."""
    for name, inner in entry.value.items():
        if not is_known((name,)):
            yield (name,), inner
        elif name in sections() and inner.is_mapping:
            for key, value in inner.value.items():
                if not is_known((name, key)):
                    yield (name, key), value


def without(entry: Entry, paths: list[tuple[str, ...]]) -> Entry:
    """The tree without the entries at some paths of one or two keys."""
    kept: dict[str, Entry] = {}
    for name, inner in entry.value.items():
        if (name,) in paths:
            continue
        if inner.is_mapping:
            values = {key: value for key, value in inner.value.items() if (name, key) not in paths}
            inner = Entry(values, inner.origin)
        kept[name] = inner
    return Entry(kept, entry.origin)


def unknown_problem(path: tuple[str, ...], entry: Entry) -> Problem:
    """The problem of a key that does not exist, with the one that was probably meant."""
    match = meant(path)
    hint = f"did you mean {match}?" if match else "`trainkit schema` prints every key"
    if path[-1] in all_keys():
        section, _, leaf = path[-1].partition(".")
        hint = f'write "{section}:" and "{leaf}:" indented in the next line'
    if match and entry.origin.startswith("TRAINKIT_"):
        hint = f"did you mean TRAINKIT_{match.upper().replace('.', '__')}?"
    return Problem(".".join(path), "there is no such key", entry.origin, hint)


def validation_problems(error: ValidationError, entry: Entry) -> list[Problem]:
    """One problem for every key whose value is not allowed."""
    problems: dict[tuple[str, ...], Problem] = {}
    for item in error.errors(include_url=False, include_context=False):
        location = tuple(str(part) for part in item["loc"])
        path = location[:2] if location[0] in sections() else location[:1]
        if path in problems:
            continue
        found = entry.find(path)
        if not is_known(path) or found is None:
            problems[path] = unknown_problem(path, found or entry)
            continue
        value = found.plain()
        origin = next((item.origin for _, item in found.leaves()), found.origin)
        message = f"must be {allowed_values(path)}, not {show_value(value)}"
        problems[path] = Problem(".".join(path), message, origin, _hint(item["type"], path, value, origin))
    return list(problems.values())


def _hint(kind: str, path: tuple[str, ...], value: Any, origin: str) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind == "string_type" and isinstance(value, dict):
        return "put numbers, true and false in quotes"
    if kind == "string_type" and isinstance(value, int | float):
        quoted = f'"{str(value).lower()}"'
        if origin.startswith("--set"):
            return f"put it in quotes: --set '{'.'.join(path)}={quoted}'"
        return f"put it in quotes: {quoted}"
    return ""
