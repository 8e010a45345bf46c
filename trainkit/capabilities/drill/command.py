"""Implements ``trainkit drill``: starts an uninterrupted run, and then runs the scenarios in sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TypedDict

import click

from trainkit.capabilities.drill.inject import FaultInjector, SlurmFaultInjector, kill_job
from trainkit.capabilities.drill.result import (
    SIZES_TOLERANCE,
    RunOutcome,
    all_passed,
    evaluate,
    largest_difference,
    num_recomputed,
    result_table,
    sentence,
    summary,
)
from trainkit.capabilities.drill.scenarios import (
    NAMES,
    SCENARIOS,
    Result,
    RunWatch,
    Scenario,
    ScenarioRunner,
    State,
    choose_target,
    skip_reason,
)
from trainkit.cli import options
from trainkit.cli.help import as_command, option, terminal_width
from trainkit.cli.output import echo_json, echo_result
from trainkit.cli.started import describe_plan, print_created
from trainkit.config import LoadedConfig, RunConfig
from trainkit.config.load import Change, Values, short_training, with_changes, with_values
from trainkit.errors import EXIT_FAILED, EXIT_OK, TrainkitError, UsageError
from trainkit.formats import plural, table
from trainkit.launch.config_request import ConfigRequest
from trainkit.launch.create import create_run, defer_sigint, new_folder, start_run
from trainkit.launch.plan_run import gather, plan_run
from trainkit.plan.launch import LaunchPlan
from trainkit.run.end import AttemptEnd, read_end
from trainkit.run.events import StepRecord, read_events, read_steps
from trainkit.run.files import parse_time, seconds_between, write_json
from trainkit.run.manifest import find_damage, published, remove_all
from trainkit.run.registry import isolated_state
from trainkit.run.rundir import RunDir

DEFAULT_STEPS = 30
MIN_STEPS = 12
"""Minimum number of steps in each run of a drill. With fewer steps, two checkpoints would not fit before the
last third of the run, which a drill does not interrupt."""
NUM_SAVES = 6
REFERENCE, NOT_DETERMINISTIC = "uninterrupted", "not-deterministic"


@as_command(
    "trainkit drill --list",
    "trainkit drill quickstart --nodes 2 --only signal --only rank",
    "trainkit drill quickstart --nodes 2 --only signal --json",
    cls=options.WithTrailingCommand,
)
@options.config_options()
@options.launcher_option
@option(
    "--steps N", f"Number of steps in each run; default: {DEFAULT_STEPS}.", type=click.IntRange(min=MIN_STEPS)
)
@option(
    "--seed N", "Random seed that determines when and where the runs are interrupted.", type=int, default=0
)
@option("--only NAME", "Run only this scenario; repeatable.", type=click.Choice(NAMES), multiple=True)
@option(
    "--list",
    "List the scenarios and whether each is possible here, without starting any runs.",
    name="only_list",
)
@options.json_option("trainkit.capabilities.drill.command:DrillOrList")
def command(
    request: ConfigRequest,
    launcher: str,
    steps: int | None,
    seed: int,
    only: tuple[str, ...],
    only_list: bool,
    as_json: bool,
) -> int:
    """Interrupt short runs of CONFIG in every way that is possible here, and check their losses.

    The losses are compared with the losses of an uninterrupted run.

    All files are written to a new folder, runs/drill-TIME. The exit code is 0 only if all scenarios that were
    tried have passed. Only runs of the built-in trainer are shortened automatically, so limit the number of
    steps of a COMMAND yourself. Ctrl-C cancels the current run.
    """
    workload = options.trailing_workload(launcher)
    if workload.is_command and steps is not None:
        raise UsageError(
            f"--steps {steps} applies to the built-in trainer, not to a COMMAND",
            hint="limit the steps in the COMMAND, for example: -- python train.py --steps 200",
        )
    if workload.reads_input:
        raise UsageError(
            f"drill starts the COMMAND several times, and {workload.argv[0]} reads standard input",
            hint="write the input to a file, and pass the file's path to the COMMAND",
        )
    loaded = request.load_to_plan(workload)
    if loaded.config.logging.pattern == "auto":
        # A script may print rounded losses or another rank's losses, which cannot be compared exactly.
        loaded = with_values(loaded, {"logging.pattern": None}, "trainkit drill")
    facts = gather(loaded, workload)
    plan = plan_run(loaded, facts, workload)
    changes: list[Change] = []
    if not workload.is_command:
        loaded, changes = drill_config(loaded, steps or DEFAULT_STEPS, plan.device)
        plan = plan_run(loaded, facts, workload)
    scenarios = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    reasons = {scenario.name: skip_reason(scenario, loaded.config, plan) for scenario in scenarios}
    if only_list:
        return _list(scenarios, reasons, as_json)
    if all(reasons.values()):
        raise UsageError(
            "none of the selected scenarios can be tried here: "
            + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
            hint="`--list` shows all scenarios",
        )
    return _drill(loaded, plan, scenarios, changes, seed, as_json)


class ScenarioJson(TypedDict):
    """A scenario as printed by `--list`."""

    scenario: str
    description: str
    skip_reason: str | None
    """Why the scenario cannot be tried here; None if it can be tried."""


class ResultJson(TypedDict):
    """The result of one scenario."""

    scenario: str
    state: State
    """`missed` means that the run ended before it could be interrupted, and `skipped` means that the scenario
    cannot be tried with this config."""
    message: str
    """The problem of a failed scenario, the reason why a scenario was skipped, or a note about a passed
    scenario."""
    action: str
    """A description of the interruption."""
    step: int | None
    """The newest step seen before the interruption."""
    restart_s: float | None
    """Seconds from the interruption to the next step, or to the next attempt's start if no steps are
    recorded."""
    restarted_by: str
    """The cause of the restart, such as `requeue` or `resume`."""
    num_recomputed: int | None
    """The number of steps that were computed again after the restart; None if no steps are recorded."""
    curve: str
    """How the losses compare with the losses of the uninterrupted run: `equal`, `differs` or `unknown`."""
    run_dir: str


class DrillJson(TypedDict):
    """The results of a drill, as in drill.json."""

    folder: str
    seed: int
    passed: bool
    """True if all scenarios that were tried have passed."""
    changes: list[Change]
    """Config values that the drill changed."""
    difference_if_not_deterministic: float | None
    """The largest relative difference between the losses of the uninterrupted run and the losses of a run
    without deterministic kernels; None on CPUs."""
    scenarios: list[ResultJson]


DrillOrList = DrillJson | list[ScenarioJson]


def _list(scenarios: Sequence[Scenario], reasons: dict[str, str], as_json: bool) -> int:
    found = [(item.name, item.description, reasons[item.name] or None) for item in scenarios]
    if as_json:
        keys = ("scenario", "description", "skip_reason")
        echo_json([dict(zip(keys, row, strict=True)) for row in found])
    else:
        rows = [[name, text, f"no: {reason}" if reason else "yes"] for name, text, reason in found]
        click.echo(table([["SCENARIO", "DESCRIPTION", "POSSIBLE HERE"], *rows], fit=terminal_width()))
    return EXIT_OK


def _drill(
    loaded: LoadedConfig,
    plan: LaunchPlan,
    scenarios: Sequence[Scenario],
    changes: Sequence[Change],
    seed: int,
    as_json: bool,
) -> int:
    log_line = partial(click.echo, err=True)
    log_line(describe_plan(plan, loaded.config.name))
    for change in changes:
        log_line(f"  drill               {change.sentence}")
    name = datetime.now(timezone.utc).strftime("drill-%Y%m%d-%H%M%S")
    with new_folder(name, None, "`cd`") as (path, _):
        folder = path.absolute()
    interval = None if plan.workload.is_command else loaded.config.checkpoint.every_steps
    drill = Drill(folder, loaded.config, plan, seed, interval, log_line)
    results: list[Result] = []
    try:
        with isolated_state(folder):
            for result in drill.run(scenarios):
                results.append(result)
                log_line(f"{result.scenario}: {sentence(result)}")
    finally:
        log_line(f"the runs are in {folder}; `trainkit status {folder}/NAME` shows one of them")
    value: dict[str, object] = {
        "folder": str(folder),
        "seed": seed,
        "passed": all_passed(results),
        "changes": list(map(asdict, changes)),
        "difference_if_not_deterministic": drill.difference,
        "scenarios": [result.to_dict() for result in results],
    }
    write_json(folder / "drill.json", value)
    echo_result(value, f"{result_table(results, terminal_width())}\n\n{summary(results)}", as_json)
    return EXIT_OK if value["passed"] else EXIT_FAILED


@dataclass
class Drill:
    """A drill of one config, which writes its runs to a separate folder."""

    folder: Path
    config: RunConfig
    plan: LaunchPlan
    seed: int
    interval: int | None
    """Number of steps between two saves, or None for a COMMAND, whose save interval is unknown."""
    log_line: Callable[[str], None]
    reference: list[StepRecord] = field(default_factory=list)
    usual_s: float = 0.0
    """Duration of the uninterrupted run in seconds."""
    difference: float | None = None
    """The `largest_difference` between the losses of the uninterrupted run and the losses of a run without
    deterministic kernels. None on CPUs, where kernels are always deterministic."""
    running: RunDir | None = None

    def run(self, scenarios: Sequence[Scenario]) -> Iterator[Result]:
        """Yield the result of each scenario as soon as it has finished.

        When the generator exits, no run is left running. Raises TrainkitError if the uninterrupted run does
        not finish.
        """
        try:
            self.reference, self.usual_s = self._run_uninterrupted(REFERENCE, self.config)
            for scenario in scenarios:
                reason = skip_reason(scenario, self.config, self.plan)
                yield Result(scenario.name, "skipped", reason) if reason else self._run_scenario(scenario)
            if self.plan.device != "cpu" and not self.plan.workload.is_command:
                self._compare_kernels()
        finally:
            self._kill_running()

    def _compare_kernels(self) -> None:
        """Measure how much nondeterministic kernels change the losses."""
        train = self.config.train.model_copy(update={"deterministic": False})
        config = self.config.model_copy(update={"train": train})
        try:
            steps, _ = self._run_uninterrupted(NOT_DETERMINISTIC, config)
        except TrainkitError as error:  # a failure of this comparison run is unrelated to interruptions
            self.log_line(f"{NOT_DETERMINISTIC}: {error}")
            return
        self.difference = largest_difference(self.reference, steps)
        how = "cannot be compared, because one of the two runs has no loss for some step"
        if self.difference is not None:
            how = f"have relative differences of up to {self.difference:.1e} between the two runs"
        self.log_line(f"{NOT_DETERMINISTIC}: losses {how}")

    def _run_uninterrupted(self, name: str, config: RunConfig) -> tuple[list[StepRecord], float]:
        """Start a run and wait until it ends; return its recorded steps and its duration in seconds."""
        run, watch = self._start(name, config, float("inf"))
        watch.until(lambda: False)
        end = watch.end()
        if end.state != "finished":
            reason = end.reason or "its supervisor died"
            failure = f"; {end.verdict.line}" if end.verdict else ""
            raise TrainkitError(
                f"the uninterrupted run did not finish: {reason}{failure}",
                hint=f"`trainkit logs {run.quoted}` shows the output of the run",
            )
        if run.attempt_numbers() != [1]:
            first = read_end(run.attempt(1)) or AttemptEnd()
            raise TrainkitError(
                f"the uninterrupted run was unexpectedly interrupted: {first.reason}",
                hint="start the drill again: all other runs are compared with the uninterrupted run",
            )
        self.running = None
        steps = computed_steps(run)
        if again := num_recomputed(steps):
            raise TrainkitError(
                f"{run.metrics_file} records {plural(again, 'step')} twice, although the run was not "
                f"interrupted",
                hint="change the COMMAND so that it records each step once",
            )
        started = next(read_events(run, "started"))
        duration_s = seconds_between(started.time, parse_time(end.time)) or 0.0
        last = plural(steps[-1].step, "step") if steps else "no steps in metrics.jsonl"
        self.log_line(f"{name}: {last}, {duration_s:.1f} s")
        remove_all(run.checkpoints_dir)  # for a large model, the checkpoints of all runs could fill the disk
        return steps, duration_s

    def _run_scenario(self, scenario: Scenario) -> Result:
        # The run's own watchdog kills hanging ranks before `patience_s` has passed.
        patience_s = 2 * self.config.requeue.hang_min_s + 3 * self.usual_s
        run, watch = self._start(scenario.name, self.config, patience_s)
        plan = self.plan.at(self.plan.fewest_nodes)  # use only ranks that exist at every node count
        num_steps = self.reference[-1].step if self.reference else None
        target = choose_target(scenario, self.seed, num_steps, self.interval, plan.world_size, plan.num_nodes)
        where = "" if target.step is None else f", at step {target.step} or later"
        self.log_line(f"{scenario.name}: {scenario.description}{where}")
        injector = FaultInjector(run) if plan.is_here else SlurmFaultInjector(run)
        result = ScenarioRunner(scenario, target, run, injector, watch, self.usual_s).run()
        if result.refused:
            self._kill_running()
        self.running = None
        found = ((item, find_damage(item)) for item in published(run.checkpoints_dir))
        damages = [f"{checkpoint.path.name}: {damage}" for checkpoint, damage in found if damage]
        outcome = RunOutcome(watch.end(), computed_steps(run), list(read_events(run)), damages, str(run.path))
        tolerance = SIZES_TOLERANCE if self.plan.sizes else 0.0
        result = evaluate(
            scenario, result, outcome, self.reference, self.interval, self.config.requeue.on, tolerance
        )
        if result.state in ("passed", "skipped"):
            remove_all(run.checkpoints_dir)
        return result

    def _start(self, name: str, config: RunConfig, patience_s: float) -> tuple[RunDir, RunWatch]:
        with defer_sigint():
            created = create_run(config, self.plan, ["trainkit", *sys.argv[1:]], self.folder / name)
            if name == REFERENCE:
                print_created(created)
            start_run(created.run, created.job, config, self.plan, "submit")
            self.running = run = created.run
        # on Slurm, poll less often, because the run folder is on a shared disk
        poll_s = 0.002 if self.plan.is_here else 0.02
        return run, RunWatch(run, poll_s, patience_s, lambda text: self.log_line(f"{name}: {text}"))

    def _kill_running(self) -> None:
        """Kill the current run after an error or Ctrl-C."""
        if self.running is None:
            return
        run, self.running = self.running, None
        if kill_job(run):
            self.log_line(f"cancelled {run.shown}")


def computed_steps(run: RunDir) -> list[StepRecord]:
    """Return the steps of a run that have a loss, in the order of computation."""
    return [record for record in read_steps(run) if "loss" in record.values]


def drill_config(loaded: LoadedConfig, num_steps: int, device: str) -> tuple[LoadedConfig, list[Change]]:
    """Return the config for a drill whose runs have `num_steps` steps.

    The model, the data and the layout remain unchanged.

    `device` is the device of the launch plan, ``cpu`` or ``cuda``.
    """
    values: Values = {
        **short_training(loaded.config, num_steps, "drill"),
        "checkpoint.every_steps": (num_steps // NUM_SAVES, "the runs of a drill have only a few steps"),
        "checkpoint.every_minutes": (None, "a drill needs to know when checkpoints are saved"),
    }
    if device != "cpu":
        values["train.deterministic"] = True, "makes repeated runs on GPUs bit-identical"
    return with_changes(loaded, values, "trainkit drill")
