"""The agent of one node: starts its workers, passes signals on to them and their exit codes back.

``python -m trainkit.job.agent RUN_DIR --attempt N --node-rank I --master-port P``

Exit code: see `trainkit.job.decision.combine`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from trainkit.config import read_effective
from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job import children
from trainkit.job.crew import Crew
from trainkit.job.decision import combine, describe_exit
from trainkit.job.failures import record_silent_death
from trainkit.job.interpreter import module_argv
from trainkit.job.worker_env import worker_environ, worker_rank
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, read_json

KILL_MARGIN_S = 5.0
"""How long after the grace time what is left is killed; workers watch the grace time themselves."""


class Agent(Crew):
    """The workers of one node."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, node_rank: int, master_port: int) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan = plan
        self.node_rank = node_rank
        self.master_port = master_port
        self.codes: list[int] = []
        """Exit codes in the order of the ends."""

    def start(self) -> None:
        run = self.attempt.run
        configured = read_effective(self.attempt.config_file).launch.env
        builtin = module_argv("trainkit.trainer", str(run.path))
        for local_rank in range(self.plan.workers_per_node):
            place = worker_rank(self.plan, self.node_rank, local_rank, self.master_port)
            environ = worker_environ(
                self.plan,
                place,
                run_dir=str(run.path),
                attempt=self.attempt.number,
                configured=configured,
                inherited=os.environ,
            )
            with self.attempt.rank_log(place.rank).open("ab") as log:
                self.running[place.rank] = children.start_child(
                    self.plan.command or builtin,
                    environ=environ,
                    output=log,
                    keeps_mask=self.plan.command is None,
                )

    def told(self, received: signal.Signals) -> None:
        self.end_within(self.plan.grace_s + KILL_MARGIN_S)

    def lost(self, rank: int, code: int, killed: bool) -> None:
        self.codes.append(code)
        if killed or code in (EXIT_OK, EXIT_STOPPED):
            return  # a worker that was killed from here is no failure of its own
        with contextlib.suppress(OSError):  # a full disk must not keep us from ending the others
            print(f"rank {rank} ended with {describe_exit(code)}", flush=True)
            record_silent_death(self.attempt, rank, self.node_rank, code)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run one node's agent; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.job.agent")
    parser.add_argument("run_dir")
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--master-port", type=int, required=True)
    args = parser.parse_args(argv)
    attempt = RunDir(args.run_dir).attempt(args.attempt)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    children.block_signals()
    agent = Agent(attempt, plan, args.node_rank, args.master_port)
    agent.work()
    return combine(agent.codes)


if __name__ == "__main__":
    sys.exit(main())
