"""Which code a run trains with: a copy made when it was submitted, or the files as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.config import RunConfig
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir
from trainkit.submit.snapshot import Snapshot, plan_snapshot, take_snapshot

CODE = "code"
"""The key of job.json under which the copy is described."""


def wants_copy(config: RunConfig, plan: LaunchPlan) -> bool:
    """Whether the run has a copy: a job that waits in a queue must not see what is edited meanwhile."""
    return config.launch.snapshot and plan.slurm is not None


def planned_code(run: RunDir, config: RunConfig, plan: LaunchPlan, cwd: Path) -> dict[str, Any] | None:
    """What `copy_code` would give now; nothing is written."""
    return (
        _described(plan_snapshot(cwd, run, links=_runs_in_copy(plan))) if wants_copy(config, plan) else None
    )


def copy_code(run: RunDir, config: RunConfig, plan: LaunchPlan, cwd: Path) -> dict[str, Any] | None:
    """Copy the code into the run; what job.json keeps of that, None when the files are used as they are.

    Raises UsageError when it is too large, cannot be read, or there is no space.
    """
    return (
        _described(take_snapshot(cwd, run, links=_runs_in_copy(plan))) if wants_copy(config, plan) else None
    )


def _runs_in_copy(plan: LaunchPlan) -> bool:
    """Whether the working directory is the copy, so that what git ignores has to be found from there."""
    return plan.command is not None


def _described(snapshot: Snapshot) -> dict[str, Any]:
    return {
        **snapshot.to_dict(),
        "workdir": str(snapshot.workdir),
        "import_path": list(snapshot.import_path),
    }
