"""Reads the values requested for a run by key: its config, its COMMAND and its trial's swept values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import join

from trainkit.function import ARGV
from trainkit.observe.status import FlatConfig, flat_config
from trainkit.plan.workload import Workload
from trainkit.run.files import Record, read_object
from trainkit.run.history import PlanRecord, read_plan
from trainkit.run.rundir import RunDir
from trainkit.run.trial import values_of

COMMAND = "COMMAND"
"""The key under which the command line is returned."""


def asked_of(run: RunDir, plan: PlanRecord | None = None, config: FlatConfig | None = None) -> FlatConfig:
    """Return the values requested for a run by key, excluding keys that have no effect on the run.

    Returns an empty dictionary if the config cannot be read. `config` is the result of an earlier
    `flat_config` call, if any. Numbers in a COMMAND and from Hydra are kept as strings, as the user wrote
    them; `as_number` converts them.
    """
    from trainkit.config.schema import is_known

    config, plan = flat_config(run) if config is None else config, plan or read_plan(run)
    if not config:
        return {}
    own, config = values_of(run), with_effect(config, plan)
    command = plan.command
    if not command:
        return config | {key: value for key, value in own.items() if not is_known(tuple(key.split(".")))}
    if is_function(plan):  # A function's parameter may have the same name as a config key.
        return config | own
    # The plan's command already contains the trial's values, so read the command as the user typed it.
    typed = Record(read_object(run.provenance_file)).texts("argv") if own else []
    words = typed[typed.index("--") + 1 :] if "--" in typed else command
    return {**own, **config, COMMAND: join(words)}


def is_function(plan: PlanRecord) -> bool:
    """Return whether a run with the given plan calls a Python function."""
    return is_call(plan.command)


def is_call(command: Sequence[str] | None) -> bool:
    """Return whether a run's COMMAND calls a Python function."""
    return command is not None and [*command[1:]] == [*ARGV[1:]]


def with_effect(config: Mapping[str, object], plan: PlanRecord) -> FlatConfig:
    """Return the config keys that affect a run with this plan, with their values.

    Config keys for training do not affect a COMMAND.
    """
    workload = Workload(tuple(plan.command or ()))
    launched = [part for part in plan.parts.values() if part.record("files").values]
    passed = {key for part in launched for key in part.texts("keys")}
    return {key: value for key, value in config.items() if workload.uses(key) or key in passed}
