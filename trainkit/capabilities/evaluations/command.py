"""Implements ``trainkit eval``, which evaluates checkpoints of a run with a command."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypedDict

import click

from trainkit.capabilities.evaluations import not_submitted_hint, shown
from trainkit.capabilities.evaluations.evaluations_plan import EvaluationsPlan
from trainkit.capabilities.evaluations.evaluator import plan_of
from trainkit.capabilities.evaluations.queue import Queue, wanted_steps
from trainkit.capabilities.evaluations.records import Evaluation, log_of, read_evaluations
from trainkit.cli.ckpt import checkpoints_of
from trainkit.cli.help import as_command, option
from trainkit.cli.options import INDEX, json_option, refuse_untrusted, run_argument, trust_option
from trainkit.cli.output import echo_json
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.run.registry import find_run
from trainkit.run.rundir import RunDir, is_supervised

POLL_S = 0.5
SLURM_POLL_S = 10.0


class ShownEvaluation(TypedDict):
    """The evaluation of a checkpoint."""

    step: int
    state: str
    """``waiting``, ``running``, ``done``, ``failed``, ``skipped``, or ``damaged`` if the checkpoint was
    changed after it was published."""
    time: str
    """The time of the last change of the state."""
    job_id: str | None
    """The Slurm job of the evaluation; None if it was not submitted."""
    metrics: dict[str, float]
    reason: str | None
    """Why the evaluation failed or was skipped; None otherwise."""
    log_tail: list[str]
    """The last lines of the log of a failed evaluation."""


EvaluationsJson = list[ShownEvaluation]


@as_command(
    "trainkit eval last",
    'trainkit eval last --step 1000 --command "python eval.py"',
    "trainkit eval last --all --json",
    "trainkit eval last --follow",
)
@run_argument
@option("--step N", "Evaluate the checkpoint of this step, even if it was evaluated.", type=INDEX)
@option("--all", "Evaluate all published checkpoints that have no result.", name="evaluates_all")
@option("--follow", "Evaluate each new checkpoint, like the job of the run, until the run ends.")
@option("--command CMD", "Run this command instead of on_checkpoint.command.", name="text")
@option(
    "--export FORMAT",
    "Export the model first, like on_checkpoint.export; FORMAT is hf.",
    type=click.Choice(["hf"]),
)
@option("--here", "Run the evaluations on this machine, not in Slurm jobs.")
@trust_option
@json_option("trainkit.capabilities.evaluations.command:EvaluationsJson")
def command(
    run_name: str,
    step: int | None,
    evaluates_all: bool,
    follow: bool,
    text: str | None,
    export: str | None,
    here: bool,
    as_json: bool,
) -> int:
    """Evaluate checkpoints of RUN with a command; by default, the newest checkpoint.

    The evaluations run in Slurm jobs if RUN does, and otherwise on this machine. A checkpoint that another
    process evaluates is not evaluated a second time. The exit code is 1 if an evaluation failed.
    """
    run = find_run(run_name, acts=True)
    refuse_untrusted(run.path)
    if sum((step is not None, evaluates_all, follow)) > 1:
        raise UsageError("--step, --all and --follow exclude each other", hint="use one of the three options")
    plan = plan_of(run)
    plan = replace(plan, command=text or plan.command, export=export or plan.export)
    plan = replace(plan, sbatch=None if here else plan.sbatch)
    if not plan.command:
        raise UsageError(
            f"{run.shown} has no command for evaluations: on_checkpoint.command is null",
            hint='add --command "python eval.py"',
        )
    queue = Queue(run, plan, lambda line: click.echo(line, err=True))
    if follow:
        found = _follow(run, queue, plan)
    else:
        there = [one.step for one in checkpoints_of(run, step)]
        steps = there if evaluates_all else there[-1:]
        known = read_evaluations(run)
        is_done = [step for step in steps if evaluates_all and step in known and known[step].state == "done"]
        found = _wait(queue, steps, [step for step in steps if step not in is_done])
    if as_json:
        echo_json([shown(one) for one in found])
    else:
        for one in found:
            click.echo("\n".join(lines_of(run, one)))
    return EXIT_OK if all(one.state in ("done", "skipped") for one in found) else EXIT_FAILED


def _wait(queue: Queue, steps: Sequence[int], again: Sequence[int]) -> list[Evaluation]:
    """Evaluate checkpoints, and return their evaluations after all have ended."""
    while True:
        found = queue.update(steps, None, again=again)
        again = ()
        _refuse(queue)
        own = [found[step] for step in steps if step in found]
        if not any(one.is_open for one in own):
            return own
        time.sleep(POLL_S if queue.plan.sbatch is None else SLURM_POLL_S)


def _follow(run: RunDir, queue: Queue, plan: EvaluationsPlan) -> list[Evaluation]:
    """Evaluate each new checkpoint until no supervisor runs; return the evaluations that have ended since."""
    before: Mapping[int, Evaluation] | None = None
    while True:
        is_alive = is_supervised(run)
        found = queue.update(wanted_steps(run, plan), plan.max_waiting)
        _refuse(queue)
        before = found if before is None else before
        if not is_alive and not any(one.is_open for one in found.values()):
            old = before
            return (
                [one for step, one in found.items() if old[step] != one or old[step].is_open] if old else []
            )
        time.sleep(POLL_S if plan.sbatch is None else SLURM_POLL_S)


def _refuse(queue: Queue) -> None:
    if (refusal := queue.refusal) is not None:
        raise UsageError(
            f"an evaluation could not be submitted: {refusal.message}",
            hint=refusal.hint or not_submitted_hint(queue.run),
        )


def lines_of(run: RunDir, one: Evaluation) -> list[str]:
    """Return the result of an evaluation as lines of text."""
    if one.state == "done":
        return [
            f"step {one.step}: " + ", ".join(f"{name} {value:.6g}" for name, value in one.metrics.items())
        ]
    reason = f": {one.reason}" if one.reason else ""
    tail = [f"  {line}" for line in one.log_tail]
    more = [f"  log: {shown_path(log_of(run, one.step))}"] if tail else []
    return [f"step {one.step}: {one.state}{reason}", *tail, *more]
