"""Runs and watches the agents of one attempt on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import datetime, timezone

from trainkit.job import processes
from trainkit.job.attempt import Attempt
from trainkit.job.attempt_watch import SIGNAL_RECORD_S, AttemptWatch
from trainkit.job.decision import RESTART_SIGNAL
from trainkit.job.node.rendezvous import choose_port, new_nonce
from trainkit.job.processes import log_line, module_argv
from trainkit.job.rank_env import NONCE_VARIABLE, old_stores, store_file
from trainkit.job.signals import is_death_by_notice, signal_exit_code
from trainkit.run.events import log_event
from trainkit.run.files import seconds_between, utc_now
from trainkit.run.process import PROC
from trainkit.run.record import AttemptRecord

SECOND_INTERRUPT_S = 3.0


class LocalAttemptWatch(AttemptWatch):
    """The agents of one attempt on this machine, one per node of the plan."""

    pauses_by = (signal.SIGTSTP,)

    def __init__(self, live: Attempt) -> None:
        super().__init__(live)
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
        # The nonce is in the environment: every user of the machine can read a process's arguments.
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
            self.kill_within(SECOND_INTERRUPT_S)  # workers that can respond exit at the second Ctrl-C
        if observed.stop_signal is None:
            self._stop_requested_s = time.monotonic()
            self.kill_after_grace()
        if observed.stop_signal in (None, RESTART_SIGNAL):
            # One to end the run overrides one to restart it, and both what the supervisor itself wants.
            observed.stop_signal, observed.departure = received.name, None
        self._follow()
        try:
            fields = {"time": self.received_at or utc_now(), "signal": received.name}
            log_event(self.attempt.run, self.attempt.number, "signal", **fields)
        except OSError as error:
            log_line(f"cannot write the event of {received.name}: {error}")

    def died_of_notice(self, code: int) -> bool:
        return self.observed.stop_signal is not None and is_death_by_notice(code)

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
    """Remove the stores of attempts whose processes were all killed, and which no process will use again."""
    if stale := old_stores():
        environs = (processes.environ_of(int(one.name)) for one in PROC.iterdir() if one.name.isdigit())
        stale -= {store_file(environ.get(NONCE_VARIABLE, "")) for environ in environs}
        for store in stale:
            store.unlink(missing_ok=True)
