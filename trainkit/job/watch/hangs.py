"""Hangs of ranks: what the watchdogs of an attempt wrote, and the verdict that follows from it."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.errors import EXIT_STUCK
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import AttemptDir, read_json


@dataclass(frozen=True)
class HangRecord:
    """Where a rank stood when it had come no further for too long."""

    rank: int
    node_rank: int
    host: str
    step: int | None
    """The step that was being computed; None before the first."""
    phase: str
    beat: int
    """How many phases of its step it had entered, so that of two ranks the one that is behind is known."""
    waited_s: float
    limit_s: float
    usual_s: float | None
    """The median of its last steps; None before the first."""
    time: str
    stack: tuple[str, ...]
    """The frames of its training thread, the innermost first."""

    @property
    def words(self) -> str:
        """What the record says, for a person."""
        usual = "" if self.usual_s is None else f"; a step usually takes {self.usual_s:.2g} s"
        return f"no progress for {self.waited_s:.0f} s, in {self.phase}{usual}"

    @property
    def position(self) -> tuple[int, int]:
        """How far it had come."""
        return (-1 if self.step is None else self.step, self.beat)


def read_hangs(attempt: AttemptDir) -> list[HangRecord]:
    """The records of the ranks that came no further, by rank; empty while all are well."""
    records = []
    for path in sorted(attempt.hangs_dir.glob("rank-*.json")):
        try:
            value = read_json(path)
            records.append(HangRecord(**{**value, "stack": tuple(value["stack"])}))
        except (OSError, ValueError, TypeError, KeyError):
            continue  # damaged; the others still tell
    return records


def missing_ranks(plan: LaunchPlan, records: Sequence[HangRecord]) -> list[int]:
    """The ranks that did not even say that they hang: stopped, or their host is gone."""
    told = {record.rank for record in records}
    return [rank for rank in range(plan.world_size) if rank not in told]


def silent_hosts(attempt: AttemptDir, plan: LaunchPlan, records: Sequence[HangRecord]) -> list[str]:
    """The hosts of a hang of which no rank said a word."""
    heard = {record.node_rank for record in records}
    hosts = (_host_of(attempt, node, records) for node in range(plan.num_nodes) if node not in heard)
    return [host for host in hosts if host is not None]


def hang_verdict(attempt: AttemptDir, plan: LaunchPlan, records: Sequence[HangRecord]) -> dict[str, Any]:
    """Who held the others up, as `failures.find_verdict` gives a failure, with the type ``Hang``.

    That is the first rank without a record, or else the one that is behind the others; without a host where
    none is. `records` holds at least one.
    """
    behind, stands_out = _furthest_behind(records)
    missing = missing_ranks(plan, records)
    if missing:
        rank, message = missing[0], _words_of_missing(missing, behind)
        node_rank = _node_of(plan, rank)
        host = _host_of(attempt, node_rank, records)
    else:
        rank, node_rank, host = behind.rank, behind.node_rank, behind.host
        message = behind.words
        if not stands_out:
            # On GPUs all of them wait for their device, whichever it is that does not answer.
            host, message = None, f"{message}; no rank is behind the others"
    return {
        "rank": rank,
        "node_rank": node_rank,
        "host": host,
        "time": min(record.time for record in records),
        "step": behind.step,
        "type": "Hang",
        "message": message,
        "exit_code": EXIT_STUCK,
        "final": False,
    }


def _furthest_behind(records: Sequence[HangRecord]) -> tuple[HangRecord, bool]:
    """The rank that is behind, and whether it is the only one that can be.

    Of ranks at the same position it is one that is elsewhere in the code than most: those wait for it.
    """
    position = min(record.position for record in records)
    there = [record for record in records if record.position == position]
    stack, count = Counter(record.stack for record in there).most_common(1)[0]
    odd = [record for record in there if record.stack != stack] if 2 * count > len(there) else []
    candidates = odd or there
    stands_out = len(candidates) < len(records) or len(records) == 1
    return min(candidates, key=lambda record: record.rank), stands_out


def _node_of(plan: LaunchPlan, rank: int) -> int:
    return max(node for node in range(plan.num_nodes) if plan.first_rank_of(node) <= rank)


def _host_of(attempt: AttemptDir, node_rank: int, records: Sequence[HangRecord]) -> str | None:
    """The host of a node, from a rank beside the silent one, or from where the ranks met."""
    for record in records:
        if record.node_rank == node_rank:
            return record.host
    try:
        return str(read_json(attempt.rendezvous_file)["hosts"][node_rank])
    except FileNotFoundError:
        return socket.gethostname()  # only ranks that are all on one machine meet without it
    except (OSError, ValueError, LookupError):
        return None


def _words_of_missing(missing: Sequence[int], waiting: HangRecord) -> str:
    more = len(missing) - 1
    others = f", nor {'does' if more == 1 else 'do'} {more} more" if more else ""
    return (
        f"does not answer{others}: stopped, or the host is gone; rank {waiting.rank} has come no further for"
        f" {waiting.waited_s:.0f} s, in {waiting.phase}"
    )


GATHER_S = 5.0
"""Ranks that wait for each other notice it within a moment of each other."""


class HangWatch:
    """Looks for reports of one attempt."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._first_s: float | None = None

    def look(self) -> list[HangRecord]:
        """The reports of a hang, once all who could tell of it have had the time to; empty before."""
        records = read_hangs(self._attempt)
        if not records:
            self._first_s = None  # it went on after all
        elif self._first_s is None:
            self._first_s = time.monotonic()
        elif time.monotonic() > self._first_s + GATHER_S:
            return records
        return []
