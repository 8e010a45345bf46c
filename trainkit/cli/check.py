"""Implements `trainkit check`, which lists every problem in a config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option, terminal_width, warn
from trainkit.cli.output import echo_error, json_text
from trainkit.errors import ConfigError, SlurmError, TrainkitError, UsageError
from trainkit.formats import plural, table
from trainkit.launch.config_request import ConfigRequest
from trainkit.run.rundir import RUNS_FOLDER
from trainkit.shipped import node_chooser
from trainkit.terminal import GOOD, WATCH, Styled, painted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainkit.backend import StartEstimates
    from trainkit.capability import Choice
    from trainkit.cluster.model import Cluster
    from trainkit.config import RunConfig
    from trainkit.plan.launch import LaunchPlan

MAX_COLUMN_WIDTH = 40


@as_command(
    "trainkit check",
    "trainkit check quickstart --nodes 2 --show-origin",
    "trainkit check quickstart --cluster example",
    "trainkit check quickstart --simulate-world 4 --set parallel.tp=2",
    "trainkit check quickstart --set train.steps=100 --json",
)
@options.config_options(options.choosing_shape_options)
@options.gpu_type_option
@options.max_gpu_hours_option
@option("--show-origin", "Print every config value with its origin.")
@click.option(
    "--estimate/--no-estimate",
    "estimate",
    default=None,
    help="Require Slurm's estimate of the start time. By default, the estimate is printed if Slurm answers.",
)
@option(
    "--task-smoke",
    "Also run the forward and backward pass of your own task on a few samples, with one and with two ranks "
    "on the CPU of this machine.",
    name="smoke",
)
@options.of_capabilities("check")
@options.json_option("trainkit.cli.plan_json:CheckJson")
def command(
    request: ConfigRequest,
    show_origin: bool,
    estimate: bool | None,
    smoke: bool,
    as_json: bool,
    choices: Sequence[Choice] = (),
) -> None:
    """Validate CONFIG and check it against the model, the data, and the cluster or this machine.

    Prints every derived value with the reason for it and, on a cluster, the estimated start time of the job.
    If there are problems, the command lists all of them and exits with code 2.
    """
    from trainkit.config.schema import flatten, show_value
    from trainkit.launch.plan_run import gather, plan_run
    from trainkit.launch.submission import lock_problem
    from trainkit.launch.trainer_process import task_problems
    from trainkit.plan.workload import TRAINER

    loaded, choice = request.load_to_plan(), None
    if request.chooses_nodes:
        loaded, plan, choice = node_chooser()(loaded, TRAINER)
        cluster = None
    else:
        facts = gather(loaded)
        plan, cluster = plan_run(loaded, facts), facts.target.cluster
    tried = ""
    if smoke:
        problems, tried = task_problems(loaded, "--smoke")
        if problems:
            raise ConfigError([loaded.problem(*item) for item in problems])
    if estimate and not plan.is_job:
        raise UsageError(
            "--estimate requires Slurm, but this run would start on this machine", hint="remove --estimate"
        )
    for one in choices:
        click.echo(one.try_out(loaded.config), err=True)
    waits = None
    if plan.is_job and estimate is not False and cluster is not None:
        waits = _waits(plan, loaded.config, cluster, must=bool(estimate))
    if (problem := lock_problem(Path(RUNS_FOLDER), plan.is_job)) is not None:
        echo_error(f"warning: {problem}")
    if as_json:
        if tried:
            click.echo(f"task_smoke: {tried}", err=True)
        config = loaded.config.model_dump(mode="json", by_alias=True)
        shown = None if waits is None else waits.to_list()
        value: dict[str, object] = {"config": config, "origins": loaded.origins, "plan": plan.to_dict()}
        value |= {"wait": shown, **({} if choice is None else choice.to_dict())}
        click.echo(json_text(value))
        return
    if show_origin:
        values = flatten(loaded.config.model_dump(mode="json", by_alias=True))
        rows = [(key, show_value(value), loaded.origins[key]) for key, value in values]
        click.echo(table(rows, max_width=MAX_COLUMN_WIDTH, fit=terminal_width()) + "\n")
    for name, reason in (plan.reasons | ({"task_smoke": tried} if tried else {})).items():
        click.echo(f"{name}: {reason}")
    if choice is not None:
        click.echo("\n" + "\n".join(choice.lines(plan, terminal_width())))
    if waits is not None and (lines := [*waits.lines(terminal_width())]):
        click.echo("\n" + "\n".join(lines))
    for text in plan.warnings:
        warn(text)
    and_warnings = f", {plural(len(plan.warnings), 'warning')}" if plan.warnings else ""
    summary = Styled(f"{request.path}: no problems{and_warnings}", WATCH if plan.warnings else GOOD)
    click.echo(painted(summary), err=True)


def _waits(plan: LaunchPlan, config: RunConfig, cluster: Cluster, must: bool) -> StartEstimates | None:
    """Return Slurm's estimate of the job's start time, or None if Slurm does not respond.

    With `must`, raises TrainkitError if Slurm does not respond. Raises UsageError if Slurm would reject
    the job.
    """
    from trainkit.backend import backend_named

    try:
        if cluster.error:  # Slurm has already timed out, and another query would time out too.
            raise SlurmError(cluster.error, hint="omit --estimate to check the config without Slurm")
        waits = backend_named(plan.backend).start_estimates(plan, config, cluster)
    except TrainkitError as error:
        if must:
            raise
        click.echo(f"the start time is unknown: {error.message.splitlines()[0]}", err=True)
        return None
    if waits.refusal is not None:
        hint = "`trainkit submit --dry-run` prints the batch script with the options of the job"
        raise UsageError(f"Slurm would reject the job: {waits.refusal}", hint=hint)
    return waits
