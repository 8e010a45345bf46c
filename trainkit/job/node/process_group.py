"""Several child processes as one: started together, told together, and none is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job import processes

PEER_S = 5.0
"""How long the others may take to report by themselves after one member failed."""
IDLE_S = 5.0
"""How often to look around when nothing happens."""


class ProcessGroup:
    """The members by rank, from their start to the exit code of the last one.

    A supervisor's crew are its agents, an agent's crew its workers.
    """

    def __init__(self) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        """The members that have not ended."""
        self.deadline_s: float | None = None
        """Monotonic time at which those that are left are killed."""
        self._trouble = ""

    look_every_s = IDLE_S

    def start(self) -> None:
        """Start every member and put it into `running`."""
        raise NotImplementedError

    def tell(self, received: signal.Signals) -> None:
        """Pass a notice signal on to every member."""
        for member in self.running.values():
            os.kill(member.pid, received)  # Popen.send_signal would reap one that has just ended

    def told(self, received: signal.Signals) -> None:
        """Something to do when a notice signal has been passed on."""
        raise NotImplementedError

    def lost(self, rank: int, code: int, killed: bool) -> None:
        """Something to do when a member has ended; `killed` when it was killed from here."""
        raise NotImplementedError

    def died_as_asked(self, code: int) -> bool:
        """Whether a member that ended with this code only died of a notice: the others have their time."""
        return False

    def look_around(self) -> None:
        """Something to do every few seconds, and whenever something has happened."""

    def work(self) -> None:
        """Start all, pass notice signals on, wait for all; what hangs on beyond the deadline is killed."""
        try:
            self.start()
            while self.running:
                self._wait()
        finally:
            self._kill_rest()

    def end_within(self, seconds: float) -> None:
        """Kill those that still run so many seconds from now, or at an earlier deadline if there is one."""
        deadline_s = time.monotonic() + seconds
        self.deadline_s = deadline_s if self.deadline_s is None else min(self.deadline_s, deadline_s)

    def _wait(self) -> None:
        self._look()
        left_s = float("inf") if self.deadline_s is None else self.deadline_s - time.monotonic()
        if left_s <= 0:
            self._kill_rest()
            return
        received = processes.wait_for_signal(min(left_s, self.look_every_s))
        if received is not None and received != signal.SIGCHLD:
            self.tell(received)
            self.told(received)
        self._reap()

    def _look(self) -> None:
        """Look around; a filesystem that is away for a moment is no reason to end the members."""
        trouble = ""
        try:
            self.look_around()
        except OSError as error:
            trouble = str(error)
            if trouble != self._trouble:
                processes.log_line(f"the run folder cannot be looked at ({trouble})")
        self._trouble = trouble

    def _reap(self) -> None:
        for rank, member in list(self.running.items()):
            if processes.ended(member):
                processes.kill_group(member)  # what it left behind, a worker its data loaders for example
                self._note(rank, member, killed=False)

    def _note(self, rank: int, member: subprocess.Popen[bytes], killed: bool) -> None:
        code = processes.exit_code(member)
        del self.running[rank]
        if code not in (EXIT_OK, EXIT_STOPPED) and not self.died_as_asked(code):
            self.end_within(PEER_S)
        self.lost(rank, code, killed)

    def _kill_rest(self) -> None:
        rest = list(self.running.items())
        for _, member in rest:
            processes.kill_group(member)
        for rank, member in rest:
            self._note(rank, member, killed=True)
