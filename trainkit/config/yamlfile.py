"""Reads YAML files and values into trees of entries that record their file and line."""

from __future__ import annotations

import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainkit.errors import ConfigError, Problem
from trainkit.trust import open_trusted

TAG = "tag:yaml.org,2002:"
MAX_FILE_BYTES = 10_000_000
STANDARD_INPUT = Path("-")
MAX_DEPTH = 100
MAX_VALUES = 100_000
"""Maximum number of values in a config; nested aliases can expand a few hundred bytes to any number of
values.
"""
_PATTERNS = {
    "null": r"^(?:~|null|Null|NULL|)$",
    "bool": r"^(?:true|True|TRUE|false|False|FALSE)$",
    "int": r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": (
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}


VARIABLES = ("launch", "env")
"""Path of the mapping of environment variables, whose numbers and booleans are kept as text, exactly as
written."""
_AS_WRITTEN = frozenset(TAG + kind for kind in ("bool", "int", "float"))


class Loader(getattr(yaml, "CBaseLoader", yaml.BaseLoader)):  # type: ignore[misc]
    """Composes YAML nodes, using the C parser if PyYAML includes it."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML, quoting strings that YAML 1.1 or 1.2 would parse as another type."""


for _name, _pattern in _PATTERNS.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(TAG + _name, re.compile(_pattern), None)


def parse_scalar(node: yaml.ScalarNode) -> Any:
    """Return the value of a scalar node.

    Raises ValueError if the scalar has a tag outside YAML's core schema.
    """
    text: str = node.value
    kind = node.tag.removeprefix(TAG)
    if kind == "str":
        return text
    pattern = _PATTERNS.get(kind)
    if pattern is None or not re.match(pattern, text):
        raise ValueError(f"the tag {node.tag} is not supported")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def dump(value: Any) -> str:
    """Return YAML text that parses to `value` under both YAML 1.1 and 1.2; keys are not sorted."""
    text: str = yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


@dataclass(frozen=True)
class Entry:
    """A value and its origin; a mapping's values are entries, and all other values are plain."""

    value: Any
    origin: str
    typed: str = ""
    """A scalar's text as the user typed it, such as 007 for the number 7."""
    is_replaced: bool = False
    """True if `overlay` set the value to null because the other key in `LENGTHS` is set."""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    def plain(self) -> Any:
        """Return the value as plain Python data, without origins."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        return self.value

    def leaves(self, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Entry]]:
        """Yield every entry that is not a mapping, together with its path."""
        if not isinstance(self.value, dict):
            yield prefix, self
            return
        for key, entry in self.value.items():
            yield from entry.leaves((*prefix, key))

    def find(self, path: tuple[str, ...]) -> Entry | None:
        """Return the entry at a path, or None if there is no such entry."""
        entry = self
        for key in path:
            if not isinstance(entry.value, dict) or key not in entry.value:
                return None
            entry = entry.value[key]
        return entry


WHOLE = ("data", "source")
"""Path of the mapping of data sources (a mixture), which a higher layer replaces as a whole instead of
merging."""


def merge(low: Entry, high: Entry, path: tuple[str, ...] = ()) -> Entry:
    """Merge two mappings recursively; scalars and lists of `high` replace the values of `low`.

    `path` is the path of both mappings in the config.
    """
    if not (low.is_mapping and high.is_mapping) or path == WHOLE:
        return high
    merged = dict(low.value)
    for key, entry in high.value.items():
        merged[key] = merge(merged[key], entry, (*path, key)) if key in merged else entry
    return Entry(merged, high.origin)


def without(entry: Entry, paths: list[tuple[str, ...]]) -> Entry:
    """Return the tree without the entries at `paths`; each path has one or two keys."""
    kept: dict[str, Entry] = {}
    for name, inner in entry.value.items():
        if (name,) in paths:
            continue
        if inner.is_mapping:
            values = {key: value for key, value in inner.value.items() if (name, key) not in paths}
            inner = Entry(values, inner.origin)
        kept[name] = inner
    return Entry(kept, entry.origin)


LENGTHS = (("train", "steps"), ("train", "epochs"))
"""The two keys that set the length of a run; only one of them may be set."""


def overlay(low: Entry, high: Entry) -> Entry:
    """Merge two mappings; a run length in `high` replaces one in `low`, even if their keys differ.

    If only one of the mappings sets `checkpoint.keep`, `checkpoint.keep_last` in the other mapping is read as
    `checkpoint.keep.last`.
    """
    low, high = _with_keep(low, high), _with_keep(high, low)
    for own, other in (LENGTHS, LENGTHS[::-1]):
        found, before = high.find(own), low.find(other)
        replaces = found is not None and found.value is not None and high.find(other) is None
        if found is not None and replaces and before is not None and before.value is not None:
            null = Entry(None, found.origin, is_replaced=True)
            high = merge(high, Entry({other[0]: Entry({other[1]: null}, found.origin)}, found.origin))
    return merge(low, high)


_KEEP, _KEEP_LAST = ("checkpoint", "keep"), ("checkpoint", "keep_last")


def _with_keep(tree: Entry, other: Entry) -> Entry:
    """Return `tree` with the value of its old key `checkpoint.keep_last` moved to `checkpoint.keep.last`.

    The value is moved only if `other` sets `checkpoint.keep` and `tree` does not.
    """
    last, own, keep = tree.find(_KEEP_LAST), tree.find(_KEEP), other.find(_KEEP)
    if last is None or keep is None or not keep.is_mapping or (own is not None and own.value is not None):
        return tree
    return merge(
        without(tree, [_KEEP_LAST, _KEEP]), entry_at((*_KEEP, "last"), last.value, last.origin, last.typed)
    )


def entry_at(path: tuple[str, ...], value: Any, origin: str, typed: str = "") -> Entry:
    """Return a tree with a single value, as set by a flag; `typed` is the text that the user typed."""
    entry = replace(_entries(value, origin), typed=typed)
    for key in reversed(path):
        entry = Entry({key: entry}, origin)
    return entry


def _entries(value: Any, origin: str) -> Entry:
    if isinstance(value, dict):
        return Entry({key: _entries(item, origin) for key, item in value.items()}, origin)
    return Entry(value, origin)


def read_yaml_file(path: Path, shown: str, *, executes: bool = False) -> Entry:
    """Read a YAML file that contains a mapping; `shown` is the file name used in origins.

    Raises ConfigError if the file cannot be read or is not a valid mapping. If `executes` is True, raises
    UsageError under the same conditions as `open_trusted`, because a run will execute the file's contents.
    """
    text = _read_text(path, shown, executes)
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = f"{shown}:{mark.line + 1}" if mark else shown
        hint = _syntax_hint(text, error, None if mark is None else mark.line)
        raise ConfigError([Problem("", f"invalid YAML: {_reason(error)}", origin, hint)]) from None
    except yaml.YAMLError as error:
        hint = "a config is a text file in YAML"
        raise ConfigError([Problem("", f"invalid YAML: {_reason(error)}", shown, hint)]) from None
    except RecursionError:
        raise ConfigError(
            [Problem("", "the values are nested too deeply", shown, "a config has at most four levels")]
        ) from None
    if node is None:
        raise ConfigError([Problem("", "the file is empty", shown, "a config needs at least one key")])
    builder = _Builder(shown)
    entry = builder.entry(node, ())
    if not entry.is_mapping:
        builder.problems.append(Problem("", "the file is not a mapping", shown, 'write lines like "seed: 1"'))
    if builder.problems:
        raise ConfigError(builder.problems)
    return entry


def parse_value(text: str, path: tuple[str, ...] = ()) -> Any:
    """Parse a YAML value on a single line, such as the list in ``--set a.b=[1, 2]``.

    `path` is the path of the key whose value is parsed. Raises ValueError with a user-facing message.
    """
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text} is not valid YAML: {_reason(error)}") from None
    rest = text[0 if node is None else node.end_mark.index :].strip()
    if rest.startswith("#"):
        raise ValueError(f"{rest} is a comment in YAML; put the value in quotes")
    if node is None:
        return None
    builder = _Builder("")
    try:
        value = builder.entry(node, path).plain()
    except ConfigError as error:
        raise ValueError(error.problems[0].message) from None
    if builder.problems:
        raise ValueError(builder.problems[0].message)
    return value


def _syntax_hint(text: str, error: yaml.MarkedYAMLError, number: int | None) -> str:
    """Return a hint for a syntax error in a file; `number` is the 0-based line number of the error."""
    lines = text.splitlines()
    if re.search(r"^\s*\t", text, re.MULTILINE):
        return "indent with spaces: YAML does not allow tabs"
    if error.context_mark is not None and "quoted" in str(error.context):
        return f"close the quotation mark of line {error.context_mark.line + 1}"
    if number is not None and number < len(lines):
        line, before = lines[number], [index for index in range(number) if lines[index].strip()]
        before = [index for index in before if not lines[index].lstrip().startswith("#")]
        indents = [_indent(lines[index]) for index in before]
        own = _indent(line)
        if before and indents[-1] < own and re.match(r"\s*[\w.]+:\s+[^|>&\s#]", lines[before[-1]]):
            above = before[-1] + 1
            return f"line {number + 1} is indented deeper than line {above}, which already has a value"
        if before and indents[-1] < own and re.fullmatch(r"\s*[\w.]+\s*", lines[before[-1]]):
            return f"write a colon at the end of line {before[-1] + 1}: {lines[before[-1]].strip()}:"
        if before and own < indents[-1] and own not in indents:
            known = " or ".join(map(str, sorted(set(indents))))
            return f"line {number + 1} is indented by {own}, but the lines above it are indented by {known}"
        if (setting := re.match(r"\s*([\w.]+)\s*=\s*(.+)", line)) is not None:
            return f"write {setting[1]}: {setting[2]}"
        if (value := re.match(r"\s*[\w.]+:\s+([*@`%&!])", line)) is not None:
            return f"text that begins with {value[1]} needs quotes"
    opened = error.context_mark if "flow" in str(error.context) else None
    hint = f"close the bracket of line {opened.line + 1}; " if opened else ""
    return hint + "text with a colon, a bracket, # or ${…} needs quotes"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return str(error).partition("\n")[0]


def _read_text(path: Path, shown: str, executes: bool) -> str:
    try:
        if path == STANDARD_INPUT:
            return _standard_input().decode("utf-8-sig")
        if executes:
            with open_trusted(path) as stream:
                return stream.read(MAX_FILE_BYTES).decode("utf-8-sig")
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError
        if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_FILE_BYTES:
            return path.read_bytes().decode("utf-8-sig")
        message, problem_hint = (
            "this is not a config",
            f"a config must be a file of at most {MAX_FILE_BYTES:,} bytes",
        )
    except FileNotFoundError:
        message, problem_hint = "file not found", "check the path"
    except IsADirectoryError:
        files = sorted(item.name for item in path.glob("*.yaml"))
        message = "this is a folder, not a file"
        problem_hint = f"it contains {', '.join(files)}" if files else "pass a YAML file"
    except UnicodeDecodeError as error:
        message = f"this is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        problem_hint = "a config is a text file in YAML"
    except OSError as error:
        message = f"the file cannot be read: {error.strerror}"
        problem_hint = "check the path and its permissions"
    raise ConfigError([Problem("", message, shown, problem_hint)])


@cache
def _standard_input() -> bytes:
    """Read standard input and cache its content, because a command loads its config several times."""
    return sys.stdin.buffer.read(MAX_FILE_BYTES)


class _Builder:
    """Converts YAML nodes to entries, and collects the problems found."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.problems: list[Problem] = []
        self.open_nodes: set[int] = set()
        self.count = 0

    def entry(self, node: yaml.Node, path: tuple[str, ...]) -> Entry:
        origin = self.origin(node)
        self.count += 1
        if self.count > MAX_VALUES:
            message, hint = (
                f"the config has more than {MAX_VALUES:,} values",
                "each alias repeats all values of its anchor; use fewer aliases",
            )
            raise ConfigError([Problem("", message, origin, hint)])
        if id(node) in self.open_nodes:
            self.problem(
                node,
                path,
                "the value contains an alias that refers to the value itself",
                "replace the alias with the value",
            )
            return Entry(None, origin)
        if len(self.open_nodes) > MAX_DEPTH:
            message, hint = "the values are nested too deeply", "a config has at most four levels"
            raise ConfigError([Problem("", message, origin, hint)])
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Entry(self.mapping(node, path), origin)
            if isinstance(node, yaml.SequenceNode):
                return Entry([self.entry(item, path).plain() for item in node.value], origin)
            assert isinstance(node, yaml.ScalarNode)
            return Entry(self.scalar(node, path), origin, node.value)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key = self.scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self.problem(key_node, path, "a key must be text", "put the key in quotes")
                continue
            if key in entries:
                first = entries[key].origin.rpartition(":")[2]
                message = f"duplicate key, first on line {first}"
                self.problem(key_node, (*path, key), message, "remove one of the two entries")
                continue
            value = self.entry(value_node, (*path, key))
            # Use the key's line as the origin, because the value of "train:" begins on the following line.
            entries[key] = replace(value, origin=self.origin(key_node))
        return entries

    def scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Any:
        if path[:2] == VARIABLES and len(path) == 3 and node.tag in _AS_WRITTEN:
            return node.value
        try:
            return parse_scalar(node)
        except ValueError as error:
            self.problem(node, path, str(error), "text that begins with ! needs quotes")
            return None

    def origin(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"

    def problem(self, node: yaml.Node, path: tuple[str, ...], message: str, hint: str) -> None:
        self.problems.append(Problem(".".join(path), message, self.origin(node), hint))
