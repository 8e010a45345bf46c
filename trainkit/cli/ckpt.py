"""Implements `trainkit ckpt`, which lists, verifies, pins, prunes, averages and exports checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import TypedDict, TypeVar

import click

from trainkit.backends.jobs import require_not_running
from trainkit.cli.help import as_group, examples, option, terminal_width
from trainkit.cli.options import COUNT, INDEX, json_option, run_argument
from trainkit.cli.output import echo_json, echo_result
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.formats import size, table
from trainkit.plan.keep import KeepRule, best_values, obsolete
from trainkit.run import manifest
from trainkit.run import pins as pins_module
from trainkit.run.checkpoint_list import ListedCheckpoint, list_checkpoints
from trainkit.run.pins import delete, pins, remove_killed
from trainkit.run.record import read_job
from trainkit.run.registry import find_run
from trainkit.run.rollbacks import checkpoints_in_line
from trainkit.run.rundir import RunDir, run_lock

HEADING = ["CHECKPOINT", "STATE", "TIME", "SIZE", "LAYOUT", "BEST", "REASON"]
PINNED = "PINNED BY"
"""The heading of a column that is shown only if a checkpoint is pinned."""
DEFAULT_HOLDER = "user"


T = TypeVar("T")
CheckpointsJson = list[ListedCheckpoint]


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


class PinJson(TypedDict):
    """A pin that was made or removed."""

    path: str
    """The folder of the checkpoint."""
    by: str
    """The holder of the pin."""
    pinned_by: list[str]
    """The holders of all remaining pins of the checkpoint."""


@as_group(
    "ckpt",
    "trainkit ckpt ls last",
    "trainkit ckpt verify last",
    "trainkit ckpt prune last --keep-last 1 --dry-run",
    "trainkit ckpt pin last --step 1000",
    "trainkit ckpt export last --out exported",
)
def command() -> None:
    """List, verify, pin, prune, average and export the checkpoints of a run."""


@command.command(epilog=examples("trainkit ckpt ls last", "trainkit ckpt ls last --json"))
@run_argument
@json_option("trainkit.cli.ckpt:CheckpointsJson")
def ls(run_name: str, as_json: bool) -> None:
    """List the checkpoints of RUN, including rejected ones and unfinished saves.

    Only file sizes are compared with the manifest. To verify the contents of the files, use `trainkit ckpt
    verify`.
    """
    run = find_run(run_name)
    listed = list_checkpoints(run)
    if as_json:
        echo_json([asdict(item) for item in listed])
    elif listed:
        rows = [HEADING, *(_row(item) for item in listed)]
        if any(item.pinned_by for item in listed):
            holders = [PINNED, *(", ".join(item.pinned_by) for item in listed)]
            rows = [[*row[:-1], holder, row[-1]] for row, holder in zip(rows, holders, strict=True)]
        click.echo(table(rows, fit=terminal_width()))
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
        "trainkit ckpt prune last --keep-last 1 --dry-run",
        "trainkit ckpt prune last --keep-last 1 --json",
        "trainkit ckpt prune last --keep last=2,every=1000,at=500,log_spaced,best=2",
    )
)
@run_argument
@option("--keep-last N", "Number of the most recent checkpoints to keep.", type=COUNT)
@option(
    "--keep RULE",
    "Which checkpoints to keep, with the parts of `checkpoint.keep`, such as last=3,every=1000; last is 3 by "
    "default, and last=all keeps all.",
    name="keep",
)
@option("--dry-run", "Print which checkpoints would be removed, without removing them.")
@json_option("trainkit.cli.ckpt:PrunedJson")
def prune(run_name: str, keep_last: int | None, keep: str | None, dry_run: bool, as_json: bool) -> None:
    """Delete the checkpoints of RUN except for the newest N, the best one, and the newest intact one.

    With --keep, the checkpoints that the rule keeps stay. Pinned checkpoints always stay; see `trainkit ckpt
    pin`. The command fails while RUN is running. Checkpoints that were renamed with the suffix `.rejected` or
    `.rolled-back` are kept.
    """
    if (keep_last is None) == (keep is None):
        message = "--keep-last and --keep both say" if keep else "neither --keep-last nor --keep says"
        hint = "use `--keep-last 1`, or a rule such as `--keep last=3,every=1000`"
        raise UsageError(f"{message} which checkpoints to keep", hint=hint)
    rule = KeepRule(last=keep_last) if keep is None else KeepRule.parse(keep)
    run = find_run(run_name, acts=True)
    with contextlib.nullcontext() if dry_run else run_lock(run):
        require_not_running(run, read_job(run), "ckpt prune")
        there = checkpoints_in_line(run)
        best, held, values = manifest.best_step(run.checkpoints_dir), pins(run), best_values(there)
        doomed = obsolete(there, rule, best_step=best, pinned=held, values=values)
        intact = manifest.newest_intact(there) if doomed else None
        doomed = [checkpoint for checkpoint in doomed if checkpoint != intact]
        if not dry_run:
            remove_killed(run)
            doomed = delete(run, doomed)
        for checkpoint in doomed:
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


_by_option = option(
    "--by NAME", "Name of the holder of the pin.", name="by", default=DEFAULT_HOLDER, show_default=True
)


@command.command(
    epilog=examples("trainkit ckpt pin last --step 1000", 'trainkit ckpt pin last --step 1000 --by "paper"')
)
@run_argument
@option("--step N", "Pin the checkpoint of step N.", type=INDEX, required=True)
@_by_option
@json_option("trainkit.cli.ckpt:PinJson")
def pin(run_name: str, step: int, by: str, as_json: bool) -> None:
    """Pin a checkpoint of RUN, so that neither the run nor `trainkit ckpt prune` deletes the checkpoint.

    A checkpoint can be pinned by several names; it may be deleted again when every name is unpinned. Other
    programs that delete files ignore the pin.
    """
    run = find_run(run_name, acts=True)
    (checkpoint,) = checkpoints_of(run, step)
    _writing(run, lambda: pins_module.pin(run, step, by))
    _echo_pin(run, checkpoint, by, f"pinned {checkpoint.path.name} by {by}", as_json)


@command.command(epilog=examples("trainkit ckpt unpin last --step 1000"))
@run_argument
@option("--step N", "Unpin the checkpoint of step N.", type=INDEX, required=True)
@_by_option
@json_option("trainkit.cli.ckpt:PinJson")
def unpin(run_name: str, step: int, by: str, as_json: bool) -> None:
    """Remove a pin from a checkpoint of RUN; this deletes no checkpoint."""
    run = find_run(run_name, acts=True)
    (checkpoint,) = checkpoints_of(run, step)
    if not _writing(run, lambda: pins_module.unpin(run, step, by)):
        holders = ", ".join(sorted(pins(run).get(step, ())))
        hint = f"it is pinned by {holders}; use --by to name the holder" if holders else "it is not pinned"
        raise UsageError(f"{checkpoint.path.name} is not pinned by {by}", hint=hint)
    _echo_pin(run, checkpoint, by, f"unpinned {checkpoint.path.name} by {by}", as_json)


def _writing(run: RunDir, change: Callable[[], T]) -> T:
    """Return the result of `change`; raise UsageError if the pins cannot be written."""
    try:
        return change()
    except OSError as error:
        raise UsageError(
            f"{shown_path(run.pins_dir)} cannot be changed: {error.strerror}",
            hint="only users with write access to the run folder can pin its checkpoints",
        ) from error


def _echo_pin(run: RunDir, checkpoint: manifest.Checkpoint, by: str, text: str, as_json: bool) -> None:
    holders = sorted(pins(run).get(checkpoint.step, ()))
    value: PinJson = {"path": str(checkpoint.path), "by": by, "pinned_by": holders}
    echo_result(value, text, as_json)


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


def _row(item: ListedCheckpoint) -> list[str]:
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
