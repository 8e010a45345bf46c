"""Run one worker process of a training run: ``python -m trainkit.trainer RUN_DIR``."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, TrainkitError, UsageError, replace_unencodable
from trainkit.folders import whole_paths
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.plan.torch_build import release_problem
from trainkit.run.files import utc_now, write_json
from trainkit.run.process import own_host
from trainkit.run.rundir import AttemptDir, RunDir
from trainkit.run.tracebacks import last_exception, users_line
from trainkit.shipped import Guard, in_ranks, worker_of
from trainkit.trainer.progress import CurrentPhase, Progress, RankInfo, Watchdog, write_flight_record


@whole_paths()
def main() -> None:
    """Run one worker and exit with its exit code."""
    # Garbage collection would add 20 % to the import time of torch without finding anything to free.
    gc.disable()
    # Install the signal handlers before importing torch, which takes seconds, so that no signal is lost.
    stop = StopRequest()
    stop.install()
    progress = Progress()
    run = RunDir(sys.argv[1])
    run.hold()
    attempt = run.attempt(int(os.environ.get("TRAINKIT_JOB_ATTEMPT") or run.attempt_numbers()[-1]))
    rank = int(os.environ.get("RANK", "0"))
    rank_info = RankInfo(rank, int(os.environ.get("NODE_RANK", "0")), own_host())
    watchdog = Watchdog(attempt, rank_info, progress, stop)
    guard, on_error = Guard((), logging.warning), list[tuple[str, Callable[[Exception], None]]]()
    set_up_logging(rank)
    try:
        plan = LaunchPlan.read(attempt.plan_file)
        watchdog.listen()
        watchdog.watch(plan)
        guard, unwatched = Guard(in_ranks(plan.parts), logging.warning), partial(progress.within, "unwatched")
        on_error = guard.each(lambda one: one.in_trainer(plan, unwatched))
        import torch

        # With an unsupported torch release, the trainer's imports would fail.
        if (problem := release_problem(torch.__version__)) is not None:
            raise UsageError(f"{sys.executable} {problem[0]}", hint=problem[1])
        worker = worker_of(plan.parts) or "trainkit.trainer.worker"
        work = importlib.import_module(worker).run_worker
        gc.freeze()
        gc.enable()
        code = work(attempt, plan, stop, progress)
    except BaseException as error:
        for name, react in on_error if isinstance(error, Exception) else ():
            guard.call(name, react, error)
        code = record_failure(attempt, rank_info, error, progress.current)
    watchdog.close()
    if "trainkit.trainer.distributed" not in sys.modules:
        sys.exit(code)  # torch is missing or broken, so importing `distributed` would fail too
    from trainkit.trainer.distributed import exit_process

    exit_process(code)


def set_up_logging(rank: int) -> None:
    """Log to standard output: rank 0 logs everything, other ranks only warnings, prefixed with the rank."""
    replace_unencodable()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s {prefix}%(message)s",
        datefmt="%H:%M:%S",
    )
    logging.raiseExceptions = False  # a failure to write the log must not stop the training


def record_failure(
    attempt: AttemptDir, rank_info: RankInfo, error: BaseException, current: CurrentPhase
) -> int:
    """Write the error record of this rank and log the error; return the exit code."""
    code = exit_code_of(error, current)
    # Pass `error` explicitly, because no exception is being handled when `sys.excepthook` runs.
    trace = "".join(traceback.format_exception(error))
    own, message = users_line(trace.splitlines()), str(error)
    if hasattr(error, "exceptions") and (raised := last_exception(trace.splitlines())) is not None:
        own, message = raised.code, raised.message  # for an exception group, report its last exception
    record = {
        **vars(rank_info),
        "time": utc_now(),
        "step": current.step,
        "phase": current.phase,
        "type": type(error).__name__,
        "message": message,
        "hint": getattr(error, "hint", ""),
        "traceback": trace,
        "code": None if own is None else vars(own),
        "exit_code": code,
        "final": code == EXIT_NO_RESTART,
    }
    shown = error.render() if isinstance(error, TrainkitError) else trace
    try:
        if "gloo" in message:
            # Write the flight record before the error record, because the supervisor kills all ranks once it
            # reads the error record. The flight record shows which rank, if any, called a different
            # collective from the other ranks.
            write_flight_record(attempt, rank_info.rank, "cpu")
        write_json(attempt.rank_error(rank_info.rank), record)
    except OSError as unwritable:
        shown += f"\ncannot write the error record: {unwritable}"
    # On a full disk, printing the error fails too, but the exit code still reports the failure.
    with contextlib.suppress(OSError):
        print(shown, file=sys.stderr, flush=True)
    return code


def exit_code_of(error: BaseException, current: CurrentPhase) -> int:
    """Return the exit code for an error: 78 if a restart would fail too, as when a module is missing."""
    if isinstance(error, UsageError):
        # An I/O error may be temporary, so a restart may succeed.
        return EXIT_FAILED if isinstance(error.__cause__, OSError) else EXIT_NO_RESTART
    if isinstance(error, TrainkitError):
        return error.exit_code
    at_import = current.step is None and isinstance(error, NameError)
    return EXIT_NO_RESTART if at_import or isinstance(error, (ImportError, SyntaxError)) else EXIT_FAILED


if __name__ == "__main__":
    main()
