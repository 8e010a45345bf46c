"""What launchers print about what failed first: torchrun, accelerate and DeepSpeed a rank, srun a task.

The first three exit with 1, or with the exit code of that rank as a byte: 247 is -9, death by SIGKILL. So an
agent also watches the ranks of its launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainkit.errors import EXIT_FAILED, EXIT_OK, EXIT_STOPPED
from trainkit.job.processes import exit_code_of
from trainkit.run.files import parse_time, seconds_between
from trainkit.run.process import PROC
from trainkit.run.record import read_rendezvous
from trainkit.run.rundir import AttemptDir
from trainkit.run.tracebacks import first_raising_rank

_TORCHRUN = re.compile(
    r"time\s*: (?P<time>\S+)\n\s*host\s*: (?P<host>\S*)\n"
    r"\s*rank\s*: (?P<rank>\d+) .*\n\s*exitcode\s*: (?P<code>-?\d+)"
)
"""A rank in the report of torchrun, which accelerate runs for more than one rank."""
_OTHERS = "Failures:"
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ACCELERATE = re.compile(r"in \w+_launcher\n.*\n.* died with <Signals\.\w+: (?P<number>\d+)>")
_SPAWN = re.compile(
    r"^(?:-- Process (?P<rank>\d+) terminated with the following error:"
    r"|.*ProcessExitedException: process (?P<killed>\d+) terminated with signal (?P<name>SIG\w+))",
    re.MULTILINE,
)
"""What torch.multiprocessing.spawn prints."""
_DEEPSPEED = re.compile(r"exits with return code = -(?P<number>\d+)")
"""DeepSpeed prints it behind the command of its last rank, whichever has ended."""
AT_ONCE_S = 5.0
"""Torchrun itself kills what is left of its ranks after 30 s."""


@dataclass(frozen=True)
class RankExit:
    """How a rank below a launcher ended."""

    code: int
    """Its exit code; negative for a signal."""
    rank: int | None = None
    """In the world; None when the launcher does not say."""
    index: int = 0
    """The line of its output in which the launcher says so."""
    host: str = ""
    time: str = ""

    @property
    def killed_outside_launcher(self) -> bool:
        """Whether a signal from outside ended it: launchers send SIGTERM, a rank raises SIGABRT itself."""
        return self.code < 0 and self.code not in (-signal.SIGTERM, -signal.SIGABRT)


def first_exit(lines: Sequence[str]) -> RankExit | None:
    """The rank that failed first; None if the launcher names none, or only one that it has stopped itself."""
    text = "\n".join(lines)
    start = text.rfind(_ROOT_CAUSE)
    if start < 0:
        others = [found for pattern in (_ACCELERATE, _DEEPSPEED) for found in pattern.finditer(text)]
        if others:
            return RankExit(-int(others[-1]["number"]), index=_line(text, others[-1].end()))
        return _first_of_script(lines, text)
    exits = [
        RankExit(int(one["code"]), int(one["rank"]), _line(text, one.end()), one["host"], one["time"])
        for one in _TORCHRUN.finditer(text, max(0, text.rfind(_OTHERS, 0, start)))
    ]
    roots = [item for item in exits if item.index > _line(text, start)]
    if not roots:
        return None
    # Of the ranks that ended since it last looked, torchrun calls the one with the lowest number the first.
    first = roots[0]
    for item in exits:
        later_s = seconds_between(roots[0].time, parse_time(item.time))
        if item.killed_outside_launcher and later_s is not None and abs(later_s) < AT_ONCE_S:
            first = item
            break
    return None if first.code == -signal.SIGTERM else first


def _first_of_script(lines: Sequence[str], text: str) -> RankExit | None:
    """The first rank to fail of a script that has started the ranks itself."""
    for found in reversed(list(_SPAWN.finditer(text))):
        index = _line(text, found.end())
        if found["killed"] is None:
            return RankExit(EXIT_FAILED, int(found["rank"]), index)
        return RankExit(-signal.Signals[found["name"]], int(found["killed"]), index)
    raised = first_raising_rank(lines)
    return None if raised is None else RankExit(EXIT_FAILED, *raised)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position)


class LaunchedRanks:
    """The processes of a launcher's ranks: a thread watches each, as only its parent can wait for it."""

    def __init__(self) -> None:
        self.first_exit: RankExit | None = None
        """The exit of the first rank that failed; None as long as none has."""
        self._codes: dict[int, int | None] = {}
        self._lock = threading.Lock()
        self._watched: dict[int, threading.Thread | None] = {}

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the ranks that have ended; None where it came too late to see."""
        for pid, thread in self._watched.items():
            if thread is not None and not (PROC / str(pid)).exists():
                thread.join(timeout=1.0)
        return list(self._codes.values())

    @property
    def have_saved(self) -> bool:
        """Whether all that have ended say that they have saved or finished, and one that it has saved."""
        codes = {*self.codes}
        return EXIT_STOPPED in codes and codes <= {EXIT_OK, EXIT_STOPPED}

    def watch(self, ranks: Mapping[int, int]) -> None:
        """Watch these processes too: pid -> rank."""
        for pid, rank in ranks.items():
            if pid not in self._watched:
                self._watched[pid] = None
                with contextlib.suppress(OSError):  # it has ended, or the kernel is older than Linux 5.3
                    arguments = (rank, pid, os.pidfd_open(pid))
                    thread = threading.Thread(target=self._await, args=arguments, name="rank", daemon=True)
                    thread.start()
                    self._watched[pid] = thread

    def _await(self, rank: int, pid: int, handle: int) -> None:
        try:
            select.select([handle], [], [])
            code = exit_code_of(handle, pid)
        finally:
            os.close(handle)
        self.record(pid, rank, code)

    def record(self, pid: int, rank: int, code: int | None) -> None:
        """Note the exit code of one of them, which its parent knows for certain."""
        with self._lock:
            self._codes[pid] = self._codes.get(pid) if code is None else code
            if code and self.first_exit is None:
                self.first_exit = RankExit(code, rank)


_NOT_STARTED = re.compile(
    r"^srun: (?:error: (?:Unable to (?:confirm allocation|create step)|Application launch failed)"
    r"|.*aborted before step completely launched).*$",
    re.MULTILINE,
)
_LAUNCH_FAILED = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+)", re.MULTILINE
)
_TASK_EXIT = re.compile(r"^srun: error: (?P<host>\S+): tasks? [\d,\[\]-]+: (?P<how>.*)$", re.MULTILINE)
_OUT_OF_MEMORY = "Out Of Memory"
_ABORTED = re.compile(
    r"^srun: (?:Job step aborted|forcing job termination|error: Timed out waiting for job step)", re.MULTILINE
)


def launch_error(text: str) -> str | None:
    """The message of srun in its output that Slurm could not start the step; None without one."""
    found = _NOT_STARTED.search(text)
    return None if found is None else found[0]


def hosts_without_launch(text: str) -> tuple[str, ...]:
    """The hosts on which srun reports that it could not start a task."""
    return tuple(dict.fromkeys(match["host"] for match in _LAUNCH_FAILED.finditer(text)))


def first_task_exit(attempt: AttemptDir) -> tuple[str, str] | None:
    """(host, message) of the first failed task according to srun; the task may have left no record itself."""
    exits = ((found["host"], found["how"]) for found in _TASK_EXIT.finditer(_output(attempt)))
    return next((found for found in exits if found[1] != f"Exited with exit code {EXIT_STOPPED}"), None)


def was_aborted(attempt: AttemptDir) -> bool:
    """Whether srun aborted the step: its exit code then ignores the tasks that it lost contact with.

    If those are all tasks of the step, as when their host is cut off, the exit code is 0.
    """
    return _ABORTED.search(_output(attempt)) is not None


def node_of_killed_task(attempt: AttemptDir) -> int | None:
    """Node rank of the first failed task if that task was killed, else None."""
    host, how = first_task_exit(attempt) or ("", "")
    hosts = read_rendezvous(attempt).hosts
    return hosts.index(host) if how in ("Killed", "Terminated", _OUT_OF_MEMORY) and host in hosts else None


def was_terminated(attempt: AttemptDir) -> bool:
    """Whether SIGTERM killed the first failed task."""
    return (first_task_exit(attempt) or ("", ""))[1] == "Terminated"


def ran_out_of_memory(attempt: AttemptDir) -> bool:
    """Whether the memory limit of the job killed the first failed task."""
    return (first_task_exit(attempt) or ("", ""))[1] == _OUT_OF_MEMORY


def _output(attempt: AttemptDir) -> str:
    try:
        return attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
