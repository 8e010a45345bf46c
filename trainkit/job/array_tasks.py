"""Creates the run folder of an array task when the task starts, or earlier when a command needs it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from trainkit.config import RunConfig, dump_effective
from trainkit.errors import UsageError
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.sweep import changed
from trainkit.run.events import log_event
from trainkit.run.group import Point, RunGroup, group_of
from trainkit.run.record import add_slurm_attempt, create_job, open_attempt
from trainkit.run.rundir import RunDir


def create_task_run(run: RunDir, job_id: str | None = None) -> None:
    """Create the run folder of an array task if it does not exist yet; does nothing for other runs.

    `job_id` is the id of the task, by default derived from the group's sweep.json.
    Raises UsageError when the group has no such task, was not submitted, or cannot be written.
    """
    found = group_of(run)
    if found is None or run.exists():
        return
    group, index = found
    point = group.point(index)
    job_id = job_id or group.task_id(index)
    if job_id is None:
        raise UsageError(
            f"cannot tell whether {group.path} was submitted: its sweep.json has no job id",
            hint="`squeue --me` lists your jobs",
        )
    try:
        _create(group, point, job_id)
    except OSError as error:
        raise UsageError(
            f"cannot create the run folder {run.path}: {error.strerror or error}",
            hint="check the permissions of its parent folder and the free space of the disk",
        ) from error


def point_config(group: RunGroup, point: Point) -> RunConfig:
    """The config of a point: that of the group, with the point's values."""
    return RunConfig.model_validate(changed(group.record["config"], point.config))


def point_plan(group: RunGroup, point: Point) -> LaunchPlan:
    """The plan of a point: that of the group, with the point's values."""
    return LaunchPlan.from_dict(changed(group.record["plan"], point.plan))


def _create(group: RunGroup, point: Point, job_id: str) -> None:
    """Create the folder under a temporary name and rename it, so that no reader sees a partial run."""
    run = group.run(point.index)
    stage = RunDir(tempfile.mkdtemp(prefix=f".{point.index}.", dir=group.path))
    try:
        _fill(stage, group, point, job_id)
        stage.path.rename(run.path)
    except BaseException as error:
        shutil.rmtree(stage.path, ignore_errors=True)
        # Another command, or the task itself, may have created it meanwhile.
        if not (isinstance(error, OSError) and run.exists()):
            raise


def _fill(stage: RunDir, group: RunGroup, point: Point, job_id: str) -> None:
    record = group.record
    stage.checkpoints_dir.mkdir(mode=0o700)
    create_job(
        stage,
        backend=record["backend"],
        name=f"{group.name}/{point.index}",
        cwd=record["cwd"],
        code=record.get("code"),
    )
    attempt = open_attempt(
        stage, dump_effective(point_config(group, point)), point_plan(group, point).to_text()
    )
    shutil.copyfile(group.provenance_file, stage.provenance_file)
    for copy in (attempt.script_file, stage.script_file):
        shutil.copyfile(group.script_file, copy)
    if group.code_dir.is_dir():
        stage.code_dir.symlink_to(Path(os.pardir, group.code_dir.name))
    # Slurm writes the output of the task there from its first line on.
    log = Path(*[os.pardir] * 4, group.logs_dir.name, group.log_file(point.index).name)
    attempt.supervisor_log.symlink_to(log)
    known = {key: record[key] for key in ("submitted_at", "cancelled_at", "cluster") if record.get(key)}
    add_slurm_attempt(stage, attempt.number, job_id, "submit", str(record["backend"]), **known)
    log_event(stage, attempt.number, "submitted", job_id=job_id, reason="submit")
