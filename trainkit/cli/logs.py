"""Implements ``trainkit logs``, and follows the output of runs that other commands started."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import click

from trainkit.backend import SUPERVISOR_EXIT_S, backend_of
from trainkit.backends.jobs import liveness_probe
from trainkit.backends.slurm.failed_starts import batch_log
from trainkit.cli.help import as_command, option
from trainkit.cli.options import COUNT, INDEX, run_argument
from trainkit.cli.output import echo_error, escaped
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, UsageError
from trainkit.folders import is_full, shown_path
from trainkit.formats import there_are
from trainkit.observe.current import look_at
from trainkit.observe.logs import follow, last_texts, log_of, ranks_of_nodes, start_of_last
from trainkit.observe.status import FAILURE_LOG_LINES, failure_lines
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.events import diverged_since, events_of, with_divergence
from trainkit.run.files import MAX_LINE_BYTES, Tail, forward_lines, open_file
from trainkit.run.history import read_plan
from trainkit.run.record import AttemptRecord, read_job
from trainkit.run.registry import find_attempt, find_run
from trainkit.run.rundir import AttemptDir, RunDir

END_S = 3.0
SHOW_S = 0.1


@as_command("trainkit logs last", "trainkit logs last -f", "trainkit logs last --rank 1 --lines 20")
@run_argument
@click.option(
    "-f",
    "--follow",
    "following",
    is_flag=True,
    help="Follow the log across attempts until the run stops, then print its outcome. The exit code is 1 if "
    "the run failed.",
)
@option("--rank R", "Print the output of rank R; default: rank 0.", type=INDEX)
@option("--node N", "Print the output of all ranks on node N and of its agent.", type=INDEX)
@option("--all", "Print the output of all ranks, all agents and the supervisor.", name="all_ranks")
@option(
    "--attempt A", "Print the output of attempt A; default: the newest attempt.", name="number", type=COUNT
)
@option("--lines N", "Print only the last N lines.", type=INDEX)
def command(
    run_name: str,
    following: bool,
    rank: int | None,
    node: int | None,
    all_ranks: bool,
    number: int | None,
    lines: int | None,
) -> int:
    """Print the log of rank 0 of RUN, or the logs of the selected ranks.

    If the job ended before its ranks started, the output of the batch script is printed.
    """
    if sum((rank is not None, node is not None, all_ranks)) > 1:
        raise UsageError("--rank, --node and --all are mutually exclusive", hint="specify only one of them")
    run = find_run(run_name)
    attempt = find_attempt(run, number)
    logs_of = partial(_logs_of, rank=rank, node=node, all_ranks=all_ranks)
    named = node is not None or all_ranks
    if following:
        is_alive = liveness_probe(run, lambda reason: click.echo(reason, err=True))
        for source, text in follow(run, attempt.number, logs_of, is_alive, lines):
            click.echo(f"{source} | {text}" if named else text)
    job = read_job(run)
    entry, newest = job.of_attempt(attempt.number), job.newest or AttemptRecord()
    if following and entry.has_started:
        return print_end(run, newest)
    paths = [path for path in logs_of(attempt) if path.exists()]
    if not paths and not entry.has_started and (log := batch_log(run, job, entry.job_id)).exists():
        click.echo("the supervisor has not started yet; output of the batch script:", err=True)
        paths = [log]
    if not paths and following:
        return print_end(run, newest)
    if not paths:
        raise UsageError(
            f"attempt {attempt.number} of {run.shown} has not written the requested log",
            hint=f"`trainkit status {run.quoted}` shows the progress of the run; "
            f"the logs of the attempt are in {shown_path(attempt.logs_dir)}",
        )
    output = getattr(sys.stdout, "whole", None)
    for path in paths:
        try:
            stream = open_file(path)
        except OSError as error:
            message = f"{shown_path(path)} cannot be read: {error.strerror}"
            if len(paths) == 1:
                raise UsageError(message, hint="use --rank, --node or --all to print another log") from None
            echo_error(f"warning: {message}")
            continue
        with stream:
            stream.seek(0 if lines is None else start_of_last(stream, lines, unfinished=True))
            for raw in forward_lines(stream, MAX_LINE_BYTES):
                text = raw.removesuffix(b"\n").decode(errors="replace")
                click.echo(f"{path.stem} | {text}" if named else text, file=output)
    if not named and paths == logs_of(attempt) and paths[0].stat().st_size == 0:
        click.echo(f"rank {rank or 0} has printed nothing in attempt {attempt.number}", err=True)
    if following:
        return print_end(run, newest)
    if (said := with_divergence(None, diverged_since(run, attempt.number))) is not None:
        echo_error(f"warning: {said}")
    if (read_end(attempt) or AttemptEnd()).state == "failed":
        which = f"{run.quoted} --attempt {attempt.number}"
        click.echo(f"hint: `trainkit diagnose {which}` shows why the attempt failed", err=True)
    return EXIT_OK


def _logs_of(attempt: AttemptDir, rank: int | None, node: int | None, all_ranks: bool) -> list[Path]:
    """Return the selected logs of an attempt."""
    if all_ranks:
        return sorted(attempt.logs_dir.glob("*.log"))
    plan = read_plan(attempt)
    nodes = ranks_of_nodes(plan)  # the list is empty if the attempt's plan is unknown
    if node is not None and nodes and node >= len(nodes):
        raise UsageError(f"{attempt.run.shown} has no node {node}", hint=there_are(range(len(nodes))))
    if node is not None:
        return [attempt.node_log(node), *map(attempt.rank_log, nodes[node] if nodes else ())]
    if rank is not None and nodes and rank >= nodes[-1].stop:
        raise UsageError(f"{attempt.run.shown} has no rank {rank}", hint=there_are(range(nodes[-1].stop)))
    return [log_of(attempt, plan, rank or 0)]


def follow_run(
    run: RunDir,
    attempt: int,
    to_stderr: bool,
    on_poll: Callable[[], None] = lambda: None,
    shows_log: bool = True,
) -> int:
    """Print rank 0's log and the run's events until the run ends; return the exit code of the command.

    After the run has ended, print how it ended. `on_poll` is called several times per second. If `shows_log`
    is False, nothing is printed before the run ends. KeyboardInterrupt propagates to the caller.
    """
    run.hold()
    events, is_notified = Tail(run.events_file), False
    is_alive = liveness_probe(run, lambda text: click.echo(text, err=True))

    def poll() -> bool | None:
        nonlocal is_notified
        on_poll()
        if not is_notified and is_full(run.path):
            is_notified = True
            echo_error(f"warning: the disk that contains {run.shown} is full")
        run.follow()
        events.path = run.events_file
        if shows_log:
            _print_events(events, attempt)
        return is_alive()

    for _, line in follow(run, attempt, lambda attempt: [attempt.rank_log(0)], poll):
        if shows_log:
            click.echo(line, err=to_stderr)
    entry = read_job(run).newest
    if entry is not None:
        # Wait for the supervisor to exit, because the user's next command, such as `resume`, might fail while
        # the supervisor is still running.
        backend_of(entry).wait_until_gone(run, entry, SUPERVISOR_EXIT_S)
    _print_events(events, attempt)
    return print_end(run, entry or AttemptRecord())


@contextlib.contextmanager
def kept_terminal() -> Iterator[int]:
    """Restore the terminal after a block that redirects stdout and stderr.

    Yields a file descriptor that writes to the terminal.
    """
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    kept = [os.dup(stream.fileno()) for stream in streams]
    try:
        yield kept[0]
    finally:
        for descriptor, stream in zip(kept, streams, strict=True):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


def show_rank_0(attempt: AttemptDir, ended: threading.Event, terminal: int) -> None:
    """Print rank 0's log to a terminal as it grows, until `ended` is set."""
    tail = Tail(attempt.rank_log(0))
    while not ended.wait(SHOW_S):
        _write(tail.texts(), terminal)
    _write(tail.texts(unfinished=True), terminal)


def _write(texts: Iterable[str], terminal: int) -> None:
    if lines := list(texts):
        with contextlib.suppress(OSError):  # a closed terminal must not keep training from saving
            os.write(terminal, escaped("\n".join(lines) + "\n").encode(errors="replace"))


def follow_detachable(run: RunDir, attempt: int, to_stderr: bool) -> int:
    """Follow a run like `follow_run`, but let Ctrl-C detach with exit code 130 while the job continues."""
    try:
        return follow_run(run, attempt, to_stderr)
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; the job is still running: `trainkit logs {run.quoted} -f` follows its log, "
            f"`trainkit cancel {run.quoted}` cancels the job",
            err=True,
        )
        return EXIT_INTERRUPTED


LOGGED_EVENTS = {
    "waiting",
    "rendezvous",
    "training",
    "resumed",
    "first_step",
    "evaluated",
    "checkpoint_begin",
    "checkpoint_commit",
    "checkpoint_rejected",
    "checkpoint_failed",
}
"""Events that are not printed, because other output, such as rank 0's log, already shows the same
information."""


def _print_events(events: Tail, attempt: int) -> None:
    for event in events_of(events.records()):
        if event.name not in LOGGED_EVENTS and (event.attempt or 0) >= attempt:
            click.echo(event.line, err=True)


def print_end(run: RunDir, entry: AttemptRecord) -> int:
    """Print to stderr how the newest attempt ended; return 0 if the run finished or was stopped, else 1.

    `entry` is the attempt's record in job.json, read after the attempt has ended.
    """
    run.follow()
    if not (numbers := run.attempt_numbers()):
        click.echo(f"ended: {run.shown} was deleted while the run was in progress", err=True)
        return EXIT_FAILED
    attempt = run.attempt(numbers[-1])
    deadline_s = time.monotonic() + END_S
    # After `cancel --now`, the end of the attempt may be recorded with a short delay.
    while (end := read_end(attempt)) is None and entry.is_cancelled and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if end is None:
        status = look_at(run, lambda _: None)[1]
        if status.state == "cancelled":  # Slurm cancelled the job before the run could record how it ended.
            click.echo(f"cancelled: {status.reason}", err=True)
            return EXIT_FAILED
        if not entry.has_started:
            shown = f"`trainkit status {run.quoted}` shows the state of the job in Slurm"
            click.echo(f"died: the job ended before the supervisor began; {shown}", err=True)
            return EXIT_FAILED
        log = attempt.supervisor_log
        last_line = " ".join(last_texts(log, 1))
        ends = f"ends with: {last_line}" if last_line else "has no line"
        click.echo(f"died: the supervisor exited without recording the outcome; {log} {ends}", err=True)
        if is_full(run.path):
            hint = f"`trainkit resume {run.quoted}` restarts the run"
            click.echo(f"hint: the disk with the run folder is full; free some space, then {hint}", err=True)
        return EXIT_FAILED
    since = diverged_since(run, attempt.number)
    click.echo(f"{end.state}: {with_divergence(end.reason, since)}", err=True)
    if end.verdict:
        # Rank 0's log has already been shown.
        num_log_lines = 0 if end.verdict.rank == 0 else FAILURE_LOG_LINES
        for line in failure_lines(end.verdict, run.quoted, num_log_lines=num_log_lines):
            click.echo(line, err=True)
    if end.state == "stopped":
        click.echo(f"`trainkit resume {run.quoted}` continues the run", err=True)
    return EXIT_OK if end.exit_code in (EXIT_OK, EXIT_STOPPED) else EXIT_FAILED
