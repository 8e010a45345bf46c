"""Implements ``trainkit submit``, which submits a run to Slurm or starts it on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.backend import backend_named
from trainkit.cli import options
from trainkit.cli.help import as_command, option, warn
from trainkit.cli.output import echo_result
from trainkit.cli.started import describe_plan, print_choice, print_created
from trainkit.errors import EXIT_OK, UsageError
from trainkit.folders import find_shipped_config, typed_path
from trainkit.launch.config_request import ConfigRequest
from trainkit.plan.workload import Workload
from trainkit.run.owner import refuse_place
from trainkit.run.rundir import next_name

if TYPE_CHECKING:
    from trainkit.launch.repeat import RepeatedRun
    from trainkit.launch.submission import Submission


def sweep_option(help_text: str) -> Callable[[options.Function], options.Function]:
    """Return the repeatable option ``--sweep KEY=V,V,…``, whose values are passed as `sweeps`."""
    return option("--sweep KEY=V,V,…", help_text, name="sweeps", multiple=True)


@as_command(
    "trainkit submit",
    "trainkit submit --nodes 2 --follow",
    "trainkit submit quickstart --nodes auto --dry-run",
    "trainkit submit quickstart --set train.steps=50 --name short --dry-run",
    "trainkit submit quickstart --gpus-per-node 2 -- python -c 'print(1)'",
    "trainkit submit quickstart --sweep optimizer.lr=1e-4,3e-4 --sweep seed=1,2 --dry-run",
    "trainkit submit quickstart --array 0-9%4 --name seeds --dry-run",
    cls=options.WithTrailingCommand,
)
@options.config_options(options.choosing_shape_options)
@options.gpu_type_option
@options.max_gpu_hours_option
@sweep_option("Submit one run per value; with several --sweep, one run per combination of values.")
@option(
    "--array SPEC",
    "Submit one run per index, for example 0-9 or 1,3,5, with consecutive seeds; append %4 to run at most "
    "4 at once.",
)
@options.after_option
@options.now_option
@options.trust_option
@option("--run-dir DIR", "New or empty folder for the run; default: runs/NAME.")
@options.launcher_option
@option("--dry-run", "Print what would be submitted, without writing or starting anything.")
@option("--test-only", "Print Slurm's estimate of the start time, without submitting the job.")
@option("--follow", "Show rank 0's log until the run ends; Ctrl-C detaches.")
@options.json_option("trainkit.cli.plan_json:SubmittedOrPlan")
def command(
    request: ConfigRequest,
    sweeps: tuple[str, ...],
    array: str | None,
    after: tuple[str, ...],
    now: bool,
    run_dir: str | None,
    launcher: str,
    dry_run: bool,
    test_only: bool,
    follow: bool,
    as_json: bool,
) -> int:
    """Submit a run of CONFIG to Slurm, or start it in the background on this machine.

    Prints the run folder and the job id. With a COMMAND after --, each rank runs the COMMAND instead of the
    built-in trainer.

    If the name, folder or job id of a RUN is given instead of CONFIG, that run is repeated in a new folder.
    The new run uses the config, the copied code and the command of RUN, with the same backend and the same
    number of GPUs. Relative paths in the config are resolved against the folder where RUN was submitted.
    Options on the command line override the settings taken from RUN. A file or a shipped config takes
    precedence over a RUN of the same name.

    --sweep and --array submit a group of runs: on Slurm as one array, on this machine one run after another.
    The folder of the group contains one run folder per index. Sweep values are parsed like the items of a
    YAML list: "a,b" is one string, and [1,2],[3,4] are two lists.
    """
    from trainkit.launch.submission import plan_submission, submission_warnings
    from trainkit.launch.sweep import group_trials

    is_group, workload = bool(sweeps) or array is not None, options.trailing_workload(launcher)
    folder = options.named_folder(run_dir)
    request, workload, repeated = _repeated(request, workload)
    if repeated is not None:
        from trainkit.launch.repeat import submission_folder

        folder = None if folder is None else folder.absolute()
        after = tuple(str(Path(name).absolute()) if Path(name).is_dir() else name for name in after)
        click.get_current_context().with_resource(submission_folder(repeated.job, takes_new_code=True))
    if is_group and follow:
        raise UsageError(
            "--follow works only for a single run, not for a group",
            hint="`trainkit logs GROUP/0 -f` follows the log of one run",
        )
    if is_group and now:
        raise UsageError(
            "--now works only for a single run, because the runs of a group share the free GPUs and cores",
            hint="remove --now",
        )
    if request.chooses_nodes and (is_group or after):
        raise UsageError(
            "--nodes auto supports only a single run without --after, because the start time of a group or "
            "of a run with --after cannot be estimated",
            hint="specify a number, a range or a list, for example --nodes 2-8",
        )
    spec, trials = group_trials(request, workload, sweeps, array)
    submission = plan_submission(
        trials, spec, workload, after=after, warn=warn, chooses_nodes=request.chooses_nodes, repeats=repeated
    )
    print_choice(submission.choice, submission.plan)
    from trainkit.launch.standard_input import kept_input

    stdin, about_input = kept_input(workload, streams=False)
    if stdin is None and repeated is not None and workload == repeated.plan.workload:
        stdin = repeated.stdin
    submission = replace(submission, stdin=stdin)
    plan = submission.plan
    if now and plan.is_job:
        raise UsageError(
            "--now requires a run on this machine, but this run would be submitted to Slurm",
            hint="remove --now",
        )
    # A dry run on this machine has no batch script to print, so print the description to stdout.
    is_shown = dry_run and not plan.is_job and not as_json
    click.echo(describe_plan(plan, next_name(submission.trials[0].config.name, folder)), err=not is_shown)
    for line in (
        *([] if repeated is None or is_group else _changes(repeated, submission, request)),
        *submission_warnings(submission, folder, workload, starts=not dry_run),
        *([] if about_input is None else [about_input]),
        *(_notes(submission, workload, bool(sweeps)) if is_group else ()),
    ):
        click.echo(line, err=True)
    if not dry_run:
        backend_named(plan.backend).require_reachable(plan)
    if dry_run or test_only:
        refuse_place(submission.trials[0].config.name, folder)
        return _show(submission, folder, test_only, as_json)
    from trainkit.launch.create import create_submission, start_submission

    created = create_submission(submission, ["trainkit", *sys.argv[1:]], folder)
    print_created(created)
    job_id, attempt = start_submission(submission, created, now=now)
    run, shown = created.run, created.run.quoted
    facts = {
        "run_dir": str(run.path),
        "name": created.name,
        "job_id": job_id,
        **({} if attempt is None else {"attempt": attempt}),
        "backend": plan.backend,
        **({} if spec is None else {"array": spec.directive, "num_points": len(submission.trials)}),
        "warnings": list(plan.warnings),
        **({} if submission.choice is None else submission.choice.to_dict()),
    }
    echo_result(facts, f"{run.path}\n{job_id}", as_json)
    if follow and attempt is not None:
        from trainkit.cli.logs import follow_detachable  # slow to import, so imported only here

        return follow_detachable(run, attempt, to_stderr=as_json)
    first = submission.trials[0].index
    hint = (
        f"`trainkit status {shown}` shows all runs of the group, "
        f"`trainkit logs {shown}/{first} -f` follows the log of one run"
    )
    if spec is None:
        hint = f"`trainkit logs {shown} -f` follows the log, `trainkit cancel {shown}` cancels the run"
    click.echo(hint, err=True)
    return EXIT_OK


def _repeated(
    request: ConfigRequest, workload: Workload
) -> tuple[ConfigRequest, Workload, RepeatedRun | None]:
    """Return the request, the workload, and the run to repeat, which is None unless CONFIG names a run.

    If no COMMAND is given, the repeated run determines the workload.
    """
    is_config = request.path in ("", "-") or typed_path(request.path, Path(), is_literal=True).is_file()
    if is_config or find_shipped_config(request.path) is not None:
        return request, workload, None
    # imported here because modules that read runs are slow to import
    from trainkit.launch.repeat import find_repeated, repeated_run

    typed = {text.partition("=")[0].strip() for text in request.overrides} | request.flags.keys()
    run = find_repeated(request.path)
    if run is None:
        return request, workload, None
    options.refuse_untrusted(run.path)
    found = repeated_run(run, uses_current_code="launch.snapshot" in typed)
    values = {} if request.profile is not None else found.found_values(typed)
    request = replace(request, flags={**values, **request.flags}, repeats=found)
    return request, workload if workload.is_command else found.plan.workload, found


def _changes(repeated: RepeatedRun, submission: Submission, request: ConfigRequest) -> Iterator[str]:
    from trainkit.control.changed_config import changes

    found = [key for key, (origin, _) in request.flags.items() if origin == str(repeated.run.plan_file)]
    for change in changes(repeated.config, submission.trials[0].config, found):
        yield f"  changed             {change}"


def _notes(submission: Submission, workload: Workload, is_sweep: bool) -> Iterator[str]:
    """Yield a line that describes a group's trials, followed by notes about them."""
    from trainkit.launch.submission import describe_trials, reaches_command

    trials = submission.trials
    yield f"  {'trials':<18}  {describe_trials(submission, is_sweep)}"
    if workload.argv and is_sweep:
        generated = {json.dumps(item.plan.files) for item in trials}
        if len(generated) == 1 and not reaches_command(trials, workload.argv):
            yield (
                "  note: a COMMAND receives swept values only through {KEY} in its arguments and through "
                "launch.env.NAME; config.yaml in the run folder ($TRAINKIT_JOB_RUN_DIR) contains all values"
            )
        if not trials[0].config.launch.snapshot:
            others = "trials that write to the same relative path overwrite each other's output"
            yield f"  note: all trials run in {Path.cwd()}: {others}"


def _show(submission: Submission, folder: Path | None, test_only: bool, as_json: bool) -> int:
    """Print the batch script, a local run's plan (with --json), or Slurm's estimate of the start time."""
    plan, (script, files) = submission.plan, submission.preview(folder)
    if not test_only:
        if plan.is_job or as_json:
            click.echo(script, nl=False)
        # Print all other files to stderr, because stdout must contain only the batch script.
        for path, text in files.items():
            click.echo(f"==> {path} <==\n{text}", nl=False, err=True)
        return EXIT_OK
    if not plan.is_job:
        raise UsageError(
            "--test-only requires Slurm, but this run would start on this machine", hint="use --dry-run"
        )
    click.echo(backend_named(plan.backend).expected_start(plan, script))
    return EXIT_OK
