"""Implements the command `trainkit ckpt average`, which starts another process to average checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from trainkit.capabilities.export.command import pinned_while_read, write_folder
from trainkit.cli.ckpt import checkpoints_of
from trainkit.cli.help import as_command, option
from trainkit.cli.options import COUNT, PATH, json_option, run_argument
from trainkit.cli.output import echo_result
from trainkit.errors import EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.run import manifest
from trainkit.run.registry import find_run


class AveragedJson(TypedDict):
    """A checkpoint that contains the mean of the weights of several checkpoints."""

    out: str
    """The folder that contains the checkpoint."""
    steps: list[int]
    """The steps of the averaged checkpoints."""


@as_command(
    "trainkit ckpt average last --last 5",
    "trainkit ckpt average last --last 5 --out averaged",
    "trainkit ckpt export last --checkpoint averaged --out exported",
)
@run_argument
@option("--last N", "Number of the most recent checkpoints to average.", type=COUNT, required=True)
@option(
    "--out DIR",
    "Folder to create. The default is averages/step-STEP-last-N in the run folder, where STEP is the step of "
    "the newest checkpoint.",
    name="out",
    type=PATH,
)
@json_option("trainkit.capabilities.average.command:AveragedJson")
def command(run_name: str, last: int, out: Path | None, as_json: bool) -> int:
    """Write the mean of the weights in the newest N checkpoints of RUN as a checkpoint.

    The checkpoint contains no optimizer state, so a run cannot be resumed from the checkpoint. A run can
    start from the checkpoint with model.init_from, and `trainkit ckpt export` and `trainkit generate` use the
    checkpoint with --checkpoint. The weights are read and written a few tensors at a time. Buffers, such as
    the statistics of batch norm, are copied from the newest checkpoint.
    """
    run = find_run(run_name)
    there = checkpoints_of(run, None)
    if last > len(there):
        message = f"--last is {last}, but {run.shown} has only {len(there)} published"
        hint = f"use --last {len(there)}, or keep more checkpoints of a run with checkpoint.keep"
        raise UsageError(f"{message} checkpoint{'s' * (len(there) > 1)}", hint=hint)
    chosen = there[-last:]
    for checkpoint in chosen:
        if damage := manifest.find_damage(checkpoint):
            message = f"{shown_path(checkpoint.path)} is damaged: {damage}"
            raise UsageError(message, hint="use a smaller --last, or remove the damaged checkpoint")
    steps = [checkpoint.step for checkpoint in chosen]
    if out is None:
        out = run.path / "averages" / f"{chosen[-1].path.name}-last-{last}"
    request = {"checkpoints": [str(checkpoint.path.absolute()) for checkpoint in chosen], "steps": steps}
    with pinned_while_read("ckpt average", chosen):
        code = write_folder("trainkit.capabilities.average.worker", request, out)
    if code:
        return code
    value: AveragedJson = {"out": str(out), "steps": steps}
    shown = ", ".join(map(str, steps))
    echo_result(value, f"averaged the checkpoints of steps {shown} in {shown_path(out)}", as_json)
    return EXIT_OK
