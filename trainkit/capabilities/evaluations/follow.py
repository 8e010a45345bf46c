"""Starts the evaluations of a run while it trains; the supervisor runs this module in a process of its own.

The command line is ``python -m trainkit.capabilities.evaluations.follow RUN_DIR``. The process exits once its
stdin is closed, which means that the supervisor is about to exit or was killed, and no evaluation is left for
the process to start. Without Slurm, the process therefore outlives the training until the last evaluation.
"""

from __future__ import annotations

import select
import signal
import sys
import time

from trainkit.capabilities.evaluations.evaluator import plan_of
from trainkit.capabilities.evaluations.queue import Queue, wanted_steps
from trainkit.errors import EXIT_OK, TrainkitError
from trainkit.run.rundir import RunDir

POLL_S = 1.0
SLURM_POLL_S = 10.0
"""Seconds between updates while evaluations wait in Slurm's queue, each of which is a query of Slurm."""


def follow(run: RunDir) -> None:
    """Start evaluations until the training has ended and no evaluation is left to start."""
    plan = plan_of(run)
    queue, is_over, said = Queue(run, plan, show), False, ""
    size, updated_s, has_open = -1, float("-inf"), True
    while True:
        is_over = is_over or _is_closed()
        new_size = run.events_file.stat().st_size if run.events_file.exists() else 0
        every_s = POLL_S if plan.sbatch is None else SLURM_POLL_S
        is_due = has_open and time.monotonic() - updated_s >= every_s
        if new_size != size or is_over or is_due:
            size, updated_s = new_size, time.monotonic()
            try:
                found = queue.update(wanted_steps(run, plan), plan.max_waiting)
                has_open = any(one.is_open for one in found.values())
            except (OSError, ValueError, TrainkitError) as error:
                if str(error) != said:  # The error may be temporary, so the next update retries.
                    said = str(error)
                    show(f"warning: {said}")
        if is_over and (not has_open or plan.sbatch is not None):
            return
        time.sleep(POLL_S / 4)


def _is_closed() -> bool:
    """Return whether the supervisor has closed the pipe of stdin or has exited."""
    return bool(select.select([sys.stdin], [], [], 0.0)[0])


def show(text: str) -> None:
    """Print a line with the current time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    """Follow the run given on the command line; return the exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        # Slurm may send the stop signals of the training to every process of the job.
        signal.signal(number, signal.SIG_IGN)
    follow(RunDir(sys.argv[1]))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
