"""Find the dependencies for ``--after RUN``: Slurm jobs or, for runs on this machine, run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote

from trainkit.backend import backend_named
from trainkit.cluster.limits import listed
from trainkit.config import read_effective
from trainkit.errors import UsageError
from trainkit.folders import shown_path
from trainkit.observe.current import look_at
from trainkit.observe.group import GroupFiles, TrialStatus
from trainkit.observe.status import RunStatus
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import UNFINISHED_STATES
from trainkit.run.registry import find_run_or_group
from trainkit.run.rundir import RunDir
from trainkit.scheduler import base_id, by_cluster, on_cluster
from trainkit.slurm.environment import other_cluster
from trainkit.slurm.jobs import query_jobs

Dependency = RunStatus | TrialStatus
"""A run on which a new job depends. The run's job id is None if the run was never submitted."""


def open_runs(text: str, runs: Sequence[Dependency]) -> list[Dependency]:
    """Return the unfinished runs in `runs`; raise UsageError if one of them can no longer finish."""
    found = [run for run in runs if run.state != "finished"]
    wrong = [run for run in found if run.state not in UNFINISHED_STATES or run.job_id is None]
    if wrong:
        first = wrong[0]
        more = f" ({first.reason})" if first.reason else ""
        if len(runs) > 1:
            more = f"; {len(wrong):,} of {len(runs):,} runs will not finish"
        is_here = any(str(run.job_id).startswith("local-") for run in runs)
        whole = isinstance(first, TrialStatus) and is_here
        place, named = shown_path(first.run_dir), Path(first.run_dir)
        again = quote(shown_path(named.parent if whole else named))
        hint = f"resume that run first: `trainkit resume {again}`"
        if first.state == "unknown":
            hint = f"`trainkit status {quote(place)}` shows the reason; omit --after to start without waiting"
        if first.state in UNFINISHED_STATES:
            hint = "retry once all runs of the group are submitted"
        raise UsageError(f"--after {text}: {place} is {first.state}{more}", hint=hint)
    return found


def dependency_ids(text: str, runs: Sequence[Dependency], arrays: Sequence[str] = ()) -> list[str]:
    """Return the ids of the Slurm jobs that must succeed before all of `runs` have finished.

    The result is empty if all runs have already finished. `text` is RUN as typed, and `arrays` contains the
    array jobs of a group. The `job_id` of each run, `arrays` and the results have the format returned by
    `on_cluster`. Raises UsageError if a run executes on this machine without Slurm, and for the same reasons
    as `open_runs`.
    """
    found = open_runs(text, runs)
    local = next((run for run in found if str(run.job_id).startswith("local-")), None)
    if local is not None:
        place = shown_path(local.run_dir)
        raise UsageError(
            f"--after {text}: {place} runs on this machine, so Slurm cannot wait for it",
            hint=f"`trainkit logs {quote(place)} -f` returns when the run has ended",
        )
    if all(base_id(str(run.job_id)) in arrays for run in runs):
        return list(dict.fromkeys(base_id(str(run.job_id)) for run in found))
    return [str(run.job_id) for run in found]


def with_dependency(plan: LaunchPlan, texts: Sequence[str], waits_for: Sequence[str]) -> LaunchPlan:
    """Return the plan with a dependency on the runs given with `--after`.

    `texts` contains the runs as the user typed them, and `waits_for` is the corresponding result of
    `dependencies`.
    """
    names, verb = ", ".join(texts), "has" if len(texts) == 1 else "have"
    if not waits_for:
        reasons = {**plan.reasons, "after": f"starts immediately: {names} {verb} already finished"}
        return replace(plan, reasons=reasons)
    # If the dependency fails, the job stays pending, both on Slurm and on this machine, and `status` reports
    # this.
    reason = f"starts once {names} {verb} finished successfully"
    backend = backend_named(plan.backend)
    if not plan.is_job:
        return backend.waiting_for(plan, waits_for, reason)
    found = by_cluster(waits_for)
    if list(found) != [other_cluster(name) or "" for name in plan.clusters or [None]]:
        where = listed([f"{job} on {name or 'this one'}" for name, jobs in found.items() for job in jobs])
        raise UsageError(
            f"--after {names}: a job can wait only for jobs on its own cluster, but these jobs are {where}",
            hint="if all of them are on one cluster, choose that cluster with --clusters",
        )
    [jobs] = found.values()
    return backend.waiting_for(plan, jobs, reason)


def dependencies(names: Sequence[str], warn: Callable[[str], None], *, on_slurm: bool) -> list[str]:
    """Return the jobs, or run folders on this machine, that must succeed before the named runs are finished.

    Returns job ids if `on_slurm` is set, and run folders otherwise. Raises UsageError for a run that
    is unknown or has failed and, with `on_slurm`, for a run on this machine.
    """
    waits_for: list[str] = []
    for name in names:
        found = find_run_or_group(name, to_change=True)
        arrays, runs = list[str](), list[Dependency]()
        if isinstance(found, RunDir):
            run = _run(found, warn, on_slurm)
            runs = [replace(run, job_id=run.job_id and on_cluster(run.job_id, run.place.cluster))]
        else:
            trials = GroupFiles(found)
            status = trials.status(query_jobs(trials.open_ids), datetime.now(timezone.utc))
            # Include the cluster in each job id, because jobs on different clusters may have the same id.
            runs = [replace(trial, job_id=trials.jobs.get(trial.index)) for trial in status.trials]
            arrays = found.jobs
        if on_slurm:
            waits_for += dependency_ids(name, runs, arrays)
        elif open_runs(name, runs):
            waits_for.append(str(found.path))
    return waits_for


def _run(run: RunDir, warn: Callable[[str], None], on_slurm: bool) -> RunStatus:
    status = look_at(run, warn)[1]
    if on_slurm and status.state in UNFINISHED_STATES:
        num_follow_ups = read_effective(run.config_file, executes=False).requeue.follow_ups
        if num_follow_ups:
            raise UsageError(
                f"--after {run.shown}: its {num_follow_ups} chained jobs (requeue.follow_ups) continue it "
                "under other job ids, so Slurm would start the new job too early",
                hint=f"`trainkit logs {run.quoted} -f` returns when the run has ended",
            )
    return status
