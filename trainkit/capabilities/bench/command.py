"""Implements ``trainkit bench``, which measures the speed of a config with several layouts or settings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

import click

from trainkit.capabilities.bench.plan_bench import OPTION, PlannedBench, plan_layouts, plan_settings
from trainkit.capabilities.bench.run_bench import Bench, BenchLength, Kind, read_bench, wait_for_runs
from trainkit.capabilities.bench.summary import (
    COLUMNS,
    INSTALL_HINT,
    LAYOUT_COLUMN,
    can_plot,
    end_line,
    summary_table,
    write_plots,
    write_summary,
)
from trainkit.cli import options
from trainkit.cli.help import Group, as_group, examples, option, terminal_width, warn
from trainkit.cli.output import echo_json, echo_result
from trainkit.cli.started import describe_plan, print_created
from trainkit.cli.submit import sweep_option
from trainkit.control.cancel import cancel_group
from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from trainkit.folders import shown_path
from trainkit.formats import short_keys, shown_value, table
from trainkit.launch.config_request import ConfigRequest
from trainkit.launch.create import create_submission, start_group
from trainkit.launch.submission import Submission
from trainkit.launch.sweep import group_trials
from trainkit.plan.workload import TRAINER
from trainkit.run.group import RunGroup
from trainkit.run.owner import refuse_place

STEPS = 30
WARMUP = 5
WIDTH = 100


class BenchGroup(Group):
    """Command group for benches of layouts and benches of settings.

    Without a subcommand, `settings` is run if `--sweep` is given, and `layouts` otherwise.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_kind = bool(get_close_matches(args[0], self.commands)) and not Path(args[0]).exists()
        if not args[0].startswith("-") and not is_kind:
            sweeps = any(word.partition("=")[0] == "--sweep" for word in args)
            args = ["settings" if sweeps else "layouts", *args]
        return super().resolve_command(ctx, args)


@as_group(
    "bench",
    "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20",
    "trainkit bench settings quickstart --sweep train.device_batch_size=4,8 --dry-run",
    cls=BenchGroup,
)
def command() -> None:
    """Measure the speed of several variants of a config by running each variant for a few steps.

    `trainkit bench CONFIG` measures settings if --sweep is given, and layouts otherwise.
    """


def _columns(own: Mapping[str, str]) -> str:
    """Return the part of the help text that describes the columns of summary.csv."""
    columns = {**own, **COLUMNS}
    width = max(map(len, columns)) + 4
    lines = []
    for name, text in columns.items():
        first, *rest = wrap(text, WIDTH - width - 2)
        lines += [f"  {name:<{width - 2}}{first}", *(" " * width + line for line in rest)]
    return "\b\nColumns of summary.csv:\n" + "\n".join(lines)


def _bench_options(what: str, folder: str) -> Callable[[options.Function], options.Function]:
    """Return a decorator that adds the options shared by both kinds of benches.

    `what` is the noun for the trials in help texts, and `folder` is the bench's default output folder.
    """
    count = click.IntRange(min=1)
    repeats = (
        f"Number of rounds, which run all {what} once each, to measure how much the results vary; default: 1."
    )
    at_once = "Maximum number of concurrent runs; default: 1, so that runs do not slow each other down."
    collect = "Write the summary of the existing bench in DIR without starting any runs."
    return options.combined(
        option("--steps N", f"Number of steps per run; default: {STEPS}.", type=count, default=STEPS),
        option(
            "--warmup K",
            f"Number of warm-up steps, which are not measured; default: {WARMUP}.",
            type=click.IntRange(min=0),
            default=WARMUP,
        ),
        option("--repeats N", repeats, type=count, default=1),
        option("--out DIR", f"New or empty folder for the bench; default: {folder}."),
        option("--at-once N", at_once, type=count, default=1),
        option("--follow", "On Slurm, wait until all runs have finished, then write the summary."),
        option("--dry-run", f"Print the {what} that would run without starting them."),
        option("--collect DIR", collect),
        options.json_option("trainkit.capabilities.bench.summary:BenchJson"),
    )


@command.command(
    epilog=_columns(LAYOUT_COLUMN)
    + "\n\n"
    + examples(
        "trainkit bench layouts quickstart --gpus-per-node 4 --dry-run",
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20 --out runs/two",
        "trainkit bench layouts --collect runs/two",
        "trainkit bench layouts quickstart --gpus-per-node 2 --steps 20 "
        "--layout tp=2 --layout dp_shard=2,zero=2",
    )
)
@options.config_options(unless="collect")
@option(
    "--layout KEY=N,KEY=N,…",
    "Layout to measure, as values of keys in `parallel`; repeatable. Default: all possible layouts.",
    name="layouts",
    multiple=True,
)
@_bench_options("layouts", "runs/NAME-layouts")
def layouts(request: ConfigRequest | None, layouts: tuple[str, ...], **typed: Any) -> int:
    """Run CONFIG with each of several layouts for a few steps, and write summary.csv and plots.

    Without --layout, the bench measures all layouts that are possible for the number of processes, the model
    and the batch size, simplest first. The bench varies parallel.cp only if the config sets this key or
    sequences are longer than 16,000 tokens. train.global_batch_size is the same for all layouts;
    train.device_batch_size and parallel.pp_microbatches are adapted to the layout where necessary.

    On this machine, the layouts run one after another, and Ctrl-C stops the bench. On Slurm, the layouts run
    as one job array; with --follow, the command waits for the runs and writes the summary. The exit code is 1
    if nothing was measured.
    """

    def plan(planned: PlannedBench, config: ConfigRequest) -> None:
        plan_layouts(planned, config.load_to_plan(), layouts)

    return _bench("layouts", plan, request, **typed)


@command.command(
    epilog=_columns({"KEY": "value of the swept key; each key has its own column"})
    + "\n\n"
    + examples(
        "trainkit bench settings quickstart --sweep train.device_batch_size=2,4,8 --dry-run",
        "trainkit bench settings quickstart --sweep train.device_batch_size=4,8 --sweep data.num_workers=0,2 "
        "--steps 12 --repeats 2 --out runs/batches",
        "trainkit bench settings --collect runs/batches",
    )
)
@options.config_options(unless="collect")
@sweep_option(
    "Config key and the values to measure. If the option is repeated, every combination is measured."
)
@_bench_options("trials", "runs/NAME-settings")
def settings(request: ConfigRequest | None, sweeps: tuple[str, ...], **typed: Any) -> int:
    """Run CONFIG with every value of --sweep for a few steps, and write summary.csv and plots.

    Any config key can be swept, except the keys that a bench sets itself, such as train.steps. Trials that
    cannot run are listed with the reason; all other trials are run.

    On this machine, the trials run one after another, and Ctrl-C stops the bench. On Slurm, the trials run as
    one job array; with --follow, the command waits for the runs and writes the summary. The exit code is 1 if
    nothing was measured.
    """

    def plan(planned: PlannedBench, config: ConfigRequest) -> None:
        if not sweeps:
            raise UsageError("no --sweep", hint="for example --sweep train.device_batch_size=4,8,16")
        plan_settings(planned, group_trials(config, TRAINER, sweeps, None)[1])

    return _bench("settings", plan, request, **typed)


def _bench(
    kind: Kind,
    plan: Callable[[PlannedBench, ConfigRequest], None],
    config: ConfigRequest | None,
    *,
    steps: int,
    warmup: int,
    repeats: int,
    out: str | None,
    at_once: int,
    follow: bool,
    dry_run: bool,
    collect: str | None,
    as_json: bool,
) -> int:
    if collect is not None:
        options.refuse_other_options("collect")
        if not collect.strip():
            raise UsageError("--collect is empty", hint="specify a folder that `trainkit bench` created")
        return summarize(read_bench(Path(collect)), as_json)
    assert config is not None
    folder = options.named_folder(out, OPTION)
    length = BenchLength(steps, warmup)
    planned = PlannedBench(kind, config.path, length, repeats, "name" in config.flags)
    plan(planned, config)
    submission = planned.submission(at_once)
    if not dry_run:
        click.echo(describe_plan(planned.plan, planned.name).splitlines()[0], err=True)
    _describe(planned)
    if dry_run:
        refuse_place(planned.name, folder, OPTION)
        _list(planned, as_json)
        return EXIT_OK
    return _run(planned, submission, folder, follow, as_json)


def _describe(planned: PlannedBench) -> None:
    """Print the config changes common to all trials, the trials that will run, and those that cannot run."""
    facts = [("bench", change.sentence) for change in planned.changes]
    count, repeats = len(planned.trials), planned.repeats
    what = planned.kind if planned.kind == "layouts" else "trials"
    times = "" if repeats == 1 else f", {repeats} times each"
    sizes = sorted({item.plan.world_size for item in planned.trials})
    processes = f"{' or '.join(map(str, sizes))} process{'es' if sizes != [1] else ''}"
    facts.append((what, f"{count} {what if count > 1 else what[:-1]} with {processes}{times}"))
    facts.append(("steps", planned.length.text))
    facts += [("adapted", f"{item.name}: {note}") for item in planned.trials for note in item.notes]
    facts += [("not possible", f"{name}: {reason}") for name, reason in planned.impossible.items()]
    if planned.left_out:
        facts.append(
            ("left out", f"{len(planned.left_out)} other possible layouts; use --layout to run them")
        )
    for label, text in facts:
        click.echo(f"  {label:<12}  {text}", err=True)


def _list(planned: PlannedBench, as_json: bool) -> None:
    """Print a list of the trials that would run."""
    if as_json:
        echo_json(planned.to_dict())
        return
    keys = list(planned.trials[0].values)
    rows = [[*(key.upper() for key in short_keys(keys)), "BATCH", "MICROBATCHES", "ACCUMULATION"]]
    for trial in planned.trials:
        batch = trial.plan.batch
        microbatches = "-" if batch.pp_microbatches is None else str(batch.pp_microbatches)
        values = [shown_value(value) for value in trial.values.values()]
        rows.append([*values, str(batch.device_batch_size), microbatches, str(batch.accumulation_steps)])
    click.echo(table(rows, fit=terminal_width(), num_keys=len(keys)))


def _run(planned: PlannedBench, submission: Submission, out: Path | None, follow: bool, as_json: bool) -> int:
    """Start all runs of a bench as one group.

    On this machine, or with --follow, wait for the runs and write the summary.
    """
    created = create_submission(submission, ["trainkit", *sys.argv[1:]], out, OPTION)
    print_created(created)
    group, is_here = RunGroup(created.run.path), planned.plan.is_here
    bench = planned.create(group.path)
    shown = quote(shown_path(bench.folder))
    collect = f"`trainkit bench {bench.kind} --collect {shown}` writes the summary"
    try:
        job_id = start_group(group)
        if not (follow or is_here):
            facts = {"folder": str(bench.folder), "job_id": job_id, "array": group.record.array}
            echo_result(facts, f"{bench.folder}\n{job_id}", as_json)
            click.echo(f"`trainkit status {shown}` shows the runs; {collect}", err=True)
            return EXIT_OK
        click.echo(
            f"{shown_path(bench.folder)}: job {job_id}; `trainkit cancel {shown}` cancels the job", err=True
        )
        wait_for_runs(bench, lambda text: click.echo(text, err=True), end_line)
    except BaseException as error:
        if is_here and group.exists():  # if the runs could not be started, remove their folders
            cancel_group(group, now=True, wait=False)
        if not isinstance(error, KeyboardInterrupt):
            raise
        click.echo(
            f"\n{collect} so far" if is_here else f"\ndetached; the runs continue: {collect}",
            err=True,
        )
        return EXIT_INTERRUPTED
    return summarize(bench, as_json)


def summarize(bench: Bench, as_json: bool) -> int:
    """Write and print a summary of the measurements made so far.

    Returns exit code 1 if nothing has been measured yet.
    """
    rows, fastest, num_open = write_summary(bench, warn)
    plots: list[Path] = []
    if can_plot():
        plots, empty = write_plots(bench.keys, rows, bench.plots_dir)
        but = (
            f"; no plot of {', '.join(empty)}, which {'have' if len(empty) > 1 else 'has'} no values"
            if empty
            else ""
        )
        click.echo(f"plots: {len(plots)} in {bench.plots_dir}{but}", err=True)
    else:
        click.echo(f"no plots: matplotlib is not installed ({INSTALL_HINT})", err=True)
    value = {
        "folder": str(bench.folder),
        "summary": str(bench.summary_file),
        "plots": [str(file) for file in plots],
        "rows": rows,
        "fastest": None if fastest is None else asdict(fastest),
    }
    echo_result(value, summary_table(bench.keys, rows, terminal_width()), as_json)
    if fastest is not None:
        click.echo(f"fastest: {fastest}", err=True)
    if num_open:
        warn(
            f"{num_open} of {len(bench.runs)} runs are still pending or running: run the same command "
            f"again later"
        )
    click.echo(f"summary: {bench.summary_file}", err=True)
    return EXIT_OK if any(row["steps"] for row in rows) else EXIT_FAILED
