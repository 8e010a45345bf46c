"""Implements `trainkit ckpt`, which lists, verifies, prunes, averages and exports a run's checkpoints."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TypedDict

import click

from trainkit.backends.jobs import require_not_running
from trainkit.cli.help import as_group, examples, option, terminal_width
from trainkit.cli.options import COUNT, INDEX, json_option, run_argument
from trainkit.cli.output import echo_json
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.formats import size, table
from trainkit.run import manifest
from trainkit.run.record import read_job
from trainkit.run.registry import find_run
from trainkit.run.rollbacks import checkpoints_in_line
from trainkit.run.rundir import RunDir, run_lock

HEADING = ["CHECKPOINT", "STATE", "TIME", "SIZE", "LAYOUT", "BEST", "REASON"]


CheckpointsJson = list[manifest.ListedCheckpoint]


class VerifiedCheckpoint(TypedDict):
    """A published checkpoint whose files were verified by comparing their hashes with the manifest."""

    step: int
    path: str
    damage: str | None
    """A description of the damage; None if the checkpoint is intact."""


VerifiedJson = list[VerifiedCheckpoint]


class PrunedJson(TypedDict):
    """The removed checkpoints and the kept checkpoints."""

    run_dir: str
    removed: list[str]
    """The folders that were removed, or that would be removed with ``--dry-run``."""
    dry_run: bool
    kept: list[str]


@as_group(
    "ckpt",
    "trainkit ckpt ls last",
    "trainkit ckpt verify last",
    "trainkit ckpt prune last --keep-last 1 --dry-run",
    "trainkit ckpt export last --out exported",
)
def command() -> None:
    """List, verify, prune, average and export the checkpoints of a run."""


@command.command(epilog=examples("trainkit ckpt ls last", "trainkit ckpt ls last --json"))
@run_argument
@json_option("trainkit.cli.ckpt:CheckpointsJson")
def ls(run_name: str, as_json: bool) -> None:
    """List the checkpoints of RUN, including rejected ones and unfinished saves.

    Only file sizes are compared with the manifest. To verify the contents of the files, use `trainkit ckpt
    verify`.
    """
    run = find_run(run_name)
    listed = manifest.list_checkpoints(run)
    if as_json:
        echo_json([asdict(item) for item in listed])
    elif listed:
        click.echo(table([HEADING, *(_row(item) for item in listed)], fit=terminal_width()))
    else:
        click.echo(f"{run.shown} has no checkpoints yet", err=True)


@command.command(epilog=examples("trainkit ckpt verify last", "trainkit ckpt verify last --json"))
@run_argument
@option("--step N", "Verify only the checkpoint of step N.", type=INDEX)
@json_option("trainkit.cli.ckpt:VerifiedJson")
def verify(run_name: str, step: int | None, as_json: bool) -> int:
    """Compare every file in RUN's published checkpoints with its recorded hash.

    The exit code is 1 if a file differs. No files are changed. You need not delete damaged
    checkpoints, because `trainkit resume` skips them.
    """
    results: list[VerifiedCheckpoint] = []
    for checkpoint in checkpoints_of(find_run(run_name), step):
        damage = manifest.find_damage(checkpoint)
        if not checkpoint.path.is_dir():
            continue  # The run has deleted this checkpoint since it was listed.
        results.append({"step": checkpoint.step, "path": str(checkpoint.path), "damage": damage or None})
        if not as_json:
            click.echo(f"{checkpoint.path.name}  {f'damaged: {damage}' if damage else 'intact'}")
    if as_json:
        echo_json(results)
    return EXIT_FAILED if any(result["damage"] for result in results) else EXIT_OK


@command.command(
    epilog=examples(
        "trainkit ckpt prune last --keep-last 1 --dry-run", "trainkit ckpt prune last --keep-last 1 --json"
    )
)
@run_argument
@option("--keep-last N", "Number of the most recent checkpoints to keep.", type=COUNT, required=True)
@option("--dry-run", "Print which checkpoints would be removed, without removing them.")
@json_option("trainkit.cli.ckpt:PrunedJson")
def prune(run_name: str, keep_last: int, dry_run: bool, as_json: bool) -> None:
    """Delete the checkpoints of RUN except for the newest N, the best one, and the newest intact one.

    The command fails while RUN is running. Checkpoints that were renamed with the suffix `.rejected` or
    `.rolled-back` are kept.
    """
    run = find_run(run_name, acts=True)
    with contextlib.nullcontext() if dry_run else run_lock(run):
        require_not_running(run, read_job(run), "ckpt prune")
        there = checkpoints_in_line(run)
        doomed = manifest.obsolete(there, keep_last, manifest.best_step(run.checkpoints_dir))
        intact = manifest.newest_intact(there) if doomed else None
        doomed = [checkpoint for checkpoint in doomed if checkpoint != intact]
        for checkpoint in doomed:
            if not dry_run:
                manifest.remove(checkpoint.path)
            if not as_json:
                click.echo(f"{'would remove' if dry_run else 'removed'} {shown_path(checkpoint.path)}")
    kept = [checkpoint for checkpoint in there if checkpoint not in doomed]
    if as_json:
        value: PrunedJson = {
            "run_dir": str(run.path),
            "removed": [str(item.path) for item in doomed],
            "dry_run": dry_run,
            "kept": [str(item.path) for item in kept],
        }
        echo_json(value)
    else:
        click.echo(f"kept: {', '.join(item.path.name for item in kept) or 'nothing was there'}", err=True)


def checkpoints_of(run: RunDir, step: int | None) -> list[manifest.Checkpoint]:
    """Return a run's published checkpoints; if `step` is given, only the checkpoint at that step.

    Raises UsageError if no checkpoint is found.
    """
    there = checkpoints_in_line(run)
    if not there:
        raise UsageError(
            f"{run.shown} has no published checkpoint",
            hint=f"`trainkit ckpt ls {run.quoted}` shows rejected checkpoints and unfinished saves",
        )
    wanted = [checkpoint for checkpoint in there if step in (None, checkpoint.step)]
    if not wanted:
        steps = ", ".join(str(checkpoint.step) for checkpoint in there)
        raise UsageError(f"{run.shown} has no checkpoint for step {step}", hint=f"there are: {steps}")
    return wanted


def _row(item: manifest.ListedCheckpoint) -> list[str]:
    degrees = [f"{name}={degree}" for name, degree in (item.layout or {}).items() if degree != 1]
    metric, value = item.best_metric, item.best_value
    best = "best" if metric is None or value is None else f"best {metric}={value:.4f}"
    return [
        item.name,
        item.state,
        item.time,
        size(item.bytes),
        " ".join(degrees) or ("-" if item.layout is None else "one process"),
        best if item.best else "",
        item.reason or "",
    ]
