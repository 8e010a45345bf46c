"""``trainkit submit``: start a run that goes on without this terminal."""

from __future__ import annotations

from shlex import quote

import click

from trainkit.cli.options import ConfigRequest, config_options, examples, json_option
from trainkit.errors import EXIT_OK


@click.command(
    epilog=examples(
        "trainkit submit configs/quickstart.yaml",
        "trainkit submit configs/quickstart.yaml --nodes 2 --follow",
        "trainkit submit configs/quickstart.yaml --set train.steps=50 --name short --dry-run",
    )
)
@config_options
@click.option("--run-dir", metavar="DIR", help="Exact run folder, new or empty; default: runs/NAME.")
@click.option("--dry-run", is_flag=True, help="Print plan.json and the reasons; write and start nothing.")
@click.option("--follow", is_flag=True, help="Show rank 0's log until the run ends; Ctrl-C detaches.")
@json_option
def command(request: ConfigRequest, run_dir: str | None, dry_run: bool, follow: bool, as_json: bool) -> int:
    """Start a run of CONFIG that goes on without this terminal.

    Prints the run folder and the job id.
    """
    from trainkit.cli import launch
    from trainkit.submit.create import plan_text
    from trainkit.submit.describe import describe_plan

    loaded = request.load()
    plan = launch.plan_for(loaded)
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    if dry_run:
        click.echo(plan_text(plan), nl=False)
        return EXIT_OK
    run, value = launch.start_new_run(loaded, plan, run_dir, "submit")
    launch.print_started(value, as_json)
    if not follow:
        shown = quote(str(run.path))
        click.echo(f"`trainkit logs {shown} -f` shows it, `trainkit cancel {shown}` ends it", err=True)
        return EXIT_OK
    return launch.follow_detachable(run, value["attempt"], to_stderr=as_json)
