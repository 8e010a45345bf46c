"""Runs a drill: the uninterrupted run, then one run per scenario, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from shlex import quote

from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.load import Change, Values, short_training, with_changes
from trainkit.contrib.drill.inject import injector_for, kill_job
from trainkit.contrib.drill.result import Point, Result, RunOutcome, evaluate, num_recomputed, points_of
from trainkit.contrib.drill.scenarios import RunWatch, Scenario, ScenarioRunner, choose_target, skip_reason
from trainkit.errors import TrainkitError
from trainkit.observe.group import read_newest_end
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.events import read_events, read_steps
from trainkit.run.files import parse_time, seconds_between
from trainkit.run.manifest import find_damage, published, remove_all
from trainkit.run.rundir import RunDir
from trainkit.submit.create import defer_sigint, new_folder

REFERENCE = "uninterrupted"


@dataclass
class Drill:
    """A drill of one config, in its own folder."""

    folder: Path
    config: RunConfig
    plan: LaunchPlan
    seed: int
    interval: int | None
    """Steps between two saves; None for a COMMAND, whose saves are not known."""
    start: Callable[[Path], RunDir]
    """Submits a run of the drill in the given folder."""
    log_line: Callable[[str], None]
    reference: list[Point] = field(default_factory=list)
    usual_s: float = 0.0
    """Duration of the uninterrupted run, in seconds."""
    running: RunDir | None = None

    def run(self, scenarios: Sequence[Scenario]) -> Iterator[Result]:
        """The result of each scenario as soon as it is known; no run outlives this generator.

        Raises TrainkitError when the uninterrupted run does not finish.
        """
        try:
            self._run_uninterrupted()
            for scenario in scenarios:
                reason = skip_reason(scenario, self.config, self.plan)
                yield Result(scenario.name, "skipped", reason) if reason else self._run_scenario(scenario)
        finally:
            self._kill_running()

    def _run_uninterrupted(self) -> None:
        run, watch = self._start(REFERENCE, float("inf"))
        watch.until(lambda: False)
        end = watch.end()
        if end.state != "finished":
            reason = end.reason or "its supervisor died"
            failure = f"; {end.verdict.line}" if end.verdict else ""
            raise TrainkitError(
                f"the uninterrupted run does not finish: {reason}{failure}",
                hint=f"`trainkit logs {quote(str(run.path))}` shows what it printed",
            )
        if run.attempt_numbers() != [1]:
            first = read_end(run.attempt(1)) or AttemptEnd()
            raise TrainkitError(
                f"the uninterrupted run was interrupted: {first.reason}",
                hint="start the drill again: the other runs are compared with this one",
            )
        self.running = None
        self.reference = points_of(read_steps(run))
        if again := num_recomputed(self.reference):
            raise TrainkitError(
                f"{run.metrics_file} records {again} steps twice without any interruption",
                hint="let the COMMAND record each step once",
            )
        self.usual_s = _seconds_of(run, end)
        last = f"{self.reference[-1].step} steps" if self.reference else "no steps in metrics.jsonl"
        self.log_line(f"{REFERENCE}: {last}, {self.usual_s:.1f} s")
        remove_all(run.checkpoints_dir)  # the checkpoints of all runs of a large model would fill the disk

    def _run_scenario(self, scenario: Scenario) -> Result:
        # Longer than the run's own watchdog takes to end hanging ranks.
        patience_s = 2 * self.config.requeue.hang_min_s + 3 * self.usual_s
        run, watch = self._start(scenario.name, patience_s)
        plan = self.plan
        num_steps = self.reference[-1].step if self.reference else None
        target = choose_target(scenario, self.seed, num_steps, self.interval, plan.world_size, plan.num_nodes)
        where = "" if target.step is None else f", from step {target.step} on"
        self.log_line(f"{scenario.name}: {scenario.description}{where}")
        injector = injector_for(run, plan.backend)
        record = ScenarioRunner(scenario, target, run, injector, watch, self.usual_s).run()
        if record.refused:
            self._kill_running()
        self.running = None
        outcome = _outcome(run)
        result = evaluate(scenario, record, outcome, self.reference, self.interval, self.config.requeue.on)
        if result.state in ("passed", "skipped"):
            remove_all(run.checkpoints_dir)
        return result

    def _start(self, name: str, patience_s: float) -> tuple[RunDir, RunWatch]:
        with defer_sigint():
            self.running = run = self.start(self.folder / name)
        poll_s = injector_for(run, self.plan.backend).poll_s
        return run, RunWatch(run, poll_s, patience_s, lambda text: self.log_line(f"{name}: {text}"))

    def _kill_running(self) -> None:
        """Kill the current run after an error or Ctrl-C."""
        if self.running is None:
            return
        run, self.running = self.running, None
        if kill_job(run):
            self.log_line(f"cancelled {run.path}")


def _outcome(run: RunDir) -> RunOutcome:
    found = ((item, find_damage(item)) for item in published(run.checkpoints_dir))
    damages = [f"{checkpoint.path.name}: {damage}" for checkpoint, damage in found if damage]
    end = read_newest_end(run) or AttemptEnd()
    return RunOutcome(end, points_of(read_steps(run)), list(read_events(run)), damages, str(run.path))


def _seconds_of(run: RunDir, end: AttemptEnd) -> float:
    """Seconds that a finished run took, from the start of its workers to its end."""
    started = next(read_events(run, "started"))
    return seconds_between(started.time, parse_time(end.time)) or 0.0


def make_folder() -> Path:
    """Create a new folder for a drill below runs/.

    Raises UsageError when it cannot be created.
    """
    with new_folder(datetime.now(timezone.utc).strftime("drill-%Y%m%d-%H%M%S"), None) as (folder, _):
        return folder.absolute()


DEFAULT_STEPS = 30
MIN_STEPS = 12
"""With fewer steps there are not two checkpoints before the last third, which is never interrupted."""
NUM_SAVES = 6
ORIGIN = "trainkit drill"
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


def save_interval(num_steps: int) -> int:
    """Steps between two checkpoints of a drill."""
    return num_steps // NUM_SAVES


def drill_config(loaded: LoadedConfig, num_steps: int, device: str) -> tuple[LoadedConfig, list[Change]]:
    """The config for a drill of `num_steps` steps; model, data and parallelism stay the same.

    `device` is that of the plan: ``cpu`` or ``cuda``.
    """
    config, in_no_tracker = loaded.config, (None, "runs of a drill are in no tracker")
    values: Values = {
        **short_training(config, num_steps, "drill"),
        "checkpoint.every_steps": (save_interval(num_steps), "a drill is short"),
        "checkpoint.every_minutes": (None, "a drill saves at known steps"),
        "logging.mlflow": in_no_tracker,
        "logging.wandb": in_no_tracker,
    }
    if device != "cpu":
        values["train.deterministic"] = True, "makes two runs on GPUs bit-identical"
        # Without it cuBLAS is not deterministic, and most versions of torch raise an error.
        env = {CUBLAS_VARIABLE: ":4096:8", **config.launch.env}
        values["launch.env"] = env, "train.deterministic needs it"
    return with_changes(loaded, values, ORIGIN)
