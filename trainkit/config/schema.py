"""Defines the run config, and the names and allowed values of its keys.

The keys of the sections are defined in `training.py` and `running.py`.
"""

import inspect
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, create_model

from trainkit.config import running, training
from trainkit.config.section import NotNegative, Section, key, section
from trainkit.formats import JsonObject, near
from trainkit.shipped import TASKS, installed_section, shipped_classes

CONFIG_VERSION: Literal[2] = 2
TASK_NAMES = ", ".join(TASKS)
EXTENDS_SCHEMA = {
    "description": (
        "Config files to merge in this order before this file, which overrides their values. Each entry is "
        "a path relative to this file or the name of a shipped config."
    ),
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def _allow_extends(schema: JsonObject) -> None:
    schema["properties"] = {"extends": EXTENDS_SCHEMA, **schema["properties"]}


class RunConfig(Section):
    """The config of a run; every key has a default."""

    model_config = ConfigDict(title="trainkit run config", json_schema_extra=_allow_extends)

    config_version: Annotated[Literal[1, 2], AfterValidator(lambda _: CONFIG_VERSION)] = key(
        CONFIG_VERSION,
        "Version of the config format. In files of version 1, `logging.tensorboard: true` means auto.",
    )
    name: str = key(
        "run",
        "Name of the run and of its folder.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        allowed="a name of at most 100 letters, digits, dots, dashes and underscores",
    )
    note: str | None = key(None, "Note about the run.")
    tags: tuple[str, ...] = key((), "Tags for filtering runs with `status --tag`.")
    seed: NotNegative = key(0, "Random seed for weights, data order and dropout.", lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "Device for training; auto uses CUDA if a GPU is available, and the CPU otherwise."
    )
    task: str = key(
        "causal_lm",
        f"causal_lm, {TASK_NAMES}, or FILE.py:CLASS or MODULE:CLASS for your subclass of trainkit.task.Task.",
        pattern=rf"^(causal_lm|{'|'.join(TASKS)}|[^:]+\.py:[A-Za-z_]\w*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        allowed=f"causal_lm, {TASK_NAMES}, FILE.py:CLASS or MODULE:CLASS",
    )
    task_args: JsonObject = key({}, f"Keyword arguments for {TASK_NAMES} or your own task.")
    model: training.ModelConfig = section("The model.")
    data: training.DataConfig = section("Training and validation data.")
    train: training.TrainConfig = section("Run length and batch sizes.")
    optimizer: training.OptimizerConfig = section("Optimizer and learning rate.")
    schedule: training.ScheduleConfig = section("Learning rate schedule.")
    precision: training.PrecisionConfig = section("Numeric precision.")
    parallel: running.ParallelConfig = section("Parallel layout.")
    checkpoint: running.CheckpointConfig = section("When checkpoints are saved.")
    resources: running.ResourcesConfig = section("Resources that the run requests.")
    launch: running.LaunchConfig = section("How processes are started.")
    requeue: running.RequeueConfig = section("When an interrupted run restarts automatically.")
    logging: running.LoggingConfig = section("Where metrics are logged.")
    notify: running.NotifyConfig = section("Events that are reported to a webhook and by email.")
    on_checkpoint: running.OnCheckpointConfig = section("The evaluation of each checkpoint.")
    profiler: running.ProfilerConfig = section("Steps to profile.")
    ema: running.EmaConfig = section("Exponential moving average of the weights.")
    replicas: running.ReplicasConfig = section("Comparison of the replicas of the model.")

    @property
    def has_user_task(self) -> bool:
        """Return whether a built-in or user-defined `trainkit.task.Task` provides the model and the data."""
        return self.task != "causal_lm"

    @property
    def model_source(self) -> tuple[str, str]:
        """Return the key that selects the model's code, and the value of that key."""
        return ("task", self.task) if self.has_user_task else ("model.architecture", self.model.architecture)

    @property
    def has_decoder(self) -> bool:
        """Return whether the model is trainkit's decoder or a user's subclass of `Model`."""
        return self.model_source[0] == "model.architecture" and not self.uses_transformers

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return the names of environment variables whose values must never be written to files or output."""
        webhook = self.notify.webhook
        return self.launch.secrets if webhook is None else (*self.launch.secrets, webhook)

    @property
    def uses_transformers(self) -> bool:
        """Return whether the transformers library provides the model's code."""
        return self.model_source == ("model.architecture", training.TRANSFORMERS)


FREE_MAPPING = "task_args"
"""The one top-level mapping that is not a section and may contain any keys."""


_named: dict[str, type[Section]] = {}
"""Maps a section's name to its class, for sections of external capabilities that a config or command line has
used."""


def is_installed_section(name: str) -> bool:
    """Return whether a capability in an installed package has a section called `name`.

    The first call for a section also registers its keys in this module.
    """
    if name in RunConfig.model_fields:
        return False
    if name not in _named and (found := installed_section(name)) is not None:
        _named[name] = found
        for function in (sections, default_values, _schema):
            function.cache_clear()
    return name in _named


def config_class(names: Iterable[str]) -> type[RunConfig]:
    """Return the config class with the sections in `names`; names that are not sections are ignored."""
    return _with_sections(tuple(sorted(name for name in names if is_installed_section(name))))


@cache
def _with_sections(names: tuple[str, ...]) -> type[RunConfig]:
    fields: dict[str, Any] = {
        name: (_named[name], section(inspect.getdoc(_named[name]) or name)) for name in names
    }
    return create_model("RunConfig", __base__=RunConfig, **fields) if names else RunConfig


def capabilities_of(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the capabilities that a config can use.

    The names include all built-in capabilities, and the external capabilities that appear in the config.
    """
    own = (name for name in type(config).model_fields if name not in RunConfig.model_fields)
    return (*shipped_classes(), *own)


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """Map each section name to the names of its keys."""
    found: dict[str, tuple[str, ...]] = {}
    for name, field in _with_sections(tuple(sorted(_named))).model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found[name] = tuple(inner.alias or key for key, inner in kind.model_fields.items())
    return found


@cache
def default_values() -> JsonObject:
    """Map every dotted key to its default value, in schema order."""
    return dict(flatten(_with_sections(tuple(sorted(_named)))().model_dump(mode="json", by_alias=True)))


def all_keys() -> tuple[str, ...]:
    """Return every dotted key that has a value, in schema order."""
    return tuple(default_values())


def flatten(dumped: JsonObject) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a dumped config; a mapping within a section is a single value."""
    for name, value in dumped.items():
        # In a damaged file, a section may not be a mapping.
        if name in sections() and isinstance(value, dict):
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def is_known(path: tuple[str, ...]) -> bool:
    """Return whether a path names a section, a key, or an entry of a mapping with arbitrary keys."""
    if path[0] == FREE_MAPPING:
        return True
    if path[0] not in sections() and not is_installed_section(path[0]):
        return path[0] in RunConfig.model_fields and len(path) == 1
    return len(path) == 1 or path[1] in sections()[path[0]]


OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
SIMILAR = 0.75
"""Minimum similarity for suggesting a key, chosen because unrelated keys such as `model_name` and
`model.norm_eps` reach 0.67."""


@cache
def other_names() -> dict[str, str]:
    """Map names used by other trainers and by Slurm to trainkit's config keys."""
    from trainkit.config.yamlfile import read_yaml_file  # needed only for error messages

    named = read_yaml_file(OTHER_NAMES, OTHER_NAMES.name).plain()
    return {name: key for key, names in named.items() for name in names}


def meant(path: tuple[str, ...]) -> str | None:
    """Return the known key or section closest to an unknown path, or None if none is close."""
    leaf = path[-1]
    dotted = re.sub("[/:]|__", ".", ".".join(path))
    if dotted in all_keys():
        return dotted
    if known := other_names().get(leaf):
        return known
    if leaf in ("type", "class", "kind") and (named := f"{path[0]}.name") in all_keys():
        return named
    same = [key for key in all_keys() if key.endswith(f".{leaf}")]
    if len(same) == 1:
        return same[0]
    if len(path) > 1:
        own = sections().get(path[0], ())
        longer = [key for key in own if leaf in key.split("_")]
        if match := near(leaf, own) or (longer[0] if len(longer) == 1 else None):
            return f"{path[0]}.{match}"
    words = {key.rpartition(".")[2]: key for key in reversed(all_keys())}
    words |= {key.replace(".", "_"): key for key in all_keys()} | {key: key for key in all_keys()}
    words |= {name: name for name in RunConfig.model_fields}
    if len(path) > 1:
        del words["name"]  # Only the top-level key `name` is the name of the run.
    found = near(leaf, RunConfig.model_fields, SIMILAR) if len(path) == 1 and leaf not in words else None
    found = found or near(leaf, words, SIMILAR)
    # Do not suggest a whole section, such as `checkpoint` for `checkpoint.dir`.
    return words[found] if found and words[found] != path[0] else None


MAX_SHOWN = 80


def allowed_values(path: tuple[str, ...]) -> str:
    """Describe the values allowed for the key at a path, such as ``a whole number of at least 1 or null``."""
    if path[0] in sections() and len(path) == 1:
        return f"a section with keys such as {', '.join(sections()[path[0]][:3])}"
    return schema_words(field_schema(path))


def field_schema(path: tuple[str, ...]) -> JsonObject:
    """Return the JSON schema of a key or section."""
    schema = _schema()
    field: JsonObject = schema["properties"][path[0]]
    if path[0] not in sections() or len(path) == 1:
        return field
    found: JsonObject = schema["$defs"][field["$ref"].rpartition("/")[2]]["properties"][path[1]]
    return found


def entry_schemas(path: tuple[str, ...]) -> JsonObject:
    """Return the JSON schemas of the entries of a key whose value is a mapping with fixed entries, or {}."""
    for option in field_schema(path).get("anyOf", ()):
        if "$ref" in option:
            found: JsonObject = _schema()["$defs"][option["$ref"].rpartition("/")[2]]["properties"]
            return found
    return {}


@cache
def _schema() -> JsonObject:
    return _with_sections(tuple(sorted(_named))).model_json_schema()


def show_value(value: Any) -> str:
    """Return a value as text for messages, truncated to `MAX_SHOWN` characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


def schema_words(schema: JsonObject) -> str:
    """Describe the values that a JSON schema allows, in words."""
    if "$ref" in schema:
        return "a section"
    if "anyOf" in schema:
        options = [schema_words(option) for option in schema["anyOf"]]
        if "allowed" in schema:
            options = [schema["allowed"], *(word for word in options if word == "null")]
        return " or ".join(options)
    if "allowed" in schema:
        return str(schema["allowed"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kind = schema.get("type")
    if kind == "integer":
        return "a whole number" + _bounds(schema)
    if kind == "number":
        return "a number" + _bounds(schema)
    if kind == "array":
        if "prefixItems" in schema:
            return f"a list of {schema['minItems']}, each {schema_words(schema['prefixItems'][0])}"
        return f"a list, each {schema_words(schema['items'])}"
    if kind == "object":
        if schema.get("additionalProperties") is True:
            return "a mapping"
        values = schema.get("additionalProperties") or next(iter(schema["patternProperties"].values()))
        return f"a mapping, each value {schema_words(values)}"
    return {"boolean": "true or false", "string": "text", "null": "null"}[str(kind)]


def _bounds(schema: JsonObject) -> str:
    bounds = []
    if "minimum" in schema:
        bounds.append(f"of at least {schema['minimum']:g}")
    if "exclusiveMinimum" in schema:
        bounds.append(f"above {schema['exclusiveMinimum']:g}")
    if "maximum" in schema:
        bounds.append(f"of at most {schema['maximum']:g}")
    if "exclusiveMaximum" in schema:
        bounds.append(f"below {schema['exclusiveMaximum']:g}")
    return f" {' and '.join(bounds)}" if bounds else ""
