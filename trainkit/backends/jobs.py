"""Queries Slurm about runs' jobs: whether a job is alive, whether Slurm still lists it, and its status."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote

from trainkit.backend import SUPERVISOR_EXIT_S, JobStatus, backend_of, is_known
from trainkit.backends.slurm.shared_answers import least_interval_s, query_shared
from trainkit.errors import SlurmError, TrainkitError, UsageError, print_note
from trainkit.run.end import is_over
from trainkit.run.events import read_events
from trainkit.run.group import RunGroup, group_of
from trainkit.run.history import read_plan
from trainkit.run.record import AttemptRecord, JobRecord, add_slurm_attempt, read_job
from trainkit.run.rundir import RunDir, RunFolder, is_same_folder, is_supervised, submission_token
from trainkit.scheduler import JobInfo, JobState, by_cluster, in_queue
from trainkit.slurm.submit import find_by_token

QUERY_INTERVAL_S = 10.0
"""Interval in seconds between two queries by a waiting command; long, because Slurm's controller serves the
whole cluster."""
EXIT_POLL_S = 1.0
"""Interval in seconds between two queries about a job that is about to exit because its run has ended."""
JobQuery = Callable[[Sequence[str]], Mapping[str, JobInfo] | None]
"""A function that returns Slurm's data about jobs, or None if Slurm has not answered yet. If a cluster does
not answer, its jobs are missing from the result."""


def read_job_status(run: RunDir, query: JobQuery) -> tuple[JobRecord, JobStatus]:
    """Return a run's job.json and the status of its job; call `query` once to query Slurm."""
    job = read_job(run)
    return job, status_from_jobs(run, job, query(open_job_ids(run, job)))


def open_job_ids(run: RunDir, job: JobRecord) -> list[str]:
    """Return the ids of a run's newest Slurm job and chained jobs; empty if the run has recorded its end."""
    entry = job.newest
    if entry is None or entry.backend is None or not is_known(entry) or is_over(run.attempt(entry.attempt)):
        return []
    return [entry.job, *job.waiting]


def query_jobs_or_warn(ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, JobInfo]:
    """Return Slurm's data about the jobs with the given ids, for commands that show or await their state.

    The data may be as old as the minimum interval of `query_shared`. If a cluster does not answer, its jobs
    are missing from the result, and `warn` is called with a message.
    """
    known, problems = query_shared(ids)
    for cluster, error in problems.items():
        warn(f"{error.message}: the state of {len(by_cluster(ids)[cluster]):,} Slurm jobs is unknown")
    return known


def status_from_jobs(run: RunDir, job: JobRecord, jobs: Mapping[str, JobInfo] | None) -> JobStatus:
    """Return the status of a run's job; `jobs` is the result of `query_jobs_or_warn`.

    If a newer trainkit version added the run's backend, the status is unknown; raising an error instead would
    prevent listing other runs.
    """
    entry = job.newest
    if entry is None or not is_known(entry):
        return JobStatus(None)
    return backend_of(entry).status(run, entry, job.waiting, jobs)


def live_entry(run: RunDir, job: JobRecord, command: str) -> AttemptRecord | None:
    """Return the newest attempt if its job is alive, or None if the job has exited or is about to exit.

    Raises UsageError if this host cannot determine whether the job is alive, or if this folder is a copy of a
    live run's folder. The error's hint suggests running the subcommand `command` elsewhere.
    """
    entry = None if job.newest is None else backend_of(job.newest).live_entry(run, job, command)
    if entry is not None:
        refuse_copy(run, job, command)
    return entry


def refuse_copy(run: RunDir, job: JobRecord, command: str) -> None:
    """Raise UsageError if this run folder is a copy, and the newest attempt belongs to the original folder.

    A folder that was moved, linked or mounted elsewhere is not considered a copy. The error's hint suggests
    running the subcommand `command` on the original folder.
    """
    entry = job.newest or AttemptRecord()
    if (original := _copied_from(run, job)) is not None:
        raise _is_copy(run, original, entry.job_id, command)
    if entry.folder is None:
        return
    is_here, was_copied = is_same_folder(Path(entry.folder), run.path), _was_copied(run, entry.inode)
    # A local supervisor locks its run folder shortly after it starts.
    if entry.backend is None:
        is_another = (was_copied or (entry.inode is None and not is_here)) and not is_supervised(run)
    else:
        is_another = was_copied and not is_here and not is_supervised(run)
    if is_another:
        ends = f"kill {entry.pid}" if entry.backend is None else f"scancel {entry.job_id}"
        raise _is_elsewhere(run, entry.folder, entry.job_id, ends, command)


def refuse_copied_group(group: RunGroup, command: str) -> None:
    """Raise UsageError if this group folder is a copy, and the group's jobs belong to the original folder."""
    record, job_id = group.record, str(group.job_id)
    if (original := group.original) is not None:
        raise _is_copy(group, original, job_id, command)
    home = Path(record.folder or group.path)
    if not is_same_folder(home, group.path) and _was_copied(group, record.inode):
        raise _is_elsewhere(group, str(home), job_id, f"scancel {' '.join(group.job_ids)}", command)


def _was_copied(folder: RunFolder, inode: int | None) -> bool:
    """Return whether a folder is a copy: unlike a moved folder, a copy has an inode other than `inode`."""
    return inode not in (None, folder.path.stat().st_ino)


def _is_copy(folder: RunFolder, original: RunFolder, job_id: str, command: str) -> UsageError:
    return UsageError(
        f"{folder.shown} is a copy of {original.shown}, which is running as {job_id}",
        hint=f"`trainkit {command} {original.quoted}` acts on the original run",
    )


def _is_elsewhere(folder: RunFolder, home: str, job_id: str, ends: str, command: str) -> UsageError:
    return UsageError(
        f"{folder.shown} is not the folder that {job_id} writes to, which is {home}",
        hint=f"`trainkit {command} {quote(home)}` must be run on a host that has that folder; "
        f"if the folder is gone for good, `{ends}` ends the job",
    )


def _copied_from(run: RunDir, job: JobRecord) -> RunDir | None:
    """Return the run that was copied to this folder, or None if the two newest attempts differ."""
    if (found := group_of(run)) is not None and (group := found[0].original) is not None:
        return group.run(found[1])
    if job.newest is None or not (job.newest.inode is None or _was_copied(run, job.newest.inode)):
        return None  # also return None if this folder was moved and a copy of it is now at its previous path
    original = RunDir(job.newest.folder or run.path)
    if is_same_folder(original.path, run.path) or not original.exists():
        return None
    return original if any(map(job.newest.is_attempt, read_job(original).attempts)) else None


def read_whole_job(run: RunDir) -> JobRecord:
    """Read job.json, and add the job of the newest attempt if Slurm never acknowledged its submission.

    A job without an acknowledgement is found by its submission token. The caller must hold the run's lock.
    Raises SlurmUnreachable if Slurm does not answer.
    """
    job, attempt = read_job(run), run.attempt(max(run.attempt_numbers(), default=0))
    is_recorded = job.of_attempt(attempt.number).attempt != 0
    if is_recorded or not attempt.script_file.exists() or attempt.end_file.exists():
        return job
    written = attempt.script_file.stat().st_mtime
    plan = read_plan(attempt)  # a damaged plan must not prevent cancelling the run
    clusters = plan.record("slurm").texts("clusters")
    job_id = find_by_token(submission_token(run, attempt.number), since=written, clusters=clusters)
    if job_id is not None:
        backend = plan.text("backend") or str(job.backend)
        job.attempts.append(add_slurm_attempt(run, attempt.number, job_id, "submit", backend))
    return job


def require_not_running(run: RunDir, job: JobRecord, command: str) -> None:
    """Raise UsageError if the run has a pending or running job, or a finished job still in the queue."""
    wait_until_out_of_queue(run, job)
    entry = live_entry(run, job, command)
    if entry is not None:
        raise UsageError(
            f"{run.shown} is running as {entry.job_id}",
            hint=f"`trainkit cancel {run.quoted}` ends the run; "
            f"`trainkit requeue {run.quoted}` saves and restarts it",
        )


def wait_until_out_of_queue(run: RunDir, record: JobRecord) -> None:
    """Wait until the Slurm job of an ended run has exited, so that the next job need not wait for it.

    Raises UsageError if the job takes longer than `SUPERVISOR_EXIT_S` to exit.
    """
    deadline_s, is_first = time.monotonic() + SUPERVISOR_EXIT_S, True
    least_s = 0.0 if record.newest is None else least_interval_s([record.newest.job])
    while (job := lingering_job(run, record)) is not None:
        if time.monotonic() > deadline_s:
            raise UsageError(
                f"{run.shown} has ended, but Slurm still lists its job {job.job_id} ({job.slurm_state})",
                hint=f"`trainkit cancel {run.quoted} --now` ends the job",
            )
        if is_first:
            print_note(f"{job.job_id} has recorded the end of the attempt: waiting for it to exit")
        is_first = False
        time.sleep(max(EXIT_POLL_S, min(SUPERVISOR_EXIT_S, least_s)))


def lingering_job(run: RunDir, record: JobRecord) -> JobInfo | None:
    """Return the job of an ended run if the job is still running or being requeued.

    Returns None if Slurm does not answer.
    """
    entry = record.newest
    if entry is None or not is_over(run.attempt(entry.attempt)) or _copied_from(run, record) is not None:
        return None
    try:
        job = backend_of(entry).job(entry)
    except SlurmError:
        return None
    # Ignore a completing job: only its epilog is still running.
    return job if in_queue(job) and job.state is not JobState.COMPLETING else None


ANSWER_S = 5.0
"""Seconds that a screen or command waits for Slurm's answer about new jobs before it uses the run's files
instead.
"""
MIN_QUERY_INTERVAL_S = 2.0
"""Minimum interval in seconds between two queries if there are new jobs."""


def utc_clock() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(timezone.utc)


RUNNING_QUERY_INTERVAL_S = 30.0
"""Interval in seconds between two queries while a job runs; long, because the run's files show its progress
and its end."""


class SlurmPoller:
    """Queries jobs in a background thread for callers that poll, at most once per `QUERY_INTERVAL_S`."""

    def __init__(self, clock: Callable[[], datetime] = utc_clock) -> None:
        self._clock = clock
        self._answer: tuple[set[str], Mapping[str, JobInfo] | None] = set(), None
        """The job ids of the newest query, and Slurm's answer to it."""
        self._problem: tuple[str, datetime] | None = None
        self._asked_s = float("-inf")
        self._least_s = 0.0
        """The site's minimum interval between two queries."""
        self._thread = threading.Thread()

    def jobs(self, ids: Sequence[str]) -> Mapping[str, JobInfo] | None:
        """Return Slurm's newest answer about the jobs with the given ids, or None before the first answer."""
        wanted = set(ids)
        if not wanted:
            self._problem = None
            return {}
        if wanted <= self._answer[0]:
            runs = any(job.state is JobState.RUNNING for job in (self._answer[1] or {}).values())
            interval_s = RUNNING_QUERY_INTERVAL_S if runs else QUERY_INTERVAL_S
            # After a failed query, `query_shared` decides how soon Slurm is queried again.
            least_s = 0.0 if self._problem else self._least_s
            if time.monotonic() - self._asked_s >= max(interval_s, least_s):
                self._ask(ids)
            return self._answer[1]
        # Wait for an answer about all jobs: a job that is missing from the answer would be considered
        # unknown.
        deadline_s = time.monotonic() + ANSWER_S
        while not wanted <= self._answer[0] and time.monotonic() < deadline_s:
            self._ask(ids)
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return self._answer[1] if wanted <= self._answer[0] else None

    @property
    def problem(self) -> str | None:
        """Return why and since when the jobs' state in Slurm is unknown, or None if the state is known."""
        if self._problem is None:
            return None
        text, since = self._problem
        return f"Slurm has been unreachable since {since:%H:%M:%S} UTC: {text}"

    def _ask(self, ids: Sequence[str]) -> None:
        """Start a query in the background thread, unless one is in progress."""
        if not self._thread.is_alive():
            # Use a daemon thread, so that the program can exit even if Slurm has not answered.
            self._thread = threading.Thread(target=self._run, args=(ids,), name="slurm", daemon=True)
            self._thread.start()

    def _run(self, ids: Sequence[str]) -> None:
        time.sleep(max(0.0, self._asked_s + MIN_QUERY_INTERVAL_S - time.monotonic()))
        self._asked_s, texts = time.monotonic(), list[str]()
        try:
            self._least_s = least_interval_s(ids)
            jobs = query_jobs_or_warn(ids, texts.append)
        except (TrainkitError, OSError) as error:  # An exception would kill the thread without an answer.
            jobs = {}
            texts.append(str(error).splitlines()[0])
        if not texts:
            self._problem = None
        elif self._problem is None:
            self._problem = "; ".join(texts), self._clock()
        self._answer = set(ids), jobs


class Waiting:
    """Reports to the user why a command is waiting, after some seconds and whenever the reason changes."""

    def __init__(self, notify: Callable[[str], None], after_s: float = 0.0) -> None:
        self._notify, self._from_s, self._said = notify, time.monotonic() + after_s, ""

    def look(self, reason: str) -> None:
        """Report the current reason for waiting if it has changed.

        `reason` is "" if there is no reason to wait.
        """
        if reason != self._said and time.monotonic() >= self._from_s:
            self._said = reason
            if reason:
                self._notify(reason)


def liveness_probe(
    run: RunDir, notify: Callable[[str], None] = lambda text: None, after_s: float = 0.0
) -> Callable[[], bool | None]:
    """Return a function that polls whether a run's newest job is alive.

    The function returns None if the state of the job is unknown. `notify` is called with the reason why the
    job is pending or its state is unknown, whenever the reason changes. `notify` is not called before
    `after_s` seconds have passed.
    """
    poller, waiting, started = SlurmPoller(), Waiting(notify, after_s), set[int]()

    def probe() -> bool | None:
        record, status = read_job_status(run, poller.jobs)
        job, entry, reason = status.job, record.newest, poller.problem or ""
        if job is not None and job.state.is_waiting and job.sentence:
            reason = f"{job.job_id} is pending: {job.sentence}"
        elif entry is not None and entry.backend is None and entry.attempt not in started:
            events = list(read_events(run, "waiting", "started", attempt=entry.attempt))
            if any(event.name == "started" for event in events):
                started.add(entry.attempt)
            elif events:
                reason = f"{run.shown} {events[-1].reason}"
        waiting.look(reason)
        return status.alive

    return probe
