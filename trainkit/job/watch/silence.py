"""A COMMAND that prints nothing: what its ranks wait for, and when that counts as a hang.

A rank that waits for a lock file which a killed process has left waits forever and prints nothing. Silence
alone is no failure, since a script may print into a file of its own: it is reported, and ends the attempt
only where `requeue.silence_s` says so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainkit.folders import ensure_folder
from trainkit.job.failure.stacks import Gathering, Reply, group_replies
from trainkit.job.hangs import GATHER_S, HangRecord, node_of
from trainkit.job.processes import log_line
from trainkit.plan.launch import LaunchPlan
from trainkit.run.events import log_event
from trainkit.run.files import parse_time, refresh_listing, utc_now, write_json
from trainkit.run.rundir import AttemptDir

SILENCE_POLL_S = 10.0
LOOK_S = 30.0
"""How long the agents may take to look at their ranks: py-spy takes up to 20 s for a process."""


class OutputWatch:
    """Watches the files that a run changes while it makes progress."""

    def __init__(self, attempt: AttemptDir, limit_s: float, *, with_logs: bool) -> None:
        """`with_logs` includes what the ranks print, else events of the trainer; `limit_s` sets the pace."""
        self._attempt = attempt
        self._with_logs = with_logs
        self._pause_s = min(SILENCE_POLL_S, limit_s / 4)
        # Not the files' own times, which are those of other hosts' clocks.
        self._changed_s = self._polled_s = time.monotonic()
        self._seen: dict[str, tuple[int, int]] = {}
        self._at_start: dict[str, tuple[int, int]] | None = None

    @property
    def has_output(self) -> bool:
        """Whether a rank has printed anything, or metrics or a heartbeat were written since the start."""
        run, before = self._attempt.run, self._at_start or {}
        signs = (str(run.metrics_file), str(run.heartbeat_file))
        # An agent prints into the log of its node before its ranks start.
        logs = (size for name, (size, _) in self._seen.items() if Path(name).name.startswith("rank-"))
        return any(logs) or any(self._seen.get(name) != before.get(name) for name in signs)

    def poll(self) -> float | None:
        """Seconds since the last change; None when it is too early to check again. Raises OSError."""
        now_s = time.monotonic()
        if now_s < self._polled_s + self._pause_s:
            return None
        was_suspended, self._polled_s = now_s > self._polled_s + 2 * self._pause_s + GATHER_S, now_s
        seen = self._files()
        self._at_start = seen if self._at_start is None else self._at_start
        if seen != self._seen or was_suspended:
            self._seen, self._changed_s = seen, now_s
        return now_s - self._changed_s

    def reset(self) -> None:
        """Count from now."""
        self._changed_s = time.monotonic()

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of what a running command changes."""
        run, logs = self._attempt.run, self._attempt.logs_dir
        files = [run.metrics_file, run.heartbeat_file]
        if self._with_logs:
            refresh_listing(logs)
            files += [*logs.glob("rank-*.log"), *logs.glob("node-*.log")]
        else:
            files.append(run.events_file)
        found = {}
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                status = file.stat()
                found[str(file)] = status.st_size, status.st_mtime_ns
        return found


@dataclass(frozen=True)
class Silence:
    """What the ranks of a silent command wait for, as far as it can be seen."""

    text: str
    """One sentence."""
    rank: int | None = None
    host: str | None = None
    lock: str | None = None
    is_left: bool = False
    """Whether a rank certainly waits for that lock file, which was there before and no process has open."""


def explain_silence(replies: Sequence[Reply], started: str = "") -> Silence:
    """What the ranks of an attempt wait for that began at the time `started`, from their stacks and locks."""
    found = [(reply, lock) for reply in replies for lock in reply.locks]
    holders = {lock.path: f"{lock.holder} on {reply.host}" for reply, lock in reversed(found) if lock.holder}
    in_the_way = [
        lock
        for reply, lock in found
        # A rank with a stack that does not show that it waits has the lock itself, or works next to a holder.
        if lock.is_certain or not reply.threads or not lock.holder
    ]
    if in_the_way:
        # Of several, the one that a stack shows, then one that nobody releases, then the newest.
        lock = max(in_the_way, key=lambda lock: (lock.is_certain, lock.path not in holders, lock.time))
        seen = [(reply, other) for reply, other in found if other.path == lock.path]
        hosts = ", ".join(sorted({reply.host for reply, _ in seen}))
        first, *others = [reply for reply, other in seen if other.is_certain >= lock.is_certain]
        more = f" (and {len(others)} more)" if others else ""
        waits = "waits" if lock.is_certain else "may wait"
        text = (
            f"rank {first.rank} on {first.host}{more} {waits} for the lock file {lock.path} of {lock.time}, "
            f"which {holders.get(lock.path, f'no process on {hosts}')} has open"
        )
        made, began = parse_time(lock.time), parse_time(started)
        is_older = made is not None and began is not None and made < began
        is_left = lock.is_certain and lock.path not in holders and is_older
        return Silence(text, first.rank, first.host, lock.path, is_left)
    if not replies:
        return Silence(f"none of its ranks could be looked at within {LOOK_S:.0f} s")
    groups = group_replies(replies)
    first = groups[0][0] if groups else replies[0]
    where = f" is in {first.main_stack[0]}" if first.main_stack else f": {first.problem}"
    return Silence(f"rank {first.rank} on {first.host}{where}", first.rank, first.host)


class SilenceWatch:
    """Looks at a command when no rank prints anything and no metrics and no heartbeat are written.

    After `RequeuePolicy.look_s` it logs what the ranks wait for, as an event ``silent``, if none has printed
    anything yet or a lock file may be in the way; ``silent_over`` follows with the next output. After
    `requeue.silence_s` it writes the reports of a hang, which ranks of the built-in trainer write themselves.
    """

    def __init__(self, attempt: AttemptDir, plan: LaunchPlan) -> None:
        """`plan.requeue.look_s` must not be None."""
        policy = plan.requeue
        assert policy.look_s is not None
        self._attempt = attempt
        self._plan = plan
        self._look_s = policy.look_s
        self._limit_s = float("inf") if policy.silence_s is None else policy.silence_s
        self._output = OutputWatch(attempt, self._look_s, with_logs=True)
        self._started = utc_now()
        self._silent_s = 0.0
        self._look: Gathering | None = None
        self._silence: Silence | None = None
        self._is_reported = False

    def poll(self) -> None:
        """Look at the ranks once there is silence, and report them if it lasts. Raises OSError."""
        silent_s = self._output.poll()
        if silent_s is not None:
            if silent_s < self._silent_s:
                if self._is_reported:
                    log_event(self._attempt.run, self._attempt.number, "silent_over")
                self._forget()
            self._silent_s = silent_s
        if self._silent_s <= self._look_s:
            return
        if self._look is None:
            self._look = Gathering(self._attempt, range(self._plan.world_size), None, LOOK_S)
        replies = self._look.poll()
        if replies is None:
            return
        if self._silence is None:
            self._silence = explain_silence(replies, self._started)
            self._log(self._silence)
        if self._silent_s > self._limit_s:
            self._report(self._silence)
            self._forget()
            self._output.reset()

    def _forget(self) -> None:
        if self._look is not None:
            self._look.withdraw()
        self._look, self._silence, self._is_reported, self._silent_s = None, None, False, 0.0

    def _log(self, silence: Silence) -> None:
        if self._output.has_output and silence.lock is None:
            return  # many a script prints seldom
        before = "" if self._output.has_output else ", and none before"
        reason = f"no output for {self._silent_s:.0f} s{before}; {silence.text}"
        log_line(f"attempt {self._attempt.number}: {reason}")
        self._is_reported = True
        log_event(
            self._attempt.run,
            self._attempt.number,
            "silent",
            rank=silence.rank,
            host=silence.host,
            lock=silence.lock,
            reason=reason,
        )

    def _report(self, silence: Silence) -> None:
        """One report per rank, all alike: nothing tells which one blocks the others."""
        ensure_folder(self._attempt.hangs_dir)
        plan = self._plan
        for rank in range(plan.world_size):
            record = HangRecord(
                rank=rank,
                node_rank=node_of(plan, rank),
                host="",
                step=None,
                phase=f"a command without output: {silence.text}",
                beat=0,
                waited_s=round(self._silent_s, 3),
                limit_s=self._limit_s,
                usual_s=None,
                time=utc_now(),
                stack=(),
                is_final=silence.is_left,
            )
            write_json(self._attempt.rank_hang(rank), asdict(record))
