"""The first failure of an attempt, and the host that it implicates."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.errors import EXIT_OK, EXIT_STOPPED
from trainkit.job.decision import Outcome
from trainkit.job.failure.records import (
    agent_failure,
    first_rank_failure,
    lost_host_failure,
    out_of_memory_fields,
)
from trainkit.job.failure.srun_errors import hosts_of, ran_out_of_memory
from trainkit.job.hangs import hang_failure
from trainkit.job.signals import signal_exit_code
from trainkit.plan.launch import LaunchPlan
from trainkit.run.failure import RankFailure
from trainkit.run.rundir import AttemptDir

if TYPE_CHECKING:
    from trainkit.cluster.bad_nodes import Kind

_HARDWARE = re.compile(r"CUDA error|ECC|NVLink|Xid|unhandled (?:cuda|system) error|SIGBUS", re.IGNORECASE)
_NOT_HARDWARE = re.compile(r"invalid device ordinal", re.IGNORECASE)
"""The CUDA error of a process that does not see the GPU it asks for, as with one GPU bound to each task."""


def find_first_failure(attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> RankFailure | None:
    """The first failure: a lost host, else in a hang the blocking rank, else the first failing rank.

    None when nothing failed or the failure is unknown.
    """
    if all(code in (EXIT_OK, EXIT_STOPPED) for code in outcome.exit_codes):
        return None
    if outcome.lost_nodes:
        return lost_host_failure(attempt, outcome.lost_nodes)
    if outcome.launch_error is not None:
        return agent_failure(None, outcome.launch_error)
    if outcome.hung:
        return hang_failure(attempt, plan, outcome.hangs)
    return _killed_agent_failure(attempt, plan, outcome) or first_rank_failure(attempt)


def _killed_agent_failure(attempt: AttemptDir, plan: LaunchPlan, outcome: Outcome) -> RankFailure | None:
    """The failure of an agent that was killed before any rank failed: its ranks left no record."""
    node_rank = outcome.killed_node
    if node_rank is None or _has_record(attempt, plan, node_rank):
        return None
    failure = agent_failure(node_rank, "its agent was killed", signal_exit_code(signal.SIGKILL))
    if ran_out_of_memory(attempt):
        failure = replace(failure, **out_of_memory_fields(signal_exit_code(signal.SIGKILL)))
    hosts = hosts_of(attempt)
    return replace(failure, host=hosts[node_rank]) if node_rank < len(hosts) else failure


def _has_record(attempt: AttemptDir, plan: LaunchPlan, node_rank: int) -> bool:
    """Whether any rank of a node left a failure record, which means that its agent was still alive."""
    first = plan.first_rank_of(node_rank)
    return any(attempt.rank_error(rank).exists() for rank in range(first, first + plan.workers_of(node_rank)))


def suspect_host(failure: RankFailure) -> tuple[str, Kind] | None:
    """The host that a failure implicates, and as what kind; None when the program itself failed."""
    if not failure.host:
        return None
    if failure.node:
        return failure.host, "preflight"
    if failure.type == "HostLost":
        return failure.host, "died"
    message = str(failure.message)
    is_hardware = _HARDWARE.search(message) and not _NOT_HARDWARE.search(message)
    is_culprit = failure.type == "Hang" or (failure.was_killed and failure.type == "exit") or is_hardware
    return (failure.host, "culprit") if is_culprit else None
