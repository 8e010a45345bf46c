"""Where the ranks of a running attempt are, on demand: asked for by a file, answered by files.

``attempts/NNN/stacks/requests/ID.json`` asks, ``…/requests/ID/rank-NNNN.json`` answers. The agent of a rank
sees the request and signals its ranks, which answer themselves; for those that cannot, the agent answers.
"""

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
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainkit.job import processes
from trainkit.job.signals import WHERE_SIGNAL
from trainkit.rundir import AttemptDir, read_json, utc_now, write_json

POLL_S = 0.1


@dataclass(frozen=True)
class Reply:
    """Where one rank is."""

    rank: int
    host: str
    pid: int
    how: str
    """``asked`` when the rank said it itself, ``py-spy``, or empty when nobody could say."""
    threads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The frames of each thread, the innermost first; the thread that trains comes first."""
    step: int | None = None
    phase: str | None = None
    since_s: float | None = None
    """How long it has been in that phase."""
    problem: str = ""
    """Why there are no stacks."""

    @property
    def main_stack(self) -> tuple[str, ...]:
        return tuple(next(iter(self.threads.values()), ()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One question for stacks."""

    file: Path

    @property
    def replies_dir(self) -> Path:
        return self.file.with_suffix("")

    def rank(self) -> int | None:
        """The one rank that is asked; None for all."""
        rank = read_json(self.file)["rank"]
        return rank if isinstance(rank, int) else None

    def reply_file(self, rank: int) -> Path:
        return self.replies_dir / f"rank-{rank:04d}.json"

    def answer(self, reply: Reply) -> None:
        """Write a reply, for a rank that could not."""
        write_json(self.reply_file(reply.rank), reply.to_dict())

    def replies(self) -> list[Reply]:
        """What has been answered so far, by rank."""
        found = []
        for path in sorted(self.replies_dir.glob("rank-*.json")):
            try:
                found.append(Reply(**read_json(path)))
            except (OSError, ValueError, TypeError):
                continue  # not from us; that rank counts as one that did not answer
        return found

    def withdraw(self) -> None:
        """Remove the question and what was answered."""
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.replies_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # somebody else asks
            self.file.parent.rmdir()


def requests_dir(attempt: AttemptDir) -> Path:
    """Where questions are put; it is there only while there are some."""
    return attempt.stacks_dir / "requests"


def find_requests(attempt: AttemptDir) -> list[Request]:
    """The questions that stand open."""
    return [Request(path) for path in sorted(requests_dir(attempt).glob("*.json"))]


def ask(attempt: AttemptDir, rank: int | None) -> Request:
    """Ask one rank, or all, where they are; OSError when nothing can be written there."""
    request = Request(requests_dir(attempt) / f"{uuid.uuid4().hex[:12]}.json")
    request.replies_dir.mkdir(parents=True)
    write_json(request.file, {"rank": rank, "time": utc_now()})
    return request


def gather(attempt: AttemptDir, ranks: Collection[int], rank: int | None, timeout_s: float) -> list[Reply]:
    """Ask `rank`, or all of `ranks`, and wait until each has answered or the time is over."""
    request = ask(attempt, rank)
    deadline_s = time.monotonic() + timeout_s
    wanted = len(ranks) if rank is None else 1
    try:
        while len(replies := request.replies()) < wanted and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return replies
    finally:
        request.withdraw()


def group_replies(replies: Sequence[Reply]) -> list[list[Reply]]:
    """Ranks that are at the same place in the code, together; the smallest group, the odd one, first."""
    groups: dict[tuple[str, ...], list[Reply]] = {}
    for reply in replies:
        if reply.threads:
            groups.setdefault(reply.main_stack, []).append(reply)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank))


ANSWER_S = 3.0
"""How long a rank may take to answer by itself."""
REQUEST_POLL_S = 0.05
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
        time.sleep(REQUEST_POLL_S)
        silent = {rank: pid for rank, pid in silent.items() if not request.reply_file(rank).exists()}
    return silent


def look_at(rank: int, pid: int) -> Reply:
    """Where a process is, as py-spy sees it from outside, or why that cannot be seen."""
    host = socket.gethostname()
    # Beside our interpreter, too: its folder need not be on PATH.
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    problem = STATES.get(processes.state(pid) or "", "")
    if spy is None:
        problem = problem or "it does not answer, and py-spy, which could look at it, is not installed"
        return Reply(rank, host, pid, "", problem=problem)
    for candidate in (pid, *processes.descendants(pid)):  # a shell may stand before it
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
