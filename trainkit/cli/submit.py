"""``trainkit submit``: submit a run to Slurm, or start it in the background on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import examples, warn
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
    trailing_workload,
)
from trainkit.errors import EXIT_OK, UsageError
from trainkit.run.rundir import RUNS_FOLDER

if TYPE_CHECKING:
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.workload import Workload
    from trainkit.submit.submission import Preview, Submission


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
    """Submit a run of CONFIG to Slurm, or start it in the background on this machine.

    Prints the run folder and the job id. With a COMMAND after --, each rank runs it instead of the built-in
    trainer.

    --sweep and --array submit a group of runs as one Slurm array; the group's folder has one run folder per
    index. Sweep values are parsed as items of a YAML list: "a,b" is one string, [1,2],[3,4] are two lists.
    """
    from trainkit.plan.launch import describe_plan
    from trainkit.submit.submission import plan_submission

    workload = trailing_workload(launcher)
    folder = named_folder(run_dir)
    if group and follow:
        raise UsageError(
            "--follow follows one run, not a group", hint="`trainkit logs GROUP/0 -f` follows one of them"
        )
    array, points = group.points(request, workload)
    submission = plan_submission(
        points,
        array,
        workload,
        config_path=request.path,
        after=after,
        will_start=not dry_run,
        warn=warn,
    )
    plan = submission.plan
    click.echo(describe_plan(plan, submission.points[0].config.name), err=True)
    for line in (*_warnings(plan, folder, workload), *_notes(submission, group, workload)):
        click.echo(line, err=True)
    if plan.slurm is not None and not dry_run:
        from trainkit.slurm.client import require_controller

        require_controller()
    if dry_run or test_only:
        return _show(submission.preview(folder), test_only)
    from trainkit.cli.following import follow_detachable, print_copied  # with what follows a run

    created = submission.create(["trainkit", *sys.argv[1:]], folder)
    print_copied(created.code)
    job_id, attempt = submission.start(created)
    run, shown = created.run, quote(str(created.run.path))
    if as_json:
        facts = {
            "run_dir": str(run.path),
            "name": created.name,
            "job_id": job_id,
            **({} if attempt is None else {"attempt": attempt}),
            "backend": plan.backend,
            **({} if array is None else {"array": array.directive, "num_points": len(submission.points)}),
            "warnings": list(plan.warnings),
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        click.echo(f"{run.path}\n{job_id}")
    if follow and attempt is not None:
        return follow_detachable(run, attempt, to_stderr=as_json)
    first = quote(str(run.path / str(submission.points[0].index)))
    hint = f"`trainkit status {shown}` shows all runs, `trainkit logs {first} -f` follows one"
    if array is None:
        hint = f"`trainkit logs {shown} -f` follows its log, `trainkit cancel {shown}` cancels it"
    click.echo(hint, err=True)
    return EXIT_OK


def _warnings(plan: LaunchPlan, folder: Path | None, workload: Workload) -> Iterator[str]:
    """Warnings about the folder and the command; raises UsageError for a folder whose files have no locks."""
    from trainkit.submit.create import local_locks, require_locks
    from trainkit.submit.secrets import secret_options

    require_locks(folder or Path(RUNS_FOLDER))
    # Without Slurm the job is on this host.
    problem = None if plan.slurm is None else local_locks(folder or Path(RUNS_FOLDER))
    if problem is not None:
        yield f"warning: {problem}"
    found = secret_options(workload.argv)
    if found:
        yield (
            f"warning: {', '.join(found)} of the command looks secret: it is stored in plan.json, and "
            "other users see it in the process list of a node; use an environment variable that "
            "launch.secrets names"
        )


def _notes(submission: Submission, group: GroupRequest, workload: Workload) -> Iterator[str]:
    """What to know of the points of a group."""
    from trainkit.submit.submission import describe_points, reaches_command

    if not group:
        return
    points = submission.points
    yield f"  {'points':<18}  {describe_points(submission, bool(group.sweeps))}"
    if workload.argv and group.sweeps:
        generated = {json.dumps(item.plan.launcher_files) for item in points}
        if len(generated) == 1 and not reaches_command(points, workload.argv):
            yield (
                "  note: a COMMAND sees only {KEY} in its words and swept launch.env.NAME; the other values "
                "are in config.yaml of the run folder, $TRAINKIT_JOB_RUN_DIR"
            )
        if not points[0].config.launch.snapshot:
            others = "relative outputs of one overwrite those of another"
            yield f"  note: all points run in {Path.cwd()}: {others}"


def _show(preview: Preview, test_only: bool) -> int:
    """Print the script or plan that would be submitted, or Slurm's estimate of its start."""
    if not test_only:
        click.echo(preview.text, nl=False)
        # As `head` prints files; the standard output is the script or plan, byte for byte.
        for path, text in preview.files.items():
            click.echo(f"==> {path} <==\n{text}", nl=False, err=True)
        return EXIT_OK
    if not preview.is_script:
        raise UsageError(
            "--test-only asks Slurm, but this run would start on this machine", hint="use --dry-run"
        )
    from trainkit.slurm.submit import query_start

    click.echo(query_start(preview.text).message)
    return EXIT_OK
