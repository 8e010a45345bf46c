"""``trainkit status``: the state of runs."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainkit.cli.help import Command, complete_run, examples, warn
from trainkit.cli.options import json_option
from trainkit.errors import EXIT_OK, UsageError

if TYPE_CHECKING:
    from trainkit.backends.jobs import JobQuery
    from trainkit.bench.run_bench import Bench
    from trainkit.observe.group import GroupStatus
    from trainkit.observe.status import RunStatus
    from trainkit.run.group import RunGroup
    from trainkit.run.history import RunHistory
    from trainkit.run.record import JobRecord
    from trainkit.run.rundir import RunDir
    from trainkit.slurm.jobs import JobInfo


@click.command(
    cls=Command, epilog=examples("trainkit status", "trainkit status --all", "trainkit status last --json")
)
@click.argument("run_name", metavar="[RUN]", required=False, shell_complete=complete_run)
@click.option("--all", "show_all", is_flag=True, help="Show every run instead of the newest ones.")
@json_option
def command(run_name: str | None, show_all: bool, as_json: bool) -> int:
    """Show active runs and the 15 newest other runs, or RUN in detail.

    RUN is a job id, a run name, a run folder or `last`. The list shows a group of runs as one line; given as
    RUN, its runs are counted and listed, failures first. RUN can also be a bench, whose runs are listed.
    --json always prints all runs, newest first.
    """
    from trainkit.run.rundir import RunDir

    found = None if run_name is None else find_any(run_name)
    if isinstance(found, RunDir):
        return _show_run(found, as_json)
    return show_runs(found, show_all, as_json)


def find_any(text: str, *, groups_of_bench: bool = False) -> RunDir | RunGroup | Bench:
    """The bench in the folder of this name or path, else the run or group that RUN refers to.

    A bench that is a single group is that group, unless `groups_of_bench`.
    """
    from trainkit.run.registry import find_bench_folder, find_run_or_group

    folder = find_bench_folder(text, with_groups=groups_of_bench)
    if folder is None:
        return find_run_or_group(text)
    from trainkit.bench.run_bench import read_bench

    return read_bench(folder)


def look_at(run: RunDir) -> tuple[RunHistory, RunStatus, JobInfo | None]:
    """The history of a run, its status, and its job in Slurm; warns when Slurm does not answer."""
    from trainkit.backends.jobs import query_job_status
    from trainkit.observe.status import read_status
    from trainkit.run.history import RunHistory
    from trainkit.run.record import read_job

    record, history = read_job(run), RunHistory(run)
    job = query_job_status(run, record, warn)
    return history, read_status(history, record, job.alive, datetime.now(timezone.utc), job.job), job.job


def show_runs(found: RunGroup | Bench | None, show_all: bool, as_json: bool) -> int:
    """Print the runs of a group or bench; for None all runs, or active ones and the newest others."""
    from trainkit.run.group import RunGroup

    if found is None:
        return _show_all_runs(show_all, as_json)
    if isinstance(found, RunGroup):
        return _show_group(found, show_all, as_json)
    return _show_bench(found, show_all, as_json)


def _show_run(run: RunDir, as_json: bool) -> int:
    from trainkit.observe.status_text import run_details

    _, status, _ = look_at(run)
    click.echo(json.dumps(status.to_dict(), ensure_ascii=False) if as_json else run_details(status))
    return EXIT_OK


def _show_group(group: RunGroup, show_all: bool, as_json: bool) -> int:
    from trainkit.backends.jobs import query_known_jobs, recover_group_job_id
    from trainkit.observe.status_text import group_details

    recover_group_job_id(group)
    status = read_group(group, lambda ids: query_known_jobs(ids, warn))
    if as_json:
        click.echo(json.dumps(status.to_dict(), ensure_ascii=False))
    else:
        click.echo(group_details(status, show_all))
    return EXIT_OK


def read_group(group: RunGroup, query: JobQuery) -> GroupStatus:
    """The status of a group, with one `query` of Slurm for its jobs."""
    from trainkit.observe.group import GroupFiles

    files = GroupFiles(group)
    return files.status(query(files.open_ids), datetime.now(timezone.utc))


def _show_bench(bench: Bench, show_all: bool, as_json: bool) -> int:
    from trainkit.bench.run_bench import query_bench_status
    from trainkit.observe.status_text import details, points_table, state_counts

    status = query_bench_status(bench, warn)
    if as_json:
        value, keys = status.to_dict(), ("run_dir", "name", "keys", "num_points", "states", "points")
        click.echo(json.dumps({key: value[key] for key in keys}, ensure_ascii=False))
        return EXIT_OK
    lines = {
        "bench": status.name,
        "folder": status.run_dir,
        "jobs": ", ".join(str(group.job_id) for group in bench.groups) or "on this machine",
        "runs": f"{len(status.points):,}: {state_counts(status.states)}",
    }
    click.echo(f"{details(lines)}\n\n{points_table(status, show_all)}")
    return EXIT_OK


def _show_all_runs(show_all: bool, as_json: bool) -> int:
    from trainkit.backends.jobs import query_known_jobs
    from trainkit.formats import table
    from trainkit.observe.status_text import MAX_ENDED_RUNS, not_shown, runs_rows

    max_ended = None if show_all or as_json else MAX_ENDED_RUNS
    statuses, num_hidden = read_all(max_ended, lambda ids: query_known_jobs(ids, warn), {})
    if as_json:
        values = [status.to_dict() for status in statuses]
        for value in values:
            value.pop("points", None)
        click.echo(json.dumps(values, ensure_ascii=False))
        return EXIT_OK
    if not statuses:
        click.echo("no runs yet: `trainkit submit` starts one", err=True)
        return EXIT_OK
    statuses.sort(key=lambda status: not status.is_active)
    num_shown = len(statuses)
    if not show_all:
        num_shown = min(num_shown, MAX_ENDED_RUNS + sum(status.is_active for status in statuses))
    click.echo(table(runs_rows(statuses[:num_shown], Path.cwd())))
    num_hidden += len(statuses) - num_shown
    if num_hidden:
        click.echo(not_shown(num_hidden))
    return EXIT_OK


def read_all(
    max_ended: int | None,
    query: JobQuery,
    histories: dict[Path, RunHistory],
) -> tuple[list[RunStatus | GroupStatus], int]:
    """The status of known runs and groups, newest first, with one `query` of Slurm for all of them.

    With `max_ended`, only that many of those that are over for certain; the second value counts the others.
    `histories` keeps what was read of each run for the next call.
    """
    from trainkit.backends.jobs import job_status, open_job_ids
    from trainkit.observe.group import GroupFiles, read_newest_end
    from trainkit.observe.status import read_status
    from trainkit.run.history import RunHistory
    from trainkit.run.record import read_job
    from trainkit.run.registry import record_over, starts

    known: list[tuple[RunDir, JobRecord] | GroupFiles] = []
    seen, newly_over, num_over, num_hidden = set(), [], 0, 0
    for start in starts():
        is_full = max_ended is not None and num_over >= max_ended
        if is_full and start.is_over:
            num_hidden += 1
            continue
        item, place = start.read(), start.folder.resolve()
        if item is None or place in seen:
            continue
        seen.add(place)
        group = None
        if item.is_group:
            try:
                group = GroupFiles(item.group)
            except UsageError as error:
                warn(error.message)
                continue
            over = group.is_over
        else:
            end = read_newest_end(item.run)
            over = end is not None and not end.resumes
        num_over += over
        if over and not start.is_over:
            newly_over.append(start)
        if is_full and over:
            num_hidden += 1
        else:
            known.append(group or (item.run, read_job(item.run)))
    record_over(newly_over)
    ids = [found.open_ids if isinstance(found, GroupFiles) else open_job_ids(*found) for found in known]
    jobs, now = query([job_id for own in ids for job_id in own]), datetime.now(timezone.utc)
    statuses: list[RunStatus | GroupStatus] = []
    for found in known:
        if isinstance(found, GroupFiles):
            statuses.append(found.status(jobs, now))
        else:
            run, record = found
            job, history = job_status(run, record, jobs), histories.setdefault(run.path, RunHistory(run))
            statuses.append(read_status(history, record, job.alive, now, job.job))
    return statuses, num_hidden
