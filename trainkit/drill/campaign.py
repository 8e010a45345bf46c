"""A whole drill: the run that nobody touches, then one run for each scenario, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote
from typing import Any

from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.changes import Change, short_training, with_values
from trainkit.drill.curve import Point, compare, read_points
from trainkit.drill.inject import injector_for, kill_job
from trainkit.drill.run_scenario import Player
from trainkit.drill.scenarios import Scenario, take_aim, why_not
from trainkit.drill.verdict import Ended, Result, judge
from trainkit.drill.watch import RunWatch
from trainkit.errors import TrainkitError
from trainkit.manifest import find_damage, published, remove_all
from trainkit.observe.text import verdict_line
from trainkit.plan.launch import LaunchPlan
from trainkit.rundir import RunDir, parse_time, read_end, read_jsonl, seconds_between
from trainkit.submit.create import new_place
from trainkit.submit.start import defer_sigint

REFERENCE = "uninterrupted"


@dataclass
class Campaign:
    """A drill of one config in a folder of its own."""

    folder: Path
    config: RunConfig
    plan: LaunchPlan
    seed: int
    interval: int | None
    """Steps between two saves; None for a COMMAND, which saves when it likes."""
    start: Callable[[Path], RunDir]
    """Submits the run that is drilled, with this folder."""
    say: Callable[[str], None]
    reference: list[Point] = field(default_factory=list)
    usual_s: float = 0.0
    """How long the uninterrupted run took."""
    running: RunDir | None = None

    def carry_out(self, scenarios: Sequence[Scenario]) -> Iterator[Result]:
        """The results of the scenarios, each as soon as it is known.

        Raises TrainkitError when the run does not even finish when nobody touches it. However this ends, no
        run of it goes on.
        """
        try:
            self._run_uninterrupted()
            for scenario in scenarios:
                reason = why_not(scenario, self.config, self.plan)
                yield Result(scenario.name, "not here", reason) if reason else self._try(scenario)
        finally:
            self._end_what_runs()

    def _run_uninterrupted(self) -> None:
        run, watch = self._start(REFERENCE, float("inf"))
        watch.until(lambda: False)
        end = watch.end()
        if end.get("state") != "finished":
            how = end.get("reason") or "its supervisor died without a word"
            verdict = f"; {verdict_line(end['verdict'])}" if end.get("verdict") else ""
            raise TrainkitError(
                f"the run does not finish even when nobody touches it: {how}{verdict}",
                hint=f"`trainkit logs {quote(str(run.path))}` shows what it printed",
            )
        if run.attempt_numbers() != [1]:
            first = read_end(run.attempt(1)) or {}
            raise TrainkitError(
                f"the run that nobody should touch was interrupted: {first.get('reason')}",
                hint="start the drill again: the others are held against this one",
            )
        self.running = None
        self.reference = read_points(run)
        again = compare(self.reference, self.reference).again
        if again:
            raise TrainkitError(f"{run.metrics_file} has {again} steps twice in a run that nobody touched")
        self.usual_s = _seconds_of(run, end)
        last = f"{self.reference[-1].step} steps" if self.reference else "no steps in metrics.jsonl"
        self.say(f"{REFERENCE}: {last}, {self.usual_s:.1f} s")
        remove_all(run.checkpoints_dir)  # of a large model a drill would leave dozens of them

    def _try(self, scenario: Scenario) -> Result:
        # Ranks that hang are ended by the run itself, sooner than this.
        patience_s = 2 * self.config.requeue.hang_min_s + 3 * self.usual_s
        run, watch = self._start(scenario.name, patience_s)
        plan = self.plan
        num_steps = self.reference[-1].step if self.reference else None
        aim = take_aim(scenario, self.seed, num_steps, self.interval, plan.world_size, plan.num_nodes)
        where = "" if aim.step is None else f", from step {aim.step} on"
        self.say(f"{scenario.name}: {scenario.does}{where}")
        player = Player(scenario, aim, run, injector_for(run, plan.backend), watch, self.usual_s)
        played = player.play()
        if played.refused:
            self._end_what_runs()
        self.running = None
        result = judge(scenario, played, _ended(run), self.reference, self.interval, self.config.requeue.on)
        if result.state in ("holds", "not here"):
            remove_all(run.checkpoints_dir)
        return result

    def _start(self, name: str, patience_s: float) -> tuple[RunDir, RunWatch]:
        with defer_sigint():
            self.running = run = self.start(self.folder / name)
        poll_s = injector_for(run, self.plan.backend).poll_s
        return run, RunWatch(run, poll_s, patience_s, lambda text: self.say(f"{name}: {text}"))

    def _end_what_runs(self) -> None:
        """Kill the run that goes on, after an error or Ctrl-C; what it was for is over."""
        if self.running is None:
            return
        run, self.running = self.running, None
        if kill_job(run):
            self.say(f"{run.path} is cancelled")


def _ended(run: RunDir) -> Ended:
    numbers = run.attempt_numbers()
    damages = [
        f"{checkpoint.path.name}: {damage}"
        for checkpoint in published(run.checkpoints_dir)
        if (damage := find_damage(checkpoint))
    ]
    end = (read_end(run.attempt(numbers[-1])) if numbers else None) or {}
    return Ended(end, read_points(run), list(read_jsonl(run.events_file)), damages, str(run.path))


def _seconds_of(run: RunDir, end: Mapping[str, Any]) -> float:
    """How long a finished run took, from the start of its workers to their end."""
    started = next(event["time"] for event in read_jsonl(run.events_file) if event.get("event") == "started")
    ended = parse_time(end["time"])
    assert ended is not None
    return seconds_between(started, ended) or 0.0


def make_folder() -> Path:
    """A new folder for a drill, below runs/.

    Raises UsageError when it cannot be written.
    """
    with new_place(datetime.now(timezone.utc).strftime("drill-%Y%m%d-%H%M%S"), None) as (folder, _):
        return folder.absolute()


DEFAULT_STEPS = 30
FEWEST_STEPS = 12
"""With fewer there are not two checkpoints before the last third, in which nothing is interrupted."""
SAVES = 6
"""How often a drill saves."""
ORIGIN = "trainkit drill"


def save_interval(num_steps: int) -> int:
    """Steps between two checkpoints of a drill."""
    return num_steps // SAVES


def shorten(loaded: LoadedConfig, num_steps: int, device: str) -> tuple[LoadedConfig, list[Change]]:
    """The config of a drill of so many steps: what is trained, with what and on what stays as it is.

    `device` is what the plan found: ``cpu`` or ``cuda``.
    """
    possible = [*_changes(loaded.config, num_steps), *_same_bits(loaded.config, device)]
    changes = [change for change in possible if change.value != change.before]
    return with_values(loaded, {change.key: change.value for change in changes}, ORIGIN), changes


def _changes(config: RunConfig, num_steps: int) -> Iterator[Change]:
    yield from short_training(config, num_steps, "drill")
    checkpoint = config.checkpoint
    yield Change(
        "checkpoint.every_steps", save_interval(num_steps), checkpoint.every_steps, "a drill is short"
    )
    yield Change("checkpoint.every_minutes", None, checkpoint.every_minutes, "saves come at known steps")


CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def _same_bits(config: RunConfig, device: str) -> Iterator[Change]:
    """What two runs on GPUs need to be equal to the last digit."""
    if device == "cpu":
        return
    why = "only then are two runs on GPUs equal to the last digit"
    yield Change("train.deterministic", True, config.train.deterministic, why)
    env = config.launch.env
    # Unless told, cuBLAS picks each stream's workspace itself; most versions of torch refuse that here.
    yield Change("launch.env", {CUBLAS_VARIABLE: ":4096:8", **env}, env, "train.deterministic needs it")
