"""``trainkit submit``: start a run that goes on without this terminal."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.help import examples
from trainkit.cli.options import (
    ConfigRequest,
    GroupRequest,
    WithTrailingCommand,
    after_option,
    config_options,
    group_options,
    json_option,
    launcher_option,
    named_folder,
    trailing_command,
)
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.plan.launch import LaunchPlan


@click.command(
    cls=WithTrailingCommand,
    epilog=examples(
        "trainkit submit",
        "trainkit submit --nodes 2 --follow",
        "trainkit submit quickstart --set train.steps=50 --name short --dry-run",
        "trainkit submit quickstart --gpus-per-node 2 -- python -c 'print(1)'",
        "trainkit submit quickstart --sweep optimizer.lr=1e-4,3e-4 --sweep seed=1,2 --dry-run",
        "trainkit submit quickstart --array 0-9%4 --name seeds --dry-run",
    ),
)
@config_options
@group_options
@after_option
@click.option("--run-dir", metavar="DIR", help="Exact run folder, new or empty; default: runs/NAME.")
@launcher_option
@click.option("--dry-run", is_flag=True, help="Print what would be submitted; write and start nothing.")
@click.option("--test-only", is_flag=True, help="Ask Slurm when the job would start; submit nothing.")
@click.option("--follow", is_flag=True, help="Show rank 0's log until the run ends; Ctrl-C detaches.")
@json_option
def command(
    request: ConfigRequest,
    group: GroupRequest,
    after: tuple[str, ...],
    run_dir: str | None,
    launcher: str,
    dry_run: bool,
    test_only: bool,
    follow: bool,
    as_json: bool,
) -> int:
    """Start a run of CONFIG that goes on without this terminal.

    Prints the run folder and the job id. With a COMMAND after --, that is what every rank runs in place of
    the built-in trainer.

    With --sweep or --array these are many runs in one Slurm array: a group, whose folder has a run folder for
    each point by its number. The values of a sweep are read as YAML between [ and ]: "a,b" is one text,
    [1,2],[3,4] are two lists.
    """
    from trainkit.submit.beside import beside

    argv = trailing_command()
    if argv is None and launcher != "python":
        raise UsageError(f"--launcher {launcher} is for a COMMAND", hint="add: -- train.py …")
    folder = None if run_dir is None else named_folder(run_dir)
    if group:
        from trainkit.cli.submit_group import Submission, submit_many

        typed = Submission(argv, launcher, folder, after, dry_run, test_only, follow, as_json)
        return submit_many(request, group, typed)
    if dry_run or test_only:
        return _show(*_planned(request, argv, launcher, after), folder, test_only)
    with beside("asking git", _provenance) as collect:
        loaded, plan = _planned(request, argv, launcher, after)
        from trainkit.cli.launch import print_started, start_new_run

        run, value = start_new_run(loaded, plan, run_dir, "submit", collect=collect)
    print_started(value, as_json)
    if not follow:
        shown = quote(str(run.path))
        click.echo(f"`trainkit logs {shown} -f` shows it, `trainkit cancel {shown}` ends it", err=True)
        return EXIT_OK
    from trainkit.cli.following import follow_detachable

    return follow_detachable(run, value["attempt"], to_stderr=as_json)


def _provenance() -> dict[str, Any]:
    from trainkit.submit.create import collect_provenance

    return collect_provenance(Path.cwd())


def _planned(
    request: ConfigRequest, argv: tuple[str, ...] | None, launcher: str, after: tuple[str, ...]
) -> tuple[LoadedConfig, LaunchPlan]:
    """The config and the plan of it, which is shown."""
    from trainkit.cli.launch import plan_for
    from trainkit.plan.launch import describe_plan

    loaded = request.load()
    plan = plan_for(loaded, argv, launcher)
    if after:
        from trainkit.cli.after import find_job_ids
        from trainkit.plan.launch import with_dependency

        plan = with_dependency(plan, after, find_job_ids(after) if plan.slurm is not None else ())
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    return loaded, plan


def _show(loaded: LoadedConfig, plan: LaunchPlan, folder: Path | None, test_only: bool) -> int:
    """Print the bytes that would be submitted, or what Slurm says to them."""
    from trainkit.submit.create import config_text, future_run, plan_text

    if plan.backend == "local":
        if test_only:
            raise UsageError("--test-only asks Slurm, and this run would start here", hint="use --dry-run")
        click.echo(plan_text(plan), nl=False)
        return EXIT_OK
    from trainkit.submit.code.copy import planned_code
    from trainkit.submit.script import script_for
    from trainkit.submit.secrets import refuse_leaks

    run = future_run(loaded.config.name, folder)
    code = planned_code(run, loaded.config, plan, Path.cwd())
    script = script_for(run, 1, plan, loaded.config, Path.cwd(), code)
    texts = {"the script": script.text, "plan.json": plan_text(plan), "config.yaml": config_text(loaded)}
    for where, text in texts.items():
        refuse_leaks(text, where, loaded.config.launch.secrets, os.environ)
    if not test_only:
        click.echo(script.text, nl=False)
        return EXIT_OK
    from trainkit.submit.sbatch_backend import ask_slurm_about

    click.echo(ask_slurm_about(script.text))
    return EXIT_OK
