"""Runs and monitors the srun process of an attempt in a Slurm job, and determines why it was stopped.

The cause is derived from the job's state in Slurm or, if Slurm does not answer, from the set of processes
that received the signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from trainkit.backends.slurm.step import slurm_job_id
from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.allocation import SIGNAL_RECORD_S, AttemptWatch
from trainkit.job.attempt import Attempt
from trainkit.job.decision import RESTART_SIGNAL, PlannedStop
from trainkit.job.failure.launcher_report import (
    first_task_exit,
    node_of_killed_task,
    ran_out_of_memory,
    was_aborted,
)
from trainkit.job.failure.records import first_exit_code, first_rank_failure
from trainkit.job.preflight import SUPERVISOR_VIEW_VARIABLE
from trainkit.job.processes import KILL_MARGIN_S, PEER_EXIT_S, log_line
from trainkit.job.rank_env import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from trainkit.job.signals import AGENT_SIGNAL, is_death_by_stop_signal, signal_exit_code
from trainkit.run.end import Cause
from trainkit.run.events import read_events
from trainkit.run.files import seconds_between
from trainkit.run.record import read_rendezvous
from trainkit.run.rundir import AttemptDir
from trainkit.scheduler import JobState
from trainkit.slurm.control import kill_steps
from trainkit.slurm.jobs import JobDetails

SRUN = 0
EARLY_S = 60.0
"""How many seconds earlier than requested Slurm may send the warning signal."""
SLACK_S = 30.0
"""Maximum time in seconds between a signal and the query about its cause, or between the start of a step and
a signal."""


class SlurmAttemptWatch(AttemptWatch):
    """Monitors the srun process of one attempt.

    On SIGTERM or SIGINT, srun kills the whole step immediately, but it forwards SIGUSR2 to the tasks. The
    trainer's ranks therefore always receive SIGUSR2, no matter which stop signal the supervisor received.
    """

    def __init__(
        self,
        live: Attempt,
        step: Sequence[str],
        supervisor_view: str,
        remaining_s: float = math.inf,
    ) -> None:
        super().__init__(live)
        self._until_s = time.monotonic() + remaining_s
        """The monotonic time at which the run's total time is used up and the ranks must save.
        """
        self.step = step
        self.supervisor_view = supervisor_view
        """The run folder as the supervisor sees it. Each agent compares this view with its own."""
        self._is_ending = False
        self._failed_s: float | None = None
        self._srun_exit: tuple[int, bool, bool, datetime] | None = None
        """srun's exit code, whether srun was killed, whether srun had been asked to kill the step, and the
        time when srun exited.

        This tuple is set without reading the run folder, which may be unavailable when srun exits.
        """
        self._unconfirmed_since_s: float | None = None
        """The monotonic time of a stop signal that the ranks may not have received; inf once that signal has
        been handled."""

    def start(self) -> None:
        environ = {
            **os.environ,
            RUN_DIR_VARIABLE: str(self.attempt.run.path),
            ATTEMPT_VARIABLE: str(self.attempt.number),
            SUPERVISOR_VIEW_VARIABLE: self.supervisor_view,
        }
        if self.plan.slurm is not None and self.plan.slurm.fills_nodes:
            num_cpus = (self.plan.threads_per_worker or 1) * self.plan.workers_per_node
            of_task = str(num_cpus // int(self.plan.slurm.srun["ntasks-per-node"]))
            # Set both variables, because srun reads one or the other depending on its version. Do not pass
            # --cpus-per-task, because srun warns if its value exceeds the job's value.
            environ |= dict.fromkeys(("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"), of_task)
            if given := environ.get("SLURM_TRES_PER_TASK"):  # for example, cpu=8 or cpu:8
                environ["SLURM_TRES_PER_TASK"] = re.sub(r"\b(cpu[=:])\d+", rf"\g<1>{of_task}", given)
        # Create the file here, because an NFS client that looks up a missing file caches the failed lookup
        # for up to a minute.
        with contextlib.suppress(OSError):  # the tasks may create the file too
            self.attempt.rendezvous_file.touch(mode=0o600)
        with self.attempt.supervisor_log.open("ab") as log:
            self.running[SRUN] = processes.start_child(
                self.step, environ=environ, output=log, keeps_mask=False
            )

    def forward_signal(self, received: signal.Signals) -> None:
        """Record only the time when the signal was received.

        If the ranks did not get the signal from Slurm, `_forward_unconfirmed` sends it later. If this process
        forwarded the signal immediately, it could kill a rank that is already saving.
        """
        if self._unconfirmed_since_s is None:
            self._unconfirmed_since_s = time.monotonic()

    def on_signal(self, received: signal.Signals) -> None:
        self.observed.supervisor_was_signalled |= received != signal.SIGUSR2
        if self.observed.stop_signal in (None, RESTART_SIGNAL):
            self.observed.stop_signal = received.name
        self.kill_after_grace()

    def _poll_processes(self) -> None:
        self.live.update()
        self._end_if_superseded()
        self._forward_unconfirmed()
        self._end_after_failure()
        self._leave_early()

    def _end_if_superseded(self) -> None:
        """Have the ranks save and exit if another start of this job has claimed the next attempt.

        The other start of the job waits until this start exits. Two starts can overlap if only the slurmd of
        a host dies: Slurm considers the host lost and restarts the job on other hosts.
        """
        if self.superseded_by is not None:
            return
        newer = self.live.superseding
        if newer is None or newer.pid is None:
            return
        self.superseded_by = newer
        log_line(f"attempt {self.attempt.number}: {newer.takeover}")
        self.stop_ranks(RESTART_SIGNAL)

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        self._unconfirmed_since_s = float("inf")
        self.observed.stop_signal = self.observed.stop_signal or as_if
        # For a COMMAND, signal the agents instead: each agent sends its ranks the stop signal that the
        # COMMAND handles.
        if (
            SRUN in self.running
            and signal_of_ranks(self.attempt) is None
            and (not self.plan.workload.is_command or not self._signal_step(AGENT_SIGNAL))
        ):
            os.kill(self.running[SRUN].pid, signal.SIGUSR2)
        self.kill_after_grace()

    def _forward_unconfirmed(self) -> None:
        """Send SIGUSR2 to the ranks if the stop signal reached only this shell or preceded the step."""
        if self._unconfirmed_since_s is None:
            if self.observed.stop_signal is None and self._requested_signal() is not None:
                self._unconfirmed_since_s = time.monotonic()
            return
        if time.monotonic() < self._unconfirmed_since_s + SIGNAL_RECORD_S:
            return
        self._unconfirmed_since_s = float("inf")
        if signal_of_ranks(self.attempt) is None and SRUN in self.running:
            self.stop_ranks(self._requested_signal() or signal.SIGTERM.name)

    def _leave_early(self) -> None:
        """Have the ranks save and exit once the run has used up its total time across all jobs."""
        is_running = self.observed.stop_signal is None and SRUN in self.running
        if is_running and time.monotonic() >= self._until_s:
            self.leave(PlannedStop("timeout", "the run has used up its total time"))

    def leave(self, planned_stop: PlannedStop) -> None:
        if signal_of_ranks(self.attempt) is None:
            super().leave(planned_stop)

    def _end_after_failure(self) -> None:
        """Kill the step if a rank or agent has failed, because the other ranks might wait for it forever."""
        if self._failed_s is None:
            self.observed.killed_node = node_of_killed_task(self.attempt)
            # A task that exited without a failure record has failed, unless it had received a stop signal.
            # After a stop signal, the other tasks may still be saving.
            if any(self.attempt.errors_dir.glob("rank-*.json")) or (
                first_task_exit(self.attempt) is not None
                and self.observed.stop_signal is None
                and signal_of_ranks(self.attempt) is None
            ):
                self._failed_s = time.monotonic()
        elif time.monotonic() > self._failed_s + PEER_EXIT_S:
            self._failed_s = float("inf")
            first = first_rank_failure(self.attempt)
            has_stop_signal = (
                self.observed.stop_signal is not None or signal_of_ranks(self.attempt) is not None
            )
            if has_stop_signal and first is not None and first.died_of_stop_signal:
                # The rank's agent received the signal too late to handle it, and other ranks may still be
                # saving.
                self.kill_after_grace()
            else:
                self.end_all()

    def end_all(self) -> None:
        """Have srun kill the remaining tasks; later calls have no effect."""
        if SRUN in self.running and not self._is_ending:
            self._is_ending = True
            os.kill(self.running[SRUN].pid, signal.SIGTERM)
            self.kill_within(KILL_MARGIN_S)

    def _kill_running(self) -> None:
        if SRUN in self.running:
            # srun waits for an unresponsive host; if srun is killed, tasks on the unresponsive host may keep
            # running.
            self.observed.step_may_still_run = True
            self._signal_step(signal.SIGKILL)
        super()._kill_running()

    def _signal_step(self, number: signal.Signals) -> bool:
        """Send a signal to the step's tasks through Slurm; return whether the signal could be sent."""
        step_id = read_rendezvous(self.attempt).step_id
        if step_id is None:
            return False  # the step has not reached its rendezvous yet
        try:
            kill_steps([(str(slurm_job_id()), step_id)], number.name, patience_s=0.0)
        except TrainkitError as error:
            log_line(f"cannot send {number.name} to the tasks of the step: {error}")
            return False
        return True

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        self._srun_exit = (code, killed, self._is_ending, datetime.now(timezone.utc))

    def collect(self) -> None:
        if self._srun_exit is None:
            return
        code, was_killed, was_terminated, ended_at = self._srun_exit
        if code == EXIT_OK and was_aborted(self.attempt):
            code = signal_exit_code(signal.SIGTERM)
        # srun returns the exit code of the task that died last, but the failure records show which task
        # failed first.
        if not was_terminated and not was_killed:
            self.observed.killed_node = node_of_killed_task(self.attempt)
        first_code = first_exit_code(self.attempt) if code not in (EXIT_OK, EXIT_STOPPED) else None
        if first_code is None and ran_out_of_memory(self.attempt):
            first_code = signal_exit_code(signal.SIGKILL)  # srun returns 1 if the kernel killed an agent
        self.observed.exits = [(SRUN, code if first_code is None else first_code)]
        if self.observed.stop_signal is None:
            self.observed.stop_signal = signal_of_ranks(self.attempt)
        if self.observed.stop_signal is None and any(map(is_death_by_stop_signal, self.observed.exit_codes)):
            # The signal for a cancel or requeue request killed the ranks before they had installed their
            # signal handlers.
            self.live.update()
            self.observed.stop_signal = self._requested_signal()
        # Agents kill their workers after the grace time, so srun may exit late even if it was not killed.
        signals = read_events(self.attempt.run, "signal", attempt=self.attempt.number)
        since_s = (seconds_between(event.time, ended_at) or 0.0 for event in signals)
        is_late = was_killed or any(seconds >= self.plan.grace_s for seconds in since_s)
        self.observed.out_of_time = self.observed.stop_signal is not None and is_late


def signal_of_ranks(attempt: AttemptDir) -> str | None:
    """Return the stop signal that the first agent recorded for the tasks, or None if it recorded none."""
    found = read_events(attempt.run, "signal", attempt=attempt.number)
    names = [event.text("signal") for event in found]
    overriding = [name for name in names if name != RESTART_SIGNAL] or names
    return str(overriding[0]) if overriding else None


def termination_cause(
    stop_signal: str,
    job: JobDetails | None,
    grace_s: float,
    *,
    supervisor_was_signalled: bool,
    restarts: int,
    lost: bool,
    notice: str = RESTART_SIGNAL,
) -> Cause | None:
    """Return the cause of a stop signal, or None if a user cancelled the job.

    `supervisor_was_signalled` means that the batch shell also received the signal. During the grace time of a
    preemption, Slurm signals only the steps, not the batch shell. `restarts` is the job's restart count when
    this start began. `lost` means that one of the job's hosts does not respond. `notice` is the warning
    signal before the time limit.
    """
    if job is None:
        if stop_signal == RESTART_SIGNAL:
            return "timeout"
        return None if supervisor_was_signalled or stop_signal == signal.SIGINT.name else "preempted"
    if job.restarts > restarts or job.state.is_waiting:
        # Slurm is requeuing the job, because the job was preempted without grace time or lost a host.
        return "node_fail" if lost else "preempted"
    if job.is_preempted:
        return "preempted"
    if job.state in (JobState.CANCELLED, JobState.COMPLETED, JobState.FAILED):
        return None
    if job.state is JobState.NODE_FAIL:
        return "node_fail"
    if job.state is JobState.TIMEOUT or job.reason == "TimeLimit":
        return "timeout"
    if stop_signal == RESTART_SIGNAL:
        return "timeout" if is_nearly_over(job, grace_s) else "asked"
    return (
        "timeout"
        if stop_signal == notice and not supervisor_was_signalled and is_nearly_over(job, grace_s)
        else None
    )


def is_ending(job: JobDetails, restarts: int, grace_s: float) -> bool:
    """Return whether Slurm is terminating this start of a job, or is about to terminate it."""
    return is_taken(job, restarts) or is_nearly_over(job, grace_s)


def is_taken(job: JobDetails | None, restarts: int) -> bool:
    """Return whether Slurm is terminating this start (preempted, cancelled, out of time or requeued)."""
    if job is None:
        return False
    return job.state is not JobState.RUNNING or job.restarts > restarts or job.is_preempted


def is_nearly_over(job: JobDetails | None, grace_s: float) -> bool:
    """Return whether a job's remaining time is barely longer than the grace time; False if unknown."""
    if job is None or job.end_time is None:
        return False
    return job.end_time - datetime.now(timezone.utc) < timedelta(seconds=grace_s + EARLY_S + SLACK_S)
