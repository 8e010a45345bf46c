"""What went wrong first in an attempt, and whether a host is to blame for it."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job.exit_codes import signal_exit_code
from trainkit.job.failure.records import agent_verdict, find_verdict, host_verdict
from trainkit.job.outcome import Outcome
from trainkit.job.watch.hangs import hang_verdict
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json

if TYPE_CHECKING:
    from trainkit.cluster.bad_nodes import Kind


_TASK_END = re.compile(r"^srun: error: (?P<host>\S+): tasks? [\d,\[\]-]+: (?P<how>.*)$", re.MULTILINE)
_ABORTED = re.compile(
    r"^srun: (?:Job step aborted|forcing job termination|error: Timed out waiting for job step)", re.MULTILINE
)
_HARDWARE = re.compile(r"CUDA error|ECC|NVLink|Xid|unhandled (?:cuda|system) error|SIGBUS", re.IGNORECASE)


def first_failure(attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> dict[str, Any] | None:
    """The host that was lost, in a hang the rank that the others wait for, else the first failing rank.

    None when nothing failed, or nobody knows what.
    """
    if all(code in (EXIT_OK, EXIT_STOPPED) for code in outcome.exit_codes):
        return None
    if outcome.lost_nodes:
        return host_verdict(attempt, outcome.lost_nodes)
    if outcome.not_started is not None:
        return agent_verdict(None, outcome.not_started)
    if outcome.hung:
        return hang_verdict(attempt, plan, outcome.hangs)
    return _killed_agent(attempt, plan, outcome) or find_verdict(attempt)


def _killed_agent(attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> dict[str, Any] | None:
    """The agent that was killed before anybody failed: only the ranks elsewhere could write what they saw."""
    node_rank = outcome.killed_node
    if node_rank is None or _has_record(attempt, plan, node_rank):
        return None
    verdict = agent_verdict(node_rank, "its agent was killed", signal_exit_code(signal.SIGKILL))
    hosts = hosts_of(attempt)
    return {**verdict, "host": hosts[node_rank]} if node_rank < len(hosts) else verdict


def first_task_end(attempt: AttemptDir) -> tuple[str, str] | None:
    """Host and end of the first task that failed, as srun says; it may not have been able to write it."""
    ends = ((found["host"], found["how"]) for found in _TASK_END.finditer(_said_by_srun(attempt)))
    return next((end for end in ends if end[1] != f"Exited with exit code {EXIT_STOPPED}"), None)


def was_aborted(attempt: AttemptDir) -> bool:
    """Whether srun says that it gave the step up: its exit code then leaves out the tasks it did not hear of.

    With a host that is cut off that can be all of them, and the code 0.
    """
    return _ABORTED.search(_said_by_srun(attempt)) is not None


def _said_by_srun(attempt: AttemptDir) -> str:
    try:
        return attempt.supervisor_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def node_of_killed_task(attempt: AttemptDir) -> int | None:
    """The node of which the first task that failed was killed."""
    host, how = first_task_end(attempt) or ("", "")
    hosts = hosts_of(attempt)
    return hosts.index(host) if how in ("Killed", "Terminated") and host in hosts else None


def hosts_of(attempt: AttemptDir) -> list[str]:
    """The hosts of the step by node rank; empty when its ranks have not met, or are all on this machine."""
    try:
        return list(read_json(attempt.rendezvous_file)["hosts"])
    except (OSError, ValueError, KeyError):
        return []


def _has_record(attempt: AttemptDir, plan: LaunchPlan, node_rank: int) -> bool:
    """Whether a rank of a node left a record: then its agent was there to the end."""
    first = plan.first_rank_of(node_rank)
    return any(attempt.rank_error(rank).exists() for rank in range(first, first + plan.workers_of(node_rank)))


def blamed_host(verdict: Mapping[str, Any]) -> tuple[str, Kind] | None:
    """The host that a failure speaks against, and how; None for what a program did to itself."""
    if not verdict.get("host"):
        return None
    host, code = str(verdict["host"]), verdict.get("exit_code")
    if verdict.get("node"):
        return host, "preflight"
    if verdict.get("type") == "HostLost":
        return host, "died"
    struck = isinstance(code, int) and code > 128 and code != signal_exit_code(6)
    if verdict.get("type") == "Hang" or (struck and verdict.get("type") == "exit"):
        return host, "culprit"
    return (host, "culprit") if _HARDWARE.search(str(verdict.get("message"))) else None
