"""The summary of a bench: summary.csv, its plots, and a table on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.bench.measure import Row
    from trainkit.bench.record import Bench, BenchRun


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
    from trainkit.bench.table import csv_text, summary_table
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
    from trainkit.bench.plots import HOW_TO_GET, can_plot, write_plots

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
