"""Leave before the deadline: a rank that was told to stop and is stuck must not be killed mid-save."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path

from trainkit.errors import EXIT_STUCK
from trainkit.job.signals import StopRequest


def deadline_margin_s(grace_s: float) -> float:
    """How long before the end of the grace time a stuck rank leaves."""
    return min(10.0, 0.2 * grace_s)


def watch_deadline(stop: StopRequest, grace_s: float, stacks_file: Path) -> None:
    """From the stop signal on, give this process until shortly before `grace_s` to be gone.

    Then write the stacks of all its threads to `stacks_file` and end it with exit code 70. Checkpoints
    that are published stay; one that was being written stays unpublished.
    """

    def watch() -> None:
        stop.received.wait()
        time.sleep(max(0.0, grace_s - deadline_margin_s(grace_s)))
        message = (
            f"still not stopped {grace_s - deadline_margin_s(grace_s):.0f} s after {stop.signal_name}: "
            f"leaving before the job is killed; the stacks are in {stacks_file}\n"
        )
        try:
            stacks_file.parent.mkdir(exist_ok=True)
            with stacks_file.open("a") as stream:
                faulthandler.dump_traceback(stream, all_threads=True)
            os.write(2, message.encode())
        finally:
            os._exit(EXIT_STUCK)

    threading.Thread(target=watch, name="deadline", daemon=True).start()
