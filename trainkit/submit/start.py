"""Starts the next attempt of a run with the backend that its plan names."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import Any

from trainkit.config import RunConfig, dump_effective, read_effective
from trainkit.errors import UsageError
from trainkit.job.record import newest_entry, next_attempt_number, read_job
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir, read_json
from trainkit.submit.create import plan_text
from trainkit.submit.secrets import refuse_leaks


def start_attempt(
    run: RunDir, config: RunConfig, plan: LaunchPlan, reason: str, foreground: bool = False
) -> dict[str, Any]:
    """Start a run's next attempt and give its job.json entry; call with the run's lock held.

    `reason` is one of ``submit run requeue resume``; `foreground` is for local runs only.
    """
    config_text = dump_effective(config)
    for text, where in ((config_text, run.config_file), (plan_text(plan), run.plan_file)):
        refuse_leaks(text, str(where), config.launch.secrets, os.environ)
    if plan.backend == "local":
        from trainkit.control import local

        return local.start_attempt(run, config_text, plan_text(plan), reason, foreground)
    # Only the side that starts it is loaded.
    from trainkit.submit.sbatch_backend import start_slurm_attempt
    from trainkit.submit.script import script_for

    job = read_job(run)
    if "cwd" not in job:
        raise UsageError(
            f"{run.job_file} cannot be read, so where the run was submitted and with which code is not known",
            hint=f"`trainkit resume {quote(str(run.path))} --as DIR` goes on in a new folder",
        )
    script = script_for(run, next_attempt_number(run), plan, config, Path(str(job["cwd"])), job.get("code"))
    refuse_leaks(script.text, str(run.script_file), config.launch.secrets, os.environ)
    return start_slurm_attempt(run, config_text, plan, script, reason, config.requeue.follow_ups)


def start_again(run: RunDir, reason: str) -> dict[str, Any]:
    """Start an ended run's next attempt with the bytes of its newest one; call with the run's lock held.

    Raises UsageError for a run that was never started.
    """
    newest = newest_entry(run)
    if newest is None:
        hint = f"`trainkit resume {quote(str(run.path))}` starts it"
        raise UsageError(f"{run.path} was never started", hint=hint)
    attempt = run.attempt(newest["attempt"])
    plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
    return start_attempt(run, read_effective(attempt.config_file), plan, reason)


@contextmanager
def defer_sigint() -> Iterator[None]:
    """Within, SIGINT waits for the end of the block and is raised there; a second one is raised at once.

    For the main thread; where SIGINT is ignored, it stays so. What is started within and belongs to the
    terminal hears of it by itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
