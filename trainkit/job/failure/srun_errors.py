"""Parses srun's messages about a step: why it could not start, and which task failed first."""

from __future__ import annotations

import re

from trainkit.errors import EXIT_STOPPED
from trainkit.run.files import read_json
from trainkit.run.rundir import AttemptDir

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
    hosts = hosts_of(attempt)
    return hosts.index(host) if how in ("Killed", "Terminated", _OUT_OF_MEMORY) and host in hosts else None


def ran_out_of_memory(attempt: AttemptDir) -> bool:
    """Whether the memory limit of the job killed the first failed task."""
    return (first_task_exit(attempt) or ("", ""))[1] == _OUT_OF_MEMORY


def hosts_of(attempt: AttemptDir) -> list[str]:
    """The hosts of the step by node rank; empty before the rendezvous, and for a run without Slurm."""
    try:
        return list(read_json(attempt.rendezvous_file)["hosts"])
    except (OSError, ValueError, KeyError):
        return []


def _output(attempt: AttemptDir) -> str:
    try:
        return attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
