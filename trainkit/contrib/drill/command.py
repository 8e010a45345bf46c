"""``trainkit drill``: a fire drill."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trainkit.cli.following import print_copied
from trainkit.cli.help import examples
from trainkit.cli.options import (
    ConfigRequest,
    WithTrailingCommand,
    config_options,
    json_option,
    launcher_option,
    trailing_workload,
)
from trainkit.config import LoadedConfig
from trainkit.config.load import Change
from trainkit.contrib.drill.result import Result, all_passed, result_table, summary
from trainkit.contrib.drill.run_drill import (
    DEFAULT_STEPS,
    MIN_STEPS,
    REFERENCE,
    Drill,
    drill_config,
    make_folder,
)
from trainkit.contrib.drill.scenarios import NAMES, Scenario, select, skip_reason
from trainkit.errors import EXIT_FAILED, EXIT_OK, UsageError
from trainkit.formats import table
from trainkit.plan.launch import LaunchPlan, describe_plan
from trainkit.run.files import write_json
from trainkit.run.registry import isolated_state
from trainkit.run.rundir import RunDir
from trainkit.submit.create import create_run, start_run
from trainkit.submit.plan_run import gather, plan_run


@click.command(
    cls=WithTrailingCommand,
    epilog=examples(
        "trainkit drill --list",
        "trainkit drill quickstart --nodes 2 --only signal --only rank",
        "trainkit drill quickstart --nodes 2 --only signal --json",
    ),
)
@config_options
@launcher_option
@click.option(
    "--steps",
    type=click.IntRange(min=MIN_STEPS),
    metavar="N",
    help=f"Steps of each run; default: {DEFAULT_STEPS}.",
)
@click.option("--seed", type=int, default=0, metavar="N", help="Seed for choosing times and targets.")
@click.option(
    "--only",
    type=click.Choice(NAMES),
    multiple=True,
    metavar="NAME",
    help="Run only this scenario; repeatable.",
)
@click.option(
    "--list", "only_list", is_flag=True, help="List the scenarios and which are possible here; run nothing."
)
@json_option
def command(
    request: ConfigRequest,
    launcher: str,
    steps: int | None,
    seed: int,
    only: tuple[str, ...],
    only_list: bool,
    as_json: bool,
) -> int:
    """Interrupt short runs of CONFIG in every way possible here, and compare their losses with those of an
    uninterrupted run.

    All files are written to a new folder, runs/drill-TIME. The exit code is 0 only if every scenario that was
    tried passed. Only runs of the built-in trainer are shortened: limit the steps of a COMMAND yourself.
    Ctrl-C cancels the current run.
    """
    workload = trailing_workload(launcher)
    if workload.is_command and steps is not None:
        raise UsageError(
            f"--steps {steps} applies to the built-in trainer, not to a COMMAND",
            hint="pass it to the COMMAND, as in: -- python train.py --steps 200",
        )
    loaded = request.load_to_plan(workload)
    facts = gather(loaded, workload)
    plan = plan_run(loaded, facts, workload)
    changes: list[Change] = []
    if not workload.is_command:
        loaded, changes = drill_config(loaded, steps or DEFAULT_STEPS, plan.device)
        plan = plan_run(loaded, facts, workload)
    scenarios = select(only)
    reasons = {scenario.name: skip_reason(scenario, loaded.config, plan) for scenario in scenarios}
    if only_list:
        return _list(scenarios, reasons, as_json)
    if all(reasons.values()):
        raise UsageError(
            "none of these scenarios can be tried here: "
            + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
            hint="`--list` shows all scenarios",
        )
    return _drill(loaded, plan, scenarios, changes, seed, as_json)


def _list(scenarios: Sequence[Scenario], reasons: dict[str, str], as_json: bool) -> int:

    if as_json:
        value = [
            {
                "scenario": item.name,
                "description": item.description,
                "skip_reason": reasons[item.name] or None,
            }
            for item in scenarios
        ]
        click.echo(json.dumps(value, ensure_ascii=False))
        return EXIT_OK
    rows = [
        [item.name, item.description, f"no: {reasons[item.name]}" if reasons[item.name] else "yes"]
        for item in scenarios
    ]
    click.echo(table([["SCENARIO", "DESCRIPTION", "POSSIBLE HERE"], *rows]))
    return EXIT_OK


def _drill(
    loaded: LoadedConfig,
    plan: LaunchPlan,
    scenarios: Sequence[Scenario],
    changes: Sequence[Change],
    seed: int,
    as_json: bool,
) -> int:

    def log_line(text: str) -> None:
        click.echo(text, err=True)

    def start(folder: Path) -> RunDir:
        created = create_run(loaded.config, plan, ["trainkit", *sys.argv[1:]], folder)
        if folder.name == REFERENCE:
            print_copied(created.code)
        start_run(created.run, loaded.config, plan, "submit")
        return created.run

    log_line(describe_plan(plan, loaded.config.name))
    for change in changes:
        log_line(f"  drill               {change.sentence}")
    folder = make_folder()
    interval = loaded.config.checkpoint.every_steps if plan.workload.knows_run else None
    drill = Drill(folder, loaded.config, plan, seed, interval, start, log_line)
    results: list[Result] = []
    try:
        with isolated_state(folder):
            for result in drill.run(scenarios):
                results.append(result)
                log_line(f"{result.scenario}: {result.sentence}")
    finally:
        log_line(f"the runs are in {folder}; `trainkit status {folder}/NAME` shows one")
    value: dict[str, Any] = {
        "folder": str(folder),
        "seed": seed,
        "passed": all_passed(results),
        "changes": list(map(asdict, changes)),
        "scenarios": [result.to_dict() for result in results],
    }
    write_json(folder / "drill.json", value)
    if as_json:
        click.echo(json.dumps(value, ensure_ascii=False))
    else:
        click.echo(f"{result_table(results)}\n\n{summary(results)}")
    return EXIT_OK if value["passed"] else EXIT_FAILED
