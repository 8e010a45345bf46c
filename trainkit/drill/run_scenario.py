"""Plays one scenario: waits for its moment, strikes, sees the run come back, and to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainkit.control.jobs import recall, refuse_live
from trainkit.drill.inject import FaultInjector, flip_bytes, kill_job, notify, requeue_job
from trainkit.drill.scenarios import Aim, Scenario
from trainkit.drill.watch import RunWatch
from trainkit.job.record import run_lock
from trainkit.rundir import RunDir, read_end, read_jsonl
from trainkit.slurm.client import SlurmRefused
from trainkit.submit.start import start_again

OVER = "the run was over before it could be struck: give it more steps"
NOTHING_LEFT = "it had no step left to do when it came back: give it more steps"
MOST_TRIES = 3
"""A save of a small model can be over before the kill arrives: then the next one is tried."""


@dataclass
class Played:
    """What happened in one scenario."""

    done: str = ""
    """What was done to the run."""
    step: int | None = None
    """The newest step that was seen when it was done."""
    came_back_s: float | None = None
    """From the strike to the first step after it, or to the next start where no steps are seen."""
    way_back: str = ""
    """restart, requeue and so on, or resume: by the drill."""
    not_by_itself: str = ""
    """Why it did not come back by itself; empty when it did."""
    missed: str = ""
    """Why it could not be struck as it should have been."""
    stuck: str = ""
    """How long it did nothing; then it was killed."""
    refused: str = ""
    """Why this cluster does not let its owner do that."""
    damaged_step: int | None = None
    """The step of the checkpoint that the drill damaged."""


@dataclass
class Player:
    """One scenario with its run."""

    scenario: Scenario
    aim: Aim
    run: RunDir
    hand: FaultInjector
    watch: RunWatch
    usual_s: float
    """How long the uninterrupted run took, from its start to its end."""
    played: Played = field(default_factory=Played)

    def play(self) -> Played:
        """See the run from its start to its end."""
        for number in range(1, MOST_TRIES + 1):
            if not self._await_moment(number):
                self.played.missed = "" if self.watch.is_stuck else OVER
                break
            if not self._strike_and_await():
                break
            if self.scenario.name != "mid-save" or self._was_cut_off():
                break
            if number == MOST_TRIES:
                self.played.missed = f"{MOST_TRIES} times the save was over before the ranks were dead"
        if not self.played.refused:
            self.watch.until(lambda: False)
        if self.watch.is_stuck:
            self.played.stuck = f"nothing was heard of it for {self.watch.patience_s:.0f} s"
            kill_job(self.run)
        return self.played

    def _await_moment(self, number: int) -> bool:
        """Whether the run came as far as the aim says; of mid-save, to the first save from there on."""
        watch, aim = self.watch, self.aim
        if self.scenario.name == "mid-save":
            assert aim.step is not None
            soonest = max(aim.step, watch.step + 1) if number > 1 else aim.step
            return watch.until(lambda: watch.is_saving(soonest))
        if self.scenario.needs_checkpoints:
            return watch.until(lambda: watch.step >= (aim.step or 0) and len(watch.saved_steps()) > 1)
        if aim.step is not None:
            return watch.until(lambda: watch.step >= (aim.step or 0))
        wait_s = aim.share * self.usual_s
        return watch.until(lambda: time.monotonic() - watch.started_s.get(1, float("inf")) > wait_s)

    def _strike_and_await(self) -> bool:
        """Strike, and see the run come back; False when it did not, or was not struck."""
        watch, before, struck_s = self.watch, self.watch.attempt, time.monotonic()
        self.played.step = watch.step or None
        try:
            if not self._strike():
                self.played.missed = OVER
                return False
        except SlurmRefused as error:
            self.played.refused = error.message
            return False
        sees_steps = self.aim.step is not None

        def is_back() -> bool:
            times = watch.first_step_s if sees_steps else watch.started_s
            return any(attempt > before for attempt in times)

        if self.scenario.by_hand:
            self._resume()
        elif not watch.until(is_back):
            if watch.is_stuck:
                return False
            end = watch.end()
            if end.get("state") == "finished":
                self.played.missed = OVER if watch.attempt == before else NOTHING_LEFT
                return False
            self.played.not_by_itself = str(end.get("reason") or "its supervisor died without a word")
            self._resume()
        if not watch.until(is_back):
            if watch.end().get("state") == "finished":
                self.played.missed = NOTHING_LEFT
            return False
        times = watch.first_step_s if sees_steps else watch.started_s
        self.played.came_back_s = times[min(attempt for attempt in times if attempt > before)] - struck_s
        self.played.way_back = self.played.way_back or self._way_back(before)
        return True

    def _strike(self) -> bool:
        """Do what the scenario is about; False when there was nothing left to do it to."""
        run, aim, hand = self.run, self.aim, self.hand
        ways: dict[str, tuple[str, Callable[[], bool]]] = {
            "signal": ("SIGUSR2", lambda: notify(run)),
            "rank": (f"SIGKILL of rank {aim.rank}", lambda: hand.kill_rank(aim.rank)),
            "node": (f"SIGKILL of node {aim.node_rank}", lambda: hand.kill_node(aim.node_rank)),
            "mid-save": ("SIGKILL of all ranks in a save", hand.kill_ranks),
            "damaged-checkpoint": ("job killed, checkpoint damaged", self._kill_and_damage),
            "requeue": ("scontrol requeue", lambda: requeue_job(run)),
        }
        self.played.done, act = ways[self.scenario.name]
        return act()

    def _kill_and_damage(self) -> bool:
        if not kill_job(self.run):
            return False
        self.played.damaged_step = flip_bytes(self.run, self.aim.chance).step
        return True

    def _resume(self) -> None:
        """Start the run again as a person would, with `trainkit resume`."""
        with run_lock(self.run):
            recall(self.run)
            refuse_live(self.run, "resume")
            start_again(self.run, "resume")
        self.watch.expect_life()
        self.played.way_back = "resume"

    def _way_back(self, attempt: int) -> str:
        """How the run came back from an attempt, in the word of its end.json."""
        end = read_end(self.run.attempt(attempt)) or {}
        return str(end.get("action") or "requeue by Slurm")

    def _was_cut_off(self) -> bool:
        """Whether the save that was being written at the strike came to nothing."""
        newest = self.watch.attempt
        resumed = [
            event["step"]
            for event in read_jsonl(self.run.events_file)
            if event.get("event") == "training" and event.get("attempt") == newest
        ]
        begun = [
            event["step"]
            for event in read_jsonl(self.run.events_file)
            if event.get("event") == "checkpoint_begin" and event.get("attempt", 0) < newest
        ]
        return bool(resumed and begun) and begun[-1] > resumed[-1]
