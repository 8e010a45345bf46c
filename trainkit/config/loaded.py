"""A config with the origin of every value."""

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
    """A config with the origin of each value."""

    config: RunConfig
    origins: dict[str, str]
    """Dotted key to ``file:line``, the flag, the variable's name, or ``default``."""
    adjustable: frozenset[str] = frozenset()
    """Keys whose values were not chosen for this run, such as those of shipped configs."""
    length_note: str = ""
    """Which value sets the length of the run, if it replaces one of another key."""
    typed: frozenset[str] = frozenset()
    """Keys that the command itself sets: with ``--set`` or another option, or as an argument of a call."""

    def set_by_user(self, key: str) -> bool:
        """Whether the user set the key; otherwise a plan may adapt its value."""
        return key not in self.adjustable and self.origins.get(key, DEFAULT) != DEFAULT

    def adjusting(self, *keys: str, origin: str) -> LoadedConfig:
        """The config with those of `keys` adjustable whose values come from the file `origin`."""
        found = {key for key in keys if self.origins.get(key, "").startswith(f"{origin}:")}
        return replace(self, adjustable=self.adjustable | found)

    def problem(self, key: str, message: str, hint: str) -> Problem:
        """A problem of a key, with the origin of its value unless that is the default."""
        origin = self.origins.get(key, DEFAULT)
        return Problem(key, message, "" if origin == DEFAULT else origin, hint)

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """Problems of keys with the origins of their values."""
        return [self.problem(item.key, item.message, item.hint) for item in problems]

    def require_decoder(
        self, task: tuple[str, str], architecture: tuple[str, str], *, or_own: bool = False
    ) -> None:
        """Raise ConfigError unless the model is trainkit's decoder, or `or_own` a class of the user's.

        `task` and `architecture` are (what is wrong, hint) where one of these has the model.
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
"""Pairs (causes, dependents): keys and sections, and those whose checks depend on their values."""


def _contains(prefix: str, key: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _depends(key: str, cause: str) -> bool:
    """Whether a problem of `key` may be caused by the value of the key or section `cause`."""
    return _contains(cause, key) or any(
        any(_contains(cause, item) or _contains(item, cause) for item in causes)
        and any(_contains(item, key) for item in dependents)
        for causes, dependents in _DEPENDENTS
    )


class InvalidConfig(ConfigError):
    """The problems of a config, and its valid part, which can still be checked."""

    def __init__(self, problems: Iterable[Problem], rest: LoadedConfig, causes: frozenset[str]) -> None:
        super().__init__(list(problems))
        self.rest = rest
        """The config with the default for every key that is misspelt or has an invalid value."""
        self.causes = causes
        """The keys and sections whose values in `rest` may differ from what the user meant."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.rest, self.causes)

    def with_problems_of_rest(self, problems: Iterable[Problem]) -> ConfigError:
        """An error that adds problems found in `rest`, except those that `causes` may explain."""
        return ConfigError([*self.problems, *independent_problems(problems, self.causes)])


def independent_problems(problems: Iterable[Problem], causes: Iterable[str]) -> list[Problem]:
    """The problems that do not depend on the values of the keys and sections in `causes`."""
    return [item for item in problems if not any(_depends(item.key, cause) for cause in causes)]
