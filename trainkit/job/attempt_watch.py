"""Runs and watches the processes of one attempt: agents on this machine, or the srun of a Slurm job."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from trainkit.errors import EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.attempt_capabilities import AttemptCapabilities
from trainkit.job.decision import RESTART_SIGNAL, Departure, Outcome
from trainkit.job.failure.launcher_report import (
    first_task_exit,
    node_of_killed_task,
    ran_out_of_memory,
    was_aborted,
)
from trainkit.job.failure.records import first_exit_code, first_rank_failure
from trainkit.job.growth import GrowthWatch
from trainkit.job.hangs import HangWatch
from trainkit.job.node.rendezvous import choose_port, new_nonce
from trainkit.job.node.slurm_step import slurm_job_id
from trainkit.job.preflight import SUPERVISOR_VIEW_VARIABLE
from trainkit.job.processes import KILL_MARGIN_S, PEER_EXIT_S, ProcessGroup, log_line, module_argv
from trainkit.job.rank_env import ATTEMPT_VARIABLE, NONCE_VARIABLE, RUN_DIR_VARIABLE, old_stores, store_file
from trainkit.job.signals import AGENT_SIGNAL, is_death_by_notice, signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event, read_events
from trainkit.run.files import seconds_between, utc_now
from trainkit.run.process import PROC
from trainkit.run.record import AttemptRecord, read_rendezvous, record_of, superseded_by
from trainkit.run.rundir import AttemptDir
from trainkit.slurm.control import kill_steps

DELETED_AFTER_S = 10.0
"""How long the attempt's folder must be missing: longer than a remount of the filesystem takes."""
SECOND_INTERRUPT_S = 3.0
SIGNAL_RECORD_S = 2.0
"""How long the first agent has to record a signal that Slurm sent to it."""
SRUN = 0


class AttemptWatch(ProcessGroup):
    """The processes of one attempt, from their start until `outcome` records how they ended."""

    poll_interval_s = 1.0

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan = plan
        self.outcome = Outcome()
        self.superseded_by: AttemptRecord | None = None
        """The entry of the attempt that has taken the run over; this one saves and ends."""
        self._hangs = HangWatch(attempt)
        self._missing_since_s: float | None = None
        self.capabilities: AttemptCapabilities | None = None

    def poll(self) -> None:
        """End the attempt when it was moved or deleted, or when its ranks hang."""
        if self._follow() and self.outcome.stop_signal is None:
            self.stop_ranks()
        if self._is_deleted():
            self.end_all()
            return
        self._poll_processes()
        if self.capabilities is not None:
            departure = self.capabilities.poll(is_stopping=self.outcome.stop_signal is not None)
            if departure is not None:
                self.leave(departure)
        if not self.outcome.hung and (hangs := self._hangs.poll()):
            self.outcome.hangs = hangs
            self.end_all()

    def _follow(self) -> bool:
        """Whether the folder was moved since the last call; what is written goes to where it is now."""
        is_moved = self.attempt.run.follow()
        if is_moved:
            self.outcome.moved_to = str(self.attempt.run.path)
            log_line(f"attempt {self.attempt.number}: its folder was moved to {self.outcome.moved_to}")
        return is_moved

    def end_all(self) -> None:
        """End every process of the attempt immediately."""
        raise NotImplementedError

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        """Have the ranks save and exit, as if this signal had come: by default the run stops."""
        raise NotImplementedError

    def leave(self, departure: Departure) -> None:
        """Have the ranks save and exit, and the run restart, unless they are stopping already."""
        if self.outcome.stop_signal is None and self.running:
            log_line(f"attempt {self.attempt.number}: {departure.why}")
            self.outcome.departure = departure
            self.stop_ranks(RESTART_SIGNAL)
            self.outcome.cause = departure.cause

    def collect_outcome(self) -> None:
        """Complete the outcome from the run folder. May raise OSError; can then be called again."""

    def kill_after_grace(self) -> None:
        """Kill the remaining processes after the grace time; agents apply a shorter limit themselves."""
        self.kill_within(self.plan.grace_s + 2 * KILL_MARGIN_S)

    def _poll_processes(self) -> None:
        """Called by `poll` unless the attempt was deleted."""

    def _requested_signal(self) -> str | None:
        """The signal that a command's request in job.json stands for; None without a request."""
        entry = record_of(self.attempt)
        if entry.is_cancelled:
            return None if entry.cancelled_now else signal.SIGTERM.name
        return RESTART_SIGNAL if entry.requeue_requested_at is not None else None

    def _is_deleted(self) -> bool:
        """Whether the attempt's folder was replaced, or missing for DELETED_AFTER_S. Raises OSError."""
        if self.attempt.run.was_replaced:
            return True
        if self.attempt.path.is_dir():
            self._missing_since_s = None
            return False
        self._missing_since_s = self._missing_since_s or time.monotonic()
        return time.monotonic() >= self._missing_since_s + DELETED_AFTER_S


class LocalAttemptWatch(AttemptWatch):
    """The agents of one attempt on this machine, one per node of the plan."""

    pauses_by = (signal.SIGTSTP,)

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        super().__init__(attempt, plan)
        self._stop_requested_s = 0.0
        self._nonce = new_nonce()

    def pause(self) -> signal.Signals | None:
        """Stop all descendants until SIGCONT or a notice; that time does not count."""
        paused_s, received = time.monotonic(), None
        for event, sent in (("paused", signal.SIGSTOP), ("continued", signal.SIGCONT)):
            processes.signal_all(processes.descendants(os.getpid()), sent)
            try:
                log_event(self.attempt.run, self.attempt.number, event)
            except OSError as error:  # `status` then shows it as running
                log_line(f"{event}, which cannot be recorded ({error})")
            while received in (None, signal.SIGCHLD, signal.SIGTSTP):
                received = processes.wait_for_signal(self.poll_interval_s, *processes.PAUSE_SIGNALS)
        if self.deadline_s is not None:
            self.deadline_s += time.monotonic() - paused_s
        return received

    def start(self) -> None:
        _remove_stale_stores()
        # In the environment: every user of the machine can read the arguments of a process.
        environ = {**os.environ, NONCE_VARIABLE: self._nonce}
        port = ["--master-port", str(choose_port())]
        for node_rank in range(self.plan.num_nodes):
            options = ["--attempt", str(self.attempt.number), "--node-rank", str(node_rank)]
            argv = module_argv("trainkit.job.node.agent", str(self.attempt.run.path), *options, *port)
            with self.attempt.node_log(node_rank).open("ab") as log:
                self.running[node_rank] = processes.start_child(
                    argv,
                    environ=environ,
                    output=log,
                    keeps_mask=True,
                    stdin=subprocess.DEVNULL if node_rank else 0,
                )

    def end_all(self) -> None:
        self.kill_within(0.0)

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        self._receive(signal.Signals[as_if])

    def _receive(self, received: signal.Signals) -> None:
        self.forward_signal(received)
        self.on_signal(received)

    def _poll_processes(self) -> None:
        """Obey a request whose command was killed between its record and its signal."""
        entry = record_of(self.attempt)
        asked_s = seconds_between(
            entry.cancelled_at or entry.requeue_requested_at, datetime.now(timezone.utc)
        )
        if asked_s is None or asked_s < SIGNAL_RECORD_S or self._was_obeyed(entry):
            return
        if entry.cancelled_now:
            self.end_all()
        elif (requested := self._requested_signal()) is not None:
            self._receive(signal.Signals[requested])

    def _was_obeyed(self, entry: AttemptRecord) -> bool:
        stop = self.outcome.stop_signal
        if entry.cancelled_now:
            return self.deadline_s is not None and self.deadline_s <= time.monotonic()
        return stop is not None and (stop != RESTART_SIGNAL or not entry.is_cancelled)

    def on_signal(self, received: signal.Signals) -> None:
        outcome = self.outcome
        if received == signal.SIGINT and outcome.stop_signal == received.name:
            self.kill_within(SECOND_INTERRUPT_S)  # workers that can respond exit at the second Ctrl-C
        if outcome.stop_signal is None:
            self._stop_requested_s = time.monotonic()
            self.kill_after_grace()
        if outcome.stop_signal in (None, RESTART_SIGNAL):
            # A request to end the run overrides a request to restart it.
            outcome.stop_signal = received.name
            outcome.cause = "asked" if received.name == RESTART_SIGNAL else None
        self._follow()
        try:
            fields = {"time": self.received_at or utc_now(), "signal": received.name}
            log_event(self.attempt.run, self.attempt.number, "signal", **fields)
        except OSError as error:
            log_line(f"cannot write the event of {received.name}: {error}")

    def died_of_notice(self, code: int) -> bool:
        return self.outcome.stop_signal is not None and is_death_by_notice(code)

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        if not self.outcome.exits and code == signal_exit_code(signal.SIGKILL) and not killed:
            self.outcome.killed_node = rank
        self.outcome.exits.append((rank, code))
        if self.outcome.stop_signal is not None:
            is_late = time.monotonic() - self._stop_requested_s >= self.plan.grace_s
            self.outcome.out_of_time |= killed or is_late

    def run(self) -> None:
        try:
            super().run()
        finally:
            processes.end_descendants()
            if (store := store_file(self._nonce)) is not None:
                store.unlink(missing_ok=True)


def _remove_stale_stores() -> None:
    """Remove the stores of attempts of which every process was killed: none has their nonce."""
    if stale := old_stores():
        environs = (processes.environ_of(int(one.name)) for one in PROC.iterdir() if one.name.isdigit())
        stale -= {store_file(environ.get(NONCE_VARIABLE, "")) for environ in environs}
        for store in stale:
            store.unlink(missing_ok=True)


class SlurmAttemptWatch(AttemptWatch):
    """The srun of one attempt.

    srun ends the whole step immediately on SIGTERM and SIGINT but forwards SIGUSR2 to the tasks, so a notice
    reaches the ranks of the trainer as SIGUSR2, whichever signal the supervisor received.
    """

    def __init__(
        self,
        attempt: AttemptDir,
        plan: LaunchPlan,
        step: Sequence[str],
        supervisor_view: str,
        left_s: float = math.inf,
        departures: Sequence[GrowthWatch] = (),
    ) -> None:
        super().__init__(attempt, plan)
        self._until_s = time.monotonic() + left_s
        """Monotonic time at which the ranks are to save, since the total of the run's slices is used."""
        self._departures = departures
        self.step = step
        self.supervisor_view = supervisor_view
        """The run folder as the supervisor sees it, for the agents to compare."""
        self._is_ending = False
        self._failed_s: float | None = None
        self._srun_exit: tuple[int, bool, bool, datetime] | None = None
        """Its code, whether it was killed, whether it had been asked to end the step, and when.

        Recorded without reading the run folder, which may be unavailable at that moment.
        """
        self._unconfirmed_since_s: float | None = None
        """Monotonic time of a notice that the ranks may not have received; inf once it was handled."""

    def start(self) -> None:
        environ = {
            **os.environ,
            RUN_DIR_VARIABLE: str(self.attempt.run.path),
            ATTEMPT_VARIABLE: str(self.attempt.number),
            SUPERVISOR_VIEW_VARIABLE: self.supervisor_view,
        }
        if self.plan.fills_nodes and self.plan.slurm is not None:
            num_cpus = (self.plan.threads_per_worker or 1) * self.plan.workers_per_node
            of_task = str(num_cpus // int(self.plan.slurm.srun["ntasks-per-node"]))
            # Which of these srun reads depends on its version; it warns of an option above the job's value.
            environ |= dict.fromkeys(("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK"), of_task)
            if given := environ.get("SLURM_TRES_PER_TASK"):  # cpu=8 or cpu:8, and GPUs
                environ["SLURM_TRES_PER_TASK"] = re.sub(r"\b(cpu[=:])\d+", rf"\g<1>{of_task}", given)
        # An NFS client that looks for it too early would remember for a minute that it is missing.
        with contextlib.suppress(OSError):  # the tasks create it too
            self.attempt.rendezvous_file.touch(mode=0o600)
        with self.attempt.supervisor_log.open("ab") as log:
            self.running[SRUN] = processes.start_child(
                self.step, environ=environ, output=log, keeps_mask=False
            )

    def forward_signal(self, received: signal.Signals) -> None:
        """Note it: `_forward_unconfirmed` sends it later to ranks that have none: two might end one."""
        if self._unconfirmed_since_s is None:
            self._unconfirmed_since_s = time.monotonic()

    def on_signal(self, received: signal.Signals) -> None:
        self.outcome.supervisor_was_signalled |= received != signal.SIGUSR2
        if self.outcome.stop_signal in (None, RESTART_SIGNAL):
            self.outcome.stop_signal = received.name
        self.kill_after_grace()

    def _poll_processes(self) -> None:
        self._end_if_superseded()
        self._forward_unconfirmed()
        self._end_after_failure()
        self._leave_early()

    def _end_if_superseded(self) -> None:
        """Have the ranks save and exit when another start of the job has claimed the next attempt.

        It waits for this one to exit. When only the slurmd of a host dies, Slurm counts the host as lost and
        restarts the job elsewhere.
        """
        if self.superseded_by is not None:
            return
        newer = superseded_by(self.attempt)
        if newer is None or newer.pid is None:
            return
        self.superseded_by = newer
        log_line(f"attempt {self.attempt.number}: {newer.takeover}")
        self.stop_ranks(RESTART_SIGNAL)

    def stop_ranks(self, as_if: str = signal.SIGTERM.name) -> None:
        self._unconfirmed_since_s = float("inf")
        self.outcome.stop_signal = self.outcome.stop_signal or as_if
        # A command's ranks get the signal that they handle from their agents.
        if (
            SRUN in self.running
            and signal_of_ranks(self.attempt) is None
            and (self.plan.workload.knows_run or not self._signal_step(AGENT_SIGNAL))
        ):
            os.kill(self.running[SRUN].pid, signal.SIGUSR2)
        self.kill_after_grace()

    def _forward_unconfirmed(self) -> None:
        """Send SIGUSR2 to ranks that got no signal: it came to this shell only, or before the step."""
        if self._unconfirmed_since_s is None:
            if self.outcome.stop_signal is None and self._requested_signal() is not None:
                self._unconfirmed_since_s = time.monotonic()
            return
        if time.monotonic() < self._unconfirmed_since_s + SIGNAL_RECORD_S:
            return
        self._unconfirmed_since_s = float("inf")
        if signal_of_ranks(self.attempt) is None and SRUN in self.running:
            self.stop_ranks(self._requested_signal() or signal.SIGTERM.name)

    def _leave_early(self) -> None:
        """Have the ranks save and exit: for a restart on more nodes, or for good."""
        if self.outcome.stop_signal is not None or SRUN not in self.running:
            return
        departure = next(filter(None, (watch.poll() for watch in self._departures)), None)
        if departure is None and time.monotonic() >= self._until_s:
            departure = Departure("timeout", "the jobs of the run have taken their total time")
        if departure is not None:
            self.leave(departure)

    def leave(self, departure: Departure) -> None:
        if signal_of_ranks(self.attempt) is None:
            super().leave(departure)

    def _end_after_failure(self) -> None:
        """End the step when a rank or an agent has failed: its peers may wait for it forever."""
        if self._failed_s is None:
            self.outcome.killed_node = node_of_killed_task(self.attempt)
            # Without a record, a task failed if no notice came before; after one the others may still save.
            if any(self.attempt.errors_dir.glob("rank-*.json")) or (
                first_task_exit(self.attempt) is not None
                and self.outcome.stop_signal is None
                and signal_of_ranks(self.attempt) is None
            ):
                self._failed_s = time.monotonic()
        elif time.monotonic() > self._failed_s + PEER_EXIT_S:
            self._failed_s = float("inf")
            first = first_rank_failure(self.attempt)
            has_notice = self.outcome.stop_signal is not None or signal_of_ranks(self.attempt) is not None
            if has_notice and first is not None and first.died_of_notice:
                self.kill_after_grace()  # its agent heard the notice too late, and the others may save
            else:
                self.end_all()

    def end_all(self) -> None:
        """Have srun kill the remaining tasks; later calls do nothing."""
        if SRUN in self.running and not self._is_ending:
            self._is_ending = True
            os.kill(self.running[SRUN].pid, signal.SIGTERM)
            self.kill_within(KILL_MARGIN_S)

    def _kill_running(self) -> None:
        if SRUN in self.running:
            # srun waits for an unresponsive host, and killing srun would leave the tasks there running.
            self.outcome.step_may_still_run = True
            self._signal_step(signal.SIGKILL)
        super()._kill_running()

    def _signal_step(self, number: signal.Signals) -> bool:
        """Send a signal to the tasks of the step through Slurm; returns whether that was possible."""
        step_id = read_rendezvous(self.attempt).step_id
        if step_id is None:
            return False  # before the rendezvous of the step
        try:
            kill_steps([(str(slurm_job_id()), step_id)], number.name, patience_s=0.0)
        except TrainkitError as error:
            log_line(f"cannot send {number.name} to the tasks of the step: {error}")
            return False
        return True

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        self._srun_exit = (code, killed, self._is_ending, datetime.now(timezone.utc))

    def collect_outcome(self) -> None:
        if self._srun_exit is None:
            return
        code, was_killed, was_terminated, ended_at = self._srun_exit
        if code == EXIT_OK and was_aborted(self.attempt):
            code = signal_exit_code(signal.SIGTERM)
        # srun returns the code of the task that was killed last; the failure records have that of the first.
        if not was_terminated and not was_killed:
            self.outcome.killed_node = node_of_killed_task(self.attempt)
        first_code = first_exit_code(self.attempt) if code not in (EXIT_OK, EXIT_STOPPED) else None
        if first_code is None and ran_out_of_memory(self.attempt):
            first_code = signal_exit_code(signal.SIGKILL)  # of an agent; srun returns 1
        self.outcome.exits = [(SRUN, code if first_code is None else first_code)]
        if self.outcome.stop_signal is None:
            self.outcome.stop_signal = signal_of_ranks(self.attempt)
        if self.outcome.stop_signal is None and any(map(is_death_by_notice, self.outcome.exit_codes)):
            # The signal of a request came before the handlers of the ranks were installed.
            self.outcome.stop_signal = self._requested_signal()
        # Agents kill their workers after the grace time, so srun may exit late without having been killed.
        signals = read_events(self.attempt.run, "signal", attempt=self.attempt.number)
        since_s = (seconds_between(event.time, ended_at) or 0.0 for event in signals)
        is_late = was_killed or any(seconds >= self.plan.grace_s for seconds in since_s)
        self.outcome.out_of_time = self.outcome.stop_signal is not None and is_late


def signal_of_ranks(attempt: AttemptDir) -> str | None:
    """The notice that the tasks received, as recorded by the first agent; None without one."""
    found = read_events(attempt.run, "signal", attempt=attempt.number)
    names = [event.text("signal") for event in found]
    overriding = [name for name in names if name != RESTART_SIGNAL] or names
    return str(overriding[0]) if overriding else None
