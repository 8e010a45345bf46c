"""Reads the current state of runs from their run folders and from Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from trainkit.backends.jobs import (
    JobQuery,
    open_job_ids,
    query_jobs_or_warn,
    read_job_status,
    status_from_jobs,
)
from trainkit.errors import UsageError
from trainkit.observe.group import GroupFiles, GroupStatus
from trainkit.observe.status import RunStatus, read_status
from trainkit.run.end import read_newest_end
from trainkit.run.group import RunGroup, group_of
from trainkit.run.history import PlanRecord, RunHistory
from trainkit.run.record import JobRecord, read_job
from trainkit.run.registry import record_over, starts
from trainkit.run.rundir import RunDir
from trainkit.scheduler import JobInfo


def look_at(run: RunDir, warn: Callable[[str], None]) -> tuple[RunHistory, RunStatus, JobInfo | None]:
    """Return a run's history, its status, and Slurm's information about its job.

    `warn` receives a message if Slurm does not respond. A trial that has not started might not have a run
    folder.
    """
    record, job = read_job_status(run, lambda ids: query_jobs_or_warn(ids, warn))
    history = RunHistory(run)
    status = read_status(history, record, job.alive, datetime.now(timezone.utc), job.job)
    if record.newest is None and (found := group_of(run)) is not None:
        status = _as_trial(status, *found, warn)
    return history, status, job.job


def _as_trial(status: RunStatus, group: RunGroup, index: int, warn: Callable[[str], None]) -> RunStatus:
    """Return the status of a trial that has not started, using the group's records."""
    seen, trial, plan = query_group(group, warn), group.trial(index), PlanRecord(group.record.plan)
    known = next(one for one in seen.trials if one.index == trial.index)
    place = replace(
        status.place,
        cluster=group.record.other_cluster,
        num_nodes=seen.num_nodes,
        workers_per_node=seen.workers_per_node,
        device=plan.text("device"),
    )
    return replace(
        status,
        name=f"{group.name}/{index}",
        state=known.state,
        reason=known.reason,
        attempt=None if known.job_id is None else 1,  # the array task becomes attempt 1 when it starts
        job_id=known.job_id,
        place=place,
        command=plan.command,
        age_s=seen.age_s,
    )


def query_group(group: RunGroup, warn: Callable[[str], None], metric: str | None = None) -> GroupStatus:
    """Return a group's status after searching Slurm for jobs whose submission was not confirmed.

    The trials are ranked by `metric` or, if it is None, by the metric that the trials' configs select. Raises
    UsageError if no trial has logged `metric`.
    """
    # imported here because it is slow to import, and few runs are in a group
    from trainkit.backends.slurm.group_chunks import recover_chunks

    recover_chunks(group)
    return read_group(group, lambda ids: query_jobs_or_warn(ids, warn), metric)


def read_group(group: RunGroup, query: JobQuery, metric: str | None = None) -> GroupStatus:
    """Return a group's status, calling `query` once for all of its jobs.

    The trials are ranked by `metric`, as in `query_group`.
    """
    files = GroupFiles(group, metric)
    return files.status(query(files.open_ids), datetime.now(timezone.utc))


def read_all(
    max_ended: int | None,
    query: JobQuery,
    histories: dict[Path, RunHistory],
    warn: Callable[[str], None],
    below: Path | None = None,
) -> tuple[list[RunStatus | GroupStatus], int]:
    """Return the status of all known runs and groups, newest first, with a single `query` of Slurm.

    `max_ended` limits how many ended runs are read. The second return value is the number of ended runs
    skipped. `histories` caches each run's history for the next call. `warn` receives a message for each group
    that cannot be read. If `below` is given, only runs in that folder are returned.
    """
    known: list[tuple[RunDir, JobRecord] | GroupFiles] = []
    seen, newly_over, num_over, num_hidden = set(), [], 0, 0
    inside = None if below is None else Path(os.path.realpath(below))
    for start in starts():
        if inside is not None and not Path(os.path.realpath(start.folder)).is_relative_to(inside):
            continue
        is_full = max_ended is not None and num_over >= max_ended
        if is_full and start.is_over:
            num_hidden += 1
            continue
        item, place = start.read(), os.path.realpath(start.folder)
        if item is None or place in seen:
            continue
        seen.add(place)
        group = None
        if isinstance(item, RunGroup):
            try:
                group = GroupFiles(item)
            except UsageError as error:
                warn(error.message)
                continue
            over = group.is_over
        else:
            end = read_newest_end(item.path)
            over = end is not None and not end.resumes
        num_over += over
        if over and not start.is_over:
            newly_over.append(start)
        if is_full and over:
            num_hidden += 1
        else:
            run = RunDir(item.path)
            known.append(group or (run, read_job(run)))
    record_over(newly_over)
    ids = [found.open_ids if isinstance(found, GroupFiles) else open_job_ids(*found) for found in known]
    jobs, now = query([job_id for own in ids for job_id in own]), datetime.now(timezone.utc)
    statuses: list[RunStatus | GroupStatus] = []
    for found in known:
        if isinstance(found, GroupFiles):
            statuses.append(found.status(jobs, now))
        else:
            run, record = found
            job = status_from_jobs(run, record, jobs)
            history = histories.setdefault(run.path, RunHistory(run))
            statuses.append(read_status(history, record, job.alive, now, job.job))
    return statuses, num_hidden
