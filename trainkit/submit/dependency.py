"""The Slurm jobs that ``--after RUN`` waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from shlex import quote

from trainkit.backends.jobs import query_job_status
from trainkit.config import read_effective
from trainkit.errors import UsageError
from trainkit.observe.group import GroupFiles, PointStatus
from trainkit.observe.status import RunStatus, read_status
from trainkit.plan.launch import UNFINISHED_STATES, LaunchPlan
from trainkit.run.history import RunHistory
from trainkit.run.record import read_job
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir
from trainkit.slurm.jobs import query_jobs

Dependency = RunStatus | PointStatus
"""A run that a job waits for; its job id is None if it was never submitted."""


def dependency_ids(text: str, runs: Sequence[Dependency], array: str | None = None) -> list[str]:
    """The ids of the Slurm jobs that must succeed before the runs that `text` names have finished.

    Empty if all have finished. `array` is the job id of a group. Raises UsageError if a run has failed, is
    unknown, or runs on this machine.
    """
    open_runs = [run for run in runs if run.state != "finished"]
    wrong = [run for run in open_runs if run.state not in UNFINISHED_STATES or run.job_id is None]
    if wrong:
        first = wrong[0]
        more = f" ({first.reason})" if first.reason else ""
        if len(runs) > 1:
            more = f"; {len(wrong):,} of {len(runs):,} runs will not finish"
        hint = f"resume it first: `trainkit resume {quote(first.run_dir)}`"
        if first.state == "unknown":
            hint = f"`trainkit status {quote(first.run_dir)}` says why; without --after the run starts now"
        raise UsageError(f"--after {text}: {first.run_dir} is {first.state}{more}", hint=hint)
    local = next((run for run in open_runs if str(run.job_id).startswith("local-")), None)
    if local is not None:
        raise UsageError(
            f"--after {text}: {local.run_dir} runs on this machine, and Slurm cannot wait for it",
            hint=f"`trainkit logs {quote(local.run_dir)} -f` returns when it has ended",
        )
    own = f"{array}_"
    if array is not None and open_runs and all(str(run.job_id).startswith(own) for run in runs):
        return [array]
    return [str(run.job_id) for run in open_runs]


def with_dependency(plan: LaunchPlan, texts: Sequence[str], job_ids: Sequence[str]) -> LaunchPlan:
    """The plan with a dependency on `job_ids`; `texts` are the runs of --after as typed.

    Raises UsageError for a plan without Slurm.
    """
    if plan.slurm is None:
        raise UsageError(
            "--after requires Slurm, but this run starts on this machine",
            hint="`trainkit logs RUN -f` returns when a run has ended",
        )
    names, verb = ", ".join(texts), "has" if len(texts) == 1 else "have"
    if not job_ids:
        reasons = {**plan.reasons, "after": f"starts immediately: {names} {verb} already finished"}
        return replace(plan, reasons=reasons)
    # Without --kill-on-invalid-dep: a job whose dependency failed stays pending, and `status` reports it.
    dependency = "afterok:" + ":".join(dict.fromkeys(job_ids))
    reasons = {**plan.reasons, "after": f"{dependency}: starts once {names} {verb} finished successfully"}
    slurm = replace(plan.slurm, sbatch={**plan.slurm.sbatch, "dependency": dependency})
    return replace(plan, slurm=slurm, reasons=reasons)


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
            points = GroupFiles(found)
            status = points.status(query_jobs(points.open_ids), datetime.now(timezone.utc))
            ids += dependency_ids(name, status.points, found.job_id)
    return ids


def _run(run: RunDir, warn: Callable[[str], None]) -> RunStatus:
    record = read_job(run)
    job = query_job_status(run, record, warn)
    status = read_status(RunHistory(run), record, job.alive, datetime.now(timezone.utc), job.job)
    if status.state in UNFINISHED_STATES:
        num_follow_ups = read_effective(run.config_file).requeue.follow_ups
        if num_follow_ups:
            raise UsageError(
                f"--after {run.path}: its {num_follow_ups} follow-up jobs (requeue.follow_ups) continue it "
                "under other job ids, and Slurm would start this job when the first of them ends",
                hint=f"`trainkit logs {quote(str(run.path))} -f` returns when the run has ended",
            )
    return status
