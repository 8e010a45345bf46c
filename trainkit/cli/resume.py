"""Implements ``trainkit resume``, which continues a run from its newest intact checkpoint."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import click

from trainkit.backends.launcher import find_launched_rank
from trainkit.cli import options
from trainkit.cli.help import as_command, option, warn
from trainkit.cli.logs import follow_detachable
from trainkit.cli.output import echo_error, echo_result
from trainkit.cli.plan_json import PlanJson
from trainkit.cli.run import (
    join_step,
    launched_target,
    lead_step,
    refuse_command,
    shape_flags,
    shown_failures,
    stay_in_foreground,
)
from trainkit.cli.started import StartedJson, describe_plan, print_choice, print_created, print_started
from trainkit.errors import EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.formats import duration, plural
from trainkit.run.group import RunGroup
from trainkit.run.owner import refuse_place
from trainkit.run.registry import find_run_or_group, one_run
from trainkit.run.rollbacks import parse_ranges
from trainkit.run.rundir import RUNS_FOLDER, RunDir

if TYPE_CHECKING:
    from trainkit.control.changed_config import RunSoFar
    from trainkit.plan.launch import LaunchPlan


class ResumedGroupJson(TypedDict):
    """A group of runs that was resumed."""

    run_dir: str
    name: str
    job_id: str | None


ResumedJson = StartedJson | ResumedGroupJson | PlanJson


@as_command(
    "trainkit resume last --follow",
    "trainkit resume last --nodes 1 --gpus-per-node 4",
    "trainkit resume last --set train.steps=400 --as runs/longer",
    "trainkit resume last --from-step 400 --skip-samples 6400-7999",
)
@options.run_argument
@options.choosing_shape_options
@options.slurm_options
@options.max_gpu_hours_option
@options.set_option
@options.backend_option
@option("--new-code", "Use the current code instead of the copy of the code in the run folder of RUN.")
@option("--as DIR", "Resume in the new run folder DIR and leave RUN unchanged.", name="fork_dir")
@option(
    "--from-step N",
    "Go back to the checkpoint of step N; newer checkpoints are renamed with the suffix .rolled-back.",
    type=options.INDEX,
)
@option(
    "--skip-samples FIRST-LAST",
    "Leave out the samples at these positions of the training data; repeatable.",
    name="skipped",
    multiple=True,
)
@options.now_option
@options.trust_option
@option("--dry-run", "Print what would be started, without writing or starting anything.")
@option("--follow", "Show rank 0's log until the run ends; Ctrl-C detaches.")
@options.json_option("trainkit.cli.resume:ResumedJson", version=2)
def command(
    run_name: str,
    overrides: tuple[str, ...],
    new_code: bool,
    fork_dir: str | None,
    from_step: int | None,
    skipped: tuple[str, ...],
    now: bool,
    dry_run: bool,
    follow: bool,
    as_json: bool,
    **typed: Any,
) -> int:
    """Resume RUN from its newest intact checkpoint, optionally on a different number of nodes or GPUs.

    If RUN is a group, its unfinished runs are started on this machine, or its unsubmitted trials are
    submitted to Slurm.

    RUN resumes as the next attempt in its run folder or, with --as, in a new run folder. RUN resumes on the
    same backend as before, Slurm or a single machine, unless --backend is given. If RUN was started with
    `trainkit run`, it resumes in the foreground, unless --follow, --json or --as is given. If you start this
    command with torchrun or mpirun, the processes that the launcher starts become the ranks of RUN, as with
    `trainkit run`.

    With --from-step, RUN continues from an older checkpoint. With --skip-samples, RUN leaves out samples that
    follow the checkpoint.
    """
    from trainkit.control.changed_config import changes, expected_time_s, learning_rate_change, starting_point
    from trainkit.control.resume import (
        copy_newest_checkpoint,
        newest_checkpoint_of,
        planned_resume,
        preview_resume,
        resume_run,
    )
    from trainkit.control.rollback import RollbackRequest
    from trainkit.launch.create import create_run, start_run
    from trainkit.launch.snapshot import wants_copy

    folder, task = Path(RUNS_FOLDER).absolute(), find_launched_rank()
    if task is not None:
        given_options = {"--json": as_json, "--follow": follow, "--as": fork_dir, "--dry-run": dry_run}
        if given := next((name for name, value in given_options.items() if value), None):
            raise UsageError(
                f"{given} cannot be combined with {task.launcher}",
                hint="omit the option: a launcher resumes a run in the foreground and in the run folder",
            )
        if task.task != 0:
            return join_step(folder, task)
    named = find_run_or_group(run_name, acts=True)
    options.refuse_untrusted(named.path)
    if isinstance(named, RunGroup) and (named.record.process is not None or named.unsubmitted):
        options.refuse_other_options("run_name", "for a group of runs")
        return _resume_group(named, as_json)
    source = one_run(named, run_name)
    if chooses_nodes := typed["nodes"] == options.AUTO:
        typed["nodes"] = None
    flags = options.config_flags(typed)
    if task is not None:
        flags |= shape_flags(task, task.tasks[0])
    fork = None if fork_dir is None else Path(fork_dir).absolute()
    if fork is not None:
        options.accept_trusted(fork)
    planned = planned_resume(
        source,
        overrides,
        flags,
        warn=warn,
        target=None if task is None else launched_target(task),
        starts_here=fork is None and not dry_run,
        new_code=new_code or fork is not None,
        chooses_nodes=chooses_nodes,
        request=RollbackRequest.of(from_step, parse_ranges(skipped)),
    )
    with planned as found:
        so_far, loaded, plan = found.so_far, found.loaded, found.plan
        print_choice(found.choice, plan)
        click.echo(describe_plan(plan, loaded.config.name if fork else so_far.job.name), err=True)
        for change in changes(so_far.config, loaded.config):
            click.echo(f"  changed             {change}", err=True)
        if not plan.workload.is_command:
            if lr := learning_rate_change(so_far, loaded.config, plan.lr):
                click.echo(f"  learning rate       {lr}", err=True)
            if (time_s := expected_time_s(so_far, plan, loaded.config.train.steps)) is not None:
                left = "at the speed of the latest steps, plus time for checkpoints and validations"
                click.echo(f"  time                about {duration(time_s)} {left}", err=True)
        if plan.workload.reads_input and not source.input_file.exists():
            words = f"{plan.workload.argv[0]} reads standard input"
            echo_error(f"warning: {words}, but no input was stored for this run, so standard input is empty")
        if fork is None or so_far.saved:
            click.echo(f"  checkpoint          {starting_point(so_far)}", err=True)
        if (rollback := found.rollback) is not None:
            click.echo(f"  rollback            {rollback.describe()}", err=True)
        if fork is None and so_far.job.code is not None and wants_copy(loaded.config, plan):
            click.echo(f"  code                {_about_code(so_far, plan, new_code=new_code)}", err=True)
        if dry_run:
            if fork is not None:
                newest_checkpoint_of(so_far)
                refuse_place(loaded.config.name, fork, "--as")
            place = None if fork is None else RunDir(fork)
            plan, script = preview_resume(so_far, loaded.config, plan, new_code=new_code, fork=place)
            if as_json or script is not None:
                echo_result(plan.to_dict(), (script or "").rstrip("\n"), as_json)
            return EXIT_OK
        if task is not None:
            refuse_command(task, plan.workload)
            plan = shown_failures(plan)
            entry = resume_run(source, loaded.config, plan, new_code=new_code, rollback=rollback)
            print_started(source, so_far.job.name, entry, plan.backend, as_json, plan.warnings)
            return lead_step(folder, task, source, entry, plan)
        newest = so_far.job.newest
        was_here = newest is not None and newest.in_foreground and plan.is_here
        foreground = was_here and fork is None and not (follow or as_json)
        if foreground:
            plan = shown_failures(plan)
        if fork is None:
            run, name = source, so_far.job.name
            entry = resume_run(
                run,
                loaded.config,
                plan,
                new_code=new_code,
                now=now,
                foreground=foreground,
                rollback=rollback,
            )
        else:
            checkpoint = newest_checkpoint_of(so_far)
            stdin = source.input_file.read_bytes() if source.input_file.exists() else None
            created = create_run(loaded.config, plan, ["trainkit", *sys.argv[1:]], fork, stdin=stdin)
            run, name = created.run, created.name
            print_created(created)
            copy_newest_checkpoint(checkpoint, run, source, rollback)
            entry = start_run(run, created.job, loaded.config, plan, "submit", now=now)
            click.echo(f"resuming from {checkpoint}", err=True)
    if foreground:
        return stay_in_foreground(run, name, entry, plan)
    print_started(run, name, entry, plan.backend, as_json, plan.warnings)
    if not follow:
        click.echo(f"`trainkit logs {run.quoted} -f` follows the log of the run", err=True)
        return EXIT_OK
    return follow_detachable(run, entry.attempt, to_stderr=as_json)


def _about_code(so_far: RunSoFar, plan: LaunchPlan, *, new_code: bool) -> str:
    """Describe the code of the next attempt, and how the current files differ from the run's copy."""
    from trainkit.launch.snapshot import find_code_changes

    assert so_far.job.code is not None
    kept = "the copy from the submission"
    try:
        found = find_code_changes(so_far.run, so_far.job.code, plan.workload)
    except UsageError as error:
        if new_code:
            raise
        return f"{kept} ({error})"
    if new_code:
        copied = plural(found.code.num_files, "file")
        return f"{copied} of {shown_path(found.code.source)}; {str(found) or 'no file has changed'}"
    if not found.changed:
        return kept
    changed = replace(found, new=(), removed=())
    return f"{kept}, not your current files ({changed}); --new-code uses the current files"


def _resume_group(group: RunGroup, as_json: bool) -> int:
    from trainkit.control.resume import resume_group

    job_id = resume_group(group)
    value: ResumedGroupJson = {"run_dir": str(group.path), "name": group.name, "job_id": job_id}
    echo_result(value, f"{group.path}\n{job_id}", as_json)
    click.echo(f"`trainkit status {group.quoted}` shows all runs of the group", err=True)
    return EXIT_OK
