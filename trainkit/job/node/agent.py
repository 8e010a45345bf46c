"""The agent of one node: starts its workers, passes signals on to them and their exit codes back.

``python -m trainkit.job.node.agent RUN_DIR --attempt N --node-rank I --master-port P`` on one machine, and
``python -m trainkit.job.node.agent RUN_DIR`` as a task of a Slurm step, which tells it its place.

Exit code: see `trainkit.job.decision.combine`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import processes
from trainkit.job.exit_codes import combine, describe_exit, is_death_by_notice, signal_exit_code
from trainkit.job.failure.records import record_refusal, record_silent_death
from trainkit.job.failure.stacks import STATES, StackCollector
from trainkit.job.node.network import network_environ
from trainkit.job.node.oom import count_oom_kills
from trainkit.job.node.preflight import check_node
from trainkit.job.node.process_group import PEER_S, ProcessGroup
from trainkit.job.node.rendezvous import Station, ToldToStop, await_plan, local_station, slurm_station
from trainkit.job.node.slurm_step import find_slurm_place, why_no_task
from trainkit.job.node.worker_env import ATTEMPT_VARIABLE, worker_argv, worker_environ, worker_rank
from trainkit.job.watch.superseded import successor
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json

LOOK_EVERY_S = 2.0
WAKE_S = 2.0
"""How long after the first hang the other ranks may take to say that they hang too."""
KILL_MARGIN_S = 5.0
"""How long after the grace time what is left is killed; workers watch the grace time themselves."""


class Agent(ProcessGroup):
    """The workers of one node, or the one of them that a Slurm task stands for."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, station: Station) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan = plan
        self.station = station
        self.codes: list[int] = []
        """Exit codes in the order of the ends."""
        self.received: signal.Signals | None = None
        """The newest notice."""
        self._collector = StackCollector(attempt, answers_itself=plan.command is None)
        self._oom_kills = count_oom_kills()
        self._hang_s: float | None = None
        """Monotonic time at which the first hang was seen."""

    look_every_s = LOOK_EVERY_S

    @property
    def has_launcher(self) -> bool:
        """Whether its one child is a launcher, which starts the ranks of the node itself."""
        return self.plan.launcher != "python"

    def start(self) -> None:
        run, station = self.attempt.run, self.station
        network, reason = network_environ(self.plan.network, station.peer)
        if self.plan.backend != "local":
            print(f"node {station.node_rank} is {socket.gethostname()}; {reason}", flush=True)
        local_ranks = station.local_ranks[:1] if self.has_launcher else station.local_ranks
        for local_rank in local_ranks:
            place = worker_rank(
                self.plan, station.node_rank, local_rank, station.master_addr, station.master_port
            )
            environ = worker_environ(
                self.plan,
                place,
                run_dir=str(run.path),
                attempt=self.attempt.number,
                configured=self.plan.env,
                inherited=os.environ,
                network=network,
            )
            with self.attempt.rank_log(place.rank).open("ab") as log:
                self.running[place.rank] = processes.start_child(
                    worker_argv(self.plan, place, run),
                    environ=environ,
                    output=log,
                    keeps_mask=self.plan.command is None,
                    # Of SIGUSR2 torchrun would die, and leave its ranks to themselves.
                    ignored=(signal.SIGUSR2,) if self.has_launcher else (),
                )

    def tell(self, received: signal.Signals) -> None:
        """Pass a notice on to the ranks, past a launcher: one that is told twice kills what still saves."""
        if not self.has_launcher:
            super().tell(received)
            return
        for launcher in self.running.values():
            ranks = processes.ranks_below(launcher.pid)
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, received)
            if not ranks:
                os.kill(launcher.pid, signal.SIGTERM)

    def told(self, received: signal.Signals) -> None:
        self.received = received
        if self.station.leads and self.plan.backend != "local" and self.deadline_s is None:
            write_down_notice(self.attempt, received)
        self.end_within(self.plan.grace_s + KILL_MARGIN_S)

    def look_around(self) -> None:
        """End when the run goes on without us, or nobody else ends us; tell where the ranks are."""
        attempt = self.attempt
        newer = successor(attempt)
        if newer is not None:
            processes.log_line(f"the run goes on as attempt {newer}: the ranks here are ended")
            self.end_within(0.0)
            return
        self._collector.look(self._pids)
        hangs = any(attempt.hangs_dir.glob("rank-*.json"))
        self._wake_the_silent(hangs)
        # In a step that nobody supervises, end with the others: they may wait in a collective for ever.
        alone = self.plan.backend == "srun" and self.deadline_s is None
        if alone and (hangs or any(attempt.errors_dir.glob("rank-*.json"))):
            self.end_within(PEER_S)

    def _pids(self) -> dict[int, int]:
        """The processes of the ranks that run here."""
        if not self.has_launcher:
            return {rank: worker.pid for rank, worker in self.running.items()}
        pids = [pid for launcher in self.running.values() for pid in processes.ranks_below(launcher.pid)]
        ranks = {pid: processes.rank_of(pid) for pid in pids}
        return {rank: pid for pid, rank in ranks.items() if rank is not None}

    def _wake_the_silent(self, hangs: bool) -> None:
        """When ranks hang, have those here that did not say so write their stacks: a C handler does."""
        if not hangs:
            self._hang_s, self.look_every_s = None, LOOK_EVERY_S
        elif self._hang_s is None:
            self._hang_s, self.look_every_s = time.monotonic(), WAKE_S / 4
        elif time.monotonic() > self._hang_s + WAKE_S and self.plan.command is None:
            self._hang_s = float("inf")
            for rank, pid in self._pids().items():
                if not self.attempt.rank_hang(rank).exists():
                    why = STATES.get(processes.state(pid) or "", "perhaps it can write its stacks yet")
                    processes.log_line(f"rank {rank} does not answer: {why}")
                    os.kill(pid, signal.SIGQUIT)

    def died_as_asked(self, code: int) -> bool:
        return self.received is not None and is_death_by_notice(code)

    def lost(self, rank: int, code: int, killed: bool) -> None:
        if self.has_launcher and self.received is not None and code == EXIT_FAILED:
            # Whatever its ranks end with, a launcher ends with 1: they did what they were asked.
            self.codes.append(signal_exit_code(self.received))
            return
        self.codes.append(code)
        if killed or code in (EXIT_OK, EXIT_STOPPED) or self.died_as_asked(code):
            return  # a worker that was killed from here, or died as it was told, is no failure of its own
        with contextlib.suppress(OSError):  # a full disk must not keep us from ending the others
            print(f"rank {rank} ended with {describe_exit(code)}", flush=True)
            record_silent_death(
                self.attempt, rank, self.station.node_rank, code, self._ran_out_of_memory(code)
            )

    def _ran_out_of_memory(self, code: int) -> bool:
        """Whether a worker that ended with this code was killed for want of memory."""
        before, self._oom_kills = self._oom_kills, count_oom_kills()
        grew = before is not None and self._oom_kills is not None and self._oom_kills > before
        return grew and code == signal_exit_code(signal.SIGKILL)

    def work(self) -> None:
        if not self.has_launcher:
            super().work()
            return
        # Ranks of torchrun have sessions of their own: they are found only as our descendants.
        processes.adopt_orphans()
        try:
            super().work()
        finally:
            processes.end_descendants()


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run one node's agent; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.job.node.agent")
    parser.add_argument("run_dir")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--node-rank", type=int)
    parser.add_argument("--master-port", type=int)
    args = parser.parse_args(argv)
    processes.block_signals()
    if args.node_rank is None:
        return run_slurm_task(RunDir(args.run_dir), int(os.environ[ATTEMPT_VARIABLE]))
    attempt = RunDir(args.run_dir).attempt(args.attempt)
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    return run_agent(attempt, plan, local_station(plan, args.node_rank, args.master_port))


def run_agent(attempt: AttemptDir, plan: LaunchPlan, station: Station) -> int:
    """Carry the workers of a station from their start to their end; one exit code for all of them."""
    agent = Agent(attempt, plan, station)
    agent.work()
    codes = agent.codes
    if EXIT_STOPPED in codes:
        # Those that saved speak for those that the notice ended because they do not listen to it.
        codes = [code for code in codes if not agent.died_as_asked(code)]
    return combine(codes)


def run_slurm_task(run: RunDir, number: int) -> int:
    """Be the agent that this task of a Slurm step stands for; call with signals blocked."""
    attempt = run.attempt(number)
    place = find_slurm_place()
    if place is None:
        raise TrainkitError(f"this is no task of a Slurm step: {why_no_task()}", exit_code=EXIT_NO_RESTART)
    try:
        plan = await_plan(attempt)
    except ToldToStop as told:
        if place.task == 0:
            write_down_notice(attempt, told.received)
        return EXIT_STOPPED
    write_to(attempt.node_log(place.node_rank))
    rank = plan.first_rank_of(min(place.node_rank, plan.num_nodes - 1)) + place.local_task
    own = (place.local_task,) if plan.per == "gpu" else range(plan.workers_per_node)
    try:
        check_node(attempt, plan, own)
        return run_agent(attempt, plan, slurm_station(attempt, plan, place))
    except ToldToStop as told:
        if place.task == 0:
            write_down_notice(attempt, told.received)
        print(f"told to stop by {told} before the ranks were started", flush=True)
        return EXIT_STOPPED
    except (OSError, TrainkitError) as error:
        # A command that does not exist, an interface, a port: the first failing rank is this one.
        refusal = (
            error if isinstance(error, TrainkitError) else TrainkitError(f"cannot start a rank: {error}")
        )
        print(refusal.render(), flush=True)
        record_refusal(attempt, rank, place.node_rank, refusal)
        return refusal.exit_code


def write_down_notice(attempt: AttemptDir, received: signal.Signals) -> None:
    """For the supervisor, which is no task of the step: Slurm's signal to the tasks does not reach it."""
    with contextlib.suppress(OSError):  # the ranks are told and have their time, disk or no disk
        log_event(attempt.run, attempt.number, "signal", signal=received.name)


def write_to(log: Path) -> None:
    """Send everything that this process prints to a file."""
    with log.open("ab") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())


if __name__ == "__main__":
    sys.exit(main())
