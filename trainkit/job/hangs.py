"""Reads the reports of hanging ranks and finds the ranks that block the others."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainkit.errors import EXIT_STUCK
from trainkit.job.blame import Blame, blame_by_stacks, find_blame
from trainkit.job.flight_records import read_flights
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import RankFailure
from trainkit.run.files import read_each, refresh_listing
from trainkit.run.record import read_rendezvous
from trainkit.run.rundir import AttemptDir


@dataclass(frozen=True)
class HangRecord:
    """The report of a rank that has made no progress for too long."""

    rank: int
    node_rank: int
    host: str
    step: int | None
    """The step that the rank was executing; None before the first step."""
    phase: str
    beat: int
    """The number of phases that the rank had entered in its step; used to compare ranks in the same step."""
    waited_s: float
    """Seconds since the rank last made progress."""
    limit_s: float
    """Seconds without progress after which the rank is considered hung."""
    usual_s: float | None
    """The median duration of the rank's recent steps in seconds, or None before the first step."""
    time: str
    stack: tuple[str, ...]
    """The frames of the rank's training thread, innermost first."""

    @property
    def summary(self) -> str:
        """Return the hang report as one sentence."""
        usual = "" if self.usual_s is None else f"; a step usually takes {self.usual_s:.2g} s"
        return f"no progress for {self.waited_s:.0f} s, in {self.phase}{usual}"

    @property
    def position(self) -> tuple[int, int]:
        """Return the step and phase as a tuple that can be compared between ranks."""
        return (-1 if self.step is None else self.step, self.beat)


def read_hangs(attempt: AttemptDir) -> list[HangRecord]:
    """Read all hang reports, ordered by rank."""
    return read_each(HangRecord, attempt.hangs_dir)


def missing_ranks(plan: LaunchPlan, records: Sequence[HangRecord]) -> list[int]:
    """Return the ranks without a hang report: their processes are stopped, or their hosts are lost."""
    reported = {record.rank for record in records}
    return [rank for rank in range(plan.world_size) if rank not in reported]


def silent_hosts(attempt: AttemptDir, plan: LaunchPlan, records: Sequence[HangRecord]) -> list[str]:
    """Return the hosts where no rank reported the hang."""
    reported = {record.node_rank for record in records}
    hosts = (_host_of(attempt, node, records) for node in range(plan.num_nodes) if node not in reported)
    return [host for host in hosts if host is not None]


SILENT = "a command without output"
"""The prefix of the phase in the hang report of a command without output."""
CONNECT_HINT = (
    "the ranks found each other but cannot exchange tensors: `trainkit doctor --nodes N` measures the links "
    "between hosts, `launch.network` sets the interface, and `launch.network: debug` sets NCCL_DEBUG=INFO"
)


def hang_failure(attempt: AttemptDir, plan: LaunchPlan, records: Sequence[HangRecord]) -> RankFailure:
    """Return a failure of type ``Hang`` for the rank that blocks the others. `records` must not be empty.

    If flight records show a waiting rank, they alone determine the ranks that the failure names. If no flight
    record shows a waiting rank, the failure names the first rank without a hang report or, if all ranks
    reported, the rank that is furthest behind. If no rank is behind the others, the failure names no host.
    """
    behind, is_distinct = _furthest_behind(records)
    missing = missing_ranks(plan, records)
    stacks = {record.rank: record.stack for record in records}
    is_silence = all(record.phase.startswith(SILENT) for record in records)
    blame = find_blocking(attempt, plan, stacks, is_silence=is_silence)
    if blame is not None:
        failure = blamed_failure(attempt, plan, blame, records)
        own = next((record for record in records if record.rank == failure.rank), behind)
        who = "" if own.rank == failure.rank or failure.rank is None else f"rank {own.rank}: "
        # For a command without output, the phase already names the blocking rank.
        text = blame.text if is_silence else f"{blame.text}; {who}{own.summary}"
        return replace(failure, message=text, time=min(record.time for record in records), step=own.step)
    if missing:
        rank, message = missing[0], _describe_missing(missing, behind)
        node_rank = node_of(plan, rank)
        host = _host_of(attempt, node_rank, records)
    else:
        rank, node_rank, host = behind.rank, behind.node_rank, behind.host
        message = behind.summary
        if not is_distinct or is_silence:
            # On GPUs, every rank waits for its own device, regardless of which device does not respond.
            host, message = None, f"{message}; no rank is behind the others"
    return RankFailure(
        rank=rank,
        node_rank=node_rank,
        host=host,
        time=min(record.time for record in records),
        step=behind.step,
        type="Hang",
        message=message,
        exit_code=EXIT_STUCK,
        hint=CONNECT_HINT if behind.phase == "connect" and not missing else None,
        final=False,
    )


def find_blocking(
    attempt: AttemptDir, plan: LaunchPlan, stacks: Mapping[int, Sequence[str]], *, is_silence: bool
) -> Blame | None:
    """Find the ranks that block the other ranks, using flight records and the responding ranks' stacks.

    `is_silence` means that a command has produced no output. The ranks of a command report stacks, but
    neither step nor phase.
    """
    silent = [rank for rank in range(plan.world_size) if rank not in stacks]
    blame = find_blame(read_flights(attempt, plan.world_size), silent, stacks)
    if blame is None and is_silence and plan.device == "cpu":
        return blame_by_stacks(stacks, silent)
    return blame


def blamed_failure(
    attempt: AttemptDir, plan: LaunchPlan, blame: Blame, records: Sequence[HangRecord] = ()
) -> RankFailure:
    """Return a failure naming the ranks at fault.

    The failure names a host only if all ranks at fault run on that host and the host may be the cause.
    """
    nodes = [node_of(plan, rank) for rank in blame.ranks]
    return RankFailure(
        rank=blame.ranks[0] if blame.ranks else None,
        node_rank=nodes[0] if nodes else None,
        host=_host_of(attempt, nodes[0], records) if len({*nodes}) == 1 and not blame.differs else None,
        type="Hang",
        message=blame.text,
        exit_code=EXIT_STUCK,
        final=False,
    )


def _furthest_behind(records: Sequence[HangRecord]) -> tuple[HangRecord, bool]:
    """Return the report of the rank that is furthest behind, and whether it is clearly behind the others.

    If all ranks are at the same position, the blocking rank is the one whose stack differs from the
    majority's.
    """
    position = min(record.position for record in records)
    same = [record for record in records if record.position == position]
    stack, count = Counter(record.stack for record in same).most_common(1)[0]
    minority = [record for record in same if record.stack != stack] if 2 * count > len(same) else []
    candidates = minority or same
    is_distinct = len(candidates) < len(records) or len(records) == 1
    return min(candidates, key=lambda record: record.rank), is_distinct


def node_of(plan: LaunchPlan, rank: int) -> int:
    """Return the node rank of the node on which a rank runs."""
    return max(node for node in range(plan.num_nodes) if plan.first_rank_of(node) <= rank)


def _host_of(attempt: AttemptDir, node_rank: int, records: Sequence[HangRecord]) -> str | None:
    """Return the host of a node, taken from a hang report or the rendezvous, or None if unknown."""
    for record in records:
        if record.node_rank == node_rank and record.host:
            return record.host
    hosts = read_rendezvous(attempt).hosts
    if node_rank < len(hosts):
        return hosts[node_rank]
    # A missing rendezvous file means that the run uses a single machine.
    return None if attempt.rendezvous_file.exists() else socket.gethostname()


def _describe_missing(missing: Sequence[int], waiting: HangRecord) -> str:
    more = len(missing) - 1
    others = "" if more == 0 else " (nor does 1 other rank)" if more == 1 else f" (nor do {more} other ranks)"
    return (
        f"does not respond{others}: its process is stopped or its host is lost; rank {waiting.rank} has"
        f" made no progress for {waiting.waited_s:.0f} s, in {waiting.phase}"
    )


GATHER_S = 5.0
"""Seconds to wait after the first hang report for reports from other ranks. Ranks that wait for each other
report a hang at almost the same time."""


class HangWatch:
    """Polls for hang reports in one attempt."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._first_s: float | None = None

    def poll(self) -> list[HangRecord]:
        """Return the hang reports; empty until every rank has had time to write a report."""
        records = read_hangs(self._attempt)
        if not records:
            self._first_s = None  # the rank has made progress since its report
        elif self._first_s is None:
            self._first_s = time.monotonic()
        elif time.monotonic() > self._first_s + GATHER_S:
            # On a network filesystem, a cached folder listing may lack reports from other hosts.
            refresh_listing(self._attempt.hangs_dir)
            return read_hangs(self._attempt)
        return []
