"""Which runs are compared, under which names, and in which keys they differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainkit.cli.choose_runs import command_values
from trainkit.formats import shown_value
from trainkit.observe.status import flat_config
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir


@dataclass(frozen=True)
class ComparedRun:
    """A run that is compared, under the name that tells it apart."""

    name: str
    run: RunDir
    values: Mapping[str, object]
    """What it was asked for by key; empty if its config cannot be read."""


def runs_named(names: Iterable[str]) -> list[RunDir]:
    """The runs of these names, each once; a group stands for all of its runs that have started."""
    return list({run.path.resolve(): run for name in names for run in _runs_of(name)}.values())


def _runs_of(name: str) -> list[RunDir]:
    found = find_run_or_group(name)
    if isinstance(found, RunDir):
        return [found]
    return [run for index in sorted(found.points) if (run := found.run(index)).exists()]


def short_names(runs: Sequence[RunDir]) -> list[str]:
    """The names of the folders, with their parents where two folders share a name."""
    names = [run.path.name for run in runs]
    for depth in range(2, max((len(run.path.parts) for run in runs), default=0) + 1):
        if len(set(names)) == len(names):
            break
        names = ["/".join(run.path.parts[-depth:]) for run in runs]
    return names


def differing_keys(values: Iterable[Mapping[str, object]]) -> list[str]:
    """The keys that do not have the same value in all runs, in alphabetical order."""
    texts = [{key: shown_value(value) for key, value in own.items()} for own in values if own]
    return [key for key in sorted(set().union(*texts)) if len({own.get(key) for own in texts}) > 1]


def asked_values(run: RunDir) -> dict[str, object]:
    """What a run was asked for by key: its config without the name, and what was swept in its COMMAND."""
    config = {key: value for key, value in flat_config(run).items() if key != "name"}
    return config and config | command_values(run)


def compared_runs(names: Iterable[str]) -> list[ComparedRun]:
    """The runs of these names. Raises UsageError for one that does not exist."""
    runs = runs_named(names)
    found = zip(short_names(runs), runs, map(asked_values, runs), strict=True)
    return [ComparedRun(*one) for one in found]
