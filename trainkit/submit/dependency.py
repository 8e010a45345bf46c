"""The Slurm jobs that ``--after RUN`` waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from shlex import quote

from trainkit.config import read_effective
from trainkit.control.jobs import query_job_status
from trainkit.control.run_registry import find_run_or_group
from trainkit.errors import UsageError
from trainkit.observe.group import GroupFiles
from trainkit.observe.status import read_status
from trainkit.plan.launch import UNFINISHED_STATES, Dependency, LaunchPlan, dependency_ids, with_dependency
from trainkit.run.group import RunGroup
from trainkit.run.rundir import RunDir
from trainkit.slurm.jobs import query_jobs


def start_after(plan: LaunchPlan, names: Sequence[str], warn: Callable[[str], None]) -> LaunchPlan:
    """The plan of a job that starts when the newest attempts of these runs and groups have finished.

    Raises UsageError for a run that has failed, is unknown or runs on this machine, and for a plan without
    Slurm.
    """
    if plan.slurm is None:
        return with_dependency(plan, names, ())
    return with_dependency(plan, names, job_ids_of(names, warn))


def job_ids_of(names: Sequence[str], warn: Callable[[str], None]) -> list[str]:
    """The ids of the jobs that must finish successfully for these runs and groups to have finished.

    Raises UsageError for a run that has failed, is unknown or runs on this machine.
    """
    ids: list[str] = []
    for name in names:
        found = find_run_or_group(name, to_change=True)
        if isinstance(found, RunDir):
            ids += dependency_ids(name, [_run(found, warn)])
        else:
            ids += dependency_ids(name, _points(found), found.job_id)
    return ids


def _run(run: RunDir, warn: Callable[[str], None]) -> Dependency:
    job_status = query_job_status([run], warn)[0]
    status = read_status(run, job_status.alive, datetime.now(timezone.utc), job_status.job)
    if status.state in UNFINISHED_STATES:
        num_follow_ups = read_effective(run.config_file).requeue.follow_ups
        if num_follow_ups:
            raise UsageError(
                f"--after {run.path}: its {num_follow_ups} follow-up jobs (requeue.follow_ups) continue it "
                "under other job ids, and Slurm would start this job when the first of them ends",
                hint=f"`trainkit logs {quote(str(run.path))} -f` returns when the run has ended",
            )
    return Dependency(str(run.path), status.state, status.job_id, status.reason)


def _points(group: RunGroup) -> list[Dependency]:
    points = GroupFiles(group)
    status = points.status(query_jobs(points.open_ids), datetime.now(timezone.utc))
    return [Dependency(point.run_dir, point.state, point.job_id, point.reason) for point in status.points]
