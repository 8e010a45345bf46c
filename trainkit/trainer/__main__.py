"""``python -m trainkit.trainer RUN_DIR``: one worker of a run."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import traceback

from trainkit.errors import EXIT_FAILED, TrainkitError
from trainkit.job.signals import StopRequest
from trainkit.rundir import AttemptDir, RunDir, read_json, utc_now, write_json
from trainkit.trainer.watchdog import watch_deadline


def main() -> None:
    """Run one worker and end the process with its exit code."""
    # Before torch is imported: a signal that comes meanwhile must not be lost.
    stop = StopRequest()
    stop.install()
    run = RunDir(sys.argv[1])
    attempt = run.attempt(int(os.environ.get("TRAINKIT_JOB_ATTEMPT") or run.attempt_numbers()[-1]))
    rank = int(os.environ.get("RANK", "0"))
    set_up_logging(rank)
    try:
        grace_s = float(read_json(attempt.plan_file)["grace_s"])
        watch_deadline(stop, grace_s, attempt.stacks_dir / f"rank-{rank:04d}.txt")
        from trainkit.trainer.worker import run_worker

        code = run_worker(attempt, stop)
    except BaseException as error:
        code = error.exit_code if isinstance(error, TrainkitError) else EXIT_FAILED
        record_failure(attempt, rank, error, code)
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


def record_failure(attempt: AttemptDir, rank: int, error: BaseException, exit_code: int) -> None:
    """Leave the error where the verdict is made from, and in this rank's log."""
    record = {
        "rank": rank,
        "node_rank": int(os.environ.get("NODE_RANK", "0")),
        "host": socket.gethostname(),
        "time": utc_now(),
        "type": type(error).__name__,
        "message": str(error),
        "hint": getattr(error, "hint", ""),
        "traceback": traceback.format_exc(),
        "exit_code": exit_code,
    }
    shown = error.render() if isinstance(error, TrainkitError) else traceback.format_exc()
    try:
        write_json(attempt.rank_error(rank), record)
    except OSError as unwritable:
        shown += f"\nthe error record could not be written: {unwritable}"
    # On a full disk the log cannot take it either; the exit code still tells.
    with contextlib.suppress(OSError):
        print(shown, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
