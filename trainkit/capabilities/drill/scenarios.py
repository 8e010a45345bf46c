"""Defines the scenarios of a drill: when they are possible, and how they interrupt a run."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from trainkit.backend import backend_of
from trainkit.backends.jobs import liveness_probe, read_whole_job, require_not_running
from trainkit.capabilities.drill.inject import FaultInjector, flip_bytes, kill_job, newest
from trainkit.config import RunConfig
from trainkit.control.requeue import start_again
from trainkit.observe.logs import run_is_over
from trainkit.plan.keep import KeepRule
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd, read_end, read_newest_end
from trainkit.run.events import events_of, read_events, steps_of
from trainkit.run.files import Tail
from trainkit.run.manifest import partials, published
from trainkit.run.rundir import RunDir, run_lock
from trainkit.slurm.client import SlurmRefused, SlurmUnreachable
from trainkit.slurm.control import requeue


@dataclass(frozen=True)
class Scenario:
    """A way to interrupt a run."""

    name: str
    description: str
    graceful: bool = False
    """True if the run receives a stop signal in time to save a checkpoint, so that no step is recomputed."""
    cause: str | None = None
    """The value that `requeue.on` must include for an automatic restart; None if the run restarts with any
    config."""
    by_hand: bool = False
    """True if the drill must resume the run itself, because the scenario terminates the whole job."""
    needs_slurm: bool = False
    needs_checkpoints: bool = False
    """True if the drill must know when and where the run saves checkpoints."""


SCENARIOS = (
    Scenario("signal", "SIGUSR2: save and requeue", graceful=True),
    Scenario("rank", "SIGKILL of one rank", cause="crash"),
    Scenario("node", "SIGKILL of all processes on one node", cause="crash"),
    Scenario("mid-save", "SIGKILL of all ranks during a save", cause="crash", needs_checkpoints=True),
    Scenario(
        "damaged-checkpoint",
        "SIGKILL of the whole job, then bit flips in its newest checkpoint",
        by_hand=True,
        needs_checkpoints=True,
    ),
    Scenario("requeue", "scontrol requeue by another user or program", graceful=True, needs_slurm=True),
)
NAMES = tuple(scenario.name for scenario in SCENARIOS)


def skip_reason(scenario: Scenario, config: RunConfig, plan: LaunchPlan) -> str:
    """Return why a scenario cannot be tried with this config, or an empty string if it can."""
    if scenario.needs_slurm and plan.is_here:
        return "the run would start on this machine without Slurm"
    if scenario.needs_checkpoints and plan.workload.is_command:
        return "a drill does not know where and how a COMMAND saves"
    if scenario.name == "damaged-checkpoint" and KeepRule.of(config.checkpoint).last == 1:
        return f"{config.checkpoint.last_key} is 1: there is no checkpoint to fall back to"
    return ""


@dataclass(frozen=True)
class Target:
    """When a scenario interrupts the run, and which rank or node the scenario affects."""

    step: int | None
    """The step after which the run is interrupted, or None if no steps are recorded."""
    share: float
    """If no steps are recorded, the run is interrupted after this fraction of the uninterrupted run's
    duration."""
    rank: int
    node_rank: int
    rng: random.Random
    """Random number generator for all further random choices of the scenario."""


def choose_target(
    scenario: Scenario,
    seed: int,
    num_steps: int | None,
    interval: int | None,
    world_size: int,
    num_nodes: int,
) -> Target:
    """Choose at random when the scenario interrupts the run, and which rank or node it affects.

    The first steps are never chosen, because no checkpoint exists yet. The last third of the run is never
    chosen, because an interruption takes some time to have an effect. `interval` is the number of steps
    between two saves, or None if it is unknown.
    """
    rng = random.Random(f"{seed} {scenario.name}")
    step = None
    if num_steps is not None:
        saves_before = 2 if scenario.needs_checkpoints else 1
        first = 1 + (num_steps // 6 if interval is None else saves_before * interval)
        step = rng.randint(first, max(first, num_steps * 2 // 3))
        if scenario.name == "mid-save" and interval is not None:
            step -= step % interval  # a save begins at a multiple of the interval
    return Target(
        step=step,
        share=rng.uniform(0.3, 0.6),
        rank=rng.randrange(world_size),
        node_rank=rng.randrange(num_nodes),
        rng=rng,
    )


CHECK_END_EVERY_S = 0.25


@dataclass
class RunWatch:
    """Follows the progress of a run."""

    run: RunDir
    poll_s: float
    """Seconds between two reads of the run's files. The polling interval is shorter than a step, so that the
    interruption happens at the chosen step."""
    patience_s: float
    """Seconds without progress after which the run is considered stuck. Time that a job spends in the queue
    is excluded."""
    log_line: Callable[[str], None] = lambda text: None
    is_stuck: bool = False
    step: int = 0
    """The newest step found in the run's metrics."""
    started_s: dict[int, float] = field(default_factory=dict)
    """Maps each attempt number to the monotonic time at which the attempt's start was detected."""
    first_step_s: dict[int, float] = field(default_factory=dict)
    """Maps each attempt number to the monotonic time at which the attempt's first step was detected."""

    def __post_init__(self) -> None:
        self._metrics, self._events = Tail(self.run.metrics_file), Tail(self.run.events_file)
        self.expect_life()

    def expect_life(self) -> None:
        """Reset the liveness probe after the drill has restarted the run as a new job."""
        self._is_alive = liveness_probe(self.run, self.log_line)
        self._checked_s, self._is_over = float("-inf"), False
        self._progress_s = time.monotonic()

    @property
    def attempt(self) -> int:
        """Return the number of the newest attempt that has started, or 0 if no attempt has started."""
        return max(self.started_s, default=0)

    def until(self, reached: Callable[[], bool]) -> bool:
        """Wait until `reached` returns True; return False if the run ends first or is stuck."""
        while True:
            over = self.over()
            # Read the files after checking for the end, so that records written just before the end are not
            # missed.
            self.read()
            if reached():
                return True
            if over:
                return False
            if time.monotonic() - self._progress_s > self.patience_s and not self._is_in_queue():
                self.is_stuck = True
                return False
            time.sleep(self.poll_s)

    def read(self) -> None:
        """Read new metrics and events of the run."""
        # Read metrics first, because steps recorded before an attempt's start event belong to the previous
        # attempt.
        for record in steps_of(self._metrics.records()):
            if "loss" not in record.values:
                continue
            self._progress_s = time.monotonic()
            self.step = record.step
            # A COMMAND may write metrics without an attempt number.
            attempt = self.attempt if record.attempt is None else record.attempt
            self.first_step_s.setdefault(attempt, time.monotonic())
        for event in events_of(self._events.records()):
            self._progress_s = time.monotonic()
            if event.name == "started":
                self.started_s[event.attempt or 0] = time.monotonic()

    def _is_in_queue(self) -> bool:
        """Return whether the run's job is pending in the queue.

        Call this method only after `patience_s` seconds without progress, because it queries Slurm.
        """
        entry, self._progress_s = newest(self.run), time.monotonic()
        try:
            job = backend_of(entry).job(entry)
        except SlurmUnreachable as error:
            self.log_line(f"it is unknown whether {self.run.name} is in the queue: {error.message}")
            return True  # Slurm is queried again after another `patience_s` seconds
        return job is not None and job.state.is_waiting

    def over(self) -> bool:
        """Return whether the run has ended and will not restart."""
        if time.monotonic() - self._checked_s >= CHECK_END_EVERY_S:
            self._checked_s = time.monotonic()
            self._is_over = run_is_over(self.run, self._is_alive())
        return self._is_over

    def end(self) -> AttemptEnd:
        """Return the content of end.json for the newest attempt."""
        return read_newest_end(self.run.path) or AttemptEnd()


OVER = "the run ended before it could be interrupted: increase the number of steps"
NOTHING_LEFT = "no steps remained after the restart: increase the number of steps"
MAX_TRIES = 3
"""Maximum number of saves that the drill tries to interrupt. If a small model finishes its save before the
kill signal arrives, the drill tries the next save."""


State = Literal["passed", "failed", "missed", "skipped"]
"""`missed` means that the run ended before it could be interrupted, and `skipped` means that the scenario
cannot be tried with this config."""


@dataclass
class Result:
    """The result of one scenario, shown as a row in the results table."""

    scenario: str
    state: State = "passed"
    message: str = ""
    """The problem of a failed scenario, the reason why a scenario was skipped, or a note about a passed
    scenario."""
    action: str = ""
    """A description of the interruption, such as ``SIGKILL of rank 1``."""
    step: int | None = None
    """The newest step seen before the interruption."""
    restart_s: float | None = None
    """Seconds from the interruption to the next step, or to the next attempt's start if no steps are
    recorded."""
    restarted_by: str = ""
    """The cause of the restart, such as ``requeue``, or ``resume`` if the drill resumed the run."""
    num_recomputed: int | None = None
    """Number of steps that were computed again after the restart; None if no steps are recorded."""
    curve: Literal["equal", "differs", "unknown", ""] = ""
    run_dir: str = ""
    no_restart: str = ""
    """Why the run did not restart automatically; empty if it restarted."""
    missed: str = ""
    """Why the run could not be interrupted as planned; empty if it was interrupted."""
    stuck: str = ""
    """A sentence that states how long the run made no progress before the drill killed it; empty if it was
    not stuck."""
    refused: str = ""
    """Why the cluster does not allow this interruption; empty if it is allowed."""
    damaged_step: int | None = None
    """The step of the checkpoint that the drill damaged, or None if it damaged no checkpoint."""

    def to_dict(self) -> dict[str, object]:
        """Return the result as a JSON object, omitting fields that the message already includes."""
        said = ("no_restart", "missed", "stuck", "refused", "damaged_step")
        return {name: value for name, value in vars(self).items() if name not in said}


@dataclass
class ScenarioRunner:
    """Runs one scenario: interrupts a run and follows it until it ends."""

    scenario: Scenario
    target: Target
    run_dir: RunDir
    injector: FaultInjector
    watch: RunWatch
    usual_s: float
    """Duration of the uninterrupted run in seconds."""

    def run(self) -> Result:
        """Interrupt the run at the target, follow it until it ends, and return the result."""
        self.result = Result(self.scenario.name)
        for number in range(1, MAX_TRIES + 1):
            if not self._await_target(number):
                self.result.missed = "" if self.watch.is_stuck else OVER
                break
            if not self._interrupt_and_await():
                break
            if self.scenario.name != "mid-save" or self._save_was_cut_off():
                break
            if number == MAX_TRIES:
                self.result.missed = f"{MAX_TRIES} times, the save was complete before the ranks were killed"
        if not self.result.refused:
            self.watch.until(lambda: False)
        if self.watch.is_stuck:
            self.result.stuck = f"the run made no progress for {self.watch.patience_s:.0f} s"
            kill_job(self.run_dir)
        return self.result

    def _await_target(self, number: int) -> bool:
        """Wait until the run reaches the target step; return False if the run never reaches it.

        For the scenario mid-save, the target is the next save.
        """
        watch, target = self.watch, self.target
        if self.scenario.name == "mid-save":
            assert target.step is not None
            soonest = max(target.step, watch.step + 1) if number > 1 else target.step
            first = self.run_dir.checkpoint_dir(soonest).name
            folder = self.run_dir.checkpoints_dir
            return watch.until(lambda: any(path.name >= first for path in partials(folder)))
        if self.scenario.needs_checkpoints:
            saved = self.run_dir.checkpoints_dir
            return watch.until(lambda: watch.step >= (target.step or 0) and len(published(saved)) > 1)
        if target.step is not None:
            return watch.until(lambda: watch.step >= (target.step or 0))
        wait_s = target.share * self.usual_s
        return watch.until(lambda: time.monotonic() - watch.started_s.get(1, float("inf")) > wait_s)

    def _interrupt_and_await(self) -> bool:
        """Interrupt the run and wait for its restart; return False if either fails."""
        watch, before, began_s = self.watch, self.watch.attempt, time.monotonic()
        self.result.step = watch.step or None
        try:
            if not self._interrupt():
                self.result.missed = OVER
                return False
        except SlurmRefused as error:
            self.result.refused = error.message
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
            if end.state == "finished":
                self.result.missed = OVER if watch.attempt == before else NOTHING_LEFT
                return False
            self.result.no_restart = str(end.reason or "its supervisor died")
            self._resume()
        if not watch.until(has_restarted):
            if watch.end().state == "finished":
                self.result.missed = NOTHING_LEFT
            return False
        times = watch.first_step_s if has_steps else watch.started_s
        self.result.restart_s = times[min(attempt for attempt in times if attempt > before)] - began_s
        action = (read_end(self.run_dir.attempt(before)) or AttemptEnd()).action
        self.result.restarted_by = self.result.restarted_by or action or "requeue by Slurm"
        return True

    def _interrupt(self) -> bool:
        """Interrupt the run; return False if no process was running."""
        target, injector = self.target, self.injector
        actions: dict[str, tuple[str, Callable[[], bool]]] = {
            "signal": ("SIGUSR2", self._notify),
            "rank": (f"SIGKILL of rank {target.rank}", lambda: injector.kill_rank(target.rank)),
            "node": (f"SIGKILL of node {target.node_rank}", lambda: injector.kill_node(target.node_rank)),
            "mid-save": ("SIGKILL of all ranks during a save", injector.kill_ranks),
            "damaged-checkpoint": ("job killed, checkpoint damaged", self._kill_and_damage),
            "requeue": ("scontrol requeue", self._requeue),
        }
        self.result.action, act = actions[self.scenario.name]
        return act()

    def _notify(self) -> bool:
        entry = newest(self.run_dir)
        return backend_of(entry).signal(self.run_dir, entry, signal.SIGUSR2) == "signalled"

    def _requeue(self) -> bool:
        requeue(newest(self.run_dir).job)
        return True

    def _kill_and_damage(self) -> bool:
        if not kill_job(self.run_dir):
            return False
        self.result.damaged_step = flip_bytes(self.run_dir, self.target.rng).step
        return True

    def _resume(self) -> None:
        """Resume the run as `trainkit resume` does."""
        with run_lock(self.run_dir):
            job = read_whole_job(self.run_dir)
            require_not_running(self.run_dir, job, "resume")
            start_again(self.run_dir, job, "resume")
        self.watch.expect_life()
        self.result.restarted_by = "resume"

    def _save_was_cut_off(self) -> bool:
        """Return whether the interruption aborted the current save, leaving no complete checkpoint."""
        attempt = self.watch.attempt
        events = list(read_events(self.run_dir, "training", "checkpoint_begin"))
        resumed = [event for event in events if event.name == "training" and event.attempt == attempt]
        begun = [event for event in events if event.name != "training" and (event.attempt or 0) < attempt]
        return bool(resumed and begun) and (begun[-1].step or 0) > (resumed[-1].step or 0)
