"""Collects the stacks of a running attempt's ranks, exchanging requests and replies as files.

A request is stored as ``attempts/NNN/stacks/requests/ID.json``, and a reply as
``…/requests/ID/rank-NNNN.json``. Each agent reads the request and signals its ranks, which write the replies.
If a rank cannot reply, its agent replies for it. The agent's reply names any lock file of an extension build
that the rank may be waiting for.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from trainkit.folders import ensure_folder
from trainkit.job import processes
from trainkit.job.blame import Blame
from trainkit.job.flight_records import request_dumps
from trainkit.job.signals import STACKS_SIGNAL
from trainkit.run.files import as_utc, read_each, read_json, utc_now, write_json
from trainkit.run.process import process_stat
from trainkit.run.rundir import AttemptDir

POLL_S = 0.1


@dataclass(frozen=True)
class Reply:
    """The stacks of one rank."""

    rank: int
    host: str
    pid: int
    how: str
    """The source of the stacks: ``asked`` if the rank itself replied, ``py-spy``, or empty if there are no
    stacks."""
    threads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Maps each thread to its frames, innermost first; the training thread comes first."""
    step: int | None = None
    phase: str | None = None
    since_s: float | None = None
    """Seconds since the rank entered its current phase."""
    problem: str = ""
    """The reason why there are no stacks; empty if there are stacks."""
    lock: LockFile | None = None
    """The lock file that the rank may be waiting for; set only if the rank did not reply itself."""

    @property
    def is_stopped(self) -> bool:
        """Return whether the rank's process is in a kernel state that prevents it from running."""
        return self.problem in STATE_PROBLEMS.values()

    @property
    def main_stack(self) -> tuple[str, ...]:
        return tuple(next(iter(self.threads.values()), ()))


@dataclass(frozen=True)
class Request:
    """A request for the stacks of one rank or of all ranks."""

    file: Path

    @property
    def replies_dir(self) -> Path:
        return self.file.with_suffix("")

    def rank(self) -> int | None:
        """Return the rank whose stacks are requested, or None for all ranks."""
        rank = read_json(self.file)["rank"]
        return rank if isinstance(rank, int) else None

    def with_flights(self) -> bool:
        """Return whether the request also asks for the flight records that torch keeps."""
        return read_json(self.file).get("flights") is True

    def reply_file(self, rank: int) -> Path:
        return self.replies_dir / f"rank-{rank:04d}.json"

    def reply(self, reply: Reply) -> None:
        """Save a rank's reply to the request's folder."""
        write_json(self.reply_file(reply.rank), asdict(reply))

    def replies(self) -> list[Reply]:
        """Return the replies received so far, ordered by rank."""
        return read_each(Reply, self.replies_dir)

    def withdraw(self) -> None:
        """Delete the request and its replies."""
        self.file.unlink(missing_ok=True)
        shutil.rmtree(self.replies_dir, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty while other requests exist
            self.file.parent.rmdir()


def find_requests(attempt: AttemptDir) -> list[Request]:
    """Return the attempt's requests that have not been withdrawn."""
    return [Request(path) for path in sorted(attempt.stacks_dir.glob("requests/*.json"))]


def request_stacks(attempt: AttemptDir, rank: int | None, *, flights: bool = False) -> Request:
    """Request the stacks of one rank, or of all ranks if `rank` is None.

    If `flights` is set, also requests the flight records of a command's ranks. Raises OSError if the request
    cannot be written.
    """
    request = Request(attempt.stacks_dir / "requests" / f"{os.urandom(6).hex()}.json")
    for folder in (attempt.stacks_dir, request.file.parent, request.replies_dir):
        ensure_folder(folder)
    write_json(request.file, {"rank": rank, "flights": flights, "time": utc_now()})
    return request


def gather(attempt: AttemptDir, num_ranks: int, rank: int | None, timeout_s: float) -> list[Reply]:
    """Request the stacks of one rank, or of all ranks if `rank` is None; return the replies, ordered by rank.

    Replies that arrive after `timeout_s` are ignored. Raises OSError if the run folder cannot be
    written.
    """
    request, deadline_s = request_stacks(attempt, rank), time.monotonic() + timeout_s
    wanted = num_ranks if rank is None else 1
    try:
        while len(replies := request.replies()) < wanted and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return replies
    finally:
        request.withdraw()


def group_replies(replies: Sequence[Reply]) -> list[list[Reply]]:
    """Group the replies by their main thread's stack, smallest group first; omit replies without stacks."""
    groups: dict[tuple[str, ...], list[Reply]] = {}
    for reply in replies:
        if reply.threads:
            groups.setdefault(reply.main_stack, []).append(reply)
    return sorted(groups.values(), key=lambda group: (len(group), group[0].rank))


@dataclass(frozen=True)
class Silence:
    """An explanation of what the ranks of a silent command are waiting for."""

    text: str
    """The explanation as one sentence."""
    rank: int | None = None
    host: str | None = None
    lock: str | None = None


def explain_silence(replies: Sequence[Reply], blame: Blame | None = None) -> Silence:
    """Explain what ranks are waiting for: lock files, the ranks at fault, or the calls in their stacks."""
    waiting = [(reply, reply.lock) for reply in replies if reply.lock is not None]
    if waiting:
        first, lock = max(waiting, key=lambda item: item[1].is_certain)
        others = sum(other.path == lock.path for _, other in waiting) - 1
        more = f" (and {others} more)" if others else ""
        waits = "waits" if lock.is_certain else "may wait"
        text = f"rank {first.rank} on {first.host}{more} {waits} for the lock file {lock.path} of {lock.time}"
        return Silence(text, first.rank, first.host, lock.path)
    if blame is not None:
        hosts = [reply.host for reply in replies if reply.rank in blame.ranks and not blame.differs]
        host = hosts[0] if len({*hosts}) == 1 else None
        subject = f"rank {blame.ranks[0]} " if len(blame.ranks) == 1 else ""
        return Silence(f"{subject}{blame.text}", blame.ranks[0] if blame.ranks else None, host)
    if not replies:
        return Silence("no rank could be inspected in time")
    groups = group_replies(replies)
    first = groups[0][0] if groups else replies[0]
    where = f" is in {first.main_stack[0]}" if first.main_stack else f": {first.problem}"
    return Silence(f"rank {first.rank} on {first.host}{where}", first.rank, first.host)


REPLY_S = 3.0
"""Seconds to wait for a rank's reply before the agent reads the rank's stacks with py-spy."""
REQUEST_POLL_S = 0.05
SPY_TIMEOUT_S = 20.0
WAITS_FOR_LOCK = "file_baton.py:"
"""The torch source file that waits for the lock of an extension build, as named in stack frames.
"""

STATE_PROBLEMS = {
    "T": "its process is stopped (SIGSTOP, or Slurm suspended it)",
    "t": "its process is stopped by a debugger",
    "D": "its process is blocked in the kernel on a disk, a network filesystem or a device",
}


def describe_state(pid: int) -> str:
    """Return why the kernel does not run a process; empty if the process can run or has exited."""
    try:
        stat = process_stat(pid)
    except OSError:
        return ""
    return "" if stat is None else STATE_PROBLEMS.get(stat.state, "")


class StackCollector:
    """Replies to requests for the stacks of one agent's ranks."""

    def __init__(self, attempt: AttemptDir, replies_itself: bool) -> None:
        self._attempt = attempt
        self._replies_itself = replies_itself
        """True if the ranks run the built-in trainer, which replies to stack requests itself."""
        self._handled: set[Path] = set()

    def poll(self, ranks: Callable[[], Mapping[int, int]]) -> None:
        """Reply to new requests, each in its own thread.

        `ranks` returns a mapping from the running ranks to their pids.
        """
        for request in find_requests(self._attempt):
            if request.file not in self._handled:
                self._handled.add(request.file)
                arguments = (request, ranks())
                threading.Thread(target=self._reply, args=arguments, name="stacks", daemon=True).start()

    def _reply(self, request: Request, ranks: Mapping[int, int]) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):  # the request was withdrawn or damaged
            wanted = request.rank()
            silent = {rank: pid for rank, pid in ranks.items() if wanted in (None, rank)}
            if self._replies_itself:
                silent = _await_replies(request, silent)
            elif request.with_flights():
                request_dumps(self._attempt, silent)
            for rank, pid in silent.items():
                request.reply(spy_on(rank, pid))


def _await_replies(request: Request, ranks: Mapping[int, int]) -> dict[int, int]:
    """Signal the ranks and wait for their replies; return the ranks that did not reply, with their pids."""
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
    """Read a process's stacks with py-spy.

    The reply contains the stacks, or the problem and any lock file that the process may be waiting for.
    """
    host = socket.gethostname()
    # Also search the interpreter's folder, which may not be on PATH.
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    problem = describe_state(pid)
    if spy is None:
        problem = problem or "py-spy, which could read the stacks of the rank, is not installed"
        return Reply(rank, host, pid, "", problem=problem, lock=find_lock(pid))
    for candidate in (pid, *processes.descendants(pid)):  # the pid may belong to a shell that runs the rank
        try:
            threads = _spy(spy, candidate)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            problem = problem or f"py-spy: {error}"
        else:
            found = Reply(rank, host, candidate, "py-spy", threads)
            return replace(found, lock=find_lock(candidate, found.main_stack))
    return Reply(rank, host, pid, "", problem=problem, lock=find_lock(pid))


def _spy(spy: str, pid: int) -> dict[str, list[str]]:
    """Run `py-spy dump` on a Python process; return each thread's frames, starting with the main thread."""
    argv = [spy, "dump", "--json", "--pid", str(pid)]
    done = subprocess.run(argv, capture_output=True, encoding="utf-8", timeout=SPY_TIMEOUT_S)
    if done.returncode != 0:
        raise ValueError(done.stderr.strip().partition("\n")[0] or f"ended with {done.returncode}")
    threads = sorted(json.loads(done.stdout), key=lambda thread: bool(thread["os_thread_id"] != pid))
    return {
        f"{thread['thread_name'] or 'native'} {thread['thread_id']:#x}": [
            f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in thread["frames"]
        ]
        for thread in threads
    }


# torch protects extension builds with a lock file, which remains if the process that created it is killed. If
# the lock file remains, every process that needs the extension waits forever without any output.
EXTENSIONS = (
    ("TORCH_EXTENSIONS_DIR", ""),
    ("XDG_CACHE_HOME", "torch_extensions"),
    ("HOME", ".cache/torch_extensions"),
)
"""Environment variables that determine the extensions folder, in order of priority, each with the subfolder
to append."""


@dataclass(frozen=True)
class LockFile:
    """A lock file that a rank is waiting for, or may be waiting for."""

    path: str
    time: str
    """The creation time of the lock file; equal to its modification time, because the file is empty."""
    is_certain: bool
    """True if the rank's stack shows a wait for a lock file and no other lock file exists."""


def find_lock(pid: int, stack: Sequence[str] = ()) -> LockFile | None:
    """Return the newest lock file that a process may be waiting for.

    If `stack` is given, returns None unless the stack shows a wait for a lock.
    """
    if stack and not any(WAITS_FOR_LOCK in frame for frame in stack[:3]):
        return None
    environ = processes.environ_of(pid)
    folder = next((Path(environ[name], below) for name, below in EXTENSIONS if environ.get(name)), None)
    found = []
    for path in () if folder is None else (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        with contextlib.suppress(OSError):  # the lock was released in the meantime
            found.append((path.stat().st_mtime, str(path)))
    if not found:
        return None
    time_s, file = max(found)
    time = as_utc(datetime.fromtimestamp(time_s, timezone.utc), "seconds")
    return LockFile(file, time, bool(stack) and len(found) == 1)
