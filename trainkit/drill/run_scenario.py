"""Runs one scenario: waits for the target step, interrupts the run, and follows it to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainkit.control.jobs import recover_job_id, require_not_running
from trainkit.drill.inject import FaultInjector, flip_bytes, kill_job, notify, requeue_job
from trainkit.drill.run_watch import RunWatch
from trainkit.drill.scenarios import Scenario, Target
from trainkit.job.record import run_lock
from trainkit.rundir import RunDir, read_end, read_jsonl
from trainkit.slurm.client import SlurmRefused
from trainkit.submit.start import start_again

OVER = "the run was over before it could be interrupted: give it more steps"
NOTHING_LEFT = "no step was left after the restart: give it more steps"
MAX_TRIES = 3
"""A save of a small model can be over before the kill arrives: then the next save is tried."""


@dataclass
class ScenarioRecord:
    """What happened in one scenario."""

    action: str = ""
    """What was done to the run."""
    step: int | None = None
    """The newest step seen when it was done."""
    restart_s: float | None = None
    """From the interruption to the first step after it, or to the next start where steps are not recorded."""
    restarted_by: str = ""
    """restart, requeue and so on, or resume: by the drill."""
    no_restart: str = ""
    """Why it did not restart by itself; empty when it did."""
    missed: str = ""
    """Why it could not be interrupted as planned."""
    stuck: str = ""
    """How long it made no progress before it was killed."""
    refused: str = ""
    """Why this cluster does not allow the interruption."""
    damaged_step: int | None = None
    """The step of the checkpoint that the drill damaged."""


@dataclass
class ScenarioRunner:
    """One scenario with its run."""

    scenario: Scenario
    target: Target
    run_dir: RunDir
    injector: FaultInjector
    watch: RunWatch
    usual_s: float
    """How long the uninterrupted run took."""
    record: ScenarioRecord = field(default_factory=ScenarioRecord)

    def run(self) -> ScenarioRecord:
        """Follow the run from its start to its end, and interrupt it on the way."""
        for number in range(1, MAX_TRIES + 1):
            if not self._await_target(number):
                self.record.missed = "" if self.watch.is_stuck else OVER
                break
            if not self._interrupt_and_await():
                break
            if self.scenario.name != "mid-save" or self._save_was_cut_off():
                break
            if number == MAX_TRIES:
                self.record.missed = f"{MAX_TRIES} times the save was over before the ranks were dead"
        if not self.record.refused:
            self.watch.until(lambda: False)
        if self.watch.is_stuck:
            self.record.stuck = f"it made no progress for {self.watch.patience_s:.0f} s"
            kill_job(self.run_dir)
        return self.record

    def _await_target(self, number: int) -> bool:
        """Whether the run reached its target; for mid-save, the first save from there on."""
        watch, target = self.watch, self.target
        if self.scenario.name == "mid-save":
            assert target.step is not None
            soonest = max(target.step, watch.step + 1) if number > 1 else target.step
            return watch.until(lambda: watch.is_saving(soonest))
        if self.scenario.needs_checkpoints:
            return watch.until(lambda: watch.step >= (target.step or 0) and len(watch.saved_steps()) > 1)
        if target.step is not None:
            return watch.until(lambda: watch.step >= (target.step or 0))
        wait_s = target.share * self.usual_s
        return watch.until(lambda: time.monotonic() - watch.started_s.get(1, float("inf")) > wait_s)

    def _interrupt_and_await(self) -> bool:
        """Interrupt the run and wait for its restart; False when either did not happen."""
        watch, before, began_s = self.watch, self.watch.attempt, time.monotonic()
        self.record.step = watch.step or None
        try:
            if not self._interrupt():
                self.record.missed = OVER
                return False
        except SlurmRefused as error:
            self.record.refused = error.message
            return False
        has_steps = self.target.step is not None

        def has_restarted() -> bool:
            times = watch.first_step_s if has_steps else watch.started_s
            return any(attempt > before for attempt in times)

        if self.scenario.by_hand:
            self._resume()
        elif not watch.until(has_restarted):
            if watch.is_stuck:
                return False
            end = watch.end()
            if end.get("state") == "finished":
                self.record.missed = OVER if watch.attempt == before else NOTHING_LEFT
                return False
            self.record.no_restart = str(end.get("reason") or "its supervisor died")
            self._resume()
        if not watch.until(has_restarted):
            if watch.end().get("state") == "finished":
                self.record.missed = NOTHING_LEFT
            return False
        times = watch.first_step_s if has_steps else watch.started_s
        self.record.restart_s = times[min(attempt for attempt in times if attempt > before)] - began_s
        self.record.restarted_by = self.record.restarted_by or self._restart_action(before)
        return True

    def _interrupt(self) -> bool:
        """Do what the scenario is about; False when nothing was left to interrupt."""
        run, target, injector = self.run_dir, self.target, self.injector
        actions: dict[str, tuple[str, Callable[[], bool]]] = {
            "signal": ("SIGUSR2", lambda: notify(run)),
            "rank": (f"SIGKILL of rank {target.rank}", lambda: injector.kill_rank(target.rank)),
            "node": (f"SIGKILL of node {target.node_rank}", lambda: injector.kill_node(target.node_rank)),
            "mid-save": ("SIGKILL of all ranks in a save", injector.kill_ranks),
            "damaged-checkpoint": ("job killed, checkpoint damaged", self._kill_and_damage),
            "requeue": ("scontrol requeue", lambda: requeue_job(run)),
        }
        self.record.action, act = actions[self.scenario.name]
        return act()

    def _kill_and_damage(self) -> bool:
        if not kill_job(self.run_dir):
            return False
        self.record.damaged_step = flip_bytes(self.run_dir, self.target.rng).step
        return True

    def _resume(self) -> None:
        """Resume the run as a person would, with `trainkit resume`."""
        with run_lock(self.run_dir):
            recover_job_id(self.run_dir)
            require_not_running(self.run_dir, "resume")
            start_again(self.run_dir, "resume")
        self.watch.expect_life()
        self.record.restarted_by = "resume"

    def _restart_action(self, attempt: int) -> str:
        """How the run restarted after an attempt: the action of its end.json."""
        end = read_end(self.run_dir.attempt(attempt)) or {}
        return str(end.get("action") or "requeue by Slurm")

    def _save_was_cut_off(self) -> bool:
        """Whether the interruption kept the save under way from being published."""
        newest = self.watch.attempt
        resumed = [
            event["step"]
            for event in read_jsonl(self.run_dir.events_file)
            if event.get("event") == "training" and event.get("attempt") == newest
        ]
        begun = [
            event["step"]
            for event in read_jsonl(self.run_dir.events_file)
            if event.get("event") == "checkpoint_begin" and event.get("attempt", 0) < newest
        ]
        return bool(resumed and begun) and begun[-1] > resumed[-1]
