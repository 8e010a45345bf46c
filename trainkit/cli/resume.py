"""``trainkit resume``: continue from the newest intact checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option, warn
from trainkit.cli.hosts import host_options, host_place, hosts_target, run_on_hosts
from trainkit.cli.logs import follow_detachable
from trainkit.cli.output import echo_result
from trainkit.cli.run import shown_failures, stay_in_foreground
from trainkit.cli.started import describe_plan, print_choice, print_created, print_started
from trainkit.errors import EXIT_OK, UsageError
from trainkit.formats import duration
from trainkit.run.group import RunGroup
from trainkit.run.registry import find_run_or_group, one_run


@as_command(
    "trainkit resume last --follow",
    "trainkit resume last --nodes 1 --gpus-per-node 4",
    "trainkit resume last --set train.steps=400 --as runs/longer",
)
@options.run_argument
@options.choosing_shape_options
@host_options
@options.slurm_options
@options.set_option
@options.backend_option
@option("--new-code", "Use the current code instead of the run's snapshot.")
@option("--as DIR", "Resume in a new run folder and leave RUN unchanged.", name="fork_dir")
@options.now_option
@options.trust_option
@option("--follow", "Show rank 0's log until the run ends; Ctrl-C detaches.")
@options.json_option
def command(
    run_name: str,
    overrides: tuple[str, ...],
    new_code: bool,
    fork_dir: str | None,
    now: bool,
    follow: bool,
    as_json: bool,
    **typed: Any,
) -> int:
    """Resume RUN from its newest intact checkpoint, optionally on a different number of nodes or GPUs.

    For a group on this machine, runs what has not finished.

    It resumes in the same run folder as the next attempt, or with --as in a new run folder, on Slurm or on
    this machine, where it ran. A run of `trainkit run` resumes in the foreground, unless --follow, --json or
    --as is given. With --node-rank, --master-addr and --master-port it runs in the foreground on several
    hosts, as `trainkit run` does.
    """
    from trainkit.control.changed_config import changes, expected_time_s, learning_rate_change, missing_save
    from trainkit.control.fork import copy_newest_checkpoint, newest_checkpoint_of
    from trainkit.control.resume import planned_resume, resume_run
    from trainkit.launch.create import create_run, start_run

    named = find_run_or_group(run_name, acts=True)
    options.refuse_untrusted(named.path)
    if isinstance(named, RunGroup) and (named.record.process is not None or named.left):
        options.refuse_other_options("run_name", "for a group of runs")
        return _resume_group(named, as_json)
    source = one_run(named, run_name)
    if chooses_nodes := typed["nodes"] == options.AUTO:
        typed["nodes"] = None
    flags = options.config_flags(typed)
    place = host_place(flags, **typed)
    if place is not None and (as_json or follow or fork_dir is not None):
        given = "--json" if as_json else "--follow" if follow else "--as"
        raise UsageError(
            f"{given} cannot be combined with --node-rank",
            hint="the run stays in the foreground and in its folder; leave the option out",
        )
    is_first = place is None or place.node_rank == 0
    fork = None if fork_dir is None else Path(fork_dir).absolute()
    if fork is not None:
        options.accept_trusted(fork)
    planned = planned_resume(
        *(source, overrides, flags),
        warn=warn,
        target=None if place is None else hosts_target(place),
        starts_here=fork is None and is_first,
        new_code=new_code or fork is not None,
        chooses_nodes=chooses_nodes,
    )
    with planned as found:
        loaded, plan, is_command = found.loaded, found.plan, found.plan_before.workload.is_command
        print_choice(found.choice, plan)
        if is_first:
            click.echo(describe_plan(plan, loaded.config.name if fork else found.job.name), err=True)
            for change in changes(found.before, loaded.config):
                click.echo(f"  changed             {change}", err=True)
            peaks = found.plan_before.lr, plan.lr
            if not is_command and (lr := learning_rate_change(source, found.before, loaded.config, *peaks)):
                click.echo(f"  learning rate       {lr}", err=True)
            time_s = None if is_command else expected_time_s(source, plan, loaded.config.train.steps)
            if time_s is not None:
                left = "at the speed of its newest steps; checkpoints and validations come on top"
                click.echo(f"  time                about {duration(time_s)} {left}", err=True)
            if plan.workload.reads_input and not source.input_file.exists():
                words = f"{plan.workload.argv[0]} reads standard input"
                click.echo(f"warning: {words}, which this run has not kept: it gets an empty one", err=True)
            if fork is None and (missing := missing_save(source, is_command=is_command)):
                click.echo(f"  checkpoint          {missing}", err=True)
        if place is not None:
            name, plan = found.job.name, shown_failures(plan)
            return run_on_hosts(
                *(place, loaded.config, plan, source.path.parent, source.path.name),
                lambda: (source, name, resume_run(source, loaded.config, plan, new_code=new_code)),
            )
        newest = found.job.newest
        was_here = newest is not None and newest.in_foreground and plan.is_here
        foreground = was_here and fork is None and not (follow or as_json)
        if foreground:
            plan = shown_failures(plan)
        if fork is None:
            run, name = source, found.job.name
            entry = resume_run(run, loaded.config, plan, new_code=new_code, now=now, foreground=foreground)
        else:
            checkpoint = newest_checkpoint_of(source)
            stdin = source.input_file.read_bytes() if source.input_file.exists() else None
            created = create_run(loaded.config, plan, ["trainkit", *sys.argv[1:]], fork, stdin=stdin)
            run, name = created.run, created.name
            print_created(created)
            copy_newest_checkpoint(checkpoint, run)
            entry = start_run(run, created.job, loaded.config, plan, "submit", now=now)
            click.echo(f"resuming from {checkpoint}", err=True)
    if foreground:
        return stay_in_foreground(run, name, entry, plan)
    print_started(run, name, entry, plan.backend, as_json, plan.warnings)
    if not follow:
        click.echo(f"`trainkit logs {run.word} -f` follows its log", err=True)
        return EXIT_OK
    return follow_detachable(run, entry.attempt, to_stderr=as_json)


def _resume_group(group: RunGroup, as_json: bool) -> int:
    from trainkit.control.resume_group import resume_group

    job_id = resume_group(group)
    value = {"run_dir": str(group.path), "name": group.name, "job_id": job_id}
    echo_result(value, f"{group.path}\n{job_id}", as_json)
    click.echo(f"`trainkit status {group.word}` shows all runs", err=True)
    return EXIT_OK
