"""``trainkit run``: run right here, in the foreground."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import ConfigRequest, one_node_config_options
from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, TrainkitError, UsageError

if TYPE_CHECKING:
    from trainkit.cluster.model import Target
    from trainkit.job.node.slurm_step import SlurmTask
    from trainkit.job.step_run import Announcement
    from trainkit.rundir import AttemptDir, RunDir


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit run",
        "trainkit run quickstart --gpus-per-node 2 --set train.steps=20",
        "srun --nodes=2 --ntasks-per-node=4 trainkit run quickstart",
    ),
)
@one_node_config_options
@click.option("--run-dir", metavar="DIR", help="Exact run folder, new or empty; default: runs/NAME.")
def command(request: ConfigRequest, run_dir: str | None) -> int:
    """Run CONFIG right here, with rank 0's output on the terminal: as one node, or as the ranks of the srun
    step that it finds itself in.

    Ctrl-C saves and ends; a second one ends at once. It ends too, after saving, when the terminal closes.
    """
    from trainkit.cli import launch
    from trainkit.cli.following import follow_run
    from trainkit.cluster.model import Target
    from trainkit.plan.launch import describe_plan

    if "SLURM_STEP_ID" in os.environ:
        from trainkit.job.node.slurm_step import find_slurm_task

        task = find_slurm_task()
        if task is not None and task.num_tasks > 1:
            return run_in_step(request, run_dir, task)
    loaded = request.load()
    if loaded.config.resources.nodes != 1:
        raise UsageError(
            f"the config asks for {loaded.config.resources.nodes} nodes, and `run` is one",
            hint="`trainkit submit` starts several; or add --set resources.nodes=1",
        )
    plan = launch.plan_for(loaded, target=Target("local", "local: run starts it right here"))
    # Somebody watches, and wants to see what failed.
    plan = replace(plan, requeue=replace(plan.requeue, on=()))
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    forwarder = _Forwarder()
    run, value = launch.start_new_run(loaded, plan, run_dir, "run")
    forwarder.install()
    launch.print_started(value, as_json=False)
    code = follow_run(run, value["attempt"], to_stderr=False, on_poll=lambda: forwarder.forward(run))
    return EXIT_INTERRUPTED if signal.SIGINT in forwarder.received else code


class _Forwarder:
    """Passes stop signals of this process on to the supervisor; the handler only notes them."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self.num_sent = 0

    def install(self) -> None:
        from trainkit.job.signals import NOTICE_SIGNALS

        for number in NOTICE_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    def forward(self, run: RunDir) -> None:
        """Send what has come since the last call."""
        from trainkit.control.local import send
        from trainkit.job.record import newest_entry

        while self.num_sent < len(self.received):
            number = self.received[self.num_sent]
            self.num_sent += 1
            if number == signal.SIGINT:
                again = self.received[: self.num_sent].count(number) > 1
                click.echo("\nending at once" if again else "\nsaving; Ctrl-C again ends at once", err=True)
            entry = newest_entry(run)
            if entry is not None:
                send(entry, number)


POLL_S = 0.1
SRUN_READS_S = 1.0


def run_in_step(request: ConfigRequest, run_dir: str | None, task: SlurmTask) -> int:
    """Run CONFIG as this task of the step; the exit code of this task."""
    from trainkit.cli.following import tell_end
    from trainkit.job.step_run import (
        announce,
        await_announcement,
        exit_code_of,
        run_first_task,
        run_task,
        withdraw,
    )
    from trainkit.rundir import RUNS_FOLDER

    folder = Path(RUNS_FOLDER).absolute()
    if task.task != 0:
        found = await_announcement(folder, task)
        return found if isinstance(found, int) else _quietly(run_task(found))
    try:
        announced = _make_run(request, run_dir, task)
    except TrainkitError as error:
        if _tell_the_others(folder, task, error):
            raise
        return _end_the_step(task, error)
    announce(folder, task, {"run_dir": str(announced.run.path), "attempt": announced.attempt})
    sys.stdout.flush()
    terminal = [os.dup(stream.fileno()) for stream in (sys.stdout, sys.stderr)]
    # From here on the agent's own words go to its log; rank 0's are shown.
    decision = run_first_task(announced, lambda attempt, ended: _show(attempt, ended, terminal[0]))
    for kept, stream in zip(terminal, (sys.stdout, sys.stderr), strict=True):
        stream.flush()
        os.dup2(kept, stream.fileno())
    withdraw(folder, task)
    tell_end(announced.run)
    return _quietly(exit_code_of(decision, announced.run.attempt(announced.attempt)))


def _tell_the_others(folder: Path, task: SlurmTask, error: TrainkitError) -> bool:
    """Tell the other tasks that there is nothing to run; whether they could be told."""
    from trainkit.job.step_run import announce

    try:
        announce(folder, task, {"exit_code": error.exit_code})
    except OSError:
        return False
    return True


def _end_the_step(task: SlurmTask, error: TrainkitError) -> int:
    """Say what is wrong, and then end all tasks of the step: nothing else reaches the others."""
    from trainkit.slurm.control import kill_step

    click.echo(error.render(), err=True)
    # What a task has printed is lost when srun ends its step before it has read that.
    time.sleep(SRUN_READS_S)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(TrainkitError):
        kill_step(task.job_id, task.step_id, "TERM")
    return error.exit_code


def _quietly(code: int) -> int:
    """The exit code as srun should see it: a run that saved and ended as it was told has not failed."""
    return EXIT_OK if code == EXIT_STOPPED else code


def _make_run(request: ConfigRequest, run_dir: str | None, task: SlurmTask) -> Announcement:
    from trainkit.cli import launch
    from trainkit.config import dump_effective
    from trainkit.control.run_registry import register
    from trainkit.job.record import add_slurm_entry, claim_entry, open_attempt, run_lock
    from trainkit.job.step_run import Announcement
    from trainkit.plan.launch import describe_plan
    from trainkit.rundir import log_event
    from trainkit.submit.create import create_run, plan_text

    target = _target(request, task)
    assert target.node_sizes is not None
    shape = {
        "resources.nodes": (f"srun, {task.num_nodes} nodes", task.num_nodes),
        "resources.gpus_per_node": (f"srun, {max(target.node_sizes)} a node", max(target.node_sizes)),
    }
    loaded = replace(request, flags={**request.flags, **shape}).load()
    plan = launch.plan_for(loaded, target=target)
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    run, name = create_run(
        loaded, None if run_dir is None else Path(run_dir), ["trainkit", *sys.argv[1:]], "srun"
    )
    with run_lock(run):
        attempt = open_attempt(run, dump_effective(loaded.config), plan_text(plan))
        add_slurm_entry(run, attempt.number, task.job_id, "run", "srun", step_id=task.step_id)
        claim_entry(run, attempt.number, os.getpid())
    log_event(run, attempt.number, "submitted", job_id=task.job_id, reason="run")
    log_event(run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes)
    register(run, name)
    click.echo(str(run.path))
    return Announcement(run, attempt.number)


def _target(request: ConfigRequest, task: SlurmTask) -> Target:
    """A task is a rank, unless each node has one task and more was asked of it: then it is a node's agent."""
    from trainkit.cluster.model import Target

    procs = request.flags.get("resources.gpus_per_node")
    if procs is None:
        reason = f"srun: {task.num_tasks} tasks in step {task.job_id}.{task.step_id}, each one rank"
        return Target("srun", reason, node_sizes=task.tasks, per="gpu")
    count = int(str(procs[1]))
    if set(task.tasks) != {1}:
        raise UsageError(
            f"--procs {count} starts {count} ranks in every task, and this step has {task.num_tasks} tasks "
            f"on {task.num_nodes} nodes",
            hint="srun --ntasks-per-node=1 … --procs N, or one task a rank without --procs",
        )
    reason = f"srun: one task a node in step {task.job_id}.{task.step_id}, each with {count} ranks"
    return Target("srun", reason, node_sizes=(count,) * task.num_nodes, per="node")


def _show(attempt: AttemptDir, ended: threading.Event, terminal: int) -> None:
    """Print rank 0's log to the terminal as it grows."""
    from trainkit.observe.follow import LogTail

    tail = LogTail(attempt.rank_log(0))
    while not ended.wait(POLL_S):
        _print(tail.read(), terminal)
    _print(tail.read_rest(), terminal)


def _print(lines: list[str], terminal: int) -> None:
    if lines:
        os.write(terminal, ("\n".join(lines) + "\n").encode(errors="replace"))
