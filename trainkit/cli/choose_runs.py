"""Selects and sorts runs by their config, tags and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.config.schema import flatten, is_known, meant
from trainkit.config.yamlfile import parse_value
from trainkit.errors import UsageError
from trainkit.formats import cell, did_you_mean, short_keys, shown_value
from trainkit.observe.group import GroupStatus, value_order
from trainkit.observe.status import FlatConfig, RunStatus, flat_config
from trainkit.observe.values import asked_of, is_function, with_effect
from trainkit.run.group import RunGroup
from trainkit.run.history import PlanRecord
from trainkit.run.rundir import RunDir
from trainkit.run.trial import as_number

FIGURES = ("loss", "val_loss", "tokens_per_s", "step", "age_s")
TAGS = "tags"
OF_CONFIG = ("name", TAGS)
"""Keys that always refer to the config, even if a Python function has a parameter with the same name."""
EXAMPLE = "for example optimizer.lr=1e-3"


@dataclass(frozen=True)
class Choice:
    """The filter and the sort order that the user passed to `trainkit status`."""

    where: tuple[tuple[str, object], ...]
    """Pairs of a config key and its required value."""
    tags: tuple[str, ...]
    sort_key: str | None
    """The key by which runs are sorted in ascending order: one of `FIGURES` or a config key."""

    @property
    def columns(self) -> list[str]:
        """Return the keys shown in additional columns: those used by the filter and the sort order."""
        keys = [*(key for key, _ in self.where), *([TAGS] if self.tags else [])]
        if self.sort_key is not None and (self.sort_key == "val_loss" or self.sort_key not in FIGURES):
            keys.append(self.sort_key)
        return list(dict.fromkeys(keys))

    @property
    def headings(self) -> list[str]:
        """Return the headings of the additional columns."""
        return [key.upper().replace("_", " ") for key in short_keys(self.columns)]

    def apply(self, statuses: Sequence[RunStatus | GroupStatus]) -> list[ChosenRun]:
        """Return the matching runs and groups, sorted by `sort_key`; a group matches if any of its runs does.

        Raises UsageError for a key that is neither a config key nor a parameter swept in a group's COMMAND.
        """
        found = [ChosenRun(status, _configs(status)) for status in statuses]
        options = [(f"--where {key}={shown_value(value)}", key) for key, value in self.where]
        options += (
            [] if self.sort_key in (None, *FIGURES) else [(f"--sort {self.sort_key}", str(self.sort_key))]
        )
        for option, key in options:
            if not is_known(tuple(key.split("."))) and not any(
                key in own for run in found for own in run.configs
            ):
                raise _unknown(option, tuple(key.split(".")), FIGURES if option.startswith("--sort") else ())
        found = [run for run in found if any(map(self._matches, run.configs))]
        if self.sort_key is None:
            return found
        return sorted(found, key=lambda run: value_order(as_number(run.value(str(self.sort_key)))))

    def _matches(self, config: FlatConfig) -> bool:
        return set(self.tags) <= set(config.get(TAGS) or ()) and all(
            key in config and _is_same(config[key], value) for key, value in self.where
        )


@dataclass(frozen=True)
class ChosenRun:
    """A selected run or group, together with the configs of its runs."""

    status: RunStatus | GroupStatus
    configs: list[FlatConfig]

    def value(self, key: str) -> Any:
        """Return the value of a config key or of one of `FIGURES`; None if it differs in a group's runs."""
        if key not in FIGURES:
            values = [config.get(key) for config in self.configs]
            return values[0] if all(value == values[0] for value in values) else None
        if isinstance(self.status, GroupStatus) and key != "age_s":
            best = self.status.best and self.status.best.best
            return best.value if best and best.metric == key else None
        return self.status.age_s if isinstance(self.status, GroupStatus) else self.status.to_dict()[key]

    def texts(self, columns: Sequence[str]) -> list[str]:
        """Return the values of the additional columns as strings."""
        found = [self.value(key) for key in columns]
        return [
            cell(value, ".4f") if key in FIGURES else "-" if value is None else shown_value(value)
            for key, value in zip(columns, found, strict=True)
        ]


def parse_choice(where: Sequence[str], tags: Sequence[str], sort_key: str | None) -> Choice:
    """Parse ``--where KEY=VALUE``, ``--tag`` and ``--sort``; raise UsageError for an invalid value."""
    return Choice(tuple(map(_condition, where)), tuple(tags), sort_key)


def _condition(text: str) -> tuple[str, object]:
    key, equals, raw = text.partition("=")
    if not equals:
        raise UsageError(f"--where {text}: must have the form KEY=VALUE", hint=EXAMPLE)
    try:
        return key.strip(), parse_value(raw, tuple(key.strip().split(".")))
    except ValueError as error:
        raise UsageError(f"--where {text}: {error}", hint=EXAMPLE) from None


def _unknown(where: str, path: tuple[str, ...], figures: Sequence[str] = ()) -> UsageError:
    near, key = meant(path), ".".join(path)
    hint = did_you_mean(key, figures) or (f"did you mean {near}? " if near else "")
    return UsageError(f"{where}: unknown key {key}", hint=f"{hint}`trainkit schema` lists the keys")


def _is_same(value: object, wanted: object) -> bool:
    """Return whether a value equals the wanted value; a string is also compared after parsing it as YAML."""
    if as_number(value) == wanted or not isinstance(value, str):
        return as_number(value) == wanted
    try:
        return value == shown_value(wanted) or parse_value(value) == wanted
    except ValueError:  # Text that is not valid YAML cannot equal the wanted value.
        return False


def _configs(status: RunStatus | GroupStatus) -> list[FlatConfig]:
    if isinstance(status, RunStatus):
        run = RunDir(status.run_dir)
        config = flat_config(run)
        own = {key: config[key] for key in OF_CONFIG if key in config}
        return [_with_entries({**asked_of(run, config=config), **own})]
    record = RunGroup(status.run_dir).record
    plan = PlanRecord(record.plan)
    common = _with_entries(with_effect(dict(flatten(record.config)), plan))
    kept = OF_CONFIG if is_function(plan) else ()
    return [
        {**common, **_with_entries({key: value for key, value in trial.written.items() if key not in kept})}
        for trial in status.trials
    ]


def _with_entries(config: Mapping[str, object]) -> FlatConfig:
    """Return the config, with dotted keys such as launch.env.NAME added for items of mappings and lists."""
    found = dict(config)
    for key, value in config.items():
        if isinstance(value, dict | list):
            parts = value.items() if isinstance(value, dict) else enumerate(value)
            found |= _with_entries({f"{key}.{name}": inner for name, inner in parts})
    return found
