"""Runs a bench: its runs one after another on this machine, or waiting for those of a Slurm array."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from trainkit.backends import SUPERVISOR_EXIT_S, backend_of
from trainkit.backends.jobs import (
    JobQuery,
    live_entry,
    liveness_probe,
    query_job_status,
    query_known_jobs,
    recover_group_job_id,
)
from trainkit.bench.bench_file import Bench, BenchRun
from trainkit.bench.measure import measured
from trainkit.observe.follow import run_is_over
from trainkit.observe.group import NOT_STARTED, ORDER, GroupFiles, GroupStatus, PointStatus
from trainkit.observe.status import read_status
from trainkit.observe.status_text import state_counts
from trainkit.observe.sweep_report import REPEAT
from trainkit.observe.text import failure_line
from trainkit.run.end import read_end
from trainkit.run.events import read_metrics
from trainkit.run.group import RunGroup
from trainkit.run.lock import run_lock
from trainkit.run.manifest import remove_all
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.submit.start import defer_sigint

POLL_S = 0.1
ASK_EVERY_S = 10.0
"""Seconds between queries: Slurm's controller serves the whole cluster."""
ENDED = ("finished", "failed", "stopped", "cancelled", "died")
"""Final states: a run of a bench is not restarted."""


def run_here(
    bench: Bench, start: Callable[[int, BenchRun], RunDir], on_end: Callable[[BenchRun], None]
) -> None:
    """Start the runs of a bench one after another; `on_end` is called with each run that has ended.

    On an error or Ctrl-C the current run is killed.
    """
    for index, item in enumerate(bench.runs):
        run: RunDir | None = None
        try:
            with defer_sigint():
                run = start(index, item)
            _wait(run)
        except BaseException:
            if run is not None:
                _kill(run)
            raise
        remove_all(run.checkpoints_dir)  # a bench is never resumed
        on_end(item)


def _wait(run: RunDir) -> None:
    is_alive = liveness_probe(run)
    while not run_is_over(run, is_alive()):
        time.sleep(POLL_S)
    entry = read_job(run).newest
    if entry is not None:
        backend_of(entry).wait_until_gone(run, entry, SUPERVISOR_EXIT_S)  # or it would disturb the next run


def _kill(run: RunDir) -> None:
    with run_lock(run):
        entry = live_entry(run, "cancel")
        if entry is not None:
            backend_of(entry).kill(run, entry)


def run_states(bench: Bench, warn: Callable[[str], None]) -> list[tuple[str, str]]:
    """The state of each run and, unless it finished, the reason."""
    return [(point.state, point.reason or "") for point in query_bench_status(bench, warn).points]


def query_bench_status(bench: Bench, warn: Callable[[str], None]) -> GroupStatus:
    """The status of a bench; looks up its arrays that Slurm has not acknowledged."""
    for group in bench.groups:
        recover_group_job_id(group)
    return bench_status(bench, lambda ids: query_known_jobs(ids, warn))


def bench_status(bench: Bench, query: JobQuery) -> GroupStatus:
    """The status of the runs of a bench, as if they were one group.

    With several repeats their number is one of the values of a run.
    """
    known = {point.run_dir: point for status in _statuses(bench.groups, query) for point in status.points}
    points = []
    for index, item in enumerate(bench.runs):
        run = bench.run_dir(item)
        values = {**item.values, REPEAT: item.repeat} if bench.repeats > 1 else item.values
        point = known.get(str(run.path))
        if point is not None:
            state, reason = _with_failure(run, point.state, point.reason)
            points.append(replace(point, index=index, values=values, state=state, reason=reason or None))
            continue
        # On this machine, or in an array that was not submitted and has no folder.
        state, reason = run_state(bench, item)
        points.append(PointStatus(index, values, state, reason or None, None, None, str(run.path)))
    return GroupStatus(
        name=bench.folder.name,
        run_dir=str(bench.folder),
        job_id=None,
        array="",
        keys=list(points[0].values),
        num_nodes=None,
        workers_per_node=None,
        age_s=None,
        points=points,
    )


def run_state(bench: Bench, item: BenchRun) -> tuple[str, str]:
    """The state of a run on this machine and, unless it finished, the reason."""
    run = bench.run_dir(item)
    if not run.exists():
        return NOT_STARTED, ""
    status = read_status(run, query_job_status([run], lambda text: None)[0].alive, _now())
    return _with_failure(run, status.state, status.reason)


def _with_failure(run: RunDir, state: str, reason: str | None) -> tuple[str, str]:
    return state, "" if state == "finished" else _failure(run) or reason or ""


def _failure(run: RunDir) -> str:
    """The first failure of a run; empty if none is recorded."""
    numbers = run.attempt_numbers()
    end = read_end(run.attempt(numbers[-1])) if numbers else None
    return failure_line(end.verdict) if end is not None and end.verdict else ""


def end_line(bench: Bench, item: BenchRun) -> str:
    """One line about a run on this machine that has just ended."""
    state, failure = run_state(bench, item)
    row = measured(read_metrics(bench.run_dir(item)), bench.length.measured)
    which = f"{item.name} (repeat {item.repeat})" if bench.repeats > 1 else item.name
    start = f"{bench.runs.index(item) + 1}/{len(bench.runs)}  {which}:"
    if state != "finished" or row["step_s"] is None:
        return f"{start} {state}{f': {failure}' if failure else ''}"
    speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f} tokens/s, "
    return f"{start} {speed}{row['step_s']:.4f} s per step"


def wait_for_groups(groups: Sequence[RunGroup], log_line: Callable[[str], None]) -> None:
    """Wait until all runs of a bench on Slurm have ended, and log their states whenever they change."""
    logged = ""
    while True:
        counts: Counter[str] = Counter()
        for group in groups:
            recover_group_job_id(group)
        for status in _statuses(groups, lambda ids: query_known_jobs(ids, log_line)):
            counts.update(status.states)
        states = {state: counts[state] for state in ORDER if counts[state]}
        text = state_counts(states)
        if text != logged:
            log_line(text)
        # This host may see the end of a run shortly after Slurm has removed its job.
        is_sure = text == logged or "died" not in states
        logged = text
        if is_sure and have_ended(states):
            return
        time.sleep(ASK_EVERY_S)


def have_ended(states: Iterable[str]) -> bool:
    """Whether runs in these states have all ended."""
    return all(state in ENDED for state in states)


def _statuses(groups: Sequence[RunGroup], query: JobQuery) -> list[GroupStatus]:
    """The status of each array, from one query."""
    files = [GroupFiles(group) for group in groups]
    jobs = query([job_id for item in files for job_id in item.open_ids])
    return [item.status(jobs, _now()) for item in files]


def _now() -> datetime:
    return datetime.now(timezone.utc)
