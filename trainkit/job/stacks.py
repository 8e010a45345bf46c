"""Where the ranks of a running attempt are, on demand: asked for by a file, answered by files.

``attempts/NNN/stacks/requests/ID.json`` asks, ``…/requests/ID/rank-NNNN.json`` answers. The agent of a rank
sees the request and signals its ranks, which answer themselves; for those that cannot, the agent answers.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from trainkit.frozen import dataclass
from trainkit.rundir import AttemptDir, read_json, write_json
from trainkit.times import utc_now

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
