"""Starts the attempts of a run on this machine, and monitors the agents of each attempt."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from datetime import datetime, timezone

from trainkit.backends.local.queue import QueuePlace
from trainkit.errors import EXIT_FAILED, EXIT_STOPPED
from trainkit.job import processes
from trainkit.job.allocation import CANCELLED, SIGNAL_RECORD_S, Allocation, AttemptWatch, refused
from trainkit.job.attempt import Attempt
from trainkit.job.decision import (
    RESTART_SIGNAL,
    Decision,
)
from trainkit.job.node.rendezvous import choose_port, new_nonce
from trainkit.job.processes import log_line, module_argv
from trainkit.job.rank_env import NONCE_VARIABLE, old_stores, store_file
from trainkit.job.signals import is_death_by_stop_signal, signal_exit_code
from trainkit.locks import LockBusy
from trainkit.run.events import log_event
from trainkit.run.files import seconds_between, utc_now
from trainkit.run.process import PROC
from trainkit.run.record import (
    AUTO_RESTART,
    AttemptRecord,
    add_attempt,
    record_of,
)
from trainkit.run.rundir import AttemptDir, RunDir, refuse_missing, run_lock

SECOND_INTERRUPT_S = 3.0


class LocalAttemptWatch(AttemptWatch):
    """The agents of one attempt on this machine: one agent for each node of the plan."""

    pauses_by = (signal.SIGTSTP,)

    def __init__(self, live: Attempt) -> None:
        super().__init__(live)
        self._stop_requested_s = 0.0
        self._nonce = new_nonce()

    def pause(self) -> signal.Signals | None:
        """Suspend all descendants until SIGCONT or a stop signal, and extend the deadline accordingly."""
        paused_s, received = time.monotonic(), None
        for event, sent in (("paused", signal.SIGSTOP), ("continued", signal.SIGCONT)):
            processes.signal_all(processes.descendants(os.getpid()), sent)
            try:
                log_event(self.attempt.run, self.attempt.number, event)
            except OSError as error:  # without this event, `trainkit status` shows the run as running
                log_line(f"{event}, but this event cannot be recorded ({error})")
            while received in (None, signal.SIGCHLD, signal.SIGTSTP):
                received = processes.wait_for_signal(self.poll_interval_s, *processes.PAUSE_SIGNALS)
        if self.deadline_s is not None:
            self.deadline_s += time.monotonic() - paused_s
        return received

    def start(self) -> None:
        _remove_stale_stores()
        # Pass the nonce in the environment, because every user of the machine can read a process's arguments.
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
        """Handle a recorded request if the command that recorded it was killed before sending the signal."""
        self.live.update()
        entry = self.live.entry
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
        stop = self.observed.stop_signal
        if entry.cancelled_now:
            return self.deadline_s is not None and self.deadline_s <= time.monotonic()
        return stop is not None and (stop != RESTART_SIGNAL or not entry.is_cancelled)

    def on_signal(self, received: signal.Signals) -> None:
        observed = self.observed
        if received == signal.SIGINT and observed.stop_signal == received.name:
            self.kill_within(SECOND_INTERRUPT_S)  # workers that handle signals exit on the second Ctrl-C
        if observed.stop_signal is None:
            self._stop_requested_s = time.monotonic()
            self.kill_after_grace()
        if observed.stop_signal in (None, RESTART_SIGNAL):
            # A signal that stops the run overrides a signal that restarts it, and both override a planned
            # stop.
            observed.stop_signal, observed.planned_stop = received.name, None
        self._follow()
        try:
            fields = {"time": self.received_at or utc_now(), "signal": received.name}
            log_event(self.attempt.run, self.attempt.number, "signal", **fields)
        except OSError as error:
            log_line(f"cannot record the signal {received.name} in events.jsonl: {error}")

    def died_of_stop_signal(self, code: int) -> bool:
        return self.observed.stop_signal is not None and is_death_by_stop_signal(code)

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        if not self.observed.exits and code == signal_exit_code(signal.SIGKILL) and not killed:
            self.observed.killed_node = rank
        self.observed.exits.append((rank, code))
        if self.observed.stop_signal is not None:
            is_late = time.monotonic() - self._stop_requested_s >= self.plan.grace_s
            self.observed.out_of_time |= killed or is_late

    def run(self) -> None:
        try:
            super().run()
        finally:
            processes.end_descendants()
            if (store := store_file(self._nonce)) is not None:
                store.unlink(missing_ok=True)


def _remove_stale_stores() -> None:
    """Remove unused store files, which were left by attempts whose processes were all killed."""
    if stale := old_stores():
        environs = (processes.environ_of(int(one.name)) for one in PROC.iterdir() if one.name.isdigit())
        stale -= {store_file(environ.get(NONCE_VARIABLE, "")) for environ in environs}
        for store in stale:
            store.unlink(missing_ok=True)


QUEUE_POLL_S = 1.0
QUEUE_PATIENCE = 60
"""Number of queue errors after which a run starts immediately instead of waiting in the queue."""
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
"""Errno values for folder errors that waiting does not resolve."""


class LocalAllocation(Allocation):
    """The allocation for a local run: every node of the plan is this machine."""

    lock_timeout_s = 10.0

    def __init__(self, run: RunDir, number: int, *, now: bool = False) -> None:
        """Create the allocation. `number` is the first attempt, which the starting command has recorded."""
        super().__init__(run)
        self._number, self._now, self._queue_errors = number, now, 0
        self._place: QueuePlace | None = None
        """The GPUs or cores that this process keeps locked until it exits."""

    def claim(self) -> AttemptDir | Decision:
        refuse_missing(self.run)
        # The command that started this process holds the run's lock until it has recorded the attempt.
        with run_lock(self.run):
            entry = record_of(self.run.attempt(self._number))
        if (entry.pid, entry.host) != (os.getpid(), os.uname().nodename):
            reason = (
                f"attempt {self._number} is not in {self.run.job_file}: the command that started the attempt"
                " was interrupted"
            )
            log_line(reason)
            return Decision("failed", reason, EXIT_FAILED)
        if (refusal := refused(self.run.attempt(self._number), entry)) is not None:
            return refusal
        if entry.in_foreground:
            processes.fail_on_disk_error()
        return self.run.attempt(self._number)

    def register(self, attempt: AttemptDir) -> str:
        # `trainkit requeue` sends its signal while holding the lock, so a signal that is pending now was
        # meant for the previous attempt.
        if signal.SIGUSR2 in signal.sigpending():
            signal.sigwait({signal.SIGUSR2})
        return add_attempt(self.run, attempt.number, os.getpid(), AUTO_RESTART).job_id

    def wait_for_turn(self, attempt: Attempt) -> Decision | None:
        if self._place is not None:
            return None
        self._place, said = QueuePlace(attempt.folder, attempt.plan, attempt.entry.submitted_at), ""
        while (reason := self._waits_for(self._place)) is not None:
            if reason != said:
                said = reason
                log_line(f"attempt {attempt.number} {reason}")
                with contextlib.suppress(OSError):  # the supervisor's log also contains the reason
                    log_event(self.run, attempt.number, "waiting", reason=reason)
            received = processes.wait_for_notice(QUEUE_POLL_S)
            # A command that was killed may have recorded its request in job.json but not sent the signal.
            attempt.update()
            if received is not None or attempt.entry.is_cancelled:
                self._place.leave()
                return Decision("stopped", CANCELLED, EXIT_STOPPED)
        return None

    def _waits_for(self, place: QueuePlace) -> str | None:
        try:
            return place.take(now=self._now)
        except LockBusy as busy:
            return f"waits for {busy}"
        except OSError as error:
            self._queue_errors += 1
            may_pass = not self._now and error.errno not in NOT_WRITABLE
            if may_pass and self._queue_errors < QUEUE_PATIENCE:
                return f"waits for the queue of this machine ({error.strerror})"
            log_line(f"starts without waiting for its turn: this machine's queue has failed ({error})")
            place.leave()
            return None

    def watch(self, attempt: Attempt) -> AttemptWatch:
        return LocalAttemptWatch(attempt)
