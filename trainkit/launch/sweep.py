"""Load the configs for the runs that a command requests: a single run, or the trials of a sweep or array."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainkit.config import LoadedConfig
from trainkit.config.load import with_values
from trainkit.config.schema import is_known
from trainkit.errors import ConfigError, UsageError
from trainkit.formats import shown_value
from trainkit.launch.config_request import ConfigRequest
from trainkit.plan.sweep import MAX_TRIALS, key_without_seed, sweep_trials
from trainkit.plan.workload import Workload
from trainkit.scheduler import array_indices, array_spec

_LIMIT = re.compile(r"[1-9][0-9]*", re.ASCII)


class ArraySpec(NamedTuple):
    """A parsed array specification such as ``0-9,20%4``."""

    indices: tuple[int, ...]
    """The indices of the array tasks; empty if only a limit was specified."""
    limit: int | None
    """The maximum number of array tasks that run simultaneously; None for no limit."""

    @property
    def directive(self) -> str:
        """Return the value for ``#SBATCH --array``."""
        return array_spec(self.indices, self.limit)


def parse_array(text: str) -> ArraySpec:
    """Parse ``0-9``, ``1,3,5`` or ``0-99:10``, each with an optional limit such as ``%4``, or only a limit.

    Raises UsageError for any other text.
    """
    spec, percent, limit = text.strip().partition("%")
    if percent and not _LIMIT.fullmatch(limit):
        raise UsageError(
            f"--array {text}: {limit!r} is not a valid limit on concurrent tasks",
            hint="for example --array 0-9%4",
        )
    indices = array_indices(spec) if spec or not percent else []
    if len(indices) > MAX_TRIALS:
        raise UsageError(
            f"--array {text}: {len(indices):,} tasks; the maximum is {MAX_TRIALS:,}",
            hint="for example --array 0-9",
        )
    if len(set(indices)) < len(indices):
        raise UsageError(
            f"--array {text}: an index occurs more than once",
            hint="each index must be unique, because it identifies one run",
        )
    if spec and not indices:
        raise UsageError(f"--array {text}: it contains no indices", hint="for example --array 0-9")
    return ArraySpec(tuple(sorted(indices)), int(limit) if percent else None)


@dataclass(frozen=True)
class LoadedTrial:
    """A run to plan, with its config or with the problems found in the config."""

    index: int
    """The index of the trial in the array."""
    values: dict[str, object]
    """The values of the swept keys, by dotted key."""
    loaded: LoadedConfig | ConfigError


def group_trials(
    request: ConfigRequest, workload: Workload, sweeps: Sequence[str], array: str | None
) -> tuple[ArraySpec | None, Iterator[LoadedTrial]]:
    """Return the array (None for a single run), and the config for each trial.

    The configs are loaded lazily, because a group may have 100,000 trials. A COMMAND may contain placeholders
    ``{KEY}`` for swept keys. Without --sweep, the trials of an array get consecutive seeds, unless they run a
    COMMAND. Raises UsageError for invalid options, and ConfigError for an invalid config.
    """
    spec = None if array is None else parse_array(array)
    if sweeps:
        if spec is not None and spec.indices:
            raise UsageError(
                f"--array {array}: indices cannot be combined with --sweep, which numbers its own trials",
                hint="with --sweep, use --array only for a limit, for example --array %4",
            )
        found = sweep_trials(sweeps, workload.argv)
        limit = None if spec is None else spec.limit
        return ArraySpec(tuple(range(len(found))), limit), swept(request, found)
    loaded = request.load_to_plan(workload)
    if spec is None:
        return None, iter([LoadedTrial(0, {}, loaded)])
    if not spec.indices:
        raise UsageError(
            f"--array {array} limits how many tasks run at once, but specifies no indices",
            hint="for example --array 0-9%4",
        )
    if workload.is_command:
        return spec, (LoadedTrial(index, {}, loaded) for index in spec.indices)
    seeds = ((index, loaded.config.seed + index) for index in spec.indices)
    return spec, (
        LoadedTrial(index, {"seed": seed}, _with_seed(loaded, seed, "--array")) for index, seed in seeds
    )


def swept(request: ConfigRequest, found: Sequence[dict[str, object]]) -> Iterator[LoadedTrial]:
    """Yield the config for each trial of a sweep.

    Trials that differ only in the seed are loaded only once.
    """
    loaded: dict[str, LoadedConfig] = {}
    for index, values in enumerate(found):
        key = key_without_seed(values)
        try:
            if key in loaded:
                seed = values["seed"]
                own = _with_seed(loaded[key], seed, f"--sweep seed={shown_value(seed)}")
                yield LoadedTrial(index, values, own)
                continue
            flags = {
                key: (f"--sweep {key}={shown_value(value)}", value)
                for key, value in values.items()
                if is_known(tuple(key.split(".")))  # A key outside the config occurs only in the COMMAND.
            }
            loaded[key] = replace(request, flags={**request.flags, **flags}).load()
            yield LoadedTrial(index, values, loaded[key])
        except ConfigError as error:
            yield LoadedTrial(index, values, error)


def _with_seed(loaded: LoadedConfig, seed: object, origin: str) -> LoadedConfig | ConfigError:
    try:
        return with_values(loaded, {"seed": seed}, origin)
    except ConfigError as error:
        return error
