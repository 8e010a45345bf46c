"""``trainkit resume``: go on from the newest good checkpoint."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trainkit.cli.help import Command, examples
from trainkit.cli.options import (
    json_option,
    run_argument,
    set_option,
    shape_flags,
    shape_options,
    slurm_flags,
    slurm_options,
)
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.plan.launch import LaunchPlan
    from trainkit.rundir import RunDir


@click.command(
    cls=Command,
    epilog=examples(
        "trainkit resume last --follow",
        "trainkit resume last --nodes 1 --gpus-per-node 4",
        "trainkit resume last --set train.steps=400 --as runs/longer",
    ),
)
@run_argument
@shape_options
@slurm_options
@set_option
@click.option(
    "--new-code",
    is_flag=True,
    help="On Slurm: train the code as it is now, not the copy of the first submit.",
)
@click.option("--as", "fork_dir", metavar="DIR", help="Go on in a new run folder; this run stays as it is.")
@click.option("--follow", is_flag=True, help="Show rank 0's log until the run ends; Ctrl-C detaches.")
@json_option
def command(
    run_name: str,
    nodes: int | None,
    gpus_per_node: int | None,
    overrides: tuple[str, ...],
    new_code: bool,
    fork_dir: str | None,
    follow: bool,
    as_json: bool,
    **slurm: object,
) -> int:
    """Go on with RUN from its newest good checkpoint, possibly on another number of nodes or GPUs.

    It goes on in the same run folder as its next attempt, or with --as in a new one.
    """
    from trainkit.cli import launch
    from trainkit.config import load_config, read_effective
    from trainkit.control.jobs import refuse_live
    from trainkit.control.resume import changes, refuse_incompatible
    from trainkit.control.run_registry import find_run
    from trainkit.plan.launch import LaunchPlan, describe_plan
    from trainkit.rundir import read_json

    source = find_run(run_name)
    if fork_dir is None:
        refuse_live(source, "resume")
    flags = shape_flags(nodes, gpus_per_node) | slurm_flags(slurm)
    loaded = load_config(source.config_file, overrides=overrides, flags=flags, layers=False)
    loaded = loaded.adjusting(
        "train.device_batch_size",
        "parallel.pp_microbatches",
        origin=loaded.origins["name"].rpartition(":")[0],
    )
    before = LaunchPlan.from_dict(read_json(source.plan_file))
    fork = None if fork_dir is None else Path(fork_dir).absolute()
    with _where_it_was_submitted(source, new_code or fork is not None) as code_dir:
        plan = launch.plan_for(loaded, before.command, before.launcher, code_dir=code_dir)
        refuse_incompatible(source, loaded)
        click.echo(describe_plan(plan, loaded.config.name), err=True)
        for change in changes(read_effective(source.config_file), loaded.config):
            click.echo(f"  changed             {change}", err=True)
        run, value = (
            _go_on(source, loaded, plan, new_code) if fork is None else _fork(source, fork, loaded, plan)
        )
    launch.print_started(value, as_json)
    if not follow:
        return EXIT_OK
    from trainkit.cli.following import follow_detachable

    return follow_detachable(run, value["attempt"], to_stderr=as_json)


@contextmanager
def _where_it_was_submitted(run: RunDir, takes_new_code: bool) -> Iterator[Path]:
    """Be in the folder that a run was submitted from: what its config says is counted from there.

    Gives the folder that its command is started in: in the run's own copy of the code, where it has one.
    """
    from trainkit.job.record import read_job

    job, here = read_job(run), Path.cwd()
    there = Path(str(job.get("cwd") or here))
    if not there.is_dir():
        there = here
    code = None if takes_new_code else job.get("code")
    os.chdir(there)
    try:
        yield there if code is None else Path(str(code["workdir"]))
    finally:
        os.chdir(here)


def _go_on(
    run: RunDir, loaded: LoadedConfig, plan: LaunchPlan, new_code: bool
) -> tuple[RunDir, dict[str, Any]]:
    from trainkit.cli.launch import started
    from trainkit.control.jobs import recall, refuse_live
    from trainkit.job.record import read_job, run_lock
    from trainkit.submit.code.copy import renewed_code
    from trainkit.submit.start import start_attempt

    with run_lock(run):
        recall(run)
        refuse_live(run, "resume")  # again: another command may have been faster
        with renewed_code(run, loaded.config, plan) if new_code else nullcontext():
            entry = start_attempt(run, loaded.config, plan, "resume")
    return run, {"run_dir": str(run.path), "name": read_job(run)["name"], **started(entry, plan.backend)}


def _fork(
    source: RunDir, folder: Path, loaded: LoadedConfig, plan: LaunchPlan
) -> tuple[RunDir, dict[str, Any]]:
    from trainkit.cli.launch import code_copier, started
    from trainkit.control.resume import copy_checkpoint
    from trainkit.job.record import run_lock
    from trainkit.manifest import newest_intact, published
    from trainkit.submit.create import create_run
    from trainkit.submit.start import start_attempt

    checkpoint = newest_intact(published(source.checkpoints_dir))
    if checkpoint is None:
        raise UsageError(
            f"{source.path} has no intact checkpoint to go on from",
            hint="`trainkit submit` starts a run from the beginning",
        )
    run, name = create_run(
        loaded, folder, ["trainkit", *sys.argv[1:]], plan.backend, code_copier(loaded.config, plan)
    )
    try:
        copy_checkpoint(checkpoint.path, run)
        with run_lock(run):
            entry = start_attempt(run, loaded.config, plan, "submit")
    except BaseException:
        if not run.attempt_numbers():
            shutil.rmtree(run.path, ignore_errors=True)  # made a moment ago; a refusal leaves no trace
        raise
    click.echo(f"from {checkpoint.path}", err=True)
    return run, {"run_dir": str(run.path), "name": name, **started(entry, plan.backend)}
