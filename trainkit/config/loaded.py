"""Defines a loaded config, which records the origin of every value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from trainkit.config.schema import RunConfig
from trainkit.config.training import DECODER, TRANSFORMERS
from trainkit.errors import ConfigError, Problem

DEFAULT = "default"


@dataclass(frozen=True)
class LoadedConfig:
    """A config, and the origin of each config value."""

    config: RunConfig
    origins: dict[str, str]
    """Maps each dotted key to the origin of its value: ``file:line``, a flag, a variable's name or
    ``default``."""
    adjustable: frozenset[str] = frozenset()
    """Keys that a plan may still change although a file sets them, because the file was not written for this
    run."""
    length_note: str = ""
    """States whether train.steps replaced train.epochs as the length of the run, or vice versa; empty if
    neither replaced the other.
    """
    typed: frozenset[str] = frozenset()
    """Keys that the user set with a trainkit option, such as ``--set``, or with a Python argument."""

    def set_by_user(self, key: str) -> bool:
        """Return whether the user set the key; a plan may change the value only if the user did not."""
        return key not in self.adjustable and self.origins.get(key, DEFAULT) != DEFAULT

    def adjusting(self, *keys: str, origin: str) -> LoadedConfig:
        """Return a copy that lets a plan change each of `keys` whose value comes from the file `origin`."""
        found = {key for key in keys if self.origins.get(key, "").startswith(f"{origin}:")}
        return replace(self, adjustable=self.adjustable | found)

    def problem(self, key: str, message: str, hint: str) -> Problem:
        """Return a problem with a key, including the value's origin unless the value is the default."""
        origin = self.origins.get(key, DEFAULT)
        return Problem(key, message, "" if origin == DEFAULT else origin, hint)

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems, each with the origin of its key's value added."""
        return [self.problem(item.key, item.message, item.hint) for item in problems]

    def require_decoder(
        self, task: tuple[str, str], architecture: tuple[str, str], *, or_own: bool = False
    ) -> None:
        """Raise ConfigError unless the model is trainkit's decoder or, with `or_own`, a user-defined class.

        `task` is the error's message and hint if a task provides its own model. `architecture` is the error's
        message and hint for any other architecture.
        """
        key, name = self.config.model_source
        if name != DECODER and (key == "task" or name == TRANSFORMERS or not or_own):
            message, hint = task if key == "task" else architecture
            raise ConfigError([self.problem(key, f"is {name}, {message}", hint)])


_LAYOUT = (
    "model",
    "parallel",
    "precision",
    "device",
    "checkpoint.async",
    "train.device_batch_size",
    "train.global_batch_size",
    "data.seq_len",
)
_NODES = (
    "resources.nodes",
    "resources.spare_nodes",
    "resources.gpus_per_node",
    "resources.cpus_per_gpu",
    "resources.mem",
    "resources.constraint",
    "resources.gpu_type",
    "device",
)
_DATA = tuple(f"data.{key}" for key in ("source", "val_source", "tokenizer", "text_key", "val_fraction"))
_DEPENDENTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("launch.backend", "launch.cluster"), ("resources", "launch", *_LAYOUT)),
    (
        ("resources.partition", "resources.clusters", "resources.account", "resources.qos"),
        ("resources", *_LAYOUT),
    ),
    (_NODES, (*_NODES, *_LAYOUT)),
    ((*_LAYOUT, "optimizer.name", "optimizer.state_dtype"), (*_LAYOUT, "resources.mem")),
    (_DATA, (*_DATA, "model.vocab_size")),
    (("train.steps", "train.epochs", "schedule"), ("train.steps", "train.epochs", "schedule.decay_steps")),
    (("launch",), ("launch",)),
)
"""Pairs (causes, dependents) of keys and sections.

A wrong value for a key in `causes` can make the check of its `dependents` report a false problem.
"""


def _contains(prefix: str, key: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _depends(key: str, cause: str) -> bool:
    """Return whether a wrong value for the key or section `cause` may have caused a problem with `key`."""
    return _contains(cause, key) or any(
        any(_contains(cause, item) or _contains(item, cause) for item in causes)
        and any(_contains(item, key) for item in dependents)
        for causes, dependents in _DEPENDENTS
    )


class InvalidConfig(ConfigError):
    """An error that contains a config's problems, and the config's valid part, which can still be checked."""

    def __init__(self, problems: Iterable[Problem], rest: LoadedConfig, causes: frozenset[str]) -> None:
        super().__init__(list(problems))
        self.rest = rest
        """The config, with the default value for every key that is misspelt or has an invalid value."""
        self.causes = causes
        """Keys and sections whose values in `rest` may differ from what the user intended."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.rest, self.causes)

    def with_problems_of_rest(self, problems: Iterable[Problem]) -> ConfigError:
        """Return an error with `problems` added, except for any that wrong values in `causes` may cause."""
        return ConfigError([*self.problems, *independent_problems(problems, self.causes)])


def independent_problems(problems: Iterable[Problem], causes: Iterable[str]) -> list[Problem]:
    """Return the problems that do not depend on the keys and sections in `causes`."""
    return [item for item in problems if not any(_depends(item.key, cause) for cause in causes)]
