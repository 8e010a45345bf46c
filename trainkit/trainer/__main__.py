"""``python -m trainkit.trainer RUN_DIR``: one worker of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from typing import Any

from trainkit.errors import EXIT_FAILED, EXIT_NO_RESTART, TrainkitError, UsageError
from trainkit.job.rank_env import own_host
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, RunDir, read_json, utc_now, write_json
from trainkit.trainer.progress import Position, Pulse
from trainkit.trainer.rank_stacks import RankStacks
from trainkit.trainer.watchdog import Watchdog, watch_deadline


def main() -> None:
    """Run one worker and end the process with its exit code."""
    # Before torch is imported: a signal that comes meanwhile must not be lost.
    stop = StopRequest()
    stop.install()
    pulse = Pulse()
    run = RunDir(sys.argv[1])
    attempt = run.attempt(int(os.environ.get("TRAINKIT_JOB_ATTEMPT") or run.attempt_numbers()[-1]))
    rank = int(os.environ.get("RANK", "0"))
    who = {"rank": rank, "node_rank": int(os.environ.get("NODE_RANK", "0")), "host": own_host()}
    stacks = RankStacks(attempt, rank, pulse)
    set_up_logging(rank)
    try:
        plan = LaunchPlan.from_dict(read_json(attempt.plan_file))
        stacks.listen(stop)
        watch_deadline(stop, plan.grace_s, stacks)
        Watchdog(attempt, who, plan, pulse, stacks).start()
        from trainkit.trainer.worker import run_worker

        code = run_worker(attempt, plan, stop, pulse)
    except BaseException as error:
        code = record_failure(attempt, who, error, pulse.position)
    stacks.close()
    from trainkit.trainer.distributed import leave

    leave(code)


def set_up_logging(rank: int) -> None:
    """Lines of rank 0 go to stdout as they are; other ranks say who they are and only what is wrong."""
    prefix = "" if rank == 0 else f"[rank {rank}] "
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s {prefix}%(message)s",
        datefmt="%H:%M:%S",
    )
    logging.raiseExceptions = False  # a full disk must not end a training through its log


def record_failure(attempt: AttemptDir, who: dict[str, Any], error: BaseException, position: Position) -> int:
    """Leave the error where the verdict is made from, and in this rank's log; returns the exit code."""
    code = exit_code_of(error, position)
    record = {
        **who,
        "time": utc_now(),
        "step": position.step,
        "phase": position.phase,
        "type": type(error).__name__,
        "message": str(error),
        "hint": getattr(error, "hint", ""),
        "traceback": traceback.format_exc(),
        "exit_code": code,
        "final": code == EXIT_NO_RESTART,
    }
    shown = error.render() if isinstance(error, TrainkitError) else traceback.format_exc()
    try:
        write_json(attempt.rank_error(who["rank"]), record)
    except OSError as unwritable:
        shown += f"\nthe error record could not be written: {unwritable}"
    # On a full disk the log cannot take it either; the exit code still tells.
    with contextlib.suppress(OSError):
        print(shown, file=sys.stderr, flush=True)
    return code


def exit_code_of(error: BaseException, position: Position) -> int:
    """What the process ends with: 78 for what would happen again, as a module that is missing."""
    if isinstance(error, UsageError):
        # A disk that refuses now may take it at the next start.
        return EXIT_FAILED if isinstance(error.__cause__, OSError) else EXIT_NO_RESTART
    if isinstance(error, TrainkitError):
        return error.exit_code
    at_import = position.step is None and isinstance(error, NameError)
    return EXIT_NO_RESTART if at_import or isinstance(error, (ImportError, SyntaxError)) else EXIT_FAILED


if __name__ == "__main__":
    main()
