"""The job of a run: its liveness, its state in Slurm, and how to signal or kill it.

The job of a local run is a supervisor process, that of any other run a Slurm job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from shlex import quote
from typing import TypeGuard

from trainkit.errors import SlurmError, TrainkitError, UsageError
from trainkit.job.processes import descendants
from trainkit.job.signals import AGENT_SIGNAL
from trainkit.run.end import KILLED, AttemptEnd, read_end
from trainkit.run.events import log_event
from trainkit.run.files import parse_time, read_json, utc_now
from trainkit.run.group import RunGroup
from trainkit.run.process import Liveness
from trainkit.run.record import (
    AttemptRecord,
    add_slurm_attempt,
    is_exiting,
    read_job,
    set_follow_ups,
    submission_token,
)
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.slurm.conf_file import cluster_name, other_cluster
from trainkit.slurm.control import Receiver, cancel, cancel_waiting, kill_step, send_signal
from trainkit.slurm.jobs import JobInfo, query_jobs, query_starts
from trainkit.slurm.states import JobState
from trainkit.slurm.submit import find_by_token

QUERY_INTERVAL_S = 10.0
"""Seconds between queries of a waiting command: the controller serves the whole cluster."""
FIRST_QUERY_INTERVAL_S = 1.0
LOCAL_POLL_S = 0.05
SUPERVISOR_EXIT_S = 10.0
"""How long a supervisor may take to exit after it has recorded the end of its job."""
KILL_TIMEOUT_S = 10.0
CLOCK_SKEW = timedelta(seconds=30)
"""How far the clocks of a node and of the controller may differ; Slurm waits longer to start a job again."""
ALIVE = {Liveness.ALIVE: True, Liveness.GONE: False, Liveness.UNKNOWN: None}
JobQuery = Callable[[Sequence[str]], Mapping[str, JobInfo] | None]
"""Slurm's information about jobs; None when Slurm does not answer."""


def slurm_job(entry: AttemptRecord) -> JobInfo | None:
    """Slurm's information about the job of an entry; None when Slurm no longer knows it.

    Raises UsageError for a job on a cluster that cannot be queried from here.
    """
    require_this_cluster(entry.cluster, entry.job_id)
    return query_jobs([entry.job_id]).get(entry.job_id)


def require_this_cluster(named: str | None, job_id: str | None) -> None:
    """Raise UsageError when a job is on a cluster that cannot be queried from here."""
    cluster = other_cluster(named)
    if cluster is not None:
        raise UsageError(
            f"job {job_id} is on the cluster {cluster}, but this is {cluster_name()}",
            hint=f"log in to {cluster}, or `export SLURM_CLUSTERS={quote(cluster)}`",
        )


def liveness(entry: AttemptRecord) -> Liveness:
    """Whether the job of an entry is running or pending; UNKNOWN when this host cannot tell."""
    if not entry.is_slurm:
        return entry.liveness()
    job = slurm_job(entry)
    # A job that squeue does not list is not running, whatever accounting says.
    return Liveness.ALIVE if in_queue(job) else Liveness.GONE


def in_queue(job: JobInfo | None) -> TypeGuard[JobInfo]:
    """Whether the job is in Slurm's queue, pending or running."""
    return job is not None and not job.is_terminal and job.state is not JobState.UNKNOWN


@dataclass(frozen=True)
class JobStatus:
    """The newest job of a run, as far as this host can see it."""

    alive: bool | None
    """None when this host cannot tell."""
    job: JobInfo | None = None
    """Slurm's information; None for a local run, and when Slurm cannot be queried."""


def query_job_status(runs: Sequence[RunDir], warn: Callable[[str], None]) -> list[JobStatus]:
    """The job status of each run, from one query; calls `warn` when Slurm is unreachable."""
    return job_statuses(runs, query_known_jobs(open_job_ids(runs), warn))


def query_attempt_status(attempt: AttemptDir, warn: Callable[[str], None]) -> JobStatus:
    """The job of one attempt. Of one that recorded no end itself, Slurm's accounting says how it ended.

    Calls `warn` if Slurm does not answer.
    """
    run, status = attempt.run, JobStatus(False)
    if attempt.number == run.attempt_numbers()[-1]:
        status = query_job_status([run], warn)[0]
    entry = read_job(run).of_attempt(attempt.number)
    end = read_end(attempt)
    if entry is None or not (end is None or end.guessed):
        return status
    if status.job is not None and (status.job.state.is_active or status.job.is_terminal):
        return status  # it runs, or accounting was asked already
    return replace(status, job=_ended_start(entry, warn) or status.job)


def _ended_start(entry: AttemptRecord, warn: Callable[[str], None]) -> JobInfo | None:
    """The start of a Slurm job that ran an attempt, once it is over: each requeue begins another one."""
    began = parse_time(entry.started_at)
    if began is None or not entry.is_slurm or other_cluster(entry.cluster):
        return None
    try:
        starts = query_starts(entry.job_id)
    except TrainkitError as error:
        warn(f"{error.message}: how Slurm ended attempt {entry.attempt} is unknown")
        return None
    for job in reversed(starts):
        if job.start_time and job.start_time <= began + CLOCK_SKEW:
            if job.end_time is None or job.end_time < began - CLOCK_SKEW:
                return None  # an earlier start: accounting does not know this one yet
            if job.slurm_state == "REQUEUED":
                return replace(job, state=JobState.REQUEUED)
            return job if job.is_terminal else None
    return None


def open_job_ids(runs: Iterable[RunDir]) -> list[str]:
    """The newest Slurm job and the pending follow-up jobs of each run that has not recorded its end."""
    pairs = ((run, read_job(run).newest) for run in runs)
    return [
        job_id
        for run, entry in pairs
        if entry is not None
        and entry.is_slurm
        and not is_exiting(run, entry)
        and not other_cluster(entry.cluster)
        for job_id in (entry.job_id, *read_job(run).waiting)
    ]


def query_known_jobs(ids: Sequence[str], warn: Callable[[str], None]) -> dict[str, JobInfo] | None:
    """Slurm's information about these jobs; calls `warn` and returns None when Slurm does not answer."""
    try:
        return query_jobs(ids)
    except TrainkitError as error:
        warn(f"{error.message}: the state of {len(ids):,} Slurm jobs is unknown")
        return None


def job_statuses(runs: Iterable[RunDir], jobs: Mapping[str, JobInfo] | None) -> list[JobStatus]:
    """The job status of each run; `jobs` is the result of `query_known_jobs`."""
    return [_job_status(run, read_job(run).newest, jobs) for run in runs]


def _job_status(run: RunDir, entry: AttemptRecord | None, jobs: Mapping[str, JobInfo] | None) -> JobStatus:
    if entry is None:
        return JobStatus(None)
    if not entry.is_slurm:
        return JobStatus(ALIVE[entry.liveness()])
    if jobs is None or other_cluster(entry.cluster):
        return JobStatus(None)
    job = jobs.get(entry.job_id)
    if not in_queue(job):
        # `jobs` has no follow-ups of a run that recorded its end.
        job = next((item for item in map(jobs.get, read_job(run).waiting) if in_queue(item)), job)
    return JobStatus(in_queue(job), job)


def live_entry(run: RunDir, command: str) -> AttemptRecord | None:
    """The newest attempt's entry if its job is alive, None if it has ended or is about to exit.

    `command` is the subcommand to suggest in the UsageError that is raised when this host cannot tell.
    """
    entry = read_job(run).newest
    if entry is None:
        return None
    if not entry.is_slurm:
        return _live_local_entry(run, entry, command)
    if is_exiting(run, entry):
        return None
    return entry if liveness(entry) is Liveness.ALIVE else _follow_up_entry(run, entry)


def _live_local_entry(run: RunDir, entry: AttemptRecord, command: str) -> AttemptRecord | None:
    if is_exiting(run, entry):
        # The supervisor is about to exit and ignores signals.
        _wait_until_process_gone(entry, SUPERVISOR_EXIT_S)
    state = entry.liveness()
    if state is Liveness.UNKNOWN:
        raise UsageError(
            f"cannot tell from here whether {run.path} is running: it was started on {entry.host}",
            hint=f"run `trainkit {command} {quote(str(run.path))}` on that host",
        )
    return entry if state is Liveness.ALIVE else None


def _follow_up_entry(run: RunDir, entry: AttemptRecord) -> AttemptRecord | None:
    """The entry of an ended job's attempt, with the id of a follow-up job in the queue; None without one."""
    waiting = read_job(run).waiting
    jobs = query_jobs(waiting)
    return next((replace(entry, job_id=job_id) for job_id in waiting if in_queue(jobs.get(job_id))), None)


def recover_job_id(run: RunDir) -> None:
    """Find the job of the newest attempt by its token if its submission was never acknowledged.

    Adds it to job.json; call with the lock held. Raises SlurmUnreachable when Slurm does not answer.
    """
    attempt = run.attempt(max(run.attempt_numbers(), default=0))
    if (
        not attempt.script_file.exists()
        or attempt.end_file.exists()
        or read_job(run).of_attempt(attempt.number)
    ):
        return
    written = attempt.script_file.stat().st_mtime
    job_id = find_by_token(submission_token(run, attempt.number), since=written)
    if job_id is not None:
        backend = str(read_json(attempt.plan_file)["backend"])
        add_slurm_attempt(run, attempt.number, job_id, "submit", backend)


def recover_group_job_id(group: RunGroup) -> str | None:
    """The job id of a group's array, looked up by its token if its submission was never acknowledged."""
    if group.job_id is None and other_cluster(group.record.get("cluster")) is None:
        written = group.script_file.stat().st_mtime
        found = find_by_token(submission_token(RunDir(group.path), 1), since=written)
        if found is not None:
            group.update(job_id=found)
    return group.job_id


def require_not_running(run: RunDir, command: str) -> None:
    """Raise UsageError when the run has a pending or running job, or one that does not leave the queue."""
    wait_until_out_of_queue(run)
    entry = live_entry(run, command)
    if entry is not None:
        raise UsageError(
            f"{run.path} is running as {entry.job_id}",
            hint=f"`trainkit cancel {quote(str(run.path))}` ends it; "
            f"`trainkit requeue {quote(str(run.path))}` saves and starts it again",
        )


def wait_until_out_of_queue(run: RunDir) -> None:
    """Wait for a Slurm job that has recorded the end of its run to exit: another one would wait for it.

    Raises UsageError when that takes longer than `SUPERVISOR_EXIT_S`.
    """
    deadline_s, is_first = time.monotonic() + SUPERVISOR_EXIT_S, True
    while (job := lingering_job(run)) is not None:
        if time.monotonic() > deadline_s:
            raise UsageError(
                f"{run.path} has ended, but Slurm still has its job {job.job_id} ({job.slurm_state})",
                hint=f"`trainkit cancel {quote(str(run.path))} --now` ends it",
            )
        if is_first:
            print(f"{job.job_id} has recorded its end: waiting until it exits", file=sys.stderr)
        is_first = False
        time.sleep(FIRST_QUERY_INTERVAL_S)


def lingering_job(run: RunDir) -> JobInfo | None:
    """The Slurm job of a run that has recorded its end, while Slurm still runs it, or starts it again.

    None if Slurm does not answer. Raises UsageError for a job on a cluster that cannot be queried from here.
    """
    entry = read_job(run).newest
    if entry is None or not entry.is_slurm or not is_exiting(run, entry):
        return None
    try:
        job = slurm_job(entry)
    except SlurmError:
        return None
    # One that completes has only its epilog to run.
    return job if in_queue(job) and job.state is not JobState.COMPLETING else None


def signal_job(run: RunDir, entry: AttemptRecord, number: signal.Signals) -> str:
    """Ask a job to save and exit (SIGTERM) or to save and requeue (SIGUSR2).

    Returns ``signalled``, or for a pending job ``cancelled`` or ``waiting``.
    """
    if not entry.is_slurm:
        signal_supervisor(entry, number)
        return "signalled"
    job = slurm_job(entry)
    if job is not None and job.state.is_waiting:
        if number == signal.SIGUSR2:
            return "waiting"
        cancel([entry.job_id])
        write_cancelled(run, entry, "cancelled before it started")
        return "cancelled"
    # A command may not expect SIGUSR2: its agents tell it in the way that it handles.
    sent = AGENT_SIGNAL if number == signal.SIGUSR2 else number
    send_signal([entry.job_id], sent.name, Receiver.STEPS)
    return "signalled"


def signal_supervisor(entry: AttemptRecord, number: signal.Signals) -> None:
    """Send a signal to the supervisor of a local run, unless it has already exited."""
    if entry.pid is not None and entry.liveness() is Liveness.ALIVE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(entry.pid, number)


def kill(run: RunDir, entry: AttemptRecord) -> None:
    """Kill a job immediately, without saving, and record its end."""
    if not entry.is_slurm:
        _kill_processes(run, entry)
        return
    job_id, step_id = entry.job_id, step_of(run, entry)
    if step_id is not None:
        # Before scancel, whose SIGTERM would make the ranks start to save.
        with contextlib.suppress(UsageError):
            kill_step(job_id, step_id)
    cancel([job_id])
    write_cancelled(run, entry, KILLED)


def _kill_processes(run: RunDir, entry: AttemptRecord) -> None:
    """Send SIGKILL to the supervisor and all its descendants, and write end.json in its place."""
    assert entry.pid is not None, entry
    for pid in (entry.pid, *descendants(entry.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not _wait_until_process_gone(entry, KILL_TIMEOUT_S):
        raise TrainkitError(
            f"{entry.job_id} did not end within {KILL_TIMEOUT_S:g} s of SIGKILL",
            hint=f"`ps -o pid,stat,wchan {entry.pid}` shows what it waits for",
        )
    try:
        write_cancelled(run, entry, KILLED)
    except OSError as error:
        message = f"{entry.job_id} was killed, but that could not be recorded ({error})"
        raise TrainkitError(message) from None


def step_of(run: RunDir, entry: AttemptRecord) -> str | None:
    """The id of the Slurm step that runs an attempt's ranks; None before their rendezvous."""
    if entry.step_id is not None:
        return entry.step_id
    try:
        found = str(read_json(run.attempt(entry.attempt).rendezvous_file)["step_id"])
    except (OSError, ValueError, KeyError):
        return None
    return found


def write_cancelled(run: RunDir, entry: AttemptRecord, reason: str) -> None:
    """Record the end of an attempt whose supervisor cannot do so itself."""
    attempt = run.attempt(entry.attempt)
    AttemptEnd("cancelled", "stopped", exit_code=137, reason=reason, time=utc_now()).write(attempt)
    log_event(run, attempt.number, "stopped", state="cancelled", exit_code=137, reason=reason)


def wait_until_gone(run: RunDir, entry: AttemptRecord, timeout_s: float) -> bool:
    """Wait until the job has ended; False if it is still alive after `timeout_s`."""
    if not entry.is_slurm:
        return _wait_until_process_gone(entry, timeout_s)
    deadline_s = time.monotonic() + timeout_s
    while not is_exiting(run, entry) and liveness(entry) is Liveness.ALIVE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(FIRST_QUERY_INTERVAL_S)
    return True


def _wait_until_process_gone(entry: AttemptRecord, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while entry.liveness() is Liveness.ALIVE:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(LOCAL_POLL_S)
    return True


def liveness_probe(
    run: RunDir, notify: Callable[[str], None] = lambda text: None
) -> Callable[[], bool | None]:
    """A function that polls whether a run's newest job is alive, None if unknown.

    It queries Slurm at most every `QUERY_INTERVAL_S`. `notify` is called whenever the reason why the job is
    pending changes.
    """
    queried_s, alive, notified = float("-inf"), None, ""

    def probe() -> bool | None:
        nonlocal queried_s, alive, notified
        entry = read_job(run).newest
        if entry is None:
            return None
        if not entry.is_slurm:
            return ALIVE[entry.liveness()]
        if other_cluster(entry.cluster):
            return None
        is_pending = notified != "" or alive is None
        interval_s = FIRST_QUERY_INTERVAL_S if is_pending and queried_s < 0 else QUERY_INTERVAL_S
        if time.monotonic() - queried_s < interval_s:
            return alive
        queried_s = time.monotonic()
        try:
            job = slurm_job(entry)
            alive = in_queue(job)
            if not alive and not is_exiting(run, entry):
                follow_ups = filter(in_queue, query_jobs(read_job(run).waiting).values())
                job = next(follow_ups, job)
                alive = in_queue(job)
        except SlurmError as error:
            if str(error) != notified:
                notified = str(error)
                notify(f"{error.message}; retrying")
            return alive
        reason = job.sentence if job is not None and job.state.is_waiting else ""
        if job is not None and reason and reason != notified:
            notify(f"{job.job_id} is pending: {reason}")
        notified = reason
        return alive

    return probe


def cancel_follow_ups(run: RunDir, keep: str = "") -> None:
    """Cancel the pending follow-up jobs except `keep`; call with the run's lock held.

    Raises SlurmUnreachable.
    """
    waiting = [job_id for job_id in read_job(run).waiting if job_id != keep]
    if waiting:
        cancel_waiting(waiting)
        set_follow_ups(run, [])
