"""The supervisor of a Slurm job, which runs in its batch shell: starts the step, judges its end.

``python -m trainkit.job.batch RUN_DIR --step srun … python -m trainkit.job.agent RUN_DIR``

One start of the job is one attempt: the first was opened when the job was submitted, each requeue opens the
next. Whatever happens, the exit code says so: 0 finished, 75 saved and could go on, anything else failed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED, TrainkitError
from trainkit.job import children
from trainkit.job.agent import write_to
from trainkit.job.decision import Decision
from trainkit.job.ending import judge, write_end
from trainkit.job.outcome import Outcome
from trainkit.job.record import (
    COMEBACK,
    add_slurm_entry,
    become_sole_supervisor,
    claim_entry,
    is_cancelled,
    open_attempt,
    read_job,
    run_lock,
)
from trainkit.job.slurm_place import slurm_job_id
from trainkit.job.step_watch import StepWatch
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, log_event, read_json
from trainkit.slurm.control import requeue

ENTRY_TIMEOUT_S = 20.0
"""How long the command that submitted us may take to write our job id down."""
POLL_S = 0.05
CANCELLED = "cancelled before the ranks were started"
LOCK_TIMEOUT_S = 120.0
"""A node that died holds its locks on a network filesystem for about 90 s more."""


def supervise(run: RunDir, step: Sequence[str]) -> int:
    """Carry this start of the job from its attempt to its end; the exit code of the job."""
    children.block_signals()
    children.adopt_orphans()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    job_id = slurm_job_id()
    if job_id is None:
        print("error: this is no Slurm job\n\nhint: `trainkit submit` makes one", flush=True)
        return EXIT_FAILED
    try:
        if not run.exists():
            # Only a point of a group can be missing; who makes it needs the config, which takes time to load.
            from trainkit.job.points import open_point

            open_point(run, job_id)
    except TrainkitError as error:
        print(error.render(), flush=True)
        return error.exit_code
    attempt = take_attempt(run, job_id)
    if attempt is None:
        _say(f"{job_id} was cancelled before it started")
        with contextlib.suppress(OSError):
            newest = run.attempt(_entries_of(run, job_id)[-1]["attempt"])
            write_end(newest, Outcome(), Decision("stopped", CANCELLED, EXIT_STOPPED))
        return EXIT_OK
    write_to(attempt.supervisor_log)
    outcome = Outcome()
    try:
        if not become_sole_supervisor(run, LOCK_TIMEOUT_S):
            reason = "another supervisor carries this run, although job.json does not say so"
            decision = Decision("failed", reason, EXIT_FAILED)
        elif is_cancelled(attempt):
            decision = Decision("stopped", CANCELLED, EXIT_STOPPED)
        else:
            outcome = _run_step(attempt, step)
            decision = judge(attempt, outcome)
    except (OSError, ValueError, TrainkitError) as error:
        decision = Decision("failed", f"{type(error).__name__}: {error}", EXIT_FAILED)
    _say(f"attempt {attempt.number}: {decision.action}: {decision.reason}")
    try:
        write_end(attempt, outcome, decision)
    except OSError as error:
        _say(f"attempt {attempt.number}: its end could not be written ({error})")
    if decision.action == "requeue":
        return _come_back(attempt, outcome, decision, job_id)
    return decision.exit_code


def _say(text: str) -> None:
    """Print a line; a disk that is full must not change what the job ends with."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{text}\n".encode(errors="replace"))


def _come_back(attempt: AttemptDir, outcome: Outcome, decision: Decision, job_id: str) -> int:
    """Have Slurm start the job again; the exit code of this start."""
    try:
        requeue(job_id)
    except TrainkitError as error:
        # Forbidden by an administrator, or no controller for a minute: it has saved, and ends here.
        saved = decision.reason.partition(";")[0]
        ended = Decision("stopped", f"{saved}; not started again: {error.message}", decision.exit_code)
        _say(f"attempt {attempt.number}: {ended.action}: {ended.reason}")
        with contextlib.suppress(OSError):
            write_end(attempt, outcome, ended)
        return ended.exit_code
    _await_slurm()
    return decision.exit_code


def _await_slurm() -> None:
    """Return when Slurm ends this shell to put the job back into the queue.

    At once then: the next start of the job waits for the lock that this process holds.
    """
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while (left_s := give_up_s - time.monotonic()) > 0:
        if children.wait_for_signal(left_s) == signal.SIGTERM:
            return


def take_attempt(run: RunDir, job_id: str) -> AttemptDir | None:
    """The attempt that this start of the job is; None when it was cancelled while it waited."""
    deadline_s = time.monotonic() + ENTRY_TIMEOUT_S
    while True:
        mine = _entries_of(run, job_id)
        if mine or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    with run_lock(run):
        mine = _entries_of(run, job_id)
        if any("cancelled_at" in entry for entry in mine):
            return None
        if mine and "pid" not in mine[-1]:
            claim_entry(run, mine[-1]["attempt"], os.getpid())
            return run.attempt(mine[-1]["attempt"])
        newest = run.attempt(run.attempt_numbers()[-1])
        taken = {entry["attempt"] for entry in read_job(run)["attempts"]}
        if newest.number in taken:
            newest = open_attempt(
                run,
                newest.config_file.read_text(encoding="utf-8"),
                newest.plan_file.read_text(encoding="utf-8"),
            )
        # Not in job.json yet: the job came back, or the command that submitted it never learned its id.
        reason = COMEBACK if mine else "submit"
        add_slurm_entry(
            run, newest.number, job_id, reason, LaunchPlan.from_dict(read_json(newest.plan_file)).backend
        )
        claim_entry(run, newest.number, os.getpid())
    log_event(run, newest.number, "submitted", job_id=job_id, reason=reason)
    return newest


def _entries_of(run: RunDir, job_id: str) -> list[dict[str, Any]]:
    """The attempts in job.json that a job carries, oldest first."""
    return [entry for entry in read_job(run)["attempts"] if entry["job_id"] == job_id]


def _run_step(attempt: AttemptDir, step: Sequence[str]) -> Outcome:
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    log_event(attempt.run, attempt.number, "started", world_size=plan.world_size, nodes=plan.num_nodes)
    watch = StepWatch(attempt, plan, step)
    watch.work()
    return watch.outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and supervise this start of the job; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) < 3 or arguments[1] != "--step":
        print("usage: python -m trainkit.job.batch RUN_DIR --step ARGV…", file=sys.stderr)
        return 2
    # What follows --step is the step's own business, options and all.
    return supervise(RunDir(arguments[0]), arguments[2:])


if __name__ == "__main__":
    sys.exit(main())
