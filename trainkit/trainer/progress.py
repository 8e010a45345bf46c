"""Track a rank's step and phase, and detect hangs and missed deadlines after a stop signal.

The training thread writes the step and phase; other threads read them. Each update assigns a single tuple, so
other threads see either the old or the new tuple without a lock.

The watchdog reads stacks in Python while holding the GIL, so the other threads are paused. faulthandler's C
handler, by contrast, reads the stacks of running threads, and crashed in about 1 of 250 attempts in a busy
process. The C handler is therefore installed only for SIGQUIT, as a last resort for ranks that never release
the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from trainkit.errors import EXIT_STUCK
from trainkit.folders import ensure_folder
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan, RequeuePolicy
from trainkit.run.files import read_json, utc_now, write_json
from trainkit.run.rundir import AttemptDir

log = getLogger(__name__)

Phase = Literal[
    "start",
    "rendezvous",
    "connect",
    "build",
    "load",
    "begin",
    "data",
    "forward",
    "backward",
    "forward_backward",
    "update",
    "record",
    "evaluate",
    "save",
    "end",
    "unwatched",
]
"""The phases that a rank goes through, in order.

`forward_backward` is used for pipelines, which alternate forward and backward passes. In phase `record`, the
rank writes metrics. A user's own training loop is in phase `unwatched` after its last step, and wherever the
loop requests this phase.
"""

NUM_RECENT = 64


class CurrentPhase(NamedTuple):
    """The step and phase of a rank at a given time."""

    step: int | None
    """The step being computed; None before the first step."""
    phase: Phase
    phase_index: int
    """Number of phases entered since the step began or, before the first step, since the process started."""
    since_s: float
    """Time at which the phase was entered, from the monotonic clock, in seconds."""


@dataclass(frozen=True)
class RankInfo:
    """Identifies this rank in reports of failures and hangs."""

    rank: int
    node_rank: int
    host: str


class Progress:
    """Tracks this rank's step and phase, and the duration of its recent steps."""

    def __init__(self) -> None:
        self.current = CurrentPhase(None, "start", 0, time.monotonic())
        self._completed: set[Phase] = set()
        self._began_s = 0.0
        self._num_steps = 0
        self._recent_s = [0.0] * NUM_RECENT

    def enter(self, phase: Phase) -> None:
        """Enter a phase of the current step."""
        step, before, index, _ = self.current
        self._completed.add(before)
        self.current = CurrentPhase(step, phase, index + 1, time.monotonic())

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enter a phase for the duration of the block, then return to the previous phase."""
        before = self.current.phase
        self.enter(phase)
        yield
        self.enter(before)

    def begin_step(self, step: int) -> None:
        """Begin a step, in phase `data`."""
        self._completed.add(self.current.phase)
        self._began_s = now = time.monotonic()
        self.current = CurrentPhase(step, "data", 0, now)

    def end_step(self) -> None:
        """Record the duration of the step, and enter phase `record`, which is not part of any step."""
        self.enter("record")
        self._recent_s[self._num_steps % NUM_RECENT] = self.current.since_s - self._began_s
        self._num_steps += 1

    @property
    def last_step_s(self) -> float:
        """Return the duration of the last step in seconds."""
        return self._recent_s[(self._num_steps - 1) % NUM_RECENT]

    @property
    def median_step_s(self) -> float | None:
        """Return the median duration of recent steps in seconds, or None if no step is complete."""
        num_steps = self._num_steps
        return statistics.median(self._recent_s[:num_steps]) if num_steps else None

    def has_completed(self, phase: Phase) -> bool:
        """Return whether this process has completed this phase before; the first time may be slower."""
        return phase in self._completed


POLL_S = 1.0
EXIT_AFTER_S = 60.0
"""A hung rank exits after this many seconds unless the supervisor kills it first."""
SLOW_PHASE_LIMIT_S = 30 * 60.0
"""Minimum time limit in seconds for slow phases: saves, and the first execution of each phase, which may
compile."""
SLOW_PHASES: tuple[Phase, ...] = ("save", "end")
UNWATCHED_PHASES: tuple[Phase, ...] = ("start", "rendezvous", "unwatched")
"""Phases without a time limit: data preparation may take hours, and the startup barrier has its own
timeout."""
CONNECT_LIMIT_S = 240.0
"""Time limit of phase `connect` in seconds; `requeue.hang_min_s` can raise the limit."""
SUSPENDED_S = 10.0
"""If the time between two checks exceeds this many seconds, the process is assumed to have been suspended,
and the gap is not counted as waiting time."""
NUM_COLLECTIVES = 200


def _print_line(text: str) -> None:
    """Print a line to standard error, bypassing the log: the hanging thread may hold the log's lock."""
    with contextlib.suppress(OSError):  # a full disk must not stop the watchdog
        os.write(2, f"{text}\n".encode())


@dataclass(frozen=True)
class Hang:
    """A phase that has exceeded its time limit."""

    current: CurrentPhase
    waited_s: float
    limit_s: float


def phase_limit_s(phase: Phase, progress: Progress, policy: RequeuePolicy) -> float | None:
    """Return the time limit of a phase in seconds, or None for phases without a limit."""
    if policy.hang_factor is None or phase in UNWATCHED_PHASES:
        return None
    if phase == "connect":
        return max(CONNECT_LIMIT_S, policy.hang_min_s)
    median_step_s = progress.median_step_s
    if median_step_s is None:
        return max(SLOW_PHASE_LIMIT_S, policy.hang_min_s)
    limit_s = max(policy.hang_min_s, policy.hang_factor * median_step_s)
    is_fast = phase not in SLOW_PHASES and progress.has_completed(phase)
    return limit_s if is_fast else max(SLOW_PHASE_LIMIT_S, limit_s)


def thread_stacks() -> dict[str, list[str]]:
    """Return the stack frames (innermost first) of all other threads; the main thread comes first."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = sorted(frames, key=lambda ident: ident != main)
    # The identifier makes the keys unique: threads started by C++ have no name, and several threads may share
    # a name.
    return {f"{names.get(ident, 'native')} {ident:#x}": _walk(frames[ident]) for ident in order}


def _walk(innermost: FrameType) -> list[str]:
    """Return a thread's stack frames, innermost first."""
    frames = traceback.walk_stack(innermost)
    return [f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line})" for frame, line in frames]


def write_flight_record(attempt: AttemptDir, rank: int, device: str) -> None:
    """Write this rank's collectives to a file for `job.flight_records`, if torch records collectives."""
    from trainkit.trainer.torch_private import (
        flight_record,
    )  # imported here, because the module `progress` is imported before torch

    if (record := flight_record(device, NUM_COLLECTIVES)) is not None:
        ensure_folder(attempt.stacks_dir)
        write_json(attempt.rank_collectives(rank), record)


class Watchdog:
    """Answers `trainkit stacks`, and terminates this rank if the rank hangs or misses its deadline.

    The watchdog reports a hang in the attempt's folder, and the supervisor then kills all ranks. If the
    supervisor does not kill a hung rank, the rank's watchdog exits with code 70.
    """

    def __init__(
        self, attempt: AttemptDir, rank_info: RankInfo, progress: Progress, stop: StopRequest
    ) -> None:
        self._attempt, self._rank_info = attempt, rank_info
        self._progress, self._stop = progress, stop
        self._file = attempt.rank_stacks(rank_info.rank)
        """File for the stack traces of this rank."""
        self._checked_s = self._resumed_s = time.monotonic()

    def listen(self) -> None:
        """Start responding to SIGQUIT and to requests for stacks."""
        try:
            ensure_folder(self._file.parent)
            # Open the file now, because the C handler cannot open files.
            faulthandler.register(signal.SIGQUIT, self._file.open("a"), all_threads=True)
        except OSError as error:
            log.error(f"cannot write stacks to {self._file} ({error})")
        threading.Thread(target=self._answer, name="stacks", daemon=True).start()

    def watch(self, plan: LaunchPlan) -> None:
        """Start watching for hangs (unless disabled) and for the deadline after a stop signal."""
        threading.Thread(target=self._watch_deadline, args=(plan,), name="deadline", daemon=True).start()
        if plan.requeue.hang_factor is not None:
            threading.Thread(target=self._watch_hangs, args=(plan,), name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Remove the stacks file if it is empty."""
        faulthandler.unregister(signal.SIGQUIT)
        with contextlib.suppress(OSError):
            if self._file.stat().st_size == 0:
                self._file.unlink()

    def _append_stacks(self, reason: str) -> None:
        """Append the stacks of all threads to the stacks file."""
        text = [f"# {utc_now()} rank {self._rank_info.rank} on {socket.gethostname()}: {reason}"]
        for name, frames in thread_stacks().items():
            text += ["", f"Thread {name} (most recent call first):", *(f"  {frame}" for frame in frames)]
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write("\n".join(text) + "\n\n")

    def _answer(self) -> None:
        while True:
            self._stop.stacks_requested.wait()
            self._stop.stacks_requested.clear()
            try:
                self._reply()
            except (OSError, ValueError) as error:
                log.error(f"cannot answer the request for stacks ({error})")

    def _reply(self) -> None:
        """Answer the stack requests in the attempt's folder, in the format of `job.failure.stacks`."""
        rank = self._rank_info.rank
        for request in sorted((self._file.parent / "requests").glob("*.json")):
            reply = request.with_suffix("") / f"rank-{rank:04d}.json"
            if reply.exists() or read_json(request)["rank"] not in (None, rank):
                continue
            step, phase, _, since_s = self._progress.current
            answer = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "how": "asked"}
            answer |= {"step": step, "phase": phase, "since_s": round(time.monotonic() - since_s, 3)}
            write_json(reply, {**answer, "threads": thread_stacks()})

    def _watch_deadline(self, plan: LaunchPlan) -> None:
        """Exit with code 70 if the rank is still running shortly before the end of the grace period.

        Before the rank exits, the stacks of all threads are written to the stacks file. A checkpoint that is
        still being written when the rank exits is not published.
        """
        allowed_s = max(0.0, plan.grace_s - min(10.0, 0.2 * plan.grace_s))
        self._stop.received.wait()
        time.sleep(allowed_s)
        reason = f"still running {allowed_s:.0f} s after {self._stop.signal_name}"
        try:
            self._append_stacks(reason)
            _print_line(f"{reason}: exiting before the job is killed; stacks: {self._file}")
        finally:
            os._exit(EXIT_STUCK)

    def _watch_hangs(self, plan: LaunchPlan) -> None:
        poll_s = min(POLL_S, plan.requeue.hang_min_s / 10)
        record = self._attempt.rank_hang(self._rank_info.rank)
        while True:
            time.sleep(poll_s)
            hang = self.find_hang(time.monotonic(), plan.requeue)
            if hang is None:
                continue
            if self._attempt.waits_in is not None:
                self._resumed_s = time.monotonic()
                continue
            try:
                self._report(hang, record, plan.device)
            except (OSError, RuntimeError, ValueError) as error:
                _print_line(f"the hang report is incomplete ({error})")
            self._wait_for_progress(hang, poll_s)
            _print_line("no longer hanging: training continues")
            with contextlib.suppress(OSError):
                record.unlink(missing_ok=True)

    def find_hang(self, now_s: float, policy: RequeuePolicy) -> Hang | None:
        """Return this rank's hang, or None; call `find_hang` about once per second."""
        if now_s > self._checked_s + SUSPENDED_S:
            self._resumed_s = now_s
        self._checked_s = now_s
        current = self._progress.current
        limit = phase_limit_s(current.phase, self._progress, policy)
        waited_s = now_s - max(current.since_s, self._resumed_s)
        if limit is None or waited_s < policy.hang_min_s / 2:
            return None
        # If one rank hangs, the supervisor kills all ranks, so ranks with a longer time limit report their
        # state now.
        return Hang(current, waited_s, limit) if waited_s > limit or self._others_hang() else None

    def _others_hang(self) -> bool:
        """Return whether any rank reports a hang; a rank that makes progress again removes its report."""
        try:
            return any(self._attempt.hangs_dir.glob("rank-*.json"))
        except OSError:
            return False

    def _report(self, hang: Hang, file: Path, device: str) -> None:
        """Write this rank's step, phase and stack to a hang report for `job.hangs`."""
        step, phase, phase_index, _ = hang.current
        message = f"no progress for {hang.waited_s:.0f} s at step {step}, in {phase}"
        _print_line(f"{message} (limit {hang.limit_s:.0f} s); stacks: {self._file}")
        ensure_folder(self._attempt.hangs_dir)
        record = {**vars(self._rank_info), "step": step, "phase": phase, "beat": phase_index}
        record |= {"waited_s": round(hang.waited_s, 3), "limit_s": round(hang.limit_s, 3)}
        # Report the main thread's stack, because the training loop runs in the main thread.
        stack = _walk(sys._current_frames()[threading.main_thread().ident or 0])
        record |= {"usual_s": self._progress.median_step_s, "time": utc_now(), "stack": stack}
        write_json(file, record)
        self._append_stacks(message)
        write_flight_record(self._attempt, self._rank_info.rank, device)

    def _wait_for_progress(self, hang: Hang, poll_s: float) -> None:
        """Wait until this rank makes progress; exit with code 70 after `EXIT_AFTER_S` without progress."""
        exit_s = time.monotonic() + EXIT_AFTER_S
        while self._progress.current == hang.current:
            if time.monotonic() > exit_s:
                _print_line(f"the supervisor did not kill this rank within {EXIT_AFTER_S:.0f} s: exiting")
                os._exit(EXIT_STUCK)
            time.sleep(poll_s)
