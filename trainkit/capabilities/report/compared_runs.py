"""Finds the runs to compare, the names shown for them in tables, and the config keys that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.config.schema import default_values, is_known
from trainkit.formats import shown_value
from trainkit.observe.values import asked_of
from trainkit.run.end import read_newest_end
from trainkit.run.group import RunGroup, group_of
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir
from trainkit.run.trial import as_number, values_of
from trainkit.shipped import measured_speeds

VARIABLES = "launch.env"
"""The config key whose value is a mapping of environment variables. Each environment variable is compared as
a key of its own."""
_VERSION = re.compile(r"\d+\.\d*0")
"""Matches a version number such as 3.10, which would lose its trailing zero when parsed as a float."""


@dataclass(frozen=True)
class ComparedRun:
    """A run to compare, with a name that is unique among the compared runs."""

    name: str
    run: RunDir
    values: Mapping[str, object]
    """Maps config keys to the run's values as the user wrote them; empty if the config cannot be read."""


def runs_named(names: Iterable[str]) -> list[RunDir]:
    """Return the runs with the given names, without duplicates.

    The name of a group stands for all of its runs that have started.
    """
    return list({run.path.resolve(): run for name in names for run in _runs_of(name)}.values())


def _runs_of(name: str) -> list[RunDir]:
    found = find_run_or_group(name)
    if isinstance(found, RunDir):
        return [found]
    return [run for index in sorted(found.trials) if (run := found.run(index)).exists()]


def are_trials(names: Sequence[str]) -> bool:
    """Return whether the names stand for the trials of one group, so that they can be ranked by results.

    The runs of a bench are not ranked by results, because a bench measures speeds.
    """
    found = find_run_or_group(names[0])
    return len(names) == 1 and isinstance(found, RunGroup) and measured_speeds(found.path) is None


def _named(name: str) -> list[RunDir]:
    """Return the run with the given name, or all runs of the group, including those that have not started."""
    found = find_run_or_group(name)
    return [found] if isinstance(found, RunDir) else [found.run(index) for index in sorted(found.trials)]


@dataclass(frozen=True)
class Progress:
    """Numbers of the runs to compare: in total, not started, and started but not ended."""

    noun: str
    """``trial`` if all of the runs are trials of groups, otherwise ``run``."""
    num_runs: int
    num_not_started: int
    num_not_ended: int
    """Number of runs that have started but not ended."""


def progress_of(names: Iterable[str]) -> Progress:
    """Count the runs with the given names: in total, not started, and started but not ended."""
    runs = list({run.path.resolve(): run for name in names for run in _named(name)}.values())
    started = [run for run in runs if run.exists()]
    ends = [read_newest_end(run.path) for run in started]
    return Progress(
        noun="trial" if all(group_of(run) is not None for run in runs) else "run",
        num_runs=len(runs),
        num_not_started=len(runs) - len(started),
        num_not_ended=sum(end is None or end.resumes for end in ends),
    )


def short_names(runs: Sequence[RunDir]) -> list[str]:
    """Return the names of the run folders, including their parent folders where two names are equal."""
    names = [run.path.name for run in runs]
    for depth in range(2, max((len(run.path.parts) for run in runs), default=0) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(run.path.parts[-depth:]) for run in runs]
    return names


def compared_value(key: str, value: object) -> object:
    """Convert a numeric string to a number; return other values unchanged.

    For a config key whose values are strings, such as an environment variable, 3.10 is a version number and
    differs from 3.1. In a sweep over numbers, 0.10 and 0.1 are considered the same value.
    """
    is_version = isinstance(value, str) and _VERSION.fullmatch(value) and is_known(tuple(key.split(".")))
    return value if is_version else as_number(value)


def differing_keys(values: Iterable[Mapping[str, object]]) -> list[str]:
    """Return, in alphabetical order, the keys whose values differ between the runs.

    Some runs may lack a key; for example, a run of a COMMAND has no trainer keys. A key missing from some
    runs is omitted if all runs that have the key use its default.
    """
    texts = [
        {key: shown_value(compared_value(key, one)) for key, one in own.items()} for own in values if own
    ]
    usual = {key: shown_value(value) for key, value in default_values().items()}

    def differs(key: str) -> bool:
        found = {own[key] for own in texts if key in own}
        return len(found) > 1 or (found != {usual.get(key)} and not all(key in own for own in texts))

    return [key for key in sorted(set().union(*texts)) if differs(key)]


def compared_values(run: RunDir, asked: Mapping[str, object]) -> dict[str, object]:
    """Return the config values of a run, with a separate key for each variable in `launch.env`.

    The config's `name` is omitted unless the user swept it. `asked` is the result of `asked_of`.
    """
    dropped = (VARIABLES,) if "name" in values_of(run) else ("name", VARIABLES)
    found = {key: value for key, value in asked.items() if key not in dropped}
    variables = asked.get(VARIABLES)
    if isinstance(variables, dict):
        found |= {f"{VARIABLES}.{name}": value for name, value in variables.items()}
    return found


def compared_runs(names: Iterable[str]) -> list[ComparedRun]:
    """Return the runs with the given names. Raises UsageError if a run does not exist."""
    runs = runs_named(names)
    found = zip(short_names(runs), runs, (compared_values(run, asked_of(run)) for run in runs), strict=True)
    return [ComparedRun(*one) for one in found]
