"""``trainkit submit``: submit a run to Slurm, or start it in the background on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli import options
from trainkit.cli.help import as_command, option, terminal_width, warn
from trainkit.cli.output import echo_result
from trainkit.cli.started import describe_plan, print_created
from trainkit.errors import EXIT_OK, ConfigError, UsageError
from trainkit.folders import find_shipped_config, typed_path
from trainkit.formats import JsonObject, shown_value
from trainkit.plan.workload import Workload
from trainkit.run.owner import refuse_place
from trainkit.run.rundir import RUNS_FOLDER, next_name
from trainkit.slurm.client import require_controller

if TYPE_CHECKING:
    from trainkit.config import LoadedConfig
    from trainkit.control.repeat import RepeatedRun
    from trainkit.launch.earliest_end import Choice
    from trainkit.launch.submission import ArraySpec, LoadedPoint, Submission
    from trainkit.run.record import CodeCopy


def group_points(
    request: options.ConfigRequest, workload: Workload, sweeps: Sequence[str], array: str | None
) -> tuple[ArraySpec | None, Iterator[LoadedPoint]]:
    """The array, None for a run, and the config of every point; a group can have 100,000 points.

    A COMMAND may contain swept keys. Without --sweep the points of an array get consecutive seeds, unless
    they run a COMMAND. Raises UsageError for invalid options, and ConfigError for an invalid config.
    """
    from trainkit.launch.submission import ArraySpec, LoadedPoint, parse_array
    from trainkit.plan.sweep import sweep_points

    spec = None if array is None else parse_array(array)
    if sweeps:
        if spec is not None and spec.indices:
            raise UsageError(
                f"--array {array}: --sweep numbers its points itself",
                hint="with --sweep, --array only sets a limit, as in --array %4",
            )
        found = sweep_points(sweeps, workload.argv)
        limit = None if spec is None else spec.limit
        return ArraySpec(tuple(range(len(found))), limit), swept(request, found)
    loaded = request.load_to_plan(workload)
    if spec is None:
        return None, iter([LoadedPoint(0, {}, loaded)])
    if not spec.indices:
        raise UsageError(
            f"--array {array} limits how many tasks run at once, but names no tasks",
            hint="for example --array 0-9%4",
        )
    if workload.is_command:
        return spec, (LoadedPoint(index, {}, loaded) for index in spec.indices)
    seeds = ((index, loaded.config.seed + index) for index in spec.indices)
    return spec, (
        LoadedPoint(index, {"seed": seed}, _with_seed(loaded, seed, "--array")) for index, seed in seeds
    )


def swept(request: options.ConfigRequest, found: Sequence[JsonObject]) -> Iterator[LoadedPoint]:
    """The config of each point of a sweep; points that differ only in the seed are loaded once."""
    from trainkit.config.schema import is_known
    from trainkit.launch.submission import LoadedPoint
    from trainkit.plan.sweep import key_without_seed

    loaded: dict[str, LoadedConfig] = {}
    for index, values in enumerate(found):
        key = key_without_seed(values)
        try:
            if key in loaded:
                seed = values["seed"]
                own = _with_seed(loaded[key], seed, f"--sweep seed={shown_value(seed)}")
                yield LoadedPoint(index, values, own)
                continue
            flags = {
                key: (f"--sweep {key}={shown_value(value)}", value)
                for key, value in values.items()
                if is_known(tuple(key.split(".")))  # others are only in the command
            }
            loaded[key] = replace(request, flags={**request.flags, **flags}).load()
            yield LoadedPoint(index, values, loaded[key])
        except ConfigError as error:
            yield LoadedPoint(index, values, error)


def _with_seed(loaded: LoadedConfig, seed: int, origin: str) -> LoadedConfig | ConfigError:
    from trainkit.config.load import with_values

    try:
        return with_values(loaded, {"seed": seed}, origin)
    except ConfigError as error:
        return error


def sweep_option(help_text: str) -> Callable[[options.Function], options.Function]:
    """``--sweep KEY=V,V,…``, repeatable, given as `sweeps`."""
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
@sweep_option("One run per value, and per combination of several --sweep.")
@option(
    "--array SPEC",
    "One run per index, as in 0-9 or 1,3,5, with consecutive seeds; %4 runs at most 4 at once.",
)
@options.after_option
@options.now_option
@options.trust_option
@option("--run-dir DIR", "Exact run folder, new or empty; default: runs/NAME.")
@options.launcher_option
@option("--dry-run", "Print what would be submitted; write and start nothing.")
@option("--test-only", "Ask Slurm when the job would start; submit nothing.")
@option("--follow", "Show rank 0's log until the run ends; Ctrl-C detaches.")
@options.json_option
def command(
    request: options.ConfigRequest,
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

    Prints the run folder and the job id. With a COMMAND after --, each rank runs it instead of the built-in
    trainer.

    In place of CONFIG, a RUN (its name, folder or job id) is run again in a new folder: with its config, its
    copy of the code and its command, on the same backend and number of GPUs, as if submitted from the same
    folder. Options change it. A file or shipped config of that name comes first.

    --sweep and --array submit a group of runs: one Slurm array, or on this machine one run after another. The
    group's folder has one run folder per index. Sweep values are parsed as items of a YAML list: "a,b" is one
    string, [1,2],[3,4] are two lists.
    """
    from trainkit.launch.submission import plan_submission

    is_group, workload = bool(sweeps) or array is not None, options.trailing_workload(launcher)
    folder = options.named_folder(run_dir)
    request, workload, repeated = _repeated(request, workload)
    if repeated is not None:
        from trainkit.control.resume import submission_folder

        folder = None if folder is None else folder.absolute()
        after = tuple(str(Path(name).absolute()) if Path(name).is_dir() else name for name in after)
        click.get_current_context().with_resource(submission_folder(repeated.run, takes_new_code=True))
    if is_group and follow:
        raise UsageError(
            "--follow follows one run, not a group", hint="`trainkit logs GROUP/0 -f` follows one of them"
        )
    if is_group and now:
        raise UsageError(
            "--now starts one run, not a group, whose runs share what is free", hint="remove --now"
        )
    code_from = None if repeated is None else repeated.code
    spec: ArraySpec | None = None
    choice: Choice | None = None
    if request.chooses_nodes:
        if is_group or after:
            raise UsageError(
                "--nodes auto is for one run that may start now: when a group or a run with --after would "
                "start is unknown",
                hint="name a number, or several as in --nodes 2-8",
            )
        submission, choice = _chosen(request, workload, code_from)
    else:
        spec, points = group_points(request, workload, sweeps, array)
        submission = plan_submission(points, spec, workload, after=after, warn=warn, code_from=code_from)
    if repeated is not None:
        described = [replace(point, plan=repeated.described(point.plan)) for point in submission.points]
        submission = replace(submission, points=described)
    from trainkit.launch.standard_input import kept_input

    stdin, about_input = kept_input(workload, streams=False)
    if stdin is None and repeated is not None and workload == repeated.plan.workload:
        stdin = repeated.stdin
    submission = replace(submission, stdin=stdin)
    plan = submission.plan
    if now and plan.slurm is not None:
        raise UsageError("--now is for a run on this machine, and this one is for Slurm", hint="remove --now")
    # Of a run on this machine, this is what a dry run shows: there is no script.
    is_shown = dry_run and plan.slurm is None and not as_json
    click.echo(describe_plan(plan, next_name(submission.points[0].config.name, folder)), err=not is_shown)
    for line in (
        *([] if repeated is None or is_group else _changes(repeated, submission, request)),
        *submission_warnings(submission, folder, workload, starts=not dry_run),
        *([] if about_input is None else [about_input]),
        *(_notes(submission, workload, bool(sweeps)) if is_group else ()),
    ):
        click.echo(line, err=True)
    if plan.slurm is not None and not dry_run:
        require_controller(plan.slurm.clusters)
    if dry_run or test_only:
        refuse_place(submission.points[0].config.name, folder)
        return _show(submission, folder, test_only, as_json)
    from trainkit.launch.create import create_submission, start_submission

    created = create_submission(submission, ["trainkit", *sys.argv[1:]], folder)
    print_created(created)
    job_id, attempt = start_submission(submission, created, now=now)
    run, shown = created.run, created.run.word
    facts = {
        "run_dir": str(run.path),
        "name": created.name,
        "job_id": job_id,
        **({} if attempt is None else {"attempt": attempt}),
        "backend": plan.backend,
        **({} if spec is None else {"array": spec.directive, "num_points": len(submission.points)}),
        "warnings": list(plan.warnings),
        **({} if choice is None else choice.to_dict()),
    }
    echo_result(facts, f"{run.path}\n{job_id}", as_json)
    if follow and attempt is not None:
        from trainkit.cli.logs import follow_detachable  # what reads runs is slow to import

        return follow_detachable(run, attempt, to_stderr=as_json)
    first = submission.points[0].index
    hint = f"`trainkit status {shown}` shows all runs, `trainkit logs {shown}/{first} -f` follows one"
    if spec is None:
        hint = f"`trainkit logs {shown} -f` follows its log, `trainkit cancel {shown}` cancels it"
    click.echo(hint, err=True)
    return EXIT_OK


def _chosen(
    request: options.ConfigRequest, workload: Workload, code_from: CodeCopy | None
) -> tuple[Submission, Choice]:
    """The run with the number of nodes that is expected to finish first; prints what that rests on."""
    from trainkit.launch.earliest_end import choice_lines, choose_nodes
    from trainkit.launch.submission import PlannedPoint, Submission

    code_dir = None if code_from is None else Path(code_from.workdir)
    loaded, plan, choice = choose_nodes(request.load_to_plan(workload), workload, code_dir=code_dir)
    for line in choice_lines(choice, plan, terminal_width()):
        click.echo(line, err=True)
    return Submission([PlannedPoint(0, {}, loaded.config, plan)], code_from=code_from), choice


def _repeated(
    request: options.ConfigRequest, workload: Workload
) -> tuple[options.ConfigRequest, Workload, RepeatedRun | None]:
    """The run that CONFIG names; the request for its config, and the workload: its own if none is typed."""
    is_config = request.path in ("", "-") or typed_path(request.path, Path()).is_file()
    if is_config or find_shipped_config(request.path) is not None:
        return request, workload, None
    from trainkit.control.repeat import find_repeated, repeated_run  # what reads runs is slow to import

    typed = {text.partition("=")[0].strip() for text in request.overrides} | request.flags.keys()
    run = find_repeated(request.path)
    if run is None:
        return request, workload, None
    options.refuse_untrusted(run.path)
    found = repeated_run(run, uses_current_code="launch.snapshot" in typed)
    values = {} if request.profile is not None else found.found_values(typed)
    request = replace(request, flags={**values, **request.flags}, repeats=found.run)
    return request, workload if workload.is_command else found.plan.workload, found


def _changes(repeated: RepeatedRun, submission: Submission, request: options.ConfigRequest) -> Iterator[str]:
    from trainkit.control.resume import changes

    found = [key for key, (origin, _) in request.flags.items() if origin == str(repeated.run.plan_file)]
    for change in changes(repeated.config, submission.points[0].config, found):
        yield f"  changed             {change}"


def submission_warnings(
    submission: Submission, folder: Path | None, workload: Workload, *, starts: bool
) -> Iterator[str]:
    """Warnings about the folder and the command; raises UsageError for a folder without locks or space."""
    from trainkit.launch.disk import disk_forecast, lock_problem
    from trainkit.launch.secrets import secret_options

    plan, points, folder = submission.plan, submission.points, folder or Path(RUNS_FOLDER)
    if (problem := lock_problem(folder, plan.slurm is not None)) is not None:
        yield f"warning: {problem}"
    if (forecast := disk_forecast(folder, plan, points[0].config, len(points), starts=starts)) is not None:
        yield forecast
    if found := dict.fromkeys(secret_options(workload.argv)):
        yield (
            f"warning: {', '.join(found)} of the command looks secret: it is stored in plan.json, and "
            "other users see it in the process list of a node; use an environment variable that "
            "launch.secrets names"
        )


def _notes(submission: Submission, workload: Workload, is_sweep: bool) -> Iterator[str]:
    """What to know of the points of a group."""
    from trainkit.launch.submission import describe_points, reaches_command

    points = submission.points
    yield f"  {'points':<18}  {describe_points(submission, is_sweep)}"
    if workload.argv and is_sweep:
        generated = {json.dumps(item.plan.launcher_files) for item in points}
        if len(generated) == 1 and not reaches_command(points, workload.argv):
            yield (
                "  note: a COMMAND sees only {KEY} in its words and swept launch.env.NAME; the other values "
                "are in config.yaml of the run folder, $TRAINKIT_JOB_RUN_DIR"
            )
        if not points[0].config.launch.snapshot:
            others = "relative outputs of one overwrite those of another"
            yield f"  note: all points run in {Path.cwd()}: {others}"


def _show(submission: Submission, folder: Path | None, test_only: bool, as_json: bool) -> int:
    """Print the script that would be submitted, with --json the plan of a local run, or Slurm's estimate."""
    slurm, (script, files) = submission.plan.slurm, submission.preview(folder)
    if not test_only:
        if slurm is not None or as_json:
            click.echo(script, nl=False)
        # As `head` prints files; the standard output is the script, byte for byte.
        for path, text in files.items():
            click.echo(f"==> {path} <==\n{text}", nl=False, err=True)
        return EXIT_OK
    if slurm is None:
        raise UsageError(
            "--test-only asks Slurm, but this run would start on this machine", hint="use --dry-run"
        )
    from trainkit.slurm.submit import query_start

    click.echo(query_start(script, clusters=slurm.clusters)[1])
    return EXIT_OK
