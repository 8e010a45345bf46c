"""Flags that change a part of a value: an item of a list, what is appended, an entry that is removed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from trainkit.config.schema import (
    FREE_MAPPING,
    allowed_values,
    default_values,
    field_schema,
    is_known,
    sections,
    show_value,
)
from trainkit.config.suggest import unknown_problem
from trainkit.config.yamlfile import Entry, entry_at, merge, without
from trainkit.errors import ConfigError, Problem


@dataclass(frozen=True)
class Edit:
    """What one flag changes in the value of a key, whichever layer it is from."""

    path: tuple[str, ...]
    value: Any
    origin: str
    appends: bool = False
    may_miss: bool = False
    """Whether an entry that it removes may be missing, as in a sweep over values and null."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.path[: 2 if self.path[0] in sections() else 1]

    @property
    def removes(self) -> bool:
        """Whether null removes an entry: of a mapping whose values cannot be null."""
        if self.value is not None or len(self.path) != len(self.key) + 1 or not is_known(self.key):
            return False
        schema = field_schema(self.key)
        return self.key[0] != FREE_MAPPING and any(
            option.get("type") == "object" for option in schema.get("anyOf", [schema])
        )

    def apply(self, tree: Entry) -> Entry:
        """The tree with the changed value; raises ConfigError if there is no such key or part."""
        name = ".".join(self.key)
        if not is_known(self.key):
            raise ConfigError([unknown_problem(self.key, Entry(None, self.origin))])
        try:
            if name not in default_values():
                raise ValueError("is a section: += appends to a list")
            found = tree.find(self.key) or entry_at((), default_values()[name], "default")
            entry = self._entry(found, self.path[len(self.key) :])
        except ValueError as error:
            hint = f"{name} must be {allowed_values(self.key)}"
            raise ConfigError([Problem(name, str(error), self.origin, hint)]) from None
        for part in reversed(self.key):
            entry = Entry({part: entry}, self.origin)
        return merge(without(tree, [self.key]), entry)

    def _entry(self, entry: Entry, path: tuple[str, ...]) -> Entry:
        """Entries of mappings keep their origins."""
        if not entry.is_mapping or not path:
            return entry_at((), self._changed(entry.plain(), path), self.origin)
        entries = dict(entry.value)
        if self.removes:
            if entries.pop(path[0], None) is None:
                self._refuse_missing(path[0], entries)
        else:
            entries[path[0]] = self._entry(entries.get(path[0], Entry(None, self.origin)), path[1:])
        return Entry(entries, entry.origin)

    def _refuse_missing(self, name: str, entries: Collection[str]) -> None:
        if not self.may_miss:
            raise ValueError(f"has no entry {name} to remove: " + (", ".join(entries) or "it is empty"))

    def _changed(self, value: Any, path: tuple[str, ...]) -> Any:
        if path and isinstance(value, dict):
            return {**value, path[0]: self._changed(value.get(path[0]), path[1:])}
        if path:
            return self._with_item(value, path[0], path[1:])
        if not self.appends:
            return self.value
        if isinstance(value, dict) and isinstance(self.value, dict):
            return {**value, **self.value}
        if not isinstance(value, list):
            raise ValueError(f"is {show_value(value)}: += appends to a list")
        return [*value, *(self.value if isinstance(self.value, list) else [self.value])]

    def _with_item(self, value: Any, name: str, rest: tuple[str, ...]) -> Any:
        if self.removes:
            self._refuse_missing(name, {})
            return value
        if not isinstance(value, list):
            raise ValueError(f"is {show_value(value)}, which has no item {name}")
        if not name.isdecimal() or int(name) >= len(value):
            items = f"has items 0 to {len(value) - 1}" if value else "is empty"
            raise ValueError(f"{items}, not {name}; += appends one")
        index = int(name)
        return [*value[:index], self._changed(value[index], rest), *value[index + 1 :]]


def edit_of(key: str, value: Any, origin: str, *, may_miss: bool = False) -> Edit | None:
    """The edit of a flag with a key such as ``betas.0`` or ``setup+``, or null; None if it sets a key."""
    path = tuple(key.removesuffix("+").strip().split("."))
    edit = Edit(path, value, origin, key.endswith("+"), may_miss)
    has_index = any(name.isdecimal() for name in path[len(edit.key) :])
    return edit if edit.appends or edit.removes or has_index else None
