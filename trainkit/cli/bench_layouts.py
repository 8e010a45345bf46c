"""``trainkit bench layouts``: runs the layouts here or on Slurm, or lists them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from trainkit.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.bench.record import Bench
    from trainkit.cli.bench_plan import LayoutsRequest, PlannedBench
    from trainkit.cli.options import ConfigRequest

SHOWN_NAMES = 8
OPTION = "--out"


def bench_layouts(request: ConfigRequest, typed: LayoutsRequest) -> int:
    """Run the layouts, submit them, or only list them."""
    from trainkit.cli.bench_plan import plan_bench
    from trainkit.submit.describe import describe_plan

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
    from trainkit.observe.words import table

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
    from trainkit.bench.record import BenchRun, write_bench
    from trainkit.cli.bench_summary import end_line, summarize
    from trainkit.cli.launch import start_new_run
    from trainkit.config import LoadedConfig
    from trainkit.rundir import RunDir
    from trainkit.submit.create import new_place
    from trainkit.submit.own_state import own_state

    with new_place(planned.points[0].config.name, _folder(typed.out), OPTION) as (folder, _):
        bench = _bench(planned, folder.absolute(), [item.name for item in planned.selection.layouts])
        write_bench(bench, planned.config, planned.selection, planned.changes)

    def start(index: int, item: BenchRun) -> RunDir:
        point = planned.points[index]
        loaded = LoadedConfig(point.config, {})
        return start_new_run(loaded, point.plan, str(bench.folder / item.run), "run", quiet=index > 0)[0]

    shown = quote(str(bench.folder))
    click.echo(f"the runs lie in {shown}; `trainkit logs {shown}/LAYOUT -f` shows one", err=True)
    try:
        with own_state(bench.folder):
            run_here(bench, start, lambda item: click.echo(end_line(bench, item), err=True))
    except KeyboardInterrupt:
        click.echo(f"\n`trainkit bench layouts --collect {shown}` makes the summary so far", err=True)
        return EXIT_INTERRUPTED
    return summarize(bench, typed.as_json)


def _submit(planned: PlannedBench, typed: LayoutsRequest) -> int:
    """Submit the layouts as one array, and make the summary if it is waited for."""
    from trainkit.bench.campaign import wait_for_group
    from trainkit.bench.record import write_bench
    from trainkit.cli.bench_summary import summarize
    from trainkit.cli.launch import code_copier
    from trainkit.submit.array_spec import ArraySpec, refuse_too_large
    from trainkit.submit.sweep import create_group, submit_group

    spec = ArraySpec(tuple(range(len(planned.points))), typed.at_once)
    refuse_too_large(spec)
    config = planned.points[0].config
    copier = code_copier(config, planned.plan)
    argv = ["trainkit", *sys.argv[1:]]
    group = create_group(planned.points, spec.directive, _folder(typed.out), argv, copier, OPTION)
    bench = _bench(planned, group.path, [str(index) for index in spec.indices])
    write_bench(bench, planned.config, planned.selection, planned.changes)
    job_id = submit_group(group)
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
