"""The process next to rank 0 that sends the metrics of a run to its trackers while it trains.

``python -m trainkit.trackers RUN_DIR``, started by the agent of the node of rank 0. It ends with its standard
input; the line ``finished`` there has it send the rest first.
"""

from __future__ import annotations

import os
import select
import sys
import time

from trainkit.locks import LockBusy
from trainkit.run.rundir import RunDir
from trainkit.trackers.records import trackers_of
from trainkit.trackers.sync import RunTracker, one_line

POLL_S = 5.0
MAX_POLL_S = 300.0
"""After failures, such as those of a server that is away, it tries ever less often."""


def main() -> int:
    """Send until standard input ends; returns the exit code."""
    os.nice(19)  # the cores belong to the ranks
    run = RunDir(sys.argv[1])
    trackers = [RunTracker(run, name, settings) for name, settings in trackers_of(run).items()]
    live = [tracker for tracker in trackers if not tracker.writes_once]
    poll_s, line = POLL_S, None
    while line is None:
        problems = [tracker.name for tracker in live if not update(tracker)]
        poll_s = min(MAX_POLL_S, 2 * poll_s) if problems else POLL_S
        line = read_line(poll_s)
    if line == "finished":
        for tracker in trackers:
            update(tracker, "finished")
    return 0


def update(tracker: RunTracker, state: str = "running") -> bool:
    """Send what is new and print what happened; False if it failed."""
    try:
        sent = tracker.update(state, closes=state != "running")
    except LockBusy:
        return True  # `trainkit sync` is sending
    except ModuleNotFoundError as error:
        extra = f"trainkit[{tracker.name}]"
        show(f"warning: {tracker.name}: {error}; install '{extra}', and `trainkit sync` sends the metrics")
        return False
    except Exception as error:  # nothing here may end the process: the run trains without it
        show(f"{tracker.name}: {one_line(error)}")
        return False
    if sent.num_sent or sent.problem:
        show(sent.describe())
    return not sent.problem


def read_line(timeout_s: float) -> str | None:
    """The next line of standard input, empty at its end; None if there is none in time."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return sys.stdin.readline().strip() if ready else None


def show(text: str) -> None:
    """Print a line of the attempt's trackers.log."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
