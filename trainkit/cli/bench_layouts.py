"""``trainkit bench layouts``: runs the layouts here or on Slurm, or lists them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

import click

from trainkit.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.bench.layouts import BenchLayout, Selection, Site
    from trainkit.bench.measure import Row
    from trainkit.bench.record import Bench, BenchRun, Length
    from trainkit.cli.options import ConfigRequest
    from trainkit.cluster.model import Target
    from trainkit.config import LoadedConfig
    from trainkit.config.changes import Change
    from trainkit.plan.launch import LaunchPlan
    from trainkit.plan.make_plan import DataFacts
    from trainkit.submit.sweep import PlannedPoint


SHOWN_NAMES = 8
OPTION = "--out"


def bench_layouts(request: ConfigRequest, typed: LayoutsRequest) -> int:
    """Run the layouts, submit them, or only list them."""
    from trainkit.plan.launch import describe_plan

    planned = plan_bench(request, typed)
    if not typed.dry_run:
        click.echo(describe_plan(planned.plan, planned.points[0].config.name).splitlines()[0], err=True)
    _tell(planned)
    if typed.dry_run:
        return _show(planned, typed.as_json)
    return _run_here(planned, typed) if planned.plan.backend == "local" else _submit(planned, typed)


def _tell(planned: PlannedBench) -> None:
    """Say what is changed, what is run, and what is not."""
    for change in planned.changes:
        _say("bench", change.sentence)
    selection = planned.selection
    count = len(selection.layouts)
    _say("layouts", f"{count} layout{'s' if count > 1 else ''} of {planned.plan.world_size} processes")
    _say("steps", planned.length.words)
    for item in selection.layouts:
        for note in item.notes:
            _say("adapted", f"{item.name}: {note}")
    for name, why in selection.impossible.items():
        _say("not possible", f"{name}: {why}")
    if selection.left_out:
        _say("left out", _left_out(selection.left_out))


def _left_out(names: Sequence[str]) -> str:
    """The layouts that are possible and are not run."""
    rest = len(names) - SHOWN_NAMES
    shown = ", ".join(names[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
    return f"{len(names)} that are possible too, for a bench to end soon: {shown}; --layout runs them"


def _say(what: str, text: str) -> None:
    click.echo(f"  {what:<12}  {text}", err=True)


def _show(planned: PlannedBench, as_json: bool) -> int:
    """Print the layouts that would be run."""
    from trainkit.tables import table

    selection = planned.selection
    if as_json:
        value = {
            "layouts": [
                {"layout": item.name, "values": dict(item.values), "notes": list(item.notes)}
                for item in selection.layouts
            ],
            "impossible": dict(selection.impossible),
            "left_out": list(selection.left_out),
        }
        click.echo(json.dumps(value, ensure_ascii=False))
        return EXIT_OK
    rows = [["LAYOUT", "BATCH", "MICROBATCHES", "ACCUMULATION"]]
    for item, point in zip(selection.layouts, planned.points, strict=True):
        batch, parallel = point.plan.batch, point.config.parallel
        cuts = str(parallel.pp_microbatches) if item.layout.pp > 1 else "-"
        rows.append([item.name, str(batch.device_batch_size), cuts, str(batch.accumulation_steps)])
    click.echo(table(rows))
    return EXIT_OK


def _run_here(planned: PlannedBench, typed: LayoutsRequest) -> int:
    """Run the layouts one after another on this machine, and make the summary."""
    from trainkit.bench.campaign import run_here
    from trainkit.bench.record import write_bench
    from trainkit.cli.start_output import print_copied
    from trainkit.control.run_registry import isolated_state
    from trainkit.rundir import RunDir
    from trainkit.submit.create import create_run, new_folder
    from trainkit.submit.start import start_run

    with new_folder(planned.points[0].config.name, _folder(typed.out), OPTION) as (folder, _):
        bench = _bench(planned, folder.absolute(), [item.name for item in planned.selection.layouts])
        write_bench(bench, planned.config, planned.selection, planned.changes)

    def start(index: int, item: BenchRun) -> RunDir:
        point = planned.points[index]
        created = create_run(point.config, point.plan, ["trainkit", *sys.argv[1:]], bench.folder / item.run)
        if index == 0:
            print_copied(created.code)
        start_run(created.run, point.config, point.plan, "run")
        return created.run

    shown = quote(str(bench.folder))
    click.echo(f"the runs lie in {shown}; `trainkit logs {shown}/LAYOUT -f` shows one", err=True)
    try:
        with isolated_state(bench.folder):
            run_here(bench, start, lambda item: click.echo(end_line(bench, item), err=True))
    except KeyboardInterrupt:
        click.echo(f"\n`trainkit bench layouts --collect {shown}` makes the summary so far", err=True)
        return EXIT_INTERRUPTED
    return summarize(bench, typed.as_json)


def _submit(planned: PlannedBench, typed: LayoutsRequest) -> int:
    """Submit the layouts as one array, and make the summary if it is waited for."""
    from trainkit.bench.campaign import wait_for_group
    from trainkit.bench.record import write_bench
    from trainkit.cli.start_output import print_copied
    from trainkit.submit.array_spec import ArraySpec, refuse_too_large
    from trainkit.submit.sweep import create_group, start_group

    spec = ArraySpec(tuple(range(len(planned.points))), typed.at_once)
    refuse_too_large(spec)
    argv = ["trainkit", *sys.argv[1:]]
    group, code = create_group(planned.points, spec.directive, argv, _folder(typed.out), OPTION)
    print_copied(code)
    bench = _bench(planned, group.path, [str(index) for index in spec.indices])
    write_bench(bench, planned.config, planned.selection, planned.changes)
    job_id = start_group(group)
    shown = quote(str(group.path))
    if not typed.follow:
        value = {"folder": str(group.path), "job_id": job_id, "array": spec.directive}
        click.echo(json.dumps(value) if typed.as_json else f"{group.path}\n{job_id}")
        click.echo(
            f"`trainkit status {shown}` shows the runs, `trainkit bench layouts --collect {shown}` makes the "
            "summary",
            err=True,
        )
        return EXIT_OK
    click.echo(f"{group.path}: job {job_id}", err=True)
    try:
        wait_for_group(group, lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        click.echo(
            f"\ndetached: the runs go on; `trainkit bench layouts --collect {shown}` makes the summary, "
            f"`trainkit cancel {shown}` ends them",
            err=True,
        )
        return EXIT_INTERRUPTED
    return summarize(bench, typed.as_json)


def _bench(planned: PlannedBench, folder: Path, names: Sequence[str]) -> Bench:
    from trainkit.bench.record import Bench, bench_runs

    runs = bench_runs(planned.selection.layouts, names)
    return Bench(folder, planned.plan.backend, planned.plan.device, planned.length, runs)


def _folder(text: str | None) -> Path | None:
    if text is not None and not text.strip():
        raise UsageError("--out is empty", hint="name a folder, or leave --out out for runs/NAME-layouts")
    return None if text is None else Path(text)


ORIGIN = "trainkit bench"
Planned = TypeVar("Planned")


@dataclass(frozen=True)
class LayoutsRequest:
    """What was typed besides the config."""

    layouts: tuple[str, ...]
    steps: int
    warmup: int
    out: str | None
    at_once: int
    follow: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True)
class PlannedBench:
    """Everything that is known before the first run."""

    config: str
    """The file that was asked for."""
    length: Length
    selection: Selection
    points: list[PlannedPoint]
    changes: list[Change]

    @property
    def plan(self) -> LaunchPlan:
        """That of the first layout."""
        return self.points[0].plan


def plan_bench(request: ConfigRequest, typed: LayoutsRequest) -> PlannedBench:
    """Choose the layouts and plan the run of each.

    Raises ConfigError and UsageError with what is wrong.
    """
    from trainkit.bench.record import Length, changes
    from trainkit.cluster.target import make_target
    from trainkit.config.changes import with_values
    from trainkit.plan.make_plan import inspect_data
    from trainkit.submit.plan_run import plan_run
    from trainkit.submit.sweep import PlannedPoint

    length = Length(typed.steps, typed.warmup)
    loaded = request.load()
    target, data = make_target(loaded), inspect_data(loaded.config.data)
    if target.backend == "submitit":
        raise UsageError("trainkit does not submit arrays through submitit", hint="add --backend sbatch")
    site = _find_site(loaded, target, data)
    changed = changes(loaded.config, length, site.world_size, keeps_name="name" in request.flags)
    short = with_values(loaded, {change.key: change.value for change in changed}, ORIGIN)

    def plan(layout: BenchLayout) -> tuple[BenchLayout, LoadedConfig, LaunchPlan]:
        config = with_values(short, layout.values, f"layout {layout.name}")
        return layout, config, plan_run(config, target=target, data=data)

    selection, plans = _select(short, site, typed.layouts, plan)
    points = [
        PlannedPoint(index, {"layout": layout.name}, config.config, made)
        for index, (layout, config, made) in enumerate(plans)
    ]
    return PlannedBench(request.path, length, selection, points, changed)


def _select(
    short: LoadedConfig, site: Site, typed: Sequence[str], plan: Callable[[BenchLayout], Planned]
) -> tuple[Selection, list[Planned]]:
    """The layouts that were typed, all of which must be possible, or all that are."""
    from trainkit.bench.layouts import (
        Selection,
        all_layouts,
        asked_layout,
        parse_layout,
        refuse_twice,
        select,
        with_all_degrees,
    )
    from trainkit.config.changes import with_values

    if not typed:
        return select(*all_layouts(short.config.parallel, site), plan)
    asked = []
    for text in typed:
        values = {f"parallel.{key}": value for key, value in with_all_degrees(parse_layout(text)).items()}
        parallel = with_values(short, values, f"--layout {text}").config.parallel
        asked.append(asked_layout(text, parallel, site))
    refuse_twice(asked)
    return Selection(tuple(asked), {}, ()), [plan(item) for item in asked]


def _find_site(loaded: LoadedConfig, target: Target, data: DataFacts) -> Site:
    """How many processes there are, found by planning them without regard to the model and its batch."""
    from trainkit.bench.layouts import Site
    from trainkit.cluster.machine import detect_machine
    from trainkit.config.changes import with_values
    from trainkit.plan.make_plan import make_plan
    from trainkit.plan.model_shape import resolve_model_shape

    degrees = {"dp_replicate": 1, "dp_shard": -1, "tp": 1, "pp": 1, "cp": 1}
    values = {f"parallel.{key}": value for key, value in degrees.items()}
    neutral = with_values(
        loaded, {**values, "train.device_batch_size": 1, "train.global_batch_size": None}, ORIGIN
    )
    plan = make_plan(neutral, detect_machine(), target)
    config, train = loaded.config, loaded.config.train
    return Site(
        world_size=plan.world_size,
        node_size=plan.workers_per_node,
        shape=resolve_model_shape(config.model, data.vocab_size),
        seq_len=config.data.seq_len,
        device_batch_size=train.device_batch_size,
        global_batch_size=train.global_batch_size or train.device_batch_size * plan.world_size,
    )


def summarize_folder(folder: str, as_json: bool) -> int:
    """The summary of the bench in a folder."""
    from trainkit.bench.record import read_bench

    if not folder.strip():
        raise UsageError("--collect is empty", hint="name the folder of a bench")
    return summarize(read_bench(Path(folder)), as_json)


def summarize(bench: Bench, as_json: bool) -> int:
    """Write the summary of what has been measured so far, and print it; 1 when nothing has."""
    from trainkit.bench.campaign import is_all_over, states
    from trainkit.bench.measure import by_speed, row_of
    from trainkit.bench.summary import csv_text, summary_table
    from trainkit.manifest import remove_all
    from trainkit.rundir import write_atomic

    rows: list[Row] = []
    found = states(bench, lambda text: click.echo(f"warning: {text}", err=True))
    for item, (status, verdict) in zip(bench.runs, found, strict=True):
        row, why = row_of(bench, item, status, verdict)
        rows.append(row)
        if why and status == "finished":
            click.echo(f"warning: {item.layout}: exposed_comm_s is not known: {why}", err=True)
        if is_all_over([status]):
            remove_all(bench.run_dir(item).checkpoints_dir)  # nobody goes on from a bench
    rows = by_speed(rows)
    write_atomic(bench.summary_file, csv_text(rows))
    plots = _plot(bench, rows)
    if as_json:
        value = {
            "folder": str(bench.folder),
            "summary": str(bench.summary_file),
            "plots": plots,
            "rows": rows,
        }
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(summary_table(rows))
    open_runs = [status for status, _ in found if not is_all_over([status])]
    if open_runs:
        click.echo(f"warning: {len(open_runs)} of {len(rows)} have not ended: collect it again", err=True)
    click.echo(f"summary: {bench.summary_file}", err=True)
    return EXIT_OK if any(row["steps"] for row in rows) else EXIT_FAILED


def _plot(bench: Bench, rows: list[Row]) -> list[str]:
    """Draw the plots; says where they are, or why there are none."""
    from trainkit.bench.summary import HOW_TO_GET, can_plot, write_plots

    if not can_plot():
        click.echo(f"no plots: matplotlib is not installed ({HOW_TO_GET})", err=True)
        return []
    written, empty = write_plots(rows, bench.plots_dir)
    click.echo(f"plots: {len(written)} in {bench.plots_dir}", err=True)
    if empty:
        click.echo(f"no plot of {', '.join(empty)}: there is no value", err=True)
    return [str(file) for file in written]


def end_line(bench: Bench, item: BenchRun) -> str:
    """What has become of a run that has just ended, in one line."""
    from trainkit.bench.campaign import state_of
    from trainkit.bench.measure import measured
    from trainkit.rundir import read_metrics

    status, verdict = state_of(bench, item)
    row = measured(read_metrics(bench.run_dir(item)), bench.length.measured)
    number = f"{bench.runs.index(item) + 1}/{len(bench.runs)}"
    if status != "finished" or row["tokens_per_s"] is None:
        return f"{number}  {item.layout}: {status}{f': {verdict}' if verdict else ''}"
    return f"{number}  {item.layout}: {row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.4f} s a step"
