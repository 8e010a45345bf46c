"""`trainkit cancel`, `requeue`, `stacks`, `attach`, `shell`: what acts on a run or allocation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import click

from trainkit.backends.jobs import live_entry
from trainkit.cli import options
from trainkit.cli.help import as_command, option
from trainkit.cli.output import echo_json
from trainkit.control.cancel import cancel_group, cancel_run
from trainkit.errors import EXIT_FAILED, EXIT_OK, TrainkitError, UsageError
from trainkit.folders import shown_path
from trainkit.formats import rank_list, there_are
from trainkit.job.failure.stacks import Reply, explain_silence, gather, group_replies
from trainkit.launch.config_request import ConfigRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.run.group import RunGroup
from trainkit.run.record import read_job
from trainkit.run.registry import find_run, find_run_or_group
from trainkit.run.rundir import RUNS_FOLDER, AttemptDir, RunDir

WAIT_S = 20.0
"""Agents poll every two seconds and give their ranks three to reply; network filesystems add latency."""


@as_command("trainkit cancel last", "trainkit cancel last --wait", "trainkit cancel last --now")
@options.run_argument
@option("--now", "Kill the run immediately, without saving.")
@option("--wait", "Wait until the run has ended.")
@options.trust_option
@options.json_option
def cancel(run_name: str, now: bool, wait: bool, as_json: bool) -> int:
    """Cancel RUN: it saves and exits, or is killed after the grace time.

    For a group or a bench, cancels all of its runs. Succeeds if RUN has already ended. With --wait, the exit
    code is 1 if another command has started it again since.
    """
    found = find_run_or_group(run_name, acts=True)
    options.refuse_untrusted(found.path)
    if isinstance(found, RunGroup):
        result = cancel_group(found, now=now, wait=wait)
    else:
        result = cancel_run(found, now=now, wait=wait, warn=lambda text: click.echo(text, err=True))
    click.echo(result.message, err=True)
    if as_json:
        echo_json(result.facts)
    return EXIT_FAILED if wait and result.state in ("cancelling", "restarted") else EXIT_OK


@as_command("trainkit requeue last", "trainkit requeue last --json")
@options.run_argument
@options.trust_option
@options.json_option
def requeue(run_name: str, as_json: bool) -> None:
    """Start the next attempt of RUN with the same config and plan.

    A running job saves, stops and is then restarted. Refused while RUN is being cancelled.
    """
    from trainkit.cli.started import print_started
    from trainkit.control.requeue import requeue_run

    run = find_run(run_name, acts=True)
    options.refuse_untrusted(run.path)
    requeued = requeue_run(run)
    job, entry = requeued.job, requeued.entry
    if not requeued.is_started:
        click.echo(f"{run.shown}: {entry.job_id} is saving and will be requeued", err=True)
        if not as_json:
            return
        entry = replace(entry, attempt=entry.attempt + 1)
    print_started(run, job.name, entry, str(job.backend), as_json)


@as_command("trainkit stacks last", "trainkit stacks last --rank 1", "trainkit stacks last --json")
@options.run_argument
@option("--rank R", "Print all threads of this rank.", type=options.INDEX)
@options.json_option
def stacks(run_name: str, rank: int | None, as_json: bool) -> None:
    """Print the Python stacks of RUN's ranks, grouping ranks with identical stacks.

    Training continues. Ranks that do not respond, and the ranks of a COMMAND, are inspected with py-spy if it
    is installed.
    """
    run = find_run(run_name, acts=True)
    attempt, replies, silent = _ask_stacks(run, rank)
    click.echo(f"{run.shown}, attempt {attempt.number}", err=True)
    groups = group_replies(replies)
    if as_json:
        value = {
            "run_dir": str(run.path),
            "attempt": attempt.number,
            "replies": [asdict(reply) for reply in replies],
            "groups": [[reply.rank for reply in group] for group in groups],
            "silent": silent,
        }
        echo_json(value)
        return
    for group in groups:
        click.echo(_group_text(group, all_threads=rank is not None))
    for reply in replies:
        if reply.problem:
            click.echo(f"rank {reply.rank} on {reply.host}, process {reply.pid}: {reply.problem}")
    waits = explain_silence(replies)
    if waits.lock is not None:
        click.echo(waits.text)
    if silent:
        click.echo(f"no response from {rank_list(silent)}: ended, or the host does not respond")


def _ask_stacks(run: RunDir, rank: int | None) -> tuple[AttemptDir, list[Reply], list[int]]:
    """The running attempt, the replies of its ranks, or of one, and the ranks that did not reply.

    Raises UsageError for a run or rank that does not run, TrainkitError when no rank replied.
    """
    attempt = running_attempt(run)
    world_size = LaunchPlan.read(attempt.plan_file, executes=False).world_size
    if rank is not None and rank >= world_size:
        raise UsageError(f"the run has no rank {rank}", hint=there_are(range(world_size)))
    try:
        replies = gather(attempt, world_size, rank, WAIT_S)
    except OSError as error:
        raise UsageError(
            f"{shown_path(attempt.path)} cannot be written: {error.strerror}",
            hint="requesting stacks needs write access to the run folder",
        ) from error
    if not replies:
        raise TrainkitError(
            f"no rank of {run.shown} responded within {WAIT_S:.0f} s",
            hint=f"`trainkit status {run.word}` shows whether it is still running",
        )
    asked = range(world_size) if rank is None else (rank,)
    return attempt, replies, sorted(set(asked) - {reply.rank for reply in replies})


def running_attempt(run: RunDir) -> AttemptDir:
    """The attempt whose ranks are running; raises UsageError when there is none."""
    entry = live_entry(run, read_job(run), "stacks")
    if entry is None:
        raise UsageError(
            f"{run.shown} is not running", hint=f"`trainkit status {run.word}` shows how it ended"
        )
    attempt = run.attempt(entry.attempt)
    if not any(attempt.logs_dir.glob("rank-*.log")):
        raise UsageError(
            f"no rank of attempt {attempt.number} of {run.shown} has been started yet",
            hint=f"`trainkit status {run.word}` shows what it waits for",
        )
    return attempt


def _group_text(group: Sequence[Reply], all_threads: bool) -> str:
    hosts = ", ".join(sorted({reply.host for reply in group}))
    lines = [f"{rank_list([reply.rank for reply in group])} on {hosts}{_position(group)}"]
    for name, frames in group[0].threads.items():
        lines += [f"  thread {name}"] if all_threads else []
        # A frame is shown without the path of the site-packages folder.
        short = [re.sub(r"\(\S*/(?:site|dist)-packages/", "(", frame) for frame in frames]
        lines += [f"    {frame}" for frame in short if "(<frozen importlib" not in frame]
        if not all_threads:
            break
    return "\n".join([*lines, ""])


def _position(group: Sequence[Reply]) -> str:
    """Step and phase of a group of ranks as text; empty if they differ or are unknown."""
    phases = {(reply.step, reply.phase) for reply in group}
    if len(phases) > 1 or group[0].phase is None:
        return ""
    step = "before the first step" if group[0].step is None else f"step {group[0].step}"
    longest_s = max(reply.since_s or 0.0 for reply in group)
    return f": {step}, in {group[0].phase} for {longest_s:.1f} s"


@as_command("trainkit attach last", "trainkit attach last --node 1")
@options.run_argument
@option("--node N", "Node of the job, counted from 0; default: 0.", type=options.INDEX, default=0)
def attach(run_name: str, node: int) -> NoReturn:
    """Open a shell on a node of RUN's job, next to its processes."""
    from trainkit.control import shell

    shell.attach(find_run(run_name, acts=True), node)


@as_command(
    "trainkit shell --nodes 2 --gpus-per-node 4",
    "trainkit shell quickstart --partition debug --time 00:30:00",
)
@options.config_argument
@options.profile_option
@options.set_option
@options.slurm_options
@options.shape_options
@option("--dry-run", "Print the command and the shell's startup file; run nothing.")
def shell(
    config: str | None, profile: str | None, overrides: tuple[str, ...], dry_run: bool, **typed: Any
) -> None:
    """Allocate nodes and open a shell on the first one, with the environment of a job.

    In that shell, `srun trainkit run CONFIG` trains on all allocated nodes.
    """
    from trainkit.control.shell import open_shell, shell_argv, shell_start_file

    flags = options.config_flags(typed)
    loaded = ConfigRequest(config or "shell", profile, overrides, flags).load()
    if loaded.config.launch.container is not None:
        click.echo("note: the shell runs outside launch.container", err=True)
    if not dry_run:
        open_shell(loaded, Path(RUNS_FOLDER))
    start_file = shell_start_file(loaded.config, Path.cwd())
    click.echo(shlex.join(shell_argv(loaded, "START_FILE")))
    click.echo(start_file, nl=False)
