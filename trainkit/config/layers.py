"""Reads the config layers: files, the files that they extend, profiles, environment variables and flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from trainkit.config import schema
from trainkit.config.foreign import foreign_problem
from trainkit.config.running import WEBHOOK_VARIABLE
from trainkit.config.suggest import unknown_problem
from trainkit.config.yamlfile import (
    STANDARD_INPUT,
    Entry,
    entry_at,
    merge,
    overlay,
    parse_value,
    read_yaml_file,
    without,
)
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.folders import (
    find_shipped_config,
    shipped_config_names,
    shipped_configs,
    shown_path,
    typed_path,
)
from trainkit.formats import did_you_mean, near


def as_this_version(entry: Entry) -> Entry:
    """Convert a config file's content to the current config format version.

    Raises ConfigError if the file's `config_version` is newer than the version that this trainkit supports.
    The error lists no other problems in the file, because its keys and values are probably valid in the newer
    version.
    """
    version, key = entry.value.get("config_version"), ("logging", "tensorboard")
    if version is None or type(version.value) is not int:
        return entry
    if version.value > schema.CONFIG_VERSION:
        message = (
            "the file was written for a newer trainkit version: the file has config version "
            f"{version.value}, but this trainkit version supports at most {schema.CONFIG_VERSION}"
        )
        raise ConfigError([Problem("config_version", message, version.origin, "update trainkit")])
    if version.value == 1:
        entry = merge(entry, entry_at(("config_version",), schema.CONFIG_VERSION, version.origin))
        if (found := entry.find(key)) is not None and found.value is True:
            # In config version 1, `logging.tensorboard: true` was the default and did not require
            # TensorBoard.
            entry = merge(entry, entry_at(key, "auto", found.origin))
    return entry


def _form_hint(typed: str) -> str:
    key, _, value = typed.partition(":")
    meant = (
        f"{key.strip()}={value.strip()}" if schema.is_known(tuple(key.strip().split("."))) and value else ""
    )
    return f"did you mean --set {quote(meant)}?" if meant else "for example --set train.steps=100"


def _value_hint(path: tuple[str, ...]) -> str:
    """Return a hint for a value that is not valid YAML."""
    if (key := ".".join(path)) in schema.default_values():
        return f"{key} must be {schema.allowed_values(path)}"
    return "text with a colon, a bracket, # or ${…} needs quotes"


class Edit(NamedTuple):
    """A change to a key's value, made by a command-line flag."""

    path: tuple[str, ...]
    value: Any
    origin: str
    appends: bool = False
    may_miss: bool = False
    """If True, removing an entry that does not exist is not an error, as in a sweep over null and other
    values."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.path[: 2 if self.path[0] in schema.sections() else 1]

    @property
    def removes(self) -> bool:
        """Return whether the edit removes a mapping entry by setting it to null, which is no valid value."""
        if self.value is not None or len(self.path) != len(self.key) + 1 or not schema.is_known(self.key):
            return False
        field = schema.field_schema(self.key)
        return self.key[0] != schema.FREE_MAPPING and any(
            option.get("type") == "object" for option in field.get("anyOf", [field])
        )

    @property
    def is_partial(self) -> bool:
        """Return whether the edit modifies the value from lower layers instead of replacing it."""
        return self.appends or self.removes or any(map(str.isdecimal, self.path[len(self.key) :]))

    def apply(self, tree: Entry) -> Entry:
        """Return the tree with the edited value; raise ConfigError if the edit cannot be applied."""
        name = ".".join(self.key)
        if not schema.is_known(self.key):
            raise ConfigError([unknown_problem(self.key, Entry(None, self.origin))])
        try:
            if name not in schema.default_values():
                raise ValueError("is a section, but += only appends to a list")
            found = tree.find(self.key) or entry_at((), schema.default_values()[name], "default")
            value = self._changed(found.plain(), self.path[len(self.key) :])
        except ValueError as error:
            hint = f"{name} must be {schema.allowed_values(self.key)}"
            raise ConfigError([Problem(name, str(error), self.origin, hint)]) from None
        if self.removes and value == found.plain():
            return tree
        entry = _with_origins(entry_at((), value, self.origin), found)
        for part in reversed(self.key):
            entry = Entry({part: entry}, self.origin)
        return merge(without(tree, [self.key]), entry)

    def _changed(self, value: object, path: tuple[str, ...]) -> object:
        """Return a copy of `value` with the edit applied to the item at `path`."""
        if not path and self.appends:
            if isinstance(value, dict) and isinstance(self.value, dict):
                return {**value, **self.value}
            if not isinstance(value, list):
                raise ValueError(f"is {schema.show_value(value)}, but += only appends to a list")
            return [*value, *(self.value if isinstance(self.value, list) else [self.value])]
        if not path:
            return self.value
        name, rest = path[0], path[1:]
        if self.removes:
            entries = value if isinstance(value, dict) else {}
            if name not in entries and not self.may_miss:
                raise ValueError(f"has no entry {name} to remove: " + (", ".join(entries) or "it is empty"))
            return {key: item for key, item in entries.items() if key != name} if name in entries else value
        if isinstance(value, dict):
            return {**value, name: self._changed(value.get(name), rest)}
        if not isinstance(value, list):
            raise ValueError(f"is {schema.show_value(value)}, which has no item {name}")
        if not name.isdecimal() or int(name) >= len(value):
            items = f"has items 0 to {len(value) - 1}" if value else "is empty"
            raise ValueError(f"{items}, so there is no item {name}; += appends an item")
        index = int(name)
        return [*value[:index], self._changed(value[index], rest), *value[index + 1 :]]


def _with_origins(entry: Entry, before: Entry | None) -> Entry:
    """Return the entry with the origin from `before` restored for every value that did not change."""
    if before is None or not (entry.is_mapping and before.is_mapping):
        return before if before is not None and entry.value is before.value else entry
    return replace(
        entry, value={key: _with_origins(item, before.value.get(key)) for key, item in entry.value.items()}
    )


ENV_PREFIX = "TRAINKIT_"
ENV_INTERNAL_PREFIX = "TRAINKIT_JOB_"
ENV_NO_KEYS = (WEBHOOK_VARIABLE, "TRAINKIT_MIN_POLL_S")
"""Environment variables that trainkit reads elsewhere and that set no config key."""
EMPTY = Entry({}, "default")
SCRIPTS = {".py": "python", ".sh": "bash"}
"""Maps the suffix of a script to the program that runs it."""
_SETTING = re.compile(r"\+{0,2}([a-z_]+(?:\.[a-z_]+)?)=(.*)")
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?")


class Layers:
    """Reads the config layers and collects the problems found in them."""

    def __init__(self, cwd: Path, *, of_run: bool = False) -> None:
        self.cwd, self.of_run = cwd, of_run
        self.problems: list[Problem] = []

    def config(self, name: str | Path) -> tuple[Entry, Path]:
        """Find a config by name or path, and return its content and path.

        A file takes precedence over a built-in config with the same name. The name ``-`` means standard
        input.
        """
        if Path(name) == STANDARD_INPUT:
            return self._file(STANDARD_INPUT, ()), STANDARD_INPUT
        try:
            path = typed_path(str(name), self.cwd, is_literal=True)
        except UsageError as error:
            self.problems.append(Problem("", error.message, "", error.hint))
            return EMPTY, self.cwd / name
        shipped = None if path.is_file() else find_shipped_config(str(name))
        if shipped is None and (not path.exists() or path.suffix in SCRIPTS):
            self.problems.append(self._missing(str(name), path))
            return EMPTY, path
        return self._file(shipped or path, (), executes=self.of_run), shipped or path

    def _missing(self, name: str, path: Path) -> Problem:
        if path.suffix in SCRIPTS:
            hint = f"`trainkit submit -- {SCRIPTS[path.suffix]} {quote(name)}` runs your own script"
            return Problem("", "no such config", name, hint)
        if _NUMBER.fullmatch(name):
            hint = f"a number cannot be a CONFIG; did you mean --set KEY={name}, or --sweep KEY=VALUE,{name}?"
            return Problem("", "no such file or shipped config", name, hint)
        if setting := _SETTING.fullmatch(name):
            keys = tuple(setting[1].split("."))
            key = setting[1] if schema.is_known(keys) else schema.meant(keys)
            hint = f"did you mean --set {quote(f'{key}={setting[2]}')}?" if key else "a setting follows --set"
            return Problem("", "no such file or shipped config", name, hint)
        if inside := [one for one in shipped_config_names() if one.endswith(f"/{path.stem.lower()}")]:
            return Problem("", "no such file or shipped config", name, f"did you mean {inside[0]}?")
        if not path.parent.is_dir():
            close = near(name.lower(), shipped_config_names(), schema.SIMILAR)
            missing = f"there is no folder {shown_path(path.parent)}; {_shipped_hint(name)}"
            hint = missing if close is None else f"did you mean {close}?"
        else:
            files = {item.stem: item.name for item in path.parent.glob("*.y*ml")}
            close = near(path.stem, files, schema.SIMILAR)
            meant = Path(name).with_name(files[close]) if close else None
            hint = _shipped_hint(name) if meant is None else f"did you mean {meant}?"
        return Problem("", "no such file or shipped config", name, hint)

    def file(self, path: Path) -> Entry:
        """Read a config file and merge it over the files that it extends.

        If the file cannot be read, record the problem and return an empty entry.
        """
        return self._file(self.cwd / path, ())

    def _file(self, path: Path, parents: tuple[Path, ...], *, executes: bool = False) -> Entry:
        shown = self.shown(path)
        try:
            entry = read_yaml_file(path, shown, executes=executes)
        except ConfigError as error:
            self.problems += error.problems
            return EMPTY
        entry = as_this_version(entry)
        if (foreign := foreign_problem(entry, shown)) is not None:
            self.problems.append(foreign)
            return EMPTY
        own = {key: value for key, value in entry.value.items() if key != "extends"}
        result = EMPTY
        for name, origin in self._extended(entry):
            parent = self._find_extended(path, name, origin)
            if parent is None:
                continue
            chain = (*parents, path.resolve())
            if parent.resolve() in chain:
                names = [self.shown(item) for item in chain[chain.index(parent.resolve()) :]]
                message = f"{' extends '.join([*names, names[0]])}, which is circular"
                self.problem("extends", message, origin, "remove `extends` from one of these files")
                continue
            result = overlay(result, self._file(parent, chain))
        return overlay(result, Entry(own, entry.origin))

    def _extended(self, entry: Entry) -> list[tuple[str, str]]:
        extends = entry.value.get("extends")
        if extends is None or extends.value is None:
            return []
        names = extends.value if isinstance(extends.value, list) else [extends.value]
        if not all(isinstance(name, str) and name for name in names):
            message, hint = "must be the name of a file or a list of names", "for example quickstart"
            self.problem("extends", message, extends.origin, hint)
            return []
        return [(name, extends.origin) for name in names]

    def _find_extended(self, path: Path, name: str, origin: str) -> Path | None:
        try:
            relative = typed_path(name, path.parent)
        except UsageError as error:
            self.problem("extends", error.message, origin, error.hint)
            return None
        if relative.is_file():
            return relative
        for candidate in (find_shipped_config(name), shipped_configs() / name, relative):
            if candidate is not None and candidate.exists():
                return candidate
        message = f"{name} is neither a path relative to this file nor the name of a shipped config"
        self.problem("extends", message, origin, _shipped_hint(name))
        return None

    def profile(self, name: str, config: Path | None) -> Entry:
        """Read the profile called `name`; `config` is the path of the run config, if any.

        A file ``CONFIG.NAME.yaml`` in the run config's folder is a profile for that config only.
        """
        folders = [self.cwd / "profiles", self.cwd / "configs" / "profiles", shipped_configs() / "profiles"]
        if config is not None:
            config = self.cwd / config
            if "/" not in name and (own := config.with_name(f"{config.stem}.{name}.yaml")).is_file():
                return self.file(own)
            folders.insert(0, config.parent / "profiles")
        for folder in folders:
            if "/" not in name and (folder / f"{name}.yaml").is_file():
                return self.file(folder / f"{name}.yaml")
        known = {item.stem for folder in folders for item in folder.glob("*.yaml")}
        if config is not None:
            owned = config.parent.glob(f"{config.stem}.*.yaml")
            known.update(item.stem.removeprefix(f"{config.stem}.") for item in owned)
        hint = f"{did_you_mean(name, known)}profiles: {', '.join(sorted(known))}"
        self.problem("", f"unknown profile {name!r}", f"--profile {name}", hint)
        return EMPTY

    def environment(self, environ: Mapping[str, str]) -> Entry:
        """Read the layer set by environment variables such as ``TRAINKIT_TRAIN__STEPS``."""
        result = EMPTY
        for name, text in sorted(environ.items()):
            is_internal = name.startswith(ENV_INTERNAL_PREFIX) or name in ENV_NO_KEYS
            if not name.startswith(ENV_PREFIX) or is_internal:
                continue
            parts = name.removeprefix(ENV_PREFIX).split("__")
            # In a variable name, the parts after the section and the key are the name of an entry in a
            # mapping such as launch.env. The name of the entry is case-sensitive.
            path = (*(part.lower() for part in parts[:2]), *parts[2:])
            try:
                result = merge(result, entry_at(path, parse_value(text, path), name, text.strip()))
            except ValueError as error:
                self.problem(".".join(path), str(error), name, _value_hint(path))
        return result

    def flags(
        self, overrides: Sequence[str], named: Mapping[str, tuple[str, object]]
    ) -> tuple[Entry, list[Edit]]:
        """Return the layer set by ``--set a.b=c`` and named options, and the edits to apply to lower layers.

        If ``--set`` is given several times for one key, the last one wins. A named option that contradicts a
        ``--set`` is reported as a problem.
        """
        layer, edits = EMPTY, list[Edit]()

        def add(edit: Edit, typed: str = "") -> None:
            nonlocal layer
            if edit.is_partial or any(one.key == edit.path[: len(one.key)] for one in edits):
                # If an earlier edit changes part of a key, a later full value of the key must be applied as
                # an edit too.
                edits.append(edit)
            else:
                layer = merge(layer, entry_at(edit.path, edit.value, edit.origin, typed))

        for text in overrides:
            origin = f"--set {text}"
            key, equals, raw = text.partition("=")
            path = tuple(key.strip().removesuffix("+").strip().split("."))
            if not equals or not all(path):
                self.problem("", "must have the form section.key=value", origin, _form_hint(text))
                continue
            try:
                value = parse_value(raw, path)
            except ValueError as error:
                self.problem(".".join(path), str(error), origin, _value_hint(path))
                continue
            edit = Edit(path, value, origin, appends=key.strip().endswith("+"))
            if not edit.is_partial:
                edits[:] = [one for one in edits if one.path[: len(path)] != path]
            add(edit, raw.strip())
        for key, (origin, value) in named.items():
            path = tuple(key.removesuffix("+").split("."))
            edit = Edit(path, value, origin, key.endswith("+"), may_miss=True)
            same = next((one for one in edits if one.path == path), None)
            other = layer.find(path) if same is None else entry_at((), same.value, same.origin)
            if other is not None and other.plain() != value and not edit.appends:
                self.problem(
                    key, f"conflicts with {other.origin}", origin, "specify only one of the two options"
                )
            add(edit)
        return layer, edits

    def shown(self, path: Path) -> str:
        """Return a path as it appears in origins: relative if it is in the working directory."""
        if path == STANDARD_INPUT:
            return "standard input"
        absolute = self.cwd / path
        try:
            return str(absolute.relative_to(self.cwd))
        except ValueError:
            return str(absolute)

    def problem(self, key: str, message: str, origin: str, hint: str) -> None:
        self.problems.append(Problem(key, message, origin, hint))


def _shipped_hint(name: str) -> str:
    names = shipped_config_names()
    return f"{did_you_mean(name.lower(), names)}shipped configs: {', '.join(names)}"
