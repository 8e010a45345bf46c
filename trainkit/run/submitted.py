"""Verify config.yaml and plan.json in a run folder against the hashes in the batch script.

The supervisor verifies these two files before it trusts any other file in the run folder. As a result, the
job executes nothing if the run folder was replaced, or if one of the two files was changed, while the job was
queued.
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
"""The environment variable for the `submitted_hash`. The variable is set by the batch script or, for a run on
this machine, by the command that starts the supervisor."""
HASH_DIGITS = 32


class NotSubmitted(UsageError):
    """Raised if the run folder does not match the hashes from the job's submission."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} differs from the file that was submitted with this job, so the run is not started: "
            "the file was changed, or another folder has replaced the run folder",
            hint="check the folder and its owner; `trainkit resume` submits its current content",
        )


def plans_by_size(plan: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return a run's plan for each possible number of nodes; the current number comes last.

    Raises LookupError or TypeError if `plan` is not a valid plan.json.
    """
    own, sizes = {**plan, "sizes": {}}, plan.get("sizes", {})
    if not isinstance(sizes, dict):
        raise TypeError(f"sizes is {str(sizes)[:100]!r}")
    return {**{size: changed(own, change) for size, change in sizes.items()}, str(plan["num_nodes"]): own}


def submitted_hash(config_text: str, plan: Mapping[str, object]) -> str:
    """Return the hashes of a config.yaml and a plan.json; they do not depend on the number of nodes.

    Raises LookupError, TypeError or AttributeError if `plan` is not a valid plan.json.
    """
    plans = plans_by_size(plan)
    if plan.get("fills_nodes"):  # With `fills_nodes`, the number of threads depends on the allocated CPUs.
        plans = {size: {**one, "threads_per_worker": None} for size, one in plans.items()}
    return f"{_hash(config_text)}:{_hash(plans)}"


def submitted_group_hash(
    config: Mapping[str, object], plan: Mapping[str, object], trials: Iterable[Trial]
) -> str:
    """Return a hash of the values used to create the runs of a group."""
    return _hash([config, plan, to_json(list(trials))])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def read_submitted(folder: RunDir | AttemptDir) -> dict[str, object]:
    """Return the content of plan.json after verifying plan.json and config.yaml against the job's hashes.

    Skips the verification if the batch script contains no hashes, because an older trainkit version wrote it.
    Raises NotSubmitted if a file differs, UsageError if another user could have written a file, OSError if a
    file cannot be read, and ValueError if plan.json is invalid JSON.
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
    """Return the hashes from the job's environment; for an array task, compute them from its group."""
    named = os.environ.get(SUBMITTED_VARIABLE)
    if named is None or ":" in named or group_of(run) is None:
        return named
    return _expected_of_task(named, run.path)


@cache
def _expected_of_task(named: str, folder: Path) -> str:
    """Return the hashes for the run of an array task, after verifying its group against the hash `named`.

    The result is cached, because verifying a group with ten thousand runs takes 0.4 s.
    """
    found = group_of(RunDir(folder))
    assert found is not None
    group, index = found
    require_submitted_group(group)
    config_text, plan_text = trial_texts(group, group.trial(index))
    return submitted_hash(config_text, json.loads(plan_text))


def require_submitted_group(group: RunGroup) -> None:
    """Raise NotSubmitted if the runs of the group have changed since the array was submitted."""
    named = os.environ.get(SUBMITTED_VARIABLE)
    if named is not None and ":" not in named:
        record = group.record
        if submitted_group_hash(record.config, record.plan, group.trials.values()) != named:
            raise NotSubmitted(group.sweep_file)
