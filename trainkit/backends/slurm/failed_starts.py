"""Handles starts of a run's jobs that failed before the supervisor began, for example on a broken node.

The batch script (templates/partials/begin.sh.j2) writes ``starts/JOB.RESTARTS`` into the folder of its run or
group. The file in ``starts/`` contains the host and, if possible, the exit code. When a supervisor begins, it
removes the file for its own start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainkit.cluster.bad_nodes import note_failure
from trainkit.job.signals import describe_exit, is_death_by_stop_signal, signal_exit_code
from trainkit.run.events import log_event
from trainkit.run.files import read_json
from trainkit.run.group import group_of
from trainkit.run.record import JobRecord
from trainkit.run.rundir import STARTS_FOLDER, RunDir
from trainkit.scheduler import JobInfo, JobState, base_id, is_job_id

_BY_FAILURE = (JobState.FAILED, JobState.NODE_FAIL, JobState.OUT_OF_MEMORY)
"""Job states that indicate a failure, as opposed to a cancellation, a preemption or a timeout."""


@dataclass(frozen=True)
class FailedStart:
    """A start of a job that failed before its supervisor began."""

    job_id: str
    host: str
    """The host on which the batch script ran."""
    exit_code: int | None
    """The exit code of the batch script (128+n if signal n killed it), or None if unknown."""
    restarts: int = 0
    """How many times the job had been requeued before this start."""
    file: Path | None = None
    """The file that the batch script wrote, or None if only Slurm reports the start."""

    @property
    def how(self) -> str:
        """Return how the start failed, as text for messages."""
        return "killed" if self.exit_code is None else describe_exit(self.exit_code)

    @property
    def sentence(self) -> str:
        return f"{self.job_id} ended on {self.host} before the supervisor began: {self.how}"


def forget_start(run: RunDir, job_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """Delete the record that marks this start as failed, because its supervisor has begun.

    Raises OSError if the record cannot be removed.
    """
    group = group_of(run)
    # Array tasks write their records to the group's folder.
    for folder in (run.path, *([] if group is None else [group[0].path])):
        name = f"{job_id}.{environ.get('SLURM_RESTART_COUNT') or 0}"
        (folder / STARTS_FOLDER / name).unlink(missing_ok=True)


def failed_starts(run: RunDir, record: JobRecord, job: JobInfo | None) -> list[FailedStart]:
    """Return the failed starts since a supervisor last began, oldest first, according to the run's files.

    `job` is Slurm's data about the run's newest job, or None if unknown.
    """
    found = [start for start in _recorded(run, record) if _is_over(start, job)]
    if found or job is None or job.state not in _BY_FAILURE or not job.nodes:
        return found
    # If only Slurm reports the failure, the script did not start or could not write to the run folder.
    entry = record.newest
    if entry is None or entry.job_id != job.job_id or entry.has_started:
        return []
    code = signal_exit_code(job.exit_signal) if job.exit_signal else job.exit_code
    return [FailedStart(job.job_id, job.hosts[0], None if job.log_not_opened else code)]


def _is_over(start: FailedStart, job: JobInfo | None) -> bool:
    if start.exit_code is not None:
        return True
    if job is None:
        return False
    # If no exit code was recorded, the batch script was killed or is still running.
    is_earlier = job.job_id != start.job_id or (job.restarts or 0) > start.restarts or job.state.is_waiting
    return is_earlier or job.state in (*_BY_FAILURE, JobState.UNKNOWN)


def _recorded(run: RunDir, record: JobRecord) -> list[FailedStart]:
    found = list(_read(run.path / STARTS_FOLDER))
    group = group_of(run)
    if group is not None:
        ids = {entry.job_id for entry in record.attempts}
        found += [start for start in _read(group[0].path / STARTS_FOLDER) if start.job_id in ids]
    return sorted(found, key=lambda start: (int(base_id(start.job_id)), start.restarts))


def _read(folder: Path) -> Iterator[FailedStart]:
    for file in folder.glob("*.*"):
        job_id, _, restarts = file.name.partition(".")
        try:
            record = read_json(file)
            host, code = str(record["host"]), record["exit_code"]
            if is_job_id(job_id):
                yield FailedStart(job_id, host, code if isinstance(code, int) else None, int(restarts), file)
        except (OSError, ValueError, LookupError, TypeError):
            continue  # the record was truncated because the disk is full, or was removed by the supervisor


def batch_log(run: RunDir, record: JobRecord, job_id: str) -> Path:
    """Return the log of a job's batch script, which is in the folder of the job's first attempt."""
    own = [entry.attempt for entry in record.of_job(job_id)]
    return run.attempt(min(own, default=max(run.attempt_numbers(), default=1))).supervisor_log


def bad_starts(starts: Iterable[FailedStart], job: JobInfo | None) -> list[FailedStart]:
    """Return the failed starts that the host may have caused; for `job`, see `failed_starts`.

    If the script recorded no exit code, the job may have been preempted.
    """
    return [
        start
        for start in starts
        if not (start.exit_code is not None and is_death_by_stop_signal(start.exit_code))
        and (start.exit_code or (job is not None and job.state in _BY_FAILURE))
    ]


def note_bad_hosts(
    run: RunDir, record: JobRecord, job: JobInfo | None, cluster: str, notify: Callable[[str], None]
) -> tuple[list[FailedStart], list[str]]:
    """Exclude the hosts of failed starts from a run's next starts; return these failed starts and hosts.

    For `job`, see `failed_starts`. `notify` is called with a sentence about each record that could
    not be written.
    """
    starts = failed_starts(run, record, job)
    bad = bad_starts(starts, job)
    for start in bad:
        reason = f"a job ended on this host before its supervisor began: {start.how}"
        number = _attempt_of(run, record, start.job_id)
        try:
            note_failure(cluster, start.host, "start", reason, run=str(run.path), attempt=number)
        except OSError as error:
            notify(f"cannot record that {start.sentence} ({error})")
    return starts, [start.host for start in bad]


def close_failed_starts(
    run: RunDir, record: JobRecord, job: JobInfo, cluster: str, notify: Callable[[str], None]
) -> None:
    """When a supervisor begins, replace records of failed starts with events; call `note_bad_hosts` first."""
    for start in note_bad_hosts(run, record, job, cluster, notify)[0]:
        try:
            number, known = _attempt_of(run, record, start.job_id), {"exit_code": start.exit_code}
            log_event(run, number, "start_failed", job_id=start.job_id, host=start.host, **known)
            if start.file is not None:
                start.file.unlink(missing_ok=True)
        except OSError as error:
            notify(f"cannot record that {start.sentence} ({error})")


def _attempt_of(run: RunDir, record: JobRecord, job_id: str) -> int:
    """Return the attempt that a job's start would have executed; for an unknown job, the newest attempt."""
    own = [entry.attempt for entry in record.of_job(job_id)]
    return max(own or run.attempt_numbers(), default=1)
