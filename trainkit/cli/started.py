"""Prints a run's plan and how it was started, without importing the modules that read runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from trainkit.cli.help import terminal_width
from trainkit.cli.output import echo_result
from trainkit.folders import shown_path
from trainkit.formats import plural
from trainkit.run.rundir import RUNS_FOLDER, RunDir

if TYPE_CHECKING:
    from trainkit.capability import NodesChoice
    from trainkit.launch.create import CreatedRun
    from trainkit.plan.launch import LaunchPlan
    from trainkit.run.record import AttemptRecord


class _StartedJson(TypedDict):
    run_dir: str
    name: str
    """The name of the run: the name of its folder or, if the user specified the folder, the name in the
    config."""
    job_id: str
    attempt: int
    """The number of the attempt that was started, counted from 1."""
    backend: str


class StartedJson(_StartedJson, total=False):
    """An attempt of a run that a command has started."""

    warnings: list[str]
    """Warnings about the run's plan; absent if the attempt reuses an existing plan."""


def describe_plan(plan: LaunchPlan, name: str) -> str:
    """Return lines that describe a plan: its size, the reason for each derived value, and warnings."""
    nodes = plan.shown_nodes
    workers = f"{plan.workers_per_node} worker{'s' if plan.workers_per_node > 1 else ''}"
    spare = f", {plan.spare_nodes} spare" if plan.spare_nodes else ""
    lines = [f"{name}: {nodes} x {workers} on {plan.device}{spare}, {plan.backend} backend"]
    width = max((len(key) for key in plan.reasons), default=0)
    lines += [f"  {key:<{width}}  {reason}" for key, reason in plan.reasons.items()]
    lines += [f"warning: {text}" for text in plan.warnings]
    return "\n".join(lines)


def print_choice(choice: NodesChoice | None, plan: LaunchPlan) -> None:
    """Print to stderr how trainkit chose the number of nodes, unless the user chose it."""
    if choice is not None:
        for line in choice.lines(plan, terminal_width()):
            click.echo(line, err=True)


def print_created(created: CreatedRun) -> None:
    """Print to stderr a new run's name if it was changed, and the number of copied code files, if any."""
    if created.name != created.config_name:
        click.echo(
            f"note: {RUNS_FOLDER}/{created.config_name} exists, so this run is named {created.name}", err=True
        )
    code = created.code
    if code is None:
        return
    source = "this folder" if Path(code.source) == Path.cwd() else shown_path(code.source)
    click.echo(f"  code                {plural(code.num_files, 'file')} of {source} copied", err=True)
    for note in code.notes:
        click.echo(f"  note: {note}", err=True)


def print_started(
    run: RunDir,
    name: str,
    entry: AttemptRecord,
    backend: str,
    as_json: bool,
    warnings: Sequence[str] | None = None,
) -> None:
    """Print the run folder and the job id; `entry` is the attempt's record in job.json.

    For a new plan, the JSON output includes the plan's `warnings`.
    """
    facts: StartedJson = {
        "run_dir": str(run.path),
        "name": name,
        "job_id": entry.job_id,
        "attempt": entry.attempt,
        "backend": backend,
    }
    if warnings is not None:
        facts["warnings"] = list(warnings)
    echo_result(facts, f"{run.path}\n{entry.job_id}", as_json)
