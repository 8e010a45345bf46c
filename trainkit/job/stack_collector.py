"""The agent's part in telling where its ranks are: asks them, and looks at the silent ones from outside."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainkit.job import children
from trainkit.job.signals import WHERE_SIGNAL
from trainkit.job.stacks import Reply, Request, find_requests
from trainkit.rundir import AttemptDir

ANSWER_S = 3.0
"""How long a rank may take to answer by itself."""
POLL_S = 0.05
SPY_TIMEOUT_S = 20.0

STATES = {
    "T": "its process is stopped (SIGSTOP, or Slurm suspended it)",
    "t": "its process is stopped by a debugger",
    "D": "its process waits in the kernel for a disk, a network filesystem or a device",
}


class StackCollector:
    """Answers requests for the ranks of one agent."""

    def __init__(self, attempt: AttemptDir, answers_itself: bool) -> None:
        self._attempt = attempt
        self._answers_itself = answers_itself
        """Whether the ranks are the built-in trainer, which can be asked."""
        self._seen: set[Path] = set()

    def look(self, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Answer new requests, in threads of their own; `ranks` gives the running ones with their pids."""
        for request in find_requests(self._attempt):
            if request.file not in self._seen:
                self._seen.add(request.file)
                what = (request, ranks())
                threading.Thread(target=self._answer, args=what, name="stacks", daemon=True).start()

    def _answer(self, request: Request, ranks: Mapping[int, int]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # withdrawn, or not a request
            wanted = request.rank()
            silent = {rank: pid for rank, pid in ranks.items() if wanted in (None, rank)}
            if self._answers_itself:
                silent = _without_those_that_answer(request, silent)
            for rank, pid in silent.items():
                request.answer(look_at(rank, pid))


def _without_those_that_answer(request: Request, ranks: Mapping[int, int]) -> dict[int, int]:
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, WHERE_SIGNAL)
    deadline_s = time.monotonic() + ANSWER_S
    silent = dict(ranks)
    while silent and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        silent = {rank: pid for rank, pid in silent.items() if not request.reply_file(rank).exists()}
    return silent


def look_at(rank: int, pid: int) -> Reply:
    """Where a process is, as py-spy sees it from outside, or why that cannot be seen."""
    host = socket.gethostname()
    # Beside our interpreter, too: its folder need not be on PATH.
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    problem = STATES.get(children.state(pid) or "", "")
    if spy is None:
        problem = problem or "it does not answer, and py-spy, which could look at it, is not installed"
        return Reply(rank, host, pid, "", problem=problem)
    for candidate in (pid, *children.descendants(pid)):  # a shell may stand before it
        try:
            threads = _spy(spy, candidate)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            problem = problem or f"py-spy: {error}"
        else:
            return Reply(rank, host, candidate, "py-spy", threads)
    return Reply(rank, host, pid, "", problem=problem)


def _spy(spy: str, pid: int) -> dict[str, list[str]]:
    """The frames of each thread of a Python process, the main thread first."""
    argv = [spy, "dump", "--json", "--pid", str(pid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=SPY_TIMEOUT_S)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().partition("\n")[0] or f"ended with {done.returncode}")
    threads: list[dict[str, Any]] = json.loads(done.stdout)
    threads.sort(key=lambda thread: thread["os_thread_id"] != pid)
    return {
        f"{thread['thread_name'] or 'native'} {thread['thread_id']:#x}": [
            f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]
        ]
        for thread in threads
    }
