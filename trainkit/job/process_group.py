"""A group of child processes that are started, signalled and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job import processes

PEER_EXIT_S = 5.0
"""How long the other members have to exit and report by themselves after one has failed."""
KILL_MARGIN_S = 5.0
"""How long after the grace time an agent kills the remaining workers, which also watch the grace time."""


class ProcessGroup:
    """Child processes by rank, from the start of the first to the exit of the last.

    The members of a supervisor's group are its agents or srun, those of an agent's group its workers.
    """

    poll_interval_s = 5.0
    """Seconds between calls of `poll` when no signal or exit occurs."""

    def __init__(self) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """The members that are running, by rank."""
        self.deadline_s: float | None = None
        """Monotonic time at which the running members are killed; None without a deadline."""
        self._poll_error = ""

    def start(self) -> None:
        """Start every member and add it to `running`."""
        raise NotImplementedError

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a notice signal to every member."""
        for member in self.running.values():
            os.kill(member.pid, received)  # Popen.send_signal would reap one that has just ended

    def on_signal(self, received: signal.Signals) -> None:
        """Called after a notice signal has been forwarded."""
        raise NotImplementedError

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        """Called when a member has ended; `killed` means that this group killed it."""
        raise NotImplementedError

    def died_of_notice(self, code: int) -> bool:
        """Whether a forwarded notice killed a member with this code: the others keep their grace time."""
        return False

    def poll(self) -> None:
        """Called every `poll_interval_s`, and after every signal and exit."""

    def run(self) -> None:
        """Start the members, forward notice signals, and wait until all have ended or the deadline passes."""
        try:
            self.start()
            while self.running:
                self._wait()
        finally:
            self._kill_running()

    def kill_within(self, seconds: float) -> None:
        """Kill the members that still run after `seconds`; keeps an earlier deadline if one is set."""
        deadline_s = time.monotonic() + seconds
        self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)

    def _wait(self) -> None:
        self._poll()
        left_s = float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()
        if left_s <= 0:
            self._kill_running()
            return
        received = processes.wait_for_signal(min(left_s, self.poll_interval_s))
        if received is not None and received != signal.SIGCHLD:
            self.forward_signal(received)
            self.on_signal(received)
        self._reap()

    def _poll(self) -> None:
        """Call `poll` and log its OSErrors: a briefly unavailable filesystem must not end the members."""
        problem = ""
        try:
            self.poll()
        except OSError as error:
            problem = str(error)
            if problem != self._poll_error:
                processes.log_line(f"cannot read the run folder ({problem})")
        self._poll_error = problem

    def _reap(self) -> None:
        for rank, member in list(self.running.items()):
            if processes.ended(member):
                processes.kill_group(member)  # remaining children, for example a worker's data loaders
                self._record_exit(rank, member, killed=False)

    def _record_exit(self, rank: int, member: subprocess.Popen[bytes], killed: bool) -> None:
        code = processes.exit_code(member)
        del self.running[rank]
        if code not in (EXIT_OK, EXIT_STOPPED) and not self.died_of_notice(code):
            self.kill_within(PEER_EXIT_S)
        self.on_exit(rank, code, killed)

    def _kill_running(self) -> None:
        members = list(self.running.items())
        for _, member in members:
            processes.kill_group(member)
        for rank, member in members:
            self._record_exit(rank, member, killed=True)
