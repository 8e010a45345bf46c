"""Evaluates one checkpoint: verifies and exports it, runs the command, and records the metrics.

The command line is ``python -m trainkit.capabilities.evaluations.evaluator RUN_DIR STEP``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainkit.capabilities.evaluations.evaluations_plan import EvaluationsPlan
from trainkit.capabilities.evaluations.queue import keep_best, report
from trainkit.capabilities.evaluations.records import (
    BY,
    Evaluation,
    ResultError,
    append_metrics,
    folder_of,
    log_of,
    queue_lock,
    read_evaluation,
    read_evaluations,
    read_result,
    seal_of,
    step_lock,
    write_evaluation,
)
from trainkit.errors import EXIT_FAILED, EXIT_OK
from trainkit.job.processes import module_argv, start_child
from trainkit.job.signals import signal_exit_code
from trainkit.locks import LockBusy, acquire_lock
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import read_events
from trainkit.run.history import OwnedEvents
from trainkit.run.manifest import Checkpoint, find_damage
from trainkit.run.pins import unpin
from trainkit.run.process import ProcessId
from trainkit.run.record import read_job
from trainkit.run.rundir import RunDir
from trainkit.scheduler import OWN_PREFIX, RANK_VARIABLES
from trainkit.shipped import OVER

LOCK_S = 60.0
"""Seconds to wait for the process that has started this one to release the lock of the evaluation."""
TAIL_LINES = 10
TAIL_BYTES = 2**14
WARNINGS = ("evaluation_failed", "evaluation_not_submitted")
"""Events that are in effect until an evaluation succeeds."""
OUT_NAME, EXPORT_NAME = "out.json", "export"


class EvaluationFailed(Exception):
    """Raised if a checkpoint could not be evaluated; the message is the reason, as a phrase."""


def evaluate(run: RunDir, step: int) -> int:
    """Evaluate the checkpoint of a step, unless another process does or has done so; return the exit code.

    Raises OSError if the run folder cannot be read or written.
    """
    try:
        acquire_lock(step_lock(run, step), LOCK_S)  # This process holds the lock until it exits.
    except LockBusy as busy:
        print(f"another process evaluates step {step}: {busy}", flush=True)
        return EXIT_OK
    known = read_evaluation(run, step)
    if known is None or not known.is_open:
        print(f"step {step} needs no evaluation: {known and known.state}", flush=True)
        return EXIT_OK
    plan, checkpoint = plan_of(run), Checkpoint(run.checkpoint_dir(step), step)
    running = replace(known, state="running", process=ProcessId.of(os.getpid()), seal=seal_of(checkpoint))
    write_evaluation(run, running)
    ended = _evaluated(run, running, checkpoint, plan.env)
    with queue_lock(run):
        if ended.state == "done":
            append_metrics(run, step, ended.metrics)
        write_evaluation(run, ended)
        # The best checkpoint is pinned before this evaluation's own pin is removed.
        keep_best(run, plan, read_evaluations(run).values())
        unpin(run, step, BY)
    _report(run, ended)
    return EXIT_OK if ended.state == "done" else EXIT_FAILED


def _evaluated(
    run: RunDir, running: Evaluation, checkpoint: Checkpoint, env: Mapping[str, str]
) -> Evaluation:
    """Return the ended evaluation of a checkpoint."""
    if not checkpoint.path.is_dir():
        return replace(running, state="skipped", reason="the checkpoint was deleted before its evaluation")
    if damage := find_damage(checkpoint):
        return replace(running, state="damaged", reason=damage)
    folder = folder_of(run, running.step)
    (folder / OUT_NAME).unlink(missing_ok=True)
    try:
        with log_of(run, running.step).open("wb") as log:
            environ = environ_of(run, running, env, log.fileno())
            code = _run(["bash", "-c", running.command], environ, cwd_of(run), log.fileno())
        if code:
            raise EvaluationFailed(f"the command ended with exit code {code}")
        return replace(running, state="done", reason=None, metrics=read_result(folder / OUT_NAME))
    except (EvaluationFailed, ResultError) as error:
        return replace(
            running, state="failed", reason=str(error), log_tail=log_tail(log_of(run, running.step))
        )
    finally:
        shutil.rmtree(folder / EXPORT_NAME, ignore_errors=True)


def plan_of(run: RunDir) -> EvaluationsPlan:
    """Return how the checkpoints of a run are evaluated; an empty command if its config has none."""
    plan = LaunchPlan.read(run.plan_file, executes=False)
    return plan.part(EvaluationsPlan) or EvaluationsPlan(command="")


def environ_of(run: RunDir, running: Evaluation, env: Mapping[str, str], log: int) -> dict[str, str]:
    """Return the environment of the command; exports the checkpoint if the evaluation needs the export.

    `env` contains the values of `launch.env`. Raises EvaluationFailed if the checkpoint cannot be exported.
    """
    folder, step = folder_of(run, running.step), running.step
    # The process of the training may have set variables that describe a rank or the job of the training.
    others = {name for name in os.environ if name in RANK_VARIABLES or name.startswith(OWN_PREFIX)}
    environ = {name: value for name, value in os.environ.items() if name not in others} | {**env}
    environ |= {
        "TRAINKIT_CHECKPOINT": str(run.checkpoint_dir(step)),
        "TRAINKIT_STEP": str(step),
        "TRAINKIT_RUN_DIR": str(run.path),
        "TRAINKIT_EVAL_OUT": str(folder / OUT_NAME),
    }
    if running.export is None:
        return environ
    out = folder / EXPORT_NAME
    shutil.rmtree(out, ignore_errors=True)  # A killed evaluation may have left its export.
    words = ["ckpt", "export", str(run.path), "--step", str(step), "--format", running.export]
    if code := _run(module_argv("trainkit", *words, "--out", str(out)), environ, run.path, log):
        raise EvaluationFailed(f"`trainkit ckpt export` ended with exit code {code}")
    return {**environ, "TRAINKIT_EXPORT": str(out)}


def cwd_of(run: RunDir) -> Path:
    """Return the folder in which the command runs: the folder of the submission if it still exists."""
    cwd = Path(read_job(run).cwd or run.path)
    return cwd if cwd.is_dir() else run.path


def _run(argv: list[str] | tuple[str, ...], environ: Mapping[str, str], cwd: Path, log: int) -> int:
    """Run a program that the kernel kills when this process dies; return its exit code."""
    with os.fdopen(os.dup(log), "ab") as output:
        child = start_child(argv, environ=environ, output=output, keeps_mask=False, cwd=str(cwd))
    code = child.wait()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # The command may have left processes in the background.
    return signal_exit_code(-code) if code < 0 else code


def log_tail(file: Path) -> list[str]:
    """Return the last lines of a log, or an empty list if it cannot be read."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []


def _report(run: RunDir, ended: Evaluation) -> None:
    """Log the result of an evaluation; a success ends the warnings about earlier failures."""
    step = ended.step
    if ended.state == "done":
        report(run, "evaluation_done", step=step, **ended.metrics)
        events = read_events(run, *WARNINGS, *(f"{name}{OVER}" for name in WARNINGS))
        for event in OwnedEvents(events).lasting(run.latest_number() or 1):
            report(run, f"{event.name}{OVER}", step=step)
        return
    name = "evaluation_skipped" if ended.state == "skipped" else "evaluation_failed"
    reason = f"the checkpoint is damaged: {ended.reason}" if ended.state == "damaged" else ended.reason
    report(run, name, step=step, reason=reason, log_tail=ended.log_tail)


def main() -> int:
    """Evaluate the checkpoint given on the command line; return the exit code."""
    # The process that follows the training ignores the stop signals, and the command must not inherit this.
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return evaluate(RunDir(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
