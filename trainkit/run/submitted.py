"""What a job was submitted with: its batch script names the hashes of config.yaml and plan.json.

The supervisor compares them before it believes anything else of the run folder. So nothing runs of a folder
that has taken the place of the submitted one while the job waited, or in which one of the two was changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from trainkit.errors import UsageError
from trainkit.run.files import changed, to_json
from trainkit.run.group import RunGroup, Trial, group_of, trial_texts
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import files_of, take_parts
from trainkit.trust import read_trusted

SUBMITTED_VARIABLE = "TRAINKIT_JOB_SUBMITTED"
"""What the batch script, or the command that starts a supervisor here, has found with `submitted_hash`."""
HASH_DIGITS = 32


class NotSubmitted(UsageError):
    """The run folder is not as it was when its job was submitted."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} is not what this job was submitted with, so it runs nothing: the file was changed, "
            "or another folder has taken the place of the run's",
            hint="look at the folder and whose it is; `trainkit resume` submits what is there now",
        )


def plans_by_size(plan: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """The content of a plan.json for each number of nodes that an attempt may have, its own one last.

    Raises LookupError and TypeError for what is no plan.
    """
    own, sizes = {**plan, "sizes": {}}, plan.get("sizes", {})
    if not isinstance(sizes, dict):
        raise TypeError(f"sizes is {str(sizes)[:100]!r}")
    return {**{size: changed(own, change) for size, change in sizes.items()}, str(plan["num_nodes"]): own}


def submitted_hash(config_text: str, plan: Mapping[str, object]) -> str:
    """The hashes of a config.yaml and of the plan in a plan.json, the same for any number of nodes.

    Raises LookupError, TypeError and AttributeError for what is no plan.
    """
    plans = plans_by_size(plan)
    if plan.get("fills_nodes"):  # then that is as many as the nodes have that the job gets
        plans = {size: {**one, "threads_per_worker": None} for size, one in plans.items()}
    return f"{_hash(config_text)}:{_hash(plans)}"


def submitted_group_hash(
    config: Mapping[str, object], plan: Mapping[str, object], trials: Iterable[Trial]
) -> str:
    """The hash of what the runs of a group are made from."""
    return _hash([config, plan, to_json(list(trials))])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def read_submitted(folder: RunDir | AttemptDir) -> dict[str, object]:
    """The content of plan.json, after comparing it and config.yaml with what the job was submitted with.

    A job of an earlier version names no hash. Raises NotSubmitted, UsageError if another user could have
    written one of the files, OSError, and ValueError for what is not JSON.
    """
    config_text, plan_text = map(read_trusted, (folder.config_file, folder.plan_file))
    plan: dict[str, object] = json.loads(plan_text)
    expected = _expected(folder.run if isinstance(folder, AttemptDir) else folder)
    if expected is not None:
        try:
            found = submitted_hash(config_text, plan)
        except (LookupError, TypeError, AttributeError):
            found = f"{_hash(config_text)}:"
        if found != expected:
            is_config = found.partition(":")[0] != expected.partition(":")[0]
            raise NotSubmitted(folder.config_file if is_config else folder.plan_file)
        for name, text in files_of(take_parts(plan)).items():
            if read_trusted(folder.path / name) != text:
                raise NotSubmitted(folder.path / name)
    return plan


def _expected(run: RunDir) -> str | None:
    """The hashes of a run that its job names, for a task of an array by what its group is made from."""
    named = os.environ.get(SUBMITTED_VARIABLE)
    if named is None or ":" in named or group_of(run) is None:
        return named
    return _expected_of_task(named, run.path)


@cache
def _expected_of_task(named: str, folder: Path) -> str:
    """The hashes of an array task's run, after comparing its group with `named`.

    Kept for this process: comparing a group of ten thousand runs takes 0.4 s.
    """
    found = group_of(RunDir(folder))
    assert found is not None
    group, index = found
    require_submitted_group(group)
    config_text, plan_text = trial_texts(group, group.trial(index))
    return submitted_hash(config_text, json.loads(plan_text))


def require_submitted_group(group: RunGroup) -> None:
    """Raise NotSubmitted if the job of an array was submitted for other runs than those of the group."""
    named = os.environ.get(SUBMITTED_VARIABLE)
    if named is not None and ":" not in named:
        record = group.record
        if submitted_group_hash(record.config, record.plan, group.trials.values()) != named:
            raise NotSubmitted(group.sweep_file)
