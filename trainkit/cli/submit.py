"""``trainkit submit``: submit a run to Slurm, or start it in the background on this machine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

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
    trailing_workload,
)
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.workload import Workload
    from trainkit.run.rundir import RunDir


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
    workload = trailing_workload(launcher)
    folder = None if run_dir is None else named_folder(run_dir)
    if group:
        if follow:
            raise UsageError(
                "--follow follows one run, not a group", hint="`trainkit logs GROUP/0 -f` follows one of them"
            )
        options = GroupSubmission(workload, folder, after, dry_run, test_only, as_json)
        return _submit_group(request, group, options)

    from trainkit.plan.launch import describe_plan
    from trainkit.submit.plan_run import gather, plan_run

    loaded = request.load_to_plan(workload)
    plan = plan_run(loaded, gather(loaded, workload), workload)
    if after:
        from trainkit.submit.dependency import job_ids_of, with_dependency

        plan = with_dependency(plan, after, () if plan.slurm is None else job_ids_of(after, _warn))
    click.echo(describe_plan(plan, loaded.config.name), err=True)
    _check_locks(plan, folder)
    _warn_of_secrets(workload)
    if plan.slurm is not None and not dry_run:
        from trainkit.slurm.client import require_controller

        require_controller()
    if dry_run or test_only:
        return _show(loaded, plan, folder, test_only)

    from trainkit.cli.following import print_copied, print_started
    from trainkit.submit.create import create_run
    from trainkit.submit.start import start_run

    created = create_run(loaded.config, plan, ["trainkit", *sys.argv[1:]], folder)
    print_copied(created.code)
    entry = start_run(created.run, loaded.config, plan, "submit")
    print_started(created.run, created.name, entry, plan.backend, as_json, plan.warnings)
    if follow:
        from trainkit.cli.following import follow_detachable

        return follow_detachable(created.run, entry.attempt, to_stderr=as_json)
    shown = quote(str(created.run.path))
    click.echo(f"`trainkit logs {shown} -f` follows its log, `trainkit cancel {shown}` cancels it", err=True)
    return EXIT_OK


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _check_locks(plan: LaunchPlan, folder: Path | None) -> None:
    from trainkit.run.rundir import RUNS_FOLDER
    from trainkit.submit.create import local_locks, require_locks

    require_locks(folder or Path(RUNS_FOLDER))
    # Without Slurm the job is on this host.
    problem = None if plan.slurm is None else local_locks(folder or Path(RUNS_FOLDER))
    if problem is not None:
        _warn(problem)


def _warn_of_secrets(workload: Workload) -> None:
    from trainkit.submit.secrets import secret_options

    found = secret_options(workload.argv or ())
    if found:
        _warn(
            f"{', '.join(found)} of the command looks secret: it is stored in plan.json, and other users "
            "see it in the process list of a node; use an environment variable that launch.secrets names"
        )


def _show(loaded: LoadedConfig, plan: LaunchPlan, folder: Path | None, test_only: bool) -> int:
    """Print the script or plan that would be submitted, or Slurm's estimate of its start."""
    from trainkit.backends import BACKENDS
    from trainkit.submit.create import future_run

    run = future_run(loaded.config.name, folder)
    if BACKENDS[plan.backend].template is None:
        if test_only:
            raise UsageError(
                "--test-only asks Slurm, but this run would start on this machine", hint="use --dry-run"
            )
        click.echo(plan.to_text(), nl=False)
        _print_files(run, plan)
        return EXIT_OK
    from trainkit.config import dump_effective
    from trainkit.submit.code.snapshot import planned_code
    from trainkit.submit.preflight_checks import refuse_leaks
    from trainkit.submit.script import script_for

    config, cwd = loaded.config, Path.cwd()
    script = script_for(run, 1, plan, config, cwd, planned_code(run, config, plan, cwd))
    texts = {
        "the script": script.text,
        "plan.json": plan.to_text(),
        "config.yaml": dump_effective(config),
    }
    for where, text in texts.items():
        refuse_leaks(text, where, config.secrets, os.environ)
    _print_script(script.text, test_only)
    if not test_only:
        _print_files(run, plan)
    return EXIT_OK


def _print_files(run: RunDir, plan: LaunchPlan) -> None:
    """Print the files that the tool of the launcher would get, each below its path, as `head` does.

    They go to the standard error: the standard output is the script or plan, byte for byte.
    """
    for name, text in plan.launcher_files.items():
        click.echo(f"==> {run.path / name} <==\n{text}", nl=False, err=True)


def _print_script(text: str, test_only: bool) -> None:
    if test_only:
        from trainkit.backends.slurm import estimate_start

        text = f"{estimate_start(text)}\n"
    click.echo(text, nl=False)


@dataclass(frozen=True)
class GroupSubmission:
    """The options of `submit` that also apply to a group."""

    workload: Workload
    run_dir: Path | None
    after: tuple[str, ...]
    dry_run: bool
    test_only: bool
    as_json: bool


def _submit_group(request: ConfigRequest, group_request: GroupRequest, options: GroupSubmission) -> int:
    """Submit a group of runs as one Slurm array, or show what would be submitted."""
    from trainkit.cli.following import print_copied
    from trainkit.plan.launch import describe_plan
    from trainkit.run.group import RunGroup
    from trainkit.slurm.client import require_controller
    from trainkit.submit.code.snapshot import planned_code
    from trainkit.submit.create import future_run
    from trainkit.submit.dependency import job_ids_of, with_dependency
    from trainkit.submit.sweep import (
        common_plan,
        create_group,
        describe_points,
        group_script,
        plan_points,
        reaches_command,
        start_group,
    )

    base = None if group_request.sweeps else request.load_to_plan(options.workload)
    command = options.workload.argv
    seed = None if base is None or options.workload.is_command else base.config.seed
    spec, values = group_request.points(seed, command)
    configs = group_request.load_points(request, values)
    limited = None if options.dry_run else spec
    points = plan_points(values, configs, options.workload, config_path=request.path, array=limited)
    if options.after:
        job_ids = job_ids_of(options.after, _warn)
        points = [replace(item, plan=with_dependency(item.plan, options.after, job_ids)) for item in points]
    common = common_plan(points)
    click.echo(describe_plan(common, points[0].config.name), err=True)
    _check_locks(points[0].plan, options.run_dir)
    _warn_of_secrets(options.workload)
    click.echo(f"  {'points':<18}  {describe_points(spec, values, bool(group_request.sweeps))}", err=True)
    if command and group_request.sweeps:
        generated = {json.dumps(item.plan.launcher_files) for item in points}
        if len(generated) == 1 and not reaches_command(values, command):
            click.echo(
                "  note: a COMMAND sees only {KEY} in its words and swept launch.env.NAME; the other values "
                "are in config.yaml of the run folder, $TRAINKIT_JOB_RUN_DIR",
                err=True,
            )
        if not points[0].config.launch.snapshot:
            click.echo(
                f"  note: all points run in {Path.cwd()}: relative outputs of one overwrite those of another",
                err=True,
            )
    if not options.dry_run:
        require_controller()
    if options.dry_run or options.test_only:
        run = future_run(points[0].config.name, options.run_dir)
        code = planned_code(run, points[0].config, points[0].plan, Path.cwd())
        group = RunGroup(run.path)
        script = group_script(group, points, spec.directive, code)
        _print_script(script.text, options.test_only)
        if options.dry_run:
            shown_files: list[dict[str, str]] = []
            for index, point in zip(spec.indices, points, strict=True):
                if point.plan.launcher_files not in shown_files:
                    shown_files.append(point.plan.launcher_files)
                    _print_files(group.run(index), point.plan)
        return EXIT_OK
    group, code = create_group(points, spec.directive, ["trainkit", *sys.argv[1:]], options.run_dir)
    print_copied(code)
    job_id = start_group(group)
    if options.as_json:
        facts = {
            "run_dir": str(group.path),
            "name": group.name,
            "job_id": job_id,
            "backend": points[0].plan.backend,
            "array": spec.directive,
            "num_points": len(points),
            "warnings": list(common.warnings),
        }
        click.echo(json.dumps(facts, ensure_ascii=False))
    else:
        click.echo(f"{group.path}\n{job_id}")
    shown, first_run = quote(str(group.path)), quote(str(group.run(spec.indices[0]).path))
    click.echo(
        f"`trainkit status {shown}` shows all runs, `trainkit logs {first_run} -f` follows one", err=True
    )
    return EXIT_OK
