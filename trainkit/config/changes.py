"""Config values that a command replaces, each with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainkit.config.layers import EMPTY
from trainkit.config.loaded import LoadedConfig
from trainkit.config.names import FREE_MAPPING
from trainkit.config.schema import RunConfig
from trainkit.config.validation import contradictions, validation_problems
from trainkit.config.yamlfile import entry_at, merge
from trainkit.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """A config value that a command replaces, and why."""

    key: str
    value: Any
    before: Any
    why: str

    @property
    def sentence(self) -> str:
        return f"{self.key}: {_shown(self.value)} instead of {_shown(self.before)}: {self.why}"


def _shown(value: Any) -> str:
    """A value as it is written in YAML."""
    return json.dumps(value, ensure_ascii=False)


def short_training(config: RunConfig, num_steps: int, what: str) -> Iterator[Change]:
    """The changes for a run of `num_steps` steps that logs every step; `what` names it in reasons."""
    train, schedule = config.train, config.schedule
    yield Change("train.steps", num_steps, train.steps, f"a {what} is short")
    yield Change("train.epochs", None, train.epochs, f"train.steps sets the length of the {what}")
    yield Change("train.stop_at_step", None, train.stop_at_step, f"train.steps sets the length of the {what}")
    yield Change("train.log_every", 1, train.log_every, f"the {what} uses every step")
    yield Change("train.eval_every", None, train.eval_every, f"the {what} needs no validation")
    yield Change("notify.webhook", None, config.notify.webhook, f"the {what} reports nothing")
    yield Change("notify.mail", None, config.notify.mail, f"the {what} reports nothing")
    if schedule.decay_steps is not None and schedule.warmup_steps + schedule.decay_steps > num_steps:
        yield Change(
            "schedule.decay_steps", None, schedule.decay_steps, f"the schedule is longer than the {what}"
        )


def with_values(loaded: LoadedConfig, values: Mapping[str, object], origin: str) -> LoadedConfig:
    """A copy of the config with `values`, by keys such as ``train.steps``; `origin` is their origin.

    Raises ConfigError listing every value that is invalid or contradicts another.
    """
    # Only the sections that change are dumped and validated: the others stay the same objects.
    content: dict[str, Any] = dict(loaded.config)
    changed = EMPTY
    for key, value in values.items():
        path = tuple(key.split("."))
        changed = merge(changed, entry_at(path, value, origin))
        if len(path) == 1:
            content[key] = value
            continue
        section = content[path[0]]
        if section is getattr(loaded.config, path[0]):  # not copied yet
            is_section = path[0] != FREE_MAPPING
            section = section.model_dump(mode="json", by_alias=True) if is_section else dict(section)
            content[path[0]] = section
        for name in path[1:-1]:
            section[name] = dict(section.get(name) or {})
            section = section[name]
        section[path[-1]] = value
    try:
        config = RunConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(validation_problems(error, changed)) from None
    origins = {**loaded.origins, **dict.fromkeys(values, origin)}
    result = LoadedConfig(config, origins, loaded.adjustable - values.keys())
    problems = list(contradictions(result))
    if problems:
        raise ConfigError(problems)
    return result
