"""Turns what pydantic found into problems with the value, what is allowed and where it stands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from trainkit.config.loaded import LoadedConfig
from trainkit.config.names import all_keys, allowed_values, is_known, meant, sections, show_value
from trainkit.config.schema import RunConfig
from trainkit.config.yamlfile import Entry
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


FUTURE = ("lora",)
"""Keys and sections that people look for and that this release does not have."""


def unknown_problem(path: tuple[str, ...], entry: Entry) -> Problem:
    """The problem of a key that does not exist, with the one that was probably meant."""
    if any(part in FUTURE for part in path):
        return Problem(
            ".".join(path), "is not in this release", entry.origin, "`trainkit schema` prints every key"
        )
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


LOOKS_SECRET = re.compile(r"(key|token|secret|password|passwd|credential)s?$", re.IGNORECASE)


_ASSIGNMENT = re.compile(r"""(?<![\w.-])(?P<name>[A-Z][A-Z0-9_]*)=(?P<value>"[^"]*"|'[^']*'|\S+)""")
MIN_SECRET_CHARS = 8
"""Shorter values are no secrets and occur anywhere: ``1``, ``yes``, ``offline``."""


def written_secrets(text: str, names: Collection[str]) -> list[str]:
    """Variables that a text sets to a value of its own and that are secrets, by their names or as they look.

    References such as ``$NAME`` are no values; of what is too short to be a secret nothing is said.
    """
    return [
        found["name"]
        for found in _ASSIGNMENT.finditer(text)
        if (found["name"] in names or LOOKS_SECRET.search(found["name"]))
        and len(value := found["value"].strip("\"'")) >= MIN_SECRET_CHARS
        and not value.startswith(("$", "`"))
    ]


def contradictions(loaded: LoadedConfig) -> Iterator[Problem]:
    """Every contradiction between values of one config."""
    yield from _length(loaded)
    yield from _decay(loaded)
    yield from _secrets(loaded)
    yield from _float8(loaded)


def _float8(loaded: LoadedConfig) -> Iterator[Problem]:
    config = loaded.config
    if not config.precision.float8:
        return
    if config.device == "cpu":
        yield loaded.problem("precision.float8", "is true, and device is cpu", "only GPUs have float8")
    if config.precision.dtype != "bf16":
        message = f"is true, and precision.dtype is {config.precision.dtype}"
        yield loaded.problem("precision.float8", message, "what is not multiplied in float8 needs bf16")
    if config.parallel.tp > 1:
        message = f"is true, and parallel.tp is {config.parallel.tp}"
        yield loaded.problem("precision.float8", message, "one of the two; they do not go together yet")


def _secrets(loaded: LoadedConfig) -> Iterator[Problem]:
    launch = loaded.config.launch
    for name in launch.env:
        if name in launch.secrets or LOOKS_SECRET.search(name):
            message = "looks like a secret, and a config is written into the run folder"
            hint = f"export {name} in the shell instead: the job inherits it"
            problem = loaded.problem(f"launch.env.{name}", message, hint)
            # What was typed holds the secret itself, and errors end up in logs.
            shown = problem.origin.replace(launch.env[name], "***") if launch.env[name] else problem.origin
            yield replace(problem, origin=shown)
    for line in launch.setup:
        for name in written_secrets(line, launch.secrets):
            message = f"sets {name}, which looks like a secret, and a script is written into the run folder"
            hint = f"export {name} in the shell instead, or read it there: {name}=$(cat FILE)"
            problem = loaded.problem("launch.setup", message, hint)
            yield replace(problem, origin="--set launch.setup") if name in problem.origin else problem


def _length(loaded: LoadedConfig) -> Iterator[Problem]:
    train = loaded.config.train
    if train.steps is None and train.epochs is None:
        yield loaded.problem("train.steps", "is null and so is train.epochs", "give one of them")
    if train.steps is not None and train.epochs is not None:
        message = f"is {train.epochs:g} while train.steps is {train.steps}: only one can end the run"
        hint = f"train.steps was set by {loaded.origins['train.steps']}; set one of them to null"
        yield loaded.problem("train.epochs", message, hint)


def _decay(loaded: LoadedConfig) -> Iterator[Problem]:
    schedule, steps = loaded.config.schedule, loaded.config.train.steps
    if schedule.decay_steps is None:
        return
    if schedule.name != "wsd":
        message = f"is {schedule.decay_steps}, which the schedule {schedule.name} does not know"
        yield loaded.problem("schedule.decay_steps", message, "only schedule.name wsd has a decay of its own")
    elif steps is not None and schedule.warmup_steps + schedule.decay_steps > steps:
        message = (
            f"is {schedule.decay_steps}: with schedule.warmup_steps {schedule.warmup_steps} "
            f"that is more than train.steps {steps}"
        )
        yield loaded.problem("schedule.decay_steps", message, "null decays over a fifth of the run")


# key, the only value that is honoured, what it would be
_ROWS: tuple[tuple[str, object, str], ...] = (
    ("task", "causal_lm", "a task other than causal_lm"),
    ("model.hf", None, "training Hugging Face models"),
    ("model.init_from", None, "starting from the weights of another run"),
    ("optimizer.name", "adamw", "an optimizer other than adamw"),
    ("logging.mlflow", None, "logging to MLflow"),
    ("logging.wandb", None, "logging to Weights & Biases"),
)


def unsupported(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The keys that ask for more than this release can do, with a message each."""
    for key, only, feature in _ROWS:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        if value != only:
            yield key, f"{feature} is not in this release; {key} must be {_shown(only)}"


def _shown(value: object) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else "[]" if value == () else str(value)
