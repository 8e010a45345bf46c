"""Watchdogs of a rank: that it leaves before a deadline, and that it says so when it comes no further."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.errors import EXIT_STUCK
from trainkit.job.signals import StopRequest
from trainkit.plan.launch import LaunchPlan, RequeuePolicy
from trainkit.rundir import AttemptDir, utc_now, write_json
from trainkit.trainer.progress import Phase, Position, Pulse
from trainkit.trainer.rank_stacks import RankStacks, training_stack

POLL_S = 1.0
LEAVE_AFTER_S = 60.0
"""How long a rank that hangs waits to be ended by its supervisor before it leaves by itself."""
PATIENT_S = 30 * 60.0
"""Least limit of what may take long: whatever is done for the first time, which may compile, and saving."""
PATIENT: tuple[Phase, ...] = ("save", "end")
UNWATCHED: tuple[Phase, ...] = ("start", "meet")
"""Text may have to be tokenised first, which may take hours; and the meeting has a limit of its own."""
ASLEEP_S = 10.0
"""A watchdog that was away for so long was stopped with its whole process: that time is not counted."""
NUM_COLLECTIVES = 200


def deadline_margin_s(grace_s: float) -> float:
    """How long before the end of the grace time a stuck rank leaves."""
    return min(10.0, 0.2 * grace_s)


def watch_deadline(stop: StopRequest, grace_s: float, stacks: RankStacks) -> None:
    """From the stop signal on, give this process until shortly before `grace_s` to be gone.

    Then write the stacks of all its threads and end it with exit code 70. Checkpoints that are published
    stay; one that was being written stays unpublished.
    """

    def watch() -> None:
        stop.received.wait()
        time.sleep(max(0.0, grace_s - deadline_margin_s(grace_s)))
        why = f"still not stopped {grace_s - deadline_margin_s(grace_s):.0f} s after {stop.signal_name}"
        try:
            stacks.append(why)
            _say(f"{why}: leaving before the job is killed; the stacks are in {stacks.file}")
        finally:
            os._exit(EXIT_STUCK)

    threading.Thread(target=watch, name="deadline", daemon=True).start()


def _say(text: str) -> None:
    """Print a line past the log, whose lock the thread that hangs may hold."""
    with contextlib.suppress(OSError):  # a disk that is full must not end the watch
        os.write(2, f"{text}\n".encode())


@dataclass(frozen=True)
class Hang:
    """That a rank has come no further for too long."""

    position: Position
    waited_s: float
    limit_s: float


def limit_s(phase: Phase, pulse: Pulse, policy: RequeuePolicy) -> float | None:
    """How long a phase may take; None where nobody can know."""
    if policy.hang_factor is None or phase in UNWATCHED:
        return None
    usual_s = pulse.usual_s
    if usual_s is None:
        return max(PATIENT_S, policy.hang_min_s)
    ordinary_s = max(policy.hang_min_s, policy.hang_factor * usual_s)
    is_usual = phase not in PATIENT and pulse.has_passed(phase)
    return ordinary_s if is_usual else max(PATIENT_S, ordinary_s)


class ProgressWatch:
    """Sees that this rank comes no further; `others_hang` tells whether another has said that of itself."""

    def __init__(self, pulse: Pulse, policy: RequeuePolicy, others_hang: Callable[[], bool]) -> None:
        self._pulse = pulse
        self._policy = policy
        self._others_hang = others_hang
        self._looked_s = self._awake_since_s = time.monotonic()

    def look(self, now_s: float) -> Hang | None:
        """Whether it hangs by now; call every second or so."""
        if now_s > self._looked_s + ASLEEP_S:
            self._awake_since_s = now_s
        self._looked_s = now_s
        position = self._pulse.position
        limit = limit_s(position.phase, self._pulse, self._policy)
        waited_s = now_s - max(position.since_s, self._awake_since_s)
        if limit is None or waited_s < self._policy.hang_min_s / 2:
            return None
        # All are ended when one hangs: who has more patience says where it is before that.
        return Hang(position, waited_s, limit) if waited_s > limit or self._others_hang() else None


@dataclass(frozen=True)
class Watchdog:
    """Writes it down when this rank comes no further.

    Its supervisor then ends all ranks; a rank that nobody ends leaves by itself, with exit code 70.
    """

    attempt: AttemptDir
    who: dict[str, Any]
    """``rank, node_rank, host`` of this rank."""
    plan: LaunchPlan
    pulse: Pulse
    stacks: RankStacks

    def start(self) -> None:
        """Watch from now on, unless the config says that nothing is ever a hang."""
        if self.plan.requeue.hang_factor is not None:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _watch(self) -> None:
        watch = ProgressWatch(self.pulse, self.plan.requeue, self._others_hang)
        poll_s = min(POLL_S, self.plan.requeue.hang_min_s / 10)
        while True:
            time.sleep(poll_s)
            hang = watch.look(time.monotonic())
            if hang is None:
                continue
            try:
                self._report(hang)
            except (OSError, RuntimeError, ValueError) as error:
                _say(f"the hang could not be written down whole ({error})")
            self._wait_to_be_ended(hang, poll_s)
            _say("going on after all")
            with contextlib.suppress(OSError):
                self._record.unlink(missing_ok=True)

    def _others_hang(self) -> bool:
        """Whether a rank says so now; those that went on after all have taken that back."""
        try:
            return any(self.attempt.hangs_dir.glob("rank-*.json"))
        except OSError:
            return False

    @property
    def _record(self) -> Path:
        return self.attempt.rank_hang(self.who["rank"])

    def _report(self, hang: Hang) -> None:
        """Write down where this rank stands; `job.hangs` reads it."""
        step, phase, beat, _ = hang.position
        words = f"no progress for {hang.waited_s:.0f} s at step {step}, in {phase}"
        _say(f"{words} (limit {hang.limit_s:.0f} s): the stacks are in {self.stacks.file}")
        self.attempt.hangs_dir.mkdir(exist_ok=True)
        record = {**self.who, "step": step, "phase": phase, "beat": beat}
        record |= {"waited_s": round(hang.waited_s, 3), "limit_s": round(hang.limit_s, 3)}
        record |= {"usual_s": self.pulse.usual_s, "time": utc_now(), "stack": training_stack()}
        write_json(self._record, record)
        self.stacks.append(words)
        dump_collectives(self.stacks.file.with_suffix(".collectives.json"), self.plan.device)

    def _wait_to_be_ended(self, hang: Hang, poll_s: float) -> None:
        """Return when there is progress again."""
        leave_s = time.monotonic() + LEAVE_AFTER_S
        while self.pulse.position == hang.position:
            if time.monotonic() > leave_s:
                _say(f"nobody has ended this rank within {LEAVE_AFTER_S:.0f} s: leaving")
                os._exit(EXIT_STUCK)
            time.sleep(poll_s)


def dump_collectives(path: Path, device: str) -> None:
    """Write the newest collectives of this rank, as torch's flight recorder knows them."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return
    trace = json.loads(dump())
    trace["entries"] = trace.get("entries", [])[-NUM_COLLECTIVES:]
    write_json(path, trace)
