"""Values that remember where they came from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainkit.frozen import dataclass


@dataclass(frozen=True)
class Entry:
    """A value and its origin; a mapping holds entries again, everything else is plain."""

    value: Any
    origin: str

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return self.value

    def leaves(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Everything that is not a mapping, with the path that leads to it."""
        if not isinstance(self.value, dict):
            yield prefix, self
            return
        for key, entry in self.value.items():
            yield from entry.leaves((*prefix, key))

    def find(self, path: tuple[str, ...]) -> Entry | None:
        """The entry at a path, or None."""
        entry = self
        for key in path:
            if not isinstance(entry.value, dict) or key not in entry.value:
                return None
            entry = entry.value[key]
        return entry


def merge(low: Entry, high: Entry) -> Entry:
    """The mappings merged deeply; scalars and lists of `high` replace those of `low`."""
    if not (low.is_mapping and high.is_mapping):
        return high
    merged = dict(low.value)
    for key, entry in high.value.items():
        merged[key] = merge(merged[key], entry) if key in merged else entry
    return Entry(merged, high.origin)


def entry_at(path: tuple[str, ...], value: Any, origin: str) -> Entry:
    """A tree that holds one value, for example of a flag."""
    entry = _entries(value, origin)
    for key in reversed(path):
        entry = Entry({key: entry}, origin)
    return entry


def _entries(value: Any, origin: str) -> Entry:
    if isinstance(value, dict):
        return Entry({key: _entries(item, origin) for key, item in value.items()}, origin)
    return Entry(value, origin)
