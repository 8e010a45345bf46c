"""The agent of a node or task starts workers, forwards signals to them and combines their exit codes.

On a single machine, an agent runs as ``python -m trainkit.job.node.agent RUN_DIR --attempt N --node-rank I
--master-port P``. In a Slurm step, an agent runs as ``python -m trainkit.job.node.agent RUN_DIR`` and takes
its node and ranks from Slurm's variables. `trainkit run` calls `run_task` directly, both in a Slurm step and
in a rank started by a launcher such as torchrun.

The agent's exit code combines the exit codes of its workers (`trainkit.job.signals.combine_exit_codes`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import IO

from trainkit.backend import step_task
from trainkit.capability import Companion
from trainkit.cluster.machine import count_oom_kills
from trainkit.errors import (
    EXIT_FAILED,
    EXIT_NO_RESTART,
    EXIT_OK,
    EXIT_STOPPED,
    TrainkitError,
    replace_unencodable,
)
from trainkit.folders import whole_paths
from trainkit.job import processes
from trainkit.job.failure.launcher_report import LaunchedRanks, RankExit
from trainkit.job.failure.records import (
    killed_rank,
    lacks_result,
    record_missing_result,
    record_refusal,
    record_silent_death,
)
from trainkit.job.failure.stacks import StackCollector, describe_state
from trainkit.job.flight_records import flight_environ, remove_pipes
from trainkit.job.node.output_pipes import OutputPipes
from trainkit.job.node.rendezvous import (
    Listener,
    NotATask,
    Rendezvous,
    StopSignalReceived,
    Task,
    await_plan,
    local_rendezvous,
    record_notice,
)
from trainkit.job.node.stop_signal import CommandStopSignal, takers, was_signalled
from trainkit.job.node.worker_env import (
    network_environ,
    worker_argv,
    worker_environ,
    worker_rank,
)
from trainkit.job.preflight import require_node
from trainkit.job.processes import KILL_MARGIN_S, PEER_EXIT_S, ProcessGroup, log_line, redirect_output
from trainkit.job.rank_env import ATTEMPT_VARIABLE, NONCE_VARIABLE
from trainkit.job.signals import (
    AGENT_SIGNAL,
    combine_exit_codes,
    describe_exit,
    is_death_by_stop_signal,
    signal_exit_code,
)
from trainkit.job.work_folder import WORK_DIR_VARIABLE
from trainkit.plan.launch import LaunchPlan
from trainkit.run.record import read_job, read_rendezvous, record_of
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.shipped import Guard

POLL_S = 2.0
RELAY_S = 0.1
"""Seconds between checks for a stop signal forwarded by a wrapper, while the processes below the wrapper are
stopped."""
DRAIN_S = 0.2
"""Seconds between reads of a pipe that has no other reader."""
NOTICE_PATIENCE_S = 10.0
"""Maximum delay in seconds between a signal's arrival at a rank and at the agent, if Slurm signals both."""
HANG_REPORT_S = 2.0
"""Seconds to wait, after the first hang report, for the hang reports of the other ranks."""


class Agent(ProcessGroup):
    """The workers of one node, or the only worker of a Slurm task."""

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan, rendezvous: Rendezvous) -> None:
        super().__init__()
        self.attempt = attempt
        self.plan, self.workload = plan, plan.workload
        self.attended = plan.attended_rank
        self.has_launcher = plan.workload.has_launcher
        """True if the only child is a launcher such as torchrun, which itself starts the node's ranks."""
        self.rendezvous = rendezvous
        self.codes: list[int] = []
        """The exit codes of the exited workers, in order of exit."""
        self.received: signal.Signals | None = None
        """The most recent stop signal, or None if none has arrived."""
        self._notice = CommandStopSignal(plan)
        self._died_s: dict[int, float] = {}
        """Maps each member that exited before any stop signal to the monotonic time at which the exit was
        noticed."""
        self._pipes = OutputPipes()
        self._held_s = 0.0
        self._listener: Listener | None = None
        self._guard = Guard(plan.parts, log_line)
        self._companions: list[tuple[str, Companion]] = []
        self._ranks = LaunchedRanks()
        """The ranks that a launcher has started, as observed by the agent."""
        self._collector = StackCollector(attempt, replies_itself=not plan.workload.is_command)
        self._oom_kills = count_oom_kills()
        self._hang_s: float | None = None
        """The monotonic time at which the agent saw the first hang report, or None."""

    poll_interval_s = POLL_S

    def start(self) -> None:
        rendezvous = self.rendezvous
        network, reason = network_environ(self.plan.environment.network, rendezvous.peer)
        if not self.plan.is_here:
            print(f"node {rendezvous.node_rank} is {socket.gethostname()}; {reason}", flush=True)
        # torch writes flight records to files only for NCCL, although gloo also records its calls.
        flight = flight_environ(self.attempt, self.plan) if self.plan.device == "cuda" else {}
        local_ranks = rendezvous.local_ranks[:1] if self.has_launcher else rendezvous.local_ranks
        ignored = (signal.SIGUSR2,) if self.workload.ignores_usr2 else ()
        work_dir = os.environ.get(WORK_DIR_VARIABLE) if self.workload.is_command else None
        code = read_job(self.attempt.run).code
        for local_rank in local_ranks:
            rank_env = worker_rank(self.plan, rendezvous, local_rank)
            environ = worker_environ(
                self.plan, rank_env, self.attempt, inherited=os.environ, defaults=network | flight, code=code
            )
            with (
                self.attempt.rank_log(rank_env.rank).open("ab") as log,
                self._input_of(rank_env.rank) as stdin,
            ):
                self.running[rank_env.rank] = processes.start_child(
                    worker_argv(self.plan, rank_env, self.attempt.run),
                    environ=environ,
                    output=log,
                    keeps_mask=not self.workload.is_command,
                    ignored=ignored,
                    cwd=work_dir,
                    stdin=stdin,
                )
            self._notice.groups[self.running[rank_env.rank].pid] = rank_env.rank
        if isinstance(rendezvous.task, Task):
            # Start the listener after the ranks, so that every signal it receives has also reached all ranks.
            self._listener = rendezvous.task.listen()
        self._companions = self._guard.each(lambda one: one.companion(self.attempt, self.plan, rendezvous))

    def _input_of(self, rank: int) -> AbstractContextManager[int | IO[bytes]]:
        """Return the stdin for a rank: for rank 0 of a command, the run's input file or the shell's stdin."""
        if rank == 0 and self.workload.is_command:
            with contextlib.suppress(FileNotFoundError):
                return self.attempt.run.input_file.open("rb")
            if not self.plan.is_job and not os.isatty(0):
                return contextlib.nullcontext(0)
        return contextlib.nullcontext(subprocess.DEVNULL)

    def forward_signal(self, received: signal.Signals) -> None:
        """Forward a stop signal to the ranks that have not received one from Slurm.

        A command gets only one signal, the one that it handles, because a second signal could interrupt its
        save. A launcher whose ranks are running gets no signal, because a second signal would make it kill
        ranks during their save.
        """
        is_for_agents = received == AGENT_SIGNAL
        heard = not is_for_agents and self._listener is not None and self._listener.has_heard(received)
        if self.workload.takes(received.name):
            if heard:
                return
            if not self.workload.is_command:
                super().forward_signal(signal.SIGUSR2 if is_for_agents else received)
                return
            children = processes.children_by_parent()
            for member in self.running.values():
                found = takers([member.pid], children, (received,))
                processes.signal_all(found or [member.pid], received)
        elif not self._notice.is_sent:
            self._notice.send(self.running, received if heard else None)

    def on_signal(self, received: signal.Signals) -> None:
        received, task = asked_by(received, self.attempt), self.rendezvous.task
        if task is not None and self.deadline_s is None:
            record_notice(self.attempt, received, task, self.received_at)
        self.received = received
        self.kill_within(self.plan.grace_s + KILL_MARGIN_S)

    def poll(self) -> None:
        """Stop the workers if a newer attempt took over or a peer failed; handle requests for stacks."""
        attempt = self.attempt
        newer = superseding_attempt(attempt)
        if newer is not None:
            log_line(f"attempt {newer} has superseded this attempt: stopping the ranks on this node")
            self.kill_within(0.0)
            return
        self._collector.poll(self._pids)
        if self.has_launcher and len(self._ranks) < len(self.rendezvous.local_ranks):
            self._ranks.watch({pid: rank for rank, pid in self._pids().items()})
        has_hangs = any(attempt.hangs_dir.glob("rank-*.json"))
        self._dump_silent_ranks(has_hangs)
        if self._notice.poll():
            self.poll_interval_s = RELAY_S
        if self.workload.is_command and not self.has_launcher:
            self._hold_pipes()
            self._notice.send_to_repeated(self.running)
        # Without a supervisor, no other process would kill workers that are stuck in a collective.
        is_unsupervised = not self.plan.has_supervisor and self.deadline_s is None
        if is_unsupervised and (has_hangs or any(attempt.errors_dir.glob("rank-*.json"))):
            self.kill_within(PEER_EXIT_S)
        for name, companion in self._companions:
            self._guard.call(name, companion.poll)

    def _hold_pipes(self) -> None:
        """Keep open the output pipes of processes that may save; after a stop signal, read the pipes."""
        if self.received is None and time.monotonic() > self._held_s + POLL_S:
            self._held_s = time.monotonic()
            for rank, member in self.running.items():
                tree = processes.tree_of(member.pid)
                writers = takers([member.pid], tree)
                self._pipes.hold(writers.keys() - {member.pid}, tree, self.attempt.rank_log(rank))
        if self._pipes.poll(has_stop_signal=self.received is not None):
            self.poll_interval_s = min(self.poll_interval_s, DRAIN_S)

    def _pids(self) -> dict[int, int]:
        """Return the pids of this node's ranks, keyed by rank."""
        if not self.has_launcher:
            return {rank: worker.pid for rank, worker in self.running.items()}
        pids = [pid for launcher in self.running.values() for pid in processes.ranks_below(launcher.pid)]
        ranks = {pid: processes.rank_of(pid) for pid in pids}
        return {rank: pid for pid, rank in ranks.items() if rank is not None}

    def _dump_silent_ranks(self, has_hangs: bool) -> None:
        """Send SIGQUIT to ranks without a hang report, so that faulthandler dumps their stacks."""
        if not has_hangs:
            self._hang_s, self.poll_interval_s = None, POLL_S
        elif self._hang_s is None:
            self._hang_s, self.poll_interval_s = time.monotonic(), HANG_REPORT_S / 4
        elif time.monotonic() > self._hang_s + HANG_REPORT_S and not self.workload.is_command:
            self._hang_s = float("inf")
            for rank, pid in self._pids().items():
                if not self.attempt.rank_hang(rank).exists():
                    problem = describe_state(pid) or "requesting the stacks of the rank with SIGQUIT"
                    log_line(f"rank {rank} does not respond: {problem}")
                    os.kill(pid, signal.SIGQUIT)

    def died_of_stop_signal(self, code: int) -> bool:
        return self.received is not None and is_death_by_stop_signal(code)

    def keeps(self, rank: int, member: subprocess.Popen[bytes]) -> bool:
        if self.received is None:
            # Slurm may have signalled the worker before this agent.
            died_s = self._died_s.setdefault(rank, time.monotonic())
            is_early = time.monotonic() < died_s + NOTICE_PATIENCE_S
            if not self.workload.is_command:
                return is_early and was_signalled(member.pid)
            return is_early and self._notice.may_be_of_notice(rank, member)
        return self.workload.is_command and self._notice.keeps(rank, member)

    def exit_code(self, rank: int, member: subprocess.Popen[bytes]) -> int:
        code = super().exit_code(rank, member)
        if self.received is None or not self.workload.is_command:
            return code
        if not self.has_launcher:
            return self._notice.exit_code(rank, code, signal_exit_code(self.received))
        # A launcher exits with 1, regardless of its ranks' exit codes. If a launcher exits after a stop
        # signal, its ranks exited because of the signal.
        saved = EXIT_STOPPED if self._ranks.have_saved else signal_exit_code(self.received)
        return saved if code == EXIT_FAILED else code

    def _reap(self) -> None:
        self._notice.reap_orphans()
        super()._reap()

    def on_exit(self, rank: int, code: int, killed: bool) -> None:
        dead = None if killed or code in (EXIT_OK, EXIT_STOPPED) else self._killed_rank(rank, code)
        code = code if dead is None else signal_exit_code(-dead.code)
        if code == EXIT_OK and not killed and self.received is None and lacks_result(self.attempt, rank):
            code = EXIT_FAILED
            record_missing_result(self.attempt, rank, self.rendezvous.node_rank)
            self.kill_within(PEER_EXIT_S)
        self.codes.append(code)
        if killed or code in (EXIT_OK, EXIT_STOPPED) or self.died_of_stop_signal(code):
            return  # the worker succeeded or saved, or was killed by this agent or the stop signal
        with contextlib.suppress(OSError):  # stop the other workers even if the disk is full
            which = rank if dead is None else "?" if dead.rank is None else dead.rank
            print(f"rank {which} ended with {describe_exit(code)}", flush=True)
            out_of_memory = self._ran_out_of_memory(code)
            record_silent_death(
                self.attempt,
                rank,
                self.rendezvous.node_rank,
                code,
                out_of_memory,
                killed=dead,
                is_job=self.plan.is_job,
            )

    def _killed_rank(self, worker: int, code: int) -> RankExit | None:
        """Return the rank whose death stopped the launcher, or None if no such rank is known."""
        if not self.workload.is_command:
            return None
        dead = killed_rank(self.attempt, worker, code, self._ranks.first_exit)
        # If a command is the only worker, "ranks" in its output may be processes that the command itself
        # started.
        is_worker = len(self.rendezvous.local_ranks) == 1 if self.has_launcher else self.plan.world_size > 1
        return replace(dead, rank=worker) if dead is not None and is_worker else dead

    def _ran_out_of_memory(self, code: int) -> bool:
        """Return whether the kernel's OOM killer killed the worker that exited with `code`."""
        before, self._oom_kills = self._oom_kills, count_oom_kills()
        grew = before is not None and self._oom_kills is not None and self._oom_kills > before
        return grew and code == signal_exit_code(signal.SIGKILL)

    def run(self) -> None:
        if self.workload.is_command:
            # torchrun starts its ranks in separate sessions, so they can only be found as descendants. A
            # process that is saving may outlive the shell that started it.
            processes.adopt_orphans()
        try:
            super().run()
        finally:
            self._pipes.poll(has_stop_signal=True)
            is_finished = self.received is None and set(self.codes) == {EXIT_OK}
            for name, companion in self._companions:
                self._guard.call(name, companion.end, is_finished=is_finished)
            if self.workload.is_command:
                processes.end_descendants()
            first = self.plan.first_rank_of(self.rendezvous.node_rank)
            remove_pipes(self.attempt, (first + local_rank for local_rank in self.rendezvous.local_ranks))


@whole_paths()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run the agent of one node; return the agent's exit code."""
    replace_unencodable()
    run_dir, *options = sys.argv[1:] if argv is None else argv
    values = {name: int(value) for name, value in zip(options[::2], options[1::2], strict=True)}
    processes.block_signals(AGENT_SIGNAL)
    if not values:
        return run_step_task(RunDir(run_dir), int(os.environ[ATTEMPT_VARIABLE]))
    attempt, node_rank = RunDir(run_dir).attempt(values["--attempt"]), values["--node-rank"]
    plan = LaunchPlan.read(attempt.plan_file)
    nonce = os.environ.get(NONCE_VARIABLE, "")
    return run_agent(attempt, plan, local_rendezvous(plan, node_rank, values["--master-port"], nonce))


def run_agent(attempt: AttemptDir, plan: LaunchPlan, rendezvous: Rendezvous) -> int:
    """Run an agent's workers until all have exited; return their combined exit code."""
    agent = Agent(attempt, plan, rendezvous)
    agent.run()
    codes = agent.codes
    if EXIT_STOPPED in codes:
        # If some workers saved, ignore the exit codes of workers that did not handle the stop signal and were
        # killed by that signal.
        codes = [code for code in codes if not agent.died_of_stop_signal(code)]
    return combine_exit_codes(codes)


def run_step_task(run: RunDir, number: int) -> int:
    """Run the node agent as the current task of the job step; return the agent's exit code.

    The caller must have blocked the stop signals.
    """
    attempt = run.attempt(number)
    try:
        task = step_task()
    except NotATask as error:
        print(f"error: {error.message}", flush=True)
        return EXIT_NO_RESTART
    return run_task(attempt, task)


def run_task(attempt: AttemptDir, task: Task) -> int:
    """Wait for the plan, then run this task's agent; return the agent's exit code.

    The caller must have blocked the stop signals.
    """
    try:
        plan = await_plan(attempt)
    except StopSignalReceived as stop:
        record_notice(attempt, asked_by(stop.received, attempt), task)
        return EXIT_STOPPED
    except (OSError, ValueError, TrainkitError) as error:
        return _refuse(attempt, task.rank, task.node_rank, error)
    return run_node(attempt, plan, task)


def run_node(attempt: AttemptDir, plan: LaunchPlan, task: Task) -> int:
    """Run the agent for a task of a step or a rank started by a launcher; return the agent's exit code."""
    redirect_output(attempt.node_log(task.node_rank))
    rank = plan.first_rank_of(min(task.node_rank, plan.num_nodes - 1)) + task.local_task
    local_ranks = (task.local_task,) if plan.per == "gpu" else range(plan.workers_per_node)
    try:
        require_node(attempt, plan, local_ranks, checks_disk=task.local_task == 0)
        return run_agent(attempt, plan, task.meet(attempt, plan))
    except StopSignalReceived as stop:
        record_notice(attempt, asked_by(stop.received, attempt), task)
        print(f"stopped by {stop} before the ranks started", flush=True)
        return EXIT_STOPPED
    except (OSError, TrainkitError) as error:
        return _refuse(attempt, rank, task.node_rank, error)


def asked_by(received: signal.Signals, attempt: AttemptDir) -> signal.Signals:
    """Return the stop signal that `received` stands for.

    AGENT_SIGNAL stands for SIGTERM in a cancelled run, and for SIGUSR2 in any other run.
    """
    if received != AGENT_SIGNAL:
        return received
    return signal.SIGTERM if record_of(attempt).is_cancelled else signal.SIGUSR2


def _refuse(attempt: AttemptDir, rank: int, node_rank: int, error: Exception) -> int:
    """Record the failure of a rank that cannot start, for example because there is no such command."""
    refusal = error if isinstance(error, TrainkitError) else TrainkitError(f"cannot start a rank: {error}")
    print(refusal.render(), flush=True)
    record_refusal(attempt, rank, node_rank, refusal)
    return refusal.exit_code


def superseding_attempt(attempt: AttemptDir) -> int | None:
    """Return the newest attempt after this attempt whose ranks have started on other hosts, or None.

    If a disconnected host becomes reachable again, its old ranks must be killed in favour of the newer
    attempt. Attempts that are pending or whose ranks have not started are ignored.
    """
    run = attempt.run
    # List the attempts folder instead of looking up the next attempt by name. After a failed look-up, an NFS
    # client could cache the file's absence for a minute, delaying the next attempt's agent on this node.
    newest = run.latest_number() or 0
    later = range(newest, attempt.number, -1)
    # A port in the rendezvous file means that the attempt's ranks are starting.
    return next((number for number in later if read_rendezvous(run.attempt(number)).port), None)


if __name__ == "__main__":
    sys.exit(main())
