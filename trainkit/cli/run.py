"""Implements ``trainkit run`` in the foreground, and ``trainkit env``, which prints a rank's environment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from trainkit.backend import backend_of
from trainkit.backends.launcher import LaunchedRank, find_launched_rank
from trainkit.backends.slurm.step import SlurmTask, find_slurm_task, master_address, reason_not_a_task
from trainkit.cli import options
from trainkit.cli.help import as_command, option
from trainkit.cli.logs import follow_run, kept_terminal, print_end, show_rank_0
from trainkit.cli.output import json_text
from trainkit.cli.started import describe_plan, print_created, print_started
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TrainkitError, UsageError
from trainkit.job import step_run
from trainkit.job.rank_env import find_rank_env, refuse_foreign_ranks
from trainkit.job.signals import NOTICE_SIGNALS
from trainkit.launch.config_request import ConfigRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.workload import Workload
from trainkit.run.record import AttemptRecord
from trainkit.run.rundir import RUNS_FOLDER, RunDir, become_sole_supervisor, next_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainkit.capability import Choice
    from trainkit.cluster.target import Target
    from trainkit.config import RunConfig


@as_command(
    "trainkit run",
    "trainkit run quickstart --gpus-per-node 2 --set train.steps=20",
    "trainkit run --gpus-per-node 2 -- python train.py --lr 0.1",
    "srun --nodes=2 --ntasks-per-node=4 trainkit run quickstart",
    "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 -m trainkit run quickstart",
    cls=options.WithTrailingCommand,
)
@options.config_options(options.shape_options_here, submits=False)
@option("--run-dir DIR", "New or empty folder for the run; default: runs/NAME.")
@options.trust_option
@options.launcher_option
@options.of_capabilities("run")
@options.yes_option
def command(
    request: ConfigRequest,
    run_dir: str | None,
    launcher: str,
    choices: Sequence[Choice] = (),
) -> int:
    """Run CONFIG in the foreground and print rank 0's output.

    Outside of an srun step, the run uses only this node; within an srun step, each task becomes a rank.
    With a COMMAND after --, each rank runs the COMMAND instead of the built-in trainer.

    Without Slurm, torchrun or mpirun can start the run on several hosts that share the file system of the run
    folder.

    With --debug, one rank uses the terminal, the other ranks log to files, and hang detection is disabled. If
    the run has no terminal, such as a submitted run, use `trainkit debug` to debug one of its ranks.

    Ctrl-C saves a checkpoint and stops the run; a second Ctrl-C stops it immediately. Ctrl-Z pauses a
    run on a single machine, and `fg` continues it. Closing the terminal also saves a checkpoint and stops the
    run.
    """
    from trainkit.cluster.target import Target
    from trainkit.launch.plan_run import gather, plan_run
    from trainkit.launch.submission import disk_forecast

    workload = options.trailing_workload(launcher)
    task = launched_task()
    for choice in choices:
        choice.check(workload, is_alone=task is None and "SLURM_STEP_ID" not in os.environ)
    if task is not None:
        return run_in_step(request, workload, run_dir, task)
    refuse_foreign_ranks()
    target = Target("local", "local: `trainkit run` uses this machine")
    loaded = request.load_to_plan(workload, target)
    if loaded.config.resources.most_nodes != 1:
        raise UsageError(
            f"{loaded.origins['resources.nodes']} asks for {loaded.config.resources.most_nodes} nodes, "
            "but `trainkit run` uses only one node",
            hint="use `trainkit submit`, or add --set resources.nodes=1; without Slurm, use torchrun to "
            "start `trainkit run` on every host",
        )
    plan = plan_run(loaded, gather(loaded, workload, target=target), workload)
    plan = shown_failures(plan)
    for choice in choices:
        plan = choice.apply(plan)
    folder = options.named_folder(run_dir)
    click.echo(describe_plan(plan, next_name(loaded.config.name, folder)), err=True)
    if (forecast := disk_forecast(folder or Path(RUNS_FOLDER), plan, loaded.config)) is not None:
        click.echo(forecast, err=True)
    started = _start(loaded.config, plan, folder, _kept_input(workload))
    return stay_in_foreground(*started, plan, shows_log=not any(choice.has_terminal for choice in choices))


def _kept_input(workload: Workload) -> bytes | None:
    """Return the standard input to store in the run folder, or None if rank 0 inherits it."""
    from trainkit.launch.standard_input import kept_input

    stdin, about_input = kept_input(workload, streams=True)
    if about_input is not None:
        click.echo(about_input, err=True)
    return stdin


def _start(
    config: RunConfig, plan: LaunchPlan, folder: Path | None, stdin: bytes | None
) -> tuple[RunDir, str, AttemptRecord]:
    """Create and start a run; return its folder, its name and its attempt's record."""
    from trainkit.launch.create import create_run, start_run

    created = create_run(config, plan, ["trainkit", *sys.argv[1:]], folder, stdin=stdin)
    print_created(created)
    created.run.hold()  # keep the folder open, because it may be moved while the ranks are running
    return created.run, created.name, start_run(created.run, created.job, config, plan, "run")


def shown_failures(plan: LaunchPlan) -> LaunchPlan:
    """Return the plan for a foreground run, which shows failures and is not restarted automatically."""
    return replace(plan, requeue=replace(plan.requeue, on=()))


def stay_in_foreground(
    run: RunDir, name: str, entry: AttemptRecord, plan: LaunchPlan, *, shows_log: bool = True
) -> int:
    """Print a foreground run's output until the run ends, and return the exit code.

    Signals from the terminal are forwarded to the run.
    """
    forwarder = _Forwarder()
    forwarder.install()
    print_started(run, name, entry, plan.backend, as_json=False)
    code = follow_run(
        run,
        entry.attempt,
        to_stderr=False,
        on_poll=lambda: forwarder.forward(run, entry),
        shows_log=shows_log,
    )
    return EXIT_INTERRUPTED if signal.SIGINT in forwarder.received else code


class _Forwarder:
    """Forwards the terminal's signals to the supervisor; the signal handler itself only records them."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.num_sent = 0

    def install(self) -> None:
        for number in (*NOTICE_SIGNALS, signal.SIGTSTP):
            signal.signal(number, lambda number, frame: self.received.append(signal.Signals(number)))

    def forward(self, run: RunDir, entry: AttemptRecord) -> None:
        """Send the signals received since the last call of this method to the first attempt's supervisor."""
        while self.num_sent < len(self.received):
            number = self.received[self.num_sent]
            self.num_sent += 1
            if number == signal.SIGINT:
                again = self.received[: self.num_sent].count(number) > 1
                click.echo(
                    "\nstopping immediately"
                    if again
                    else "\nsaving a checkpoint before stopping; press Ctrl-C again to stop immediately",
                    err=True,
                )
            backend_of(entry).signal(run, entry, number)
            if number == signal.SIGTSTP:
                click.echo("\npaused; `fg` resumes the run", err=True)
                os.kill(os.getpid(), signal.SIGSTOP)
                backend_of(entry).signal(run, entry, signal.SIGCONT)


SRUN_READ_S = 1.0
LOCK_TIMEOUT_S = 10.0


def launched_task() -> SlurmTask | LaunchedRank | None:
    """Return the Slurm task or launched rank of this process, or None if it is neither."""
    task = find_slurm_task() if "SLURM_STEP_ID" in os.environ else None
    return task if task is not None and task.num_tasks > 1 else find_launched_rank()


def join_step(folder: Path, task: SlurmTask | LaunchedRank) -> int:
    """Run `task` in the attempt that task 0 announces in `folder`; return the task's exit code."""
    found = step_run.await_announcement(folder, task)
    if isinstance(found, int):
        return found
    if isinstance(task, LaunchedRank):
        options.refuse_untrusted(found.run.path)
    return _exit_code(step_run.run_task(found, task))


def lead_step(
    folder: Path, task: SlurmTask | LaunchedRank, run: RunDir, entry: AttemptRecord, plan: LaunchPlan
) -> int:
    """Announce the attempt in `folder` and run its first task; return the task's exit code.

    `entry` is the attempt's record in job.json.
    """
    attempt = run.attempt(entry.attempt)
    step_run.announce(folder, task, attempt)
    if isinstance(task, LaunchedRank):
        # Announce the attempt before this process becomes its supervisor, which may take a while, so that the
        # other ranks do not read an outdated announcement.
        become_sole_supervisor(run, LOCK_TIMEOUT_S)
    with kept_terminal() as terminal:
        # From here on, the agent writes to its own log, and the terminal shows rank 0's output.
        decision = step_run.run_first_task(
            attempt, plan, task, lambda attempt, ended: show_rank_0(attempt, ended, terminal)
        )
    step_run.await_starts(attempt, plan)
    step_run.withdraw(folder, task)
    print_end(run, entry)
    return _exit_code(step_run.exit_code_of(attempt, decision.exit_code))


def run_in_step(
    request: ConfigRequest, workload: Workload, run_dir: str | None, task: SlurmTask | LaunchedRank
) -> int:
    """Run CONFIG or a COMMAND in a Slurm task or launched rank; return the exit code of the task."""
    folder = Path(RUNS_FOLDER).absolute()
    if task.task != 0:
        return join_step(folder, task)
    try:
        run, entry, plan = _start_in_step(request, workload, run_dir, task)
    except TrainkitError as error:
        if isinstance(task, LaunchedRank):
            raise  # Raise the error, so that the launcher kills the other ranks.
        try:
            step_run.announce(folder, task, error.exit_code)
        except OSError:
            return _end_step(task, error)
        raise
    return lead_step(folder, task, run, entry, plan)


def _end_step(task: SlurmTask, error: TrainkitError) -> int:
    """Print the error, kill the Slurm step, and return the exit code.

    The step must be killed, because its other tasks cannot be notified of the error.
    """
    click.echo(error.render(), err=True)
    # Wait, because srun discards output that it has not yet read when the step exits.
    time.sleep(SRUN_READ_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(TrainkitError):
        task.end_step()
    return error.exit_code


def _exit_code(code: int) -> int:
    """Return the exit code for srun, which is 0 if the run saved and stopped on request."""
    return EXIT_OK if code == EXIT_STOPPED else code


def _start_in_step(
    request: ConfigRequest, workload: Workload, run_dir: str | None, task: SlurmTask | LaunchedRank
) -> tuple[RunDir, AttemptRecord, LaunchPlan]:
    """Plan, create and start the run as the Slurm step's first task; return its folder, record and plan."""
    from trainkit.launch.plan_run import gather, plan_run

    if isinstance(task, LaunchedRank):
        refuse_command(task, workload)
        sizes, target = task.tasks, launched_target(task)
    else:
        procs = request.flags.get("resources.gpus_per_node")
        sizes, target = _step_target(task, None if procs is None else int(str(procs[1])))
    flags = {**request.flags, **shape_flags(task, max(sizes))}
    loaded = replace(request, flags=flags).load_to_plan(workload, target)
    plan = plan_run(loaded, gather(loaded, workload, target=target), workload)
    folder = options.named_folder(run_dir)
    click.echo(describe_plan(plan, next_name(loaded.config.name, folder)), err=True)
    run, _, entry = _start(loaded.config, plan, folder, _kept_input(workload))
    click.echo(str(run.path))
    return run, entry, plan


def shape_flags(task: SlurmTask | LaunchedRank, per_node: int) -> dict[str, tuple[str, object]]:
    """Map the config keys for nodes and GPUs to (origin, value), for ranks that are already running."""
    origin = task.launcher if isinstance(task, LaunchedRank) else "srun"
    return {
        "resources.nodes": (f"{origin}, {task.num_nodes} nodes", task.num_nodes),
        "resources.gpus_per_node": (f"{origin}, {per_node} per node", per_node),
    }


def launched_target(task: LaunchedRank) -> Target:
    """Return a `Target` that describes ranks started by another launcher, such as torchrun."""
    from trainkit.cluster.target import Target

    reason = f"launcher: {task.launcher} has started {task.num_tasks} ranks; this is rank {task.first}"
    return Target("launcher", reason, node_sizes=task.tasks, per="gpu", finds_cluster=False)


def refuse_command(task: LaunchedRank, workload: Workload) -> None:
    """Raise UsageError if a COMMAND is given, because the launcher can start the COMMAND directly."""
    if workload.is_command:
        raise UsageError(
            f"{task.launcher} starts the ranks of a COMMAND itself",
            hint=f"start the COMMAND without trainkit: `{task.launcher} … {workload.argv[0]} …`",
        )


def _step_target(task: SlurmTask, num_procs: int | None) -> tuple[tuple[int, ...], Target]:
    """Return the number of workers on each node of a Slurm step, and a `Target` that describes the step.

    Each Slurm task is one rank or, if `num_procs` is given, the agent of a node. Raises UsageError if
    `num_procs` is given and a node has several tasks.
    """
    from trainkit.cluster.target import Target

    step = f"step {task.job_id}.{task.step_id}"
    if num_procs is None:
        reason = f"srun: {task.num_tasks} tasks in {step}, each one rank"
        return task.tasks, Target("srun", reason, node_sizes=task.tasks, per="gpu")
    if set(task.tasks) != {1}:
        raise UsageError(
            f"--gpus-per-node {num_procs} starts {num_procs} ranks in each task, but this step has "
            f"{task.num_tasks} tasks on {task.num_nodes} nodes",
            hint="use srun --ntasks-per-node=1 … --gpus-per-node N, or omit --gpus-per-node and start "
            "one task per rank",
        )
    sizes = (num_procs,) * task.num_nodes
    reason = f"srun: one task per node in {step}, each with {num_procs} ranks"
    return sizes, Target("srun", reason, node_sizes=sizes, per="node")


class RankJson(TypedDict):
    """The rank environment of the current process; values are None if it is not a rank."""

    is_rank: bool
    source: str | None
    """The source of the values, such as ``environment`` or ``slurm``."""
    rank: int | None
    local_rank: int | None
    world_size: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str | None
    """The address of rank 0."""
    master_port: int | None
    """The port of rank 0; None if the port is chosen when the ranks start."""
    hosts: list[str]
    reason: str
    """The origin of the values, or the reason why the current process is not a rank."""


@as_command("trainkit env", "srun --ntasks=4 trainkit env", "trainkit env --json")
@options.json_option("trainkit.cli.run:RankJson")
def env(as_json: bool) -> None:
    """Print the rank environment of the current process, or the reason why it is not a rank."""
    rank, reason = _rank_here()
    if as_json:
        values = {"is_rank": bool(rank), **{key: rank.get(key) for key in RANK_KEYS}, "reason": reason}
        click.echo(json_text({**values, "hosts": rank.get("hosts", ())}))
    elif not rank:
        click.echo(f"not a rank: {reason}")
    else:
        port = rank.get("master_port") or "chosen when the ranks start"
        click.echo(
            f"rank {rank['rank']} of {rank['world_size']}, "
            f"local rank {rank['local_rank']} of {rank['local_world_size']} on node {rank['node_rank']} of "
            f"{rank['num_nodes']} ({','.join(rank.get('hosts', ())) or 'this host'}); "
            f"rank 0 at {rank['master_addr']}, port {port}; {reason}"
        )


RANK_KEYS = (
    "source",
    "rank",
    "local_rank",
    "world_size",
    "local_world_size",
    "node_rank",
    "num_nodes",
    "hosts",
    "master_addr",
    "master_port",
)


def _rank_here() -> tuple[dict[str, Any], str]:
    """Return the rank environment of this process and its origin, or an empty dict and why there is none.

    The values are read from environment variables or from the Slurm step. Raises UsageError if the
    environment variables contradict each other.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return vars(find_rank_env()), "RANK is set"
    task = find_slurm_task()
    if task is None:
        return {}, str(reason_not_a_task())
    return {
        "source": "slurm",
        "rank": task.rank,
        "local_rank": task.local_task,
        "world_size": task.num_tasks,
        "local_world_size": task.tasks[task.node_rank],
        "node_rank": task.node_rank,
        "num_nodes": task.num_nodes,
        "hosts": task.hosts,
        "master_addr": master_address(task),
    }, f"task {task.task} of Slurm step {task.job_id}.{task.step_id}"
