"""Cancels a run or all runs in a group: the ranks save and exit, or are killed immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from shlex import quote
from typing import TypedDict

from trainkit.backend import backend_of, write_cancelled
from trainkit.backends.jobs import lingering_job, live_entry, read_whole_job, refuse_copied_group
from trainkit.backends.slurm.backend import cancel_follow_ups, sent_for, step_of
from trainkit.backends.slurm.group_chunks import recover_chunks
from trainkit.backends.slurm.shared_answers import least_interval_s
from trainkit.errors import TrainkitError, UsageError, print_note
from trainkit.folders import shown_path
from trainkit.formats import plural
from trainkit.observe.group import GroupFiles
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import KILLED, UNFINISHED_STATES
from trainkit.run.events import read_events
from trainkit.run.files import utc_now
from trainkit.run.group import RunGroup
from trainkit.run.process import ProcessId
from trainkit.run.record import AttemptRecord, JobRecord, mark_cancelled, read_job
from trainkit.run.rundir import RunDir, RunFolder, run_lock
from trainkit.scheduler import base_id, in_queue, on_cluster, split_job
from trainkit.slurm.control import cancel, cancel_waiting, kill_steps, send_signal
from trainkit.slurm.jobs import query_clusters, query_jobs

WAIT_MARGIN_S = 30.0
"""Seconds that ``--wait`` waits in addition to the grace time."""
GROUP_POLL_S = 2.0
POLL_S = 0.05


class _CancelledJson(TypedDict):
    run_dir: str
    job_id: str | None
    state: str
    """``ended`` if the run had already ended, ``cancelled`` if the cancellation is complete, ``cancelling``
    while the run saves, or ``restarted`` if another command has started the run again."""


class CancelledJson(_CancelledJson, total=False):
    """The result of a cancellation."""

    num_running: int
    """The number of runs of a group that were running; absent for a single run."""
    num_waiting: int
    """The number of runs of a group that were pending; absent for a single run."""


@dataclass(frozen=True)
class CancelResult:
    """The result of `cancel_run` or `cancel_group`."""

    state: str
    """``ended`` if the run had already ended, ``cancelled`` if the cancellation is complete, ``cancelling``
    while the run saves, or ``restarted`` if another command has started the run again."""
    message: str
    """A message for the user that names the run folder."""
    facts: CancelledJson
    """The values that ``--json`` prints."""
    entry: AttemptRecord | None = None
    """The attempt that is saving, or None if no attempt is saving."""


def cancel_run(run: RunDir, *, now: bool, wait: bool, warn: Callable[[str], None]) -> CancelResult:
    """Ask a run to save and exit, or kill it if `now` is set.

    If `wait` is set, waits until the run has ended. The cancellation is recorded in job.json while holding
    the run's lock. The supervisor reads job.json before each attempt, so the cancellation takes effect even
    if the signal is lost. Raises UsageError if this host cannot reach the run, and SlurmUnreachable if Slurm
    does not answer.
    """
    outcome = ""
    with run_lock(run):
        job = read_whole_job(run)
        entry = live_entry(run, job, "cancel")
        if entry is not None:
            if wait:
                backend_of(entry).query_interval_s(entry)  # report an invalid interval before any signal
            is_signalled = not now and entry.is_cancelled and _got_stop_signal(run, entry)
            try:
                # Copy only `cancelled_at` from the recorded entry: the job in `entry` may be a chained job
                # that continues the recorded attempt.
                entry = replace(entry, cancelled_at=mark_cancelled(run, now=now).cancelled_at)
            except OSError as error:
                # A full disk must not prevent a cancellation.
                warn(f"the cancellation could not be recorded ({error})")
            # Cancel chained jobs first, because otherwise they would start when the current job of the run
            # exits.
            cancel_follow_ups(run, job, keep=entry.job)
            if now:
                backend_of(entry).kill(run, entry)
            elif not is_signalled:  # many scripts exit without saving when they receive a second signal
                outcome = backend_of(entry).signal(run, entry, signal.SIGTERM)
    if entry is None:
        return _end_lingering(run, job, now)
    job_id = entry.job_id
    if now:
        return _run_result(run, job_id, "cancelled", f"killed {job_id}")
    if outcome == "cancelled":
        return _run_result(run, job_id, "cancelled", f"removed {job_id} from the queue")
    grace_s = LaunchPlan.read(run.plan_file, executes=False).grace_s
    if not wait:
        saves = f"{job_id} was asked to save a checkpoint and to exit within {grace_s:g} s"
        return replace(_run_result(run, job_id, "cancelling", saves), entry=entry)
    if backend_of(entry).wait_until_gone(run, entry, grace_s + WAIT_MARGIN_S):
        newest = read_job(run).newest or entry
        if newest.attempt > entry.attempt and not newest.is_cancelled:
            again = f"{job_id} has exited, but attempt {newest.attempt} has been started as {newest.job_id}"
            return _run_result(run, newest.job_id, "restarted", again)
        return _run_result(run, job_id, "cancelled", f"{job_id} has ended")
    message = f"{job_id} is still running; `trainkit cancel {run.quoted} --now` kills the job"
    return _run_result(run, job_id, "cancelling", message)


def _got_stop_signal(run: RunDir, entry: AttemptRecord) -> bool:
    """Return whether an earlier cancellation has already signalled an attempt's processes."""
    found = read_events(run, "signal", attempt=entry.attempt)
    return any(event.text("signal") == signal.SIGTERM.name for event in found)


def _end_lingering(run: RunDir, record: JobRecord, now: bool) -> CancelResult:
    """Cancel the job of an ended run if Slurm still lists the job, because the job hangs or would restart."""
    job = lingering_job(run, record)
    if job is None or not (now or job.state.is_waiting):
        return _run_result(run, None, "ended", f"{run.shown} has already ended")
    entry = record.newest or AttemptRecord()
    cancel([on_cluster(job.job_id, entry.other_cluster)])
    return _run_result(run, job.job_id, "ended", f"{run.shown} had already ended; cancelled {job.job_id}")


def _run_result(run: RunDir, job_id: str | None, state: str, message: str) -> CancelResult:
    facts: CancelledJson = {"run_dir": str(run.path), "job_id": job_id, "state": state}
    return CancelResult(state, _naming(run, message), facts)


def _naming(folder: RunFolder, message: str) -> str:
    return message if folder.shown in message else f"{folder.shown}: {message}"


def cancel_group(group: RunGroup, *, now: bool, wait: bool) -> CancelResult:
    """Cancel all unfinished runs in a group with a constant number of Slurm commands.

    Pending runs never start; running ones save and exit, or are killed if `now` is set. If `wait` is set, the
    function returns only once all runs have ended. Raises UsageError if the id of the group's job array is
    unknown. If a cluster does not answer, an error is raised after the runs on all other clusters have been
    cancelled.
    """
    if group.record.process is not None:
        return _cancel_here(group, group.record.process, now, wait)
    recover_chunks(group)
    if group.job_id is None:
        raise UsageError(
            f"it is unknown whether {group.shown} was submitted: {shown_path(group.sweep_file)} contains no "
            "job id",
            hint="`squeue --me` lists your jobs",
        )
    trials = GroupFiles(group)
    jobs, problems = query_clusters(trials.open_ids)
    if problems and not jobs:
        raise next(iter(problems.values()))

    def answers(job: str) -> bool:
        return split_job(job)[1] not in problems

    status = trials.status(jobs, datetime.now(timezone.utc))
    alive = [
        trial
        for trial in status.trials
        if trial.state in UNFINISHED_STATES and trial.job_id is not None and answers(trials.jobs[trial.index])
    ]
    pending = [trial.index for trial in alive if jobs[trials.jobs[trial.index]].state.is_waiting]
    running = [trial.index for trial in alive if trial.index not in set(pending)]
    job_ids = [trials.jobs[trial.index] for trial in alive]
    left = [] if group.record.cancelled_at else group.unsubmitted
    # Compute the interval first, so that an invalid interval is reported before any signal.
    interval_s = max(GROUP_POLL_S, least_interval_s(job_ids)) if wait else GROUP_POLL_S
    if alive or left:
        refuse_copied_group(group, "cancel")
        # A resumed trial has its own job, which is not part of the group's arrays.
        own = [job for job in job_ids if base_id(job) not in group.jobs]
        _cancel_trials(group, running, pending, [*filter(answers, group.jobs), *own], now)
        pending += left
    state = "cancelled" if alive or left else "ended"
    if running and not now:
        ended = wait and _wait_until_jobs_gone(job_ids, _grace_s(group) + WAIT_MARGIN_S, interval_s)
        state = "cancelled" if ended else "cancelling"
    result = _group_result(group, len(running), len(pending), now, state)
    if problems:
        if alive or left:
            print_note(result.message)
        raise next(iter(problems.values()))
    return result


def _cancel_here(group: RunGroup, process: ProcessId, now: bool, wait: bool) -> CancelResult:
    """Cancel a group on this machine, starting with the process that would start the pending runs."""
    if process.alive() is None:
        raise UsageError(
            f"cannot tell from here whether {group.shown} is running: it was started on {process.host}",
            hint=f"run `trainkit cancel {quote(str(group.path))}` on that host",
        )
    found = GroupFiles(group).status({}, datetime.now(timezone.utc)).trials
    group.update(cancelled_at=utc_now())
    # In a copy of a group folder, the recorded process belongs to the original group and holds only the
    # original's lock, so do not signal the process from the copy.
    while process.alive() and group.has_process():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
            os.kill(process.pid, signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
        time.sleep(POLL_S)
    pending = {trial.index for trial in found if trial.state == "pending"}
    results, problems = dict[int, CancelResult](), list[Exception]()
    for index in group.trials:
        if group.run(index).exists():
            try:
                results[index] = cancel_run(group.run(index), now=now, wait=False, warn=print_note)
            except (OSError, TrainkitError) as error:
                problems.append(error)
    if problems:  # all runs that could be cancelled have been cancelled
        raise problems[0]
    saving = [(group.run(index), result.entry) for index, result in results.items() if result.entry]
    running = [index for index, result in results.items() if result.state != "ended" and index not in pending]
    if wait:
        deadline_s = time.monotonic() + _grace_s(group) + WAIT_MARGIN_S
        saving = [
            (run, entry)
            for run, entry in saving
            if not backend_of(entry).wait_until_gone(run, entry, deadline_s - time.monotonic())
        ]
    state = "cancelling" if saving else "cancelled" if running or pending else "ended"
    return _group_result(group, len(running), len(pending), now, state)


def _grace_s(group: RunGroup) -> float:
    grace_s = group.record.plan["grace_s"]
    assert isinstance(grace_s, int | float)
    return grace_s


def _group_result(group: RunGroup, num_running: int, num_pending: int, now: bool, state: str) -> CancelResult:
    facts: CancelledJson = {
        "run_dir": str(group.path),
        "job_id": group.job_id,
        "state": state,
        "num_running": num_running,
        "num_waiting": num_pending,
    }
    if state == "ended":
        return CancelResult(state, f"all runs of {group.shown} have already ended", facts)
    done, shown = f" {'killed' if now else 'ended'}", ""
    if state == "cancelling":
        verb = (
            " was asked to save a checkpoint and to exit"
            if num_running == 1
            else " were asked to save checkpoints and to exit"
        )
        done = f"{verb} within {_grace_s(group):g} s"
        shown = f"; `trainkit status {group.quoted}` shows the runs"
    counts = ((num_running, done), (num_pending, " removed from the queue"))
    message = ", ".join(f"{plural(count, 'run')}{text}" for count, text in counts if count)
    return CancelResult(state, _naming(group, message + shown), facts)


def _cancel_trials(
    group: RunGroup, running: Sequence[int], pending: Sequence[int], jobs: Sequence[str], now: bool
) -> None:
    """Cancel trials by index.

    `jobs` contains the trials' arrays, and the jobs of trials outside the arrays.
    """
    group.update(cancelled_at=utc_now())
    created = [group.run(index) for index in (*running, *pending) if group.run(index).exists()]
    entries: list[tuple[RunDir, AttemptRecord]] = []
    for run in created:
        with run_lock(run):
            entries.append((run, mark_cancelled(run, now=now)))
    started = [(run, entry) for run, entry in entries if int(run.name) in running]
    if now:
        # Kill the steps before calling scancel, because the SIGTERM from scancel would make the ranks save a
        # checkpoint.
        steps = [(entry.job, step_of(run, entry)) for run, entry in started]
        with contextlib.suppress(UsageError):
            kill_steps([(job, step_id) for job, step_id in steps if step_id is not None])
        cancel(jobs)
    else:
        cancel_waiting(jobs)
        if running:
            # A trial without a run folder does not yet have an agent that could translate the signal for the
            # ranks.
            sent = sent_for(signal.SIGTERM, started) if len(started) == len(running) else signal.SIGTERM
            send_signal(jobs, sent.name)
    for run, entry in entries:
        # The supervisor has been killed or never started, so record the attempt's end here.
        if now or int(run.name) in pending:
            write_cancelled(run, entry, KILLED if now else "cancelled before it started")


def _wait_until_jobs_gone(job_ids: Sequence[str], timeout_s: float, interval_s: float) -> bool:
    """Wait until all jobs have left Slurm's queue; return False if some remain after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while any(in_queue(job) for job in query_jobs(job_ids).values()):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(interval_s, left_s))
    return True
