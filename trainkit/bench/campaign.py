"""Carries out a bench: its runs one after another on this machine, or waiting for those of a Slurm array."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone

from trainkit.bench.record import Bench, BenchRun
from trainkit.control.jobs import (
    SUPERVISOR_EXIT_S,
    kill,
    live_entry,
    liveness_probe,
    query_job_status,
    query_known_jobs,
    recover_group_job_id,
    wait_until_gone,
)
from trainkit.job.record import newest_entry, run_lock
from trainkit.manifest import remove_all
from trainkit.observe.follow import is_over
from trainkit.observe.group import GroupFiles, GroupStatus
from trainkit.observe.status import read_status
from trainkit.observe.text import failure_line
from trainkit.rundir import RunDir, read_end
from trainkit.rungroup import RunGroup
from trainkit.submit.start import defer_sigint

POLL_S = 0.1
ASK_EVERY_S = 10.0
"""Slurm's controller answers a whole cluster."""
OVER = ("finished", "failed", "stopped", "cancelled", "died")
"""States that nothing changes any more: a run of a bench is not started again."""


def run_here(
    bench: Bench, start: Callable[[int, BenchRun], RunDir], tell: Callable[[BenchRun], None]
) -> None:
    """Start the runs of a bench one after another; `tell` is called with each that has ended.

    However this ends, no run is left running.
    """
    for index, item in enumerate(bench.runs):
        run: RunDir | None = None
        try:
            with defer_sigint():
                run = start(index, item)
            _wait(run)
        except BaseException:
            if run is not None:
                _end(run)
            raise
        remove_all(run.checkpoints_dir)  # no bench run is resumed
        tell(item)


def _wait(run: RunDir) -> None:
    is_alive = liveness_probe(run)
    while not is_over(run, is_alive()):
        time.sleep(POLL_S)
    entry = newest_entry(run)
    if entry is not None:
        wait_until_gone(run, entry, SUPERVISOR_EXIT_S)  # the next one is measured alone


def _end(run: RunDir) -> None:
    with run_lock(run):
        entry = live_entry(run, "cancel")
        if entry is not None:
            kill(run, entry)


def states(bench: Bench, warn: Callable[[str], None]) -> list[tuple[str, str]]:
    """What became of each run and, of one that did not finish, why."""
    group = RunGroup(bench.folder)
    if not group.exists():
        return [state_of(bench, item) for item in bench.runs]
    points = _look(group, warn).points
    return [
        _with_verdict(bench.run_dir(item), point.state, point.reason)
        for item, point in zip(bench.runs, points, strict=True)
    ]


def state_of(bench: Bench, item: BenchRun) -> tuple[str, str]:
    """What became of a run on this machine and, if it did not finish, why."""
    run = bench.run_dir(item)
    if not run.exists():
        return "not started", ""
    status = read_status(run, query_job_status([run], lambda text: None)[0].alive, _now())
    return _with_verdict(run, status.state, status.reason)


def _with_verdict(run: RunDir, state: str, reason: str | None) -> tuple[str, str]:
    return state, "" if state == "finished" else _verdict(run) or reason or ""


def _verdict(run: RunDir) -> str:
    """What failed first; empty where nothing says so."""
    numbers = run.attempt_numbers()
    verdict = ((read_end(run.attempt(numbers[-1])) if numbers else None) or {}).get("verdict")
    return failure_line(verdict) if verdict else ""


def wait_for_group(group: RunGroup, say: Callable[[str], None]) -> None:
    """Wait until all runs of a bench on Slurm have ended; says what they are doing when that changes."""
    said = ""
    while True:
        status = _look(group, say)
        words = ", ".join(f"{count:,} {state}" for state, count in status.states.items())
        if words != said:
            say(words)
        # The end of a run can be seen on this host a moment after Slurm has told that its job is gone.
        is_sure = words == said or "died" not in status.states
        said = words
        if is_sure and is_all_over(status.states):
            return
        time.sleep(ASK_EVERY_S)


def is_all_over(found: Iterable[str]) -> bool:
    """Whether nothing more will come from runs in these states."""
    return all(state in OVER for state in found)


def _look(group: RunGroup, warn: Callable[[str], None]) -> GroupStatus:
    recover_group_job_id(group)
    look = GroupFiles(group)
    return look.status(query_known_jobs(look.open_ids, warn), _now())


def _now() -> datetime:
    return datetime.now(timezone.utc)
