"""YAML files and fragments as trees of entries that know their file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trainkit.config.names import near_yaml
from trainkit.config.tree import Entry
from trainkit.config.yaml12 import Loader, parse_scalar
from trainkit.errors import ConfigError, Problem
from trainkit.resources import shipped_configs


def read_yaml_file(path: Path, shown: str) -> Entry:
    """The mapping in a file; `shown` is the file's name in origins.

    Raises ConfigError with every problem of the file's form.
    """
    text = _read_text(path, shown)
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = f"{shown}:{mark.line + 1}" if mark else shown
        hint = "YAML is indented with spaces, and this line with a tab" if _is_tabbed(text, mark) else ""
        raise ConfigError([Problem("", f"this is not YAML: {_reason(error)}", origin, hint)]) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", f"this is not YAML: {_reason(error)}", shown)]) from None
    except RecursionError:
        raise ConfigError([Problem("", "the values are nested too deeply", shown)]) from None
    if node is None:
        raise ConfigError([Problem("", "the file is empty", shown, "a config holds at least one key")])
    builder = _Builder(shown)
    entry = builder.entry(node, ())
    if not entry.is_mapping:
        builder.problems.append(Problem("", "the file holds no keys", shown, 'write lines like "seed: 1"'))
    if builder.problems:
        raise ConfigError(builder.problems)
    return entry


def parse_value(text: str) -> Any:
    """The value of a YAML scalar, list or mapping on one line, as in ``--set a.b=[1, 2]``.

    Raises ValueError with a sentence for the reader.
    """
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{text} is not a YAML value: {_reason(error)}") from None
    rest = text[0 if node is None else node.end_mark.index :].strip()
    if rest.startswith("#"):
        raise ValueError(f"{rest} would be a comment in YAML and get lost; put the value into quotes")
    if node is None:
        return None
    builder = _Builder("")
    value = builder.entry(node, ()).plain()
    if builder.problems:
        raise ValueError(builder.problems[0].message)
    return value


def _is_tabbed(text: str, mark: yaml.Mark | None) -> bool:
    """Whether a tab stands at the beginning of the line that a mark is in."""
    if mark is None or mark.line >= text.count("\n") + 1:
        return False
    line = text.split("\n")[mark.line]
    return "\t" in line[: len(line) - len(line.lstrip())]


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return str(error).partition("\n")[0]


def _read_text(path: Path, shown: str) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        folder, name = path.parent, shown.removeprefix("configs/")
        if (shipped_configs() / name).is_file():
            hint = f"trainkit brings one of that name: `extends: {name}` in a file of yours takes it over"
        elif not folder.is_dir():
            hint = f"there is no folder {folder} either"
        else:
            match = near_yaml(path.name, [item.name for item in folder.iterdir()])
            hint = f"did you mean {Path(shown).parent / match}?" if match else ""
        message, problem_hint = "there is no such file", hint
    except IsADirectoryError:
        files = sorted(item.name for item in path.glob("*.yaml"))
        message = "this is a folder, not a file"
        problem_hint = f"it holds {', '.join(files)}" if files else "give a YAML file"
    except UnicodeDecodeError as error:
        message = f"this is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        problem_hint = "a config is a YAML text file"
    except OSError as error:
        message, problem_hint = f"the file cannot be read: {error.strerror}", ""
    raise ConfigError([Problem("", message, shown, problem_hint)])


class _Builder:
    """Turns nodes into entries and collects what is wrong on the way."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self.problems: list[Problem] = []
        self.open_nodes: set[int] = set()

    def entry(self, node: yaml.Node, path: tuple[str, ...]) -> Entry:
        origin = self.origin(node)
        if id(node) in self.open_nodes:
            self.problem(node, path, "the value contains itself")
            return Entry(None, origin)
        self.open_nodes.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return Entry(self.mapping(node, path), origin)
            if isinstance(node, yaml.SequenceNode):
                return Entry([self.entry(item, path).plain() for item in node.value], origin)
            assert isinstance(node, yaml.ScalarNode)
            return Entry(self.scalar(node, path), origin)
        finally:
            self.open_nodes.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            key = self.scalar(key_node, path) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                self.problem(key_node, path, "a key must be text", "put it in quotes")
                continue
            if key in entries:
                first = entries[key].origin.rpartition(":")[2]
                self.problem(key_node, (*path, key), f"the key stands here twice, first in line {first}")
                continue
            value = self.entry(value_node, (*path, key))
            # The line of the key: the value of "train:" begins a line further down.
            entries[key] = Entry(value.value, self.origin(key_node))
        return entries

    def scalar(self, node: yaml.ScalarNode, path: tuple[str, ...]) -> Any:
        try:
            return parse_scalar(node)
        except ValueError as error:
            self.problem(node, path, str(error))
            return None

    def origin(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"

    def problem(self, node: yaml.Node, path: tuple[str, ...], message: str, hint: str = "") -> None:
        self.problems.append(Problem(".".join(path), message, self.origin(node), hint))
