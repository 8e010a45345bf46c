"""The hosts and the time that Slurm has given to this start of a job, and what can be done with them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from trainkit.cluster.bad_nodes import excluded, note_failure
from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.decision import COMEBACK_SIGNAL, RestartOptions
from trainkit.job.failure.termination_cause import EARLY_S, is_ending, look_at_job, termination_cause
from trainkit.job.failure.verdict import blamed_host
from trainkit.job.history import past_verdicts, reached_its_stop
from trainkit.job.interpreter import module_argv
from trainkit.job.nodes import (
    choose_hosts,
    hosts_that_could_not_start,
    lost_hosts,
    step_argv,
    why_not_started,
)
from trainkit.job.outcome import Outcome
from trainkit.job.record import read_job
from trainkit.job.watch.hangs import silent_hosts
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir
from trainkit.slurm.client import QUERY_PATIENCE_S
from trainkit.slurm.hosts import expand_hosts, is_out, node_states
from trainkit.slurm.jobs import JobDetails
from trainkit.slurm.states import JobState

PATIENCE_S = 300.0
"""How long Slurm's controller may be away when a step is to be started again."""
START_S = 30.0
"""An allocation with less time than this before it may be told to save is no place to start again in."""


class Allocation:
    """What one start of a job has."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.hosts = expand_hosts(os.environ["SLURM_JOB_NODELIST"])
        self.bad: dict[str, str] = {}
        """Hosts that no step is started on any more, with the reason."""
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        """How often Slurm had started the job again when this start of it began."""
        self._guard: subprocess.Popen[bytes] | None = None
        self.has_remains = False
        """Whether Slurm takes a step for running that could not be ended on all hosts."""
        self.job: JobDetails | None = None
        """What Slurm said last; None when it did not answer."""

    def step_argv(self, step: Sequence[str], plan: LaunchPlan) -> list[str]:
        """The argv of the step on hosts that are good; as it stands in the script where all are needed."""
        return step_argv(
            step, plan, choose_hosts(self.hosts, self.bad, plan.num_nodes), beside=self.has_remains
        )

    @property
    def good_hosts(self) -> list[str]:
        return [host for host in self.hosts if host not in self.bad]

    def keep_guard(self, plan: LaunchPlan, log: Path) -> None:
        """Have another host watch over this one, where Slurm would not bring the job back without it."""
        others = self.good_hosts[1:] if self.good_hosts[:1] == self.hosts[:1] else self.good_hosts
        is_there = self._guard is not None and not processes.ended(self._guard)
        if not plan.spare_nodes or not others or is_there:
            return
        step = ["srun", "--overlap", "--mem=0", "--nodes=1", "--ntasks=1", f"--nodelist={others[-1]}"]
        argv = [*step, "--input=none", *module_argv("trainkit.job.guard")]
        with log.open("ab") as output:
            self._guard = processes.start_child(argv, environ=os.environ, output=output, keeps_mask=False)

    def look(self, attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> None:
        """Ask Slurm about the job and its hosts after a step that did not just finish."""
        if all(code == EXIT_OK for code in outcome.exit_codes):
            return
        self.has_remains |= outcome.has_remains
        saved = all(code in (EXIT_OK, EXIT_STOPPED) for code in outcome.exit_codes)
        # Without the controller no step can be started: a failure waits for it, a notice has no time to.
        self.job = look_at_job(
            self.job_id, QUERY_PATIENCE_S if saved or outcome.request is not None else PATIENCE_S
        )
        if saved and outcome.request is None:
            ends = self.job is not None and is_ending(self.job, self.restarts, plan.grace_s)
            if not ends or reached_its_stop(attempt):
                return
            # They did not do so by themselves: who was told could not write it down, as on a full disk.
            is_running = self.job is not None and self.job.state is JobState.RUNNING
            outcome.request = COMEBACK_SIGNAL if is_running else signal.SIGTERM.name
        # What Slurm does not say is no reason to give a host up: the next start will show.
        is_running = self.job is not None and self.job.state is JobState.RUNNING
        lost = lost_hosts(self.job_id, self.good_hosts, is_running=is_running) or ()
        if outcome.request is None and not any(attempt.errors_dir.glob("rank-*.json")):
            said = attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
            outcome.not_started = why_not_started(said)
            lost = lost or self._spared(hosts_that_could_not_start(said), plan)
        if outcome.hung and not lost:
            # Slurm may take minutes to notice that a host is cut off.
            lost = self._spared(silent_hosts(attempt, plan, outcome.hangs), plan)
        self.bad |= dict.fromkeys(lost, "lost")
        outcome.lost_nodes = lost
        if outcome.request is not None:
            outcome.cause = termination_cause(
                outcome.request,
                self.job,
                plan.grace_s,
                shell_was_told=outcome.shell_was_told,
                restarts=self.restarts,
                lost=bool(lost),
                notice=_notice(plan),
            )

    def _spared(self, hosts: Sequence[str], plan: LaunchPlan) -> tuple[str, ...]:
        """Hosts that do not answer, where there are others to take their place."""
        return tuple(hosts) if len(self.good_hosts) - len(hosts) >= plan.num_nodes else ()

    def is_out(self, host: str) -> bool:
        """Whether Slurm says that a host, of whatever start, is down; no when it does not answer."""
        try:
            return is_out(node_states([host]).get(host, ""))
        except TrainkitError as error:
            print(f"Slurm does not say how {host} is: {error.message}", flush=True)
            return False

    def blame(self, attempt: AttemptDir, verdict: dict[str, Any] | None) -> None:
        """Give up the host that a failure speaks against, and remember it for later jobs.

        One at which the ranks only died, or hung, is given up when that happens in a run for the second time.
        """
        blamed = None if verdict is None else blamed_host(verdict)
        if verdict is None or blamed is None:
            return
        host, kind = blamed
        if host not in self.hosts:
            return  # a name that Slurm does not know: no step or job can be kept from it
        before = [blamed_host(earlier) for earlier in past_verdicts(attempt)]
        if kind != "culprit" or blamed in before:
            self.bad[host] = "lost" if kind == "died" else "failed"
        try:
            cluster, words = os.environ.get("SLURM_CLUSTER_NAME", ""), str(verdict["message"])
            note_failure(cluster, host, kind, words, run=str(attempt.run.path), attempt=attempt.number)
        except OSError as error:
            print(f"that {host} failed could not be written down: {error}", flush=True)

    def hosts_to_avoid(self) -> list[str]:
        """What the next start of the run should do without: given up here, or remembered from before."""
        return sorted({*self.bad, *excluded(os.environ.get("SLURM_CLUSTER_NAME", ""))})

    def means(self, plan: LaunchPlan, run: RunDir) -> RestartOptions:
        """The ways in which the run can start again at this moment."""
        job = self.job
        num_good = len(self.good_hosts)
        may_requeue = job is None or job.may_requeue
        is_ours = job is not None and job.state is JobState.RUNNING and not self.is_being_requeued
        return RestartOptions(
            restart=is_ours and num_good >= plan.num_nodes and self.has_time(plan),
            requeue=may_requeue and shutil.which("scontrol") is not None,
            resubmit=not may_requeue and shutil.which("sbatch") is not None,
            follow_up=bool(follow_ups_of(run, self.job_id)),
            why_not="this host has neither scontrol nor sbatch, and requeue.follow_ups is 0",
        )

    @property
    def is_being_requeued(self) -> bool:
        """Whether Slurm starts the job again without being asked to."""
        return self.is_queued_again or (self.job is not None and self.job.restarts > self.restarts)

    def was_cancelled_meanwhile(self) -> bool:
        """Whether a person has ended the job since it was looked at: to requeue it would undo that."""
        if self.job is None or self.job.state is not JobState.RUNNING:
            return False
        now = look_at_job(self.job_id, QUERY_PATIENCE_S)
        if now is None:
            return False
        comes_back = now.is_preempted or now.restarts > self.restarts or now.reason == "TimeLimit"
        return now.state in (JobState.CANCELLED, JobState.COMPLETING) and not comes_back

    @property
    def is_queued_again(self) -> bool:
        """Whether the job waits in the queue to be started again."""
        return self.job is not None and self.job.state.is_waiting

    @property
    def is_being_taken(self) -> bool:
        """Whether Slurm ends the job already, and waits only for this shell."""
        return self.job is not None and self.job.state is JobState.COMPLETING

    def has_time(self, plan: LaunchPlan) -> bool:
        """Whether a step that is started now has some time before it can be told that its time is over.

        Slurm tells that once: what is started later would not hear it.
        """
        left_s = self.time_left_s()
        return left_s is None or left_s > plan.grace_s + EARLY_S + START_S

    def time_left_s(self) -> float | None:
        """Seconds until Slurm ends the job; None when that is not known."""
        if self.job is None or self.job.end_time is None:
            return None
        return (self.job.end_time - datetime.now(timezone.utc)).total_seconds()


def _notice(plan: LaunchPlan) -> str:
    """The signal by which Slurm announces the end of the job's time."""
    word = "" if plan.slurm is None else str(plan.slurm.sbatch.get("signal", ""))
    return f"SIG{word.partition('@')[0]}"


def follow_ups_of(run: RunDir, job_id: str) -> list[str]:
    """The jobs that wait to carry the run on after this one."""
    job = read_job(run)
    begun = {entry["job_id"] for entry in job["attempts"]}
    return [other for other in job.get("follow_ups", []) if other not in begun and other != job_id]
