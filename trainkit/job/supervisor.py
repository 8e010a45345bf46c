"""The supervisor of a job: one agent a node, and what happens after they have ended.

``python -m trainkit.job.supervisor RUN_DIR --attempt N``

SIGTERM and SIGINT mean save and end, SIGUSR2 means save and come back as the next attempt. Whatever
happens to the run folder or the disk, the agents are ended and the exit code says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from trainkit.errors import EXIT_FAILED, TrainkitError
from trainkit.job import processes
from trainkit.job.decision import Decision, RestartOptions
from trainkit.job.ending import judge, write_end
from trainkit.job.node.rendezvous import choose_port
from trainkit.job.outcome import Outcome
from trainkit.job.record import (
    COMEBACK,
    add_entry,
    become_sole_supervisor,
    find_entry,
    newest_entry,
    open_attempt,
    run_lock,
)
from trainkit.job.watch.local_attempt import AttemptWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json

HERE = RestartOptions(restart=True)
"""Nodes that are this machine need not be asked for again."""


def supervise(run: RunDir, number: int) -> int:
    """Carry a run from one attempt to the next until it ends; its exit code."""
    processes.block_signals()
    processes.adopt_orphans()
    # The terminal that submitted the run may close; workers inherit this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if not _is_registered(run, number):
        print(
            f"attempt {number} is not in {run.job_file}: the command that started it was interrupted",
            flush=True,
        )
        return EXIT_FAILED
    if not become_sole_supervisor(run):
        reason = "another supervisor carries this run, although job.json does not say so"
        write_end(run.attempt(number), Outcome(), Decision("failed", reason, EXIT_FAILED))
        return EXIT_FAILED
    while True:
        attempt = run.attempt(number)
        try:
            outcome = _run_attempt(attempt)
            decision = judge(attempt, outcome, HERE)
        except (OSError, ValueError, TrainkitError) as error:
            # No folder, no disk, no port: nothing of the job is left running, and that much is said.
            outcome = Outcome()
            decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
        try:
            following = _conclude(attempt, outcome, decision)
        except OSError as error:
            # Nothing can be written: the exit code is all that is left to tell with.
            with contextlib.suppress(OSError):
                print(f"attempt {number}: its end could not be written ({error})", flush=True)
            return decision.exit_code or EXIT_FAILED
        if following is None:
            return decision.exit_code
        number = following


def _conclude(attempt: AttemptDir, outcome: Outcome, decision: Decision) -> int | None:
    """Write down how an attempt ended; the number of the next one when the job comes back."""
    print(f"attempt {attempt.number}: {decision.action}: {decision.reason}", flush=True)
    write_end(attempt, outcome, decision)
    if not decision.comes_back:
        return None
    following = _next_attempt(attempt) if processes.wait_unless_told(decision.delay_s) is None else None
    if following is None:
        cancelled = Decision("stopped", "cancelled before it came back", decision.exit_code)
        write_end(attempt, outcome, cancelled)
    return following


def _is_registered(run: RunDir, number: int) -> bool:
    """Whether job.json says that this process carries the attempt.

    Who started us holds the lock until that is written.
    """
    with run_lock(run):
        entry = find_entry(run, number)
    return entry is not None and entry["pid"] == os.getpid() and entry["host"] == os.uname().nodename


def _run_attempt(attempt: AttemptDir) -> Outcome:
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    entry = newest_entry(attempt.run)
    port = choose_port(str(entry and entry["job_id"]), attempt.number)
    log_event(attempt.run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes)
    watch = AttemptWatch(attempt, plan, port)
    watch.work()
    return watch.outcome


def _next_attempt(attempt: AttemptDir) -> int | None:
    """Make the attempt in which the job comes back, with the same config and plan; None when cancelled."""
    run = attempt.run
    with run_lock(run):
        entry = find_entry(run, attempt.number)
        if entry is not None and "cancelled_at" in entry:
            return None
        following = open_attempt(
            run,
            attempt.config_file.read_text(encoding="utf-8"),
            attempt.plan_file.read_text(encoding="utf-8"),
        )
        entry = add_entry(run, following.number, os.getpid(), COMEBACK)
    log_event(run, following.number, "submitted", job_id=entry["job_id"], reason=COMEBACK)
    log_event(run, following.number, "restart")
    with following.supervisor_log.open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    return following.number


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run a job's supervisor; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainkit.job.supervisor")
    parser.add_argument("run_dir")
    parser.add_argument("--attempt", type=int, required=True)
    args = parser.parse_args(argv)
    return supervise(RunDir(args.run_dir), args.attempt)


if __name__ == "__main__":
    sys.exit(main())
