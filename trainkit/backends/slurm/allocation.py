"""Runs a run's attempts on the hosts that Slurm allocated to a job."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainkit.backends.slurm.attempt_watch import (
    SlurmAttemptWatch,
    is_ending,
    is_nearly_over,
    is_taken,
    signal_of_ranks,
    termination_cause,
)
from trainkit.backends.slurm.claim_attempt import claim_attempt, register_start
from trainkit.backends.slurm.failed_starts import close_failed_starts, forget_start
from trainkit.backends.slurm.group_chunks import submit_chunks
from trainkit.backends.slurm.resubmit import (
    await_eviction,
    exclude_from,
    lost_hosts,
    resubmit,
    start_host_watch,
)
from trainkit.backends.slurm.step import step_argv
from trainkit.capability import Hosts
from trainkit.cluster.bad_nodes import Kind, excluded, note_failure
from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.allocation import CANCELLED, Allocation, AttemptWatch, refused
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_end import (
    close_dead_attempts,
    judge,
    previous_ends,
    reached_its_stop,
    remaining_s,
    write_end,
)
from trainkit.job.decision import (
    RESTART_SIGNAL,
    Decision,
    Observed,
    Outcome,
    PlannedStop,
    RestartOptions,
    decide_no_start,
    decide_stranded,
)
from trainkit.job.failure.launcher_report import hosts_without_launch, launch_error
from trainkit.job.failure.records import find_first_failure, signal_of_death, suspect_host
from trainkit.job.hangs import silent_hosts
from trainkit.job.outcome import NOT_RUN, outcome_of
from trainkit.job.preflight import supervisor_view
from trainkit.job.processes import log_line, retry_on_disk_error
from trainkit.plan.launch import LaunchPlan, SlurmRequest, plan_text, resized
from trainkit.run.end import SIGNALLED, Cause, RankFailure
from trainkit.run.files import refresh_listing
from trainkit.run.group import create_task_run, group_of
from trainkit.run.record import (
    AUTO_RESTART,
    JobRecord,
    read_job,
    record_of,
    write_plan,
)
from trainkit.run.rundir import AttemptDir, RunDir, RunLocked, run_lock
from trainkit.run.submitted import read_submitted, require_submitted_group
from trainkit.scheduler import JobInfo, JobState, expand_hosts
from trainkit.shipped import Guard
from trainkit.slurm.client import JOB_TIMEOUT_S, QUERY_PATIENCE_S, SlurmUnreachable
from trainkit.slurm.control import cancel, cancel_waiting, requeue
from trainkit.slurm.hosts import is_drained, is_unavailable, node_states
from trainkit.slurm.jobs import JobDetails, job_details

NOTICE_S = 5.0
"""Seconds to wait, after a signal killed a rank, for the same signal to reach the supervisor; slurmstepd may
signal the rank first."""
NOTICE_POLL_S = 0.5
QUERY_PATIENCE_RESTART_S = 300.0
"""Seconds for which queries are retried while Slurm's controller is unavailable, if a step may have to be
restarted.
"""
REQUEUE_PATIENCE_S = 600.0
"""Seconds for which a requeue is retried while the controller is unavailable; giving up would leave the saved
run without a job."""
ROOM_PATIENCE_S = 20.0
"""Seconds for which a job that is about to exit retries submitting trials while Slurm accepts no more
jobs."""


def query_job(job_id: str, patience_s: float = QUERY_PATIENCE_S) -> JobDetails | None:
    """Return a job's current state in Slurm, or None if Slurm does not answer or no longer knows the job."""
    try:
        return job_details(job_id, timeout_s=JOB_TIMEOUT_S, patience_s=patience_s)
    except TrainkitError as error:
        print(f"cannot query job {job_id}: {error.message}", flush=True)
        return None


class SlurmAllocation(Allocation):
    """The allocation for one start of a Slurm job."""

    lock_timeout_s = 600.0
    """On a network filesystem, locks held by a dead node are released after about 90 s, but on some
    filesystems much later."""

    def __init__(self, run: RunDir, job_id: str, step: Sequence[str]) -> None:
        super().__init__(run)
        self.job_id = job_id
        self.step = step
        """The step's command line, as in the batch script."""
        self.hosts = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
        self.bad: set[str] = set()
        """Hosts where no more steps are started, because the hosts are lost or slow, or have failed."""
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        """How many times the job had been restarted when this start began (SLURM_RESTART_COUNT)."""
        self.step_may_still_run = False
        """True if an earlier step could not be killed on all hosts, so that Slurm may still consider it
        running."""
        self.job: JobDetails | None = None
        """The job as of the last query, or None if Slurm did not answer."""
        self._host_watch: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Delete the record that marks this start as failed, because its supervisor has begun."""
        try:
            forget_start(self.run, self.job_id)
        except OSError as error:
            log_line(f"cannot remove the record of this start: {error}")

    def end(self) -> None:
        """Submit trials of this run's group that Slurm did not accept earlier because of a job limit."""
        run = self.run
        try:
            if (group := group_of(run)) is not None and group[0].unsubmitted:
                require_submitted_group(group[0])
                submit_chunks(group[0], log_line, size=1, patience_s=ROOM_PATIENCE_S)
        except (TrainkitError, OSError) as error:
            log_line(f"cannot submit more trials of {run.path.parent}: {error}")

    def claim(self) -> AttemptDir | Decision:
        # Without this refresh, an attempt that was resumed from another host may be missing from the listing.
        refresh_listing(self.run.attempts_dir)
        if (numbers := self.run.attempt_numbers()) and self.run.exists():
            newest = self.run.attempt(numbers[-1])
            entry = record_of(newest)
            refusal = refused(newest, entry if entry.job_id == self.job_id else None)
            if refusal is not None:
                return refusal
        elif (found := group_of(self.run)) is not None:  # only an array task can start without a run folder
            require_submitted_group(found[0])
            create_task_run(self.run, self.job_id)
        attempt = retry_on_disk_error(lambda: claim_attempt(self.run, self.job_id, self.lock_timeout_s))
        if isinstance(attempt, AttemptDir):
            return attempt
        log_line(f"nothing to do for job {self.job_id}: {attempt.reason}")
        if attempt.cancelled is not None:
            with contextlib.suppress(OSError):
                decision = Decision("stopped", CANCELLED, EXIT_STOPPED)
                write_end(attempt.cancelled, record_of(attempt.cancelled), NOT_RUN, decision)
        return Decision("stopped", attempt.reason, EXIT_OK)

    def register(self, attempt: AttemptDir) -> str:
        register_start(attempt, self.job_id, AUTO_RESTART)
        return self.job_id

    def close_dead_attempts(self, attempt: Attempt) -> Decision | None:
        now = JobInfo(self.job_id, JobState.RUNNING, restarts=self.restarts)
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        try:
            close_failed_starts(self.run, attempt.job, now, cluster, log_line)
        except OSError as error:
            log_line(f"cannot record the failed starts of earlier jobs ({error})")
        # Ignore an unreadable attempt here, because running the attempt raises the error.
        with contextlib.suppress(OSError, ValueError, TrainkitError):
            return close_dead_attempts(attempt, attempt.plan.requeue, self.is_down)
        return None

    def fitted(self, attempt: Attempt) -> LaunchPlan:
        plan = attempt.plan
        fitting, changes = plan.at(len(self.good_hosts)), dict[str, Any]()
        # The value has a format such as 64(x2),128.
        counts = re.findall(r"(\d+)(?:\(|,|$)", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        threads = min(map(int, counts), default=0) // plan.workers_per_node
        if (
            plan.slurm is not None
            and plan.slurm.fills_nodes
            and threads not in (0, fitting.threads_per_worker)
        ):
            changes = {"threads_per_worker": threads}
        if fitting is plan and not changes:
            return plan
        content = read_submitted(attempt.folder)
        content = content if fitting is plan else resized(content, fitting.num_nodes)
        retry_on_disk_error(lambda: write_plan(attempt.folder, plan_text({**content, **changes})))
        return replace(fitting, **changes)

    def place(self, plan: LaunchPlan) -> dict[str, object]:
        partition = os.environ.get("SLURM_JOB_PARTITION", "")
        request = plan.slurm or SlurmRequest()
        threads = plan.threads_per_worker if request.fills_nodes else None
        found = {
            "partition": partition,
            "gpu_type": request.gpu_types.get(partition),
            "threads_per_worker": threads,
        }
        return {name: value for name, value in found.items() if value}

    def watch(self, attempt: Attempt) -> AttemptWatch:
        folder, plan = attempt.folder, attempt.plan
        view = retry_on_disk_error(lambda: supervisor_view(folder))
        own = os.environ.get("SLURMD_NODENAME", self.hosts[0])
        others = [host for host in self.good_hosts if host != own]
        is_watched = self._host_watch is not None and not processes.ended(self._host_watch)
        if plan.may_lose_nodes and others and not is_watched:
            self._host_watch = start_host_watch(own, others[-1], folder.batch_host_log)
        argv = step_argv(self.step, plan, self.good_hosts, overlap=self.step_may_still_run)
        until_total_s = retry_on_disk_error(lambda: remaining_s(attempt))
        return SlurmAttemptWatch(attempt, argv, view, until_total_s)

    @property
    def job_hosts(self) -> Hosts:
        return Hosts(self.hosts, self.good_hosts)

    @property
    def good_hosts(self) -> list[str]:
        return [host for host in self.hosts if host not in self.bad]

    def outcome(self, attempt: Attempt) -> Outcome:
        return self._outcome(attempt, attempt.observed, NOT_RUN)

    def _outcome(self, live: Attempt, observed: Observed, before: Outcome) -> Outcome:
        """Return the outcome of an attempt.

        If a signal arrived during the delay before a restart, `before` is the outcome before the signal.
        """
        attempt, plan = live.folder, live.plan
        stop, codes = observed.stop_signal, observed.exit_codes
        is_finished = plan.workload.is_finished(was_stopped=stop is not None, is_done=False)
        if is_finished and all(code == EXIT_OK for code in codes):
            return outcome_of(attempt, plan, observed)
        self.step_may_still_run |= observed.step_may_still_run
        saved = all(code in (EXIT_OK, EXIT_STOPPED) for code in codes)
        # After a failure, retry the query for longer, because a restart needs the controller. After a stop
        # signal, there is no time to wait.
        is_urgent = saved or stop is not None
        self.job = query_job(self.job_id, QUERY_PATIENCE_S if is_urgent else QUERY_PATIENCE_RESTART_S)
        is_running = self.job is not None and self.job.state is JobState.RUNNING
        if saved and stop is None:
            ends = self.job is not None and is_ending(self.job, self.restarts, plan.grace_s)
            if not ends or reached_its_stop(attempt):
                return outcome_of(attempt, plan, observed)
            # The ranks received a signal that could not be recorded, for example because the disk is full.
            stop = RESTART_SIGNAL if is_running else signal.SIGTERM.name
        # If Slurm does not answer, do not exclude any host. If a host is in fact lost, the next start fails
        # and reports the host.
        lost = lost_hosts(self.job_id, self.good_hosts, is_running=is_running) or ()
        error = before.launch_error
        failure = find_first_failure(attempt, plan, observed, before.lost_nodes, error)
        sent, was_signalled = signal_of_death(failure, codes), observed.supervisor_was_signalled
        if stop is None and not (lost or observed.hangs):
            stop, was_signalled = self._find_notice(attempt, plan, observed, sent)
            # Store the signal: after a disk error, this whole method is repeated, but the signal is received
            # only once.
            observed.stop_signal, observed.supervisor_was_signalled = stop, was_signalled
        if stop is None and not any(attempt.errors_dir.glob("rank-*.json")):
            output = attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
            error = launch_error(output)
            lost = lost or self._replaceable(hosts_without_launch(output), plan)
        if observed.hangs and not lost:
            # Slurm may need minutes to notice that a host is unreachable.
            lost = self._replaceable(silent_hosts(attempt, plan, observed.hangs), plan)
        if lost or error is not None:  # lost hosts and failed launches take precedence over rank failures
            failure = find_first_failure(attempt, plan, observed, lost, error)
        # srun waits up to a minute for a lost host, so the step may still be running.
        self.step_may_still_run |= bool(lost)
        cause: str | None = self._cause(plan, stop, was_signalled=was_signalled, lost=bool(lost))
        planned_stop = observed.planned_stop
        is_unexplained = cause is None and planned_stop is None and not (lost or observed.hangs)
        if is_unexplained and (stop or sent) and (host := self._drained_host()):
            stop = stop or sent
            planned_stop, cause = PlannedStop("preempted", f"{host} is drained", host), "preempted"
        elif planned_stop is not None and (self.job is None or cause == "asked"):
            cause = planned_stop.cause
        outcome = outcome_of(
            attempt,
            plan,
            replace(observed, stop_signal=stop),
            cause=cause,
            planned_stop=planned_stop,
            lost_nodes=lost,
            launch_error=error,
            failure=failure,
            had_failed=before.first_failed_node is not None,
        )
        self.bad.update(lost)
        if observed.planned_stop is not None and observed.planned_stop.host is not None:
            self.bad.add(observed.planned_stop.host)
        return outcome

    def _find_notice(
        self, attempt: AttemptDir, plan: LaunchPlan, observed: Observed, sent: str | None
    ) -> tuple[str | None, bool]:
        """Find out which stop signal terminated the ranks, if they exited before the signal was recorded.

        Also returns whether the supervisor received the stop signal. Returns no signal if the ranks crashed.
        `sent` is the signal that killed a rank. The supervisor may receive the same signal slightly later.
        """
        # A command's signal handler may exit with any code.
        is_any_code = plan.workload.is_command and all(code < SIGNALLED for code in observed.exit_codes)
        stop, was_signalled = None, observed.supervisor_was_signalled
        if sent is not None and not is_taken(self.job, self.restarts):
            stop, is_here = self._await_notice(attempt)
            was_signalled |= is_here
            self.job = query_job(self.job_id)
        if stop is None and (sent or is_any_code) and is_taken(self.job, self.restarts):
            stop = sent or signal.SIGTERM.name
        return stop, was_signalled

    def _await_notice(self, attempt: AttemptDir) -> tuple[str | None, bool]:
        """Wait up to `NOTICE_S` for a stop signal; return its name, and whether this process received it."""
        deadline_s = time.monotonic() + NOTICE_S
        while (found := signal_of_ranks(attempt)) is None and (
            remaining_s := deadline_s - time.monotonic()
        ) > 0:
            received = processes.wait_for_signal(min(remaining_s, NOTICE_POLL_S))
            if received not in (None, signal.SIGCHLD):
                return received.name, received != signal.SIGUSR2
        return found, False

    def _drained_host(self) -> str | None:
        """Return a host of the running job that is being drained, or None if no host is being drained."""
        if self.job is None or is_taken(self.job, self.restarts):
            return None
        try:
            states = node_states(self.good_hosts)
        except TrainkitError as error:
            log_line(f"cannot query the states of {', '.join(self.good_hosts)}: {error.message}")
            return None
        return next((host for host in self.good_hosts if is_drained(states.get(host, ""))), None)

    def _cause(
        self, plan: LaunchPlan, stop_signal: str | None, *, was_signalled: bool, lost: bool = False
    ) -> Cause | None:
        """Return why the job received a stop signal.

        `was_signalled` means that this process also received the signal, and `lost` means that the job has
        lost a host.
        """
        if stop_signal is None:
            return None
        option = "" if plan.slurm is None else str(plan.slurm.sbatch.get("signal", ""))
        return termination_cause(
            stop_signal,
            self.job,
            plan.grace_s,
            supervisor_was_signalled=was_signalled,
            restarts=self.restarts,
            lost=lost,
            notice=f"SIG{option.partition('@')[0]}",
        )

    def _replaceable(self, hosts: Sequence[str], plan: LaunchPlan) -> tuple[str, ...]:
        """Return the unresponsive hosts if the run can continue without them, or else an empty tuple."""
        return tuple(hosts) if len(self.good_hosts) - len(hosts) >= plan.fewest_nodes else ()

    def is_down(self, host: str) -> bool:
        """Return whether Slurm reports a host as unavailable; False if Slurm does not answer."""
        try:
            return is_unavailable(node_states([host]).get(host, ""))
        except TrainkitError as error:
            log_line(f"cannot query the state of {host}: {error.message}")
            return False

    def record_suspect(self, attempt: Attempt, failure: RankFailure | None) -> bool:
        """Stop using the host that probably caused a failure; record the host, so that later jobs exclude it.

        A host whose ranks were only killed or hung is used until its second failure in the run.
        """
        before = len(self.bad)
        hosts, guard = self.job_hosts, Guard(attempt.plan.parts, log_line)
        for _, avoided in guard.each(lambda one: one.hosts_to_leave(attempt.folder, attempt.plan, hosts)):
            self.bad |= {*avoided}
        suspect = None if failure is None else suspect_host(failure)
        # to exclude a host, Slurm needs its name from the job's host list
        if suspect is not None and suspect[0] in self.hosts:
            self._note(attempt, *suspect, str(failure and failure.message))
        return len(self.bad) > before

    def _note(self, attempt: Attempt, host: str, kind: Kind, reason: str) -> None:
        failures = (end.verdict for end in previous_ends(attempt.folder, attempt.job).values())
        previous = [suspect_host(failure) for failure in failures if failure is not None]
        if kind != "culprit" or (host, kind) in previous:
            self.bad.add(host)
        try:
            cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
            note_failure(cluster, host, kind, reason, run=str(attempt.run.path), attempt=attempt.number)
        except OSError as error:
            log_line(f"cannot record that {host} failed: {error}")

    def hosts_to_exclude(self) -> list[str]:
        """Return the hosts that failed in this or an earlier job.

        The next start should exclude these hosts.
        """
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        return sorted({*self.bad, *excluded(cluster, run=str(self.run.path))})

    def restart_options(self, attempt: Attempt) -> RestartOptions:
        job, plan = self.job, attempt.plan
        may_requeue = job is None or job.may_requeue
        is_ours = job is not None and job.state is JobState.RUNNING and not self.is_being_requeued
        return RestartOptions(
            # Slurm sends the warning signal before the time limit only once, so a step that starts after the
            # signal would not receive it.
            restart=is_ours
            and len(self.good_hosts) >= plan.fewest_nodes
            and not is_nearly_over(job, plan.grace_s),
            requeue=may_requeue and shutil.which("scontrol") is not None,
            resubmit=not may_requeue and shutil.which("sbatch") is not None,
            follow_up=bool(attempt.job.waiting),
            unavailable_reason="this host has neither scontrol nor sbatch, and requeue.follow_ups is 0",
        )

    def after_notice(self, attempt: Attempt, received: signal.Signals) -> Decision:
        # Either Slurm is terminating the allocation, or a user cancelled the job; the job's state shows which
        # is the case.
        observed = replace(attempt.observed, stop_signal=received.name, supervisor_was_signalled=True)
        attempt.outcome = self._outcome(attempt, observed, attempt.outcome)
        attempt.update()
        return judge(attempt, self.restart_options(attempt))

    def after_lock(self, attempt: Attempt, locked: RunLocked) -> Decision:
        # Retry in a later start of the job, because the file server will eventually release the locks of a
        # dead host.
        self.job = query_job(self.job_id)
        attempt.update()
        starts = list(previous_ends(attempt.folder, attempt.job).values())
        options = self.restart_options(attempt)
        decision = decide_no_start(locked.message, EXIT_FAILED, starts, options, in_place=False)
        if not decision.resumes:
            decision = replace(decision, details="; ".join(filter(None, (decision.details, locked.hint))))
        return decision

    def leave_unclaimed(self, locked: RunLocked) -> Decision:
        unclaimed = super().leave_unclaimed(locked)
        # Never break the lock: a host that Slurm considers lost may only be disconnected from the controller
        # and still write to the run folder. The file server releases the locks of a dead host, usually within
        # two minutes, but sometimes only after the host reboots.
        try:
            plan = LaunchPlan.from_dict(read_submitted(self.run))
            self.job = query_job(self.job_id)
            cause = self._cause(plan, signal.SIGTERM.name, was_signalled=True)
            if locked.stopped and cause not in plan.requeue.on:
                return unclaimed
            # Do not count an attempt that stopped at the end of its time slice as a restart.
            sliced = [] if plan.requeue.total_s is None else read_job(self.run).of_job(self.job_id)
            if self.restarts >= plan.requeue.max + len(sliced):
                log_line(f"not requeued: requeue.max is {plan.requeue.max}")
                return replace(unclaimed, exit_code=EXIT_FAILED)
            if not self.is_being_requeued:
                log_line(f"requeuing job {self.job_id} to try again later")
                requeue(self.job_id, patience_s=REQUEUE_PATIENCE_S)
            self._leave_requeued(plan)
        except (OSError, ValueError, TrainkitError) as error:
            log_line(f"not requeued: {error}")
            return replace(unclaimed, exit_code=EXIT_FAILED)
        return Decision("requeue", locked.message, EXIT_STOPPED)

    def release(self, attempt: Attempt, decision: Decision) -> Decision:
        try:
            if decision.action == "resubmit":
                resubmit(self.run, self.job_id, self.hosts_to_exclude(), self.lock_timeout_s)
            elif decision.action == "requeue":
                self._request_requeue(attempt)
                self._leave_requeued(attempt.plan)
        except TrainkitError as error:
            # Either an administrator has disabled requeueing, or the controller has been unavailable for
            # several minutes.
            return decide_stranded(decision, attempt.outcome, error.message)
        except OSError as error:
            problem = f"{self.run.path} cannot be written ({error})"
            return decide_stranded(decision, attempt.outcome, problem)
        return decision

    def _request_requeue(self, attempt: Attempt) -> None:
        """Requeue the job while holding the run's lock, unless this would undo another user action.

        Because of the lock, a concurrent `trainkit cancel` takes effect either before or after the requeue.
        While Slurm does not answer, the lock is released, so that `trainkit cancel` need not wait.
        """
        give_up_s = time.monotonic() + REQUEUE_PATIENCE_S
        while not self.is_being_requeued:
            try:
                with run_lock(self.run, self.lock_timeout_s):
                    self._refuse_unwanted(attempt)
                    return requeue(self.job_id, patience_s=QUERY_PATIENCE_S)
            except SlurmUnreachable:
                if time.monotonic() > give_up_s:
                    raise
                # Slurm may have requeued the job even if its answer was lost
                self.job = query_job(self.job_id) or self.job

    def _refuse_unwanted(self, attempt: Attempt) -> None:
        """Raise TrainkitError if a requeue would undo a user's action, such as a cancellation."""
        attempt.update()
        newest = attempt.job.newest
        if newest is not None and newest.job_id != self.job_id:
            raise TrainkitError(f"job {newest.job_id} has taken over the run")
        if (newest is not None and newest.is_cancelled) or self.was_cancelled_meanwhile():
            raise TrainkitError("the run was cancelled in the meantime")

    def _leave_requeued(self, plan: LaunchPlan) -> None:
        """Exclude bad hosts from the job's next start, and wait until Slurm terminates this start."""
        if self.bad and plan.slurm is not None:
            exclude_from(self.job_id, self.hosts_to_exclude(), plan.slurm)
        if not (self.is_completing or self.is_being_requeued):
            await_eviction()

    @property
    def is_being_requeued(self) -> bool:
        """Return whether Slurm is requeuing the job, or has already restarted it."""
        return self.is_queued or (self.job is not None and self.job.restarts > self.restarts)

    def was_cancelled_meanwhile(self) -> bool:
        """Return whether a user has cancelled the job since the last query; if so, do not requeue it."""
        if self.job is None or self.job.state is not JobState.RUNNING:
            return False
        now = query_job(self.job_id, QUERY_PATIENCE_S)
        if now is None:
            return False
        by_slurm = now.is_preempted or now.restarts > self.restarts or now.reason == "TimeLimit"
        return now.state in (JobState.CANCELLED, JobState.COMPLETING) and not by_slurm

    @property
    def is_queued(self) -> bool:
        """Return whether Slurm has put the job back in the queue."""
        return self.job is not None and self.job.state.is_waiting

    @property
    def is_completing(self) -> bool:
        """Return whether Slurm is terminating the job and is only waiting for this batch shell."""
        return self.job is not None and self.job.state is JobState.COMPLETING

    def cancel_pending(self, job: JobRecord) -> None:
        """Cancel the chained jobs, and also this job if Slurm is requeuing it after losing a host.

        If another start of this job is already running on other hosts, the job is not cancelled.
        """
        if shutil.which("scancel") is None:
            return
        waiting = [*job.waiting, *([self.job_id] if self.is_queued else [])]
        try:
            cancel_waiting(waiting)
            if self.is_completing and self.is_being_requeued:
                # Slurm puts the job back in the queue only after this shell has exited.
                cancel([self.job_id])
        except TrainkitError as error:
            log_line(f"cannot cancel {', '.join(waiting) or self.job_id}: {error.message}")
