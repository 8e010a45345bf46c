"""Stacks of the ranks of a running attempt on demand: requests and replies are files.

``attempts/NNN/stacks/requests/ID.json`` is a request, ``…/requests/ID/rank-NNNN.json`` a reply. Each agent
reads the request and signals its ranks, which reply themselves; the agent replies for those that cannot.
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
from trainkit.job.signals import STACKS_SIGNAL
from trainkit.rundir import AttemptDir, process_stat, read_json, utc_now, write_json

POLL_S = 0.1


@dataclass(frozen=True)
class Reply:
    """The stacks of one rank."""

    rank: int
    host: str
    pid: int
    how: str
    """``asked`` when the rank replied itself, ``py-spy``, or empty without stacks."""
    threads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The frames of each thread, innermost first; the training thread comes first."""
    step: int | None = None
    phase: str | None = None
    since_s: float | None = None
    """Seconds since the rank entered that phase."""
    problem: str = ""
    """Why there are no stacks."""

    @property
    def main_stack(self) -> tuple[str, ...]:
        return tuple(next(iter(self.threads.values()), ()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One request for stacks."""

    file: Path

    @property
    def replies_dir(self) -> Path:
        return self.file.with_suffix("")

    def rank(self) -> int | None:
        """The rank whose stacks are requested; None for all."""
        rank = read_json(self.file)["rank"]
        return rank if isinstance(rank, int) else None

    def reply_file(self, rank: int) -> Path:
        return self.replies_dir / f"rank-{rank:04d}.json"

    def reply(self, reply: Reply) -> None:
        """Write the reply of a rank."""
        write_json(self.reply_file(reply.rank), reply.to_dict())

    def replies(self) -> list[Reply]:
        """The replies so far, by rank."""
        found = []
        for path in sorted(self.replies_dir.glob("rank-*.json")):
            try:
                found.append(Reply(**read_json(path)))
            except (OSError, ValueError, TypeError):
                continue  # damaged: that rank counts as one without a reply
        return found

    def withdraw(self) -> None:
        """Remove the request and its replies."""
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.replies_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # there are other requests
            self.file.parent.rmdir()


def requests_dir(attempt: AttemptDir) -> Path:
    """The folder of the requests; it exists only while there are some."""
    return attempt.stacks_dir / "requests"


def find_requests(attempt: AttemptDir) -> list[Request]:
    """The open requests of an attempt."""
    return [Request(path) for path in sorted(requests_dir(attempt).glob("*.json"))]


def request_stacks(attempt: AttemptDir, rank: int | None) -> Request:
    """Request the stacks of one rank, or of all if None. Raises OSError when the folder cannot be written."""
    request = Request(requests_dir(attempt) / f"{uuid.uuid4().hex[:12]}.json")
    request.replies_dir.mkdir(parents=True)
    write_json(request.file, {"rank": rank, "time": utc_now()})
    return request


def gather(attempt: AttemptDir, ranks: Collection[int], rank: int | None, timeout_s: float) -> list[Reply]:
    """Request the stacks of `rank`, or of all `ranks` if None, and wait for the replies or the timeout.

    Returns the replies so far by rank. Raises OSError when the run folder cannot be written.
    """
    request = request_stacks(attempt, rank)
    deadline_s = time.monotonic() + timeout_s
    wanted = len(ranks) if rank is None else 1
    try:
        while len(replies := request.replies()) < wanted and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return replies
    finally:
        request.withdraw()


def group_replies(replies: Sequence[Reply]) -> list[list[Reply]]:
    """The replies grouped by main stack, smallest group first; replies without stacks are left out."""
    groups: dict[tuple[str, ...], list[Reply]] = {}
    for reply in replies:
        if reply.threads:
            groups.setdefault(reply.main_stack, []).append(reply)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank))


REPLY_S = 3.0
"""How long a rank may take to reply itself."""
REQUEST_POLL_S = 0.05
SPY_TIMEOUT_S = 20.0

STATE_PROBLEMS = {
    "T": "its process is stopped (SIGSTOP, or Slurm suspended it)",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel on a disk, a network filesystem or a device",
}


def describe_state(pid: int) -> str:
    """Why a process cannot run Python code, from its kernel state; empty if it can or has ended."""
    try:
        stat = process_stat(pid)
    except OSError:
        return ""
    return "" if stat is None else STATE_PROBLEMS.get(stat.state, "")


class StackCollector:
    """Replies to requests for the ranks of one agent."""

    def __init__(self, attempt: AttemptDir, replies_itself: bool) -> None:
        self._attempt = attempt
        self._replies_itself = replies_itself
        """Whether the ranks are the built-in trainer, which replies itself."""
        self._handled: set[Path] = set()

    def poll(self, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Reply to new requests, each in its own thread; `ranks` returns the running ranks and their pids."""
        for request in find_requests(self._attempt):
            if request.file not in self._handled:
                self._handled.add(request.file)
                arguments = (request, ranks())
                threading.Thread(target=self._reply, args=arguments, name="stacks", daemon=True).start()

    def _reply(self, request: Request, ranks: Mapping[int, int]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # withdrawn or damaged
            wanted = request.rank()
            silent = {rank: pid for rank, pid in ranks.items() if wanted in (None, rank)}
            if self._replies_itself:
                silent = _await_replies(request, silent)
            for rank, pid in silent.items():
                request.reply(spy_on(rank, pid))


def _await_replies(request: Request, ranks: Mapping[int, int]) -> dict[int, int]:
    """Signal ranks to reply and wait; returns the ranks that did not reply, with their pids."""
    for pid in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACKS_SIGNAL)
    deadline_s = time.monotonic() + REPLY_S
    silent = dict(ranks)
    while silent and time.monotonic() < deadline_s:
        time.sleep(REQUEST_POLL_S)
        silent = {rank: pid for rank, pid in silent.items() if not request.reply_file(rank).exists()}
    return silent


def spy_on(rank: int, pid: int) -> Reply:
    """The stacks of a process as read by py-spy, or the reason why there are none."""
    host = socket.gethostname()
    # Also look in this interpreter's folder, which need not be on PATH.
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    problem = describe_state(pid)
    if spy is None:
        problem = problem or "it does not respond, and py-spy, which can read its stacks, is not installed"
        return Reply(rank, host, pid, "", problem=problem)
    for candidate in (pid, *processes.descendants(pid)):  # the rank may run below a shell
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
