"""One attempt as the supervisor sees it: starts one agent a node, passes signals on, waits for all."""

from __future__ import annotations

import os
import signal
import sys
import time

from trainkit.job import processes
from trainkit.job.decision import COMEBACK_SIGNAL
from trainkit.job.exit_codes import is_death_by_notice, signal_exit_code
from trainkit.job.interpreter import module_argv
from trainkit.job.node.agent import KILL_MARGIN_S
from trainkit.job.node.process_group import ProcessGroup
from trainkit.job.outcome import Outcome
from trainkit.job.watch.deleted import DeletedAttempt
from trainkit.job.watch.hangs import HangWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, log_event

SECOND_INTERRUPT_S = 3.0
LOOK_EVERY_S = 1.0


class AttemptWatch(ProcessGroup):
    """The agents of one attempt."""

    look_every_s = LOOK_EVERY_S

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, master_port: int) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan = plan
        self.master_port = master_port
        self.outcome = Outcome()
        self.requested_s = 0.0
        self._hangs = HangWatch(attempt)
        self._deleted = DeletedAttempt(attempt)

    def start(self) -> None:
        for node_rank in range(self.plan.num_nodes):
            place = ["--attempt", str(self.attempt.number), "--node-rank", str(node_rank)]
            port = ["--master-port", str(self.master_port)]
            argv = module_argv("trainkit.job.node.agent", str(self.attempt.run.path), *place, *port)
            with self.attempt.node_log(node_rank).open("ab") as log:
                self.running[node_rank] = processes.start_child(
                    argv, environ=os.environ, output=log, keeps_mask=True
                )

    def look_around(self) -> None:
        if self._deleted.look():
            self.end_within(0.0)
        elif not self.outcome.hung and (hangs := self._hangs.look()):
            self.outcome.hangs = hangs
            self.end_within(0.0)

    def told(self, received: signal.Signals) -> None:
        outcome = self.outcome
        if received == signal.SIGINT and outcome.request == received.name:
            self.end_within(SECOND_INTERRUPT_S)  # workers end by themselves at a second one, if they can
        if outcome.request is None:
            # The agents' own time limit comes first; this one is for an agent that does not answer.
            self.requested_s = time.monotonic()
            self.end_within(self.plan.grace_s + 2 * KILL_MARGIN_S)
        if outcome.request in (None, COMEBACK_SIGNAL):
            outcome.request = received.name  # being told to end is stronger than being told to come back
            outcome.cause = "asked" if received.name == COMEBACK_SIGNAL else None
        try:
            log_event(self.attempt.run, self.attempt.number, "signal", signal=received.name)
        except OSError as error:
            print(f"cannot write the event of {received.name}: {error}", file=sys.stderr, flush=True)

    def died_as_asked(self, code: int) -> bool:
        return self.outcome.request is not None and is_death_by_notice(code)

    def lost(self, rank: int, code: int, killed: bool) -> None:
        if not self.outcome.ends and code == signal_exit_code(signal.SIGKILL) and not killed:
            self.outcome.killed_node = rank
        self.outcome.ends.append((rank, code))
        if self.outcome.request is not None:
            late = time.monotonic() - self.requested_s >= self.plan.grace_s
            self.outcome.out_of_time |= killed or late

    def work(self) -> None:
        try:
            super().work()
        finally:
            processes.end_descendants()
