"""Determines from a launcher's output which process failed first.

torchrun, accelerate and DeepSpeed report ranks; srun reports tasks. torchrun, accelerate and DeepSpeed exit
with 1 or with the exit code of the failed rank modulo 256, for example 247 for -9 (killed by SIGKILL).
Because a launcher's exit code can be ambiguous, the agent also watches the ranks started by its launcher.
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
"""Matches a rank's entry in torchrun's error report, which accelerate also prints if it starts several
ranks."""
_OTHERS = "Failures:"
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ACCELERATE = re.compile(r"in \w+_launcher\n.*\n.* died with <Signals\.\w+: (?P<number>\d+)>")
_SPAWN = re.compile(
    r"^(?:-- Process (?P<rank>\d+) terminated with the following error:"
    r"|.*ProcessExitedException: process (?P<killed>\d+) terminated with signal (?P<name>SIG\w+))",
    re.MULTILINE,
)
"""Matches the error report printed by torch.multiprocessing.spawn."""
_DEEPSPEED = re.compile(r"exits with return code = -(?P<number>\d+)")
"""Matches DeepSpeed's error report, which always names the command of the last rank, even if another rank
failed."""
AT_ONCE_S = 5.0
"""Seconds within which failures of ranks are considered simultaneous. torchrun itself kills remaining ranks
after 30 s."""


@dataclass(frozen=True)
class RankExit:
    """The exit of a rank that was started by a launcher."""

    code: int
    """The exit code; negative if a signal killed the process."""
    rank: int | None = None
    """The global rank, or None if the launcher's output does not contain the rank."""
    index: int = 0
    """The line number, in the launcher's output, where the exit is reported."""
    host: str = ""
    time: str = ""

    @property
    def killed_outside_launcher(self) -> bool:
        """Return whether the rank was killed by a signal that the launcher did not send.

        Returns False for SIGTERM and SIGABRT, because launchers send SIGTERM themselves, and a rank may abort
        itself.
        """
        return self.code < 0 and self.code not in (-signal.SIGTERM, -signal.SIGABRT)


def first_exit(lines: Sequence[str]) -> RankExit | None:
    """Return the first failed rank according to a launcher's output.

    Returns None if the launcher reports no failed rank, or only a rank that the launcher itself terminated.
    """
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
    # Among the ranks that exited since its last check, torchrun reports the lowest rank as the first failure.
    first = roots[0]
    for item in exits:
        later_s = seconds_between(roots[0].time, parse_time(item.time))
        if item.killed_outside_launcher and later_s is not None and abs(later_s) < AT_ONCE_S:
            first = item
            break
    return None if first.code == -signal.SIGTERM else first


def _first_of_script(lines: Sequence[str], text: str) -> RankExit | None:
    """Return the first failed rank, for scripts that start their ranks themselves."""
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
    """The processes of ranks that were started by a launcher.

    Each process is watched by a thread, because only the parent of a process can wait for it with `waitpid`.
    """

    def __init__(self) -> None:
        self.first_exit: RankExit | None = None
        """The exit of the rank that failed first, or None if no rank has failed."""
        self._codes: dict[int, int | None] = {}
        self._lock = threading.Lock()
        self._watched: dict[int, threading.Thread | None] = {}

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def codes(self) -> list[int | None]:
        """The exit codes of the exited ranks; None for an exit code that could not be read in time."""
        for pid, thread in self._watched.items():
            if thread is not None and not (PROC / str(pid)).exists():
                thread.join(timeout=1.0)
        return list(self._codes.values())

    @property
    def have_saved(self) -> bool:
        """Return whether all exited ranks succeeded or saved, and at least one rank saved."""
        codes = {*self.codes}
        return EXIT_STOPPED in codes and codes <= {EXIT_OK, EXIT_STOPPED}

    def watch(self, ranks: Mapping[int, int]) -> None:
        """Start watching the processes in `ranks`, which maps pids to ranks."""
        for pid, rank in ranks.items():
            if pid not in self._watched:
                self._watched[pid] = None
                # The process has exited, or the kernel is older than Linux 5.3.
                with contextlib.suppress(OSError):
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
        """Record the exit code of a process as read by its parent process."""
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
    """Return srun's error message if Slurm could not start the step, else None."""
    found = _NOT_STARTED.search(text)
    return None if found is None else found[0]


def hosts_without_launch(text: str) -> tuple[str, ...]:
    """Return the hosts on which srun could not start a task, according to srun's error messages."""
    return tuple(dict.fromkeys(match["host"] for match in _LAUNCH_FAILED.finditer(text)))


def first_task_exit(attempt: AttemptDir) -> tuple[str, str] | None:
    """Return the host and message of the first failed task according to srun's output, else None."""
    exits = ((found["host"], found["how"]) for found in _TASK_EXIT.finditer(_output(attempt)))
    return next((found for found in exits if found[1] != f"Exited with exit code {EXIT_STOPPED}"), None)


def was_aborted(attempt: AttemptDir) -> bool:
    """Return whether srun aborted the step. After an abort, srun's exit code does not reflect lost tasks.

    If srun has lost contact with all tasks, for example because their host is disconnected, srun exits with
    0.
    """
    return _ABORTED.search(_output(attempt)) is not None


def node_of_killed_task(attempt: AttemptDir) -> int | None:
    """Return the node rank of the first failed task if a signal killed it, else None."""
    host, how = first_task_exit(attempt) or ("", "")
    hosts = read_rendezvous(attempt).hosts
    return hosts.index(host) if how in ("Killed", "Terminated", _OUT_OF_MEMORY) and host in hosts else None


def was_terminated(attempt: AttemptDir) -> bool:
    """Return whether SIGTERM killed the first failed task."""
    return (first_task_exit(attempt) or ("", ""))[1] == "Terminated"


def ran_out_of_memory(attempt: AttemptDir) -> bool:
    """Return whether the first failed task was killed for exceeding the job's memory limit."""
    return (first_task_exit(attempt) or ("", ""))[1] == _OUT_OF_MEMORY


def _output(attempt: AttemptDir) -> str:
    try:
        return attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
