"""Starts a bench here or on Slurm, or lists its points; writes and prints its summary."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.bench.measure import Row
    from trainkit.bench.plan_bench import BenchRequest, PlannedBench
    from trainkit.bench.run_bench import Bench, BenchRun
    from trainkit.cli.options import ConfigRequest, GroupRequest
    from trainkit.run.group import RunGroup
    from trainkit.run.rundir import RunDir


MAX_NAMES = 8


@dataclass(frozen=True)
class BenchOptions:
    """The options of every bench."""

    steps: int
    warmup: int
    repeats: int
    out: str | None
    at_once: int
    follow: bool
    dry_run: bool
    as_json: bool

    @property
    def folder(self) -> Path | None:
        """The folder of ``--out``."""
        if self.out is not None and not self.out.strip():
            raise UsageError("--out is empty", hint="name a folder, or omit --out")
        return None if self.out is None else Path(self.out)

    def request(self, config: ConfigRequest) -> BenchRequest:
        from trainkit.bench.plan_bench import BenchRequest
        from trainkit.bench.run_bench import BenchLength

        return BenchRequest(
            config.path, BenchLength(self.steps, self.warmup), self.repeats, "name" in config.flags
        )


def bench_layouts(config: ConfigRequest, layouts: Sequence[str], typed: BenchOptions) -> int:
    """Run the layouts, submit them, or only list them."""
    from trainkit.bench.plan_bench import plan_layouts

    return _bench(plan_layouts(typed.request(config), config.load_to_plan(), layouts), typed)


def bench_settings(config: ConfigRequest, sweep: GroupRequest, typed: BenchOptions) -> int:
    """Run the points of a sweep, submit them, or only list them."""
    from trainkit.bench.plan_bench import plan_settings
    from trainkit.plan.workload import TRAINER

    request = typed.request(config)
    _, points = sweep.points(config, TRAINER)
    return _bench(plan_settings(request, points), typed)


def _bench(planned: PlannedBench, typed: BenchOptions) -> int:
    from trainkit.plan.launch import describe_plan

    if not typed.dry_run:
        click.echo(describe_plan(planned.plan, planned.name).splitlines()[0], err=True)
    _describe(planned)
    if typed.dry_run:
        return _list(planned, typed.as_json)
    return _run_here(planned, typed) if planned.plan.is_here else _submit(planned, typed)


def _describe(planned: PlannedBench) -> None:
    """Print the changes to the config, the points that run, and those that do not."""
    for change in planned.changes:
        _print_fact("bench", change.sentence)
    count, repeats = len(planned.points), planned.request.repeats
    what = planned.kind if planned.kind == "layouts" else "points"
    times = "" if repeats == 1 else f", {repeats} times each"
    sizes = sorted({item.plan.world_size for item in planned.points})
    processes = f"{' or '.join(map(str, sizes))} process{'es' if sizes != [1] else ''}"
    _print_fact(what, f"{count} {what if count > 1 else what[:-1]} of {processes}{times}")
    _print_fact("steps", planned.request.length.text)
    num_arrays = 1 if planned.plan.is_here else len(planned.arrays)
    if num_arrays > 1:
        _print_fact("arrays", f"{num_arrays}, one after another, because the points need different jobs")
    for item in planned.points:
        for note in item.of.notes:
            _print_fact("adapted", f"{item.name}: {note}")
    for name, reason in planned.impossible.items():
        _print_fact("not possible", f"{name}: {reason}")
    if planned.left_out:
        _print_fact("left out", _left_out(planned.left_out))


def _left_out(names: Sequence[str]) -> str:
    """The layouts that are possible but do not run."""
    rest = len(names) - MAX_NAMES
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    return f"{len(names)} more possible layouts: {shown}; --layout runs them"


def _print_fact(label: str, text: str) -> None:
    click.echo(f"  {label:<12}  {text}", err=True)


def _list(planned: PlannedBench, as_json: bool) -> int:
    """Print the points that would run."""
    from trainkit.formats import table
    from trainkit.plan.sweep import short_keys, shown_value

    if as_json:
        click.echo(json.dumps(planned.to_dict(), ensure_ascii=False))
        return EXIT_OK
    keys = list(planned.points[0].of.values)
    rows = [[*(key.upper() for key in short_keys(keys)), "BATCH", "MICROBATCHES", "ACCUMULATION"]]
    for point in planned.points:
        batch = point.plan.batch
        microbatches = "-" if batch.pp_microbatches is None else str(batch.pp_microbatches)
        values = [shown_value(value) for value in point.of.values.values()]
        rows.append([*values, str(batch.device_batch_size), microbatches, str(batch.accumulation_steps)])
    click.echo(table(rows))
    return EXIT_OK


def _run_here(planned: PlannedBench, typed: BenchOptions) -> int:
    """Run the points one after another on this machine, and write the summary."""
    from trainkit.bench.run_bench import run_here
    from trainkit.bench.summary import end_line
    from trainkit.cli.following import print_copied
    from trainkit.run.registry import isolated_state
    from trainkit.submit.create import create_run
    from trainkit.submit.start import start_run

    bench = planned.create_local(typed.folder)
    runs = planned.runs

    def start(index: int, item: BenchRun) -> RunDir:
        point = runs[index]
        created = create_run(point.config, point.plan, ["trainkit", *sys.argv[1:]], bench.folder / item.run)
        if index == 0:
            print_copied(created.code)
        start_run(created.run, point.config, point.plan, "run")
        return created.run

    shown = quote(str(bench.folder))
    first = quote(str(bench.folder / bench.runs[0].run))
    click.echo(f"the runs are in {shown}; `trainkit logs {first} -f` follows the first", err=True)
    try:
        with isolated_state(bench.folder):
            run_here(bench, start, lambda item: click.echo(end_line(bench, item), err=True))
    except KeyboardInterrupt:
        click.echo(f"\n`{bench.command} --collect {shown}` writes the summary so far", err=True)
        return EXIT_INTERRUPTED
    return summarize(bench, typed.as_json)


def _submit(planned: PlannedBench, typed: BenchOptions) -> int:
    """Submit the points, as one array or several; with --follow, wait and write the summary."""
    from trainkit.bench.run_bench import wait_for_runs

    bench = _create_arrays(planned, typed)
    groups = bench.groups
    _start_arrays(bench.folder, groups)
    shown = quote(str(bench.folder))
    if not typed.follow:
        if typed.as_json:
            click.echo(json.dumps(_submitted(bench, groups)))
        else:
            click.echo("\n".join([str(bench.folder), *(str(group.job_id) for group in groups)]))
        click.echo(
            f"`trainkit status {shown}` shows the runs; "
            f"`{bench.command} --collect {shown}` writes the summary",
            err=True,
        )
        return EXIT_OK
    jobs = ", ".join(str(group.job_id) for group in groups)
    click.echo(f"{bench.folder}: job{'s' if len(groups) > 1 else ''} {jobs}", err=True)
    try:
        wait_for_runs(bench, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached; the runs continue: `{bench.command} --collect {shown}` writes the summary, "
            f"`trainkit cancel {shown}` ends them",
            err=True,
        )
        return EXIT_INTERRUPTED
    return summarize(bench, typed.as_json)


def _submitted(bench: Bench, groups: Sequence[RunGroup]) -> dict[str, Any]:
    arrays = [
        {"folder": str(group.path), "job_id": group.job_id, "array": group.record["array"]}
        for group in groups
    ]
    return {**(arrays[0] if len(arrays) == 1 else {}), "folder": str(bench.folder), "arrays": arrays}


def _create_arrays(planned: PlannedBench, typed: BenchOptions) -> Bench:
    """Create the folder of a bench: a group of runs, or a folder of groups if there are several arrays."""
    from trainkit.bench.plan_bench import OPTION
    from trainkit.cli.following import print_copied
    from trainkit.run.group import RunGroup
    from trainkit.submit.create import new_folder
    from trainkit.submit.submission import ArraySpec, Submission, refuse_too_large

    argv, arrays = ["trainkit", *sys.argv[1:]], planned.arrays
    specs = [ArraySpec(tuple(range(len(runs))), typed.at_once) for runs in arrays]
    refuse_too_large(max(specs, key=lambda spec: len(spec.indices)))
    if len(arrays) == 1:
        created = Submission(planned.runs, specs[0]).create(argv, typed.folder, OPTION)
        print_copied(created.code)
        return planned.create(created.run.path, [str(index) for index in specs[0].indices])
    places: dict[int, str] = {}
    first = None
    with new_folder(planned.name, typed.folder, OPTION) as (folder, _):
        for number, (runs, spec) in enumerate(zip(arrays, specs, strict=True), 1):
            points = [replace(run, index=index) for index, run in enumerate(runs)]
            place = folder / f"array-{number}"
            created = Submission(points, spec).create(argv, place, OPTION, code_from=first)
            first = first or RunGroup(created.run.path)
            places |= {run.index: f"{place.name}/{index}" for index, run in enumerate(runs)}
        print_copied(created.code)
        return planned.create(folder, [places[index] for index in sorted(places)])


def _start_arrays(folder: Path, groups: Sequence[RunGroup]) -> None:
    """Submit arrays that run one after another: all of them, or none."""
    from trainkit.submit.submission import start_group

    num_started = 0
    try:
        for group in groups:
            after = groups[num_started - 1].job_id if num_started else None
            start_group(group, after)
            num_started += 1
    except BaseException:
        _undo(folder, groups, num_started)
        raise


def _undo(folder: Path, groups: Sequence[RunGroup], num_started: int) -> None:
    """Cancel the arrays of a bench of which the next one could not be submitted."""
    from trainkit.control.cancel import cancel_group
    from trainkit.errors import TrainkitError

    if len(groups) == 1:
        return  # its folder is that of the bench, which `start_group` removes
    for group in groups[num_started + 1 :]:
        shutil.rmtree(group.path, ignore_errors=True)
    has_run = False
    # The one that failed still has its folder if its job may exist.
    for group in reversed([group for group in groups[: num_started + 1] if group.path.exists()]):
        try:
            has_run |= cancel_group(group, now=True, wait=False).facts["num_running"] > 0
        except TrainkitError as error:
            has_run = True
            click.echo(f"warning: {group.path} may still run: {error.message}", err=True)
        else:
            click.echo(f"cancelled {group.job_id}: not all arrays of the bench were submitted", err=True)
    if has_run:
        click.echo(f"{folder} is kept: some of its runs may have started", err=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def summarize_folder(folder: str, as_json: bool) -> int:
    """Write the summary of the bench in a folder."""
    from trainkit.bench.run_bench import read_bench

    if not folder.strip():
        raise UsageError("--collect is empty", hint="name the folder of a bench")
    return summarize(read_bench(Path(folder)), as_json)


def summarize(bench: Bench, as_json: bool) -> int:
    """Write and print the summary of what has been measured so far; 1 when nothing has."""
    from trainkit.bench.summary import summary_table, write_summary

    summary = write_summary(bench, lambda text: click.echo(f"warning: {text}", err=True))
    plots = _plot(bench, summary.rows)
    if as_json:
        value = {
            "folder": str(bench.folder),
            "summary": str(bench.summary_file),
            "plots": plots,
            "rows": summary.rows,
            "fastest": None if summary.fastest is None else asdict(summary.fastest),
        }
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(summary_table(bench.keys, summary.rows))
    if summary.fastest is not None:
        click.echo(f"fastest: {summary.fastest}", err=True)
    if summary.num_not_started:
        text = f"{summary.num_not_started} of {len(bench.runs)} runs were not started"
        click.echo(f"warning: {text}", err=True)
    if summary.num_open:
        text = f"{summary.num_open} of {len(bench.runs)} runs have not ended: collect again later"
        click.echo(f"warning: {text}", err=True)
    click.echo(f"summary: {bench.summary_file}", err=True)
    return EXIT_OK if summary.has_measurements else EXIT_FAILED


def _plot(bench: Bench, rows: list[Row]) -> list[str]:
    """Draw the plots, and print where they are or why there are none."""
    from trainkit.bench.summary import INSTALL_HINT, can_plot, write_plots

    if not can_plot():
        click.echo(f"no plots: matplotlib is not installed ({INSTALL_HINT})", err=True)
        return []
    written, empty = write_plots(bench.keys, rows, bench.plots_dir)
    click.echo(f"plots: {len(written)} in {bench.plots_dir}", err=True)
    if empty:
        click.echo(f"no plots of {', '.join(empty)}: no values", err=True)
    return [str(file) for file in written]
