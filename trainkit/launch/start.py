"""Creates the folder of what one command submits, a run or a group, and starts its job."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from trainkit.backends import backend_named
from trainkit.config import RunConfig
from trainkit.formats import JsonObject
from trainkit.launch.create import CreatedRun, create_run, defer_sigint, new_folder, start_run, write_origin
from trainkit.launch.secrets import refuse_leaks
from trainkit.launch.submission import PlannedPoint, Submission
from trainkit.run.files import utc_now, write_atomic, write_json
from trainkit.run.group import GroupRecord, Point, RunGroup, difference
from trainkit.run.record import CodeCopy
from trainkit.run.registry import register
from trainkit.run.rundir import RunDir
from trainkit.slurm.environment import cluster_name


def create_submission(
    submission: Submission,
    argv: Sequence[str],
    run_dir: Path | None = None,
    option: str = "--run-dir",
) -> CreatedRun:
    """Create the folder of the run or group, without its job.

    `option` is the command-line option of `run_dir`. Raises UsageError when `run_dir` is not empty or cannot
    be written, or a secret would be written.
    """
    config, plan = submission.points[0].config, submission.points[0].plan
    if submission.array is None:
        return create_run(config, plan, argv, run_dir, submission.code_from)
    with new_folder(config.name, run_dir, option) as (folder, name):
        group, run = RunGroup(folder), RunDir(folder)
        group.logs_dir.mkdir(mode=0o700)
        code = write_origin(run, config, plan, argv, submission.code_from)
        record = _record(name, submission.points, submission.array.directive, code)
        refuse_leaks(json.dumps(record), str(group.sweep_file), config.secrets, os.environ)
        if backend_named(plan.backend).template is not None:
            write_atomic(group.script_file, submission.script(run, code).text)
        write_json(group.sweep_file, record)
    return CreatedRun(run, config.name, name, code)


def start_submission(
    submission: Submission, created: CreatedRun, *, now: bool = False
) -> tuple[str, int | None]:
    """Start what `create_submission` has created; returns the job id, and the attempt of a run.

    `now` is that of `NewAttempt`, for a run.

    Raises SlurmRefused after removing the folder, and SlurmUnreachable, which keeps it if the job may
    exist.
    """
    if submission.array is not None:
        return start_group(RunGroup(created.run.path)), None
    first = submission.points[0]
    entry = start_run(created.run, first.config, first.plan, "submit", now=now)
    return entry.job_id, entry.attempt


def start_group(group: RunGroup) -> str:
    """Start a group and return its job id.

    Raises SlurmRefused after removing the group, and SlurmUnreachable, which keeps it if the job may exist.
    """
    with defer_sigint():  # a group that has started and is not listed could not be cancelled
        job_id = backend_named(group.record.backend).start_group(group)
        group.update(job_id=job_id, submitted_at=utc_now())
        register(RunDir(group.path), group.name)
    return job_id


def _record(name: str, points: Sequence[PlannedPoint], array: str, code: CodeCopy | None) -> JsonObject:
    first = points[0]
    plan, slurm = first.plan.to_dict(), first.plan.slurm
    record = GroupRecord(
        name=name,
        backend=first.plan.backend,
        cwd=str(Path.cwd()),
        # Of several clusters Slurm chooses one, which the answer of sbatch names.
        cluster=None if slurm is not None and slurm.clusters else cluster_name(),
        array=array,
        keys=list(dict.fromkeys(key for point in points for key in point.values)),
        code=code,
        config=_config_dict(first.config),
        plan=plan,
    )
    return record.to_dict(
        Point(
            point.index,
            point.values,
            _config_difference(first.config, point.config),
            {} if point.plan == first.plan else difference(plan, point.plan.to_dict()),
        )
        for point in points
    )


def _config_dict(config: RunConfig, sections: set[str] | None = None) -> JsonObject:
    return config.model_dump(mode="json", by_alias=True, include=sections)


def _config_difference(base: RunConfig, other: RunConfig) -> JsonObject:
    """`difference` of two configs; sections that are the same object, as most are, are not compared."""
    changed = {name for name, value in base if getattr(other, name) is not value}
    return difference(_config_dict(base, changed), _config_dict(other, changed))
