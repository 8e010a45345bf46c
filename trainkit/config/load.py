"""Loads a config from all its layers, records each value's origin, and applies changes made by commands."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainkit.config import yamlfile
from trainkit.config.hf_families import BALANCING, MODEL_KEYS
from trainkit.config.hf_model import CONFIG_NAME, HFModel, find_hf_model
from trainkit.config.layers import EMPTY, Edit, Layers, as_this_version
from trainkit.config.loaded import DEFAULT, InvalidConfig, LoadedConfig, independent_problems
from trainkit.config.schema import RunConfig, capabilities_of, config_class, flatten, meant, sections
from trainkit.config.section import Section
from trainkit.config.suggest import unknown_keys, unknown_problem, validation_problems
from trainkit.config.training import DECODER, NAMED, TRANSFORMERS, ModelConfig, named_defaults
from trainkit.config.validation import contradictions
from trainkit.config.yamlfile import LENGTHS, Entry, entry_at, merge, overlay, read_yaml_file, without
from trainkit.errors import ConfigError, Problem, UsageError
from trainkit.folders import FIRST_RUN, FIRST_RUN_NAME, config_folder, shipped_configs, shown_path, typed_path
from trainkit.shipped import TASKS, load

DEFAULT_PRESET = ModelConfig.model_fields["preset"].default
"""The default of `model.preset`, which has no effect if `model.hf` determines the model's sizes."""
PROJECT_FILE = "trainkit.yaml"
PATHS = {
    ("data", "source"): "stdlib",
    ("data", "val_source"): "stdlib",
    ("data", "tokenizer"): "bytes",
    ("data", "cache_dir"): None,
    ("model", "init_from"): None,
}
"""Maps each path-valued key to its only value that is not a path (such as ``stdlib``), or to None."""


def load_config(
    path: str | Path | None,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, tuple[str, object]] | None = None,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    layers: bool = True,
    defaults: Sequence[Entry] = (),
) -> LoadedConfig:
    """Load a config file, or a built-in config by name, and merge it with all other layers.

    `overrides` are the arguments of ``--set``. `flags` maps a key to the command-line flag, as the user typed
    it, and the flag's value. `defaults` are the layers with the lowest precedence, such as the `defaults`
    section of a cluster profile.

    Set `layers` to False if `path` is the config of an existing run that is to be executed again. If `layers`
    is False, ./trainkit.yaml, the user's config and environment variables are ignored, and UsageError is
    raised if other users have permission to write the file.

    Raises InvalidConfig, which contains the problems of all layers and the valid part of the config. Raises a
    plain ConfigError, without a valid part, if a layer cannot be read or two flags conflict.
    """
    environ = os.environ if environ is None else environ
    reader = Layers(Path.cwd() if cwd is None else cwd, of_run=not layers)
    # Layers are ordered by precedence, lowest first.
    trees = [*defaults]
    if layers:
        around = (config_folder(environ) / "config.yaml", reader.cwd / PROJECT_FILE)
        trees += [reader.file(item) for item in around if item.is_file()]
    file = None
    if path is not None:
        tree, file = reader.config(path)
        written = tree.find(("name",)) if path == FIRST_RUN else None
        if written and written.value == FIRST_RUN_NAME and any(layer.find(("name",)) for layer in defaults):
            # Ignore the name in the file, because the `defaults` of the command already specify a name.
            tree = without(tree, [("name",)])
        trees.append(tree)
    if profile is not None:
        trees.append(reader.profile(profile, file))
    if layers:
        trees.append(reader.environment(environ))
    of_flags, edits = reader.flags(overrides, flags or {})
    loaded = _merged(reader, [*trees, of_flags], edits)
    given = {f"--set {text}" for text in overrides} | {origin for origin, _ in (flags or {}).values()}
    return replace(loaded, typed=frozenset(key for key, one in loaded.origins.items() if one in given))


def _merged(reader: Layers, trees: Sequence[Entry], edits: Sequence[Edit]) -> LoadedConfig:
    """Merge layers, ordered from lowest to highest precedence, and apply the edits made by flags.

    Raises InvalidConfig if keys are unknown or values are invalid; the exception contains a config without
    these keys and values. Raises ConfigError if a layer cannot be read or two flags conflict.
    """
    problems = list(reader.problems)
    merged, causes = EMPTY, set()
    for tree in trees:
        unknown = list(unknown_keys(tree))
        problems += [unknown_problem(key, entry) for key, entry in unknown]
        causes |= {match for key, _ in unknown if (match := meant(key)) is not None}
        # A section is empty if, for example, every line below ``train:`` is commented out.
        empty = [(name,) for name in sections() if (own := tree.find((name,))) and own.value is None]
        merged = overlay(merged, without(tree, [*empty, *(key for key, _ in unknown)]))
    for edit in edits:
        try:
            merged = edit.apply(merged)
        except ConfigError as error:
            problems += error.problems
            causes.add(".".join(edit.key))
    epochs = merged.find(("train", "epochs"))
    if epochs is not None and epochs.value is not None and merged.find(("train", "steps")) is None:
        # train.epochs determines the number of steps, so set train.steps to null instead of its default.
        merged = merge(merged, entry_at(("train", "steps"), None, DEFAULT))
    merged = _with_named_defaults(merged)
    try:
        config = _validated(merged, reader.cwd)
    except ValidationError as error:
        found = validation_problems(error, merged)
        problems += found
        causes |= {problem.key for problem in found}
        merged = without(merged, [tuple(problem.key.split(".")) for problem in found])
        config = _validated(merged, reader.cwd)
    if config.model.hf is not None:
        before = merged
        merged, found = _with_hf_model(merged, config, reader.cwd, f"{reader.shown(shipped_configs())}/")
        try:
            config = _validated(merged, reader.cwd)
        except ValidationError as error:
            found += validation_problems(error, merged)
            merged = before
        problems += found
        causes |= {problem.key for problem in found}
    if reader.problems:
        raise ConfigError(problems)
    origins = _origins(config, merged)
    shipped = reader.shown(shipped_configs())
    adjustable = frozenset(key for key, origin in origins.items() if origin.startswith(f"{shipped}/"))
    loaded = LoadedConfig(config, origins, adjustable, _length_note(merged))
    conflicts = independent_problems(contradictions(loaded), causes)
    if problems or conflicts:
        causes |= {problem.key for problem in conflicts}
        raise InvalidConfig([*problems, *conflicts], loaded, frozenset(causes))
    return loaded


def _validated(tree: Entry, cwd: Path) -> RunConfig:
    content = _absolute_paths(tree, cwd).plain()
    return config_class(content).model_validate(content)


def _with_named_defaults(tree: Entry) -> Entry:
    """Set the keys that no layer sets to the defaults of the optimizer and of the schedule."""
    for section in NAMED:
        name = tree.find((section, "name"))
        for key, value in {} if name is None else named_defaults(section, str(name.value)).items():
            if tree.find((section, key)) is None:
                tree = merge(tree, entry_at((section, key), value, DEFAULT))
    return tree


def _length_note(tree: Entry) -> str:
    for (section, key), other in (LENGTHS, LENGTHS[::-1]):
        found, null = tree.find((section, key)), tree.find(other)
        if found is not None and null is not None and null.is_replaced:
            return f"{_shown(found.value)} {key}: {null.origin} replaces {'.'.join(other)}"
    return ""


def _with_hf_model(tree: Entry, config: RunConfig, cwd: Path, shipped: str) -> tuple[Entry, list[Problem]]:
    """Merge the values from the config.json of `model.hf` into the tree; return the tree and any problems.

    Values from config.json replace values from shipped configs, whose origins start with `shipped`.
    """
    name = config.model.hf
    assert name is not None
    origin = tree.find(("model", "hf"))
    assert origin is not None
    try:
        model = find_hf_model(name, cwd)
    except UsageError as error:
        return tree, [Problem("model.hf", error.message, origin.origin, error.hint)]
    tree = merge(tree, entry_at(("model", "hf"), str(model.folder), origin.origin))
    if config.has_user_task:
        return tree, []  # The task itself reads the values of the Hugging Face model.
    architecture, problems = tree.find(("model", "architecture")), []
    if architecture is not None and architecture.value == DECODER and model.reason:
        message = f"is llama, but trainkit's decoder cannot run {shown_path(model.folder)}: {model.reason}"
        hint = "remove model.architecture, or set model.architecture to transformers"
        problems.append(Problem("model.architecture", message, architecture.origin, hint))
    if architecture is not None and architecture.value not in (DECODER, TRANSFORMERS):
        message = f"is {architecture.value}, but model.hf is {name}"
        hint = (
            "remove model.architecture or model.hf: a custom architecture cannot load the weights of a "
            "Hugging Face model"
        )
        return tree, [Problem("model.architecture", message, architecture.origin, hint)]
    chosen = model.architecture if architecture is None else architecture.value
    if config.model.lora is not None and architecture is None:
        chosen = TRANSFORMERS
    values = model.values
    if chosen == TRANSFORMERS:
        problems += _sizes_of_transformers(tree, model, shipped)
        values = {key: value for key, value in values.items() if key == "vocab_size"}
    derived: dict[tuple[str, ...], Any] = {("model", key): value for key, value in values.items()}
    if experts := derived.get(("model", "moe")):
        del derived["model", "moe"]
        derived |= {("model", "moe", name): value for name, value in experts.items()}
    derived["model", "architecture"] = chosen
    derived["model", "preset"] = DEFAULT_PRESET
    tokenizer = tree.find(("data", "tokenizer"))
    if model.tokenizer is not None:
        derived["data", "tokenizer"] = str(model.tokenizer)
    elif (tokenizer is None or tokenizer.origin.startswith(shipped)) and not config.model.from_scratch:
        message = f"is not set, and {shown_path(model.folder)} has no tokenizer.json"
        hint = "save the tokenizer in this folder with `AutoTokenizer…save_pretrained`, or set data.tokenizer"
        problems.append(Problem("data.tokenizer", message, "", hint))
    for path, value in derived.items():
        found = tree.find(path)
        if found is None or found.value is None or found.origin.startswith(shipped):
            tree = merge(tree, entry_at(path, value, str(model.folder / CONFIG_NAME)))
        elif path[0] == "model" and found.plain() != value and path[-1] not in BALANCING:
            says = "sets the sizes" if path == ("model", "preset") else f"specifies {value}"
            message = f"is {found.plain()}, but {shown_path(model.folder / CONFIG_NAME)} {says}"
            problems.append(Problem(".".join(path), message, found.origin, "remove it"))
    return tree, problems


def _sizes_of_transformers(tree: Entry, model: HFModel, shipped: str) -> Iterator[Problem]:
    """Yield a problem for each model size in `tree` that differs from the size in the model's config.json."""
    for key in MODEL_KEYS:
        found = tree.find(("model", key))
        if found is None or found.origin.startswith(shipped):
            continue
        if found.value not in (None, False) and found.plain() != model.values.get(key):
            file = shown_path(model.folder / CONFIG_NAME)
            message = f"is {found.plain()}, but {file} sets the sizes of the model"
            yield Problem(f"model.{key}", message, found.origin, "remove it")


def _absolute_paths(tree: Entry, cwd: Path) -> Entry:
    """Make data and weights paths absolute; raise ConfigError if two mapping keys become the same path."""
    task = tree.find(("task",))
    own = TASKS.get(str(task.value)) if task is not None else None
    of_task = {} if own is None else {("task_args", key): name for key, name in own.paths.items()}
    for path, name in (PATHS | of_task).items():
        found = tree.find(path)
        if found is None:
            continue
        if isinstance(found.value, list):
            value: object = [_absolute(item, name, cwd, ".".join(path), found.origin) for item in found.value]
        elif found.is_mapping:
            names = [_absolute(item, name, cwd, ".".join(path), found.origin) for item in found.value]
            twice = next((item for item in names if names.count(item) > 1), None)
            if twice is not None:
                raise ConfigError(
                    [Problem(".".join(path), f"names {twice} twice", found.origin, "add its weights")]
                )
            value = dict(zip(names, found.plain().values(), strict=True))
        else:
            value = _absolute(found.value, name, cwd, ".".join(path), found.origin)
        tree = merge(tree, entry_at(path, value, found.origin))
    return tree


def _absolute(value: object, name: str | None, cwd: Path, key: str, origin: str) -> object:
    if not isinstance(value, str) or not value or value == name:
        return value
    try:
        return str(typed_path(value, cwd))
    except UsageError as error:
        raise ConfigError([Problem(key, error.message, origin, error.hint)]) from None


def _origins(config: RunConfig, tree: Entry) -> dict[str, str]:
    origins = {}
    for key, _ in flatten(config.model_dump(mode="json", by_alias=True)):
        found = tree.find(tuple(key.split(".")))
        origins[key] = found.origin if found else DEFAULT
        if found and found.is_mapping:
            origins |= {".".join((key, *path)): entry.origin for path, entry in found.leaves()}
    return origins


def dump_effective(config: RunConfig) -> str:
    """Return the complete config as YAML, in schema order, for `read_effective`."""
    return yamlfile.dump(config.model_dump(mode="json", by_alias=True))


def read_effective(path: str | Path, *, executes: bool = True) -> RunConfig:
    """Read a config that `dump_effective` wrote, without any other layers.

    Raises ConfigError if the file cannot be read or is not a valid config. Raises UsageError if other users
    have permission to write the file, unless `executes` is False because the config is only shown.
    """
    entry = as_this_version(read_yaml_file(Path(path), str(path), executes=executes))
    try:
        content = entry.plain()
        return config_class(content if isinstance(content, dict) else ()).model_validate(content)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, entry)) from None


@dataclass(frozen=True)
class Change:
    """A config value that a command changed, with the reason for the change."""

    key: str
    value: Any
    before: Any
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.key}: {_shown(self.value)} instead of {_shown(self.before)}: {self.why}"


def _shown(value: Any) -> str:
    """Return a value as YAML text."""
    return json.dumps(value, ensure_ascii=False)


Values = dict[str, tuple[Any, str]]
"""Maps a dotted key to the new value that a command sets, and to the reason."""


def quiet_keys(config: RunConfig) -> dict[str, str]:
    """Return the capability keys set to null in unattended runs, with reasons from `Capability.quiet`."""
    return {key: why for name in capabilities_of(config) for key, why in load(name).quiet.items()}


def short_training(config: RunConfig, num_steps: int, what: str) -> Values:
    """Return config values that make a training run stop after `num_steps` steps and log every step.

    `what` names the run in the reasons for the changes.
    """
    schedule, length = config.schedule, f"train.steps sets the length of the {what}"
    values: Values = {
        "train.steps": (num_steps, f"a {what} is short"),
        "train.epochs": (None, length),
        "train.stop_at_step": (None, length),
        "train.log_every": (1, f"the {what} needs the metrics of every step"),
        "train.eval_every": (None, f"the {what} needs no validation"),
    }
    values |= {key: (None, why.format(what=what)) for key, why in quiet_keys(config).items()}
    if schedule.decay_steps is not None and schedule.warmup_steps + schedule.decay_steps > num_steps:
        values["schedule.decay_steps"] = None, f"the schedule is longer than the {what}"
    return values


def with_changes(loaded: LoadedConfig, values: Values, origin: str) -> tuple[LoadedConfig, list[Change]]:
    """Return a copy of the config with `values` applied, and a list of the changes.

    Raises ConfigError under the same conditions as `with_values`.
    """
    content = loaded.config.model_dump(mode="json", by_alias=True)
    changes = []
    for key, (value, why) in values.items():
        before = content
        for name in key.split("."):
            before = before[name]
        if value != before:
            changes.append(Change(key, value, before, why))
    return with_values(loaded, {change.key: change.value for change in changes}, origin), changes


def with_values(loaded: LoadedConfig, values: Mapping[str, object], origin: str) -> LoadedConfig:
    """Return a copy of the config with `values` (a mapping of dotted keys to new values) applied.

    `origin` is recorded as the source of each new value. Raises ConfigError that lists every value that is
    invalid or contradicts another value.
    """
    # Dump and validate only the sections that change; all other sections stay the same objects.
    content: dict[str, object] = dict(loaded.config)
    changed = EMPTY
    for key, value in values.items():
        path = tuple(key.split("."))
        changed = merge(changed, entry_at(path, value, origin))
        if len(path) == 1:
            content[key] = value
            continue
        section: Any = content.setdefault(path[0], {})
        if isinstance(section, Section):  # not yet converted to a dictionary
            section = content[path[0]] = section.model_dump(mode="json", by_alias=True)
        elif section is loaded.config.task_args:
            section = content[path[0]] = dict(section)
        for name in path[1:-1]:
            section[name] = dict(section.get(name) or {})
            section = section[name]
        section[path[-1]] = value
    try:
        config = config_class(content).model_validate(content)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, changed)) from None
    origins = {**loaded.origins, **dict.fromkeys(values, origin)}
    result = LoadedConfig(config, origins, loaded.adjustable - values.keys(), typed=loaded.typed)
    problems = list(contradictions(result))
    if problems:
        raise ConfigError(problems)
    return result
